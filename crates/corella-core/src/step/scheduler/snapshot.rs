//! Snapshots of recurrent state: the spans after which a request takes one, and the requests that wait for one.
//!
//! A request takes a snapshot after certain blocks ([`SnapshotPoints`]), so its spans end there. The block, on the
//! request's own path or another's, gets the snapshot. A decode may be planned before the token that completes the
//! block is known; the request then holds the snapshot until the block is in the prefix tree.
//!
//! Requests that share a beginning may diverge after any block. The second request finds the last shared block in the
//! tree without a snapshot, or a leader is still computing it. One of the two requests then takes a snapshot there, for
//! a third. A decode keeps replacing its one snapshot by a newer one, so that the next turn of a conversation continues
//! near the end of the answer, and a preempted request near its last position.

use alloc::vec::Vec;

use crate::cache::kv_cache::FoundPrefix;
use crate::queue::follower::num_shared_blocks;
use crate::request_state::{HeldSnapshot, Leader, RequestIndex, RequestState};
use crate::scheduler_config::recurrent_state::{DecodePoints, SnapshotPoints};
use crate::step::step_plan::StepPlan;
use crate::{Scheduler, StateSnapshot, StepId};

/// The limit of waiting requests whose tokens are compared with those of a starting request.
const MAX_COMPARED: usize = 16;

impl Scheduler {
    /// How many of a prompt's next `num_tokens` tokens the span may have, so that it does not pass the next snapshot.
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

    /// The blocks after which a request takes snapshots. `None` if the cache keeps none.
    fn snapshot_points(&self, state: &RequestState) -> Option<SnapshotPoints> {
        let recurrent = self.config.recurrent_state.as_ref()?;
        if !self.config.enable_prefix_caching || recurrent.num_snapshots == 0 {
            return None;
        }
        let page_size = self.config.page_size;
        // Snapshots of answers take at most half of all snapshots, and leave the others to prompts.
        let has_room = self.running.len() <= recurrent.num_snapshots as usize / 2;
        Some(SnapshotPoints {
            page_size,
            interval: recurrent.snapshot_interval,
            end_of_prompt: { state.num_prompt_tokens() }.saturating_sub(1) / page_size,
            branch: state.branch(),
            decode: has_room.then(|| DecodePoints {
                start: state.prefill_end() / page_size,
                distance: recurrent.least_distance,
            }),
        })
    }

    /// The number of rows that a request computes up to its next snapshot.
    fn num_rows_to_snapshot(&self, state: &RequestState) -> Option<u32> {
        let points = self.snapshot_points(state)?;
        let num_rows = state.num_scheduled_tokens();
        let end = points.next(num_rows).saturating_mul(points.page_size);
        Some(end - num_rows)
    }

    /// Chooses where a request that starts after the found blocks takes a further snapshot: where its tokens diverge
    /// from the tree, or else where its tokens diverge from a waiting request's. Chooses no place if a snapshot there
    /// would save too little.
    pub(super) fn set_branch(&mut self, index: RequestIndex, found: &FoundPrefix) {
        let Some(points) = self.snapshot_points(&self.requests[index]) else {
            return;
        };
        let (num_found, num_matched) = (found.path.len() as u32, found.num_matched as u32);
        if self.is_worth_snapshot(&points, num_matched, num_found) {
            self.requests[index].set_branch(num_matched);
            return;
        }
        let first: Vec<_> = self.waiting.iter().take(MAX_COMPARED).collect();
        for other in first {
            self.set_branch_to(index, other, num_found);
        }
    }

    /// Makes requests that are computing their prompts take a snapshot where a new request diverges from them.
    pub(super) fn set_branches_to(&mut self, other: RequestIndex) {
        if self.kv.is_recurrent() {
            for index in self.running.prefilling().to_vec() {
                self.set_branch_to(index, other, 0);
            }
        }
    }

    fn set_branch_to(&mut self, index: RequestIndex, other: RequestIndex, num_found: u32) {
        let (state, other) = (&self.requests[index], &self.requests[other]);
        let points = self.snapshot_points(state);
        let Some(points) = points.filter(|points| points.branch == 0) else {
            return;
        };
        if state.request().namespace != other.request().namespace {
            return;
        }
        let num_shared = num_shared_blocks(other, state, 0, points.page_size);
        if num_shared * points.page_size > state.num_scheduled_tokens()
            && self.is_worth_snapshot(&points, num_shared, num_found)
        {
            self.requests[index].set_branch(num_shared);
        }
    }

    /// Whether a snapshot after `num_blocks` blocks of a prompt saves enough, if the prompt starts after `num_found`
    /// found blocks.
    fn is_worth_snapshot(&self, points: &SnapshotPoints, num_blocks: u32, num_found: u32) -> bool {
        let least = self
            .config
            .recurrent_state
            .as_ref()
            .map_or(1, |it| it.least_distance);
        let before = points.last(num_blocks).max(num_found);
        num_blocks <= points.end_of_prompt && num_blocks >= before.saturating_add(least)
    }

    /// The largest number of drafts before the next snapshot. A snapshot is taken only after a span without drafts, so
    /// the drafts leave room for a span of one token.
    pub(super) fn num_drafts_before_snapshot(&self, index: RequestIndex) -> u32 {
        let num_rows = self.num_rows_to_snapshot(&self.requests[index]);
        num_rows.map_or(u32::MAX, |num_rows| num_rows - 1)
    }

    /// Takes a snapshot after the request's span if one is due at its end. If all snapshots have to stay, takes none.
    pub(super) fn take_snapshot(&mut self, index: RequestIndex, plan: &mut StepPlan) {
        if self.take_exported_state(index, plan) {
            return;
        }
        let Some(points) = self.snapshot_points(&self.requests[index]) else {
            return;
        };
        let last_returned = self.inflight.last_returned();
        let state = &mut self.requests[index];
        let num_rows = state.num_scheduled_tokens();
        let num_blocks = num_rows / points.page_size;
        if !num_rows.is_multiple_of(points.page_size) || points.last(num_blocks) != num_blocks {
            return;
        }
        let passing = if points.is_passing(num_blocks) {
            num_blocks
        } else {
            0
        };
        let before = state.replace_passing(passing);
        if before > 0
            && let Some(block) = state.block_at(&self.kv, before)
        {
            self.kv.drop_passing_snapshot_of(block, last_returned);
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
        let Some(block) = block else {
            return state.hold_snapshot(HeldSnapshot { id, num_blocks });
        };
        self.kv.give_snapshot(id, block);
        if num_blocks == points.branch {
            // A second request has shown that prompts share the path up to there.
            self.kv.note_reused(block);
        }
    }

    /// Takes the snapshot that another node reads, if the request's span ends at the last exported row. A span has only
    /// one snapshot, so no block gets one there.
    fn take_exported_state(&mut self, index: RequestIndex, plan: &mut StepPlan) -> bool {
        let state = &self.requests[index];
        let export = state.export();
        let Some(id) = export.state() else {
            return false;
        };
        if state.num_scheduled_tokens() != export.end_row() {
            return false;
        }
        let slot = state.held_slot();
        plan.batch.snapshots.push(StateSnapshot { slot, to: id });
        self.kv.name_snapshot(id, plan.batch.step);
        true
    }

    /// Returns the leader that is about to take a snapshot after more blocks than `found`, and the number of blocks up
    /// to the snapshot. A request waits for each number of blocks only once. If the snapshot is then gone, the request
    /// computes the blocks itself.
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
        let num_found = found.path.len() as u32;
        let num_blocks = |leader: RequestIndex| {
            let ahead = &self.requests[leader];
            let points = self.snapshot_points(ahead)?;
            let num_rows = ahead.num_scheduled_tokens();
            if num_rows < num_found * points.page_size
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
            let num_shared = num_shared_blocks(state, ahead, num_found as usize, points.page_size);
            let point = points.last(num_shared);
            let is_new = point > state.num_awaited_blocks(Leader::Request(leader));
            (point * points.page_size > num_rows && is_new)
                .then_some((Leader::Request(leader), point))
        };
        let prefilling = self.running.prefilling().iter().copied();
        prefilling.filter_map(num_blocks).next()
    }

    /// Requeues followers of the previous step, which continue from its snapshots.
    pub(super) fn let_go_of_last_step(&mut self) {
        if let Some(last) = self.inflight.next_step().0.checked_sub(1) {
            let leader = Leader::Step(StepId(last));
            let requests = &mut self.requests;
            self.waiting.let_go_of_followers(leader, u32::MAX, requests);
        }
    }
}
