//! The prefix cache of a model with several KV groups, or with a window: which pages each group has
//! at each place of the prefix tree.
//!
//! The tree then holds *places* and no pages: a place stands for the tokens up to its end, and has a
//! page of each group, or none where that page was given up. So a page that fell out of a window is
//! evicted when its turn comes, whatever follows it, and the tokens before what is still kept are
//! known and compared. A prefix is found as far as every group has all pages that the next query
//! reads.
//!
//! Cached pages are evicted in the order of their last use, and of those that were used last together
//! the one furthest from the root first, because prefixes without it can still be found.

use alloc::vec::Vec;

use crate::cache::kv_cache::{FoundPrefix, KvCache};
use crate::cache::page_table::PageTables;
use crate::cache::prefix_tree::{KnownPath, Parent, PrefixTree};
use crate::{KvGroup, Namespace, PageId, StepId, TokenId};

/// A place of the prefix tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PlaceId(u32);

/// A place takes a small part of a page's memory. There can be more of them than pages, because
/// places without pages lead to others that have some.
const MAX_PLACES_PER_PAGE: usize = 64;

/// The bits of a time that tell the order of pages that were used last together.
const DEPTH_BITS: u32 = 31;

#[derive(Debug)]
pub(crate) struct GroupCache {
    groups: Vec<KvGroup>,
    /// The page of each group at each place; the groups of a place are neighbours.
    pages: Vec<Option<PageId>>,
    /// How many requests' paths lead through each place.
    num_paths: Vec<u32>,
    unused: Vec<PlaceId>,
    max_places: usize,
    /// Where each page is kept, by page.
    kept: Vec<Option<Kept>>,
}

#[derive(Clone, Copy, Debug)]
struct Kept {
    place: PlaceId,
    group: usize,
    /// The number of pages before it.
    depth: u32,
    /// The step whose return makes the page ready.
    filled_by: StepId,
}

impl PlaceId {
    /// The tree numbers what it holds like pages.
    fn in_tree(self) -> PageId {
        PageId(self.0)
    }

    fn of_tree(page: PageId) -> Self {
        Self(page.0)
    }
}

impl GroupCache {
    fn new(groups: &[KvGroup], num_pages: u32) -> Self {
        Self {
            groups: groups.to_vec(),
            pages: Vec::new(),
            num_paths: Vec::new(),
            unused: Vec::new(),
            max_places: num_pages as usize * MAX_PLACES_PER_PAGE,
            kept: alloc::vec![None; num_pages as usize],
        }
    }

    pub fn is_kept(&self, page: PageId) -> bool {
        self.kept[page.0 as usize].is_some()
    }

    pub fn filled_by(&self, page: PageId) -> Option<StepId> {
        self.kept[page.0 as usize].map(|kept| kept.filled_by)
    }

    /// The time of a use, by which pages are evicted.
    pub fn time(&self, page: PageId, clock: u64) -> u64 {
        let depth = self.kept[page.0 as usize].map_or(0, |kept| kept.depth);
        let from_deepest = (1 << DEPTH_BITS) - 1 - u64::from(depth);
        clock << DEPTH_BITS | from_deepest
    }

    fn page(&self, place: PlaceId, group: usize) -> Option<PageId> {
        self.pages[place.0 as usize * self.groups.len() + group]
    }

    fn page_mut(&mut self, place: PlaceId, group: usize) -> &mut Option<PageId> {
        &mut self.pages[place.0 as usize * self.groups.len() + group]
    }

    fn has_pages(&self, place: PlaceId) -> bool {
        (0..self.groups.len()).any(|group| self.page(place, group).is_some())
    }

    /// How many places at the beginning of a path can be used: a query behind them finds all that it
    /// reads.
    fn num_usable(&self, path: &[PlaceId], page_size: u32) -> usize {
        let mut num_pages = path.len();
        let mut is_shorter = true;
        while is_shorter {
            is_shorter = false;
            for (index, group) in self.groups.iter().enumerate() {
                let first = group.first_page_read(num_pages as u32 * page_size, page_size);
                let is_missing = |&at: &usize| self.page(path[at], index).is_none();
                let read = first as usize..num_pages;
                let missing = match group.window {
                    // Every query reads the first page that is missing, so it is the end.
                    None => read.clone().find(is_missing),
                    // A query anywhere between the last that is missing and the end reads it too.
                    Some(_) => read.clone().rev().find(is_missing),
                };
                if let Some(missing) = missing {
                    num_pages = missing;
                    is_shorter = true;
                }
            }
        }
        num_pages
    }
}

impl KvCache {
    pub(crate) fn with_groups(num_pages: u32, page_size: u32, groups: &[KvGroup]) -> Self {
        let mut cache = Self::new(num_pages, page_size);
        cache.tree = PrefixTree::new(0, page_size);
        cache.groups = Some(GroupCache::new(groups, num_pages).into());
        cache
    }

    /// What is cached of a token sequence. `known` is what an earlier look-up of the same tokens
    /// found.
    pub(crate) fn find_prefix(
        &self,
        namespace: &Namespace,
        tokens: &[TokenId],
        step: StepId,
        known: &mut KnownPath,
    ) -> FoundPrefix {
        let matched = self.tree.match_prefix(namespace, tokens, step, known);
        let Some(cache) = &self.groups else {
            return matched.into();
        };
        let page_size = self.tree.page_size() as u32;
        let mut path: Vec<_> = matched.pages.into_iter().map(PlaceId::of_tree).collect();
        let num_pages = cache.num_usable(&path, page_size);
        path.truncate(num_pages);
        let mut tables = PageTables::new(cache.groups.len());
        let num_rows = num_pages as u32 * page_size;
        for (index, table) in tables.iter_mut().enumerate() {
            let first = cache.groups[index].first_page_read(num_rows, page_size) as usize;
            let pages = path[first..].iter();
            table.num_gone = first;
            table.pages = { pages }
                .filter_map(|&place| cache.page(place, index))
                .collect();
        }
        FoundPrefix {
            num_pages,
            tables,
            path,
            donor: None,
        }
    }

    /// The step whose page made the place.
    pub(crate) fn place_made_by(&self, place: PlaceId) -> Option<StepId> {
        self.tree.filled_by(place.in_tree())
    }

    /// Leads a request's path through places that were found for it.
    pub(crate) fn follow_path(&mut self, path: &[PlaceId]) {
        let Some(cache) = &mut self.groups else {
            return;
        };
        for place in path {
            cache.num_paths[place.0 as usize] += 1;
        }
    }

    /// Leads a request's path on by the place of the page with `tokens`, which is made if it is not
    /// there. Returns `None` when there are too many places.
    pub(crate) fn extend_path(
        &mut self,
        namespace: &Namespace,
        path: &[PlaceId],
        tokens: &[TokenId],
        step: StepId,
    ) -> Option<PlaceId> {
        let new = self.take_place()?;
        let parent = match path.last() {
            Some(before) => Parent::Page(before.in_tree()),
            None => Parent::Root(namespace),
        };
        let id = new.in_tree();
        // Only a page that is not full could be superseded, and those have no place.
        let inserted = self
            .tree
            .insert_page(parent, tokens, id, step, &mut Vec::new());
        let cache = self.groups.as_mut()?;
        let place = match inserted {
            Ok(()) => new,
            Err(there) => {
                cache.unused.push(new);
                PlaceId::of_tree(there)
            }
        };
        cache.num_paths[place.0 as usize] += 1;
        Some(place)
    }

    /// A place that is not in the tree. When all are taken, a page gives up its own.
    fn take_place(&mut self) -> Option<PlaceId> {
        for may_evict in [true, false] {
            let cache = self.groups.as_mut()?;
            if let Some(place) = cache.unused.pop() {
                return Some(place);
            }
            let num_places = cache.num_paths.len();
            if num_places < cache.max_places {
                let num_entries = (num_places + 1) * cache.groups.len();
                cache.num_paths.push(0);
                cache.pages.resize(num_entries, None);
                self.tree.add_page_number();
                return Some(PlaceId(num_places as u32));
            }
            if may_evict && self.num_cached() > 0 {
                self.evict_one();
            }
        }
        None
    }

    /// Keeps a locked page of a group at the last place of `path`. If another page is kept there,
    /// that one stays.
    pub(crate) fn keep_page(
        &mut self,
        path: &[PlaceId],
        group: usize,
        page: PageId,
        filled_by: StepId,
    ) {
        let (Some(cache), Some(&place)) = (&mut self.groups, path.last()) else {
            return;
        };
        if let Some(there) = cache.page(place, group) {
            if !self.is_locked(there) {
                self.mark_used(there, self.clock + 1);
            }
            return;
        }
        *cache.page_mut(place, group) = Some(page);
        cache.kept[page.0 as usize] = Some(Kept {
            place,
            group,
            depth: path.len() as u32 - 1,
            filled_by,
        });
    }

    /// Ends a request's path.
    pub(crate) fn leave_path(&mut self, path: &[PlaceId]) {
        for &place in path.iter().rev() {
            if let Some(cache) = &mut self.groups {
                cache.num_paths[place.0 as usize] -= 1;
            }
            self.prune(place);
        }
    }

    /// Forgets the pages on a path that `step` or a later one fills, and returns their places.
    /// Tables that name such pages keep them until they are released.
    pub(crate) fn forget_filled_since(&mut self, path: &[PlaceId], step: StepId) -> Vec<PlaceId> {
        let mut places = Vec::new();
        for &place in path {
            let Some(cache) = &self.groups else { break };
            let pages = (0..cache.groups.len()).filter_map(|group| cache.page(place, group));
            let filled_since = |page: &PageId| cache.filled_by(*page) >= Some(step);
            let pages: Vec<_> = pages.filter(filled_since).collect();
            if !pages.is_empty() {
                places.push(place);
            }
            for page in pages {
                self.forget_page(page);
            }
        }
        places
    }

    /// Takes a page from its place, and frees it if no table names it.
    pub(crate) fn forget_page(&mut self, page: PageId) {
        let Some(cache) = &mut self.groups else {
            return;
        };
        let Some(Kept { place, group, .. }) = cache.kept[page.0 as usize].take() else {
            return;
        };
        *cache.page_mut(place, group) = None;
        if !self.is_locked(page) {
            self.free_cached(page);
        }
        self.prune(place);
    }

    /// Removes a place that leads nowhere, and those before it that then do.
    fn prune(&mut self, mut place: PlaceId) {
        while let Some(cache) = &mut self.groups
            && cache.num_paths[place.0 as usize] == 0
            && !cache.has_pages(place)
            && self.tree.is_leaf(place.in_tree())
        {
            let before = self.tree.page_before(place.in_tree());
            self.tree.remove_from(place.in_tree(), &mut Vec::new());
            cache.unused.push(place);
            match before {
                Some(before) => place = PlaceId::of_tree(before),
                None => return,
            }
        }
    }

    /// # Panics
    /// Panics when a place and its pages do not name each other, or a place leads nowhere. `paths`
    /// are those of all requests.
    pub(crate) fn check_places<'a>(&self, paths: impl Iterator<Item = &'a [PlaceId]>) {
        let Some(cache) = &self.groups else {
            return;
        };
        let num_places = cache.num_paths.len();
        let mut num_paths = alloc::vec![0; num_places];
        for path in paths {
            for (at, place) in path.iter().enumerate() {
                num_paths[place.0 as usize] += 1;
                let before = self.tree.page_before(place.in_tree());
                let expected = at.checked_sub(1).map(|before| path[before].in_tree());
                assert!(
                    self.tree.contains(place.in_tree()) && before == expected,
                    "a request's path is none of the tree"
                );
            }
        }
        assert_eq!(
            num_paths, cache.num_paths,
            "the paths through places are counted wrong"
        );
        let mut num_kept = 0;
        for place in (0..num_places as u32).map(PlaceId) {
            let pages = (0..cache.groups.len()).filter_map(|group| cache.page(place, group));
            num_kept += pages.count();
            let leads_on = cache.num_paths[place.0 as usize] > 0
                || cache.has_pages(place)
                || !self.tree.is_leaf(place.in_tree());
            let is_unused = cache.unused.contains(&place);
            assert!(
                self.tree.contains(place.in_tree()) != is_unused && (is_unused || leads_on),
                "a place leads nowhere, or is unused and in the tree"
            );
            assert!(
                !is_unused || !cache.has_pages(place),
                "an unused place has pages"
            );
        }
        for (page, kept) in cache.kept.iter().enumerate() {
            let Some(kept) = kept else { continue };
            num_kept -= 1;
            assert_eq!(
                cache.page(kept.place, kept.group),
                Some(PageId(page as u32)),
                "a page is kept at a place that has another"
            );
        }
        assert_eq!(num_kept, 0, "a place has a page that is not kept there");
    }
}
