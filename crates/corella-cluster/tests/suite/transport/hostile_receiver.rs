//! Receivers that violate the protocol.

use std::io::Write;
use std::time::Duration;

use corella_cluster::transport::{
    Frame, Hello, Incompatibility, LoadStatus, PageRun, Refusal, SendStatus, Trailer,
};
use corella_test::wait_until;
use xxhash_rust::xxh3::xxh3_64;

use crate::transport::fixture::{
    ARITHMETIC, DECODE, MODEL, ReceivingNode, SendingNode, content, geometry, key, page_ids, wait,
    wait_for_status,
};
use crate::transport::raw_peer::{RawPeer, run};

#[test]
fn whoever_does_not_speak_frames_loses_the_connection() {
    let geometry = geometry(2, 16, 8);
    let node = SendingNode::new(geometry.clone());
    let greeting = Frame::Hello(Hello::new(DECODE, MODEL, ARITHMETIC, &geometry)).encode();
    let mut wrong_magic = greeting;
    wrong_magic[2] ^= 1;
    let credit = Frame::Credit {
        load_id: 1,
        num_bytes: 1,
    };
    let first_words: [&[u8]; 4] = [
        b"GET / HTTP/1.1\r\nHost: corella\r\nAccept: */*\r\nUser-Agent: a browser\r\n\r\n",
        &[0xff; 4096],
        &wrong_magic,
        &credit.encode(),
    ];
    for (index, bytes) in first_words.into_iter().enumerate() {
        let mut peer = RawPeer::connect_silently(node.address);
        peer.stream.write_all(bytes).unwrap();
        assert_eq!(peer.receive(), None);
        wait_until("it is counted", || {
            node.sender.stats().num_refused_connections == index as u64 + 1
        });
    }
    // After the greeting.
    let data = Frame::Data(run(1, 0, 0, 16)).encode();
    let load_twice = {
        let mut peer = RawPeer::connect(node.address, &geometry);
        peer.load(9, &key(1), 32, 1 << 20);
        peer.load(9, &key(2), 32, 1 << 20);
        assert_eq!(peer.receive(), None);
        5
    };
    for (index, bytes) in [&[0x42; 64][..], &data, &greeting].into_iter().enumerate() {
        let mut peer = RawPeer::connect(node.address, &geometry);
        peer.stream.write_all(bytes).unwrap();
        assert_eq!(peer.receive(), None);
        wait_until("it is counted", || {
            node.sender.stats().num_refused_connections == index as u64 + 1 + load_twice
        });
    }
    wait_until("nothing is left", || {
        let stats = node.sender.stats();
        stats.num_connections + stats.num_waiting_loads == 0
    });
}

/// The peer gets this node's greeting, and its connection ends.
#[test]
fn a_peer_of_another_protocol_version_is_answered() {
    let geometry = geometry(2, 16, 8);
    let node = SendingNode::new(geometry.clone());
    let mut hello = Hello::new(DECODE, MODEL, ARITHMETIC, &geometry);
    hello.protocol_version += 1;
    let mut peer = RawPeer::connect_silently(node.address);
    peer.send(&Frame::Hello(hello.clone()));
    let Some(Frame::Hello(answer)) = peer.receive() else {
        panic!("a greeting");
    };
    let version = answer.protocol_version;
    assert_eq!(version + 1, hello.protocol_version);
    assert_eq!(
        hello.page_form(&answer),
        Err(Incompatibility::Protocol(version))
    );
    assert_eq!(peer.receive(), None);
}

/// Neither the connection's other sessions nor the sender's threads wait for a session without
/// credit. The session gets exactly the bytes that it gives credit for.
#[test]
fn a_session_without_credit_holds_up_no_other() {
    let geometry = geometry(2, 16, 64);
    let layer_bytes = geometry.layer_bytes() as u32;
    let node = SendingNode::new(geometry.clone());
    let tables = [page_ids(0..32), page_ids(32..64)];
    for (uuid, table) in tables.iter().enumerate() {
        node.export_whole(&key(uuid as u128), table, 512);
    }
    let mut peer = RawPeer::connect(node.address, &geometry);
    peer.load(100, &key(0), 512, 3 * layer_bytes + layer_bytes / 2);
    peer.load(101, &key(1), 512, u32::MAX);
    let mut num_pages = [0; 2];
    loop {
        match peer.receive().expect("the connection stays") {
            Frame::Data(run) => {
                let index = run.load_id as usize - 100;
                let (bytes, trailer) = peer.payload(&run, &geometry);
                let checksum = xxh3_64(&bytes);
                assert_eq!(trailer, Trailer::Whole { checksum });
                assert_holds(index as u128, &run, &bytes, layer_bytes as usize);
                num_pages[index] += bytes.len() as u32 / layer_bytes;
            }
            Frame::Complete { load_id, num_rows } => {
                assert_eq!((load_id, num_rows), (101, 512));
                break;
            }
            frame => panic!("{frame:?}"),
        }
    }
    assert_eq!(num_pages, [3, 64]);
    // Half a page's credit is left over.
    peer.send(&Frame::Credit {
        load_id: 100,
        num_bytes: layer_bytes / 2,
    });
    let Some(Frame::Data(run)) = peer.receive() else {
        panic!("one more page");
    };
    assert_eq!(peer.payload(&run, &geometry).0.len(), layer_bytes as usize);
    // Credit for a load that does not exist, and credit that overflows, are harmless.
    for load_id in [7, 100, 100] {
        peer.send(&Frame::Credit {
            load_id,
            num_bytes: u32::MAX,
        });
    }
    let mut num_pages = 4;
    while let Some(Frame::Data(run)) = peer.receive() {
        num_pages += peer.payload(&run, &geometry).0.len() as u32 / layer_bytes;
    }
    assert_eq!(num_pages, 64);
}

fn assert_holds(uuid: u128, run: &PageRun, bytes: &[u8], layer_bytes: usize) {
    let first = run.first_row as usize / 16;
    for (index, page) in bytes.chunks(layer_bytes).enumerate() {
        let content = content(&key(uuid), run.layer, first + index);
        assert!(page.iter().enumerate().all(|(i, &byte)| byte == content(i)));
    }
}

/// The peer asks for many rows and never reads. Its connection ends, and no other peer waits.
#[test]
fn a_receiver_that_stops_reading_is_given_up() {
    let mut geometry = geometry(2, 16, 2048);
    geometry.num_kv_heads = 4;
    let node = SendingNode::configured(geometry.clone(), |config| {
        config.stall_timeout = Duration::from_millis(300);
    });
    let other = ReceivingNode::new(geometry.clone());
    // 64 MiB: more than socket buffers hold.
    let table = page_ids(0..2048);
    let status = node.export_whole(&key(1), &table, 2048 * 16);
    let mut peer = RawPeer::connect(node.address, &geometry);
    peer.load(1, &key(1), 2048 * 16, u32::MAX);
    wait_until("rows are sent", || node.sender.stats().num_bytes_sent > 0);
    let small = page_ids(0..4);
    node.export(&key(2), 64);
    node.make_readable(&key(2), &small, 64);
    let load = other.load(&key(2), node.address, 0, 64, &small);
    assert_eq!(wait(&load), LoadStatus::Done { num_rows: 64 });
    wait_for_status(&status, SendStatus::Stopped);
    // The other peer has a connection.
    wait_until("its connection is closed", || {
        node.sender.stats().num_connections == 1
    });
}

#[test]
fn a_newer_load_takes_the_place_of_an_older_one() {
    let geometry = geometry(1, 16, 8);
    let node = SendingNode::new(geometry.clone());
    let mut peer = RawPeer::connect(node.address, &geometry);
    peer.load(1, &key(1), 32, u32::MAX);
    peer.load(2, &key(1), 32, u32::MAX);
    let reason = Refusal::Superseded;
    assert_eq!(peer.receive(), Some(Frame::Failed { load_id: 1, reason }));
    assert_eq!(node.sender.stats().num_waiting_loads, 1);
    let table = page_ids(0..2);
    let status = node.export_whole(&key(1), &table, 32);
    assert!(matches!(peer.receive(), Some(Frame::Data(run)) if run.load_id == 2));
    peer.payload(&run(2, 0, 0, 32), &geometry);
    let num_rows = 32;
    assert_eq!(
        peer.receive(),
        Some(Frame::Complete {
            load_id: 2,
            num_rows
        })
    );
    // The same after rows have gone out.
    peer.load(3, &key(1), 32, u32::MAX);
    // The older load is complete, so it cannot be refused.
    assert_eq!(peer.receive(), Some(Frame::Data(run(3, 0, 0, 32))));
    peer.payload(&run(3, 0, 0, 32), &geometry);
    assert_eq!(
        peer.receive(),
        Some(Frame::Complete {
            load_id: 3,
            num_rows
        })
    );
    peer.send(&Frame::Received { load_id: 3 });
    wait_for_status(&status, SendStatus::Received);
}
