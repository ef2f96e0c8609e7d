//! Followers: requests that wait while their leader, another request, computes the prefix that they
//! share.

use crate::Scheduler;
use crate::cache::kv_cache::FoundPrefix;
use crate::request_state::{RequestIndex, RequestState};

impl Scheduler {
    /// The prefilling request, if any, that is about to publish the page that this one needs next.
    pub(crate) fn leader_of(
        &self,
        state: &RequestState,
        found: &FoundPrefix,
    ) -> Option<RequestIndex> {
        let page_size = self.config.page_size as usize;
        let frontier = found.path.len();
        let next_page = frontier * page_size..(frontier + 1) * page_size;
        if next_page.end > state.max_cached_tokens() {
            return None;
        }
        let leads = |&leader: &RequestIndex| {
            let leader = &self.requests[leader];
            leader.offered() == (found.path.last().copied(), frontier as u32)
                && next_page.end <= leader.prefill_end as usize
                && leader.tokens[next_page.clone()] == state.tokens[next_page.clone()]
                && leader.request.namespace == state.request.namespace
        };
        self.running.prefilling().iter().copied().find(leads)
    }

    /// Takes a waiting request out of the queue until `leader` has published all pages that the two
    /// share. `num_matched_pages` of those are already there.
    pub(crate) fn follow(
        &mut self,
        index: RequestIndex,
        leader: RequestIndex,
        num_matched_pages: usize,
    ) {
        let page_size = self.config.page_size as usize;
        let (ahead, state) = (&self.requests[leader], &self.requests[index]);
        let end = (ahead.prefill_end as usize).min(state.max_cached_tokens());
        let known = num_matched_pages * page_size..end;
        let theirs = ahead.tokens[known.clone()].chunks_exact(page_size);
        let ours = state.tokens[known].chunks_exact(page_size);
        let common = theirs.zip(ours).take_while(|(theirs, ours)| theirs == ours);
        let num_pages = (num_matched_pages + common.count()) as u32;
        let (rank, ticket) = (self.waiting_rank(state), state.ticket);
        self.waiting.remove(rank, ticket);
        self.waiting.insert_follower(leader, num_pages, index);
        self.requests[index].held_by = Some((leader, num_pages));
    }

    /// Puts the followers that need no more than the first `num_pages` pages of the leader back
    /// into the queue.
    pub(crate) fn let_go_of_followers(&mut self, leader: RequestIndex, num_pages: u32) {
        while let Some(index) = self.waiting.follower_up_to(leader, num_pages) {
            self.stop_following(index);
            let state = &self.requests[index];
            self.waiting
                .insert(self.waiting_rank(state), state.ticket, index);
        }
    }

    /// Stops following a leader. Returns false if the request was not a follower.
    pub(crate) fn stop_following(&mut self, index: RequestIndex) -> bool {
        let held_by = self.requests[index].held_by.take();
        if let Some((leader, num_pages)) = held_by {
            self.waiting.remove_follower(leader, num_pages, index);
        }
        held_by.is_some()
    }
}
