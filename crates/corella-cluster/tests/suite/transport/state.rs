//! Recurrent states come after the rows, by every path.

use std::sync::Arc;
use std::time::Instant;

use corella_cluster::transport::{
    KvReceiver, KvSender, LoadRequest, LoadStatus, PeerAddress, ReceiverConfig, SenderConfig,
    TransferThreads,
};
use corella_core::{PageId, PageTable, SnapshotId};
use corella_model::{Executor, KvPages, MockConfig, MockExecutor};

use crate::transport::fixture::{ARITHMETIC, DECODE, HOUR, MODEL, PREFILL, key, loopback, wait};

const NUM_ROWS: u32 = 20;

/// Memory whose snapshots encode the tokens before them.
fn pages() -> Arc<dyn KvPages> {
    let config = MockConfig {
        num_layers: 2,
        num_snapshots: Some(4),
        ..MockConfig::new(50, 8, 16)
    };
    MockExecutor::new(config).kv_pages()
}

#[test]
fn a_state_comes_behind_its_rows() {
    let host = format!("corella-kv-{}-state", std::process::id());
    for address in [
        PeerAddress::Tcp(loopback(0)),
        PeerAddress::Unix(host.clone()),
    ] {
        let threads = TransferThreads::start(2).unwrap();
        let (from, to) = (pages(), pages());
        let mut record = [7; 16];
        record[..8].copy_from_slice(&u64::from(NUM_ROWS).to_le_bytes());
        let states = from.states().unwrap();
        let there = SnapshotId(1);
        states.write(0, there, NUM_ROWS, &record).unwrap();

        let sender = KvSender::start(
            SenderConfig::new(PREFILL, MODEL, ARITHMETIC),
            from.clone(),
            &threads,
        );
        let sender = sender.unwrap();
        let peer = sender.listen(address).unwrap();
        // SAFETY: these pages do not change.
        unsafe { sender.export(key(1), NUM_ROWS) }.unwrap();
        sender.add_pages(&key(1), &[PageTable::whole(vec![PageId(2), PageId(5)])]);
        sender.handle_rows_readable(&key(1), 0..2, NUM_ROWS);
        sender.set_state(&key(1), there);

        let receiver = KvReceiver::new(
            ReceiverConfig::new(DECODE, MODEL, ARITHMETIC),
            to.clone(),
            &threads,
        );
        let here = SnapshotId(3);
        let request = LoadRequest {
            key: key(1),
            peer,
            arithmetic: ARITHMETIC,
            first_row: 0,
            num_rows: NUM_ROWS,
            tables: vec![PageTable::whole(vec![PageId(0), PageId(1)])],
            state: Some(here),
            deadline: Instant::now() + HOUR,
        };
        // SAFETY: these pages are not in use.
        let load = unsafe { receiver.load(request) }.unwrap();
        // A state is valid only after its step has returned.
        assert!(sender.finish(&key(1)));
        let num_rows = NUM_ROWS;
        assert_eq!(wait(&load), LoadStatus::Done { num_rows });
        let mut found = [0; 16];
        let states = to.states().unwrap();
        states.read(0, here, NUM_ROWS, &mut found).unwrap();
        assert_eq!(found, record);
    }
}

/// Neither end accepts rows without the recurrent state after them.
#[test]
fn rows_without_their_state_are_no_load() {
    let threads = TransferThreads::start(2).unwrap();
    let (from, to) = (pages(), pages());
    let sender = KvSender::start(
        SenderConfig::new(PREFILL, MODEL, ARITHMETIC),
        from.clone(),
        &threads,
    );
    let sender = sender.unwrap();
    let peer = sender.listen(loopback(0)).unwrap();
    // SAFETY: these pages do not change.
    unsafe { sender.export(key(1), NUM_ROWS) }.unwrap();
    sender.add_pages(&key(1), &[PageTable::whole(vec![PageId(2), PageId(5)])]);
    sender.handle_rows_readable(&key(1), 0..2, NUM_ROWS);
    assert!(sender.finish(&key(1)));
    let receiver = KvReceiver::new(
        ReceiverConfig::new(DECODE, MODEL, ARITHMETIC),
        to.clone(),
        &threads,
    );
    let request = LoadRequest {
        key: key(1),
        peer,
        arithmetic: ARITHMETIC,
        first_row: 0,
        num_rows: NUM_ROWS,
        tables: vec![PageTable::whole(vec![PageId(0), PageId(1)])],
        state: Some(SnapshotId(3)),
        deadline: Instant::now() + HOUR,
    };
    // SAFETY: these pages are not in use.
    let load = unsafe { receiver.load(request) }.unwrap();
    assert!(matches!(wait(&load), LoadStatus::Failed(_)));
}
