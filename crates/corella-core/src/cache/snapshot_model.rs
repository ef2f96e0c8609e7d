//! Compares the cache of a model with recurrent layers with a simple model of it: a map from the tokens before each
//! snapshot to its number and the time of its last use. `kv_cache_model.rs` and `residency_model.rs` model the pages.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use crate::cache::kv_cache::KvCache;
use crate::cache::kv_cache::retention::RetentionLimit;
use crate::cache::kv_cache_model::below;
use crate::cache::prefix_tree::{KnownPath, Parent};
use crate::{BlockId, KvGroup, Namespace, PageId, SnapshotId, StepId, TokenId};

const NUM_RUNS: u64 = 200;
const NUM_OPERATIONS: usize = 300;
const PAGE_SIZE: usize = 2;

#[test]
fn snapshots_are_kept_like_their_model() {
    let mut counts = [0; 9];
    for seed in 0..NUM_RUNS {
        let mut pair = Pair::new(seed);
        for _ in 0..NUM_OPERATIONS {
            pair.operate();
            pair.compare();
        }
        for (sum, count) in counts.iter_mut().zip(pair.counts) {
            *sum += count;
        }
    }
    assert!(
        counts.iter().all(|&count| count >= 300),
        "the runs miss a case: {counts:?}"
    );
}

struct Kept {
    id: SnapshotId,
    filled_by: StepId,
    /// The clock at the last use.
    last_used: u64,
    named_by: StepId,
    is_pinned: bool,
    /// The end of its retention; 0 if it is not retained.
    retained_until_us: u64,
}

struct Pair {
    cache: KvCache,
    num_snapshots: usize,
    /// Snapshots of blocks, by the tokens before them.
    kept: BTreeMap<Vec<TokenId>, Kept>,
    /// Snapshots without a block, with the step that named them last.
    free: BTreeMap<SnapshotId, StepId>,
    step: StepId,
    now_us: u64,
    num_uses: u64,
    random: u64,
    /// Hits, overwritten snapshots, snapshots that had to stay, snapshots that left with their block, taken-over
    /// blocks, snapshots whose request has a newer one, retained snapshots that were overwritten, that gave their place
    /// to another, and snapshots that were not retained.
    counts: [u64; 9],
}

impl Pair {
    fn new(seed: u64) -> Self {
        let mut random = seed;
        let num_pages = 3 + below(&mut random, 30) as u32;
        let num_snapshots = below(&mut random, 7) as u32;
        let cache = KvCache::new(num_pages, PAGE_SIZE as u32, &[KvGroup::default()]);
        Self {
            cache: cache.with_snapshots(num_snapshots),
            num_snapshots: num_snapshots as usize,
            kept: BTreeMap::new(),
            free: (0..num_snapshots)
                .map(|id| (SnapshotId(id), StepId(0)))
                .collect(),
            step: StepId(1),
            now_us: 0,
            num_uses: 0,
            random,
            counts: [0; 9],
        }
    }

    fn below(&mut self, bound: u64) -> u64 {
        below(&mut self.random, bound)
    }

    fn operate(&mut self) {
        // Several operations belong to one step.
        self.step.0 += u64::from(self.below(2) == 0);
        let num_tokens = (1 + self.below(5) as usize) * PAGE_SIZE;
        let tokens: Vec<_> = (0..num_tokens).map(|_| self.below(2) as TokenId).collect();
        match self.below(18) {
            0..9 => self.run(&tokens),
            9 => self.unpublish(&tokens),
            10 => self.pin(&tokens),
            11 => self.drop_passing(),
            12..16 => self.retain(),
            16 => self.pass_time(),
            _ => self.cache.clear(),
        }
        self.forget_removed();
    }

    /// A request finds a prefix, publishes the rest, keeps a state after some block, and ends.
    fn run(&mut self, tokens: &[TokenId]) {
        let namespace = Namespace::default();
        let known = &mut KnownPath::default();
        let found = self.cache.find_prefix(&namespace, tokens, self.step, known);
        let num_found = found.path.len();
        let expected = |step: StepId| {
            let mut ends = (0..=tokens.len() / PAGE_SIZE).rev();
            let is_there = |&num_blocks: &usize| {
                let kept = self.kept.get(&tokens[..num_blocks * PAGE_SIZE]);
                num_blocks == 0 || kept.is_some_and(|kept| kept.filled_by < step)
            };
            ends.find(is_there)
        };
        assert_eq!(Some(num_found), expected(self.step), "blocks found");
        let next = StepId(self.step.0 + 1);
        assert_eq!(Some(found.num_found_next), expected(next), "found next");
        assert!(found.donor.is_none(), "rows are lent without their state");
        for page in found.tables.pages() {
            self.cache.lock(page);
        }
        if let Some(&end) = found.path.last() {
            self.counts[0] += 1;
            let id = self.cache.restore_snapshot(end, self.step);
            let (step, num_uses) = (self.step, self.next_use());
            let kept = self
                .kept
                .get_mut(&tokens[..num_found * PAGE_SIZE])
                .expect("it was found");
            assert_eq!(id, Some(kept.id));
            (kept.named_by, kept.last_used) = (step, num_uses);
        }
        let mut tables = found.tables;
        let num_blocks = tokens.len() / PAGE_SIZE;
        if self.cache.try_extend(&mut tables, |_| num_blocks) {
            self.forget_removed();
            let path = self.publish(tokens, found.path, |at| tables.group(0).page(at));
            let at = self.below(num_blocks as u64) as usize;
            if let Some(&block) = path.get(at) {
                self.take(&tokens[..(at + 1) * PAGE_SIZE], block);
            }
        }
        self.cache.unlock_all(tables.take_pages());
    }

    /// Publishes blocks after a path, and returns the path to the last. No other request holds pages, so each block
    /// that the tree already has takes over the new pages.
    fn publish(
        &mut self,
        tokens: &[TokenId],
        mut path: Vec<BlockId>,
        page: impl Fn(usize) -> Option<PageId>,
    ) -> Vec<BlockId> {
        let namespace = Namespace::default();
        for at in path.len()..tokens.len() / PAGE_SIZE {
            let parent = path
                .last()
                .map_or(Parent::Root(&namespace), |&end| Parent::Block(end));
            let block_tokens = &tokens[at * PAGE_SIZE..(at + 1) * PAGE_SIZE];
            let page = |_| page(at);
            match self.cache.publish(parent, block_tokens, page, self.step) {
                Ok(block) => path.push(block),
                Err(there) => {
                    let is_pinned = self
                        .cache
                        .page(there, 0)
                        .is_some_and(|page| self.cache.is_pinned(page));
                    let is_taken = self.cache.take_over(there, page, self.step);
                    assert_ne!(
                        is_taken, is_pinned,
                        "a page that is held is replaced, or another is not"
                    );
                    if !is_taken {
                        return path;
                    }
                    self.counts[4] += 1;
                    path.push(there);
                }
            }
        }
        path
    }

    fn take(&mut self, path: &[TokenId], block: BlockId) {
        let step = self.step;
        let free = self.free.iter().find(|&(_, &named_by)| named_by < step);
        let mut expected = free.map(|(&id, _)| id);
        if expected.is_none() {
            let idle = self
                .kept
                .iter()
                .filter(|(_, kept)| kept.named_by < step && !kept.is_pinned);
            let oldest = idle.min_by_key(|(_, kept)| (kept.retained_until_us, kept.last_used));
            if let Some(path) = oldest.map(|(path, _)| path.clone()) {
                self.counts[1] += 1;
                let kept = self.kept.remove(&path);
                let was_retained = kept.as_ref().is_some_and(|it| it.retained_until_us > 0);
                self.counts[6] += u64::from(was_retained);
                expected = kept.map(|kept| kept.id);
            }
        }
        self.counts[2] += u64::from(expected.is_none() && self.num_snapshots > 0);
        assert_eq!(self.cache.can_take_snapshot(step), expected.is_some());
        let taken = self.cache.try_take_snapshot(step);
        assert_eq!(taken, expected, "the snapshot that is overwritten");
        let Some(id) = taken else { return };
        self.cache.check_held_snapshots(core::iter::once(id));
        self.free.remove(&id);
        let last_used = self.next_use();
        self.cache.give_snapshot(id, block);
        match self.kept.get_mut(path) {
            Some(there) => {
                there.last_used = last_used;
                self.free.insert(id, step);
            }
            None => {
                let kept = Kept {
                    id,
                    filled_by: step,
                    last_used,
                    named_by: step,
                    is_pinned: false,
                    retained_until_us: 0,
                };
                self.kept.insert(path.to_vec(), kept);
            }
        }
    }

    fn unpublish(&mut self, tokens: &[TokenId]) {
        let blocks = self
            .cache
            .match_prefix(&Namespace::default(), tokens)
            .blocks;
        if let Some(&last) = blocks.last() {
            self.cache.unpublish(last);
        }
    }

    /// A request that keeps a newer state drops an older snapshot. The snapshot stays where its block is pinned or a
    /// step in flight names it.
    fn drop_passing(&mut self) {
        let at = self.below(self.kept.len() as u64 + 1) as usize;
        let Some(path) = self.kept.keys().nth(at).cloned() else {
            return;
        };
        let last_returned = StepId(self.step.0 - self.below(2));
        let blocks = self.cache.match_prefix(&Namespace::default(), &path).blocks;
        let block = *blocks.last().expect("a kept state has a block");
        self.cache
            .drop_passing_snapshot_of(block, Some(last_returned));
        let is_dropped = |kept: &&mut Kept| {
            !kept.is_pinned && kept.retained_until_us == 0 && kept.named_by <= last_returned
        };
        if self.kept.get_mut(&path).as_ref().is_some_and(is_dropped) {
            self.counts[5] += 1;
            let kept = self.kept.remove(&path).expect("it was found");
            self.free.insert(kept.id, kept.named_by);
        }
    }

    fn pin(&mut self, tokens: &[TokenId]) {
        let namespace = Namespace::default();
        let last_returned = Some(StepId(self.step.0 - 1));
        let pinned = self.cache.pin_prefix(&namespace, tokens, last_returned, 4);
        if pinned.is_ok() {
            let kept = self.kept.get_mut(tokens).expect("a snapshot at its end");
            (kept.is_pinned, kept.retained_until_us) = (true, 0);
        }
    }

    /// A request retains a prefix that ends at a snapshot. The pages are modelled elsewhere.
    fn retain(&mut self) {
        const LIMIT: usize = 1;
        let at = self.below(self.kept.len() as u64 + 1) as usize;
        let Some(path) = self.kept.keys().nth(at).cloned() else {
            return;
        };
        let end_us = self.now_us + 1 + self.below(200);
        let blocks = self.cache.match_prefix(&Namespace::default(), &path).blocks;
        let limit = RetentionLimit {
            num_pages: usize::MAX,
            num_snapshots: LIMIT,
        };
        let is_retained = |(_, kept): &(&Vec<TokenId>, &Kept)| kept.retained_until_us > 0;
        let retained: Vec<_> = self.kept.iter().filter(is_retained).collect();
        let kept = &self.kept[&path];
        let needs_place = !kept.is_pinned && kept.retained_until_us == 0;
        let first = retained
            .iter()
            .min_by_key(|(_, it)| (it.retained_until_us, it.id));
        let first = first.filter(|_| needs_place && retained.len() >= LIMIT);
        let first = first.map(|&(path, it)| (path.clone(), it.retained_until_us));
        let fits = first.as_ref().is_none_or(|&(_, its)| its < end_us);
        if let Some((first, _)) = first.filter(|_| fits) {
            self.counts[7] += 1;
            self.kept
                .get_mut(&first)
                .expect("it is kept")
                .retained_until_us = 0;
        }
        if fits && let Some(kept) = self.kept.get_mut(&path).filter(|kept| !kept.is_pinned) {
            kept.retained_until_us = end_us.max(kept.retained_until_us);
        }
        self.counts[8] += u64::from(!fits);
        assert_eq!(self.cache.retain(&blocks, end_us, limit), fits);
    }

    fn pass_time(&mut self) {
        self.now_us += self.below(30);
        for kept in self.kept.values_mut() {
            if kept.retained_until_us <= self.now_us {
                kept.retained_until_us = 0;
            }
        }
        self.cache.end_retentions(self.now_us);
    }

    /// A snapshot leaves with its block.
    fn forget_removed(&mut self) {
        let cache = &self.cache;
        let is_gone = |path: &Vec<TokenId>| {
            let blocks = cache.match_prefix(&Namespace::default(), path).blocks;
            blocks.len() * PAGE_SIZE < path.len()
        };
        for (_, kept) in self.kept.extract_if(.., |path, _| is_gone(path)) {
            self.counts[3] += 1;
            self.free.insert(kept.id, kept.named_by);
        }
    }

    fn next_use(&mut self) -> u64 {
        self.num_uses += 1;
        self.num_uses
    }

    fn compare(&self) {
        self.cache.check_invariants();
        self.cache.check_held_snapshots(core::iter::empty());
        assert_eq!(self.cache.num_snapshots(), self.kept.len());
        assert_eq!(self.kept.len() + self.free.len(), self.num_snapshots);
        for (path, kept) in &self.kept {
            let blocks = self.cache.match_prefix(&Namespace::default(), path).blocks;
            let filled_by = blocks
                .last()
                .and_then(|&last| self.cache.snapshot_filled_by(last));
            assert_eq!(filled_by, Some(kept.filled_by));
        }
    }
}
