//! Every limit of the scheduler, checked once.

use alloc::format;
use alloc::string::String;
use core::fmt;

/// Limits and policies. Counts are tokens unless they say otherwise.
#[derive(Clone, Debug, PartialEq)]
pub struct SchedulerConfig {
    pub num_pages: u32,
    pub page_size: u32,
    pub max_model_len: u32,
    /// Slots: requests that hold KV at once.
    pub max_num_seqs: u32,
    /// One step's budget, prefill and decode together.
    pub max_num_batched_tokens: u32,
    /// Prefill tokens of a step, all requests together. Without chunked prefill one longer
    /// prompt may go, alone.
    pub max_prefill_tokens: u32,
    /// One request's share of a step's prefill while others want some; 0 is no bound.
    pub long_prefill_token_threshold: u32,
    /// Requests that prefill in one step.
    pub max_prefill_seqs: u32,
    /// Requests that decode in one step, round robin over the running set.
    pub max_decode_seqs: u32,
    pub max_queued_requests: u32,
    /// Prompt tokens of the requests that wait for their first admission. A request may wait
    /// alone however long it is.
    pub max_queued_tokens: u64,
    /// Pages that pinned prefixes may take for good. No request counts on them.
    pub max_pinned_pages: u32,
    /// Pages that other nodes may be reading. A request that would take more exports nothing.
    pub max_held_pages: u32,
    /// How long pages are kept for a reader that says nothing.
    pub hold_lease_us: u64,
    pub enable_prefix_caching: bool,
    pub enable_chunked_prefill: bool,
    /// Refuse requests that can no longer meet their [`LatencyObjectives`](crate::LatencyObjectives).
    pub enable_slo_admission: bool,
    pub scheduling_policy: SchedulingPolicy,
    pub prefill_admission_policy: PrefillAdmissionPolicy,
    /// A waiting request that was passed over in this many steps is owed its turn.
    pub max_passed_over: u32,
    pub head_room: HeadRoom,
    /// Preempted more often than this, a request ends with an error.
    pub max_preemptions: u32,
    /// Steps planned before the first of them has returned; at most 16.
    pub max_inflight_steps: u32,
    /// Stages that the executor's layers are split over. With more than one a step cannot wait
    /// for another's token: whoever is in flight is skipped, and the decodes are shared out over
    /// `max_inflight_steps`, so that every stage has a step to work on. One step more than
    /// stages hides the time between a step's return and the next one's start.
    pub num_pipeline_stages: u32,
    pub speculation: Speculation,
    /// Drafts of one request in one step, at most.
    pub max_draft_tokens: u32,
}

/// Who guesses the tokens to come, for a step to compute along with a decode's own token and to
/// keep where they hold. Guesses change no output and take only what a step has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Speculation {
    Off,
    /// Whatever followed in the request's own prompt and output when its newest tokens stood there
    /// before (prompt lookup).
    Ngram,
    /// What a draft model draws between steps: see
    /// [`draft_requests`](crate::Scheduler::draft_requests). Drawing a token with it costs
    /// `draw_cost` hundredths of a step.
    Draft {
        draw_cost: u32,
    },
}

/// The pages that a request finds kept for its output when it starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadRoom {
    /// As many as it is expected to need, by the lengths of outputs that have ended, at the step
    /// in which those that run together are expected to need the most.
    Estimate,
    /// All that it may come to need: nothing is ever preempted for lack of pages.
    Limit,
    /// A share of what is left to its limit, in 1/65536. It sinks from `share` to `min_share` in
    /// `num_decay_steps` steps (0: not at all), and a preemption raises it to what the running
    /// requests have come to need, as in SGLang. A share of 0 that stays there is vLLM's rule.
    Share {
        share: u32,
        min_share: u32,
        num_decay_steps: u32,
    },
}

impl HeadRoom {
    /// The share that is all of it.
    pub const ONE: u32 = 1 << 16;

    /// A share that stays as it is.
    pub fn fixed_share(share: u32) -> Self {
        Self::Share {
            share,
            min_share: share,
            num_decay_steps: 0,
        }
    }
}

/// Whose turn it is among those that wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SchedulingPolicy {
    /// The first to arrive.
    Fcfs,
    /// The most urgent, then the first to arrive. One that is more urgent than a running
    /// request takes its place when there is no other.
    Priority,
    /// Among the first `lookahead` the one with the longest cached prefix, as in SGLang.
    LongestPrefix { lookahead: u32 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrefillAdmissionPolicy {
    /// Stop at the first waiting request that does not fit.
    Fifo,
    /// Among the first `lookahead` waiting requests take the smallest that fit; every
    /// `force_fifo_every`-th round in which anyone waits is FIFO (0: never).
    Pack {
        lookahead: u32,
        force_fifo_every: u32,
    },
}

impl SchedulerConfig {
    /// A draft that costs so many hundredths of a step to draw, or more, never pays: with the row
    /// that checks it, it costs the step that it may spare.
    pub const MAX_DRAW_COST: u32 = 75;
    /// More rows than these for one request are a prefill.
    pub const MAX_DRAFT_TOKENS: u32 = 64;

    /// Defaults for a pool and a context.
    pub fn new(num_pages: u32, page_size: u32, max_model_len: u32) -> Self {
        Self {
            num_pages,
            page_size,
            max_model_len,
            max_num_seqs: 256,
            max_num_batched_tokens: 2048,
            max_prefill_tokens: 2048,
            long_prefill_token_threshold: 0,
            max_prefill_seqs: u32::MAX,
            max_decode_seqs: u32::MAX,
            max_queued_requests: 4096,
            max_queued_tokens: 1 << 24,
            max_pinned_pages: 0,
            max_held_pages: num_pages / 2,
            hold_lease_us: 30_000_000,
            enable_prefix_caching: true,
            enable_chunked_prefill: true,
            enable_slo_admission: false,
            scheduling_policy: SchedulingPolicy::Fcfs,
            prefill_admission_policy: PrefillAdmissionPolicy::Fifo,
            max_passed_over: 16,
            head_room: HeadRoom::Estimate,
            max_preemptions: 16,
            max_inflight_steps: 1,
            num_pipeline_stages: 1,
            speculation: Speculation::Off,
            max_draft_tokens: 8,
        }
    }

    /// Refuses what would starve decode or never progress.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let positive = [
            ("num_pages", self.num_pages),
            ("page_size", self.page_size),
            ("max_num_seqs", self.max_num_seqs),
            ("max_num_batched_tokens", self.max_num_batched_tokens),
            ("max_prefill_tokens", self.max_prefill_tokens),
            ("max_prefill_seqs", self.max_prefill_seqs),
            ("max_decode_seqs", self.max_decode_seqs),
            ("max_queued_requests", self.max_queued_requests),
            ("max_passed_over", self.max_passed_over),
            ("max_inflight_steps", self.max_inflight_steps),
            ("num_pipeline_stages", self.num_pipeline_stages),
            ("max_draft_tokens", self.max_draft_tokens),
        ];
        for (name, value) in positive {
            if value == 0 {
                return Err(ConfigError(format!("{name} must be at least 1")));
            }
        }
        if self.max_inflight_steps < self.num_pipeline_stages {
            return Err(ConfigError(format!(
                "max_inflight_steps is {}: {} pipeline stages need a step each",
                self.max_inflight_steps, self.num_pipeline_stages
            )));
        }
        if self.max_inflight_steps > MAX_INFLIGHT_STEPS {
            return Err(ConfigError(format!(
                "max_inflight_steps is {}; the most is {MAX_INFLIGHT_STEPS}, and so it is of \
                 pipeline stages",
                self.max_inflight_steps
            )));
        }
        if self.max_draft_tokens > Self::MAX_DRAFT_TOKENS {
            return Err(ConfigError(format!(
                "max_draft_tokens is {}; the most is {}",
                self.max_draft_tokens,
                Self::MAX_DRAFT_TOKENS
            )));
        }
        if matches!(self.speculation, Speculation::Draft { .. }) && self.max_inflight_steps > 1 {
            return Err(ConfigError(format!(
                "max_inflight_steps is {}, and a draft model draws while no step runs; with it use \
                 1, and 1 pipeline stage",
                self.max_inflight_steps
            )));
        }
        let plans_known_tokens = self.max_inflight_steps == 1 || self.num_pipeline_stages > 1;
        if self.speculation != Speculation::Off && !plans_known_tokens {
            return Err(ConfigError(format!(
                "max_inflight_steps is {}, and nothing can be guessed behind a token that is still \
                 in flight; with speculation use 1",
                self.max_inflight_steps
            )));
        }
        if self.max_passed_over > MAX_PASSED_OVER {
            return Err(ConfigError(format!(
                "max_passed_over is {}; the most is {MAX_PASSED_OVER}",
                self.max_passed_over
            )));
        }
        if self.max_pinned_pages >= self.num_pages {
            return Err(ConfigError(format!(
                "max_pinned_pages is {}, of {} pages: requests need some too",
                self.max_pinned_pages, self.num_pages
            )));
        }
        if self.max_model_len < 2 {
            return Err(ConfigError(format!(
                "max_model_len is {}: a prompt and its reply take at least 2 tokens",
                self.max_model_len
            )));
        }
        if self.max_model_len > MAX_MODEL_LEN {
            return Err(ConfigError(format!(
                "max_model_len is {}; the most is {MAX_MODEL_LEN}",
                self.max_model_len
            )));
        }
        if let HeadRoom::Share { share, .. } = self.head_room
            && share > HeadRoom::ONE
        {
            return Err(ConfigError(format!(
                "head_room is a share of {share}/{}: it must not exceed 1",
                HeadRoom::ONE
            )));
        }
        if self.max_num_batched_tokens <= self.max_other_decodes() {
            return Err(ConfigError(format!(
                "max_num_batched_tokens is {}: {} decoding requests would leave no token for a \
                 prefill; raise it, or lower max_num_seqs or max_decode_seqs",
                self.max_num_batched_tokens,
                self.max_other_decodes()
            )));
        }
        if let PrefillAdmissionPolicy::Pack { lookahead: 0, .. } = self.prefill_admission_policy {
            return Err(ConfigError(
                "prefill_admission_lookahead must be at least 1".into(),
            ));
        }
        let is_fcfs = self.scheduling_policy == SchedulingPolicy::Fcfs;
        if !is_fcfs && self.prefill_admission_policy != PrefillAdmissionPolicy::Fifo {
            return Err(ConfigError(
                "prefill_admission_policy pack chooses by size, and scheduling_policy priority or \
                 lpm by something else; use pack with fcfs"
                    .into(),
            ));
        }
        if let SchedulingPolicy::LongestPrefix { lookahead } = self.scheduling_policy {
            if lookahead == 0 {
                return Err(ConfigError(
                    "prefill_admission_lookahead must be at least 1".into(),
                ));
            }
            if !self.enable_prefix_caching {
                return Err(ConfigError(
                    "scheduling_policy lpm needs the prefix cache, which is off".into(),
                ));
            }
        }
        Ok(())
    }
}

/// Executors have queues for so many: who waits for a step must not wait to submit one.
const MAX_INFLIGHT_STEPS: u32 = 16;

/// So many steps are remembered, to tell who was passed over in them.
const MAX_PASSED_OVER: u32 = 1 << 16;

/// Keeps sums of two lengths within 32 bits.
const MAX_MODEL_LEN: u32 = 1 << 30;

/// A configuration that cannot work, said in terms of the options to change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError(pub String);

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl core::error::Error for ConfigError {}
