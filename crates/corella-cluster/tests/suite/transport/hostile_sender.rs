//! Senders that violate the protocol.

use std::io::Write;

use corella_cluster::transport::{
    Frame, LoadFailure, LoadHandle, LoadStatus, PageRun, Refusal, StateRun,
};
use corella_model::PageForm;
use corella_test::wait_until;
use xxhash_rust::xxh3::xxh3_64;

use crate::transport::fixture::{ReceivingNode, content, geometry, key, page_ids, wait};
use crate::transport::raw_peer::{RawListener, RawPeer, run};

const NUM_ROWS: u32 = 40;

struct Scene {
    other: ReceivingNode,
    listener: RawListener,
    load: LoadHandle,
    peer: RawPeer,
    load_id: u64,
}

impl Scene {
    /// Requests three pages of two layers. The receiver has the first page.
    fn new() -> Self {
        let geometry = geometry(2, 16, 16);
        let other = ReceivingNode::configured(geometry.clone(), |config| {
            config.connections_per_peer = 1;
            config.window_bytes = 3 * geometry.layer_bytes() as u32;
        });
        other.fill(&page_ids(0..16), 0xaa);
        let listener = RawListener::new();
        let load = other.load(
            &key(1),
            listener.address,
            16,
            NUM_ROWS,
            &page_ids([5, 6, 7]),
        );
        let mut peer = listener.accept(&geometry);
        let Some(Frame::Load(frame)) = peer.receive() else {
            panic!("a load");
        };
        assert_eq!(
            (frame.key, frame.first_row, frame.num_rows),
            (key(1), 16, NUM_ROWS)
        );
        assert_eq!(frame.credit_bytes as usize, 3 * geometry.layer_bytes());
        Self {
            other,
            listener,
            load,
            peer,
            load_id: frame.load_id,
        }
    }

    fn send(&mut self, run: PageRun) {
        let num_pages = run.num_rows.div_ceil(16) as usize;
        let bytes: Vec<u8> = (0..num_pages)
            .flat_map(|i| {
                let content = content(&key(1), run.layer, run.first_row as usize / 16 + i);
                (0..8192).map(content)
            })
            .collect();
        self.peer.send_run(run, &bytes, xxh3_64(&bytes));
    }

    /// Asserts that the load fails, the connection ends, and only the load's pages were written.
    fn assert_fails(mut self, failure: LoadFailure) {
        assert_eq!(wait(&self.load), LoadStatus::Failed(failure));
        while self.peer.receive().is_some() {}
        let others = page_ids((0..16).filter(|page| !(6..8).contains(page)));
        self.other.assert_filled(&others, 0xaa);
        assert_eq!(self.other.receiver.stats().num_loads, 0);
    }
}

#[test]
fn what_was_asked_for_is_taken() {
    let mut scene = Scene::new();
    let load_id = scene.load_id;
    for layer in [1, 0] {
        scene.send(run(load_id, layer, 16, 24));
    }
    let num_rows = NUM_ROWS;
    scene.peer.send(&Frame::Complete { load_id, num_rows });
    assert_eq!(wait(&scene.load), LoadStatus::Done { num_rows });
    scene.other.assert_holds(&key(1), &page_ids([5, 6, 7]), 1);
    scene.other.assert_filled(&page_ids([5]), 0xaa);
    let mut num_credit = 0;
    loop {
        match scene.peer.receive() {
            Some(Frame::Credit { num_bytes, .. }) => num_credit += num_bytes,
            frame => break assert_eq!(frame, Some(Frame::Received { load_id })),
        }
    }
    assert!(num_credit <= 4 * 8192);
}

#[test]
fn rows_that_were_not_asked_for_fail_the_load() {
    let too_long = "rows that were not asked for";
    let no_order = "rows out of their order";
    let no_page = "rows that do not begin a page, or in another form";
    let cases = [
        (run(0, 2, 16, 16), "a layer that the model does not have"),
        (
            run(0, u32::MAX, 16, 16),
            "a layer that the model does not have",
        ),
        (run(0, 0, 0, 16), no_order),
        (run(0, 0, 32, 8), no_order),
        (run(0, 0, 16, 25), too_long),
        (run(0, 0, 16, 0), too_long),
        (run(0, 0, u32::MAX - 15, 16), no_order),
        (run(0, 0, 16, u32::MAX), "more rows than a frame may have"),
        (run(0, 0, 20, 16), no_page),
        (
            PageRun {
                form: PageForm::Canonical,
                ..run(0, 0, 16, 24)
            },
            no_page,
        ),
    ];
    for (wrong, what) in cases {
        let mut scene = Scene::new();
        let load_id = scene.load_id;
        // The payload is missing: the receiver must not wait for it.
        scene.peer.send(&Frame::Data(PageRun { load_id, ..wrong }));
        scene.assert_fails(LoadFailure::Violation(what));
    }
}

#[test]
fn a_state_that_was_not_asked_for_fails_the_load() {
    let cases = [
        (16, "a recurrent state that was not asked for"),
        (u32::MAX, "a larger recurrent state than any model has"),
    ];
    for (num_bytes, what) in cases {
        let mut scene = Scene::new();
        let run = StateRun {
            load_id: scene.load_id,
            layer: 0,
            num_rows: NUM_ROWS,
            num_bytes,
        };
        // The payload is missing: the receiver must not wait for it.
        scene.peer.send(&Frame::State(run));
        scene.assert_fails(LoadFailure::Violation(what));
    }
}

#[test]
fn rows_that_come_twice_or_beyond_the_credit_fail_the_load() {
    let mut scene = Scene::new();
    let load_id = scene.load_id;
    scene.send(run(load_id, 0, 16, 16));
    scene.peer.send(&Frame::Data(run(load_id, 0, 16, 16)));
    scene.assert_fails(LoadFailure::Violation("rows out of their order"));

    // There is credit for three pages, and none is given back in the middle of a frame.
    let geometry = geometry(2, 16, 64);
    let other = ReceivingNode::configured(geometry.clone(), |config| {
        config.window_bytes = 3 * geometry.layer_bytes() as u32;
    });
    let listener = RawListener::new();
    let table = page_ids(0..32);
    let load = other.load(&key(1), listener.address, 0, 512, &table);
    let mut peer = listener.accept(&geometry);
    let Some(Frame::Load(frame)) = peer.receive() else {
        panic!("a load");
    };
    peer.send(&Frame::Data(run(frame.load_id, 0, 0, 64)));
    let failure = LoadFailure::Violation("more bytes than it has credit for");
    assert_eq!(wait(&load), LoadStatus::Failed(failure));
    while peer.receive().is_some() {}
}

#[test]
fn an_early_end_fails_the_load() {
    for (num_layers, num_rows) in [(0, NUM_ROWS), (1, NUM_ROWS), (2, NUM_ROWS - 1)] {
        let mut scene = Scene::new();
        let load_id = scene.load_id;
        for layer in 0..num_layers {
            scene.send(run(load_id, layer, 16, 24));
        }
        scene.peer.send(&Frame::Complete { load_id, num_rows });
        scene.assert_fails(LoadFailure::Violation("an end before all rows have come"));
    }
}

#[test]
fn a_wrong_checksum_fails_the_load_and_ends_the_connection() {
    let mut scene = Scene::new();
    let bytes = vec![3; 16384];
    let run = run(scene.load_id, 0, 16, 24);
    scene.peer.send_run(run, &bytes, xxh3_64(&bytes) ^ 1);
    assert_eq!(wait(&scene.load), LoadStatus::Failed(LoadFailure::Corrupt));
    assert_eq!(scene.other.receiver.stats().num_corrupt_frames, 1);
    scene.assert_fails(LoadFailure::Corrupt);
}

#[test]
fn no_frames_at_all_lose_the_connection() {
    for bytes in [&[0xee; 64][..], &Frame::Received { load_id: 1 }.encode()] {
        let mut scene = Scene::new();
        scene.peer.stream.write_all(bytes).unwrap();
        while scene.peer.receive().is_some() {}
        // No byte had arrived, so the load is retried exactly once.
        let mut peer = scene.listener.accept(&geometry(2, 16, 16));
        let Some(Frame::Load(frame)) = peer.receive() else {
            panic!("the load again");
        };
        assert_eq!(frame.key, key(1));
        peer.stream.write_all(bytes).unwrap();
        while peer.receive().is_some() {}
        scene.assert_fails(LoadFailure::ConnectionLost);
    }
}

/// The rows are dropped and counted, and the connection's other loads continue.
#[test]
fn rows_of_unknown_loads_go_nowhere() {
    let mut scene = Scene::new();
    let load_id = scene.load_id;
    for unknown in [0, load_id + 1, u64::MAX] {
        scene.send(run(unknown, 1, 32, 64));
        scene.peer.send(&Frame::Complete {
            load_id: unknown,
            num_rows: 3,
        });
        scene.peer.send(&Frame::Failed {
            load_id: unknown,
            reason: Refusal::Gone,
        });
    }
    for layer in 0..2 {
        scene.send(run(load_id, layer, 16, 24));
    }
    let num_rows = NUM_ROWS;
    scene.peer.send(&Frame::Complete { load_id, num_rows });
    assert_eq!(wait(&scene.load), LoadStatus::Done { num_rows });
    assert_eq!(scene.other.receiver.stats().num_unknown_frames, 3);
    scene.other.assert_holds(&key(1), &page_ids([5, 6, 7]), 1);
    let others = page_ids((0..16).filter(|page| !(6..8).contains(page)));
    scene.other.assert_filled(&others, 0xaa);
}

/// A byte is damaged between two Corella nodes.
#[test]
fn a_damaged_byte_is_noticed() {
    let geometry = geometry(2, 16, 64);
    let node = crate::transport::fixture::SendingNode::new(geometry.clone());
    let other = ReceivingNode::new(geometry);
    let proxy = crate::proxy::Proxy::new(node.address);
    let table = page_ids(0..64);
    node.export_whole(&key(1), &table, 1024);
    let load = other.load(&key(1), proxy.address, 0, 1024, &table);
    // The damaged byte is in the first page, after the greetings of at most two connections and a frame.
    proxy.allow(64 + 64 + 4096);
    wait_until("it is on its way", || {
        proxy.num_forwarded() >= 64 + 64 + 4096
    });
    proxy.damage_next_byte();
    proxy.allow_all();
    assert_eq!(wait(&load), LoadStatus::Failed(LoadFailure::Corrupt));
    assert_eq!(other.receiver.stats().num_corrupt_frames, 1);
    let again = other.load(&key(1), proxy.address, 0, 1024, &table);
    assert_eq!(wait(&again), LoadStatus::Done { num_rows: 1024 });
    other.assert_holds(&key(1), &table, 0);
}
