//! Counts of events in several runs.

use corella_core::SchedulerStats;

use crate::count::counts;
use crate::workload::Station;

counts! {
    pub struct Totals {
        num_runs,
        num_events,
        num_requests,
        num_refused,
        num_completed,
        num_steps,
        num_failed_steps,
        num_undrawn,
        num_scheduled_tokens,
        num_rejected_draft_tokens,
        num_accepted_draft_tokens,
        num_preemptions,
        num_spills,
        num_restores,
        num_failed_copies,
        num_fetches,
        num_cancelled_fetches,
        /// Fetches that got pages for only a part of their blocks.
        num_part_fetches,
        num_fetched_blocks,
        /// All holds, and holds that ended before their reader had finished.
        num_holds,
        num_ended_holds,
        num_evicted_pages,
        num_prefix_hit_tokens,
        /// Log-probabilities of prompt tokens, and requests without output tokens.
        num_prompt_logprobs,
        num_scored_only,
        num_hidden_states,
        /// Prefix hits, in tokens, in models with windows.
        num_window_hit_tokens,
        num_row_copies,
        /// Snapshots that were taken, and starts of a slot from a snapshot.
        num_snapshots,
        num_restored_states,
        num_resets,
        num_kv_events,
        num_refused_as_late,
        num_dropped_as_late,
        /// Calls that arrived before one that was queued earlier.
        num_overtaken,
        num_without_limit,
        num_adapter_hit_tokens,
        num_pins,
        num_resets_past_pins,
        /// Requests that had a beginning retained, retained pages that were evicted, and marks that found no room.
        num_retained,
        num_evicted_retained_pages,
        num_refused_retentions,
        /// Chunks above the threshold while other requests wait.
        num_long_chunks,
        /// Rises and falls of the share of head-room.
        num_raised_shares,
        num_lowered_shares,
        /// Aborts at each [`Station`].
        num_aborts_queued,
        num_aborts_chunk_in_flight,
        num_aborts_between_chunks,
        num_aborts_prompt_in_flight,
        num_aborts_decoding,
        num_aborts_between_tokens,
        num_aborts_drafts_in_flight,
        num_aborts_last_token_in_flight,
        num_aborts_preempted,
        num_aborts_ended,
    }
}

impl Totals {
    pub(crate) fn take_stats(&mut self, stats: &SchedulerStats) {
        self.num_steps = stats.num_steps;
        self.num_scheduled_tokens = stats.num_scheduled_tokens;
        self.num_accepted_draft_tokens = stats.num_accepted_draft_tokens;
        self.num_rejected_draft_tokens = stats.num_draft_tokens - stats.num_accepted_draft_tokens;
        self.num_preemptions = stats.num_preemptions;
        self.num_spills = stats.num_spills;
        self.num_restores = stats.num_restores;
        self.num_fetched_blocks = stats.num_fetched_blocks;
        self.num_evicted_pages = stats.num_evicted_pages;
        self.num_evicted_retained_pages = stats.num_evicted_retained_pages;
        self.num_refused_retentions = stats.num_refused_retentions;
        self.num_prefix_hit_tokens = stats.num_prefix_hit_tokens;
    }

    pub(crate) fn count_abort(&mut self, station: Station) {
        let count = match station {
            Station::Queued => &mut self.num_aborts_queued,
            Station::ChunkInFlight => &mut self.num_aborts_chunk_in_flight,
            Station::BetweenChunks => &mut self.num_aborts_between_chunks,
            Station::PromptInFlight => &mut self.num_aborts_prompt_in_flight,
            Station::Decoding => &mut self.num_aborts_decoding,
            Station::BetweenTokens => &mut self.num_aborts_between_tokens,
            Station::DraftsInFlight => &mut self.num_aborts_drafts_in_flight,
            Station::LastTokenInFlight => &mut self.num_aborts_last_token_in_flight,
            Station::Preempted => &mut self.num_aborts_preempted,
            Station::Ended => &mut self.num_aborts_ended,
        };
        *count += 1;
    }
}
