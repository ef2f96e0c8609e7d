//! Followers: requests that wait while their leader, another request, computes the prefix that they
//! share.

use crate::Scheduler;
use crate::cache::kv_cache::FoundPrefix;
use crate::request_state::{RequestIndex, RequestState};

impl Scheduler {
    /// The prefilling request, if any, that is about to publish the block that this one needs next.
    pub(crate) fn leader_of(
        &self,
        state: &RequestState,
        found: &FoundPrefix,
    ) -> Option<RequestIndex> {
        let page_size = self.config.page_size as usize;
        let frontier = found.path.len();
        let next_block = frontier * page_size..(frontier + 1) * page_size;
        if next_block.end > state.max_cached_tokens() {
            return None;
        }
        let leads = |&leader: &RequestIndex| {
            let leader = &self.requests[leader];
            leader.frontier() == Some((found.path.last().copied(), frontier as u32))
                && next_block.end <= leader.prefill_end as usize
                && leader.tokens[next_block.clone()] == state.tokens[next_block.clone()]
                && leader.request.namespace == state.request.namespace
        };
        self.running.prefilling().iter().copied().find(leads)
    }

    /// Takes a waiting request out of the queue until `leader` has published all blocks that the two
    /// share. `num_found` of those are already there.
    pub(crate) fn follow(&mut self, index: RequestIndex, leader: RequestIndex, num_found: usize) {
        let page_size = self.config.page_size as usize;
        let (ahead, state) = (&self.requests[leader], &self.requests[index]);
        let end = (ahead.prefill_end as usize).min(state.max_cached_tokens());
        let known = num_found * page_size..end;
        let theirs = ahead.tokens[known.clone()].chunks_exact(page_size);
        let ours = state.tokens[known].chunks_exact(page_size);
        let common = theirs.zip(ours).take_while(|(theirs, ours)| theirs == ours);
        let num_blocks = (num_found + common.count()) as u32;
        let state = &mut self.requests[index];
        self.waiting.follow(index, state, leader, num_blocks);
    }

    /// Puts the followers that need no more than the first `num_blocks` blocks of the leader back into the
    /// queue.
    pub(crate) fn let_go_of_followers(&mut self, leader: RequestIndex, num_blocks: u32) {
        while let Some(index) = self.waiting.follower_up_to(leader, num_blocks) {
            self.waiting.let_go(index, &mut self.requests[index]);
        }
    }
}
