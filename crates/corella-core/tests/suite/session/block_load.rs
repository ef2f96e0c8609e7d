//! Both ends of a load, message by message.

use corella_core::session::{
    BlockLoader, BlockPart, BlockSource, LoadBlocks, LoadConfig, LoadEnd, LoadFailure, LoadKey,
    LoadRequest, LoaderAction, Peer, RowPart, SourceAction, ToLoader, ToSource,
};
use corella_core::{
    BlockHasher, BlockList, FetchEnd, FetchGrant, FetchId, FetchRefusal, HeldBlocks, HoldId,
    HoldRefusal, Incarnation, Namespace, NodeId, PageId, PageTable,
};

const LOADER: NodeId = NodeId(1);
const SOURCE: NodeId = NodeId(2);

/// Pages of four tokens, one group with one layer, credit for two blocks.
fn config() -> LoadConfig {
    LoadConfig {
        lookup_us: 100,
        stall_us: 1_000,
        lease_us: 5_000,
        max_loads: 2,
        credit_blocks: 2,
        ..LoadConfig::new(4, vec![1])
    }
}

/// Three blocks.
fn list() -> BlockList {
    let tokens = (0..12).collect();
    BlockList::new(Namespace::default(), tokens, &BlockHasher::default(), 4)
}

fn rows() -> RowPart {
    RowPart {
        layers: 0..1,
        heads: 0..8,
    }
}

fn part(block: u32) -> BlockPart {
    BlockPart {
        block,
        group: 0,
        layer: 0,
    }
}

fn key() -> LoadKey {
    LoadKey {
        loader: Incarnation(5),
        source: Incarnation(7),
        number: 0,
    }
}

fn load_blocks(credit: u32) -> ToSource {
    ToSource::LoadBlocks(LoadBlocks {
        list: list(),
        first_block: 0,
        rows: rows(),
        lease_us: 9_000,
        credit,
    })
}

fn lookup(first_block: u32) -> ToSource {
    let list = list();
    ToSource::Lookup { list, first_block }
}

fn held(num_blocks: u32) -> HeldBlocks {
    HeldBlocks {
        id: HoldId(3),
        num_blocks,
        tables: vec![PageTable::whole((0..num_blocks).map(PageId).collect())],
    }
}

fn source_actions(source: &mut BlockSource) -> Vec<SourceAction> {
    std::iter::from_fn(|| source.poll_action()).collect()
}

fn loader_actions(loader: &mut BlockLoader) -> Vec<LoaderAction> {
    std::iter::from_fn(|| loader.poll_action()).collect()
}

fn told(message: ToLoader) -> SourceAction {
    let load = (LOADER, key());
    SourceAction::Send { load, message }
}

fn sent(message: ToSource) -> LoaderAction {
    let (node, key) = (SOURCE, key());
    LoaderAction::Send { node, key, message }
}

/// A source that sends three blocks, two of them for a start.
fn sending() -> BlockSource {
    let mut source = BlockSource::new(config(), Incarnation(7));
    source.handle_message(LOADER, key(), load_blocks(2), 10);
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
        assert_eq!(actions[0], told(ToLoader::Complete { num_blocks: 1 }));
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
                ToLoader::Complete { num_blocks: 3 },
                ToLoader::Complete { num_blocks: 3 },
            ),
            false => (
                ToLoader::Failed(LoadFailure::HoldEnded),
                ToLoader::Failed(LoadFailure::Unknown),
            ),
        };
        assert_eq!(source_actions(&mut source), [told(answer)]);
        assert_eq!(source.num_loads(), 0);
        // The same message once more.
        assert_eq!(landed(&mut source, 3, 70), [told(again)]);
        source.handle_message(LOADER, key(), load_blocks(2), 80);
        assert_eq!(source_actions(&mut source), []);
    }
}

#[test]
fn nothing_is_confirmed_after_a_hold_has_ended() {
    let mut source = sending();
    let load = (LOADER, key());
    source.handle_hold_ended(HoldId(3), 30);
    let failed = told(ToLoader::Failed(LoadFailure::HoldEnded));
    assert_eq!(
        source_actions(&mut source),
        [failed, SourceAction::Stop { load }]
    );
    // One part is still being read, and one has landed elsewhere.
    assert_eq!(landed(&mut source, 2, 40), []);
    source.handle_stopped(load, 50);
    let release = SourceAction::Release {
        load,
        hold: HoldId(3),
        is_asked: false,
    };
    assert_eq!(source_actions(&mut source), [release]);
    let unknown = told(ToLoader::Failed(LoadFailure::Unknown));
    assert_eq!(landed(&mut source, 2, 60), [unknown]);
}

#[test]
fn a_source_refuses_what_it_has_not_and_what_makes_no_sense() {
    let load = (LOADER, key());
    let mut source = BlockSource::new(config(), Incarnation(7));
    source.handle_message(LOADER, key(), load_blocks(0), 10);
    let refused = told(ToLoader::Failed(LoadFailure::Refused));
    assert_eq!(source_actions(&mut source), [refused]);
    source.handle_message(LOADER, key(), load_blocks(2), 10);
    source_actions(&mut source);
    source.handle_held(load, Ok(held(2)), 20);
    let release = SourceAction::Release {
        load,
        hold: HoldId(3),
        is_asked: false,
    };
    let not_here = LoadFailure::NotHere { num_blocks: 2 };
    let failed = told(ToLoader::Failed(not_here));
    assert_eq!(source_actions(&mut source), [release, failed]);

    let mut source = BlockSource::new(config(), Incarnation(8));
    source.handle_message(LOADER, key(), load_blocks(2), 10);
    let unknown = told(ToLoader::Failed(LoadFailure::Unknown));
    assert_eq!(source_actions(&mut source), [unknown]);
}

#[test]
fn every_stage_of_a_source_has_an_end() {
    // No part lands.
    let mut source = sending();
    assert_eq!(source.poll_timeout(), Some(1_010));
    source.handle_timeout(1_010);
    let stalled = told(ToLoader::Failed(LoadFailure::Stalled));
    assert_eq!(source_actions(&mut source)[0], stalled);
    // The loader restarts before the scheduler answers.
    let load = (LOADER, key());
    let mut source = BlockSource::new(config(), Incarnation(7));
    source.handle_message(LOADER, key(), load_blocks(2), 10);
    source_actions(&mut source);
    source.handle_incarnation(LOADER, Incarnation(6), 20);
    source.handle_held(load, Err(HoldRefusal::NothingHere), 30);
    assert_eq!(source_actions(&mut source), []);
    assert_eq!(source.num_loads(), 0);
}

/// Rule 52: the way to this life of the loader is lost, and it is told nothing.
#[test]
fn a_lost_loader_leaves_nothing_with_its_source() {
    let load = (LOADER, key());
    let mut source = sending();
    source.handle_loader_lost(Incarnation(4), 30);
    assert_eq!(source_actions(&mut source), []);
    source.handle_loader_lost(Incarnation(5), 30);
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

/// A loader that knows that its source has all three blocks.
fn choosing() -> BlockLoader {
    let mut loader = BlockLoader::new(config(), Incarnation(5));
    let request = LoadRequest {
        source: Peer {
            node: SOURCE,
            incarnation: Incarnation(7),
        },
        list: list(),
        num_here: 1,
        rows: rows(),
        soft_us: 3_000,
        hard_us: 9_010,
    };
    assert_eq!(loader.start(request, 10), Some(key()));
    assert_eq!(loader_actions(&mut loader), [sent(lookup(1))]);
    assert_eq!(loader.poll_timeout(), Some(110));
    let found = ToLoader::Found { num_blocks: 7 };
    loader.handle_message(LOADER, key(), found, 20);
    assert_eq!(loader_actions(&mut loader), []);
    loader.handle_message(SOURCE, key(), found, 20);
    let choose = LoaderAction::Choose {
        key: key(),
        num_offered: 3,
    };
    assert_eq!(loader_actions(&mut loader), [choose]);
    loader
}

/// A loader that has asked for the pages of three blocks.
fn loading() -> BlockLoader {
    let mut loader = choosing();
    loader.handle_chosen(key(), 3);
    let actions = loader_actions(&mut loader);
    let [LoaderAction::BeginFetch { request, .. }] = &actions[..] else {
        panic!("{actions:?}");
    };
    assert_eq!((request.tokens.len(), request.hard_us), (12, 9_010));
    loader
}

fn granted() -> BlockLoader {
    let mut loader = loading();
    let grant = FetchGrant {
        id: FetchId(4),
        num_found: 1,
        num_blocks: 3,
        tables: vec![PageTable {
            num_gone: 1,
            pages: vec![PageId(8), PageId(9)],
        }],
    };
    loader.handle_fetch_begun(key(), Ok(grant), 30);
    let asked = sent(ToSource::LoadBlocks(LoadBlocks {
        list: list(),
        first_block: 1,
        rows: rows(),
        lease_us: 8_980,
        credit: 2,
    }));
    assert_eq!(loader_actions(&mut loader), [asked]);
    loader
}

fn ended(end: LoadEnd) -> LoaderAction {
    LoaderAction::Ended { key: key(), end }
}

fn end_fetch(end: FetchEnd) -> LoaderAction {
    let fetch = FetchId(4);
    LoaderAction::EndFetch { fetch, end }
}

#[test]
fn blocks_are_published_when_they_have_landed_and_are_confirmed() {
    let mut loader = granted();
    // The later block lands first, and then the confirmation comes for a block that has not landed.
    assert_eq!(loader.begin_part(SOURCE, key(), part(2)), Some(PageId(9)));
    loader.end_part(key(), part(2), true, 40);
    loader.handle_message(SOURCE, key(), ToLoader::Complete { num_blocks: 3 }, 50);
    assert_eq!(loader_actions(&mut loader), []);
    assert_eq!(loader.begin_part(LOADER, key(), part(1)), None);
    assert_eq!(loader.begin_part(SOURCE, key(), part(1)), Some(PageId(8)));
    loader.end_part(key(), part(1), true, 60);
    let landed = sent(ToSource::Landed { num_blocks: 3 });
    assert_eq!(loader_actions(&mut loader), [landed]);
    loader.handle_message(SOURCE, key(), ToLoader::Complete { num_blocks: 2 }, 70);
    let publish = LoaderAction::Publish {
        fetch: FetchId(4),
        num_blocks: 1,
    };
    assert_eq!(loader_actions(&mut loader), [publish]);
    loader.handle_message(SOURCE, key(), ToLoader::Complete { num_blocks: 3 }, 80);
    let end = ended(LoadEnd::Loaded { num_blocks: 3 });
    assert_eq!(
        loader_actions(&mut loader),
        [end_fetch(FetchEnd::Done), end]
    );
    assert_eq!((loader.num_loads(), loader.poll_timeout()), (0, None));
}

#[test]
fn a_fetch_ends_when_nothing_of_it_is_being_written() {
    let mut loader = granted();
    assert_eq!(loader.begin_part(SOURCE, key(), part(1)), Some(PageId(8)));
    loader.handle_fetch_cancelled(FetchId(4));
    let stop = LoaderAction::StopRows { key: key() };
    assert_eq!(loader_actions(&mut loader), [sent(ToSource::Release), stop]);
    assert_eq!(loader.begin_part(SOURCE, key(), part(2)), None);
    let failed = ToLoader::Failed(LoadFailure::HoldEnded);
    loader.handle_message(SOURCE, key(), failed, 40);
    assert_eq!(loader_actions(&mut loader), []);
    loader.end_part(key(), part(1), true, 50);
    let end = ended(LoadEnd::Cancelled);
    assert_eq!(
        loader_actions(&mut loader),
        [end_fetch(FetchEnd::Lost), end]
    );
}

/// A transport with its own order of rows.
#[test]
fn rows_that_come_without_names_land_together() {
    let mut loader = granted();
    assert!(loader.begin_rows(key()));
    assert_eq!(loader.begin_part(SOURCE, key(), part(1)), None);
    loader.handle_progress(key(), 500);
    assert_eq!(loader.poll_timeout(), Some(1_500));
    loader.end_rows(key(), true, 600);
    let landed = sent(ToSource::Landed { num_blocks: 3 });
    assert_eq!(loader_actions(&mut loader), [landed]);
    loader.handle_message(SOURCE, key(), ToLoader::Complete { num_blocks: 3 }, 700);
    let end = ended(LoadEnd::Loaded { num_blocks: 3 });
    assert_eq!(
        loader_actions(&mut loader),
        [end_fetch(FetchEnd::Done), end]
    );

    // Some rows are lost.
    let mut loader = granted();
    assert!(loader.begin_rows(key()));
    loader.end_rows(key(), false, 600);
    let end = ended(LoadEnd::RowsLost);
    assert_eq!(
        loader_actions(&mut loader),
        [sent(ToSource::Release), end_fetch(FetchEnd::Lost), end]
    );

    // The scheduler wants no more of them: its pages are free when the writes have ended.
    let mut loader = granted();
    assert!(loader.begin_rows(key()));
    loader.handle_fetch_cancelled(FetchId(4));
    let stop = LoaderAction::StopRows { key: key() };
    assert_eq!(loader_actions(&mut loader), [sent(ToSource::Release), stop]);
    assert!(!loader.begin_rows(key()));
    loader.end_rows(key(), true, 600);
    let end = ended(LoadEnd::Cancelled);
    assert_eq!(
        loader_actions(&mut loader),
        [end_fetch(FetchEnd::Lost), end]
    );
    loader.end_rows(key(), true, 700);
    assert_eq!(loader_actions(&mut loader), []);
}

#[test]
fn only_blocks_that_are_worth_it_are_loaded() {
    let mut loader = choosing();
    loader.handle_chosen(key(), 0);
    let end = ended(LoadEnd::NotWorth);
    assert_eq!(loader_actions(&mut loader), [end]);
    loader.handle_chosen(key(), 2);
    assert_eq!(loader_actions(&mut loader), []);

    // A part of the offer, and at most the offer.
    for (num_chosen, num_tokens) in [(2, 8), (9, 12)] {
        let mut loader = choosing();
        loader.handle_chosen(key(), num_chosen);
        let actions = loader_actions(&mut loader);
        let [LoaderAction::BeginFetch { request, .. }] = &actions[..] else {
            panic!("{actions:?}");
        };
        assert_eq!(request.tokens.len(), num_tokens);
    }

    // The decision misses its deadline.
    let mut loader = choosing();
    loader.handle_timeout(9_010);
    assert_eq!(loader_actions(&mut loader), [ended(LoadEnd::TimedOut)]);
}

#[test]
fn every_stage_of_a_loader_has_an_end() {
    // The scheduler has not answered yet. Its late grant is given back.
    let mut loader = loading();
    assert_eq!(loader.poll_timeout(), Some(9_010));
    loader.handle_incarnation(SOURCE, Incarnation(8));
    assert_eq!(loader_actions(&mut loader), []);
    let grant = FetchGrant {
        id: FetchId(4),
        num_found: 0,
        num_blocks: 3,
        tables: vec![PageTable::whole(vec![PageId(0), PageId(1), PageId(2)])],
    };
    loader.handle_fetch_begun(key(), Ok(grant), 30);
    let end = ended(LoadEnd::SourceLost);
    assert_eq!(
        loader_actions(&mut loader),
        [end_fetch(FetchEnd::Lost), end]
    );

    let mut loader = loading();
    loader.handle_fetch_begun(key(), Err(FetchRefusal::AllCached), 30);
    let end = ended(LoadEnd::NoPages(FetchRefusal::AllCached));
    assert_eq!(loader_actions(&mut loader), [end]);

    // No part lands.
    let mut loader = granted();
    assert_eq!(loader.poll_timeout(), Some(1_030));
    loader.handle_timeout(1_029);
    assert_eq!(loader_actions(&mut loader), []);
    loader.handle_timeout(1_030);
    let end = ended(LoadEnd::TimedOut);
    assert_eq!(
        loader_actions(&mut loader),
        [sent(ToSource::Release), end_fetch(FetchEnd::Lost), end]
    );
}

#[test]
fn loads_and_lookups_are_bounded() {
    let mut loader = BlockLoader::new(config(), Incarnation(5));
    let request = LoadRequest {
        source: Peer {
            node: SOURCE,
            incarnation: Incarnation(7),
        },
        list: list(),
        num_here: 1,
        rows: rows(),
        soft_us: 3_000,
        hard_us: 9_000,
    };
    assert!(loader.start(request.clone(), 0).is_some());
    assert!(loader.start(request.clone(), 0).is_some());
    assert_eq!(loader.start(request, 0), None);

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
        message: ToLoader::Failed(LoadFailure::Refused),
    };
    assert_eq!(actions[2], refused);
    source.handle_looked_up((LOADER, numbered(0)), 2, 0);
    let found = SourceAction::Send {
        load: (LOADER, numbered(0)),
        message: ToLoader::Found { num_blocks: 2 },
    };
    assert_eq!(source_actions(&mut source), [found]);
}

/// The stages of the load are undone, and no message goes to the source, which is out of reach.
#[test]
fn a_load_ends_with_the_way_to_its_source() {
    let end = ended(LoadEnd::SourceLost);
    let lost = [end_fetch(FetchEnd::Lost), end.clone()];
    let mut loader = choosing();
    loader.handle_source_lost(key());
    assert_eq!(loader_actions(&mut loader), [end]);

    // With and without a write under way.
    let mut loader = granted();
    loader.handle_source_lost(key());
    assert_eq!(loader_actions(&mut loader), lost);
    let mut loader = granted();
    assert!(loader.begin_rows(key()));
    loader.handle_source_lost(key());
    let stop = LoaderAction::StopRows { key: key() };
    assert_eq!(loader_actions(&mut loader), [stop]);
    loader.end_rows(key(), true, 40);
    assert_eq!(loader_actions(&mut loader), lost);

    // All rows have landed, and their confirmation was under way.
    let mut loader = granted();
    assert!(loader.begin_rows(key()));
    loader.end_rows(key(), true, 40);
    let landed = sent(ToSource::Landed { num_blocks: 3 });
    assert_eq!(loader_actions(&mut loader), [landed]);
    loader.handle_source_lost(key());
    assert_eq!(loader_actions(&mut loader), lost);
    let complete = ToLoader::Complete { num_blocks: 3 };
    loader.handle_message(SOURCE, key(), complete, 50);
    loader.handle_source_lost(key());
    assert_eq!(loader_actions(&mut loader), []);
}

fn not_here(num_blocks: u32) -> ToLoader {
    ToLoader::Failed(LoadFailure::NotHere { num_blocks })
}

/// The action that asks for the pages of the first two blocks.
fn shorten() -> LoaderAction {
    LoaderAction::ShortenFetch {
        key: key(),
        fetch: FetchId(4),
        num_blocks: 2,
    }
}

/// The pages of the second block.
fn short_grant() -> FetchGrant {
    FetchGrant {
        id: FetchId(4),
        num_found: 1,
        num_blocks: 2,
        tables: vec![PageTable {
            num_gone: 1,
            pages: vec![PageId(6)],
        }],
    }
}

/// The loading node has one of three blocks, and the source can lend one more.
#[test]
fn a_load_goes_on_with_the_first_blocks_if_its_source_can_lend_no_more() {
    let mut loader = granted();
    assert!(loader.begin_rows(key()));
    loader.handle_message(SOURCE, key(), not_here(2), 40);
    let stop = LoaderAction::StopRows { key: key() };
    assert_eq!(loader_actions(&mut loader), [stop]);
    // No write may begin from now on, and a repeated answer has no effect.
    assert_eq!(loader.begin_part(SOURCE, key(), part(1)), None);
    loader.handle_message(SOURCE, key(), not_here(2), 41);
    assert_eq!(loader_actions(&mut loader), []);
    loader.end_rows(key(), false, 42);
    assert_eq!(loader_actions(&mut loader), [shorten()]);

    loader.handle_fetch_shortened(key(), Some(short_grant()), 50);
    let next = LoadKey { number: 1, ..key() };
    let renamed = LoaderAction::Renamed { key: key(), next };
    let mut shorter = list();
    shorter.tokens.truncate(8);
    shorter.hashes.truncate(2);
    let asked = LoaderAction::Send {
        node: SOURCE,
        key: next,
        message: ToSource::LoadBlocks(LoadBlocks {
            list: shorter,
            first_block: 1,
            rows: rows(),
            lease_us: 8_960,
            credit: 2,
        }),
    };
    assert_eq!(loader_actions(&mut loader), [renamed, asked]);
    assert_eq!(loader.poll_timeout(), Some(1_050));

    // A late message under the first key concerns another load.
    let complete = ToLoader::Complete { num_blocks: 2 };
    assert!(!loader.begin_rows(key()));
    loader.handle_message(SOURCE, key(), not_here(1), 60);
    assert!(loader.begin_rows(next));
    loader.end_rows(next, true, 70);
    loader.handle_message(SOURCE, key(), complete, 71);
    let landed = LoaderAction::Send {
        node: SOURCE,
        key: next,
        message: ToSource::Landed { num_blocks: 2 },
    };
    assert_eq!(loader_actions(&mut loader), [landed]);
    loader.handle_message(SOURCE, next, complete, 80);
    let end = LoaderAction::Ended {
        key: next,
        end: LoadEnd::Loaded { num_blocks: 2 },
    };
    assert_eq!(
        loader_actions(&mut loader),
        [end_fetch(FetchEnd::Done), end]
    );
    assert_eq!((loader.num_loads(), loader.poll_timeout()), (0, None));
}

#[test]
fn a_load_ends_if_its_source_can_lend_nothing_or_says_so_too_late() {
    // 0 blocks, the loading node's own one, all three, and more than requested.
    for num_blocks in [0, 1, 3, 4] {
        let mut loader = granted();
        loader.handle_message(SOURCE, key(), not_here(num_blocks), 40);
        let end = ended(LoadEnd::Failed(LoadFailure::NotHere { num_blocks }));
        assert_eq!(
            loader_actions(&mut loader),
            [end_fetch(FetchEnd::Lost), end]
        );
    }

    // A part has landed.
    let mut loader = granted();
    assert_eq!(loader.begin_part(SOURCE, key(), part(1)), Some(PageId(8)));
    loader.end_part(key(), part(1), true, 40);
    loader_actions(&mut loader);
    loader.handle_message(SOURCE, key(), not_here(2), 50);
    let end = ended(LoadEnd::Failed(LoadFailure::NotHere { num_blocks: 2 }));
    assert_eq!(
        loader_actions(&mut loader),
        [end_fetch(FetchEnd::Lost), end]
    );
}

#[test]
fn a_load_that_is_shortened_ends_with_its_fetch_in_every_stage() {
    let lost = |end| [end_fetch(FetchEnd::Lost), ended(end)];
    // While rows are being stopped.
    let mut loader = granted();
    assert!(loader.begin_rows(key()));
    loader.handle_message(SOURCE, key(), not_here(2), 40);
    loader_actions(&mut loader);
    loader.handle_source_lost(key());
    loader.end_rows(key(), false, 50);
    assert_eq!(loader_actions(&mut loader), lost(LoadEnd::SourceLost));

    // The scheduler has not answered yet, and may take too long.
    for is_granted in [true, false] {
        let mut loader = granted();
        loader.handle_message(SOURCE, key(), not_here(2), 40);
        assert_eq!(loader_actions(&mut loader), [shorten()]);
        assert_eq!(loader.poll_timeout(), Some(1_040));
        loader.handle_timeout(1_040);
        assert_eq!(loader_actions(&mut loader), []);
        let answer = is_granted.then(short_grant);
        loader.handle_fetch_shortened(key(), answer, 1_050);
        assert_eq!(loader_actions(&mut loader), lost(LoadEnd::TimedOut));
        assert_eq!(loader.num_loads(), 0);
    }

    // The scheduler has cancelled the fetch.
    let mut loader = granted();
    loader.handle_message(SOURCE, key(), not_here(2), 40);
    loader_actions(&mut loader);
    loader.handle_fetch_shortened(key(), None, 50);
    assert_eq!(loader_actions(&mut loader), lost(LoadEnd::Cancelled));
}

/// The scheduler may have pages for fewer blocks than were chosen. The source is asked for these alone.
#[test]
fn a_load_asks_for_the_blocks_that_it_has_pages_for() {
    let mut loader = loading();
    loader.handle_fetch_begun(key(), Ok(short_grant()), 30);
    let mut first = list();
    first.tokens.truncate(8);
    first.hashes.truncate(2);
    let asked = sent(ToSource::LoadBlocks(LoadBlocks {
        list: first,
        first_block: 1,
        rows: rows(),
        lease_us: 8_980,
        credit: 2,
    }));
    assert_eq!(loader_actions(&mut loader), [asked]);
    assert_eq!(loader.begin_part(SOURCE, key(), part(2)), None);
    assert_eq!(loader.begin_part(SOURCE, key(), part(1)), Some(PageId(6)));
    loader.end_part(key(), part(1), true, 40);
    let landed = sent(ToSource::Landed { num_blocks: 2 });
    assert_eq!(loader_actions(&mut loader), [landed]);
    loader.handle_message(SOURCE, key(), ToLoader::Complete { num_blocks: 2 }, 50);
    let end = ended(LoadEnd::Loaded { num_blocks: 2 });
    assert_eq!(
        loader_actions(&mut loader),
        [end_fetch(FetchEnd::Done), end]
    );
}

/// A source that has one block less at each request.
#[test]
fn a_load_is_shortened_a_few_times() {
    let list = BlockList::new(
        Namespace::default(),
        (0..40).collect(),
        &BlockHasher::default(),
        4,
    );
    let mut loader = BlockLoader::new(config(), Incarnation(5));
    let request = LoadRequest {
        source: Peer {
            node: SOURCE,
            incarnation: Incarnation(7),
        },
        list,
        num_here: 0,
        rows: rows(),
        soft_us: 3_000,
        hard_us: 9_010,
    };
    loader.start(request, 0);
    let found = ToLoader::Found { num_blocks: 10 };
    loader.handle_message(SOURCE, key(), found, 0);
    loader.handle_chosen(key(), 10);
    let grant = |num_blocks| FetchGrant {
        id: FetchId(4),
        num_found: 0,
        num_blocks,
        tables: vec![PageTable::whole((0..num_blocks).map(PageId).collect())],
    };
    loader.handle_fetch_begun(key(), Ok(grant(10)), 0);
    loader_actions(&mut loader);
    for number in 0..3 {
        let (asked, num_blocks) = (LoadKey { number, ..key() }, 9 - number as u32);
        loader.handle_message(SOURCE, asked, not_here(num_blocks), 10);
        loader.handle_fetch_shortened(asked, Some(grant(num_blocks)), 20);
        let actions = loader_actions(&mut loader);
        assert!(
            matches!(actions[2], LoaderAction::Send { key, .. } if key.number == number + 1),
            "{actions:?}"
        );
    }
    let last = LoadKey { number: 3, ..key() };
    loader.handle_message(SOURCE, last, not_here(6), 30);
    let failure = LoadFailure::NotHere { num_blocks: 6 };
    let end = LoaderAction::Ended {
        key: last,
        end: LoadEnd::Failed(failure),
    };
    assert_eq!(
        loader_actions(&mut loader),
        [end_fetch(FetchEnd::Lost), end]
    );
}
