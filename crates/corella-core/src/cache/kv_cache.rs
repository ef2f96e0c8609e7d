//! All KV pages: who may write them, who may read them, and which are evicted next.

use alloc::boxed::Box;
use alloc::collections::BTreeSet;
use alloc::vec::Vec;

use crate::cache::group_cache::{GroupCache, PlaceId};
use crate::cache::kv_event::{KvEvent, KvWatch};
use crate::cache::page_pool::PagePool;
use crate::cache::page_table::PageTables;
use crate::cache::prefix_tree::{KnownPath, Parent, PrefixMatch, PrefixTree};
use crate::{Namespace, PageId, PageState, StepId, TokenId};

/// The KV pages and what they hold. A page is in one of three states, whose counts always add up to
/// `num_pages`:
/// * in use: page tables name it, and each of them holds one lock;
/// * cached: in the prefix tree and not locked;
/// * free.
///
/// The scheduler has one; benchmarks and trace replays drive one on its own.
///
/// The published pages of a table are a path from a root of the tree. So the page before a locked
/// page is locked as well, and all cached pages can be evicted leaf by leaf. With KV groups, the tree
/// holds places instead of pages, and `groups` has the pages at those places.
#[derive(Debug)]
pub struct KvCache {
    pool: PagePool,
    pub(crate) tree: PrefixTree,
    pub(crate) groups: Option<Box<GroupCache>>,
    /// Advances each time a table is released.
    pub(crate) clock: u64,
    /// The time at which each page's last lock was removed.
    last_used: Vec<u64>,
    /// Cached leaves of the tree, least recently used first. With KV groups, all cached pages.
    evictable: BTreeSet<(u64, PageId)>,
    num_cached: usize,
    num_evicted: u64,
    /// Buffer for evicted pages, kept so that an eviction does not allocate.
    evicted: Vec<PageId>,
    /// Whether each page is pinned. A pinned page has a lock of its own while it is in the tree.
    is_pinned: Vec<bool>,
    num_pinned: usize,
    /// The subscription to what the tree holds, if there is one.
    watch: Option<Box<KvWatch>>,
}

/// What the cache has of a token sequence.
#[derive(Debug, Default)]
pub(crate) struct FoundPrefix {
    /// The number of pages that the tokens found would fill in a group without a window.
    pub num_pages: usize,
    /// The pages that queries behind those tokens read.
    pub tables: PageTables,
    /// The places of the tokens found, with KV groups.
    pub path: Vec<PlaceId>,
    /// A page whose first rows continue the match, and how many of its rows do. They can be copied.
    pub donor: Option<(PageId, u32)>,
}

impl From<PrefixMatch> for FoundPrefix {
    fn from(PrefixMatch { pages, donor }: PrefixMatch) -> Self {
        Self::of_one_group(pages, donor)
    }
}

impl FoundPrefix {
    pub fn of_one_group(pages: Vec<PageId>, donor: Option<(PageId, u32)>) -> Self {
        Self {
            num_pages: pages.len(),
            tables: PageTables::of_one_group(pages),
            path: Vec::new(),
            donor,
        }
    }
}

impl KvCache {
    pub fn new(num_pages: u32, page_size: u32) -> Self {
        Self {
            pool: PagePool::new(num_pages),
            tree: PrefixTree::new(num_pages, page_size),
            groups: None,
            clock: 0,
            last_used: alloc::vec![0; num_pages as usize],
            evictable: BTreeSet::new(),
            num_cached: 0,
            num_evicted: 0,
            evicted: Vec::new(),
            is_pinned: alloc::vec![false; num_pages as usize],
            num_pinned: 0,
            watch: None,
        }
    }

    pub fn num_free(&self) -> usize {
        self.pool.num_free()
    }

    pub fn num_cached(&self) -> usize {
        self.num_cached
    }

    pub fn num_in_use(&self) -> usize {
        self.pool.num_pages() - self.num_free() - self.num_cached
    }

    pub fn num_evicted(&self) -> u64 {
        self.num_evicted
    }

    pub fn num_pinned(&self) -> usize {
        self.num_pinned
    }

    pub fn is_pinned(&self, page: PageId) -> bool {
        self.is_pinned[page.0 as usize]
    }

    /// Pins a page of the tree. It is never evicted; only unpublishing it removes the pin. The
    /// pages before it on its path must be pinned too.
    pub(crate) fn pin(&mut self, page: PageId) {
        debug_assert!(self.tree.contains(page));
        if !core::mem::replace(&mut self.is_pinned[page.0 as usize], true) {
            self.num_pinned += 1;
            self.lock(page);
        }
    }

    /// The number of pages that `try_allocate` can provide.
    pub fn num_available(&self) -> usize {
        self.num_free() + self.num_cached
    }

    pub fn is_locked(&self, page: PageId) -> bool {
        self.pool.num_locks(page) > 0
    }

    pub fn match_prefix(
        &self,
        namespace: &Namespace,
        tokens: &[TokenId],
        step: StepId,
    ) -> PrefixMatch {
        self.rematch_prefix(namespace, tokens, step, &mut KnownPath::default())
    }

    /// Like `match_prefix`, but continues from what an earlier look-up of the same tokens found.
    pub(crate) fn rematch_prefix(
        &self,
        namespace: &Namespace,
        tokens: &[TokenId],
        step: StepId,
        known: &mut KnownPath,
    ) -> PrefixMatch {
        self.tree.match_prefix(namespace, tokens, step, known)
    }

    /// Appends `num_pages` pages to a table, each locked once, and evicts cached pages for them as
    /// needed. If there are not enough, returns false and changes nothing.
    pub fn try_allocate(&mut self, num_pages: usize, table: &mut Vec<PageId>) -> bool {
        if num_pages > self.num_available() {
            return false;
        }
        for _ in 0..num_pages {
            if self.pool.num_free() == 0 {
                self.num_evicted += 1;
                self.evict_one();
            }
            table.extend(self.pool.try_take());
        }
        true
    }

    /// Extends each group's table to the number of entries that `end` says. If there are not enough
    /// pages for all, returns false and changes nothing.
    pub(crate) fn try_extend(
        &mut self,
        tables: &mut PageTables,
        end: impl Fn(usize) -> usize,
    ) -> bool {
        let missing = tables.iter().enumerate();
        let missing = missing.map(|(group, table)| end(group).saturating_sub(table.len()));
        if missing.sum::<usize>() > self.num_available() {
            return false;
        }
        for (group, table) in tables.iter_mut().enumerate() {
            let num_pages = end(group).saturating_sub(table.len());
            self.try_allocate(num_pages, &mut table.pages);
        }
        true
    }

    pub fn lock(&mut self, page: PageId) {
        if self.pool.lock(page) == 1 {
            self.num_cached -= 1;
            self.evictable
                .remove(&(self.last_used[page.0 as usize], page));
        }
    }

    /// Unlocks a table's pages. They count as used now.
    pub fn unlock_all(&mut self, pages: impl IntoIterator<Item = PageId>) {
        self.clock += 1;
        for page in pages {
            if self.pool.unlock(page) > 0 {
                continue;
            }
            if self.is_kept(page) {
                self.num_cached += 1;
                self.mark_used(page, self.clock);
            } else {
                self.pool.free(page);
            }
        }
    }

    /// Enters a locked page in the prefix tree. Its rows may be read after `filled_by` has
    /// returned, and by other spans of that step. `Err` names the page that already has those
    /// tokens; the caller then keeps its own.
    pub fn publish(
        &mut self,
        parent: Parent,
        tokens: &[TokenId],
        page: PageId,
        filled_by: StepId,
    ) -> Result<(), PageId> {
        debug_assert!(self.is_locked(page));
        let mut superseded = Vec::new();
        let result = self
            .tree
            .insert_page(parent, tokens, page, filled_by, &mut superseded);
        self.drop_removed(&superseded);
        if let Some(watch) = &mut self.watch
            && result.is_ok()
            && tokens.len() == self.tree.page_size()
        {
            watch.note_published(parent, tokens, page, filled_by);
        }
        if let Parent::Page(parent) = parent
            && !self.is_locked(parent)
        {
            // The parent is no longer a leaf, so it cannot be evicted.
            self.evictable
                .remove(&(self.last_used[parent.0 as usize], parent));
        }
        if let Err(duplicate) = result
            && !self.is_locked(duplicate)
        {
            self.mark_used(duplicate, self.clock + 1);
        }
        result
    }

    /// Whether a page stays when no table names it any more.
    fn is_kept(&self, page: PageId) -> bool {
        match &self.groups {
            None => self.tree.contains(page),
            Some(groups) => groups.is_kept(page),
        }
    }

    pub fn filled_by(&self, page: PageId) -> Option<StepId> {
        match &self.groups {
            None => self.tree.filled_by(page),
            Some(groups) => groups.filled_by(page),
        }
    }

    /// Removes a page and all that follow it from the prefix tree, pinned or not. Tables that name
    /// them keep them until they are released.
    pub fn unpublish(&mut self, page: PageId, removed: &mut Vec<PageId>) {
        let before = self.tree.page_before(page);
        let first = removed.len();
        self.tree.remove_from(page, removed);
        self.drop_removed(&removed[first..]);
        if let Some(before) = before {
            self.note_leaf(before);
        }
    }

    /// Evicts everything that no table holds and that is not pinned.
    pub fn clear(&mut self) {
        while self.num_cached > 0 {
            self.evict_one();
        }
    }

    /// Starts a subscription to what the tree holds, beginning with what it holds now. With KV groups
    /// there are no events but that of the beginning.
    pub fn watch(&mut self, salt: u64) {
        let mut watch = KvWatch::new(salt, self.pool.num_pages());
        if self.groups.is_some() {
            self.watch = Some(Box::new(watch));
            return;
        }
        for page in self.tree.whole_pages() {
            if let (Some(parent), Some(filled_by)) = (self.tree.parent(page), self.filled_by(page))
            {
                watch.note_published(parent, self.tree.page_tokens(page), page, filled_by);
            }
        }
        self.watch = Some(Box::new(watch));
    }

    pub fn unwatch(&mut self) {
        self.watch = None;
    }

    /// The next event for the subscriber. `last_returned` is the newest step whose rows are
    /// computed.
    pub fn poll_event(&mut self, last_returned: Option<StepId>) -> Option<KvEvent> {
        let watch = self.watch.as_mut()?;
        if let Some(event) = watch.pop_gone() {
            return Some(event);
        }
        let page = watch.pop_ready(last_returned)?;
        let before = self.tree.page_before(page);
        Some(KvEvent::Stored {
            page: watch.hash(page)?,
            parent: before.and_then(|before| watch.hash(before)),
            tokens: self.tree.page_tokens(page).into(),
        })
    }

    pub(crate) fn evict_one(&mut self) {
        let (_, page) = self
            .evictable
            .pop_first()
            .expect("pages are cached, but no cached leaf is listed for eviction");
        if self.groups.is_some() {
            self.forget_page(page);
            return;
        }
        let mut evicted = core::mem::take(&mut self.evicted);
        self.unpublish(page, &mut evicted);
        evicted.clear();
        self.evicted = evicted;
    }

    /// Frees those pages removed from the tree that no table holds. Pages that are no longer in the
    /// tree lose their pins.
    fn drop_removed(&mut self, removed: &[PageId]) {
        for &page in removed {
            if let Some(watch) = &mut self.watch {
                watch.note_removed(page);
            }
            if core::mem::take(&mut self.is_pinned[page.0 as usize]) {
                self.num_pinned -= 1;
                if self.pool.unlock(page) == 0 {
                    self.pool.free(page);
                }
            } else if !self.is_locked(page) {
                self.free_cached(page);
            }
        }
    }

    /// Frees a page that was cached and is kept no longer.
    pub(crate) fn free_cached(&mut self, page: PageId) {
        self.evictable
            .remove(&(self.last_used[page.0 as usize], page));
        self.num_cached -= 1;
        self.pool.free(page);
    }

    pub(crate) fn mark_used(&mut self, page: PageId, clock: u64) {
        let time = match &self.groups {
            None => clock,
            Some(groups) => groups.time(page, clock),
        };
        let last_used = &mut self.last_used[page.0 as usize];
        self.evictable.remove(&(*last_used, page));
        *last_used = time;
        self.note_leaf(page);
    }

    /// Whether a page can be evicted alone, if it is cached.
    fn is_leaf(&self, page: PageId) -> bool {
        match &self.groups {
            None => self.tree.is_leaf(page),
            Some(groups) => groups.is_kept(page),
        }
    }

    fn note_leaf(&mut self, page: PageId) {
        if !self.is_locked(page) && self.is_leaf(page) {
            self.evictable
                .insert((self.last_used[page.0 as usize], page));
        }
    }

    /// What the cache itself knows of a page: free, cached or in use.
    pub(crate) fn page_state(&self, page: PageId) -> PageState {
        if self.is_locked(page) {
            PageState::InUse
        } else if self.is_kept(page) {
            PageState::Cached
        } else {
            PageState::Free
        }
    }

    pub fn num_locks(&self, page: PageId) -> u32 {
        self.pool.num_locks(page)
    }

    pub fn page_before(&self, page: PageId) -> Option<PageId> {
        self.tree.page_before(page)
    }

    /// # Panics
    /// Panics when a page is in two states or none, or cannot be evicted.
    pub fn check_invariants(&self) {
        self.tree.check_invariants();
        let mut is_free = alloc::vec![false; self.pool.num_pages()];
        for &page in self.pool.free_pages() {
            let is_twice = core::mem::replace(&mut is_free[page.0 as usize], true);
            assert!(!is_twice, "page {page} is free twice");
        }
        let mut num_cached = 0;
        let mut num_pinned = 0;
        for page in (0..self.pool.num_pages() as u32).map(PageId) {
            let is_locked = self.is_locked(page);
            let is_cached = !is_locked && self.is_kept(page);
            let num_states = usize::from(is_free[page.0 as usize])
                + usize::from(is_locked)
                + usize::from(is_cached);
            assert_eq!(num_states, 1, "page {page} is in two states or none");
            num_cached += usize::from(is_cached);
            let is_pinned = self.is_pinned(page);
            num_pinned += usize::from(is_pinned);
            let is_kept = is_locked && self.is_kept(page);
            assert!(
                !is_pinned || is_kept,
                "page {page} is pinned, but not in the tree"
            );
            let key = (self.last_used[page.0 as usize], page);
            assert_eq!(
                self.evictable.contains(&key),
                is_cached && self.is_leaf(page),
                "page {page} is listed for eviction and no cached leaf, or the reverse"
            );
            if self.groups.is_some() {
                continue;
            }
            if let (true, Some(before)) = (is_cached, self.page_before(page)) {
                assert!(
                    self.last_used[before.0 as usize] >= key.0 || self.is_locked(before),
                    "page {before} seems older than page {page} after it, which it was used with"
                );
            } else if let (true, Some(before)) = (is_locked, self.page_before(page)) {
                assert!(
                    self.is_locked(before),
                    "page {page} is locked and the page {before} before it is not"
                );
            }
        }
        assert_eq!(
            num_cached, self.num_cached,
            "the number of cached pages is wrong"
        );
        assert_eq!(
            num_pinned, self.num_pinned,
            "the number of pinned pages is wrong"
        );
        self.check_watch();
    }

    fn check_watch(&self) {
        let Some(watch) = &self.watch else {
            return;
        };
        if self.groups.is_some() {
            return;
        }
        for page in (0..self.pool.num_pages() as u32).map(PageId) {
            let tokens = self
                .tree
                .contains(page)
                .then(|| self.tree.page_tokens(page));
            let Some(tokens) = tokens.filter(|tokens| tokens.len() == self.tree.page_size()) else {
                assert_eq!(
                    watch.hash(page),
                    None,
                    "page {page} has a hash, but is not a full page of the tree"
                );
                assert!(
                    !watch.is_told(page),
                    "page {page} was announced, but is not in the tree"
                );
                continue;
            };
            if let Some(before) = self.page_before(page) {
                let is_in_order = watch.is_told(before) || !watch.is_told(page);
                assert!(
                    is_in_order,
                    "page {page} was announced before the page {before} that it follows"
                );
            }
            let parent = self.tree.parent(page);
            let expected = parent.map(|parent| watch.hash_after(parent, tokens));
            assert_eq!(
                watch.hash(page),
                expected,
                "the hash of page {page} is wrong"
            );
        }
    }
}
