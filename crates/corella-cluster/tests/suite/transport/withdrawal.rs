//! Either end takes its pages back while rows travel.

use std::time::Instant;

use corella_cluster::transport::{LoadFailure, LoadStatus, Refusal, SendStatus};
use corella_model::KvGeometry;
use corella_test::wait_until;

use crate::proxy::Proxy;
use crate::transport::fixture::{
    READ_TIMEOUT, ReceivingNode, SendingNode, geometry, key, page_ids, wait, wait_for_bytes,
    wait_for_status,
};

const NUM_PAGES: u32 = 64;
const NUM_ROWS: u32 = NUM_PAGES * 16;

/// One connection through a proxy, which limits the bytes from the sender.
struct Pair {
    node: SendingNode,
    other: ReceivingNode,
    proxy: Proxy,
}

/// A session has 8 MiB: more than is in flight at a time.
fn large_geometry() -> KvGeometry {
    KvGeometry {
        num_kv_heads: 8,
        ..geometry(4, 16, 2 * NUM_PAGES)
    }
}

impl Pair {
    fn new() -> Self {
        let geometry = large_geometry();
        let node = SendingNode::new(geometry.clone());
        let other = ReceivingNode::configured(geometry, |config| config.connections_per_peer = 1);
        let proxy = Proxy::new(node.address);
        Self { node, other, proxy }
    }
}

#[test]
fn nothing_is_written_after_a_cancelled_load() {
    let Pair { node, other, proxy } = Pair::new();
    let (table, further) = (page_ids(0..NUM_PAGES), page_ids(NUM_PAGES..2 * NUM_PAGES));
    let status = node.export_whole(&key(1), &table, NUM_ROWS);
    node.export_whole(&key(2), &further, NUM_ROWS);
    let load = other.load(&key(1), proxy.address, 0, NUM_ROWS, &table);
    // The greeting, a frame of 64 KiB, and half of another.
    proxy.allow(64 + 64 + (64 << 10) + 16 + 64 + (32 << 10));
    wait_for_bytes(&load);
    wait_until("the reader is in the middle of a frame", || {
        // SAFETY: the bytes read may be torn, and the test compares one page that has arrived whole.
        let bytes = unsafe { other.pages.bytes(1, table[0]) };
        bytes
            .iter()
            .enumerate()
            .all(|(i, &byte)| byte == crate::transport::fixture::content(&key(1), 1, 0)(i))
    });
    load.cancel();
    assert_eq!(load.status(), LoadStatus::Failed(LoadFailure::Cancelled));
    // From now on the pages belong to another user.
    other.fill(&table, 0x55);
    let next = other.load(&key(2), proxy.address, 0, NUM_ROWS, &further);
    proxy.allow_all();
    // The next load's frames follow those of the cancelled load on the same connection.
    assert_eq!(wait(&next), LoadStatus::Done { num_rows: NUM_ROWS });
    other.assert_filled(&table, 0x55);
    other.assert_holds(&key(2), &further, 0);
    wait_for_status(&status, SendStatus::Stopped);
    // A load that has ended keeps its status when it is cancelled.
    load.cancel();
    next.cancel();
    assert_eq!(next.status(), LoadStatus::Done { num_rows: NUM_ROWS });
    // The session is still stored, so it may be requested again.
    let again = other.load(&key(1), proxy.address, 0, NUM_ROWS, &table);
    assert_eq!(wait(&again), LoadStatus::Done { num_rows: NUM_ROWS });
    other.assert_holds(&key(1), &table, 0);
}

/// The sender's pages are overwritten as soon as `delete` has returned, in the middle of a frame. If overwritten bytes
/// went out, their checksum would end the connection and the other session with it.
#[test]
fn nothing_is_read_after_a_deleted_session() {
    let Pair { node, other, proxy } = Pair::new();
    let (table, further) = (page_ids(0..NUM_PAGES), page_ids(NUM_PAGES..2 * NUM_PAGES));
    let status = node.export_whole(&key(1), &table, NUM_ROWS);
    node.export_whole(&key(2), &further, NUM_ROWS);
    let load = other.load(&key(1), proxy.address, 0, NUM_ROWS, &table);
    let beside = other.load(&key(2), proxy.address, 0, NUM_ROWS, &further);
    proxy.allow(64 + 64 + (64 << 10) + 16);
    wait_for_bytes(&load);
    node.sender.delete(&key(1));
    wait_for_status(&status, SendStatus::Over);
    for &page in &table {
        for layer in 0..4 {
            // SAFETY: the pages are not read any more.
            unsafe { node.pages.fill(layer, page, |i| i as u8) };
        }
    }
    proxy.allow_all();
    assert_eq!(
        wait(&load),
        LoadStatus::Failed(LoadFailure::Refused(Refusal::Gone))
    );
    assert_eq!(wait(&beside), LoadStatus::Done { num_rows: NUM_ROWS });
    other.assert_holds(&key(2), &further, 0);
    assert_eq!(other.receiver.stats().num_corrupt_frames, 0);
    assert_eq!(node.sender.stats().num_connections, 1);
}

/// Loads are cancelled at every moment of their lives. A load has one end, which is the first one. Every second session
/// has all its rows but is never finished, so that only the cancel can end its load.
#[test]
fn a_cancel_races_with_everything() {
    let geometry = geometry(2, 16, 64);
    let node = SendingNode::new(geometry.clone());
    let other = ReceivingNode::new(geometry.clone());
    let (from, to) = (page_ids(0..32), page_ids(32..64));
    let session_bytes = 2 * 32 * geometry.layer_bytes() as u64;
    for round in 0..200u32 {
        let key = key(round.into());
        node.store_layers(&key, &from, 512, 2);
        let may_end = round.is_multiple_of(2);
        if may_end {
            assert!(node.sender.finish(&key));
        }
        let deadline = Instant::now() + READ_TIMEOUT;
        let load = other.load_until(&key, node.address, 0, 512, &to, deadline);
        // From no byte to all rows. The deadline ends the loop if they do not come.
        let num_bytes = session_bytes * u64::from(round / 2) / 99;
        while load.account().num_bytes < num_bytes && !load.status().is_over() {
            std::thread::yield_now();
        }
        load.cancel();
        match wait(&load) {
            LoadStatus::Done { num_rows: 512 } => {
                assert!(may_end, "round {round}");
                other.assert_holds(&key, &to, 0);
            }
            status => assert_eq!(status, LoadStatus::Failed(LoadFailure::Cancelled)),
        }
        other.fill(&to, 0x77);
        other.assert_filled(&to, 0x77);
        node.sender.delete(&key);
    }
    wait_until("both are idle", || {
        node.sender.stats().num_exported + other.receiver.stats().num_loads == 0
    });
    // Discarded bytes do not count as damaged, which would end the connection.
    assert_eq!(other.receiver.stats().num_corrupt_frames, 0);
    assert_eq!(node.sender.stats().num_refused_connections, 0);
}

/// Either end may vanish without a message.
#[test]
fn dropping_an_end_ends_its_sessions() {
    let Pair { node, other, proxy } = Pair::new();
    let table = page_ids(0..NUM_PAGES);
    let status = node.export_whole(&key(1), &table, NUM_ROWS);
    let load = other.load(&key(1), proxy.address, 0, NUM_ROWS, &table);
    proxy.allow(256 << 10);
    wait_for_bytes(&load);
    let ReceivingNode {
        receiver,
        pages: _pages,
    } = other;
    drop(receiver);
    assert_eq!(load.status(), LoadStatus::Failed(LoadFailure::Cancelled));
    wait_for_status(&status, SendStatus::Stopped);
    wait_until("its connection is closed", || {
        node.sender.stats().num_connections == 0
    });

    let other = ReceivingNode::new(large_geometry());
    proxy.allow(256 << 10);
    let load = other.load(&key(1), proxy.address, 0, NUM_ROWS, &table);
    wait_for_bytes(&load);
    drop(node);
    wait_for_status(&status, SendStatus::Over);
    proxy.allow_all();
    assert!(matches!(wait(&load), LoadStatus::Failed(_)));
}
