//! Speeds that differ, and everything that has a limit.

use std::time::{Duration, Instant};

use corella_cluster::transport::{
    Frame, LoadFailure, LoadRejection, LoadRequest, LoadStatus, PeerAddress, Refusal, StoreError,
};

use crate::transport::fixture::{
    DECODE, LONG, ReceivingNode, SendingNode, geometry, key, loopback, page_ids, until, wait,
    wait_for_bytes,
};
use crate::transport::proxy::Proxy;
use crate::transport::raw_peer::RawPeer;

/// A decode node behind a link of 1 MB/s, and another beside it.
#[test]
fn a_slow_peer_holds_up_nobody_and_shows_in_its_bandwidth() {
    let geometry = geometry(4, 16, 512);
    let node = SendingNode::new(geometry.clone());
    let slow = ReceivingNode::new(geometry.clone());
    let fast = ReceivingNode::configured(geometry, |config| config.incarnation = DECODE + 1);
    let proxy = Proxy::new(node.address);
    proxy.throttle(1_000_000);
    // 16 MiB.
    let table = page_ids(0..512);
    node.store_whole(&key(1), &table, 8192);
    let mut slow_load = slow.load(&key(1), proxy.address, 0, 8192, &table);
    wait_for_bytes(&mut slow_load);
    let mut fast_key = key(2);
    fast_key.decode_incarnation.0 += 1;
    // The same pages: what they hold for the fast session is the slow one's content.
    node.store(&fast_key, 8192);
    node.make_readable(&fast_key, &table, 8192);
    let mut fast_load = fast.load(&fast_key, node.address, 0, 8192, &table);
    assert_eq!(wait(&mut fast_load), LoadStatus::Done { num_rows: 8192 });
    fast.assert_holds(&key(1), &table, 0);
    assert!(
        slow_load.account().num_bytes < 8 << 20,
        "the slow load is still running"
    );
    until("the slow one is measured", || {
        node.sender.bandwidth_bytes_per_s(DECODE).is_some()
    });
    let bandwidth = |incarnation| node.sender.bandwidth_bytes_per_s(incarnation).unwrap();
    assert!(bandwidth(DECODE) < 3e6, "{}", bandwidth(DECODE));
    assert!(bandwidth(DECODE + 1) > 2.0 * bandwidth(DECODE));
}

/// What is sent in a time is bounded, by all sessions and connections together.
#[test]
fn a_node_sends_no_more_than_its_bandwidth() {
    let geometry = geometry(2, 16, 128);
    let bytes_per_s = 4_000_000;
    let node = SendingNode::configured(geometry.clone(), |config| {
        config.max_bandwidth = Some(bytes_per_s);
    });
    let other = ReceivingNode::new(geometry);
    let started_at = Instant::now();
    let tables: Vec<_> = (0..4).map(|i| page_ids(32 * i..32 * (i + 1))).collect();
    let mut loads = Vec::new();
    for (uuid, table) in tables.iter().enumerate() {
        let key = key(uuid as u128);
        node.store_whole(&key, table, 512);
        loads.push(other.load(&key, node.address, 0, 512, table));
    }
    for load in &mut loads {
        assert_eq!(wait(load), LoadStatus::Done { num_rows: 512 });
    }
    let num_bytes = 4.0 * 64.0 * 8192.0;
    assert_eq!(node.sender.stats().num_bytes_sent as f64, num_bytes);
    // 20 ms' worth may go at once.
    let least = num_bytes / bytes_per_s as f64 - 0.02;
    assert!(
        started_at.elapsed().as_secs_f64() >= least,
        "{:?}",
        started_at.elapsed()
    );
}

/// Chunk by chunk: whoever is asked for later does not wait for the end of who was first.
#[test]
fn sessions_of_a_connection_take_turns() {
    let geometry = geometry(1, 16, 128);
    let layer_bytes = geometry.layer_bytes();
    let node = SendingNode::configured(geometry.clone(), |config| {
        config.chunk_bytes = 2 * layer_bytes;
        // A chunk takes 8 ms, so that all have credit before the first is through.
        config.max_bandwidth = Some(2_000_000);
    });
    let mut peer = RawPeer::connect(node.address, &geometry);
    for uuid in 0..3 {
        node.store_whole(&key(uuid.into()), &page_ids(40 * uuid..40 * uuid + 40), 640);
        // Nothing is sent before all have asked.
        peer.load(uuid.into(), &key(uuid.into()), 640, 0);
    }
    peer.load(9, &key(9), 16, 0);
    until("all have asked", || {
        node.sender.stats().num_waiting_loads == 1
    });
    for load_id in 0..3 {
        peer.send(&Frame::Credit {
            load_id,
            num_bytes: u32::MAX,
        });
    }
    let mut order = Vec::new();
    while order.len() < 60 {
        match peer.receive().unwrap() {
            Frame::Data(run) => {
                peer.payload(&run, &geometry);
                order.push(run.load_id);
            }
            frame => assert!(matches!(frame, Frame::Complete { .. }), "{frame:?}"),
        }
    }
    // The first may be ahead by what it sent before the others' credit was there.
    let begin = order.iter().position(|&load_id| load_id == 2).unwrap();
    let end = order.iter().rposition(|&load_id| load_id == 0).unwrap();
    assert!(end - begin > 20, "{order:?}");
    for turns in order[begin..=end].windows(3) {
        let mut turns = turns.to_vec();
        turns.sort_unstable();
        turns.dedup();
        assert!(turns.len() >= 2, "{order:?}");
    }
}

#[test]
fn everything_that_peers_can_fill_has_a_limit() {
    let geometry = geometry(1, 16, 8);
    let node = SendingNode::configured(geometry.clone(), |config| {
        config.max_connections = 2;
        config.max_loads_per_connection = 3;
        config.max_waiting_loads = 4;
        config.max_stored = 2;
    });
    let mut peers = [(); 2].map(|()| RawPeer::connect(node.address, &geometry));
    let mut too_many = RawPeer::connect_silently(node.address);
    assert_eq!(too_many.receive(), None);
    let reason = Refusal::Busy;
    for load_id in 0..4 {
        peers[0].load(load_id, &key(load_id.into()), 16, 0);
    }
    assert_eq!(
        peers[0].receive(),
        Some(Frame::Failed { load_id: 3, reason })
    );
    for load_id in 10..12 {
        peers[1].load(load_id, &key(load_id.into()), 16, 0);
    }
    assert_eq!(
        peers[1].receive(),
        Some(Frame::Failed {
            load_id: 11,
            reason
        })
    );
    // One that ends makes room for another.
    peers[0].send(&Frame::Cancel { load_id: 0 });
    until("it is gone", || node.sender.stats().num_waiting_loads == 3);
    peers[1].load(12, &key(12), 16, 0);
    until("it waits", || node.sender.stats().num_waiting_loads == 4);
    node.store(&key(50), 16);
    node.store(&key(51), 16);
    // SAFETY: nothing is stored.
    let third = unsafe { node.sender.store(key(52), 16) };
    assert_eq!(third.err(), Some(StoreError::Full));
    drop(peers);
    until("all is free", || {
        let stats = node.sender.stats();
        stats.num_connections + stats.num_waiting_loads == 0
    });
}

#[test]
fn loads_that_cannot_be_are_not_begun() {
    let other = ReceivingNode::configured(geometry(1, 16, 8), |config| {
        config.max_loads = 2;
        config.max_peers = 1;
    });
    let request = |first_row, num_rows, pages: &[u32], port| LoadRequest {
        key: key(1),
        peer: PeerAddress::Tcp(loopback(port)),
        first_row,
        num_rows,
        table: page_ids(pages.iter().copied()),
        deadline: Instant::now() + LONG,
    };
    // SAFETY: no load writes anything: nobody listens.
    let load = |request| unsafe { other.receiver.load(request) };
    let silent = std::net::TcpListener::bind(loopback(0)).unwrap();
    let port = silent.local_addr().unwrap().port();
    for wrong in [
        request(0, 33, &[1, 2], port),
        request(0, 32, &[1, 8], port),
        request(8, 32, &[1, 2], port),
        request(48, 32, &[1, 2], port),
    ] {
        assert_eq!(load(wrong).err(), Some(LoadRejection::Rows));
    }
    let first = load(request(0, 32, &[1, 2], port)).unwrap();
    let another_peer = request(0, 32, &[1, 2], port ^ 1);
    assert_eq!(
        load(another_peer.clone()).err(),
        Some(LoadRejection::TooManyPeers)
    );
    let second = load(request(0, 32, &[3, 4], port)).unwrap();
    assert_eq!(
        load(request(0, 32, &[5, 6], port)).err(),
        Some(LoadRejection::Full)
    );
    drop((first, second));
    until("the peer has no loads", || {
        let third = load(another_peer.clone());
        third.is_ok()
    });
}

/// A load never lasts longer than its deadline, however slowly rows come.
#[test]
fn a_load_in_the_middle_ends_at_its_deadline() {
    let geometry = geometry(4, 16, 128);
    let node = SendingNode::new(geometry.clone());
    let other = ReceivingNode::new(geometry);
    let proxy = Proxy::new(node.address);
    proxy.allow(200 << 10);
    let table = page_ids(0..128);
    node.store_whole(&key(1), &table, 2048);
    let deadline = Instant::now() + Duration::from_millis(700);
    let mut load = other.load_until(&key(1), proxy.address, 0, 2048, &table, deadline);
    assert_eq!(
        wait(&mut load),
        LoadStatus::Failed(LoadFailure::DeadlinePassed)
    );
    let late = Instant::now().duration_since(deadline);
    assert!(late < 5 * Duration::from_millis(50), "{late:?}");
    other.fill(&table, 9);
    proxy.allow_all();
    until("nobody serves it", || {
        node.sender.account(&key(1)).is_some()
    });
    other.assert_filled(&table, 9);
}
