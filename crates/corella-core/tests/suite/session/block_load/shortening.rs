//! Loads of fewer blocks than were chosen.

use corella_core::session::{
    BlockFetchEnd, BlockFetcher, FetcherAction, LoadBlocks, LoadFailure, LoadKey, ToFetcher,
    ToSource, WantedBlocks,
};
use corella_core::{
    BlockHasher, BlockList, FetchEnd, FetchGrant, FetchId, Incarnation, Namespace, PageId,
    PageTable,
};

use super::fetcher::{end_fetch, ended, fetcher_actions, granted, load_request, loading, sent};
use super::{SOURCE, config, key, list, part, rows};

fn not_here(num_blocks: u32) -> ToFetcher {
    ToFetcher::Failed(LoadFailure::NotHere { num_blocks })
}

/// The action that asks for the pages of the first two blocks.
fn shorten() -> FetcherAction {
    FetcherAction::ShortenFetch {
        key: key(),
        id: FetchId(4),
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
        state: None,
    }
}

/// The loading node has one of three blocks, and the source can lend one more.
#[test]
fn a_load_goes_on_with_the_first_blocks_if_its_source_can_lend_no_more() {
    let mut fetcher = granted();
    assert!(fetcher.begin_rows(key()));
    fetcher.handle_message(SOURCE, key(), not_here(2), 40);
    let stop = FetcherAction::StopRows { key: key() };
    assert_eq!(fetcher_actions(&mut fetcher), [stop]);
    // No write may begin from now on, and a repeated answer has no effect.
    assert_eq!(fetcher.begin_part(SOURCE, key(), part(1)), None);
    fetcher.handle_message(SOURCE, key(), not_here(2), 41);
    assert_eq!(fetcher_actions(&mut fetcher), []);
    fetcher.end_rows(key(), false, 42);
    assert_eq!(fetcher_actions(&mut fetcher), [shorten()]);

    fetcher.handle_fetch_shortened(key(), Some(short_grant()), 50);
    let next = LoadKey { number: 1, ..key() };
    let renamed = FetcherAction::Renamed { key: key(), next };
    let mut shorter = list();
    shorter.tokens.truncate(8);
    shorter.hashes.truncate(2);
    let asked = FetcherAction::Send {
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
    assert_eq!(fetcher_actions(&mut fetcher), [renamed, asked]);
    assert_eq!(fetcher.poll_timeout(), Some(1_050));

    // A late message under the first key concerns another load.
    let complete = ToFetcher::Complete { num_blocks: 2 };
    assert!(!fetcher.begin_rows(key()));
    fetcher.handle_message(SOURCE, key(), not_here(1), 60);
    assert!(fetcher.begin_rows(next));
    fetcher.end_rows(next, true, 70);
    fetcher.handle_message(SOURCE, key(), complete, 71);
    let landed = FetcherAction::Send {
        node: SOURCE,
        key: next,
        message: ToSource::Landed { num_blocks: 2 },
    };
    assert_eq!(fetcher_actions(&mut fetcher), [landed]);
    fetcher.handle_message(SOURCE, next, complete, 80);
    let end = FetcherAction::Ended {
        key: next,
        end: BlockFetchEnd::Loaded { num_blocks: 2 },
    };
    assert_eq!(
        fetcher_actions(&mut fetcher),
        [end_fetch(FetchEnd::Done), end]
    );
    assert_eq!((fetcher.num_fetches(), fetcher.poll_timeout()), (0, None));
}

#[test]
fn a_load_ends_if_its_source_can_lend_nothing_or_says_so_too_late() {
    // No block, the one block of the loading node, all three blocks, and more than requested.
    for num_blocks in [0, 1, 3, 4] {
        let mut fetcher = granted();
        fetcher.handle_message(SOURCE, key(), not_here(num_blocks), 40);
        let end = ended(BlockFetchEnd::Failed(LoadFailure::NotHere { num_blocks }));
        assert_eq!(
            fetcher_actions(&mut fetcher),
            [end_fetch(FetchEnd::Lost), end]
        );
    }

    // A part has landed.
    let mut fetcher = granted();
    assert_eq!(fetcher.begin_part(SOURCE, key(), part(1)), Some(PageId(8)));
    fetcher.end_part(key(), part(1), true, 40);
    fetcher_actions(&mut fetcher);
    fetcher.handle_message(SOURCE, key(), not_here(2), 50);
    let end = ended(BlockFetchEnd::Failed(LoadFailure::NotHere {
        num_blocks: 2,
    }));
    assert_eq!(
        fetcher_actions(&mut fetcher),
        [end_fetch(FetchEnd::Lost), end]
    );
}

#[test]
fn a_load_that_is_shortened_ends_with_its_fetch_in_every_stage() {
    let lost = |end| [end_fetch(FetchEnd::Lost), ended(end)];
    // The source is lost while rows are being stopped.
    let mut fetcher = granted();
    assert!(fetcher.begin_rows(key()));
    fetcher.handle_message(SOURCE, key(), not_here(2), 40);
    fetcher_actions(&mut fetcher);
    fetcher.handle_source_lost(key());
    fetcher.end_rows(key(), false, 50);
    assert_eq!(
        fetcher_actions(&mut fetcher),
        lost(BlockFetchEnd::SourceLost)
    );

    // The scheduler has not answered yet, and may take too long.
    for is_granted in [true, false] {
        let mut fetcher = granted();
        fetcher.handle_message(SOURCE, key(), not_here(2), 40);
        assert_eq!(fetcher_actions(&mut fetcher), [shorten()]);
        assert_eq!(fetcher.poll_timeout(), Some(1_040));
        fetcher.handle_timeout(1_040);
        assert_eq!(fetcher_actions(&mut fetcher), []);
        let answer = is_granted.then(short_grant);
        fetcher.handle_fetch_shortened(key(), answer, 1_050);
        assert_eq!(fetcher_actions(&mut fetcher), lost(BlockFetchEnd::TimedOut));
        assert_eq!(fetcher.num_fetches(), 0);
    }

    // The scheduler has cancelled the fetch.
    let mut fetcher = granted();
    fetcher.handle_message(SOURCE, key(), not_here(2), 40);
    fetcher_actions(&mut fetcher);
    fetcher.handle_fetch_shortened(key(), None, 50);
    assert_eq!(
        fetcher_actions(&mut fetcher),
        lost(BlockFetchEnd::Cancelled)
    );
}

/// The scheduler may have pages for fewer blocks than were chosen. The source is asked for these alone.
#[test]
fn a_load_asks_for_the_blocks_that_it_has_pages_for() {
    let mut fetcher = loading();
    fetcher.handle_fetch_begun(key(), Ok(short_grant()), 30);
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
    assert_eq!(fetcher_actions(&mut fetcher), [asked]);
    assert_eq!(fetcher.begin_part(SOURCE, key(), part(2)), None);
    assert_eq!(fetcher.begin_part(SOURCE, key(), part(1)), Some(PageId(6)));
    fetcher.end_part(key(), part(1), true, 40);
    let landed = sent(ToSource::Landed { num_blocks: 2 });
    assert_eq!(fetcher_actions(&mut fetcher), [landed]);
    fetcher.handle_message(SOURCE, key(), ToFetcher::Complete { num_blocks: 2 }, 50);
    let end = ended(BlockFetchEnd::Loaded { num_blocks: 2 });
    assert_eq!(
        fetcher_actions(&mut fetcher),
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
    let mut fetcher = BlockFetcher::new(config(), Incarnation(5));
    let request = WantedBlocks {
        num_here: 0,
        ..load_request(list)
    };
    fetcher.start(request, 0);
    let found = ToFetcher::Found { num_blocks: 10 };
    fetcher.handle_message(SOURCE, key(), found, 0);
    fetcher.handle_chosen(key(), 10);
    let grant = |num_blocks| FetchGrant {
        id: FetchId(4),
        num_found: 0,
        num_blocks,
        tables: vec![PageTable::whole((0..num_blocks).map(PageId).collect())],
        state: None,
    };
    fetcher.handle_fetch_begun(key(), Ok(grant(10)), 0);
    fetcher_actions(&mut fetcher);
    for number in 0..3 {
        let (asked, num_blocks) = (LoadKey { number, ..key() }, 9 - number as u32);
        fetcher.handle_message(SOURCE, asked, not_here(num_blocks), 10);
        fetcher.handle_fetch_shortened(asked, Some(grant(num_blocks)), 20);
        let actions = fetcher_actions(&mut fetcher);
        assert!(
            matches!(actions[2], FetcherAction::Send { key, .. } if key.number == number + 1),
            "{actions:?}"
        );
    }
    let last = LoadKey { number: 3, ..key() };
    fetcher.handle_message(SOURCE, last, not_here(6), 30);
    let failure = LoadFailure::NotHere { num_blocks: 6 };
    let end = FetcherAction::Ended {
        key: last,
        end: BlockFetchEnd::Failed(failure),
    };
    assert_eq!(
        fetcher_actions(&mut fetcher),
        [end_fetch(FetchEnd::Lost), end]
    );
}
