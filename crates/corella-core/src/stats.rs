//! The scheduler's counters.

use crate::SchedulerConfig;

/// The scheduler's present state and past work. The fields up to `num_snapshots` describe the present state; the others
/// count since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SchedulerStats {
    pub num_running: usize,
    /// Requests that wait for a slot, including preempted ones.
    pub num_waiting: usize,
    /// Requests whose KV another node is computing, and requests whose KV has arrived but which have no slot yet.
    pub num_receiving: usize,
    pub num_arrived: usize,
    /// Pages that other nodes may still be reading or writing after their request has given them up.
    pub num_held_pages: usize,
    /// Pages of host memory that preempted requests have, or will have when steps in flight with them have returned.
    pub num_spilled_pages: usize,
    /// Pages that fetches under way fill or have filled.
    pub num_fetching_pages: usize,
    /// Pages of blocks that other nodes load, each counted once for each load.
    pub num_served_pages: usize,
    /// Holds of blocks that other nodes load. They may also lock pages that are not loaded.
    pub num_block_holds: usize,
    /// Prompt tokens of requests that have never been admitted.
    pub num_queued_tokens: u64,
    /// The current share of [`HeadRoom::Share`](crate::HeadRoom::Share), in 1/65536.
    pub head_room_share: u32,
    pub num_inflight_steps: usize,
    pub num_pages: usize,
    pub num_free_pages: usize,
    pub num_cached_pages: usize,
    /// Pages that requests hold, and pinned pages.
    pub num_in_use_pages: usize,
    pub num_pinned_pages: usize,
    /// Stored copies of recurrent state.
    pub num_snapshots: usize,

    /// The time to compute 1,024 prompt tokens, in microseconds, smoothed; 0 before any step was timed.
    pub prefill_us: u64,
    /// The same over steps with at least 256 prompt tokens, whose speed compares nodes: the fixed cost of a step counts
    /// little in it. 0 before such a step was timed.
    pub bulk_prefill_us: u64,
    /// The time per output token of one more request, in microseconds; 0 while none decodes.
    pub expected_tpot_us: u64,
    /// Reservations granted since the start.
    pub num_reservations: u64,
    pub num_steps: u64,
    pub num_scheduled_tokens: u64,
    /// Prompt tokens, counted when a request is first admitted.
    pub num_prompt_tokens: u64,
    /// Tokens that requests have received.
    pub num_generated_tokens: u64,
    /// The number of times that a request got draft tokens in a step.
    pub num_drafts: u64,
    /// Scheduled draft tokens, and the accepted ones.
    pub num_draft_tokens: u64,
    pub num_accepted_draft_tokens: u64,
    /// The accepted draft tokens, split by position.
    pub accepted_by_position: AcceptedByPosition,
    /// Tokens looked up in the prefix cache when a request starts or resumes, and those found there.
    pub num_prefix_query_tokens: u64,
    pub num_prefix_hit_tokens: u64,
    /// The prefix hits, split by source.
    pub prefix_hits: PrefixHits,
    pub num_preemptions: u64,
    /// Preempted requests whose KV was stored in host memory, and requests whose KV was restored from there.
    pub num_spills: u64,
    pub num_restores: u64,
    /// Blocks that fetches have brought, without the blocks that requests computed meanwhile.
    pub num_fetched_blocks: u64,
    /// Requests with KV of another node that ended because this node could not keep it.
    pub num_handed_back: u64,
    /// Requests refused or ended because they could not meet a latency objective.
    pub num_missed_objectives: u64,
    pub num_evicted_pages: u64,
    /// The highest number of times that one request was passed over before it started.
    pub max_passed_over: u32,
}

/// Tokens that did not have to be computed, by their source. They add up to `num_prefix_hit_tokens`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixHits {
    /// Tokens in full pages that earlier steps have filled or are filling.
    pub num_cached_tokens: u64,
    /// Tokens whose rows were copied from a page that matches only in part.
    pub num_copied_tokens: u64,
    /// Tokens in full pages that another request fills in the same step.
    pub num_shared_tokens: u64,
    /// Tokens that a preempted request found cached when it resumed, from any source.
    pub num_resumed_tokens: u64,
}

/// Draft tokens that proved right, by their place among the drafts of a request in a step. They add up to
/// `num_accepted_draft_tokens`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AcceptedByPosition(pub [u64; SchedulerConfig::MAX_DRAFT_TOKENS as usize]);

impl Default for AcceptedByPosition {
    fn default() -> Self {
        Self([0; SchedulerConfig::MAX_DRAFT_TOKENS as usize])
    }
}
