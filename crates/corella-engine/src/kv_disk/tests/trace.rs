//! Conversations through a pool that is much smaller than the disk, beside caches of other kinds.

use std::collections::HashSet;

use xxhash_rust::xxh3::xxh3_64;

use super::*;

const NUM_REQUESTS: u64 = 400;
/// The longest prompt has 40 blocks.
const MAX_BLOCKS: usize = 40;
const NUM_PAGES: u32 = 80;
/// A block of the mock has 64 bytes of rows, which take a sector beside that of the header.
const SLOT_BYTES: u64 = 1024;
/// The length of a file's beginning, before its pages.
const LABEL_BYTES: u64 = 4096;

/// Returns prompts as ids of their blocks: a block that all share, and then the turns of conversations, each of which
/// may go on within the next 200 requests.
fn prompts() -> Vec<Vec<u32>> {
    let mut num_drawn = 0_u64;
    let mut below = |end: u64| {
        num_drawn += 1;
        xxh3_64(&num_drawn.to_le_bytes()) % end
    };
    let mut prompts: Vec<Vec<u32>> = Vec::new();
    let mut next_block = 1;
    for _ in 0..NUM_REQUESTS {
        let earlier = prompts.len().checked_sub(1 + below(200) as usize);
        let earlier = earlier.filter(|_| below(2) > 0).map(|at| &prompts[at]);
        let (mut prompt, num_new) = match earlier {
            Some(earlier) if earlier.len() < MAX_BLOCKS - 4 => (earlier.clone(), 1 + below(4)),
            _ => (vec![0], 1 + below(12)),
        };
        for _ in 0..num_new {
            prompt.push(next_block);
            next_block += 1;
        }
        prompts.push(prompt);
    }
    prompts
}

/// Returns the number of blocks that a cache of `size` blocks finds. A block counts after all blocks before it. The
/// cache drops the least recently used block. Among blocks of the same prompt, it drops the last one first.
fn lru_hits(prompts: &[Vec<u32>], size: usize) -> usize {
    // The newest use is the last.
    let mut cached: Vec<u32> = Vec::new();
    let mut num_hits = 0;
    for prompt in prompts {
        num_hits += prompt
            .iter()
            .take_while(|block| cached.contains(block))
            .count();
        cached.retain(|block| !prompt.contains(block));
        cached.extend(prompt.iter().rev());
        cached.drain(..cached.len().saturating_sub(size));
    }
    num_hits
}

impl Bench {
    /// Answers the prompts one after the other. The disk has time to write in between. Returns the number of blocks
    /// that were not computed.
    fn play(&mut self, prompts: &[Vec<u32>]) -> usize {
        prompts.iter().map(|prompt| self.play_one(prompt)).sum()
    }

    fn play_one(&mut self, prompt: &[u32]) -> usize {
        let mut tokens: Vec<TokenId> = Vec::new();
        for &block in prompt {
            tokens.extend([1 + block, 0, 0, 0]);
        }
        // The last token is computed for its logits.
        tokens.push(0);
        let num_tokens = tokens.len();
        let request = self.request_of(tokens);
        // However slow this machine is, the disk counts as quicker than computing.
        self.disk.paces = DiskPaces::new(1);
        self.begin_fetch_of(&request);
        self.run_until("the prompt is fetched", |bench| {
            bench.disk.fetches.is_empty()
        });
        let num_computed = self.answer(request, 1_000 * num_tokens as u64);
        loop {
            self.disk.store_next(&mut self.scheduler, self.now_us);
            if self.disk.path.is_none() {
                return (num_tokens - num_computed) / 4;
            }
            self.run_until("a part is stored", |bench| {
                bench.disk.path.as_ref().is_none_or(|path| !path.is_busy)
            });
        }
    }
}

#[test]
fn a_pool_and_a_disk_find_as_much_as_an_lru_of_the_disks_size() {
    let prompts = prompts();
    let num_blocks: usize = prompts.iter().map(Vec::len).sum();
    let distinct: HashSet<_> = prompts.iter().flatten().collect();
    let most = lru_hits(&prompts, distinct.len());
    assert_eq!(most, num_blocks - distinct.len());
    let mut found = vec![lru_hits(&prompts, NUM_PAGES as usize)];
    for part in [4, 2] {
        let num_slots = distinct.len() / part;
        let name = format!("trace-{part}");
        let max_bytes = LABEL_BYTES + num_slots as u64 * SLOT_BYTES;
        let mut bench = Bench::with_tier(&name, NUM_PAGES, max_bytes, |_, _| {});
        assert_eq!(bench.disk.tier.stats().max_pages as usize, num_slots);
        let num_hits = bench.play(&prompts);
        let expected = lru_hits(&prompts, num_slots);
        let percent = |num: usize| 100.0 * num as f64 / num_blocks as f64;
        println!(
            "1/{part} of {} blocks on the disk: {:.2} % found, {:.2} % by an LRU, {:.2} % without limits",
            distinct.len(),
            percent(num_hits),
            percent(expected),
            percent(most),
        );
        assert!(
            percent(num_hits) >= percent(expected) - 1.0 && num_hits <= most,
            "{num_hits} of {num_blocks} blocks found, {expected} by an LRU, {most} without limits"
        );
        assert_eq!(bench.scheduler.stats().num_in_use_pages, 0);
        found.push(num_hits);
    }
    // For these prompts, the disk is worth more than ten points, and twice the room on it five more.
    assert!(
        found[1] > found[0] + num_blocks / 10 && found[2] > found[1] + num_blocks / 20,
        "{found:?} of {num_blocks}"
    );
}
