//! Counts of events in several runs. Runs prove little if an event never happened in them.

use std::collections::BTreeMap;

use corella_core::SchedulerStats;

use crate::workload::Station;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    pub num_runs: u64,
    pub num_events: u64,
    pub num_requests: u64,
    pub num_refused: u64,
    pub num_completed: u64,
    pub num_steps: u64,
    pub num_failed_steps: u64,
    pub num_undrawn: u64,
    pub num_scheduled_tokens: u64,
    pub num_draft_tokens: u64,
    pub num_accepted_draft_tokens: u64,
    pub num_preemptions: u64,
    pub num_spills: u64,
    pub num_restores: u64,
    pub num_failed_copies: u64,
    pub num_fetches: u64,
    pub num_cancelled_fetches: u64,
    /// Fetches that got pages for only a part of their blocks.
    pub num_part_fetches: u64,
    pub num_fetched_blocks: u64,
    /// All holds, and holds that ended before their reader had finished.
    pub num_holds: u64,
    pub num_ended_holds: u64,
    pub num_evicted_pages: u64,
    pub num_prefix_hit_tokens: u64,
    /// Log-probabilities of prompt tokens, and requests without output tokens.
    pub num_prompt_logprobs: u64,
    pub num_scored_only: u64,
    pub num_hidden_states: u64,
    /// Prefix hits, in tokens, in models with windows.
    pub num_window_hit_tokens: u64,
    pub num_row_copies: u64,
    /// Snapshots that were taken, and starts of a slot from a snapshot.
    pub num_snapshots: u64,
    pub num_restored_states: u64,
    pub num_resets: u64,
    pub num_kv_events: u64,
    pub num_refused_as_late: u64,
    pub num_dropped_as_late: u64,
    pub num_overtaken: u64,
    pub num_without_limit: u64,
    pub num_adapter_hit_tokens: u64,
    pub num_pins: u64,
    pub num_resets_past_pins: u64,
    /// Requests that had a beginning retained, retained pages that were evicted, and marks that found no room.
    pub num_retained: u64,
    pub num_evicted_retained_pages: u64,
    pub num_refused_retentions: u64,
    pub num_long_chunks: u64,
    pub num_raised_shares: u64,
    pub num_lowered_shares: u64,
    pub aborted: BTreeMap<Station, u64>,
}

impl Totals {
    pub fn add(&mut self, run: &Self) {
        self.num_runs += run.num_runs;
        self.num_events += run.num_events;
        self.num_requests += run.num_requests;
        self.num_refused += run.num_refused;
        self.num_completed += run.num_completed;
        self.num_steps += run.num_steps;
        self.num_failed_steps += run.num_failed_steps;
        self.num_undrawn += run.num_undrawn;
        self.num_scheduled_tokens += run.num_scheduled_tokens;
        self.num_draft_tokens += run.num_draft_tokens;
        self.num_accepted_draft_tokens += run.num_accepted_draft_tokens;
        self.num_preemptions += run.num_preemptions;
        self.num_spills += run.num_spills;
        self.num_restores += run.num_restores;
        self.num_failed_copies += run.num_failed_copies;
        self.num_fetches += run.num_fetches;
        self.num_cancelled_fetches += run.num_cancelled_fetches;
        self.num_part_fetches += run.num_part_fetches;
        self.num_fetched_blocks += run.num_fetched_blocks;
        self.num_holds += run.num_holds;
        self.num_ended_holds += run.num_ended_holds;
        self.num_evicted_pages += run.num_evicted_pages;
        self.num_prefix_hit_tokens += run.num_prefix_hit_tokens;
        self.num_prompt_logprobs += run.num_prompt_logprobs;
        self.num_scored_only += run.num_scored_only;
        self.num_hidden_states += run.num_hidden_states;
        self.num_window_hit_tokens += run.num_window_hit_tokens;
        self.num_row_copies += run.num_row_copies;
        self.num_snapshots += run.num_snapshots;
        self.num_restored_states += run.num_restored_states;
        self.num_resets += run.num_resets;
        self.num_kv_events += run.num_kv_events;
        self.num_refused_as_late += run.num_refused_as_late;
        self.num_dropped_as_late += run.num_dropped_as_late;
        self.num_overtaken += run.num_overtaken;
        self.num_without_limit += run.num_without_limit;
        self.num_adapter_hit_tokens += run.num_adapter_hit_tokens;
        self.num_pins += run.num_pins;
        self.num_resets_past_pins += run.num_resets_past_pins;
        self.num_retained += run.num_retained;
        self.num_evicted_retained_pages += run.num_evicted_retained_pages;
        self.num_refused_retentions += run.num_refused_retentions;
        self.num_long_chunks += run.num_long_chunks;
        self.num_raised_shares += run.num_raised_shares;
        self.num_lowered_shares += run.num_lowered_shares;
        for (&station, count) in &run.aborted {
            *self.aborted.entry(station).or_default() += count;
        }
    }

    pub(crate) fn take_stats(&mut self, stats: &SchedulerStats) {
        self.num_steps = stats.num_steps;
        self.num_scheduled_tokens = stats.num_scheduled_tokens;
        self.num_draft_tokens = stats.num_draft_tokens;
        self.num_accepted_draft_tokens = stats.num_accepted_draft_tokens;
        self.num_preemptions = stats.num_preemptions;
        self.num_spills = stats.num_spills;
        self.num_restores = stats.num_restores;
        self.num_fetched_blocks = stats.num_fetched_blocks;
        self.num_evicted_pages = stats.num_evicted_pages;
        self.num_evicted_retained_pages = stats.num_evicted_retained_pages;
        self.num_refused_retentions = stats.num_refused_retentions;
        self.num_prefix_hit_tokens = stats.num_prefix_hit_tokens;
    }

    /// Returns the names of events that never happened, although many runs should have had them.
    pub fn missing(&self) -> Vec<String> {
        let counts = [
            ("refused requests", self.num_refused),
            ("completed requests", self.num_completed),
            ("failed steps", self.num_failed_steps),
            ("rows without a draw", self.num_undrawn),
            (
                "drafts that do not hold",
                self.num_draft_tokens - self.num_accepted_draft_tokens,
            ),
            ("drafts that hold", self.num_accepted_draft_tokens),
            ("preemptions", self.num_preemptions),
            ("requests that go to host memory", self.num_spills),
            (
                "requests that come back from host memory",
                self.num_restores,
            ),
            (
                "copies to and from host memory that fail",
                self.num_failed_copies,
            ),
            ("fetches", self.num_fetches),
            ("cancelled fetches", self.num_cancelled_fetches),
            ("fetches of a part", self.num_part_fetches),
            ("fetched blocks", self.num_fetched_blocks),
            ("holds", self.num_holds),
            ("holds that ended early", self.num_ended_holds),
            ("evicted pages", self.num_evicted_pages),
            ("prefix hits", self.num_prefix_hit_tokens),
            ("log-probabilities of prompts", self.num_prompt_logprobs),
            ("requests that are only scored", self.num_scored_only),
            ("hidden states", self.num_hidden_states),
            ("prefix hits behind windows", self.num_window_hit_tokens),
            ("row copies", self.num_row_copies),
            ("snapshots", self.num_snapshots),
            ("restored states", self.num_restored_states),
            ("cache resets", self.num_resets),
            ("KV events", self.num_kv_events),
            ("calls refused as late", self.num_refused_as_late),
            ("waiting requests dropped as late", self.num_dropped_as_late),
            (
                "calls that arrived before one queued earlier",
                self.num_overtaken,
            ),
            ("ends of requests without a limit", self.num_without_limit),
            ("prefix hits of an adapter", self.num_adapter_hit_tokens),
            ("pins", self.num_pins),
            ("cache resets past pins", self.num_resets_past_pins),
            ("retained beginnings", self.num_retained),
            ("evicted retained pages", self.num_evicted_retained_pages),
            ("marks without room", self.num_refused_retentions),
            (
                "chunks above the threshold while others wait",
                self.num_long_chunks,
            ),
            ("shares of head-room that rise", self.num_raised_shares),
            ("shares of head-room that sink", self.num_lowered_shares),
        ];
        let stations = Station::ALL.iter().map(|station| {
            let count = self.aborted.get(station).copied().unwrap_or(0);
            (format!("aborts at {station:?}"), count)
        });
        let counts = counts.map(|(name, count)| (name.to_string(), count));
        let all = counts.into_iter().chain(stations);
        all.filter(|(_, count)| *count == 0)
            .map(|(name, _)| name)
            .collect()
    }
}
