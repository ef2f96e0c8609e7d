//! The pages of a load: both nodes mean the same ones, and they are those that a query behind the last block reads.

use corella_core::{
    BatchOutput, BlockList, FetchEnd, FetchRequest, KvGroup, Namespace, PageTable, Request,
    RequestId, Sample, Scheduler, SchedulerConfig, TokenId,
};

const NUM_BLOCKS: u32 = 9;

/// With windows that end in a page, at its end and far behind the prompt, for pages of several sizes, and with a part
/// of the blocks on the loading node already.
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
        let held = source.hold_blocks(&list, u64::MAX).unwrap();
        assert_eq!(held.num_blocks, NUM_BLOCKS);

        for num_found in 0..NUM_BLOCKS {
            let mut loader = scheduler(page_size, &groups);
            let num_rows = (num_found * page_size) as usize;
            if num_found > 0 {
                compute(&mut loader, &tokens[..num_rows]);
            }
            let grant = loader.begin_fetch(FetchRequest {
                namespace: Namespace::default(),
                tokens: tokens.clone(),
                soft_us: u64::MAX,
                hard_us: u64::MAX,
            });
            let grant = grant.unwrap();
            assert_eq!(grant.num_found, num_found);
            let tables = held.tables.iter().zip(&grant.tables);
            for (group, (held, granted)) in groups.iter().zip(tables) {
                let first = first_block_read(*group, page_size);
                assert_eq!(blocks(held, 0), (first..NUM_BLOCKS).collect::<Vec<_>>());
                assert_eq!(blocks(granted, 0), blocks(held, num_found));
                num_behind_windows += u32::from(first > num_found);
                // A session has its last row computed again, and may need one page more.
                let exported = group.first_page_exported(NUM_BLOCKS * page_size, page_size);
                assert!(exported == first || exported + 1 == first);
            }
            assert!(loader.handle_fetch_ended(grant.id, FetchEnd::Done));
            let mut longer = tokens.clone();
            longer.push(0);
            let num_cached = compute(&mut loader, &longer);
            assert_eq!(num_cached, NUM_BLOCKS * page_size);
        }
    }
    assert!(num_behind_windows > 300, "{num_behind_windows}");
}

/// The first block that has a row which a query behind all blocks reads.
fn first_block_read(group: KvGroup, page_size: u32) -> u32 {
    let query = NUM_BLOCKS * page_size;
    let is_read = |row: &u32| group.window.is_none_or(|window| query - row < window);
    (0..query).find(is_read).unwrap_or(query) / page_size
}

/// The blocks from `first` on that have a page.
fn blocks(table: &PageTable, first: u32) -> Vec<u32> {
    let has_page = |block: &u32| table.page(*block as usize).is_some();
    (first..NUM_BLOCKS).filter(has_page).collect()
}

fn scheduler(page_size: u32, groups: &[KvGroup]) -> Scheduler {
    let mut config = SchedulerConfig::new(64, page_size, 128);
    config.kv_groups = groups.to_vec();
    config.max_served_pages = 64;
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

/// Computes a prompt. Returns how many of its tokens were cached.
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
    output.num_cached_tokens
}
