//! The node that loads blocks.

use corella_core::session::{
    BlockFetchEnd, BlockFetcher, FetcherAction, LoadBlocks, LoadFailure, NodeIncarnation,
    ToFetcher, ToSource, WantedBlocks,
};
use corella_core::{
    BlockList, FetchEnd, FetchGrant, FetchId, FetchRefusal, Incarnation, PageId, PageTable,
};

use super::{LOADER, SOURCE, config, key, list, lookup, part, rows};

pub fn fetcher_actions(fetcher: &mut BlockFetcher) -> Vec<FetcherAction> {
    std::iter::from_fn(|| fetcher.poll_action()).collect()
}

pub fn sent(message: ToSource) -> FetcherAction {
    let (node, key) = (SOURCE, key());
    FetcherAction::Send { node, key, message }
}

/// A request of a node that has the first block.
pub fn load_request(list: BlockList) -> WantedBlocks {
    WantedBlocks {
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

/// A fetcher that knows that its source has all three blocks.
fn choosing() -> BlockFetcher {
    let mut fetcher = BlockFetcher::new(config(), Incarnation(5));
    assert_eq!(fetcher.start(load_request(list()), 10), Some(key()));
    assert_eq!(fetcher_actions(&mut fetcher), [sent(lookup(1))]);
    assert_eq!(fetcher.poll_timeout(), Some(110));
    let found = ToFetcher::Found { num_blocks: 7 };
    fetcher.handle_message(LOADER, key(), found, 20);
    assert_eq!(fetcher_actions(&mut fetcher), []);
    fetcher.handle_message(SOURCE, key(), found, 20);
    let choose = FetcherAction::Choose {
        key: key(),
        num_offered: 3,
    };
    assert_eq!(fetcher_actions(&mut fetcher), [choose]);
    fetcher
}

/// A fetcher that has asked for the pages of three blocks.
pub fn loading() -> BlockFetcher {
    let mut fetcher = choosing();
    fetcher.handle_chosen(key(), 3);
    let actions = fetcher_actions(&mut fetcher);
    let [FetcherAction::BeginFetch { request, .. }] = &actions[..] else {
        panic!("{actions:?}");
    };
    assert_eq!((request.tokens.len(), request.hard_us), (12, 9_010));
    fetcher
}

pub fn granted() -> BlockFetcher {
    let mut fetcher = loading();
    let grant = FetchGrant {
        id: FetchId(4),
        num_found: 1,
        num_blocks: 3,
        tables: vec![PageTable {
            num_gone: 1,
            pages: vec![PageId(8), PageId(9)],
        }],
        state: None,
    };
    fetcher.handle_fetch_begun(key(), Ok(grant), 30);
    let asked = sent(ToSource::LoadBlocks(LoadBlocks {
        list: list(),
        first_block: 1,
        rows: rows(),
        lease_us: 8_980,
        credit: 2,
    }));
    assert_eq!(fetcher_actions(&mut fetcher), [asked]);
    fetcher
}

pub fn ended(end: BlockFetchEnd) -> FetcherAction {
    FetcherAction::Ended { key: key(), end }
}

pub fn end_fetch(end: FetchEnd) -> FetcherAction {
    let id = FetchId(4);
    FetcherAction::EndFetch { id, end }
}

#[test]
fn blocks_are_published_when_they_have_landed_and_are_confirmed() {
    let mut fetcher = granted();
    // The later block lands first, and then the confirmation comes for a block that has not landed.
    assert_eq!(fetcher.begin_part(SOURCE, key(), part(2)), Some(PageId(9)));
    fetcher.end_part(key(), part(2), true, 40);
    fetcher.handle_message(SOURCE, key(), ToFetcher::Complete { num_blocks: 3 }, 50);
    assert_eq!(fetcher_actions(&mut fetcher), []);
    assert_eq!(fetcher.begin_part(LOADER, key(), part(1)), None);
    assert_eq!(fetcher.begin_part(SOURCE, key(), part(1)), Some(PageId(8)));
    fetcher.end_part(key(), part(1), true, 60);
    let landed = sent(ToSource::Landed { num_blocks: 3 });
    assert_eq!(fetcher_actions(&mut fetcher), [landed]);
    fetcher.handle_message(SOURCE, key(), ToFetcher::Complete { num_blocks: 2 }, 70);
    let publish = FetcherAction::Publish {
        id: FetchId(4),
        num_blocks: 1,
    };
    assert_eq!(fetcher_actions(&mut fetcher), [publish]);
    fetcher.handle_message(SOURCE, key(), ToFetcher::Complete { num_blocks: 3 }, 80);
    let end = ended(BlockFetchEnd::Loaded { num_blocks: 3 });
    assert_eq!(
        fetcher_actions(&mut fetcher),
        [end_fetch(FetchEnd::Done), end]
    );
    assert_eq!((fetcher.num_fetches(), fetcher.poll_timeout()), (0, None));
}

#[test]
fn a_fetch_ends_when_nothing_of_it_is_being_written() {
    let mut fetcher = granted();
    assert_eq!(fetcher.begin_part(SOURCE, key(), part(1)), Some(PageId(8)));
    fetcher.handle_fetch_cancelled(FetchId(4));
    let stop = FetcherAction::StopRows { key: key() };
    assert_eq!(
        fetcher_actions(&mut fetcher),
        [sent(ToSource::Release), stop]
    );
    assert_eq!(fetcher.begin_part(SOURCE, key(), part(2)), None);
    let failed = ToFetcher::Failed(LoadFailure::HoldEnded);
    fetcher.handle_message(SOURCE, key(), failed, 40);
    assert_eq!(fetcher_actions(&mut fetcher), []);
    fetcher.end_part(key(), part(1), true, 50);
    let end = ended(BlockFetchEnd::Cancelled);
    assert_eq!(
        fetcher_actions(&mut fetcher),
        [end_fetch(FetchEnd::Lost), end]
    );
}

/// The transport has its own order of rows.
#[test]
fn rows_that_come_without_names_land_together() {
    let mut fetcher = granted();
    assert!(fetcher.begin_rows(key()));
    assert_eq!(fetcher.begin_part(SOURCE, key(), part(1)), None);
    fetcher.handle_progress(key(), 500);
    assert_eq!(fetcher.poll_timeout(), Some(1_500));
    fetcher.end_rows(key(), true, 600);
    let landed = sent(ToSource::Landed { num_blocks: 3 });
    assert_eq!(fetcher_actions(&mut fetcher), [landed]);
    fetcher.handle_message(SOURCE, key(), ToFetcher::Complete { num_blocks: 3 }, 700);
    let end = ended(BlockFetchEnd::Loaded { num_blocks: 3 });
    assert_eq!(
        fetcher_actions(&mut fetcher),
        [end_fetch(FetchEnd::Done), end]
    );

    // Some rows are lost.
    let mut fetcher = granted();
    assert!(fetcher.begin_rows(key()));
    fetcher.end_rows(key(), false, 600);
    let end = ended(BlockFetchEnd::RowsLost);
    assert_eq!(
        fetcher_actions(&mut fetcher),
        [sent(ToSource::Release), end_fetch(FetchEnd::Lost), end]
    );

    // The scheduler cancels the fetch: the pages are free when the writes have ended.
    let mut fetcher = granted();
    assert!(fetcher.begin_rows(key()));
    fetcher.handle_fetch_cancelled(FetchId(4));
    let stop = FetcherAction::StopRows { key: key() };
    assert_eq!(
        fetcher_actions(&mut fetcher),
        [sent(ToSource::Release), stop]
    );
    assert!(!fetcher.begin_rows(key()));
    fetcher.end_rows(key(), true, 600);
    let end = ended(BlockFetchEnd::Cancelled);
    assert_eq!(
        fetcher_actions(&mut fetcher),
        [end_fetch(FetchEnd::Lost), end]
    );
    fetcher.end_rows(key(), true, 700);
    assert_eq!(fetcher_actions(&mut fetcher), []);
}

#[test]
fn only_blocks_that_are_worth_it_are_loaded() {
    let mut fetcher = choosing();
    fetcher.handle_chosen(key(), 0);
    let end = ended(BlockFetchEnd::NotWorth);
    assert_eq!(fetcher_actions(&mut fetcher), [end]);
    fetcher.handle_chosen(key(), 2);
    assert_eq!(fetcher_actions(&mut fetcher), []);

    // A part of the offered blocks may be chosen, and no more than the offer.
    for (num_chosen, num_tokens) in [(2, 8), (9, 12)] {
        let mut fetcher = choosing();
        fetcher.handle_chosen(key(), num_chosen);
        let actions = fetcher_actions(&mut fetcher);
        let [FetcherAction::BeginFetch { request, .. }] = &actions[..] else {
            panic!("{actions:?}");
        };
        assert_eq!(request.tokens.len(), num_tokens);
    }

    // The decision misses its deadline.
    let mut fetcher = choosing();
    fetcher.handle_timeout(9_010);
    assert_eq!(
        fetcher_actions(&mut fetcher),
        [ended(BlockFetchEnd::TimedOut)]
    );
}

#[test]
fn every_stage_of_a_loader_has_an_end() {
    // The scheduler has not answered yet. Its late grant is given back.
    let mut fetcher = loading();
    assert_eq!(fetcher.poll_timeout(), Some(9_010));
    fetcher.handle_source_lost(key());
    assert_eq!(fetcher_actions(&mut fetcher), []);
    let grant = FetchGrant {
        id: FetchId(4),
        num_found: 0,
        num_blocks: 3,
        tables: vec![PageTable::whole(vec![PageId(0), PageId(1), PageId(2)])],
        state: None,
    };
    fetcher.handle_fetch_begun(key(), Ok(grant), 30);
    let end = ended(BlockFetchEnd::SourceLost);
    assert_eq!(
        fetcher_actions(&mut fetcher),
        [end_fetch(FetchEnd::Lost), end]
    );

    let mut fetcher = loading();
    fetcher.handle_fetch_begun(key(), Err(FetchRefusal::AllCached), 30);
    let end = ended(BlockFetchEnd::NoPages(FetchRefusal::AllCached));
    assert_eq!(fetcher_actions(&mut fetcher), [end]);

    // No part lands.
    let mut fetcher = granted();
    assert_eq!(fetcher.poll_timeout(), Some(1_030));
    fetcher.handle_timeout(1_029);
    assert_eq!(fetcher_actions(&mut fetcher), []);
    fetcher.handle_timeout(1_030);
    let end = ended(BlockFetchEnd::TimedOut);
    assert_eq!(
        fetcher_actions(&mut fetcher),
        [sent(ToSource::Release), end_fetch(FetchEnd::Lost), end]
    );
}

#[test]
fn loads_are_bounded() {
    let mut fetcher = BlockFetcher::new(config(), Incarnation(5));
    for number in 0..3 {
        let is_started = fetcher.start(load_request(list()), 0).is_some();
        assert_eq!(is_started, number < 2);
    }
}

/// The stages of the load are undone, and no message goes to the source, which is out of reach.
#[test]
fn a_load_ends_with_the_way_to_its_source() {
    let end = ended(BlockFetchEnd::SourceLost);
    let lost = [end_fetch(FetchEnd::Lost), end.clone()];
    let mut fetcher = choosing();
    fetcher.handle_source_lost(key());
    assert_eq!(fetcher_actions(&mut fetcher), [end]);

    // With and without a write under way.
    let mut fetcher = granted();
    fetcher.handle_source_lost(key());
    assert_eq!(fetcher_actions(&mut fetcher), lost);
    let mut fetcher = granted();
    assert!(fetcher.begin_rows(key()));
    fetcher.handle_source_lost(key());
    let stop = FetcherAction::StopRows { key: key() };
    assert_eq!(fetcher_actions(&mut fetcher), [stop]);
    fetcher.end_rows(key(), true, 40);
    assert_eq!(fetcher_actions(&mut fetcher), lost);

    // All rows have landed, and their confirmation was under way.
    let mut fetcher = granted();
    assert!(fetcher.begin_rows(key()));
    fetcher.end_rows(key(), true, 40);
    let landed = sent(ToSource::Landed { num_blocks: 3 });
    assert_eq!(fetcher_actions(&mut fetcher), [landed]);
    fetcher.handle_source_lost(key());
    assert_eq!(fetcher_actions(&mut fetcher), lost);
    let complete = ToFetcher::Complete { num_blocks: 3 };
    fetcher.handle_message(SOURCE, key(), complete, 50);
    fetcher.handle_source_lost(key());
    assert_eq!(fetcher_actions(&mut fetcher), []);
}
