//! Fetches: writers fill reserved pages with blocks of other nodes or tiers, while requests wait for them.
//!
//! A driver calls [`begin_fetch`](Scheduler::begin_fetch) and has the granted pages filled, block by block. Requests
//! that need the blocks follow the fetch until its soft deadline, as they would follow a request. The driver reports
//! progress with [`handle_fetched`](Scheduler::handle_fetched), stops writers that
//! [`poll_fetch_cancel`](Scheduler::poll_fetch_cancel) names, and reports with
//! [`handle_fetch_ended`](Scheduler::handle_fetch_ended) that a writer has stopped.
//!
//! A fetch is given up before a request is preempted for its pages.

use crate::cache::fetch::{Fetch, MAX_FETCHES};
use crate::cache::page_table::PageTables;
use crate::cache::prefix_tree::KnownPath;
use crate::request_state::Leader;
use crate::{FetchEnd, FetchGrant, FetchId, FetchRefusal, FetchRequest, PageId, Scheduler, StepId};

impl Scheduler {
    /// Reserves pages for the blocks of a sequence that are not cached. If all of them need more pages than fetches may
    /// hold, the grant ends earlier, after the last block that fits. In a group with a window, reserves only the pages
    /// that a query after the last block reads. With recurrent layers, also reserves a snapshot for the state after the
    /// last block.
    pub fn begin_fetch(&mut self, mut request: FetchRequest) -> Result<FetchGrant, FetchRefusal> {
        if !self.config.enable_prefix_caching {
            return Err(FetchRefusal::NoPrefixCache);
        }
        let page_size = self.config.page_size;
        let num_blocks = request.tokens.len() / page_size as usize;
        request.tokens.truncate(num_blocks * page_size as usize);
        request.hard_us = request.hard_us.max(request.soft_us);
        let (namespace, tokens) = (&request.namespace, &request.tokens);
        let step = self.inflight.next_step();
        let known = &mut KnownPath::default();
        let path = self.kv.find_prefix(namespace, tokens, step, known).path;
        let num_found = path.len();
        if num_found == num_blocks {
            return Err(FetchRefusal::AllCached);
        }
        let fetches = self.holds.fetches();
        if let Some(id) = fetches.bringing(namespace, tokens, num_found as u32, &self.kv) {
            return Err(FetchRefusal::UnderWay(id));
        }
        if fetches.len() >= MAX_FETCHES {
            return Err(FetchRefusal::TooMany);
        }
        let num_blocks = self.num_fetchable(num_found, num_blocks)?;
        request.tokens.truncate(num_blocks * page_size as usize);
        let mut reserved = self.tables_behind(num_found, num_blocks);
        let num_pages = self.num_pages_behind(num_found, num_blocks);
        let is_barred = fetches.is_barred();
        let found = self.kv.tables_of(&path);
        let num_cached = found.pages().filter(|&page| !self.kv.is_locked(page));
        let num_new_pages = num_pages + num_cached.count();
        self.keep_pages_of_running();
        let num_needed_pages = num_new_pages + self.forecast.pages().peak();
        let num_available_pages = self.kv.num_available();
        if is_barred
            || num_needed_pages > num_available_pages
            || num_new_pages > num_available_pages
        {
            return Err(FetchRefusal::NoRoom {
                num_needed_pages,
                num_available_pages,
            });
        }
        let last_returned = self.inflight.last_returned();
        let state = self.kv.try_reserve_snapshot(last_returned);
        if self.kv.is_recurrent() && state.is_none() {
            return Err(FetchRefusal::NoSnapshot);
        }
        for page in found.pages() {
            self.kv.lock(page);
        }
        let has_pages = self.kv.try_extend(&mut reserved, |_| num_blocks);
        assert!(
            has_pages,
            "fewer pages are free than were counted for a fetch"
        );
        let tables = reserved.to_vec();
        let fetch = Fetch::new(request, &path, &found, (reserved, state), &mut self.kv);
        Ok(FetchGrant {
            id: self.holds.fetches_mut().insert(fetch),
            num_found: num_found as u32,
            num_blocks: num_blocks as u32,
            tables,
            state,
        })
    }

    /// Returns the number of blocks of a sequence that are cached after a fetch, at most `num_blocks`. The first
    /// `num_found` blocks are cached already. The fetch is as long as the limit on the pages of all fetches permits.
    fn num_fetchable(&self, num_found: usize, num_blocks: usize) -> Result<usize, FetchRefusal> {
        let limit = self.config.max_fetched_pages;
        let num_held_pages = self.holds.fetches().num_pages();
        let num_pages_left = (limit as usize).saturating_sub(num_held_pages);
        let fits = |num: &usize| self.num_pages_behind(num_found, *num) <= num_pages_left;
        // With a limit of 0 nothing is fetched, not even a block outside every window, which takes no page.
        let num_fitting = match limit {
            0 => None,
            _ => (num_found + 1..=num_blocks).rev().find(fits),
        };
        num_fitting.ok_or_else(|| FetchRefusal::TooLarge {
            num_pages: self.num_pages_behind(num_found, num_found + 1),
            limit,
        })
    }

    /// Empty page tables that begin with the first pages to fetch.
    fn tables_behind(&self, num_found: usize, num_blocks: usize) -> PageTables {
        let mut tables = PageTables::new(self.config.kv_groups.len());
        let first_pages = self.first_pages_behind(num_found, num_blocks);
        for (first, table) in first_pages.zip(tables.iter_mut()) {
            table.num_gone = first;
        }
        tables
    }

    /// The first page to fetch for each group, so that a request can continue after `num_blocks` blocks. The first
    /// `num_found` blocks are cached already.
    fn first_pages_behind(
        &self,
        num_found: usize,
        num_blocks: usize,
    ) -> impl Iterator<Item = usize> {
        let page_size = self.config.page_size;
        self.config.kv_groups.iter().map(move |group| {
            let first_read = group.first_page_read(num_blocks as u32 * page_size, page_size);
            num_found.max(first_read as usize)
        })
    }

    /// The number of pages to fetch, so that a request can continue after `num_blocks` blocks. The first `num_found`
    /// blocks are cached already.
    pub(super) fn num_pages_behind(&self, num_found: usize, num_blocks: usize) -> usize {
        let first_pages = self.first_pages_behind(num_found, num_blocks);
        first_pages
            .map(|first| num_blocks.saturating_sub(first))
            .sum()
    }

    /// Cuts off the blocks of a fetch that will not come, and grants the pages of the remaining blocks. No page of the
    /// fetch may have been written, and no block published. Returns `None` if the fetch is cancelled, has ended, or
    /// would not become shorter.
    pub fn shorten_fetch(&mut self, id: FetchId, num_blocks: u32) -> Option<FetchGrant> {
        let fetches = self.holds.fetches();
        let num_found = fetches.num_found_before(id, num_blocks, self.config.page_size)?;
        let reserved = self.tables_behind(num_found as usize, num_blocks as usize);
        let fetches = self.holds.fetches_mut();
        let (tables, state) = fetches.shorten(id, num_blocks, reserved, &mut self.kv)?;
        Some(FetchGrant {
            id,
            num_found,
            num_blocks,
            tables,
            state,
        })
    }

    /// Reports that all pages of the first `num_blocks` fetched blocks are filled and, if these are all blocks of the
    /// fetch, its snapshot, too. Requests can hit the blocks from now on. Returns false if the fetch is cancelled, or
    /// has ended.
    pub fn handle_fetched(&mut self, id: FetchId, num_blocks: u32) -> bool {
        let last_returned = self.last_returned_step();
        let fetches = self.holds.fetches_mut();
        let Some(num_published) = fetches.publish(id, num_blocks, &mut self.kv, last_returned)
        else {
            return false;
        };
        self.waiting
            .let_go_of_followers(Leader::Fetch(id), num_published, &mut self.requests);
        true
    }

    /// Reports that the writer of a fetch has stopped. Returns false for an unknown fetch.
    pub fn handle_fetch_ended(&mut self, id: FetchId, end: FetchEnd) -> bool {
        let last_returned = self.last_returned_step();
        let is_done = end == FetchEnd::Done;
        let fetches = self.holds.fetches_mut();
        let Some(fetch) = fetches.take(id, is_done, &mut self.kv, last_returned) else {
            return false;
        };
        self.journal.counters().num_fetched_blocks += u64::from(fetch.num_brought());
        fetch.release(&mut self.kv);
        self.let_go_of_fetch(id);
        true
    }

    /// The last step that has returned. Fetched blocks count as filled by this step.
    fn last_returned_step(&self) -> StepId {
        self.inflight.last_returned().unwrap_or_default()
    }

    /// Requeues the requests that wait for a fetch.
    fn let_go_of_fetch(&mut self, id: FetchId) {
        let requests = &mut self.requests;
        self.waiting
            .let_go_of_followers(Leader::Fetch(id), u32::MAX, requests);
    }

    fn cancel_fetch(&mut self, id: FetchId) {
        self.holds.fetches_mut().cancel(id);
        self.let_go_of_fetch(id);
    }

    /// Requeues the requests that wait for a late fetch, and cancels fetches that take too long.
    pub(super) fn end_late_fetches(&mut self) {
        let now_us = self.pace.now_us();
        while let Some(id) = self.holds.fetches_mut().end_deadline(now_us) {
            self.let_go_of_fetch(id);
        }
    }

    /// Cancels the newest fetch because requests lack pages, unless a cancelled fetch is about to free some. Returns
    /// whether a fetch is about to free pages.
    pub(super) fn give_up_fetch(&mut self) -> bool {
        let fetches = self.holds.fetches();
        if fetches.frees_pages_soon(self.pace.now_us()) {
            return true;
        }
        let Some(newest) = fetches.newest() else {
            return false;
        };
        self.cancel_fetch(newest);
        true
    }

    /// Gives up the newest fetch or hold of blocks if no request runs and some wait, because its pages may be the ones
    /// that a waiting request lacks. No other fetch or hold begins before a request starts.
    pub(super) fn give_up_loads_for_waiting(&mut self) {
        let is_idle = self.running.is_empty() && self.inflight.is_empty();
        let has_loads = !self.holds.fetches().is_empty() || !self.holds.of_blocks().is_empty();
        if is_idle && has_loads && !self.waiting.has_none_to_start() {
            self.holds.fetches_mut().bar();
            let _ = self.give_up_fetch() || self.give_up_hold();
        }
    }

    /// Cuts back the paths of fetches that lead through removed blocks. Returns the number of these paths.
    pub(super) fn set_back_fetches(&mut self, end: Option<crate::BlockId>) -> u32 {
        let fetches = self.holds.fetches_mut();
        let set_back = fetches.set_back_paths(&mut self.kv, end);
        for &id in &set_back {
            self.cancel_fetch(id);
        }
        set_back.len() as u32
    }

    /// Pages that a fetch fills or has filled.
    pub(super) fn fetched_pages(&self) -> impl Iterator<Item = PageId> {
        self.holds.fetches().reserved_pages()
    }
}
