//! What the scheduler has done, in numbers.

/// The first group is now, the second counts since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SchedulerStats {
    pub num_running: usize,
    /// Preempted requests included.
    pub num_waiting: usize,
    /// Requests whose KV another node is computing, and those whose KV is there but which have no
    /// slot yet.
    pub num_receiving: usize,
    pub num_arrived: usize,
    /// Pages that other nodes may still be reading or writing after their request has let go.
    pub num_held_pages: usize,
    /// Prompt tokens of those that were never admitted.
    pub num_queued_tokens: u64,
    /// The present share of [`HeadRoom::Share`](crate::HeadRoom::Share), in 1/65536.
    pub head_room_share: u32,
    pub num_inflight_steps: usize,
    pub num_pages: usize,
    pub num_free_pages: usize,
    pub num_cached_pages: usize,
    /// Pinned pages included.
    pub num_in_use_pages: usize,
    pub num_pinned_pages: usize,

    pub num_steps: u64,
    pub num_scheduled_tokens: u64,
    /// Prompt tokens of requests at their first admission.
    pub num_prompt_tokens: u64,
    /// Tokens handed out.
    pub num_generated_tokens: u64,
    /// Scheduled tokens that were guesses, and generated ones that had been guessed.
    pub num_draft_tokens: u64,
    pub num_accepted_draft_tokens: u64,
    /// Tokens that asked the prefix cache, resumed requests included, and those it had.
    pub num_prefix_query_tokens: u64,
    pub num_prefix_hit_tokens: u64,
    /// The hits by where they came from.
    pub prefix_hits: PrefixHits,
    pub num_preemptions: u64,
    /// Requests refused or ended because they could not be in time.
    pub num_missed_objectives: u64,
    pub num_evicted_pages: u64,
    /// The most often that one request was passed over before it started.
    pub max_passed_over: u32,
}

/// Tokens that were not computed, by what spared them. The sum is `num_prefix_hit_tokens`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixHits {
    /// Whole pages that earlier steps have filled, or are filling.
    pub num_cached_tokens: u64,
    /// Rows copied out of a page that agrees in part.
    pub num_copied_tokens: u64,
    /// Whole pages that another request fills in the same step.
    pub num_shared_tokens: u64,
    /// What a preempted request found again, from wherever.
    pub num_resumed_tokens: u64,
}
