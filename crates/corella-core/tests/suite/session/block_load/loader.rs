//! The node that loads blocks.

use corella_core::session::{
    BlockLoader, LoadBlocks, LoadEnd, LoadFailure, LoadRequest, LoaderAction, NodeIncarnation,
    ToLoader, ToSource,
};
use corella_core::{
    BlockList, FetchEnd, FetchGrant, FetchId, FetchRefusal, Incarnation, PageId, PageTable,
};

use super::{LOADER, SOURCE, config, key, list, lookup, part, rows};

pub fn loader_actions(loader: &mut BlockLoader) -> Vec<LoaderAction> {
    std::iter::from_fn(|| loader.poll_action()).collect()
}

pub fn sent(message: ToSource) -> LoaderAction {
    let (node, key) = (SOURCE, key());
    LoaderAction::Send { node, key, message }
}

/// A request of a node that has the first block.
pub fn load_request(list: BlockList) -> LoadRequest {
    LoadRequest {
        source: NodeIncarnation {
            node: SOURCE,
            incarnation: Incarnation(7),
        },
        list,
        num_here: 1,
        rows: rows(),
        soft_us: 3_000,
        hard_us: 9_010,
    }
}

/// A loader that knows that its source has all three blocks.
fn choosing() -> BlockLoader {
    let mut loader = BlockLoader::new(config(), Incarnation(5));
    assert_eq!(loader.start(load_request(list()), 10), Some(key()));
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
pub fn loading() -> BlockLoader {
    let mut loader = choosing();
    loader.handle_chosen(key(), 3);
    let actions = loader_actions(&mut loader);
    let [LoaderAction::BeginFetch { request, .. }] = &actions[..] else {
        panic!("{actions:?}");
    };
    assert_eq!((request.tokens.len(), request.hard_us), (12, 9_010));
    loader
}

pub fn granted() -> BlockLoader {
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

pub fn ended(end: LoadEnd) -> LoaderAction {
    LoaderAction::Ended { key: key(), end }
}

pub fn end_fetch(end: FetchEnd) -> LoaderAction {
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
    loader.handle_source_lost(key());
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
fn loads_are_bounded() {
    let mut loader = BlockLoader::new(config(), Incarnation(5));
    for number in 0..3 {
        let is_started = loader.start(load_request(list()), 0).is_some();
        assert_eq!(is_started, number < 2);
    }
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
