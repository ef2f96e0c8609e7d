//! Rows read by NIXL, with the real library.

use std::io::{Read, Write};
use std::process::Command;

use corella_cluster::transport::{
    Frame, Hello, LoadFailure, LoadStatus, PageRun, PathFrame, PathName, PathSet, ReceiverConfig,
    SendStatus, Trailer,
};
use corella_test::wait_until;
use xxhash_rust::xxh3::xxh3_64;

use crate::proxy::Proxy;
use crate::transport::fixture::{
    ARITHMETIC, DECODE, FAILED_CONNECT_TIME, MODEL, PREFILL, ReceivingNode, content, key, page_ids,
    wait, wait_for_bytes, wait_for_status,
};
use crate::transport::nixl_process::{
    NUM_PAGES, NUM_ROWS, SendingProcess, agent, key_of, large_geometry, sending_node, table,
};
use crate::transport::raw_peer::{RawListener, RawPeer, run};

const DONE: LoadStatus = LoadStatus::Done { num_rows: NUM_ROWS };
const SESSION_BYTES: u64 = (NUM_PAGES * 16 * 4 * 2048) as u64;

fn receiving_node(change: impl FnOnce(&mut ReceiverConfig)) -> ReceivingNode {
    let agent = agent(DECODE);
    ReceivingNode::configured(large_geometry(), |config| {
        config.paths.push(agent);
        config.connections_per_peer = 1;
        change(config);
    })
}

fn num_nixl_bytes(node: &ReceivingNode) -> u64 {
    node.receiver.num_bytes_by(PathName::new("NIXL"))
}

#[test]
fn rows_come_from_another_process_as_they_are() {
    let process = SendingProcess::start(PREFILL);
    let other = receiving_node(|_| {});
    let everywhere = page_ids(0..2 * NUM_PAGES);
    other.fill(&everywhere, 0xcc);
    let to = page_ids((0..NUM_PAGES).map(|page| 2 * page));
    let load = other.load(&key(1), process.address, 32, NUM_ROWS, &to);
    assert_eq!(wait(&load), DONE);
    other.assert_holds(&key(1), &to, 2);
    let is_other = |page: &corella_core::PageId| !to[2..].contains(page);
    let others: Vec<_> = everywhere.into_iter().filter(is_other).collect();
    other.assert_filled(&others, 0xcc);
    let num_nixl_bytes = num_nixl_bytes(&other);
    assert_eq!(
        num_nixl_bytes,
        SESSION_BYTES / u64::from(NUM_PAGES) * u64::from(NUM_PAGES - 2)
    );
}

/// NIXL sees the next incarnation of a sender as another peer. The receiver stays the same.
#[test]
fn a_killed_sender_fails_its_load_and_its_next_life_is_read() {
    let other = receiving_node(|config| config.connections_per_peer = 2);
    for life in 1..4 {
        let mut process = SendingProcess::start_with_layers(life, 3);
        let key = key_of(1, life);
        let load = other.load(&key, process.address, 0, NUM_ROWS, &table());
        wait_for_bytes(&load);
        process.kill();
        let status = wait(&load);
        assert_eq!(status, LoadStatus::Failed(LoadFailure::ConnectionLost));
        assert!(num_nixl_bytes(&other) > 0);

        let process = SendingProcess::start(life + 10);
        let key = key_of(1, life + 10);
        let num_before = num_nixl_bytes(&other);
        let load = other.load(&key, process.address, 0, NUM_ROWS, &table());
        assert_eq!(wait(&load), DONE);
        other.assert_holds(&key, &table(), 0);
        assert_eq!(num_nixl_bytes(&other) - num_before, SESSION_BYTES);
        other.fill(&table(), 0);
    }
}

/// Over TCP a read of a stopped process blocks, and continues with the process.
#[test]
#[ignore = "run by the next test, with other networks"]
fn a_read_that_ends_after_its_load_changes_no_page() {
    let process = SendingProcess::start(PREFILL);
    let proxy = Proxy::new(process.address);
    proxy.allow_all();
    let other = receiving_node(|_| {});
    // This load makes the connection: it has only the last page.
    let to = page_ids(NUM_PAGES..2 * NUM_PAGES);
    let first_row = (NUM_PAGES - 1) * 16;
    let load = other.load(&key(1), proxy.address, first_row, NUM_ROWS, &to);
    assert_eq!(wait(&load), DONE);
    // The rows' regions are on their way when the process is stopped, and reach the receiver afterwards.
    proxy.hold();
    let load = other.load(&key(1), proxy.address, 0, NUM_ROWS, &table());
    wait_until("the regions of a chunk are held", || proxy.num_held() > 0);
    let held = process.hold();
    proxy.allow_all();
    wait_until("the receiver reads", || {
        load.account().first_byte_at.is_some()
    });
    load.cancel();
    other.fill(&table(), 0xcc);
    drop(held);
    // The same connection has finished the earlier reads.
    let next = other.load(&key(1), proxy.address, 0, NUM_ROWS, &to);
    assert_eq!(wait(&next), DONE);
    other.assert_holds(&key(1), &to, 0);
    other.assert_filled(&table(), 0xcc);
}

/// UCX reads its variables when a process starts.
#[test]
fn tcp_does_as_well() {
    for name in [
        "transport::nixl::rows_come_from_another_process_as_they_are",
        "transport::nixl::a_killed_sender_fails_its_load_and_its_next_life_is_read",
        "transport::nixl::a_read_that_ends_after_its_load_changes_no_page",
    ] {
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--include-ignored", "--nocapture"])
            .env("UCX_TLS", "tcp")
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success() && text.contains("1 passed"),
            "{name}: {}\n{text}{}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
    }
}

#[test]
fn a_cancelled_load_changes_no_page_after_that() {
    let node = sending_node(PREFILL, |_| {});
    let other = receiving_node(|_| {});
    // The last layer never comes, so rows arrive and the load does not end.
    let status = node.store_layers(&key(1), &table(), NUM_ROWS, 3);
    let further = page_ids(NUM_PAGES..2 * NUM_PAGES);
    node.export_whole(&key(2), &further, NUM_ROWS);
    let load = other.load(&key(1), node.address, 0, NUM_ROWS, &table());
    wait_for_bytes(&load);
    load.cancel();
    other.fill(&table(), 0x55);
    let next = other.load(&key(2), node.address, 0, NUM_ROWS, &further);
    assert_eq!(wait(&next), DONE);
    other.assert_filled(&table(), 0x55);
    other.assert_holds(&key(2), &further, 0);
    wait_for_status(&status, SendStatus::Stopped);
}

/// The sender's pages may be reused as soon as `delete` has returned. Bytes read afterwards belong to no load.
#[test]
fn a_deleted_session_fails_its_load_and_no_other() {
    let node = sending_node(PREFILL, |_| {});
    let other = receiving_node(|_| {});
    // The last layer never comes, so rows arrive and the load does not end.
    node.store_layers(&key(1), &table(), NUM_ROWS, 3);
    let further = page_ids(NUM_PAGES..2 * NUM_PAGES);
    node.export_whole(&key(2), &further, NUM_ROWS);
    let load = other.load(&key(1), node.address, 0, NUM_ROWS, &table());
    let beside = other.load(&key(2), node.address, 0, NUM_ROWS, &further);
    wait_for_bytes(&load);
    node.sender.delete(&key(1));
    for page in table() {
        for layer in 0..node.num_layers() {
            // SAFETY: the session is over. A later read fails its checksum.
            unsafe { node.pages.fill(layer, page, |i| i as u8) };
        }
    }
    let status = wait(&load);
    assert!(matches!(status, LoadStatus::Failed(_)), "{status:?}");
    assert_eq!(wait(&beside), DONE);
    other.assert_holds(&key(2), &further, 0);
}

#[test]
fn without_nixl_at_one_end_rows_go_over_the_socket() {
    let node = sending_node(PREFILL, |_| {});
    let without = sending_node(PREFILL, |config| drop(config.paths.pop()));
    let (other, other_without) = (
        receiving_node(|_| {}),
        receiving_node(|config| drop(config.paths.pop())),
    );
    for (node, other) in [(&node, &other_without), (&without, &other)] {
        node.export_whole(&key(1), &table(), NUM_ROWS);
        let load = other.load(&key(1), node.address, 0, NUM_ROWS, &table());
        assert_eq!(wait(&load), DONE);
        other.assert_holds(&key(1), &table(), 0);
        assert_eq!(num_nixl_bytes(other), 0);
    }
    node.export_whole(&key(2), &table(), NUM_ROWS);
    let load = other.load(&key(2), node.address, 0, NUM_ROWS, &table());
    assert_eq!(wait(&load), DONE);
    assert_eq!(num_nixl_bytes(&other), SESSION_BYTES);
}

/// Returns a description of this many bytes, with a word at address 16.
fn offer(num_bytes: u32) -> Frame {
    let mut data = [0; 32];
    (data[0], data[8]) = (16, 1);
    Frame::Path(PathFrame {
        name: PathName::new("NIXL"),
        data,
        num_bytes,
    })
}

fn named(path: &str) -> Frame {
    Frame::Path(PathFrame::named(PathName::new(path)))
}

fn hello_with_nixl(incarnation: u64) -> Hello {
    Hello {
        paths: PathSet::ALL,
        ..Hello::new(incarnation, MODEL, ARITHMETIC, &large_geometry())
    }
}

/// A sender with an unusable NIXL sends its rows over the socket.
#[test]
fn a_description_that_nixl_cannot_read_is_refused_and_rows_come_over_the_socket() {
    let listener = RawListener::new();
    let other = receiving_node(|_| {});
    let to = page_ids([3]);
    let load = other.load(&key(1), listener.address, 0, 16, &to);
    let mut peer = listener.accept_as(hello_with_nixl(PREFILL));
    peer.send(&offer(64));
    peer.send(&Frame::Received { load_id: 7 });
    assert_eq!(peer.receive(), Some(named("TCP")));
    let Some(Frame::Load(frame)) = peer.receive() else {
        panic!("no load");
    };
    for layer in 0..4 {
        let page: Vec<u8> = (0..32 << 10).map(content(&key(1), layer, 0)).collect();
        let run: PageRun = run(frame.load_id, layer, 0, 16);
        peer.send_run(run, &page, xxh3_64(&page));
    }
    let load_id = frame.load_id;
    peer.send(&Frame::Complete {
        load_id,
        num_rows: 16,
    });
    assert_eq!(wait(&load), LoadStatus::Done { num_rows: 16 });
    other.assert_holds(&key(1), &to, 0);
}

#[test]
fn a_description_without_end_is_not_read() {
    let listener = RawListener::new();
    let other = receiving_node(|config| {
        config.num_connect_attempts = 1;
        config.connect_timeout = FAILED_CONNECT_TIME;
    });
    let load = other.load(&key(1), listener.address, 0, 16, &page_ids([3]));
    let mut peer = listener.accept_as(hello_with_nixl(PREFILL));
    peer.send(&offer((1 << 20) + 1));
    let status = wait(&load);
    let LoadStatus::Failed(LoadFailure::Unreachable(reason)) = status else {
        panic!("{status:?}");
    };
    assert!(reason.contains("no description"), "{reason}");
}

#[test]
fn a_receiver_that_does_not_answer_about_nixl_is_refused() {
    let node = sending_node(PREFILL, |_| {});
    let mut peer = RawPeer::connect_as(hello_with_nixl(DECODE), node.address);
    let Some(Frame::Path(PathFrame { num_bytes, .. })) = peer.receive() else {
        panic!("no description");
    };
    assert!((1..1 << 20).contains(&num_bytes));
    peer.load(1, &key(1), 16, 1 << 20);
    wait_until("the sender closes the connection", || {
        node.sender.stats().num_refused_connections == 1
    });
}

/// A sender passes on another sender's metadata, and then names regions that the other sender has not offered. The load
/// fails, and no memory is touched.
#[test]
fn places_that_were_not_offered_are_not_read() {
    let node = sending_node(PREFILL, |_| {});
    let mut near = RawPeer::connect_as(hello_with_nixl(DECODE), node.address);
    let agent = near.receive().unwrap();
    let Frame::Path(PathFrame { num_bytes, .. }) = agent else {
        panic!("{agent:?}");
    };
    let mut metadata = vec![0; num_bytes as usize];
    near.stream.read_exact(&mut metadata).unwrap();

    let listener = RawListener::new();
    let other = receiving_node(|_| {});
    let everywhere = page_ids(0..2 * NUM_PAGES);
    other.fill(&everywhere, 0xcc);
    let load = other.load(&key(1), listener.address, 0, 16, &page_ids([3]));
    let mut peer = listener.accept_as(hello_with_nixl(PREFILL));
    peer.send(&agent);
    peer.stream.write_all(&metadata).unwrap();
    assert_eq!(peer.receive(), Some(named("NIXL")));
    let Some(Frame::Load(frame)) = peer.receive() else {
        panic!("no load");
    };
    let run = PageRun {
        num_regions: 1,
        ..run(frame.load_id, 0, 0, 16)
    };
    peer.send(&Frame::Data(run));
    for number in [16, 32 << 10] {
        peer.stream.write_all(&u64::to_le_bytes(number)).unwrap();
    }
    peer.stream
        .write_all(&Trailer::Whole { checksum: 1 }.encode())
        .unwrap();
    let status = wait(&load);
    assert_eq!(status, LoadStatus::Failed(LoadFailure::ConnectionLost));
    other.assert_filled(&everywhere, 0xcc);

    node.export_whole(&key(1), &table(), NUM_ROWS);
    let load = other.load(&key(1), node.address, 0, NUM_ROWS, &table());
    assert_eq!(wait(&load), DONE);
    other.assert_holds(&key(1), &table(), 0);
    assert_eq!(num_nixl_bytes(&other), SESSION_BYTES);
}
