//! The scheduler's counters, and their metrics.

mod metric;

use crate::SchedulerConfig;

pub use metric::{Metric, MetricValue};

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
    /// Pages of host memory that preempted requests have, or will have when their steps in flight have returned.
    pub num_spilled_pages: usize,
    /// Pages that fetches under way fill or have filled.
    pub num_fetching_pages: usize,
    /// Pages that other nodes load. A page counts once for each load.
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
    /// Pages of prefixes that requests have marked, cached or in use.
    pub num_retained_pages: usize,
    /// Stored copies of recurrent state.
    pub num_snapshots: usize,

    /// The time to compute 1,024 prompt tokens, in microseconds, smoothed; 0 before any step was timed.
    pub prefill_us: u64,
    /// The same over steps with at least 256 prompt tokens, in which the fixed cost of a step counts little. The speeds
    /// of nodes are compared by this time. 0 before such a step was timed.
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
    /// Requests with KV of another node that ended because this node could not keep the KV.
    pub num_handed_back: u64,
    /// Requests refused or ended because they could not meet a latency objective.
    pub num_missed_objectives: u64,
    pub num_evicted_pages: u64,
    /// Retained pages among the evicted ones.
    pub num_evicted_retained_pages: u64,
    /// Marked prefixes for which the limit left no room.
    pub num_refused_retentions: u64,
    /// The highest number of times that one request was passed over before it started.
    pub max_passed_over: u32,
}

type Row = Metric<SchedulerStats>;

impl SchedulerStats {
    pub const METRICS: &[Metric<Self>] = &[
        Row::gauge("num_requests_running", |stats| stats.num_running as u64)
            .help("Requests that are running")
            .in_vllm(),
        // A request whose KV has arrived waits for a slot like any other.
        Row::gauge("num_requests_waiting", |stats| {
            (stats.num_waiting + stats.num_arrived) as u64
        })
        .help(
            "Requests that wait to start, to resume after a preemption, or to decode with the KV of \
             another node",
        )
        .in_vllm(),
        Row::gauge("num_requests_receiving", |stats| stats.num_receiving as u64)
            .help("Requests whose prompt another node computes, until all its KV is here"),
        Row::gauge("max_passed_over", |stats| stats.max_passed_over.into())
            .help("Most steps in which others overtook one waiting request"),
        Row::counter("num_preemptions", |stats| stats.num_preemptions)
            .help("Preemptions of running requests")
            .in_vllm(),
        Row::counter("requests_too_late", |stats| stats.num_missed_objectives)
            .help("Requests that --slo-admission refused or ended"),
        Row::counter("requests_handed_back", |stats| stats.num_handed_back).help(
            "Requests of other nodes that were preempted and went back, because their KV could not be \
             kept",
        ),
        Row::new(
            "kv_cache_usage_perc",
            MetricValue::Share(|stats| [stats.num_in_use_pages, stats.num_pages]),
        )
        .help("Share of the KV pages that running requests hold, from 0 to 1")
        .in_vllm(),
        Row::gauge("kv_pages_in_use", |stats| stats.num_in_use_pages as u64)
            .help("KV pages that running requests hold, pinned ones included"),
        Row::gauge("kv_pages_cached", |stats| stats.num_cached_pages as u64)
            .help("KV pages in the prefix cache that no running request holds"),
        Row::gauge("kv_pages_pinned", |stats| stats.num_pinned_pages as u64)
            .help("KV pages of pinned prefixes, which are never evicted"),
        Row::gauge("kv_pages_retained", |stats| {
            stats.num_retained_pages as u64
        })
        .help("KV pages of prefixes that requests have marked, which are evicted last"),
        Row::counter("kv_retained_pages_evicted", |stats| {
            stats.num_evicted_retained_pages
        })
        .help("KV pages that running requests took although they were retained"),
        Row::counter("kv_retentions_refused", |stats| {
            stats.num_refused_retentions
        })
        .help("Marked prefixes that were not retained, because --max-pinned-share left no room"),
        Row::gauge("kv_pages_held", |stats| stats.num_held_pages as u64).help(
            "KV pages that other nodes may still read or write after their request has ended here",
        ),
        Row::counter("kv_pages_evicted", |stats| stats.num_evicted_pages)
            .help("Cached KV pages that were evicted"),
        Row::gauge("kv_spilled_pages", |stats| stats.num_spilled_pages as u64)
            .help("KV pages of preempted requests in host memory (--kv-spill-memory)"),
        Row::counter("kv_spills", |stats| stats.num_spills)
            .help("Preempted requests whose KV went to host memory"),
        Row::counter("kv_restores", |stats| stats.num_restores)
            .help("Requests that got their KV back from host memory"),
        Row::gauge("state_snapshots", |stats| stats.num_snapshots as u64).help(
            "Copies of recurrent state, from which requests with the same prefix continue, and copies \
             on their way to another node",
        ),
        Row::counter("prefix_cache_queries", |stats| {
            stats.num_prefix_query_tokens
        })
        .help("Tokens looked up in the prefix cache")
        .in_vllm(),
        Row::counter("prefix_cache_hits", |stats| stats.num_prefix_hit_tokens)
            .help("Tokens found in the prefix cache")
            .in_vllm(),
        Row::new(
            "prefix_cache_hit_tokens",
            MetricValue::Counters(
                "source",
                &[
                    ("cached", |stats| stats.prefix_hits.num_cached_tokens),
                    ("copied", |stats| stats.prefix_hits.num_copied_tokens),
                    ("shared", |stats| stats.prefix_hits.num_shared_tokens),
                    ("resumed", |stats| stats.prefix_hits.num_resumed_tokens),
                ],
            ),
        )
        .help(
            "Tokens not computed, by source: cached in pages of earlier steps, copied rows of a page, \
             shared within a step, resumed after a preemption",
        ),
        Row::counter("spec_decode_num_drafts", |stats| stats.num_drafts)
            .help("Times at which a request had draft tokens in a step")
            .in_vllm(),
        Row::counter("spec_decode_num_draft_tokens", |stats| {
            stats.num_draft_tokens
        })
        .help("Draft tokens that were checked")
        .in_vllm(),
        Row::counter("spec_decode_num_accepted_tokens", |stats| {
            stats.num_accepted_draft_tokens
        })
        .help("Generated tokens that had been drafted, and took no step of their own")
        .in_vllm(),
    ];
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
