//! Compares the prefix cache of KV groups with a simple model of it: a map from each group's pages to
//! the whole token sequence that leads to them.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

use crate::cache::group_cache::PlaceId;
use crate::cache::kv_cache::KvCache;
use crate::cache::kv_cache_model::below;
use crate::cache::page_table::PageTables;
use crate::cache::prefix_tree::KnownPath;
use crate::{KvGroup, Namespace, PageId, StepId, TokenId};

const NUM_RUNS: u64 = 200;
const NUM_OPERATIONS: usize = 400;

#[test]
fn groups_are_cached_like_their_model() {
    let mut counts = Counts::default();
    for seed in 0..NUM_RUNS {
        let mut pair = Pair::new(seed);
        for _ in 0..NUM_OPERATIONS {
            pair.operate();
            pair.compare();
        }
        counts.num_evicted += pair.cache.num_evicted();
        counts.num_found_pages += pair.counts.num_found_pages;
        counts.num_gaps += pair.counts.num_gaps;
        counts.num_duplicates += pair.counts.num_duplicates;
        counts.num_forgotten += pair.counts.num_forgotten;
    }
    let Counts {
        num_evicted,
        num_found_pages,
        num_gaps,
        num_duplicates,
        num_forgotten,
    } = counts;
    let counts = [
        num_evicted,
        num_found_pages,
        num_gaps,
        num_duplicates,
        num_forgotten,
    ];
    assert!(
        counts.iter().all(|&count| count >= 300),
        "the runs miss a case: {counts:?}"
    );
}

#[derive(Default)]
struct Counts {
    num_evicted: u64,
    num_found_pages: u64,
    /// Look-ups that end before the tokens that some group has.
    num_gaps: u64,
    num_duplicates: u64,
    num_forgotten: u64,
}

struct Entry {
    page: PageId,
    filled_by: StepId,
    last_used: u64,
}

/// What a request holds.
struct Holder {
    tokens: Vec<TokenId>,
    tables: PageTables,
    path: Vec<PlaceId>,
    num_computed: u32,
    /// Some of its pages were forgotten, so it publishes no more.
    is_undefined: bool,
}

struct Pair {
    cache: KvCache,
    groups: Vec<KvGroup>,
    page_size: usize,
    free: BTreeSet<PageId>,
    locks: BTreeMap<PageId, u32>,
    /// By group and the tokens up to the page's end.
    entries: BTreeMap<(usize, Vec<TokenId>), Entry>,
    clock: u64,
    step: StepId,
    holders: Vec<Holder>,
    random: u64,
    counts: Counts,
}

impl Pair {
    fn new(seed: u64) -> Self {
        let mut random = seed;
        let page_size = 1 + below(&mut random, 3) as u32;
        let num_pages = 2 + below(&mut random, 40) as u32;
        let num_groups = 1 + below(&mut random, 3);
        // With a window of 1, a prefix without any pages would do.
        let groups = (0..num_groups).map(|_| KvGroup {
            window: (below(&mut random, 3) > 0).then(|| 2 + below(&mut random, 9) as u32),
        });
        let groups: Vec<_> = groups.collect();
        Self {
            cache: KvCache::with_groups(num_pages, page_size, &groups),
            groups,
            page_size: page_size as usize,
            free: (0..num_pages).map(PageId).collect(),
            locks: BTreeMap::new(),
            entries: BTreeMap::new(),
            clock: 0,
            step: StepId(0),
            holders: Vec::new(),
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
            11 if num_holders > 0 => self.forget(at),
            _ => {}
        }
    }

    fn start(&mut self) {
        let num_tokens = 1 + below(&mut self.random, 6 * self.page_size as u64);
        let token = |random: &mut u64| below(random, 2) as TokenId;
        let tokens: Vec<_> = (0..num_tokens).map(|_| token(&mut self.random)).collect();
        let query = &tokens[..tokens.len() - 1];
        let known = &mut KnownPath::default();
        let mut found = self
            .cache
            .find_prefix(&Namespace::default(), query, self.step, known);
        let page_size = self.page_size as u32;
        let has_all = |num_pages: &usize| {
            self.groups.iter().enumerate().all(|(group, kv_group)| {
                let first = kv_group.first_row_read(*num_pages as u32 * page_size) as usize;
                (first / self.page_size..*num_pages).all(|at| self.has(group, query, at))
            })
        };
        let num_whole = query.len() / self.page_size;
        let expected = (0..=num_whole).rev().find(has_all);
        assert_eq!(Some(found.num_pages), expected, "pages found");
        let is_further =
            (0..self.groups.len()).any(|group| self.has(group, query, found.num_pages));
        self.counts.num_gaps += u64::from(found.num_pages < num_whole && is_further);
        self.counts.num_found_pages += found.num_pages as u64;
        for (group, table) in found.tables.iter().enumerate() {
            assert_eq!(table.len(), found.num_pages, "entries found");
            for at in table.num_gone..table.len() {
                let path = &tokens[..(at + 1) * self.page_size];
                let entry = &self.entries[&(group, path.to_vec())];
                assert_eq!(table.page(at), Some(entry.page));
            }
        }
        for page in found.tables.pages() {
            self.cache.lock(page);
            *self.locks.entry(page).or_default() += 1;
        }
        self.cache.follow_path(&found.path);
        let end = tokens.len().div_ceil(self.page_size);
        let before: Vec<_> = found.tables.pages().collect();
        let num_missing = (end - found.num_pages) * self.groups.len();
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
            num_computed: found.num_pages as u32 * page_size,
            tokens,
            tables: found.tables,
            path: found.path,
            is_undefined: false,
        };
        match fits {
            true => self.holders.push(holder),
            false => self.let_go(holder),
        }
    }

    fn has(&self, group: usize, tokens: &[TokenId], at: usize) -> bool {
        let path = tokens.get(..(at + 1) * self.page_size);
        path.is_some_and(|path| self.entries.contains_key(&(group, path.to_vec())))
    }

    fn is_cached(&self, entry: &Entry) -> bool {
        !self.locks.contains_key(&entry.page)
    }

    /// Evicts pages. If several were used last together, the one with the longest path goes first.
    fn evict_for(&mut self, num_pages: usize) {
        while self.free.len() < num_pages {
            let entries = self.entries.iter();
            let cached = entries.filter(|(_, entry)| self.is_cached(entry));
            let first = cached.min_by_key(|((_, path), entry)| {
                (entry.last_used, usize::MAX - path.len(), entry.page)
            });
            let key = first.map(|(key, _)| key.clone()).expect("a cached page");
            let entry = self.entries.remove(&key);
            self.free.extend(entry.map(|entry| entry.page));
        }
    }

    fn publish_next(&mut self, at: usize) {
        let holder = &mut self.holders[at];
        let depth = holder.path.len();
        let end = (depth + 1) * self.page_size;
        if holder.is_undefined || end > holder.tokens.len() {
            return;
        }
        let tokens = &holder.tokens[depth * self.page_size..end];
        let place = self
            .cache
            .extend_path(&Namespace::default(), &holder.path, tokens, self.step);
        holder.path.push(place.expect("a place"));
        for (group, table) in holder.tables.iter().enumerate() {
            let Some(page) = table.page(depth) else {
                continue;
            };
            self.cache.keep_page(&holder.path, group, page, self.step);
            let key = (group, holder.tokens[..end].to_vec());
            if let Some(there) = self.entries.get_mut(&key) {
                self.counts.num_duplicates += 1;
                if !self.locks.contains_key(&there.page) {
                    there.last_used = self.clock + 1;
                }
                continue;
            }
            let entry = Entry {
                page,
                filled_by: self.step,
                last_used: 0,
            };
            self.entries.insert(key, entry);
        }
    }

    /// Computes some more tokens and gives back what falls out of windows.
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
        self.cache.leave_path(&holder.path);
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

    /// Forgets what was filled lately on a path, as after a failed step.
    fn forget(&mut self, at: usize) {
        let step = StepId(self.step.0.saturating_sub(below(&mut self.random, 20)));
        let holder = &mut self.holders[at];
        let found = self.cache.forget_filled_since(&holder.path, step);
        let end = holder.path.len() * self.page_size;
        let mut depths = BTreeSet::new();
        let gone = self.entries.extract_if(.., |(_, path), entry| {
            let is_on_path = path.len() <= end && holder.tokens.starts_with(path);
            is_on_path && entry.filled_by >= step
        });
        for ((_, path), entry) in gone {
            self.counts.num_forgotten += 1;
            depths.insert(path.len() / self.page_size - 1);
            if !self.locks.contains_key(&entry.page) {
                self.free.insert(entry.page);
            }
        }
        let expected: Vec<_> = depths.iter().map(|&depth| holder.path[depth]).collect();
        assert_eq!(found, expected, "places with undefined pages");
        if let Some(&first) = depths.first() {
            let rest = holder.path.split_off(first);
            self.cache.leave_path(&rest);
            holder.is_undefined = true;
        }
    }

    fn compare(&self) {
        self.cache.check_invariants();
        let paths = self.holders.iter().map(|holder| &holder.path[..]);
        self.cache.check_places(paths);
        let cached = self.entries.values().filter(|entry| self.is_cached(entry));
        assert_eq!(self.cache.num_cached(), cached.count());
        assert_eq!(self.cache.num_free(), self.free.len());
        for (&page, &num_locks) in &self.locks {
            assert_eq!(self.cache.num_locks(page), num_locks);
        }
    }
}
