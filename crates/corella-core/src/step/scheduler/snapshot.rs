//! Snapshots of recurrent state: behind which spans they are taken, and who waits for one.
//!
//! A request takes a snapshot behind certain blocks (`RecurrentState::next_point`), so its spans end there. Its
//! path or that of another request leads through the block, and the block gets the snapshot. A decode may be planned
//! before the token that completes the block is known; the request then holds the snapshot until the block is in the
//! prefix tree.

use crate::cache::kv_cache::FoundPrefix;
use crate::queue::follower::num_shared_blocks;
use crate::request_state::{HeldSnapshot, Leader, RequestIndex, RequestState};
use crate::step::step_plan::StepPlan;
use crate::{Scheduler, StateSnapshot, StepId};

impl Scheduler {
    /// How many of a prompt's next `num_tokens` tokens a span computes that ends where a snapshot is taken.
    pub(super) fn end_at_snapshot(
        &self,
        index: RequestIndex,
        num_tokens: u32,
        step: StepId,
    ) -> u32 {
        if !self.config.enable_chunked_prefill || !self.kv.can_take_snapshot(step) {
            return num_tokens;
        }
        self.num_rows_to_snapshot(&self.requests[index])
            .map_or(num_tokens, |num_rows| num_tokens.min(num_rows))
    }

    /// The rows that a request computes up to its next snapshot.
    fn num_rows_to_snapshot(&self, state: &RequestState) -> Option<u32> {
        let recurrent = self.config.recurrent_state.as_ref();
        let recurrent = recurrent.filter(|_| self.config.enable_prefix_caching)?;
        let num_rows = state.num_scheduled_tokens();
        let page_size = self.config.page_size;
        let point = recurrent.next_point(num_rows, state.num_prompt_tokens(), page_size);
        Some(point.saturating_mul(page_size) - num_rows)
    }

    /// The drafts behind a request's scheduled tokens that leave the next span of one token no further than the next
    /// snapshot.
    pub(super) fn num_drafts_before_snapshot(&self, index: RequestIndex) -> u32 {
        let num_rows = self.num_rows_to_snapshot(&self.requests[index]);
        num_rows.map_or(u32::MAX, |num_rows| num_rows - 1)
    }

    /// Takes a snapshot behind the request's span if that ends where one is due. If all snapshots have to stay, none is
    /// taken.
    pub(super) fn take_snapshot(&mut self, index: RequestIndex, plan: &mut StepPlan) {
        let Some(recurrent) = &self.config.recurrent_state else {
            return;
        };
        let page_size = self.config.page_size;
        let state = &mut self.requests[index];
        let num_rows = state.num_scheduled_tokens();
        let num_blocks = num_rows / page_size;
        let num_prompt_tokens = state.num_prompt_tokens();
        if !self.config.enable_prefix_caching
            || !num_rows.is_multiple_of(page_size)
            || recurrent.last_point(num_blocks, num_prompt_tokens, page_size) != num_blocks
        {
            return;
        }
        let block = state.block_at(&self.kv, num_blocks);
        if let Some(block) = block.filter(|&block| self.kv.has_snapshot(block)) {
            self.kv.touch_snapshot(block);
            return;
        }
        if let Some(held) = state.take_snapshot() {
            self.kv.drop_snapshot(held.id);
        }
        let Some(id) = self.kv.try_take_snapshot(plan.batch.step) else {
            return;
        };
        let slot = state.held_slot();
        plan.batch.snapshots.push(StateSnapshot { slot, to: id });
        match block {
            Some(block) => self.kv.give_snapshot(id, block),
            None => state.hold_snapshot(HeldSnapshot { id, num_blocks }),
        }
    }

    /// Returns the leader that is about to take a snapshot further on than `found`, and the number of blocks up to
    /// there. A request waits for each number of blocks only once, so that it computes them itself if
    /// the snapshot is gone.
    pub(super) fn snapshot_leader_of(
        &self,
        index: RequestIndex,
        found: &FoundPrefix,
        step: StepId,
    ) -> Option<(Leader, u32)> {
        let state = &self.requests[index];
        let num_found_next = found.num_found_next as u32;
        if found.num_found_next > found.path.len() {
            let is_new = num_found_next > state.num_awaited_blocks(Leader::Step(step));
            return is_new.then_some((Leader::Step(step), num_found_next));
        }
        let recurrent = self.config.recurrent_state.as_ref()?;
        if recurrent.num_snapshots == 0 {
            return None;
        }
        let page_size = self.config.page_size;
        let num_found = found.path.len() as u32;
        let num_blocks = |leader: RequestIndex| {
            let ahead = &self.requests[leader];
            let num_rows = ahead.num_scheduled_tokens();
            if num_rows < num_found * page_size
                || ahead.frontier().is_none()
                || ahead.request().namespace != state.request().namespace
            {
                return None;
            }
            let begins_alike =
                num_found == 0 || ahead.block_at(&self.kv, num_found).as_ref() == found.path.last();
            if !begins_alike {
                return None;
            }
            let num_shared = num_shared_blocks(state, ahead, num_found as usize, page_size);
            let point = recurrent.last_point(num_shared, ahead.num_prompt_tokens(), page_size);
            let is_new = point > state.num_awaited_blocks(Leader::Request(leader));
            (point * page_size > num_rows && is_new).then_some((Leader::Request(leader), point))
        };
        let prefilling = self.running.prefilling().iter().copied();
        prefilling.filter_map(num_blocks).next()
    }

    /// Followers of the step before go on from the snapshots that it takes.
    pub(super) fn let_go_of_last_step(&mut self) {
        if let Some(last) = self.inflight.next_step().0.checked_sub(1) {
            let leader = Leader::Step(StepId(last));
            let requests = &mut self.requests;
            self.waiting.let_go_of_followers(leader, u32::MAX, requests);
        }
    }
}
