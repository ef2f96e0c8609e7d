//! The pages of a load: both nodes name the same pages, which are the ones that a query after the last block reads.

use corella_core::{
    BatchOutput, BlockList, FetchEnd, FetchMedium, FetchRequest, KvGroup, Namespace, PageTable,
    Request, RequestId, Sample, Scheduler, SchedulerConfig, TokenId,
};

const NUM_BLOCKS: u32 = 9;

/// Tries windows that end in a page, at its end and far after the prompt, and pages of several sizes. The loading node
/// already has a part of the blocks.
#[test]
fn both_ends_of_a_load_have_the_pages_that_the_next_query_reads() {
    let mut num_behind_windows = 0;
    for (page_size, window) in (1..5).flat_map(|size| (1..45).map(move |window| (size, window))) {
        let groups = [None, Some(window)].map(|window| KvGroup { window });
        let tokens: Vec<TokenId> = (0..NUM_BLOCKS * page_size).collect();
        let mut source = scheduler(page_size, &groups);
        compute(&mut source, &tokens);
        let list = list(&source, &tokens);
        assert_eq!(source.look_up_blocks(&list), NUM_BLOCKS);
        for num_found in 0..NUM_BLOCKS {
            let num_lent = source.stats().num_served_pages;
            assert_eq!(num_lent, 0);
            let held = source.hold_blocks(&list, num_found, u64::MAX).unwrap();
            assert_eq!(held.num_blocks, NUM_BLOCKS);
            let mut loader = scheduler(page_size, &groups);
            let num_rows = (num_found * page_size) as usize;
            if num_found > 0 {
                compute(&mut loader, &tokens[..num_rows]);
            }
            let grant = loader.begin_fetch(FetchRequest {
                medium: FetchMedium::Peer,
                namespace: Namespace::default(),
                tokens: tokens.clone(),
                soft_us: u64::MAX,
                hard_us: u64::MAX,
            });
            let grant = grant.unwrap();
            assert_eq!(grant.num_found, num_found);
            let tables = held.tables.iter().zip(&grant.tables);
            for (group, (held, granted)) in groups.iter().zip(tables) {
                let first = first_block_read(*group, page_size, NUM_BLOCKS);
                let lacking: Vec<_> = (first.max(num_found)..NUM_BLOCKS).collect();
                assert_eq!(blocks(held), lacking);
                assert_eq!(blocks(granted), lacking);
                num_behind_windows += u32::from(first > num_found);
                // A session has its last row computed again, and may need one more page.
                let exported = group.first_page_exported(NUM_BLOCKS * page_size, page_size);
                assert!(exported == first || exported + 1 == first);
            }
            let num_lent: usize = held.tables.iter().map(|table| table.pages.len()).sum();
            assert_eq!(source.stats().num_served_pages, num_lent);
            assert_eq!(source.release_blocks(held.id, 0), Some(true));
            assert!(loader.handle_fetch_ended(grant.id, FetchEnd::Done));
            let mut longer = tokens.clone();
            longer.push(0);
            let num_cached = compute(&mut loader, &longer);
            assert_eq!(num_cached, NUM_BLOCKS * page_size);
        }
    }
    assert!(num_behind_windows > 300, "{num_behind_windows}");
}

/// A source that may lend few pages lends the blocks that fit, and a fetch that is shortened to them has exactly the
/// lent pages.
#[test]
fn a_part_of_a_load_has_the_pages_that_a_query_behind_it_reads() {
    let mut num_parts = 0;
    for (window, limit) in (1..20).flat_map(|window| (1..20).map(move |limit| (window, limit))) {
        let (page_size, num_found) = (3, window % 4);
        let groups = [None, Some(window)].map(|window| KvGroup { window });
        let tokens: Vec<TokenId> = (0..NUM_BLOCKS * page_size).collect();
        let mut source = lender(page_size, &groups, limit);
        compute(&mut source, &tokens);
        let list = list(&source, &tokens);
        let num_pages = |num_blocks: u32| -> u32 {
            let first = |group| first_block_read(group, page_size, num_blocks).max(num_found);
            groups.map(|group| num_blocks - first(group)).iter().sum()
        };
        let fitting = (num_found + 1..=NUM_BLOCKS).filter(|&num| num_pages(num) <= limit);
        let num_fitting = fitting.max();
        let num_offered = source.look_up_lendable(&list, num_found);
        assert_eq!(num_offered, num_fitting.unwrap_or(num_found));
        let held = source.hold_blocks(&list, num_found, u64::MAX);
        let Some(num_blocks) = num_fitting else {
            assert!(held.is_err());
            continue;
        };
        let held = held.unwrap();
        assert_eq!(held.num_blocks, num_blocks);

        let mut loader = scheduler(page_size, &groups);
        if num_found > 0 {
            compute(&mut loader, &tokens[..(num_found * page_size) as usize]);
        }
        let fetch = loader.begin_fetch(FetchRequest {
            medium: FetchMedium::Peer,
            namespace: Namespace::default(),
            tokens: tokens.clone(),
            soft_us: u64::MAX,
            hard_us: u64::MAX,
        });
        let mut grant = fetch.unwrap();
        if num_blocks < NUM_BLOCKS {
            grant = loader.shorten_fetch(grant.id, num_blocks).unwrap();
            num_parts += 1;
        }
        for ((&group, held), granted) in groups.iter().zip(&held.tables).zip(&grant.tables) {
            let first = first_block_read(group, page_size, num_blocks).max(num_found);
            assert_eq!(blocks(held), (first..num_blocks).collect::<Vec<_>>());
            assert_eq!(blocks(granted), blocks(held));
        }
        assert_eq!(
            loader.stats().num_fetching_pages as u32,
            num_pages(num_blocks)
        );
        assert!(loader.handle_fetch_ended(grant.id, FetchEnd::Done));
        let num_cached = compute(&mut loader, &[&tokens[..], &[0]].concat());
        assert_eq!(num_cached, num_blocks * page_size);
    }
    assert!(num_parts > 100, "{num_parts}");
}

/// The first block with a row that a query after `num_blocks` blocks reads.
fn first_block_read(group: KvGroup, page_size: u32, num_blocks: u32) -> u32 {
    let query = num_blocks * page_size;
    let is_read = |row: &u32| group.window.is_none_or(|window| query - row < window);
    (0..query).find(is_read).unwrap_or(query) / page_size
}

/// The blocks with a page.
fn blocks(table: &PageTable) -> Vec<u32> {
    let has_page = |block: &u32| table.page(*block as usize).is_some();
    (0..NUM_BLOCKS).filter(has_page).collect()
}

fn scheduler(page_size: u32, groups: &[KvGroup]) -> Scheduler {
    lender(page_size, groups, 64)
}

/// A scheduler that lends `num_pages` pages at a time.
fn lender(page_size: u32, groups: &[KvGroup], num_pages: u32) -> Scheduler {
    let mut config = SchedulerConfig::new(64, page_size, 128);
    config.kv_groups = groups.to_vec();
    config.max_served_pages = num_pages;
    config.max_fetched_pages = 64;
    Scheduler::new(config).unwrap()
}

fn list(scheduler: &Scheduler, tokens: &[TokenId]) -> BlockList {
    let config = scheduler.config();
    let hasher = &config.block_hasher;
    BlockList::new(
        Namespace::default(),
        tokens.to_vec(),
        hasher,
        config.page_size,
    )
}

/// Computes a prompt. Returns the number of its cached tokens.
fn compute(scheduler: &mut Scheduler, prompt: &[TokenId]) -> u32 {
    let request = Request::greedy(RequestId(0), prompt.to_vec(), 1);
    scheduler.add_requests(vec![request]).unwrap();
    while let Some(batch) = scheduler.schedule(0) {
        let drawing = batch.spans.iter().filter(|span| span.yields.draws());
        let sample = Sample {
            token: 0,
            logprobs: None,
        };
        scheduler.update_from_output(&BatchOutput {
            step: batch.step,
            samples: drawing.map(|span| (span.slot, sample.clone())).collect(),
            logprobs: Vec::new(),
            hidden_states: Vec::new(),
            undrawn: Vec::new(),
        });
    }
    scheduler.check_invariants();
    let output = scheduler.poll_output().expect("the request has ended");
    output.cache_use.num_cached_tokens
}
