//! Requests that wait while another computes what they have in common.

use crate::Scheduler;
use crate::prefix_tree::PrefixMatch;
use crate::request_state::{RequestIndex, RequestState};
use crate::step_plan::StepPlan;

impl Scheduler {
    /// A prefilling request that is about to publish the page that this one needs next.
    pub(crate) fn leader_of(
        &self,
        state: &RequestState,
        matched: &PrefixMatch,
        plan: &StepPlan,
    ) -> Option<RequestIndex> {
        let page_size = self.config.page_size as usize;
        let frontier = matched.pages.len();
        let next_page = frontier * page_size..(frontier + 1) * page_size;
        if next_page.end > state.tokens.len() - 1 {
            return None;
        }
        let leads = |&leader: &RequestIndex| {
            let leader = &self.requests[leader];
            leader.num_published_pages as usize == frontier
                && next_page.end <= leader.prefill_end as usize
                && leader.tokens[next_page.clone()] == state.tokens[next_page.clone()]
                && leader.table[..frontier] == matched.pages[..]
                && leader.request.namespace == state.request.namespace
        };
        plan.leaders.iter().copied().find(leads)
    }

    /// Takes a waiting request out of the way until `leader` has published all that they have in
    /// common, of which `num_matched_pages` are there.
    pub(crate) fn follow(
        &mut self,
        index: RequestIndex,
        leader: RequestIndex,
        num_matched_pages: usize,
    ) {
        let page_size = self.config.page_size as usize;
        let (ahead, state) = (&self.requests[leader], &self.requests[index]);
        // A follower computes its last token itself, for its logits.
        let end = (ahead.prefill_end as usize).min(state.tokens.len() - 1);
        let known = num_matched_pages * page_size..end;
        let theirs = ahead.tokens[known.clone()].chunks_exact(page_size);
        let ours = state.tokens[known].chunks_exact(page_size);
        let common = theirs.zip(ours).take_while(|(theirs, ours)| theirs == ours);
        let num_pages = (num_matched_pages + common.count()) as u32;
        let (turn, ticket) = (self.turn(state), state.ticket);
        self.num_changes += 1;
        self.waiting.remove(turn, ticket);
        self.waiting.insert_follower(leader, num_pages, index);
        self.requests[index].held_by = Some((leader, num_pages));
    }

    /// Lets those start that need no more of the leader than its first `num_pages` pages.
    pub(crate) fn let_go_of_followers(&mut self, leader: RequestIndex, num_pages: u32) {
        while let Some(index) = self.waiting.follower_up_to(leader, num_pages) {
            self.num_changes += 1;
            self.stop_following(index);
            let state = &self.requests[index];
            self.waiting.insert(self.turn(state), state.ticket, index);
        }
    }

    /// Takes a follower out of the queue. False when the request is none.
    pub(crate) fn stop_following(&mut self, index: RequestIndex) -> bool {
        let held_by = self.requests[index].held_by.take();
        if let Some((leader, num_pages)) = held_by {
            self.waiting.remove_follower(leader, num_pages, index);
        }
        held_by.is_some()
    }
}
