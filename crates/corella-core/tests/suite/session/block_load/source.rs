//! The node that lends blocks.

use corella_core::session::{
    BlockSource, LoadBlocks, LoadFailure, LoadKey, SourceAction, ToFetcher, ToSource,
};
use corella_core::{HoldId, HoldRefusal, Incarnation};

use super::{LOADER, config, held, key, list, load_blocks, lookup, request, rows};

fn source_actions(source: &mut BlockSource) -> Vec<SourceAction> {
    std::iter::from_fn(|| source.poll_action()).collect()
}

fn told(message: ToFetcher) -> SourceAction {
    let load = (LOADER, key());
    SourceAction::Send { load, message }
}

/// A source that sends three blocks, and first only two of them.
fn sending() -> BlockSource {
    let mut source = BlockSource::new(config(), Incarnation(7));
    source.handle_message(LOADER, key(), load_blocks(), 10);
    let load = (LOADER, key());
    let hold = SourceAction::Hold {
        load,
        list: list(),
        first_block: 0,
        // The source's own lease is shorter than the requested one.
        until_us: 5_010,
    };
    assert_eq!(source_actions(&mut source), [hold]);
    source.handle_held(load, Ok(held(3)), 20);
    let read = SourceAction::Read {
        load,
        tables: held(3).tables,
        blocks: 0..2,
        rows: rows(),
    };
    assert_eq!(source_actions(&mut source), [read]);
    source
}

fn landed(source: &mut BlockSource, num_blocks: u32, now_us: u64) -> Vec<SourceAction> {
    let message = ToSource::Landed { num_blocks };
    source.handle_message(LOADER, key(), message, now_us);
    source_actions(source)
}

#[test]
fn a_load_is_complete_when_its_hold_has_lived_to_the_end() {
    for has_lived in [true, false] {
        let mut source = sending();
        let load = (LOADER, key());
        let actions = landed(&mut source, 1, 30);
        assert_eq!(actions[0], told(ToFetcher::Complete { num_blocks: 1 }));
        assert!(matches!(&actions[1], SourceAction::Read { blocks, .. } if *blocks == (2..3)));
        assert_eq!(landed(&mut source, 1, 31), []);
        assert_eq!(landed(&mut source, 3, 40), [SourceAction::Stop { load }]);
        source.handle_stopped(load, 50);
        let release = SourceAction::Release {
            load,
            hold: HoldId(3),
            is_asked: true,
        };
        assert_eq!(source_actions(&mut source), [release]);
        source.handle_released(load, has_lived, 60);
        let (answer, again) = match has_lived {
            true => (
                ToFetcher::Complete { num_blocks: 3 },
                ToFetcher::Complete { num_blocks: 3 },
            ),
            false => (
                ToFetcher::Failed(LoadFailure::HoldEnded),
                ToFetcher::Failed(LoadFailure::Unknown),
            ),
        };
        assert_eq!(source_actions(&mut source), [told(answer)]);
        assert_eq!(source.num_loads(), 0);
        // The same message once more.
        assert_eq!(landed(&mut source, 3, 70), [told(again)]);
        source.handle_message(LOADER, key(), load_blocks(), 80);
        assert_eq!(source_actions(&mut source), []);
    }
}

#[test]
fn nothing_is_confirmed_after_a_hold_has_ended() {
    let mut source = sending();
    let load = (LOADER, key());
    source.handle_hold_ended(HoldId(3), 30);
    let failed = told(ToFetcher::Failed(LoadFailure::HoldEnded));
    assert_eq!(
        source_actions(&mut source),
        [failed, SourceAction::Stop { load }]
    );
    // One part is still being read, and the other has landed on the loading node.
    assert_eq!(landed(&mut source, 2, 40), []);
    source.handle_stopped(load, 50);
    let release = SourceAction::Release {
        load,
        hold: HoldId(3),
        is_asked: false,
    };
    assert_eq!(source_actions(&mut source), [release]);
    let unknown = told(ToFetcher::Failed(LoadFailure::Unknown));
    assert_eq!(landed(&mut source, 2, 60), [unknown]);
}

#[test]
fn a_source_refuses_blocks_that_it_cannot_hold_and_messages_to_another_life() {
    let load = (LOADER, key());
    let mut source = BlockSource::new(config(), Incarnation(7));
    source.handle_message(LOADER, key(), load_blocks(), 10);
    source_actions(&mut source);
    source.handle_held(load, Ok(held(2)), 20);
    let release = SourceAction::Release {
        load,
        hold: HoldId(3),
        is_asked: false,
    };
    let not_here = LoadFailure::NotHere { num_blocks: 2 };
    let failed = told(ToFetcher::Failed(not_here));
    assert_eq!(source_actions(&mut source), [release, failed]);

    let mut source = BlockSource::new(config(), Incarnation(8));
    source.handle_message(LOADER, key(), load_blocks(), 10);
    let unknown = told(ToFetcher::Failed(LoadFailure::Unknown));
    assert_eq!(source_actions(&mut source), [unknown]);
}

/// Each request has one fault: no block is missing, no block may be sent, the lease is over at once, or tokens do not
/// fill the blocks.
#[test]
fn a_malformed_request_is_refused_before_anything_is_held() {
    let faults: [fn(&mut LoadBlocks); 5] = [
        |request| request.first_block = 3,
        |request| request.credit = 0,
        |request| request.lease_us = 0,
        |request| request.list.tokens.truncate(11),
        |request| request.list.hashes.truncate(2),
    ];
    for add_fault in faults {
        let mut request = request();
        add_fault(&mut request);
        let mut source = BlockSource::new(config(), Incarnation(7));
        source.handle_message(LOADER, key(), ToSource::LoadBlocks(request), 10);
        let refused = told(ToFetcher::Failed(LoadFailure::Refused));
        assert_eq!(source_actions(&mut source), [refused]);
        assert_eq!(source.num_loads(), 0);
    }
}

/// Two of three blocks were sent.
#[test]
fn blocks_that_were_not_sent_do_not_land() {
    let mut source = sending();
    assert_eq!(landed(&mut source, 3, 30), []);
    assert_eq!(landed(&mut source, u32::MAX, 31), []);
    let complete = told(ToFetcher::Complete { num_blocks: 2 });
    assert_eq!(landed(&mut source, 2, 32)[0], complete);
}

#[test]
fn loads_are_bounded_at_their_source() {
    let mut source = BlockSource::new(config(), Incarnation(7));
    let numbered = |number| LoadKey { number, ..key() };
    for number in 0..3 {
        source.handle_message(LOADER, numbered(number), load_blocks(), 10);
    }
    let refused = SourceAction::Send {
        load: (LOADER, numbered(2)),
        message: ToFetcher::Failed(LoadFailure::Refused),
    };
    assert_eq!(source_actions(&mut source)[2], refused);
    assert_eq!(source.num_loads(), 2);
}

#[test]
fn every_stage_of_a_source_has_an_end() {
    // No part lands.
    let mut source = sending();
    assert_eq!(source.poll_timeout(), Some(1_010));
    source.handle_timeout(1_010);
    let stalled = told(ToFetcher::Failed(LoadFailure::Stalled));
    assert_eq!(source_actions(&mut source)[0], stalled);
    // The fetcher restarts before the scheduler answers.
    let load = (LOADER, key());
    let mut source = BlockSource::new(config(), Incarnation(7));
    source.handle_message(LOADER, key(), load_blocks(), 10);
    source_actions(&mut source);
    source.handle_fetcher_lost(Incarnation(5), 20);
    source.handle_held(load, Err(HoldRefusal::NothingHere), 30);
    assert_eq!(source_actions(&mut source), []);
    assert_eq!(source.num_loads(), 0);
}

/// Rule 52: the connection to this incarnation of the fetcher is lost, so no message goes to it.
#[test]
fn a_lost_loader_leaves_nothing_with_its_source() {
    let load = (LOADER, key());
    let mut source = sending();
    source.handle_fetcher_lost(Incarnation(4), 30);
    assert_eq!(source_actions(&mut source), []);
    source.handle_fetcher_lost(Incarnation(5), 30);
    assert_eq!(source_actions(&mut source), [SourceAction::Stop { load }]);
    source.handle_stopped(load, 40);
    let release = SourceAction::Release {
        load,
        hold: HoldId(3),
        is_asked: false,
    };
    assert_eq!(source_actions(&mut source), [release]);
    assert_eq!(source.num_loads(), 0);
}

#[test]
fn lookups_are_bounded() {
    let mut source = BlockSource::new(config(), Incarnation(7));
    let numbered = |number| LoadKey { number, ..key() };
    for number in 0..3 {
        source.handle_message(LOADER, numbered(number), lookup(1), 0);
    }
    let actions = source_actions(&mut source);
    let asked = SourceAction::LookUp {
        load: (LOADER, numbered(1)),
        list: list(),
        first_block: 1,
    };
    assert_eq!(actions[1], asked);
    let refused = SourceAction::Send {
        load: (LOADER, numbered(2)),
        message: ToFetcher::Failed(LoadFailure::Refused),
    };
    assert_eq!(actions[2], refused);
    source.handle_looked_up((LOADER, numbered(0)), 2, 0);
    let found = SourceAction::Send {
        load: (LOADER, numbered(0)),
        message: ToFetcher::Found { num_blocks: 2 },
    };
    assert_eq!(source_actions(&mut source), [found]);
}
