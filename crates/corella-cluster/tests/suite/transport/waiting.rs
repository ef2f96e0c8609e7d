//! Loads that arrive before their session.

use std::time::{Duration, Instant};

use corella_cluster::transport::{ExportError, Frame, LoadFailure, LoadFrame, LoadStatus, Refusal};
use corella_test::wait_until;

use crate::transport::fixture::{
    ReceivingNode, SendingNode, assert_not_before, geometry, key, page_ids, wait,
};
use crate::transport::raw_peer::RawPeer;

/// `sender_connection/tests.rs` tests the deadline to the microsecond.
#[test]
fn a_session_that_never_comes_leaves_nothing_but_a_tombstone() {
    let geometry = geometry(2, 16, 8);
    let node = SendingNode::new(geometry.clone());
    let mut peer = RawPeer::connect(node.address, &geometry);
    // This load waits for longer than the test takes.
    peer.load(6, &key(2), 32, 1 << 20);
    let wait = Duration::from_millis(200);
    let deadline = Instant::now() + wait;
    peer.send(&Frame::Load(LoadFrame {
        load_id: 5,
        key: key(1),
        first_row: 0,
        num_rows: 32,
        credit_bytes: 1 << 20,
        wait_ms: wait.as_millis() as u32,
    }));
    let reason = Refusal::NotExported;
    assert_eq!(peer.receive(), Some(Frame::Failed { load_id: 5, reason }));
    assert_not_before(deadline, "the load ended");
    assert_eq!(node.sender.stats().num_waiting_loads, 1);

    // The session comes late: storing it reports that its load has been refused.
    // SAFETY: nothing is stored.
    let stored = unsafe { node.sender.export(key(1), 32) };
    assert_eq!(stored.err(), Some(ExportError::TooLate(reason)));
    assert_eq!(node.sender.stats().num_exported, 0);
    assert_eq!(node.sender.stats().num_tombstones, 1);
}

#[test]
fn a_tombstone_goes_and_its_session_may_come_after_all() {
    let geometry = geometry(2, 16, 8);
    let node = SendingNode::configured(geometry, |config| {
        config.tombstone_time = Duration::from_millis(50);
    });
    node.sender.fail(&key(1));
    wait_until("the tombstone goes", || {
        node.sender.stats().num_tombstones == 0
    });
    node.export(&key(1), 32);
    assert_eq!(node.sender.stats().num_exported, 1);
}

#[test]
fn a_load_ends_at_its_deadline() {
    let geometry = geometry(2, 16, 8);
    let node = SendingNode::new(geometry.clone());
    let other = ReceivingNode::new(geometry);
    let patient = other.load(&key(2), node.address, 0, 32, &page_ids(2..4));
    let deadline = Instant::now() + Duration::from_millis(300);
    let table = page_ids(0..2);
    let load = other.load_until(&key(1), node.address, 0, 32, &table, deadline);
    let status = wait(&load);
    // Either end may notice first.
    let failures = [
        LoadFailure::DeadlinePassed,
        LoadFailure::Refused(Refusal::NotExported),
    ];
    assert!(
        failures.map(LoadStatus::Failed).contains(&status),
        "{status:?}"
    );
    // The sender's clock has milliseconds.
    assert_not_before(deadline - Duration::from_millis(1), "the load ended");
    wait_until("only the patient one waits", || {
        node.sender.stats().num_waiting_loads == 1
    });
    assert_eq!(other.receiver.stats().num_loads, 1);
    assert_eq!(patient.status(), LoadStatus::Opening);
}

#[test]
fn whoever_asks_for_what_is_over_learns_it_at_once() {
    let geometry = geometry(2, 16, 8);
    let node = SendingNode::new(geometry.clone());
    let other = ReceivingNode::new(geometry);
    let table = page_ids(0..2);
    node.export_whole(&key(1), &table, 32);
    node.sender.delete(&key(1));
    node.export(&key(2), 32);
    node.sender.fail(&key(2));
    // A session fails before it is stored, and while a load waits for it.
    let waiting = other.load(&key(3), node.address, 0, 32, &page_ids(4..6));
    wait_until("the load waits", || {
        node.sender.stats().num_waiting_loads == 1
    });
    node.sender.fail(&key(3));
    assert_eq!(
        wait(&waiting),
        LoadStatus::Failed(LoadFailure::Refused(Refusal::Failed))
    );
    for (uuid, reason) in [
        (1, Refusal::Gone),
        (2, Refusal::Failed),
        (3, Refusal::Failed),
    ] {
        let load = other.load(&key(uuid), node.address, 0, 32, &table);
        assert_eq!(
            wait(&load),
            LoadStatus::Failed(LoadFailure::Refused(reason))
        );
    }
    assert_eq!(node.sender.stats().num_exported, 0);
}

#[test]
fn another_number_of_rows_is_refused() {
    let geometry = geometry(2, 16, 8);
    let node = SendingNode::new(geometry.clone());
    let other = ReceivingNode::new(geometry);
    let table = page_ids(0..2);
    node.export_whole(&key(1), &table, 32);
    let load = other.load(&key(1), node.address, 0, 31, &table);
    let refused = LoadStatus::Failed(LoadFailure::Refused(Refusal::OtherRows));
    assert_eq!(wait(&load), refused);
}

/// With one thread, far more loads wait than there are threads, and the sender still answers other messages.
#[test]
fn loads_that_wait_hold_up_no_other() {
    let geometry = geometry(2, 16, 8);
    let node = SendingNode::on_threads(1, geometry.clone(), |_| {});
    let other = ReceivingNode::new(geometry.clone());
    let table = page_ids(0..2);
    let mut waiting: Vec<_> = (0..100)
        .map(|uuid| other.load(&key(uuid), node.address, 0, 32, &table))
        .collect();
    let num_waiting = || node.sender.stats().num_waiting_loads;
    wait_until("all wait", || num_waiting() == 100);
    // Another peer gets a greeting meanwhile.
    drop(RawPeer::connect(node.address, &geometry));
    assert_eq!(num_waiting(), 100);
    // The last of the waiting loads gets its rows.
    let last = waiting.pop().unwrap();
    node.export_whole(&key(99), &page_ids(6..8), 32);
    assert_eq!(wait(&last), LoadStatus::Done { num_rows: 32 });
    other.assert_holds(&key(99), &table, 0);
    assert_eq!(num_waiting(), 99);
    waiting[0].cancel();
    wait_until("one waits no more", || num_waiting() == 98);
    // A later load is answered before the waiting ones.
    let load = other.load(&key(1000), node.address, 0, 32, &page_ids(4..6));
    node.sender.delete(&key(1000));
    let refused = LoadStatus::Failed(LoadFailure::Refused(Refusal::Gone));
    assert_eq!(wait(&load), refused);
    assert_eq!(num_waiting(), 98);
    let is_waiting =
        |load: &&corella_cluster::transport::LoadHandle| load.status() == LoadStatus::Opening;
    assert_eq!(waiting.iter().filter(is_waiting).count(), 98);
    drop(waiting);
    wait_until("no load waits", || num_waiting() == 0);
}
