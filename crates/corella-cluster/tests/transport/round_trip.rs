//! What is loaded is what was stored.

use std::time::{Duration, Instant};

use corella_cluster::transport::{
    ElementOrder, Incompatibility, KvGeometry, LoadFailure, LoadStatus, ReceiverConfig, SendStatus,
};
use corella_model::KvFormat;

use crate::fixture::{
    DECODE, ReceivingNode, SendingNode, geometry, key, page_ids, wait, wait_for, wait_for_bytes,
};

#[test]
fn rows_go_to_the_receivers_own_pages_and_nowhere_else() {
    let geometry = geometry(3, 16, 64);
    let node = SendingNode::new(geometry.clone());
    let other = ReceivingNode::new(geometry);
    let everywhere = page_ids(0..64);
    other.fill(&everywhere, 0xee);
    // 7 whole pages and 5 rows; the receiver has two pages already.
    let (from, to) = (
        page_ids([9, 8, 3, 4, 5, 6, 40, 41]),
        page_ids([60, 1, 20, 21, 7, 2, 50, 3]),
    );
    let mut status = node.store_whole(&key(1), &from, 117);
    let mut load = other.load(&key(1), node.address, 32, 117, &to);
    assert_eq!(wait(&mut load), LoadStatus::Done { num_rows: 117 });
    other.assert_holds(&key(1), &to, 2);
    let untouched: Vec<_> = everywhere
        .into_iter()
        .filter(|page| !to[2..].contains(page))
        .collect();
    other.assert_filled(&untouched, 0xee);
    wait_for(&mut status, SendStatus::Received);

    // 3 layers of 6 pages, each 2 heads × 16 rows × (K and V) × 64 × 2 bytes.
    let (sent, received) = (node.sender.account(&key(1)).unwrap(), load.account());
    for account in [sent, received] {
        assert_eq!((account.num_pages, account.num_bytes), (18, 18 * 8192));
        assert!(account.first_byte_at <= account.last_byte_at);
    }
    assert_eq!(node.sender.stats().num_bytes_sent, 18 * 8192);
    node.sender.delete(&key(1));
    assert_eq!(node.sender.stats().num_stored, 0);
    assert_eq!(other.receiver.stats().num_loads, 0);
}

/// Facts come layer by layer and step by step, and rows travel as soon as their page is full.
#[test]
fn rows_flow_while_further_layers_are_computed() {
    let geometry = geometry(4, 16, 32);
    let node = SendingNode::new(geometry.clone());
    let other = ReceivingNode::new(geometry);
    let (from, to) = (page_ids(4..9), page_ids([30, 2, 29, 3, 28]));
    let (key, num_rows) = (key(7), 70);
    let mut load = other.load(&key, node.address, 0, num_rows, &to);
    let mut status = node.store(&key, num_rows);
    node.fill(&key, &from);
    node.sender.add_pages(&key, &from[..3]);
    // A step of 40 rows: two pages are full.
    node.sender.handle_rows_readable(&key, 0..1, 40);
    wait_for_bytes(&mut load);
    crate::fixture::until("two pages of a layer", || load.account().num_pages == 2);
    node.sender.handle_rows_readable(&key, 1..4, 40);
    crate::fixture::until("two pages of four layers", || load.account().num_pages == 8);
    node.sender.add_pages(&key, &from[3..]);
    for layer in 0..4 {
        assert!(!node.sender.finish(&key), "layer {layer} is not complete");
        node.sender
            .handle_rows_readable(&key, layer..layer + 1, num_rows);
    }
    crate::fixture::until("all pages", || load.account().num_pages == 20);
    // They are worth nothing before the last step has returned.
    assert!(!load.status().is_over());
    assert!(node.sender.finish(&key));
    assert_eq!(wait(&mut load), LoadStatus::Done { num_rows });
    other.assert_holds(&key, &to, 0);
    wait_for(&mut status, SendStatus::Received);
}

#[test]
fn many_sessions_share_few_connections() {
    let geometry = geometry(2, 16, 400);
    let node = SendingNode::new(geometry.clone());
    let other = ReceivingNode::new(geometry);
    let table = |uuid: u32| page_ids((0..10).map(|i| (i * 40 + uuid * 7) % 400));
    let num_rows = |uuid: u32| 1 + uuid * 4;
    let mut loads = Vec::new();
    for uuid in 0..40 {
        let key = key(uuid.into());
        // Half of them are asked for before they are there.
        if uuid % 2 == 0 {
            node.store_whole(&key, &table(uuid), num_rows(uuid));
        }
        loads.push(other.load(
            &key,
            node.address,
            0,
            num_rows(uuid),
            &table((uuid + 3) % 40),
        ));
        if uuid % 2 == 1 {
            node.store_whole(&key, &table(uuid), num_rows(uuid));
        }
    }
    for (uuid, load) in loads.iter_mut().enumerate() {
        let num_rows = num_rows(uuid as u32);
        assert_eq!(wait(load), LoadStatus::Done { num_rows });
        let num_pages = num_rows.div_ceil(16) as usize;
        let table = table((uuid as u32 + 3) % 40);
        other.assert_holds(&key(uuid as u128), &table[..num_pages], 0);
    }
    assert_eq!(node.sender.stats().num_connections, 2);
    assert_eq!(other.receiver.stats().num_peers, 1);
}

#[test]
fn a_load_of_nothing_waits_for_the_end() {
    let geometry = geometry(2, 16, 8);
    let node = SendingNode::new(geometry.clone());
    let other = ReceivingNode::new(geometry);
    let table = page_ids(0..2);
    let mut load = other.load(&key(1), node.address, 32, 32, &table);
    node.store_whole(&key(1), &table, 32);
    assert_eq!(wait(&mut load), LoadStatus::Done { num_rows: 32 });
    assert_eq!(load.account().num_bytes, 0);
}

#[test]
fn another_element_order_is_converted() {
    let plain = geometry(2, 16, 8);
    let tiles = KvGeometry {
        order: ElementOrder::Tiles,
        ..plain.clone()
    };
    let node = SendingNode::new(tiles);
    let other = ReceivingNode::new(plain);
    let table = page_ids([3, 5]);
    node.store_whole(&key(1), &table, 30);
    let mut load = other.load(&key(1), node.address, 0, 30, &table);
    assert_eq!(wait(&mut load), LoadStatus::Done { num_rows: 30 });
    for (index, &page) in table.iter().enumerate() {
        for layer in 0..2 {
            // SAFETY: the load is over.
            let mut bytes = unsafe { other.pages.bytes(layer, page) };
            bytes.reverse();
            let content = crate::fixture::content(&key(1), layer, index);
            assert!(
                bytes
                    .iter()
                    .enumerate()
                    .all(|(i, &byte)| byte == content(i))
            );
        }
    }
}

#[test]
fn nodes_that_do_not_fit_each_other_say_why() {
    type Change = (fn(&mut ReceiverConfig), fn(&mut KvGeometry), LoadFailure);
    let cases: [Change; 5] = [
        (
            |config| config.model_fingerprint ^= 1 << 90,
            |_| {},
            LoadFailure::Incompatible(Incompatibility::Model),
        ),
        (
            |_| {},
            |geometry| geometry.num_layers += 1,
            LoadFailure::Incompatible(Incompatibility::Shape),
        ),
        (
            |_| {},
            |geometry| geometry.format = KvFormat::Int8,
            LoadFailure::Incompatible(Incompatibility::Pages),
        ),
        (
            |_| {},
            |geometry| geometry.page_size = 32,
            LoadFailure::Incompatible(Incompatibility::Pages),
        ),
        // The key was made for another start of the decode node.
        (
            |config| config.incarnation = DECODE + 1,
            |_| {},
            LoadFailure::Refused(corella_cluster::transport::Refusal::OtherIncarnation),
        ),
    ];
    for (config, change, failure) in cases {
        let mut geometry = geometry(2, 16, 8);
        let node = SendingNode::new(geometry.clone());
        change(&mut geometry);
        let other = ReceivingNode::configured(geometry, config);
        let table = page_ids(0..2);
        node.store_whole(&key(1), &table, 32);
        let mut load = other.load(&key(1), node.address, 0, 32, &table);
        assert_eq!(wait(&mut load), LoadStatus::Failed(failure));
    }
}

#[test]
fn a_key_of_an_earlier_start_of_the_sender_fails_at_once() {
    let geometry = geometry(2, 16, 8);
    let node = SendingNode::new(geometry.clone());
    let other = ReceivingNode::new(geometry);
    let mut key = key(1);
    key.prefill_incarnation += 1;
    let started_at = Instant::now();
    let mut load = other.load(&key, node.address, 0, 32, &page_ids(0..2));
    assert_eq!(
        wait(&mut load),
        LoadStatus::Failed(LoadFailure::OtherIncarnation)
    );
    assert!(started_at.elapsed() < Duration::from_secs(3));
}
