//! Loaded rows equal the stored ones.

use std::ops::Range;

use corella_cluster::transport::{
    Incompatibility, LoadFailure, LoadStatus, ReceiverConfig, SendStatus,
};
use corella_model::{DType, ElementOrder, KvFormat, KvGeometry, KvLayers, KvPages, PageForm};
use corella_test::wait_until;

use crate::transport::fixture::{
    DECODE, ReceivingNode, SendingNode, geometry, key, page_ids, wait, wait_for_bytes,
    wait_for_status, whole,
};

#[test]
fn rows_go_to_the_receivers_own_pages_and_nowhere_else() {
    let geometry = geometry(3, 16, 64);
    let node = SendingNode::new(geometry.clone());
    let other = ReceivingNode::new(geometry);
    let everywhere = page_ids(0..64);
    other.fill(&everywhere, 0xee);
    // 7 whole pages and 5 rows. The receiver already has two pages.
    let (from, to) = (
        page_ids([9, 8, 3, 4, 5, 6, 40, 41]),
        page_ids([60, 1, 20, 21, 7, 2, 50, 3]),
    );
    let status = node.export_whole(&key(1), &from, 117);
    let load = other.load(&key(1), node.address, 32, 117, &to);
    assert_eq!(wait(&load), LoadStatus::Done { num_rows: 117 });
    other.assert_holds(&key(1), &to, 2);
    let untouched: Vec<_> = everywhere
        .into_iter()
        .filter(|page| !to[2..].contains(page))
        .collect();
    other.assert_filled(&untouched, 0xee);
    wait_for_status(&status, SendStatus::Received);

    // 3 layers of 6 pages, each 2 heads × 16 rows × (K and V) × 64 × 2 bytes.
    let (sent, received) = (node.sender.account(&key(1)).unwrap(), load.account());
    for account in [sent, received] {
        assert_eq!((account.num_pages, account.num_bytes), (18, 18 * 8192));
        assert!(account.first_byte_at <= account.last_byte_at);
    }
    assert_eq!(node.sender.stats().num_bytes_sent, 18 * 8192);
    node.sender.delete(&key(1));
    assert_eq!(node.sender.stats().num_exported, 0);
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
    let load = other.load(&key, node.address, 0, num_rows, &to);
    let status = node.export(&key, num_rows);
    node.fill(&key, &from);
    node.sender.add_pages(&key, &whole(&from[..3]));
    // A step of 40 rows: two pages are full.
    node.sender.handle_rows_readable(&key, 0..1, 40);
    wait_for_bytes(&load);
    wait_until("two pages of a layer", || load.account().num_pages == 2);
    node.sender.handle_rows_readable(&key, 1..4, 40);
    wait_until("two pages of four layers", || load.account().num_pages == 8);
    node.sender.add_pages(&key, &whole(&from));
    for layer in 0..4 {
        assert!(!node.sender.finish(&key), "layer {layer} is not complete");
        node.sender
            .handle_rows_readable(&key, layer..layer + 1, num_rows);
    }
    wait_until("all pages", || load.account().num_pages == 20);
    // The rows are invalid until the last step has returned.
    assert!(!load.status().is_over());
    assert!(node.sender.finish(&key));
    assert_eq!(wait(&load), LoadStatus::Done { num_rows });
    other.assert_holds(&key, &to, 0);
    wait_for_status(&status, SendStatus::Received);
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
        // Half of the sessions are requested before they are stored.
        if uuid % 2 == 0 {
            node.export_whole(&key, &table(uuid), num_rows(uuid));
        }
        loads.push(other.load(
            &key,
            node.address,
            0,
            num_rows(uuid),
            &table((uuid + 3) % 40),
        ));
        if uuid % 2 == 1 {
            node.export_whole(&key, &table(uuid), num_rows(uuid));
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
    let load = other.load(&key(1), node.address, 32, 32, &table);
    node.export_whole(&key(1), &table, 32);
    assert_eq!(wait(&load), LoadStatus::Done { num_rows: 32 });
    assert_eq!(load.account().num_bytes, 0);
}

/// The receiver's page size, KV format and element order.
const OTHERS: [(u32, KvFormat, ElementOrder); 5] = [
    (16, KvFormat::Float(DType::Bf16), ElementOrder::Tiles),
    (32, KvFormat::Float(DType::Bf16), ElementOrder::Plain),
    (8, KvFormat::Float(DType::F32), ElementOrder::Tiles),
    (48, KvFormat::Float(DType::Bf16), ElementOrder::Tiles),
    (4, KvFormat::Float(DType::F32), ElementOrder::Plain),
];

#[test]
fn pages_of_another_kind_are_converted() {
    let from = geometry(2, 16, 16);
    for (page_size, format, order) in OTHERS {
        let to = KvGeometry {
            page_size,
            format,
            order,
            num_pages: 256 / page_size,
            ..from.clone()
        };
        let node = SendingNode::new(from.clone());
        let other = ReceivingNode::new(to.clone());
        // 100 rows, of which the receiver has one page.
        let (from_table, num_rows) = (page_ids([9, 2, 4, 3, 1, 0, 7]), 100);
        let num_pages = 100u32.div_ceil(page_size);
        let table = page_ids((0..num_pages).rev());
        other.fill(&table, 0);
        for layer in 0..2 {
            for (index, &page) in from_table.iter().enumerate() {
                let bytes = canonical(&from, layer, index as u32, 0..num_rows);
                // SAFETY: the pages are not in use yet.
                unsafe {
                    node.pages
                        .write(layer, &[page], PageForm::Canonical, &bytes)
                };
            }
        }
        node.export(&key(1), num_rows);
        node.make_readable(&key(1), &from_table, num_rows);
        let load = other.load(&key(1), node.address, page_size, num_rows, &table);
        assert_eq!(wait(&load), LoadStatus::Done { num_rows });
        for layer in 0..2 {
            for (index, &page) in table.iter().enumerate() {
                let expected = canonical(&to, layer, index as u32, page_size..num_rows);
                let mut found = vec![0; expected.len()];
                // SAFETY: the load is over.
                unsafe {
                    other
                        .pages
                        .read(layer, &[page], PageForm::Canonical, &mut found)
                };
                assert!(
                    found == expected,
                    "{page_size} {format:?}, page {index}, layer {layer}"
                );
            }
        }
    }
}

/// Returns a page of a session. The elements of `rows` are small whole numbers, which every format can hold. All other
/// elements are 0.
fn canonical(geometry: &KvGeometry, layer: u32, index: u32, rows: Range<u32>) -> Vec<u8> {
    let size = geometry.format.size();
    let mut bytes = Vec::new();
    for head_and_side in 0..2 * geometry.num_kv_heads {
        for row in index * geometry.page_size..(index + 1) * geometry.page_size {
            for i in 0..geometry.head_dim {
                let value = match rows.contains(&row) {
                    true => (row * 5 + layer * 3 + head_and_side * 11 + i) % 251,
                    false => 0,
                };
                // A bf16 value is the upper half of an f32 value.
                bytes.extend(&(value as f32).to_le_bytes()[4 - size..]);
            }
        }
    }
    bytes
}

#[test]
fn nodes_that_do_not_fit_each_other_say_why() {
    type Change = (fn(&mut ReceiverConfig), fn(&mut KvGeometry), LoadFailure);
    let cases: [Change; 3] = [
        (
            |config| config.model_fingerprint ^= 1 << 90,
            |_| {},
            LoadFailure::Incompatible(Incompatibility::Model),
        ),
        (
            |_| {},
            |geometry| geometry.layers = KvLayers::one(geometry.num_layers + 1),
            LoadFailure::Incompatible(Incompatibility::Shape),
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
        node.export_whole(&key(1), &table, 32);
        let load = other.load(&key(1), node.address, 0, 32, &table);
        assert_eq!(wait(&load), LoadStatus::Failed(failure));
    }
}

#[test]
fn a_key_of_an_earlier_start_of_the_sender_fails_at_once() {
    let geometry = geometry(2, 16, 8);
    let node = SendingNode::new(geometry.clone());
    let other = ReceivingNode::new(geometry);
    let mut key = key(1);
    key.prefill_incarnation.0 += 1;
    let load = other.load(&key, node.address, 0, 32, &page_ids(0..2));
    assert_eq!(
        wait(&load),
        LoadStatus::Failed(LoadFailure::OtherIncarnation)
    );
}
