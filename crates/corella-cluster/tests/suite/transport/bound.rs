//! Different speeds, and everything with a limit.

use std::io::Write;
use std::time::{Duration, Instant};

use corella_cluster::transport::{
    ExportError, Frame, LoadFailure, LoadRejection, LoadRequest, LoadStatus, PeerAddress, Refusal,
    SendStatus,
};
use corella_test::wait_until;

use crate::proxy::Proxy;
use crate::transport::fixture::{
    ARITHMETIC, DECODE, HOUR, ReceivingNode, SendingNode, assert_not_before, geometry, key,
    loopback, page_ids, wait, wait_for_bytes, wait_for_status, whole,
};
use crate::transport::raw_peer::RawPeer;

/// One decode node connects through a proxy that blocks its link, and another decode node connects directly.
#[test]
fn a_slow_peer_holds_up_no_other_and_has_its_own_bandwidth() {
    let geometry = geometry(4, 16, 512);
    let node = SendingNode::new(geometry.clone());
    let slow = ReceivingNode::new(geometry.clone());
    let fast = ReceivingNode::configured(geometry, |config| config.incarnation = DECODE + 1);
    let proxy = Proxy::new(node.address);
    let num_allowed = 4 << 20;
    proxy.allow(num_allowed);
    // 16 MiB.
    let table = page_ids(0..512);
    node.export_whole(&key(1), &table, 8192);
    let slow_load = slow.load(&key(1), proxy.address, 0, 8192, &table);
    wait_for_bytes(&slow_load);
    assert_eq!(node.sender.bandwidth_bytes_per_s(DECODE + 1), None);
    let mut fast_key = key(2);
    fast_key.decode_incarnation.0 += 1;
    // Both sessions use the same pages, which have the content of the slow session.
    node.export(&fast_key, 8192);
    node.make_readable(&fast_key, &table, 8192);
    let fast_load = fast.load(&fast_key, node.address, 0, 8192, &table);
    assert_eq!(wait(&fast_load), LoadStatus::Done { num_rows: 8192 });
    fast.assert_holds(&key(1), &table, 0);
    assert!(!slow_load.status().is_over());
    assert!(slow_load.account().num_bytes <= num_allowed);
    let speed = |incarnation| node.sender.bandwidth_bytes_per_s(incarnation);
    wait_until("both are measured", || {
        let (slow_speed, fast_speed) = (speed(DECODE), speed(DECODE + 1));
        slow_speed.is_some() && fast_speed.is_some() && slow_speed != fast_speed
    });
    proxy.allow_all();
    assert_eq!(wait(&slow_load), LoadStatus::Done { num_rows: 8192 });
    slow.assert_holds(&key(1), &table, 0);
}

/// The bound covers all sessions and connections together.
#[test]
fn a_node_sends_no_more_than_its_bandwidth() {
    let geometry = geometry(2, 16, 128);
    let bytes_per_s = 4_000_000;
    let node = SendingNode::configured(geometry.clone(), |config| {
        config.max_bandwidth = Some(bytes_per_s);
    });
    let other = ReceivingNode::new(geometry);
    let num_bytes = 4.0 * 64.0 * 8192.0;
    // The bytes of 20 ms may be sent at once.
    let least = Duration::from_secs_f64(num_bytes / bytes_per_s as f64 - 0.02);
    let earliest = Instant::now() + least;
    let tables: Vec<_> = (0..4).map(|i| page_ids(32 * i..32 * (i + 1))).collect();
    let mut loads = Vec::new();
    for (uuid, table) in tables.iter().enumerate() {
        let key = key(uuid as u128);
        node.export_whole(&key, table, 512);
        loads.push(other.load(&key, node.address, 0, 512, table));
    }
    for load in &loads {
        assert_eq!(wait(load), LoadStatus::Done { num_rows: 512 });
    }
    assert_eq!(node.sender.stats().num_bytes_sent as f64, num_bytes);
    assert_not_before(earliest, "all bytes were there");
}

/// Chunks of sessions alternate: a later session does not wait for the end of an earlier one.
#[test]
fn sessions_of_a_connection_take_turns() {
    let geometry = geometry(1, 16, 128);
    let layer_bytes = geometry.layer_bytes();
    let node = SendingNode::configured(geometry.clone(), |config| {
        config.chunk_bytes = 2 * layer_bytes;
    });
    let mut peer = RawPeer::connect(node.address, &geometry);
    for uuid in 0..3 {
        node.export_whole(&key(uuid.into()), &page_ids(40 * uuid..40 * uuid + 40), 640);
        // Nothing is sent before all sessions are requested.
        peer.load(uuid.into(), &key(uuid.into()), 640, 0);
    }
    peer.load(9, &key(9), 16, 0);
    wait_until("all have asked", || {
        node.sender.stats().num_waiting_loads == 1
    });
    // All credits go out at once, so that the sender reads all of them before it sends anything.
    let credit = |load_id| Frame::Credit {
        load_id,
        num_bytes: u32::MAX,
    };
    let credit = [0, 1, 2].map(|load_id| credit(load_id).encode());
    peer.stream.write_all(&credit.concat()).unwrap();
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
    for turns in order.chunks(3) {
        assert_eq!(turns, [0, 1, 2], "{order:?}");
    }
}

#[test]
fn everything_that_peers_can_fill_has_a_limit() {
    let geometry = geometry(1, 16, 8);
    let node = SendingNode::configured(geometry.clone(), |config| {
        config.max_connections = 2;
        config.max_loads_per_connection = 3;
        config.max_waiting_loads = 4;
        config.max_exported = 2;
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
    // A load that ends makes room for another.
    peers[0].send(&Frame::Cancel { load_id: 0 });
    wait_until("it is gone", || node.sender.stats().num_waiting_loads == 3);
    peers[1].load(12, &key(12), 16, 0);
    wait_until("it waits", || node.sender.stats().num_waiting_loads == 4);
    node.export(&key(50), 16);
    node.export(&key(51), 16);
    // SAFETY: nothing is stored.
    let third = unsafe { node.sender.export(key(52), 16) };
    assert_eq!(third.err(), Some(ExportError::Full));
    drop(peers);
    wait_until("all is free", || {
        let stats = node.sender.stats();
        stats.num_connections + stats.num_waiting_loads == 0
    });
}

#[test]
fn loads_that_cannot_be_are_not_begun() {
    let other = ReceivingNode::configured(geometry(1, 16, 8), |config| {
        config.max_loads = 2;
        config.max_peers = 1;
        config.connect_timeout = HOUR;
    });
    let request = |first_row, num_rows, pages: &[u32], port| LoadRequest {
        key: key(1),
        peer: PeerAddress::Tcp(loopback(port)),
        arithmetic: ARITHMETIC,
        first_row,
        num_rows,
        tables: whole(&page_ids(pages.iter().copied())).to_vec(),
        state: None,
        deadline: Instant::now() + HOUR,
    };
    // SAFETY: no load writes anything, because the ports are closed.
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
    wait_until("the peer has no loads", || {
        let third = load(another_peer.clone());
        third.is_ok()
    });
}

/// A load never lasts longer than its deadline, even if rows come slowly.
#[test]
fn a_load_in_the_middle_ends_at_its_deadline() {
    let geometry = geometry(4, 16, 256);
    let node = SendingNode::new(geometry.clone());
    let other = ReceivingNode::configured(geometry, |config| config.connections_per_peer = 1);
    let proxy = Proxy::new(node.address);
    let (table, further) = (page_ids(0..128), page_ids(128..256));
    let status = node.export_whole(&key(1), &table, 2048);
    // The proxy holds the load in its middle, unless the deadline passes before.
    wait_until("a load that has begun ends", || {
        proxy.allow(200 << 10);
        let deadline = Instant::now() + Duration::from_millis(700);
        let load = other.load_until(&key(1), proxy.address, 0, 2048, &table, deadline);
        let failed = LoadStatus::Failed(LoadFailure::DeadlinePassed);
        assert_eq!(wait(&load), failed);
        assert_not_before(deadline, "the load ended");
        load.account().num_bytes > 0
    });
    other.fill(&table, 9);
    wait_for_status(&status, SendStatus::Stopped);
    // Later bytes of the connection follow the load's rows.
    proxy.allow_all();
    let next = other.load(&key(1), proxy.address, 0, 2048, &further);
    assert_eq!(wait(&next), LoadStatus::Done { num_rows: 2048 });
    other.assert_holds(&key(1), &further, 0);
    other.assert_filled(&table, 9);
}
