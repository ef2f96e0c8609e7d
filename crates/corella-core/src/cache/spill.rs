//! Requests that give up their pages and keep their KV in host memory, instead of computing it again.
//!
//! ```text
//! Running, Arrived ──no page is free──▶ Waiting ──there is room again──▶ Receiving ──▶ Arrived
//!                                       storing, then stored             restoring
//! ```
//!
//! The driver of the scheduler makes the copies that [`SpillTask`] lists, in order. Pages that are being copied out
//! become free only when the copy has ended. Meanwhile, requests that lack pages wait for them, and no other request is
//! preempted. A stored request comes back when all its rows have room at once, so that two such requests never wait for
//! each other's pages. Blocks of the request that the prefix tree still has are not copied back.
//!
//! When host memory is full or a copy fails, a request is computed again, as without spilling. A request whose prompt
//! another node computed ends with [`RequestError::KvNotKept`](crate::RequestError::KvNotKept) instead, and that node
//! continues the request.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;

use crate::cache::page_table::PageTables;
use crate::{PageId, RequestId};

/// A copy between KV pages and host memory. The driver carries out tasks in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SpillTask {
    /// Copy these pages to host memory, then call [`Scheduler::handle_stored`](crate::Scheduler::handle_stored). The
    /// pages do not change before that call.
    Store {
        request: RequestId,
        pages: Vec<PageId>,
    },
    /// Fill pages, each from the stored page with the given index, forget all stored pages of the request, then call
    /// [`Scheduler::handle_restored`](crate::Scheduler::handle_restored). The pages are not read before that call.
    Restore {
        request: RequestId,
        pages: Vec<(u32, PageId)>,
    },
    /// Forget all stored pages of the request, if any.
    Discard { request: RequestId },
}

#[derive(Debug, Default)]
pub(crate) struct Spills {
    by_request: BTreeMap<RequestId, Spill>,
    /// Pages in host memory, and pages that requests about to be stored will take.
    num_pages: usize,
    num_storing: usize,
    /// Requests that are being restored, and will want a slot soon.
    num_restoring: usize,
    tasks: VecDeque<SpillTask>,
}

#[derive(Debug)]
struct Spill {
    phase: SpillPhase,
    /// False once the request has ended, or starts over. The record is then removed with its last copy.
    is_wanted: bool,
    /// Pages of host memory.
    num_pages: u32,
    /// The pages that are copied to host memory. After the copy, their content may change.
    source: PageTables,
    /// Pages that are locked until the copy to host memory has ended or, if the request has ended, until the copy back
    /// has ended.
    locked: Vec<PageId>,
}

/// A copy to host memory that has ended.
pub(crate) struct EndedStore {
    /// Pages that were locked for the copy.
    pub pages: Vec<PageId>,
    /// The request waits to be restored.
    pub is_kept: bool,
    /// The request is live and has lost its KV.
    pub is_lost: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SpillPhase {
    Storing,
    Stored,
    Restoring,
}

impl Spills {
    pub fn num_pages(&self) -> usize {
        self.num_pages
    }

    /// Returns whether a copy to host memory is running. When it ends, pages become free.
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
        spill.is_some_and(|spill| spill.phase == SpillPhase::Restoring)
    }

    pub fn is_stored(&self, request: RequestId) -> bool {
        let spill = self.by_request.get(&request);
        spill.is_some_and(|spill| spill.phase == SpillPhase::Stored)
    }

    /// The pages from which the request's rows were copied.
    pub fn source(&self, request: RequestId) -> impl Iterator<Item = PageId> {
        let spill = self.by_request.get(&request).into_iter();
        spill.flat_map(|spill| spill.source.pages())
    }

    pub fn locked_pages(&self) -> impl Iterator<Item = PageId> {
        let locked = self.by_request.values().flat_map(|spill| &spill.locked);
        locked.copied()
    }

    /// Keeps the pages of an ended request while they are being filled.
    pub fn keep_for_writer(&mut self, request: RequestId, pages: Vec<PageId>) {
        let spill = self.by_request.get_mut(&request);
        spill.expect("a restoring request has a record").locked = pages;
    }

    pub fn pop_task(&mut self) -> Option<SpillTask> {
        self.tasks.pop_front()
    }

    /// Reserves host memory for pages of a request that is about to lose them. Returns false if that would exceed
    /// `max_pages`.
    pub fn try_reserve(&mut self, num_pages: usize, max_pages: u32) -> bool {
        let has_room = self.num_pages + num_pages <= max_pages as usize;
        if has_room {
            self.num_pages += num_pages;
        }
        has_room
    }

    pub fn give_back_reserved(&mut self, num_pages: u32) {
        self.num_pages -= num_pages as usize;
    }

    /// Begins to store the pages of `source`, and keeps their locks until the copy has ended.
    pub fn store(&mut self, request: RequestId, source: PageTables) {
        let pages: Vec<_> = source.pages().collect();
        let spill = Spill {
            phase: SpillPhase::Storing,
            is_wanted: true,
            num_pages: pages.len() as u32,
            source,
            locked: pages.clone(),
        };
        self.by_request.insert(request, spill);
        self.num_pages += pages.len();
        self.num_storing += 1;
        self.tasks.push_back(SpillTask::Store { request, pages });
    }

    /// Records that the copy of a request's pages to host memory has ended. Returns `None` if no such copy was running.
    pub fn end_store(&mut self, request: RequestId, is_done: bool) -> Option<EndedStore> {
        let spill = self.by_request.get_mut(&request)?;
        if spill.phase != SpillPhase::Storing {
            return None;
        }
        self.num_storing -= 1;
        spill.phase = SpillPhase::Stored;
        let ended = EndedStore {
            pages: core::mem::take(&mut spill.locked),
            is_kept: spill.is_wanted && is_done,
            is_lost: spill.is_wanted && !is_done,
        };
        if ended.is_lost {
            self.num_pages -= spill.num_pages as usize;
        }
        if !ended.is_kept {
            self.by_request.remove(&request);
        }
        Some(ended)
    }

    /// Begins to copy a stored request's rows into the pages of `tables`, after the `num_found` blocks of the prefix
    /// tree.
    ///
    /// # Panics
    /// Panics when the request has no stored pages.
    pub fn restore(&mut self, request: RequestId, tables: &PageTables, num_found: usize) {
        let spill = self.by_request.get_mut(&request);
        let spill = spill.expect("a stored request has a record");
        spill.phase = SpillPhase::Restoring;
        let mut pages = Vec::new();
        let mut first_stored = 0;
        for (table, stored) in tables.iter().zip(spill.source.iter()) {
            let missing = stored.num_gone.max(num_found)..stored.len();
            let missing = missing.filter_map(|at| Some((at, table.page(at)?)));
            pages.extend(missing.map(|(at, page)| {
                let number = first_stored + at - stored.num_gone;
                (number as u32, page)
            }));
            first_stored += stored.pages.len();
        }
        self.tasks.push_back(SpillTask::Restore { request, pages });
        self.num_restoring += 1;
    }

    /// Records that the copy of a request's rows from host memory has ended. Returns the pages that were locked for the
    /// copy, and whether the request is live, or `None` if no such copy was running.
    pub fn end_restore(&mut self, request: RequestId) -> Option<(Vec<PageId>, bool)> {
        if !self.is_restoring(request) {
            return None;
        }
        let spill = self.by_request.remove(&request)?;
        if spill.is_wanted {
            self.num_pages -= spill.num_pages as usize;
            self.num_restoring -= 1;
        }
        Some((spill.locked, spill.is_wanted))
    }

    /// Forgets the stored pages of a request, unless a copy is under way.
    pub fn abandon(&mut self, request: RequestId) {
        let Some(spill) = self.by_request.get_mut(&request) else {
            return;
        };
        if !core::mem::take(&mut spill.is_wanted) {
            return;
        }
        self.num_pages -= spill.num_pages as usize;
        match spill.phase {
            SpillPhase::Storing => {}
            SpillPhase::Stored => {
                self.by_request.remove(&request);
            }
            // The task that restores the pages also forgets the stored ones.
            SpillPhase::Restoring => {
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
        assert!(
            self.num_pages <= max_pages as usize,
            "too many pages are spilled"
        );
        assert_eq!(
            count(|spill| spill.is_wanted),
            num_spilled_requests,
            "requests with pages in host memory"
        );
        assert_eq!(
            count(|spill| spill.phase == SpillPhase::Storing),
            self.num_storing,
            "requests that are being stored"
        );
        assert_eq!(
            count(|spill| spill.phase == SpillPhase::Restoring && spill.is_wanted),
            self.num_restoring,
            "requests that are being restored"
        );
        for (request, spill) in &self.by_request {
            assert!(
                spill.is_wanted || !spill.is_at_rest(),
                "request {request} has gone, but its stored pages are kept"
            );
        }
    }
}

impl Spill {
    fn is_at_rest(&self) -> bool {
        self.phase == SpillPhase::Stored
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;

    const REQUEST: RequestId = RequestId(1);

    fn tables(pages: &[u32]) -> PageTables {
        let mut tables = PageTables::new(1);
        let table = tables.iter_mut().next().unwrap();
        table.pages = pages.iter().copied().map(PageId).collect();
        tables
    }

    fn stored() -> Spills {
        let mut spills = Spills::default();
        spills.store(REQUEST, tables(&[5, 6, 7]));
        let pages = vec![PageId(5), PageId(6), PageId(7)];
        let request = REQUEST;
        assert_eq!(spills.pop_task(), Some(SpillTask::Store { request, pages }));
        assert!(spills.end_store(REQUEST, true).unwrap().is_kept);
        spills
    }

    #[test]
    fn pages_that_the_tree_still_has_are_not_copied_back() {
        let mut spills = stored();
        spills.restore(REQUEST, &tables(&[1, 2, 3]), 1);
        let pages = vec![(1, PageId(2)), (2, PageId(3))];
        let request = REQUEST;
        assert_eq!(
            spills.pop_task(),
            Some(SpillTask::Restore { request, pages })
        );
        spills.check_invariants(3, 0, 1);
        assert_eq!(spills.end_restore(REQUEST), Some((vec![], true)));
        assert_eq!(spills.num_pages(), 0);
        assert_eq!(spills.end_restore(REQUEST), None);
    }

    #[test]
    fn a_request_that_goes_while_it_is_restored_keeps_its_pages_for_the_copy() {
        let mut spills = stored();
        spills.restore(REQUEST, &tables(&[1, 2, 3]), 0);
        spills.abandon(REQUEST);
        spills.keep_for_writer(REQUEST, vec![PageId(1)]);
        spills.check_invariants(0, 0, 0);
        assert_eq!(spills.end_restore(REQUEST), Some((vec![PageId(1)], false)));
    }

    #[test]
    fn host_memory_is_set_aside_up_to_its_limit() {
        let mut spills = stored();
        assert!(!spills.try_reserve(2, 4));
        assert!(spills.try_reserve(1, 4));
        spills.check_invariants(4, 1, 1);
        spills.give_back_reserved(1);
        spills.abandon(REQUEST);
        assert_eq!(spills.num_pages(), 0);
    }
}
