//! Compares the KV cache, with one or several KV groups, with a simple model of it: a map from each group's pages to
//! the whole token sequence that leads to them. Some groups are sparse: only some blocks have a page, and a query reads
//! only the last block's page, as in layers whose pages are snapshots of a state. The model of one group in
//! `kv_cache_model.rs` also has partly filled pages, namespaces and pins.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

use crate::cache::kv_cache::KvCache;
use crate::cache::kv_cache_model::below;
use crate::cache::kv_event::KvEvent;
use crate::cache::page_hash::PageHash;
use crate::cache::page_table::PageTables;
use crate::cache::prefix_tree::{KnownPath, Parent};
use crate::{BlockId, KvGroup, Namespace, PageId, StepId, TokenId};

const NUM_RUNS: u64 = 240;
const NUM_OPERATIONS: usize = 400;

#[test]
fn groups_are_cached_like_their_model() {
    let mut counts = Counts::default();
    for seed in 0..NUM_RUNS {
        let mut pair = Pair::new(seed);
        for _ in 0..NUM_OPERATIONS {
            pair.operate();
            pair.compare();
            pair.listen();
        }
        counts.num_evicted += pair.cache.num_evicted();
        counts.num_found_blocks += pair.counts.num_found_blocks;
        counts.num_gaps += pair.counts.num_gaps;
        counts.num_gaps_filled += pair.counts.num_gaps_filled;
        counts.num_duplicates += pair.counts.num_duplicates;
        counts.num_unpublished += pair.counts.num_unpublished;
        counts.num_donors += pair.counts.num_donors;
        counts.num_lost += pair.counts.num_lost;
        counts.num_held_events += pair.counts.num_held_events;
    }
    let Counts {
        num_evicted,
        num_found_blocks,
        num_gaps,
        num_gaps_filled,
        num_duplicates,
        num_unpublished,
        num_donors,
        num_lost,
        num_held_events,
    } = counts;
    let counts = [
        num_evicted,
        num_found_blocks,
        num_gaps,
        num_gaps_filled,
        num_duplicates,
        num_unpublished,
        num_donors,
        num_lost,
        num_held_events,
    ];
    assert!(
        counts.iter().all(|&count| count >= 100),
        "the runs miss a case: {counts:?}"
    );
}

#[derive(Default)]
struct Counts {
    num_evicted: u64,
    num_found_blocks: u64,
    /// Look-ups that end before the last cached tokens of some group.
    num_gaps: u64,
    /// Pages that blocks got after their insertion.
    num_gaps_filled: u64,
    num_duplicates: u64,
    num_unpublished: u64,
    num_donors: u64,
    /// Blocks that were announced and could no longer be hit.
    num_lost: u64,
    /// Blocks that were not yet computed when events were read.
    num_held_events: u64,
}

struct Entry {
    page: PageId,
    filled_by: StepId,
    last_used: u64,
}

/// The pages and the path of a request.
struct Holder {
    tokens: Vec<TokenId>,
    tables: PageTables,
    path_end: Option<BlockId>,
    num_published: usize,
    num_computed: u32,
    /// Some of the holder's blocks were unpublished, so it publishes no more.
    is_undefined: bool,
}

struct Pair {
    cache: KvCache,
    groups: Vec<KvGroup>,
    /// By group, whether only every second block has a page.
    is_sparse: Vec<bool>,
    page_size: usize,
    free: BTreeSet<PageId>,
    locks: BTreeMap<PageId, u32>,
    /// By group and the tokens up to the page's end.
    entries: BTreeMap<(usize, Vec<TokenId>), Entry>,
    clock: u64,
    step: StepId,
    holders: Vec<Holder>,
    /// The blocks that a subscriber has heard of.
    heard: Option<BTreeSet<PageHash>>,
    last_returned: StepId,
    random: u64,
    counts: Counts,
}

impl Pair {
    fn new(seed: u64) -> Self {
        let mut random = seed;
        let page_size = 1 + below(&mut random, 3) as u32;
        let num_pages = 2 + below(&mut random, 40) as u32;
        let num_groups = 1 + below(&mut random, 3);
        // With a window of 1, a prefix without any pages would be usable.
        let groups = (0..num_groups).map(|_| KvGroup {
            window: (below(&mut random, 3) > 0).then(|| 2 + below(&mut random, 9) as u32),
        });
        let mut groups: Vec<_> = groups.collect();
        let is_sparse = groups
            .iter_mut()
            .map(|group| {
                let is_sparse = below(&mut random, 4) == 0;
                if is_sparse {
                    // A query reads the row before its own, which is in the last block.
                    group.window = Some(2);
                }
                is_sparse
            })
            .collect();
        Self {
            cache: KvCache::new(num_pages, page_size, &groups),
            groups,
            is_sparse,
            page_size: page_size as usize,
            free: (0..num_pages).map(PageId).collect(),
            locks: BTreeMap::new(),
            entries: BTreeMap::new(),
            clock: 0,
            step: StepId(0),
            holders: Vec::new(),
            heard: None,
            last_returned: StepId(0),
            random,
            counts: Counts::default(),
        }
    }

    fn operate(&mut self) {
        self.step.0 += 1;
        let num_holders = self.holders.len() as u64;
        let at = below(&mut self.random, num_holders.max(1)) as usize;
        match below(&mut self.random, 12) {
            0..4 => self.start(),
            4..8 if num_holders > 0 => self.publish_next(at),
            8..10 if num_holders > 0 => self.compute_on(at),
            10 if num_holders > 0 => self.release(at),
            11 if num_holders > 0 => self.unpublish(at),
            _ => {}
        }
    }

    fn start(&mut self) {
        let num_tokens = 1 + below(&mut self.random, 6 * self.page_size as u64);
        let token = |random: &mut u64| below(random, 2) as TokenId;
        let tokens: Vec<_> = (0..num_tokens).map(|_| token(&mut self.random)).collect();
        let query = &tokens[..tokens.len() - 1];
        let known = &mut KnownPath::default();
        let namespace = Namespace::default();
        let mut found = self.cache.find_prefix(&namespace, query, self.step, known);
        let num_found = found.path.len();
        let num_whole = query.len() / self.page_size;
        let is_found = |num_blocks: &usize| self.has_all(query, *num_blocks);
        let expected = (0..=num_whole).rev().find(is_found);
        assert_eq!(Some(num_found), expected, "blocks found");
        let is_further = (0..self.groups.len()).any(|group| self.has(group, query, num_found));
        self.counts.num_gaps += u64::from(num_found < num_whole && is_further);
        self.counts.num_found_blocks += num_found as u64;
        for (group, table) in found.tables.iter().enumerate() {
            assert_eq!(table.len(), num_found, "entries found");
            for at in table.num_gone..table.len() {
                let path = &tokens[..(at + 1) * self.page_size];
                let entry = &self.entries[&(group, path.to_vec())];
                assert_eq!(table.page(at), Some(entry.page));
            }
        }
        if let Some(donor) = &found.donor {
            self.counts.num_donors += 1;
            let end = num_found * self.page_size + donor.num_rows as usize;
            for (group, page) in donor.pages.iter().enumerate() {
                let entry = self.entries.iter().find(|(_, entry)| entry.page == *page);
                let ((of, path), entry) = entry.expect("the donor's page is cached");
                assert_eq!(*of, group, "the donor's page is another group's");
                assert_eq!(path[..end], query[..end], "the rows that are lent");
                assert!(path.len() == (num_found + 1) * self.page_size);
                assert!(entry.filled_by < self.step, "the same step fills them");
            }
        }
        for page in found.tables.pages() {
            self.cache.lock(page);
            *self.locks.entry(page).or_default() += 1;
        }
        let path_end = found.path.last().copied();
        self.cache.move_end(None, path_end);
        let end = tokens.len().div_ceil(self.page_size);
        let before: Vec<_> = found.tables.pages().collect();
        let num_missing = (end - num_found) * self.groups.len();
        let cached = self.entries.values().filter(|entry| self.is_cached(entry));
        let fits = num_missing <= self.free.len() + cached.count();
        assert_eq!(self.cache.try_extend(&mut found.tables, |_| end), fits);
        if fits {
            self.evict_for(num_missing);
            for page in found.tables.pages().filter(|page| !before.contains(page)) {
                assert!(self.free.remove(&page), "page {page} was not free");
                self.locks.insert(page, 1);
            }
        }
        let holder = Holder {
            num_computed: (num_found * self.page_size) as u32,
            tokens,
            tables: found.tables,
            path_end,
            num_published: num_found,
            is_undefined: false,
        };
        match fits {
            true => self.holders.push(holder),
            false => self.let_go(holder),
        }
    }

    /// The pages that a holder gives to one of its blocks, by group.
    fn pages_at(&self, holder: usize, depth: usize) -> Vec<Option<PageId>> {
        let tables = self.holders[holder].tables.iter().zip(&self.is_sparse);
        let pages = tables.map(|(table, is_sparse)| match is_sparse {
            true if depth.is_multiple_of(2) => None,
            _ => table.page(depth),
        });
        pages.collect()
    }

    fn has(&self, group: usize, tokens: &[TokenId], at: usize) -> bool {
        let path = tokens.get(..(at + 1) * self.page_size);
        path.is_some_and(|path| self.entries.contains_key(&(group, path.to_vec())))
    }

    /// Whether a query after the first `num_blocks` blocks finds every page that it reads.
    fn has_all(&self, tokens: &[TokenId], num_blocks: usize) -> bool {
        self.groups.iter().enumerate().all(|(group, kv_group)| {
            let first = kv_group.first_row_read((num_blocks * self.page_size) as u32) as usize;
            (first / self.page_size..num_blocks).all(|at| self.has(group, tokens, at))
        })
    }

    fn is_cached(&self, entry: &Entry) -> bool {
        !self.locks.contains_key(&entry.page)
    }

    fn has_full_group(&self) -> bool {
        self.groups.iter().any(|group| group.window.is_none())
    }

    /// Evicts pages. In groups with a window, a page is evicted alone. In others, a page is evicted with its block, and
    /// only if no block follows. Among pages with a window and the same last use, the one with the longest path goes
    /// first.
    fn evict_for(&mut self, num_pages: usize) {
        while self.free.len() < num_pages {
            let is_evictable = |(group, path): &(usize, Vec<TokenId>)| {
                self.groups[*group].window.is_some()
                    || !self
                        .entries
                        .keys()
                        .any(|(_, other)| other.len() > path.len() && other.starts_with(path))
            };
            let entries = self.entries.iter();
            let cached = entries.filter(|(key, entry)| self.is_cached(entry) && is_evictable(key));
            let first = cached.min_by_key(|((group, path), entry)| {
                let from_end = match self.groups[*group].window {
                    Some(_) => usize::MAX - path.len(),
                    None => 0,
                };
                (entry.last_used, from_end, entry.page)
            });
            let (group, path) = first.map(|(key, _)| key.clone()).expect("a cached page");
            let groups = match self.groups[group].window {
                Some(_) => group..group + 1,
                None => 0..self.groups.len(),
            };
            for group in groups {
                let entry = self.entries.remove(&(group, path.clone()));
                let page = entry.map(|entry| entry.page);
                self.free
                    .extend(page.filter(|page| !self.locks.contains_key(page)));
            }
        }
    }

    fn publish_next(&mut self, at: usize) {
        let holder = &self.holders[at];
        let depth = holder.num_published;
        let end = (depth + 1) * self.page_size;
        if holder.is_undefined || end > holder.tokens.len() {
            return;
        }
        let namespace = Namespace::default();
        let parent = holder
            .path_end
            .map_or(Parent::Root(&namespace), Parent::Block);
        let tokens = &holder.tokens[depth * self.page_size..end];
        let pages = self.pages_at(at, depth);
        let page = |group: usize| pages[group];
        let published = self.cache.publish(parent, tokens, page, self.step);
        let is_there = (0..self.groups.len()).any(|group| {
            self.groups[group].window.is_none() && self.has(group, &holder.tokens, depth)
        });
        assert_eq!(published.is_err(), is_there, "the block is another's");
        self.fill(at, depth, true);
        match published {
            Ok(block) => {
                let holder = &mut self.holders[at];
                self.cache.move_end(holder.path_end, Some(block));
                holder.path_end = Some(block);
                holder.num_published += 1;
            }
            Err(there) => self.offer(at, there),
        }
    }

    /// Adds a holder's pages of one block to the model, except for groups whose page the model already has.
    /// `is_published` is false if the holder offers its pages to another holder's block.
    fn fill(&mut self, at: usize, depth: usize, is_published: bool) {
        let holder = &self.holders[at];
        let path = &holder.tokens[..(depth + 1) * self.page_size];
        let is_new = !(0..self.groups.len()).any(|group| self.has(group, path, depth));
        for (group, page) in self.pages_at(at, depth).into_iter().enumerate() {
            let key = (group, path.to_vec());
            if let Some(there) = self.entries.get_mut(&key) {
                self.counts.num_duplicates += 1;
                if is_published && !self.locks.contains_key(&there.page) {
                    there.last_used = self.clock + 1;
                }
                continue;
            }
            if let Some(page) = page {
                self.counts.num_gaps_filled += u64::from(!is_new);
                let (filled_by, last_used) = (self.step, 0);
                let entry = Entry {
                    page,
                    filled_by,
                    last_used,
                };
                self.entries.insert(key, entry);
            }
        }
    }

    /// Offers a holder's pages to the cached blocks after `block`, which another holder has published.
    fn offer(&mut self, at: usize, mut block: BlockId) {
        let mut depth = self.holders[at].num_published + 1;
        loop {
            let holder = &self.holders[at];
            let Some(tokens) = holder.tokens.get(..(depth + 1) * self.page_size) else {
                return;
            };
            let tokens = &tokens[depth * self.page_size..];
            let next = self.cache.child(Parent::Block(block), tokens);
            let is_there =
                (0..self.groups.len()).any(|group| self.has(group, &holder.tokens, depth));
            assert_eq!(next.is_some(), is_there, "the block behind it");
            let Some(next) = next else { return };
            let pages = self.pages_at(at, depth);
            self.cache.fill_block(next, |group| pages[group], self.step);
            self.fill(at, depth, false);
            (block, depth) = (next, depth + 1);
        }
    }

    /// Computes some more tokens and gives back pages outside windows.
    fn compute_on(&mut self, at: usize) {
        let holder = &mut self.holders[at];
        let rest = holder.tokens.len() as u64 - u64::from(holder.num_computed);
        holder.num_computed += below(&mut self.random, rest + 1) as u32;
        let mut gone = Vec::new();
        for (group, table) in self.groups.iter().zip(holder.tables.iter_mut()) {
            let first = group.first_page_read(holder.num_computed, self.page_size as u32);
            let num_pages = first as usize - table.num_gone;
            table.num_gone = first as usize;
            gone.extend(table.pages.drain(..num_pages));
        }
        self.unlock_all(gone);
    }

    fn release(&mut self, at: usize) {
        let holder = self.holders.swap_remove(at);
        self.let_go(holder);
    }

    fn let_go(&mut self, mut holder: Holder) {
        self.unlock_all(holder.tables.take_pages());
        self.cache.move_end(holder.path_end, None);
    }

    fn unlock_all(&mut self, pages: Vec<PageId>) {
        self.cache.unlock_all(pages.iter().copied());
        self.clock += 1;
        for page in pages {
            let locks = self.locks.get_mut(&page).expect("a locked page");
            *locks -= 1;
            if *locks > 0 {
                continue;
            }
            self.locks.remove(&page);
            match self.entries.values_mut().find(|entry| entry.page == page) {
                Some(entry) => entry.last_used = self.clock,
                None => assert!(self.free.insert(page), "page {page} is freed twice"),
            }
        }
    }

    /// Unpublishes the first recently filled block of a path and all blocks after it, as after a failed step.
    fn unpublish(&mut self, at: usize) {
        let step = StepId(self.step.0.saturating_sub(below(&mut self.random, 20)));
        let holder = &self.holders[at];
        let tokens = holder.tokens.clone();
        let matched = self.cache.match_prefix(&Namespace::default(), &tokens);
        let is_undefined = |&block: &BlockId| self.cache.block_filled_by(block) >= Some(step);
        let found = matched.blocks.iter().position(is_undefined);
        let late = self
            .entries
            .iter()
            .filter(|((_, path), entry)| entry.filled_by >= step && tokens.starts_with(path));
        let expected = late
            .map(|((_, path), _)| path.len() / self.page_size - 1)
            .min();
        assert_eq!(found, expected, "the first undefined block");
        let Some(depth) = found else { return };
        let before = depth.checked_sub(1).map(|before| matched.blocks[before]);
        self.cache.move_end(None, before);
        let removed = self.cache.unpublish(matched.blocks[depth]);
        let path = &tokens[..(depth + 1) * self.page_size];
        let mut pages = BTreeSet::new();
        for (_, entry) in self
            .entries
            .extract_if(.., |(_, other), _| other.starts_with(path))
        {
            self.counts.num_unpublished += 1;
            pages.insert(entry.page);
            if !self.locks.contains_key(&entry.page) {
                self.free.insert(entry.page);
            }
        }
        assert_eq!(removed.pages.into_iter().collect::<BTreeSet<_>>(), pages);
        for holder in &mut self.holders {
            if holder
                .path_end
                .is_some_and(|end| removed.from_tree.blocks.contains(&end))
            {
                assert!(holder.tokens.starts_with(path) && holder.num_published > depth);
                (holder.path_end, holder.num_published) = (before, depth);
                holder.is_undefined = true;
                self.cache.move_end(None, before);
            }
        }
        self.cache.move_end(before, None);
    }

    /// Reads the cache's events in some steps, and compares them with the blocks that can be hit.
    fn listen(&mut self) {
        const SALT: u64 = 7;
        let Some(heard) = &mut self.heard else {
            if below(&mut self.random, 20) == 0 {
                self.cache.watch(SALT);
                self.heard = Some(BTreeSet::new());
            }
            return;
        };
        if below(&mut self.random, 4) > 0 {
            return;
        }
        let returned = StepId(self.step.0.saturating_sub(below(&mut self.random, 4)));
        self.last_returned = self.last_returned.max(returned);
        while let Some(event) = self.cache.poll_event(Some(self.last_returned)) {
            match event {
                KvEvent::Cleared => assert!(heard.is_empty(), "the subscription begins twice"),
                KvEvent::Removed { page } => {
                    self.counts.num_lost += 1;
                    assert!(heard.remove(&page), "{page:?} was never stored");
                }
                KvEvent::Stored { page, .. } => {
                    assert!(heard.insert(page), "{page:?} is stored twice");
                }
            }
        }
        let paths: BTreeSet<_> = self.entries.keys().map(|(_, path)| path).collect();
        let mut expected = BTreeSet::new();
        let mut num_held = 0;
        for path in paths {
            let num_blocks = path.len() / self.page_size;
            if !self.has_all(path, num_blocks) {
                continue;
            }
            let is_ready = self.groups.iter().enumerate().all(|(group, kv_group)| {
                let first = kv_group.first_row_read(path.len() as u32) as usize;
                (first / self.page_size..num_blocks).all(|at| {
                    let path = path[..(at + 1) * self.page_size].to_vec();
                    self.entries[&(group, path)].filled_by <= self.last_returned
                })
            });
            num_held += u64::from(!is_ready);
            if is_ready {
                let root = PageHash::root(SALT, &Namespace::default());
                let blocks = path.chunks(self.page_size);
                expected.insert(blocks.fold(root, |hash, block| hash.next(SALT, block)));
            }
        }
        self.counts.num_held_events += num_held;
        assert_eq!(self.heard.as_ref(), Some(&expected));
    }

    fn compare(&self) {
        self.cache.check_invariants();
        let ends = self.holders.iter().filter_map(|holder| holder.path_end);
        self.cache.check_ends(ends);
        let cached = self.entries.values().filter(|entry| self.is_cached(entry));
        assert_eq!(self.cache.num_cached(), cached.count());
        assert_eq!(self.cache.num_free(), self.free.len());
        for (&page, &num_locks) in &self.locks {
            assert_eq!(self.cache.num_locks(page), num_locks);
        }
        if self.has_full_group() {
            let blocks: BTreeSet<_> = self.entries.keys().map(|(_, path)| path).collect();
            assert_eq!(self.cache.num_blocks(), blocks.len());
        }
    }
}
