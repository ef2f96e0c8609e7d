//! The page map: what each KV page is used for, for people who look at the engine.

use alloc::vec::Vec;

use crate::{PageId, Scheduler};

/// What a page is used for. A page for which two apply counts as the later one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PageState {
    Free,
    /// The prefix tree keeps it, and no request holds it.
    Cached,
    /// A request holds it, or it is pinned.
    InUse,
    /// It belongs to a request whose KV another node or host memory fills, or has filled.
    Received,
    /// Its request has let go of it, and another node may still read or write it.
    Held,
}

/// The pages of the pool in the order of their numbers. Each cell stands for `num_pages_per_cell`
/// successive pages, the last one perhaps for fewer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageMap {
    pub num_pages_per_cell: u32,
    /// The most frequent state among those pages of a cell that are not free, and the later one where
    /// two are as frequent. A cell is free when all of its pages are.
    pub cells: Vec<PageState>,
    /// The number of pages in [`PageState::Received`].
    pub num_received: usize,
}

const NUM_STATES: usize = 5;

/// The most pages of one cell that are looked at, evenly spread, so that the time that a map takes
/// does not grow with the pool.
const MAX_SAMPLES_PER_CELL: u32 = 32;

impl Scheduler {
    /// Maps the pool to at most `max_cells` cells, at least one.
    pub fn page_map(&self, max_cells: u32) -> PageMap {
        let num_pages = self.config.num_pages;
        let num_pages_per_cell = num_pages.div_ceil(max_cells.max(1)).max(1);
        let (elsewhere, num_received) = self.pages_for_others();
        let stride = num_pages_per_cell.div_ceil(MAX_SAMPLES_PER_CELL) as usize;
        let cell = |first: u32| {
            let end = first.saturating_add(num_pages_per_cell).min(num_pages);
            let mut counts = [(0, PageState::Free); NUM_STATES];
            for page in (first..end).step_by(stride) {
                let state = { elsewhere.get(page as usize).copied().flatten() }
                    .unwrap_or_else(|| self.kv.page_state(PageId(page)));
                let count = &mut counts[state as usize];
                *count = (count.0 + 1, state);
            }
            let used = &counts[PageState::Cached as usize..];
            let most = used.iter().max().filter(|(count, _)| *count > 0);
            most.map_or(PageState::Free, |&(_, state)| state)
        };
        let firsts = (0..num_pages).step_by(num_pages_per_cell as usize);
        PageMap {
            num_pages_per_cell,
            cells: firsts.map(cell).collect(),
            num_received,
        }
    }

    /// The pages whose state the cache does not know, and how many of them are received. The list
    /// is empty while no other node or host memory has to do with any.
    fn pages_for_others(&self) -> (Vec<Option<PageState>>, usize) {
        let came_with_kv = |index: &_| self.requests[*index].came_with_kv;
        let received = self.receipts.iter();
        let received = received.chain(self.running.iter().filter(came_with_kv));
        let mut received = received.peekable();
        if received.peek().is_none() && self.holds.is_empty() {
            return (Vec::new(), 0);
        }
        let mut states = alloc::vec![None; self.config.num_pages as usize];
        for index in received {
            for page in self.requests[index].tables.pages() {
                states[page.0 as usize] = Some(PageState::Received);
            }
        }
        for page in self.holds.pages() {
            states[page.0 as usize] = Some(PageState::Held);
        }
        let is_received = |state: &&Option<_>| **state == Some(PageState::Received);
        let num_received = states.iter().filter(is_received).count();
        (states, num_received)
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;
    use crate::{Request, RequestId, SchedulerConfig};

    fn scheduler(num_pages: u32) -> Scheduler {
        Scheduler::new(SchedulerConfig::new(num_pages, 4, 64)).unwrap()
    }

    fn request(id: u64, num_prompt_tokens: u32) -> Request {
        let prompt = (0..num_prompt_tokens).map(|token| 100 * id as u32 + token);
        Request::greedy(RequestId(id), prompt.collect(), 8)
    }

    fn count(map: &PageMap, state: PageState) -> usize {
        map.cells.iter().filter(|&&cell| cell == state).count()
    }

    /// 9 tokens take three pages of four rows, two of them full. When the request has ended, the full
    /// ones stay cached.
    #[test]
    fn pages_are_in_use_then_cached() {
        let mut scheduler = scheduler(10);
        assert_eq!(count(&scheduler.page_map(10), PageState::Free), 10);
        scheduler.add_requests(vec![request(1, 9)]).unwrap();
        let batch = scheduler.schedule(0).unwrap();
        assert_eq!(scheduler.num_prefill_tokens(batch.step), 9);
        let map = scheduler.page_map(10);
        assert_eq!(count(&map, PageState::InUse), 3);
        assert_eq!(count(&map, PageState::Free), 7);
        scheduler.abort_request(RequestId(1));
        scheduler.update_from_output(&crate::BatchOutput {
            step: batch.step,
            samples: vec![(
                batch.spans[0].slot,
                crate::Sample {
                    token: 7,
                    logprobs: None,
                },
            )],
            logprobs: Vec::new(),
            hidden_states: Vec::new(),
            undrawn: Vec::new(),
        });
        assert_eq!(scheduler.num_prefill_tokens(batch.step), 0);
        let map = scheduler.page_map(10);
        assert_eq!(count(&map, PageState::Cached), 2);
        assert_eq!(count(&map, PageState::Free), 8);
    }

    /// A reservation of 9 rows takes three pages, which are held once the request is gone and until
    /// nobody writes to them.
    #[test]
    fn reserved_pages_are_received_then_held() {
        let mut scheduler = scheduler(10);
        scheduler.reserve(request(1, 9), 1000).unwrap();
        let map = scheduler.page_map(10);
        assert_eq!(count(&map, PageState::Received), 3);
        assert_eq!(map.num_received, 3);
        scheduler.abort_request(RequestId(1));
        let map = scheduler.page_map(10);
        assert_eq!(count(&map, PageState::Held), 3);
        assert_eq!(map.num_received, 0);
        scheduler.release_hold(RequestId(1));
        assert_eq!(count(&scheduler.page_map(10), PageState::Free), 10);
    }

    #[test]
    fn large_pool_is_grouped() {
        let mut scheduler = scheduler(1000);
        scheduler.add_requests(vec![request(1, 40)]).unwrap();
        scheduler.schedule(0).unwrap();
        let map = scheduler.page_map(300);
        assert_eq!(map.num_pages_per_cell, 4);
        assert_eq!(map.cells.len(), 250);
        // Ten pages from number 0 on: two whole cells, and half of the third.
        assert_eq!(count(&map, PageState::InUse), 3);
        assert_eq!(map.cells[2], PageState::InUse);
        assert_eq!(scheduler.page_map(40).cells[0], PageState::InUse);
        assert_eq!(scheduler.page_map(0).cells.len(), 1);
    }
}
