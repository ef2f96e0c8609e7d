//! Compares the KV cache with a simple model of it: a set of free pages, and a map from cached
//! pages to the whole token sequence that leads to them.

mod retention;

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

use self::retention::RetainedPages;
use crate::cache::kv_cache::{FoundPrefix, KvCache};
use crate::cache::kv_event::KvEvent;
use crate::cache::page_hash::PageHash;
use crate::cache::prefix_tree::{KnownPath, Parent};
use crate::{KvGroup, Namespace, PageId, StepId, TokenId};

const NUM_RUNS: u64 = 400;
const NUM_OPERATIONS: usize = 600;

#[test]
fn cache_behaves_like_its_model() {
    let mut totals = Totals::default();
    for seed in 0..NUM_RUNS {
        let mut pair = Pair::new(seed);
        for _ in 0..NUM_OPERATIONS {
            pair.operate();
            pair.compare();
            pair.ask_again();
            pair.listen();
        }
        totals.num_evicted += pair.cache.num_evicted();
        totals.num_duplicates += pair.totals.num_duplicates;
        totals.num_superseded += pair.totals.num_superseded;
        totals.num_donors += pair.totals.num_donors;
        totals.num_refused += pair.totals.num_refused;
        totals.num_removals_told += pair.totals.num_removals_told;
        totals.num_held_events += pair.totals.num_held_events;
        totals.num_lost_pins += pair.totals.num_lost_pins;
        totals.num_displaced += pair.totals.num_displaced;
        totals.num_not_retained += pair.totals.num_not_retained;
        totals.num_retained_ended += pair.totals.num_retained_ended;
        totals.num_retained_evicted += pair.cache.num_retained_evicted();
    }
    let counts = [
        totals.num_evicted,
        totals.num_duplicates,
        totals.num_superseded,
        totals.num_donors,
        totals.num_refused,
        totals.num_removals_told,
        totals.num_held_events,
        totals.num_lost_pins,
        totals.num_displaced,
        totals.num_not_retained,
        totals.num_retained_ended,
        totals.num_retained_evicted,
    ];
    let is_thorough = counts.iter().all(|&count| count >= 100);
    assert!(is_thorough, "the runs miss a case: {totals:?}");
}

#[derive(Debug, Default)]
struct Totals {
    num_evicted: u64,
    num_duplicates: u64,
    num_superseded: u64,
    num_donors: u64,
    num_refused: u64,
    num_removals_told: u64,
    /// Pages without an event so far, because they were not computed when events were read.
    num_held_events: u64,
    /// Pages that were unpublished while they were pinned.
    num_lost_pins: u64,
    /// Retentions of pages that made room for another retention, that found no room, that ended in time, and whose page
    /// was evicted.
    num_displaced: u64,
    num_not_retained: u64,
    num_retained_ended: u64,
    num_retained_evicted: u64,
}

#[derive(Clone, Debug)]
struct Entry {
    namespace: Namespace,
    /// All tokens from the start of the sequence to the page's last filled row.
    path: Vec<TokenId>,
    filled_by: StepId,
}

/// A page table such as a request holds.
struct Table {
    namespace: Namespace,
    tokens: Vec<TokenId>,
    pages: Vec<PageId>,
    num_published: usize,
    donor: Option<PageId>,
    /// Some of the table's pages were unpublished, so it publishes no more.
    is_undefined: bool,
}

struct Pair {
    cache: KvCache,
    page_size: usize,
    free: BTreeSet<PageId>,
    locks: BTreeMap<PageId, u32>,
    entries: BTreeMap<PageId, Entry>,
    last_used: BTreeMap<PageId, u64>,
    pinned: BTreeSet<PageId>,
    retained: RetainedPages,
    clock: u64,
    step: StepId,
    tables: Vec<Table>,
    /// Queries that are repeated after every operation, each with its previous result.
    watched: Vec<(Namespace, Vec<TokenId>, KnownPath)>,
    /// The blocks that a subscriber has heard of.
    heard: Option<BTreeMap<PageHash, Vec<TokenId>>>,
    has_begun: bool,
    last_returned: StepId,
    random: u64,
    alphabet: u64,
    totals: Totals,
}

impl Pair {
    fn new(seed: u64) -> Self {
        let mut random = seed;
        let page_size = 1 + below(&mut random, 4) as u32;
        let num_pages = 1 + below(&mut random, 24) as u32;
        Self {
            cache: KvCache::new(num_pages, page_size, &[KvGroup::default()]),
            page_size: page_size as usize,
            free: (0..num_pages).map(PageId).collect(),
            locks: BTreeMap::new(),
            entries: BTreeMap::new(),
            last_used: BTreeMap::new(),
            pinned: BTreeSet::new(),
            retained: RetainedPages::default(),
            clock: 0,
            step: StepId(0),
            tables: Vec::new(),
            watched: Vec::new(),
            heard: None,
            has_begun: false,
            last_returned: StepId(0),
            alphabet: 2 + below(&mut random, 2),
            random,
            totals: Totals::default(),
        }
    }

    fn operate(&mut self) {
        self.step.0 += 1;
        let num_tables = self.tables.len() as u64;
        let at = below(&mut self.random, num_tables.max(1)) as usize;
        match below(&mut self.random, 15) {
            0..4 => self.start_table(),
            4..7 if num_tables > 0 => self.publish_next(at),
            7..9 if num_tables > 0 => self.release(at),
            9 if num_tables > 0 => self.unpublish(at),
            10 if num_tables > 0 => self.pin(at),
            11..14 if num_tables > 0 => self.retain(at),
            14 => self.pass_time(),
            _ => {
                if num_tables == 0 && below(&mut self.random, 20) == 0 {
                    self.cache.clear();
                    let cached = self
                        .entries
                        .extract_if(.., |page, _| !self.pinned.contains(page));
                    self.free.extend(cached.map(|(page, _)| page));
                }
            }
        }
        self.forget_retained();
    }

    /// Pages that are pinned or have left the cache are not retained.
    fn forget_retained(&mut self) {
        let (entries, pinned) = (&self.entries, &self.pinned);
        let is_kept = |page| entries.contains_key(&page) && !pinned.contains(&page);
        self.retained.forget(is_kept);
    }

    /// Repeats the watched queries: an earlier result must not change the new one.
    fn ask_again(&mut self) {
        for (namespace, query, known) in &mut self.watched {
            let again = self.cache.find_prefix(namespace, query, self.step, known);
            let anew = &mut KnownPath::default();
            let anew = self.cache.find_prefix(namespace, query, self.step, anew);
            assert_eq!(
                again, anew,
                "a repeated query finds something else than a new one"
            );
        }
    }

    /// Reads the cache's events in some steps, and compares them with the entries.
    fn listen(&mut self) {
        const SALT: u64 = 7;
        let Some(heard) = &mut self.heard else {
            if below(&mut self.random, 20) == 0 {
                self.cache.watch(SALT);
                self.heard = Some(BTreeMap::new());
            }
            return;
        };
        let is_slow = self.alphabet == 2;
        if below(&mut self.random, if is_slow { 200 } else { 4 }) > 0 {
            return;
        }
        let lag = below(&mut self.random, 4);
        let returned = StepId(self.step.0.saturating_sub(lag));
        self.last_returned = self.last_returned.max(returned);
        let mut num_stored = 0;
        while let Some(event) = self.cache.poll_event(Some(self.last_returned)) {
            match event {
                KvEvent::Cleared => {
                    assert!(!self.has_begun, "the subscription begins twice");
                    self.has_begun = true;
                }
                KvEvent::Removed { page } => {
                    assert_eq!(
                        num_stored, 0,
                        "{page:?} is announced as removed after stored pages"
                    );
                    self.totals.num_removals_told += 1;
                    assert!(heard.remove(&page).is_some(), "{page:?} was never stored");
                }
                KvEvent::Stored {
                    page,
                    parent,
                    tokens,
                    namespace,
                } => {
                    assert!(self.has_begun);
                    num_stored += 1;
                    let before = parent.map(|parent| &heard[&parent]);
                    let path = before.into_iter().flatten().chain(&tokens);
                    let path: Vec<_> = path.copied().collect();
                    let root = PageHash::root(SALT, &namespace);
                    let pages = path.chunks(self.page_size);
                    assert_eq!(pages.fold(root, |hash, page| hash.next(SALT, page)), page);
                    assert_eq!(heard.insert(page, path), None, "{page:?} is stored twice");
                }
            }
        }
        let mut expected = BTreeMap::new();
        for entry in self.entries.values() {
            if !entry.path.len().is_multiple_of(self.page_size) {
                continue;
            }
            // A page before this one may have been computed later, for another request.
            let is_before = |other: &&Entry| {
                other.namespace == entry.namespace
                    && other.path.len().is_multiple_of(self.page_size)
                    && entry.path.starts_with(&other.path)
            };
            let mut before = self.entries.values().filter(is_before);
            if before.all(|other| other.filled_by <= self.last_returned) {
                let root = PageHash::root(SALT, &entry.namespace);
                let pages = entry.path.chunks(self.page_size);
                let hash = pages.fold(root, |hash, page| hash.next(SALT, page));
                expected.insert(hash, entry.path.clone());
            } else {
                self.totals.num_held_events += 1;
            }
        }
        assert_eq!(heard, &expected);
    }

    fn start_table(&mut self) {
        let num_tokens = 1 + below(&mut self.random, 6 * self.page_size as u64);
        let tokens: Vec<_> = (0..num_tokens)
            .map(|_| below(&mut self.random, self.alphabet) as TokenId)
            .collect();
        let name = |is_there: bool| is_there.then(|| "name".into());
        let kind = below(&mut self.random, 8);
        let namespace = Namespace {
            lora: name(kind == 0),
            cache_salt: name(kind == 1),
            arithmetic: None,
        };
        let query = &tokens[..tokens.len() - 1];
        let known = &mut KnownPath::default();
        let matched = self.cache.find_prefix(&namespace, query, self.step, known);
        self.check_match(&namespace, query, &matched);
        if self.watched.len() < 8 {
            let known = KnownPath::default();
            self.watched
                .push((namespace.clone(), query.to_vec(), known));
        }
        self.totals.num_donors += u64::from(matched.donor.is_some());

        let num_pages = tokens.len().div_ceil(self.page_size);
        let pages: Vec<_> = matched.tables.pages().collect();
        let donor = matched.donor.map(|donor| donor.pages[0]);
        for page in pages.iter().copied().chain(donor) {
            self.cache.lock(page);
            *self.locks.entry(page).or_default() += 1;
        }
        let mut table = Table {
            namespace,
            tokens,
            num_published: pages.len(),
            pages,
            donor,
            is_undefined: false,
        };
        if !self.allocate(num_pages - table.num_published, &mut table.pages) {
            self.totals.num_refused += 1;
            self.let_go(&table);
            return;
        }
        self.tables.push(table);
    }

    fn allocate(&mut self, num_pages: usize, pages: &mut Vec<PageId>) -> bool {
        let num_before = pages.len();
        let num_cached = self
            .entries
            .keys()
            .filter(|page| self.num_locks(**page) == 0)
            .count();
        let fits = num_pages <= self.free.len() + num_cached;
        assert_eq!(self.cache.try_allocate(num_pages, pages), fits);
        if !fits {
            assert_eq!(
                pages.len(),
                num_before,
                "a failed allocation changed the table"
            );
            return false;
        }
        assert_eq!(pages.len(), num_before + num_pages);
        while self.free.len() < num_pages {
            let leaves = self.entries.keys().filter(|page| self.is_evictable(**page));
            let oldest = leaves.min_by_key(|&&page| match self.retained.end_us(page) {
                0 => (0, self.last_used[&page], page),
                end_us => (end_us, 0, page),
            });
            let oldest = *oldest.expect("pages are cached, but none of them is a leaf");
            self.entries.remove(&oldest);
            self.free.insert(oldest);
        }
        for page in &pages[num_before..] {
            assert!(self.free.remove(page), "page {page} was not free");
            self.locks.insert(*page, 1);
        }
        true
    }

    fn is_evictable(&self, page: PageId) -> bool {
        let Entry {
            namespace, path, ..
        } = &self.entries[&page];
        self.num_locks(page) == 0
            && !self.entries.iter().any(|(&other, entry)| {
                other != page
                    && entry.namespace == *namespace
                    && path.len().is_multiple_of(self.page_size)
                    && entry.path.len() > path.len()
                    && entry.path.starts_with(path)
            })
    }

    /// Publishes the table's next full page, as a running request does.
    fn publish_next(&mut self, at: usize) {
        let table = &self.tables[at];
        let at_page = table.num_published;
        if table.is_undefined || (at_page + 1) * self.page_size > table.tokens.len() {
            return;
        }
        let path = table.tokens[..(at_page + 1) * self.page_size].to_vec();
        let namespace = table.namespace.clone();
        let page = table.pages[at_page];
        let before = at_page.checked_sub(1).map(|before| table.pages[before]);
        if self.publish(namespace, path, page, before).is_ok() {
            self.tables[at].num_published += 1;
        }
    }

    fn publish(
        &mut self,
        namespace: Namespace,
        path: Vec<TokenId>,
        page: PageId,
        before: Option<PageId>,
    ) -> Result<(), PageId> {
        let start = (path.len() - 1) / self.page_size * self.page_size;
        let block = |page| Parent::Block(self.cache.block_of(page).expect("it is published"));
        let parent = before.map_or(Parent::Root(&namespace), block);
        let tokens = &path[start..];
        let found = self
            .cache
            .publish(parent, tokens, |_| Some(page), self.step);
        let page_of = |block| self.cache.page(block, 0).expect("it has a page");
        let found = found
            .map_err(page_of)
            .map(|block| assert_eq!(page_of(block), page));
        let is_sibling = |entry: &Entry| {
            entry.namespace == namespace
                && (entry.path.len() - 1) / self.page_size * self.page_size == start
                && entry.path[..start] == path[..start]
        };
        let mut siblings = self.entries.iter().filter(|(_, entry)| is_sibling(entry));
        let has_it = siblings.any(|(_, entry)| entry.path.starts_with(&path));
        assert_eq!(
            found.is_err(),
            has_it,
            "cache and model disagree whether {path:?} is a duplicate"
        );
        if let Err(duplicate) = found {
            assert!(self.entries[&duplicate].path.starts_with(&path));
            self.totals.num_duplicates += 1;
            if self.num_locks(duplicate) == 0 {
                self.last_used.insert(duplicate, self.clock + 1);
            }
            return found;
        }
        let covered: Vec<_> = self
            .entries
            .iter()
            .filter(|(_, entry)| is_sibling(entry) && path.starts_with(&entry.path))
            .map(|(page, _)| *page)
            .collect();
        for tail in covered {
            self.totals.num_superseded += 1;
            self.entries.remove(&tail);
            if self.num_locks(tail) == 0 {
                self.free.insert(tail);
            }
        }
        let filled_by = self.step;
        let entry = Entry {
            namespace,
            path,
            filled_by,
        };
        self.entries.insert(page, entry);
        found
    }

    /// Publishes some of the remaining pages, perhaps including a tail, and releases the table.
    fn release(&mut self, at: usize) {
        let table = self.tables.swap_remove(at);
        let most = match table.is_undefined {
            true => table.num_published * self.page_size,
            false => table.tokens.len(),
        };
        let num_rows = below(&mut self.random, most as u64 + 1) as usize;
        let first = table.num_published;
        let mut before = first.checked_sub(1).map(|before| table.pages[before]);
        for at in first..num_rows.div_ceil(self.page_size) {
            let path = table.tokens[..num_rows.min((at + 1) * self.page_size)].to_vec();
            let page = table.pages[at];
            let published = self.publish(table.namespace.clone(), path, page, before);
            before = Some(published.err().unwrap_or(page));
        }
        self.let_go(&table);
    }

    fn let_go(&mut self, table: &Table) {
        let pages: Vec<_> = table.donor.iter().chain(&table.pages).copied().collect();
        self.cache.unlock_all(pages.iter().copied());
        self.clock += 1;
        for page in pages {
            if self.unlock(page) > 0 {
                continue;
            }
            if self.entries.contains_key(&page) {
                self.last_used.insert(page, self.clock);
            } else {
                assert!(self.free.insert(page), "page {page} freed twice");
            }
        }
    }

    /// Unpublishes a page and all pages below it, as after a failed step.
    fn unpublish(&mut self, at: usize) {
        let table = &self.tables[at];
        if table.num_published == 0 {
            return;
        }
        let first = below(&mut self.random, table.num_published as u64) as usize;
        let page = table.pages[first];
        let Entry {
            namespace, path, ..
        } = self.entries[&page].clone();
        let block = self.cache.block_of(page).expect("it is published");
        let removed = self.cache.unpublish(block).pages;
        let below: BTreeSet<_> = self
            .entries
            .iter()
            .filter(|(_, entry)| entry.namespace == namespace && entry.path.starts_with(&path))
            .map(|(page, _)| *page)
            .collect();
        assert_eq!(removed.iter().copied().collect::<BTreeSet<_>>(), below);
        for page in below {
            self.entries.remove(&page);
            if self.pinned.remove(&page) {
                self.totals.num_lost_pins += 1;
                self.unlock(page);
            }
            if self.num_locks(page) == 0 {
                self.free.insert(page);
            }
        }
        for table in &mut self.tables {
            let published = &table.pages[..table.num_published];
            let is_there = |page: &&PageId| self.entries.contains_key(page);
            let num_left = published.iter().take_while(is_there).count();
            table.is_undefined |= num_left < table.num_published;
            table.num_published = num_left;
        }
    }

    /// Pins the pages that a table has published, or some of them.
    fn pin(&mut self, at: usize) {
        const MAX_PINNED: usize = 3;
        let table = &self.tables[at];
        let num_pages = below(&mut self.random, table.num_published as u64 + 1) as usize;
        for &page in &table.pages[..num_pages] {
            if self.pinned.len() < MAX_PINNED || self.pinned.contains(&page) {
                self.cache.pin(page);
                if self.pinned.insert(page) {
                    *self.locks.entry(page).or_default() += 1;
                }
            }
        }
    }

    fn check_match(&self, namespace: &Namespace, query: &[TokenId], matched: &FoundPrefix) {
        let pages: Vec<_> = matched.tables.pages().collect();
        let mut num_whole = 0;
        loop {
            let end = (num_whole + 1) * self.page_size;
            let page = query.get(..end).and_then(|path| {
                let mut entries = self.entries.iter();
                entries.find(|(_, entry)| entry.namespace == *namespace && entry.path == path)
            });
            assert_eq!(page.map(|(page, _)| page), pages.get(num_whole));
            if page.is_none() {
                break;
            }
            num_whole += 1;
        }
        let start = num_whole * self.page_size;
        let rows = |entry: &Entry| {
            let is_next = entry.namespace == *namespace
                && entry.path.len() > start
                && entry.path.len() <= start + self.page_size
                && entry.path[..start] == query[..start];
            let common = entry.path.iter().zip(query).take_while(|(l, r)| l == r);
            if is_next { common.count() - start } else { 0 }
        };
        let most = self.entries.values().map(rows).max().unwrap_or(0);
        match &matched.donor {
            Some(donor) => {
                let (page, num_rows) = (donor.pages[0], donor.num_rows);
                let entry = &self.entries[&page];
                assert!(num_rows > 0);
                assert_eq!((num_rows as usize, rows(entry)), (most, most));
                assert!(
                    entry.filled_by < self.step,
                    "rows of a page that the same step fills are lent"
                );
            }
            None => assert!(
                most == 0
                    || self
                        .entries
                        .values()
                        .any(|entry| rows(entry) == most && entry.filled_by == self.step),
                "{most} rows were not found"
            ),
        }
    }

    fn compare(&self) {
        self.cache.check_invariants();
        assert_eq!(self.cache.num_free(), self.free.len());
        let num_cached = self
            .entries
            .keys()
            .filter(|page| self.num_locks(**page) == 0)
            .count();
        assert_eq!(self.cache.num_cached(), num_cached);
        assert_eq!(self.cache.num_in_use(), self.locks.len());
        assert_eq!(self.cache.num_pinned(), self.pinned.len());
        self.compare_retention();
        for page in
            (0..self.free.len() + num_cached + self.locks.len()).map(|page| PageId(page as u32))
        {
            assert_eq!(self.cache.num_locks(page), self.num_locks(page));
            let filled_by = self.entries.get(&page).map(|entry| entry.filled_by);
            assert_eq!(self.cache.filled_by(page), filled_by);
            assert_eq!(self.cache.is_pinned(page), self.pinned.contains(&page));
        }
    }

    /// Removes a lock and returns the number of locks left.
    fn unlock(&mut self, page: PageId) -> u32 {
        let locks = self.locks.get_mut(&page).unwrap();
        *locks -= 1;
        let num_left = *locks;
        if num_left == 0 {
            self.locks.remove(&page);
        }
        num_left
    }

    fn num_locks(&self, page: PageId) -> u32 {
        self.locks.get(&page).copied().unwrap_or(0)
    }
}

/// A pseudorandom number below `bound`, by SplitMix64.
pub(crate) fn below(state: &mut u64, bound: u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (z ^ (z >> 31)) % bound
}
