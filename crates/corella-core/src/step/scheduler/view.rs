//! The view of the engine for people: requests, and pages. No method here changes state.

use alloc::vec::Vec;

use crate::request_state::RequestIndex;
use crate::{PageId, PageMap, PageState, RequestView, Scheduler};

impl Scheduler {
    /// The first `limit` live requests: running ones by rank, then receiving ones, then waiting ones in the order of
    /// the queue.
    pub fn request_views(&self, limit: usize) -> Vec<RequestView> {
        let running = self.running.iter();
        let indices = running
            .chain(self.remote_kv.iter())
            .chain(self.waiting.iter());
        let view = |index: RequestIndex| RequestView::new(&self.requests[index]);
        indices.take(limit).map(view).collect()
    }

    /// Maps the pool to at most `max_cells` cells, at least one.
    pub fn page_map(&self, max_cells: u32) -> PageMap {
        let (elsewhere, num_received) = self.pages_for_others();
        let state = |page: PageId| match elsewhere.get(page.0 as usize) {
            Some(&Some(state)) => state,
            _ => self.kv.page_state(page),
        };
        PageMap::new(self.config.num_pages, max_cells, num_received, state)
    }

    /// The states of pages that are received or held, by page, and the number of received pages. The list is empty
    /// while there are no such pages.
    fn pages_for_others(&self) -> (Vec<Option<PageState>>, usize) {
        let came_with_kv = |index: &_| self.requests[*index].came_with_kv();
        let received = self.remote_kv.iter();
        let received = received.chain(self.running.iter().filter(came_with_kv));
        let mut received = received.peekable();
        let has_fetches = !self.holds.fetches().is_empty();
        if received.peek().is_none() && self.holds.is_empty() && !has_fetches {
            return (Vec::new(), 0);
        }
        let mut states = alloc::vec![None; self.config.num_pages as usize];
        for index in received {
            for page in self.requests[index].tables().pages() {
                states[page.0 as usize] = Some(PageState::Received);
            }
        }
        for page in self.fetched_pages() {
            states[page.0 as usize] = Some(PageState::Received);
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
    use crate::{
        FetchEnd, FetchMedium, FetchRequest, Namespace, Request, RequestId, RequestStatus,
        SchedulerConfig,
    };

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

    /// 9 tokens take three pages of four rows, two of them full. When the request has ended, the full ones stay cached.
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

    /// A reservation of 9 rows takes three pages, which are held after the end of the request until all writes to them
    /// have ended.
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

    #[test]
    fn views_tell_who_runs_who_receives_and_who_waits() {
        let mut config = SchedulerConfig::new(64, 4, 64);
        config.max_num_seqs = 1;
        let mut scheduler = Scheduler::new(config).unwrap();
        let request = |id| {
            let prompt = (0..9).map(|token| 100 * id as u32 + token).collect();
            Request::greedy(RequestId(id), prompt, 8)
        };
        scheduler.add_requests(vec![request(1)]).unwrap();
        scheduler.add_requests(vec![request(2)]).unwrap();
        scheduler.schedule(0).unwrap();
        scheduler.reserve(request(3), 1000).unwrap();
        let views = scheduler.request_views(10);
        let statuses: Vec<_> = views
            .iter()
            .map(|view| (view.id.0, view.status, view.num_pages))
            .collect();
        assert_eq!(
            statuses,
            [
                // The whole prompt is in the step in flight, so the next step is a decode.
                (1, RequestStatus::Decode, 3),
                (3, RequestStatus::Receiving, 3),
                (2, RequestStatus::Waiting, 0),
            ]
        );
        assert_eq!(views[0].num_prompt_tokens, 9);
        assert_eq!(views[0].max_tokens, 8);
        assert_eq!(scheduler.request_views(2), views[..2]);
    }
    /// Only the fetch has pages for other nodes.
    #[test]
    fn fetched_pages_are_received_until_the_fetch_has_ended() {
        let mut scheduler = scheduler(10);
        let request = FetchRequest {
            medium: FetchMedium::Peer,
            namespace: Namespace::default(),
            tokens: (0..8).collect(),
            soft_us: 10,
            hard_us: 20,
        };
        let grant = scheduler.begin_fetch(request).unwrap();
        let map = scheduler.page_map(10);
        assert_eq!(count(&map, PageState::Received), 2);
        assert_eq!(map.num_received, 2);
        assert!(scheduler.handle_fetch_ended(grant.id, FetchEnd::Done));
        let map = scheduler.page_map(10);
        assert_eq!(count(&map, PageState::Cached), 2);
        assert_eq!(map.num_received, 0);
    }
}
