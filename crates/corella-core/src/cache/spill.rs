//! Requests that give up their pages and keep their KV in host memory, instead of computing it again.
//!
//! ```text
//! Running, Arrived ──no page is free──▶ Waiting ──there is room again──▶ Receiving ──▶ Arrived
//!                                       storing, then stored             restoring
//! ```
//!
//! Whoever drives the scheduler makes the copies: [`SpillTask`] says which, in order. Pages that are
//! being copied out are free only when that is done. Meanwhile the requests that lack one of them
//! wait, and nobody else is preempted. A stored request comes back when there is room for all its
//! rows at once, so that two of them never wait for each other's pages; what the prefix tree still
//! has of it is not copied.
//!
//! When host memory is full or a copy fails, a request is computed again, as without spilling. A
//! request whose prompt another node computed never is: it ends with
//! [`RequestError::KvNotKept`], and that node goes on with it.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;

use crate::cache::page_table::PageTables;
use crate::cache::receipt::NO_DEADLINE;
use crate::queue::admission::{Candidate, Held};
use crate::request_state::{Leaving, RequestIndex, Stage};
use crate::step::step_plan::StepPlan;
use crate::{FinishReason, PageId, RequestError, RequestId, Scheduler};

/// A copy between KV pages and host memory. Tasks are carried out in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SpillTask {
    /// Copy these pages to host memory, then call [`Scheduler::handle_stored`]. They do not change
    /// until then.
    Store {
        request: RequestId,
        pages: Vec<PageId>,
    },
    /// Fill pages, each with the page of this number among those that were stored of the request, forget
    /// all of it, then call [`Scheduler::handle_restored`]. The pages are not read until then.
    Restore {
        request: RequestId,
        pages: Vec<(u32, PageId)>,
    },
    /// Forget what was stored of the request, if anything was.
    Discard { request: RequestId },
}

#[derive(Debug, Default)]
pub(crate) struct Spills {
    by_request: BTreeMap<RequestId, Spill>,
    /// Pages in host memory, and those that requests which are about to be stored will take.
    num_pages: usize,
    num_storing: usize,
    /// Requests that will want a slot soon.
    num_restoring: usize,
    tasks: VecDeque<SpillTask>,
}

#[derive(Debug)]
struct Spill {
    stage: SpillStage,
    /// False once the request has ended, or starts over. The record then goes with its last copy.
    is_wanted: bool,
    /// Pages of host memory.
    num_pages: u32,
    /// The pages that were copied. Once they are stored, they may hold something else.
    source: PageTables,
    /// Locked until the copy out or, if the request has gone, the copy in has ended.
    locked: Vec<PageId>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SpillStage {
    Storing,
    Stored,
    Restoring,
}

impl Spills {
    pub fn num_pages(&self) -> usize {
        self.num_pages
    }

    /// Whether pages will be free when a copy has ended.
    pub fn is_storing(&self) -> bool {
        self.num_storing > 0
    }

    pub fn num_restoring(&self) -> usize {
        self.num_restoring
    }

    /// Whether a copy in either direction has not ended.
    pub fn is_copying(&self) -> bool {
        !self.by_request.values().all(Spill::is_at_rest)
    }

    /// Whether the request waits to be restored rather than computed.
    pub fn has(&self, request: RequestId) -> bool {
        let spill = self.by_request.get(&request);
        spill.is_some_and(|spill| spill.is_wanted)
    }

    pub fn is_restoring(&self, request: RequestId) -> bool {
        let spill = self.by_request.get(&request);
        spill.is_some_and(|spill| spill.stage == SpillStage::Restoring)
    }

    fn is_stored(&self, request: RequestId) -> bool {
        let spill = self.by_request.get(&request);
        spill.is_some_and(|spill| spill.stage == SpillStage::Stored)
    }

    /// The pages that the request's rows were copied from.
    pub fn source(&self, request: RequestId) -> impl Iterator<Item = PageId> {
        let spill = self.by_request.get(&request).into_iter();
        spill.flat_map(|spill| spill.source.pages())
    }

    pub fn locked_pages(&self) -> impl Iterator<Item = PageId> {
        let locked = self.by_request.values().flat_map(|spill| &spill.locked);
        locked.copied()
    }

    /// Keeps the pages of a request that has gone while they are being filled.
    pub fn keep_for_writer(&mut self, request: RequestId, pages: Vec<PageId>) {
        let spill = self.by_request.get_mut(&request);
        spill.expect("a restoring request has a record").locked = pages;
    }

    /// Forgets what is kept of a request, as far as no copy is under way.
    fn abandon(&mut self, request: RequestId) {
        let Some(spill) = self.by_request.get_mut(&request) else {
            return;
        };
        if !core::mem::take(&mut spill.is_wanted) {
            return;
        }
        self.num_pages -= spill.num_pages as usize;
        match spill.stage {
            SpillStage::Storing => {}
            SpillStage::Stored => {
                self.by_request.remove(&request);
            }
            // Restoring forgets it.
            SpillStage::Restoring => {
                self.num_restoring -= 1;
                return;
            }
        }
        self.tasks.push_back(SpillTask::Discard { request });
    }

    /// # Panics
    /// When the bookkeeping contradicts itself.
    pub fn check_invariants(
        &self,
        max_pages: u32,
        num_reserved_pages: usize,
        num_spilled_requests: usize,
    ) {
        let count = |is_it: fn(&Spill) -> bool| {
            let counted = self.by_request.values();
            counted.filter(|spill| is_it(spill)).count()
        };
        let wanted = self.by_request.values().filter(|spill| spill.is_wanted);
        let num_pages: usize = wanted.map(|spill| spill.num_pages as usize).sum();
        assert_eq!(
            num_pages + num_reserved_pages,
            self.num_pages,
            "spilled pages"
        );
        assert!(self.num_pages <= max_pages as usize, "too many are spilled");
        assert_eq!(
            count(|spill| spill.is_wanted),
            num_spilled_requests,
            "what is kept in host memory is of a live request"
        );
        assert_eq!(
            count(|spill| spill.stage == SpillStage::Storing),
            self.num_storing,
            "requests that are being stored"
        );
        assert_eq!(
            count(|spill| spill.stage == SpillStage::Restoring && spill.is_wanted),
            self.num_restoring,
            "requests that are being restored"
        );
        for (request, spill) in &self.by_request {
            assert!(
                spill.is_wanted || !spill.is_at_rest(),
                "request {request} has gone, and what was stored of it is kept"
            );
        }
    }
}

impl Spill {
    fn is_at_rest(&self) -> bool {
        self.stage == SpillStage::Stored
    }
}

impl Scheduler {
    /// The next copy to be made between KV pages and host memory.
    pub fn poll_spill_task(&mut self) -> Option<SpillTask> {
        self.spills.tasks.pop_front()
    }

    /// Reports that a [`SpillTask::Store`] has ended: its pages are in host memory or, if `is_done`
    /// is false, are not. Returns false if no such task was under way.
    pub fn handle_stored(&mut self, id: RequestId, is_done: bool) -> bool {
        let Some(spill) = self.spills.by_request.get_mut(&id) else {
            return false;
        };
        if spill.stage != SpillStage::Storing {
            return false;
        }
        self.spills.num_storing -= 1;
        spill.stage = SpillStage::Stored;
        let is_wanted = spill.is_wanted;
        self.kv.unlock_all(core::mem::take(&mut spill.locked));
        if is_wanted && is_done {
            self.counters.num_spills += 1;
            return true;
        }
        let num_pages = spill.num_pages as usize;
        self.spills.by_request.remove(&id);
        if is_wanted {
            self.spills.num_pages -= num_pages;
            self.go_on_without_kv(
                self.requests.find(id).expect("the request is live"),
                "it could not be copied to host memory",
            );
        }
        true
    }

    /// Reports that a [`SpillTask::Restore`] has ended: its pages are filled or, if `is_done` is
    /// false, nobody fills them any more. Returns false if no such task was under way.
    pub fn handle_restored(&mut self, id: RequestId, is_done: bool) -> bool {
        if !self.spills.is_restoring(id) {
            return false;
        }
        let spill = self.spills.by_request.remove(&id);
        let spill = spill.expect("a restoring request has a record");
        self.kv.unlock_all(spill.locked);
        if !spill.is_wanted {
            return true;
        }
        self.spills.num_pages -= spill.num_pages as usize;
        self.spills.num_restoring -= 1;
        let index = self.requests.find(id).expect("the request is live");
        if is_done {
            self.counters.num_restores += 1;
            let num_rows = self.requests[index].num_rows();
            self.arrive(index, num_rows);
        } else {
            self.stop_receiving(index);
            self.go_on_without_kv(index, "it could not be copied back from host memory");
        }
        true
    }

    /// Sets host memory aside for a request that is about to lose its pages. Returns false if its
    /// KV cannot be kept.
    pub(crate) fn reserve_spill(&mut self, index: RequestIndex) -> bool {
        let state = &mut self.requests[index];
        let num_pages = state.tables.num_pages();
        let has_room = self.spills.num_pages + num_pages <= self.config.max_spilled_pages as usize;
        // Half a prompt is quickly computed again, and exported pages stay where they are.
        if !has_room || state.is_prefilling() || state.request.exports_kv {
            return false;
        }
        state.num_spill_pages = num_pages as u32;
        self.spills.num_pages += num_pages;
        true
    }

    /// Begins to store the rows of a request that lets go of its pages, if host memory was set aside
    /// for it and it will go on. Pages without rows stay in its table.
    pub(crate) fn store_spill(&mut self, index: RequestIndex) {
        let state = &mut self.requests[index];
        let num_reserved_pages = core::mem::take(&mut state.num_spill_pages);
        self.spills.num_pages -= num_reserved_pages as usize;
        if num_reserved_pages == 0 || state.stage != Stage::Leaving(Leaving::Preempted) {
            return;
        }
        debug_assert_eq!(state.num_computed_tokens, state.num_rows());
        let end = state.num_computed_tokens.div_ceil(self.config.page_size) as usize;
        let mut source = PageTables::new(state.tables.num_groups());
        for (table, stored) in state.tables.iter_mut().zip(source.iter_mut()) {
            let rest = table.pages.split_off(end - table.num_gone);
            stored.num_gone = table.num_gone;
            stored.pages = core::mem::replace(&mut table.pages, rest);
        }
        let request = state.request.id;
        let pages: Vec<_> = source.pages().collect();
        let num_pages = pages.len();
        let spill = Spill {
            stage: SpillStage::Storing,
            is_wanted: true,
            num_pages: num_pages as u32,
            source,
            locked: pages.clone(),
        };
        self.note_admitted(index);
        self.spills.by_request.insert(request, spill);
        self.spills.num_pages += num_pages;
        self.spills.num_storing += 1;
        let task = SpillTask::Store { request, pages };
        self.spills.tasks.push_back(task);
    }

    pub(crate) fn abandon_spill(&mut self, index: RequestIndex) {
        self.spills.abandon(self.requests[index].request.id);
    }

    /// A waiting request has lost its KV: it is computed here or, if it came with KV, ends.
    pub(crate) fn go_on_without_kv(&mut self, index: RequestIndex, reason: &str) {
        if self.requests[index].came_with_kv {
            self.hand_back(index, reason);
        }
    }

    /// Ends a request that came with KV, for the node that it came from to go on with.
    pub(crate) fn hand_back(&mut self, index: RequestIndex, reason: &str) {
        self.counters.num_handed_back += 1;
        let error = RequestError::KvNotKept(reason.into());
        self.finish(index, FinishReason::Error(error), None);
    }

    /// Gives a stored request its pages, if there is room for all of them.
    pub(crate) fn try_restore(
        &mut self,
        index: RequestIndex,
        plan: &mut StepPlan,
    ) -> Result<(), Held> {
        let request = self.requests[index].request.id;
        if !self.spills.is_stored(request) {
            return Err(Held::NoRoom);
        }
        let candidate = self.candidate(index, plan)?;
        if !self.has_pages_for(&candidate) {
            return Err(Held::NoRoom);
        }
        if self.would_delay_patient(&candidate, plan) {
            return Err(Held::ByPatient);
        }
        self.restore(&candidate, plan);
        Ok(())
    }

    fn restore(&mut self, candidate: &Candidate, plan: &mut StepPlan) {
        let index = candidate.index;
        self.take_pages(candidate, plan);
        let state = &mut self.requests[index];
        let request = state.request.id;
        state.stage = Stage::Receiving;
        state.prefill_end = state.num_rows();
        let spill = self.spills.by_request.get_mut(&request);
        let spill = spill.expect("a stored request has a record");
        spill.stage = SpillStage::Restoring;
        let num_found = candidate.found.path.len();
        let mut pages = Vec::new();
        let mut first_stored = 0;
        for (table, stored) in state.tables.iter().zip(spill.source.iter()) {
            let missing = stored.num_gone.max(num_found)..stored.len();
            let missing = missing.filter_map(|at| Some((at, table.page(at)?)));
            pages.extend(missing.map(|(at, page)| {
                let number = first_stored + at - stored.num_gone;
                (number as u32, page)
            }));
            first_stored += stored.pages.len();
        }
        let task = SpillTask::Restore { request, pages };
        self.spills.tasks.push_back(task);
        self.spills.num_restoring += 1;
        self.begin_receiving(index, NO_DEADLINE);
    }
}
