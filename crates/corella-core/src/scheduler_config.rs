//! Every limit of the scheduler, checked once.

mod config_error;
mod page_count;
pub(crate) mod policy;
pub(crate) mod recurrent_state;
mod request_limit;
mod step_limit;

use alloc::format;
use alloc::vec::Vec;

pub use config_error::ConfigError;

use crate::{BlockHasher, KvGroup, PrefillAdmissionPolicy, RecurrentState, SchedulingPolicy};

/// Limits and policies. Fields without a unit count tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct SchedulerConfig {
    pub num_pages: u32,
    pub page_size: u32,
    /// The model's KV groups, at least one. They take their pages from one pool.
    pub kv_groups: Vec<KvGroup>,
    /// `None` for a model without recurrent layers. See [`set_recurrent_state`](Self::set_recurrent_state).
    pub recurrent_state: Option<RecurrentState>,
    pub max_model_len: u32,
    /// The number of slots, and so the limit of running requests.
    pub max_num_seqs: u32,
    /// The most tokens that one step computes, prefill and decode together.
    pub max_num_batched_tokens: u32,
    /// The most prefill tokens of one step, over all requests. Without chunked prefill a longer
    /// prompt is computed as the only prefill of its step.
    pub max_prefill_tokens: u32,
    /// The most prefill tokens of one request in one step, with chunked prefill. `u32::MAX` means that only the limits
    /// of the step apply.
    pub max_chunk_tokens: u32,
    /// The most prefill tokens that one request gets in a step while other requests want some; 0 means no bound.
    pub long_prefill_token_threshold: u32,
    /// The most requests that prefill in one step.
    pub max_prefill_seqs: u32,
    /// The most requests that decode in one step. If more requests want to decode, they take turns.
    pub max_decode_seqs: u32,
    pub max_queued_requests: u32,
    /// The limit of prompt tokens over all requests that wait for their first admission. A request that waits alone may
    /// have any length.
    pub max_queued_tokens: u64,
    /// The most pages that pinned prefixes may occupy. Requests must fit into the others.
    pub max_pinned_pages: u32,
    /// The most pages that may be retained, pinned ones included. Retained pages make room for requests, so this may be
    /// any number.
    pub max_retained_pages: u32,
    /// The limit of pages that are held for other nodes' reads. A request that would exceed the limit exports nothing.
    pub max_held_pages: u32,
    /// The most pages that running fetches may hold. A fetch of a longer sequence brings the first blocks that fit.
    pub max_fetched_pages: u32,
    /// The limit of pages that are lent to other nodes. A page counts once for each load that reads it.
    pub max_served_pages: u32,
    /// The hash function that names blocks to other nodes.
    pub block_hasher: BlockHasher,
    /// The limit of KV pages that preempted requests keep in host memory. A request beyond the limit is computed again
    /// or, if another node computed its prompt, returns to that node.
    pub max_spilled_pages: u32,
    /// The time for which pages are held if their reader does not renew the hold.
    pub hold_lease_us: u64,
    pub enable_prefix_caching: bool,
    pub enable_chunked_prefill: bool,
    /// Refuse requests that can no longer meet their
    /// [`LatencyObjectives`](crate::LatencyObjectives).
    pub enable_slo_admission: bool,
    pub scheduling_policy: SchedulingPolicy,
    pub prefill_admission_policy: PrefillAdmissionPolicy,
    /// A waiting request that was passed over in this number of steps has aged, and gets the next turn.
    pub max_passed_over: u32,
    pub head_room: HeadRoom,
    /// A request that is preempted more often than this ends with an error.
    pub max_preemptions: u32,
    /// The most steps that are planned before the first of them has returned; at most 16.
    pub max_inflight_steps: u32,
    /// The number of stages that the executor's layers are split over. With more than one stage, a step cannot wait for
    /// a token of another step. So requests in flight are skipped, and the decodes are divided among
    /// `max_inflight_steps` steps, so that every stage has a step to work on. With one more step in flight than stages,
    /// no stage idles between the return of a step and the start of the next.
    pub num_pipeline_stages: u32,
    pub speculation: Speculation,
    /// The most drafts of one request in one step.
    pub max_draft_tokens: u32,
}

/// The source of drafts: guesses of the next tokens, which a step computes along with a decode's own token and keeps if
/// they prove right. Drafts never change the output, and use only tokens that a step has left over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Speculation {
    Off,
    /// The tokens that followed when the request's newest tokens occurred earlier in its own prompt
    /// or output (prompt lookup).
    Ngram,
    /// Tokens that a draft model draws between steps: see
    /// [`draft_requests`](crate::Scheduler::draft_requests). Drawing one takes `draw_cost`
    /// hundredths of the time of a step.
    Draft {
        draw_cost: u32,
    },
}

/// The rule for the pages that are kept for the outputs of running requests when another request starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadRoom {
    /// The most pages that the running requests are expected to need at once, in any later step. The lengths of ended
    /// outputs predict the lengths of running ones.
    Estimate,
    /// The pages that each request needs at its limit. No request is ever preempted for lack of pages.
    Limit,
    /// A share of the tokens that each request may still generate, in units of 1/65536. The share decreases from
    /// `share` to `min_share` within `num_decay_steps` steps, or not at all if `num_decay_steps` is 0. A preemption
    /// raises it to the share that the running requests have needed, as in SGLang. A constant share of 0 is vLLM's
    /// rule.
    Share {
        share: u32,
        min_share: u32,
        num_decay_steps: u32,
    },
}

impl HeadRoom {
    /// The share 1: all remaining tokens.
    pub const ONE: u32 = 1 << 16;

    /// A rule whose share never changes.
    pub fn fixed_share(share: u32) -> Self {
        Self::Share {
            share,
            min_share: share,
            num_decay_steps: 0,
        }
    }
}

impl SchedulerConfig {
    /// Drafts never pay if drawing one takes this number of hundredths of a step, or more: drawing the draft and
    /// checking it then take as long as the step that the draft may save.
    pub const MAX_DRAW_COST: u32 = 75;
    /// The largest `max_draft_tokens`. With more rows, a decode would take as much of a step as a prefill.
    pub const MAX_DRAFT_TOKENS: u32 = 64;

    /// The default configuration for a pool and a context length.
    pub fn new(num_pages: u32, page_size: u32, max_model_len: u32) -> Self {
        Self {
            num_pages,
            page_size,
            kv_groups: alloc::vec![KvGroup::default()],
            recurrent_state: None,
            max_model_len,
            max_num_seqs: 256,
            max_num_batched_tokens: 2048,
            max_prefill_tokens: 2048,
            max_chunk_tokens: u32::MAX,
            long_prefill_token_threshold: 0,
            max_prefill_seqs: u32::MAX,
            max_decode_seqs: u32::MAX,
            max_queued_requests: 4096,
            max_queued_tokens: 1 << 24,
            max_pinned_pages: 0,
            max_retained_pages: 0,
            max_held_pages: num_pages / 2,
            max_fetched_pages: num_pages / 4,
            max_served_pages: num_pages / 4,
            block_hasher: BlockHasher::default(),
            max_spilled_pages: 0,
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

    /// Refuses a configuration that would starve decodes or stop progress.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let positive = [
            ("num_pages", self.num_pages),
            ("page_size", self.page_size),
            ("max_num_seqs", self.max_num_seqs),
            ("max_num_batched_tokens", self.max_num_batched_tokens),
            ("max_prefill_tokens", self.max_prefill_tokens),
            ("max_chunk_tokens", self.max_chunk_tokens),
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
                return Err(ConfigError::new(name, " must be at least 1"));
            }
        }
        self.validate_kv_groups()?;
        self.validate_recurrent_state()?;
        self.validate_steps()?;
        self.validate_limits()?;
        self.validate_policies()
    }

    /// Refuses numbers of steps in flight that break stages or drafts.
    fn validate_steps(&self) -> Result<(), ConfigError> {
        if self.max_inflight_steps < self.num_pipeline_stages {
            let text = format!(
                " is {}: {} pipeline stages need a step each",
                self.max_inflight_steps, self.num_pipeline_stages
            );
            return Err(ConfigError::new("max_inflight_steps", text));
        }
        if self.max_inflight_steps > MAX_INFLIGHT_STEPS {
            // Each pipeline stage has a step of its own.
            let name = match self.num_pipeline_stages > MAX_INFLIGHT_STEPS {
                true => "num_pipeline_stages",
                false => "max_inflight_steps",
            };
            return Err(ConfigError::at_most(name, MAX_INFLIGHT_STEPS));
        }
        if self.max_draft_tokens > Self::MAX_DRAFT_TOKENS {
            return Err(ConfigError::at_most(
                "max_draft_tokens",
                Self::MAX_DRAFT_TOKENS,
            ));
        }
        if matches!(self.speculation, Speculation::Draft { .. }) && self.max_inflight_steps > 1 {
            let error = ConfigError::new("speculation", " with a draft model requires ");
            let error = error.then("max_inflight_steps", " 1 and ");
            return Err(error.then("num_pipeline_stages", " 1"));
        }
        let plans_known_tokens = self.max_inflight_steps == 1 || self.num_pipeline_stages > 1;
        if self.speculation != Speculation::Off && !plans_known_tokens {
            let error = ConfigError::new("speculation", " requires ");
            return Err(error.then("max_inflight_steps", " 1, or pipeline stages"));
        }
        Ok(())
    }

    fn validate_limits(&self) -> Result<(), ConfigError> {
        if self.max_passed_over > MAX_PASSED_OVER {
            return Err(ConfigError::at_most("max_passed_over", MAX_PASSED_OVER));
        }
        if self.max_pinned_pages >= self.num_pages {
            let text = format!(
                " is {}, of {} pages: requests need some too",
                self.max_pinned_pages, self.num_pages
            );
            return Err(ConfigError::new("max_pinned_pages", text));
        }
        if self.max_model_len < 2 {
            let text = format!(
                " is {}: a prompt and its reply take at least 2 tokens",
                self.max_model_len
            );
            return Err(ConfigError::new("max_model_len", text));
        }
        if self.max_model_len > MAX_MODEL_LEN {
            return Err(ConfigError::at_most("max_model_len", MAX_MODEL_LEN));
        }
        if let HeadRoom::Share { share, .. } = self.head_room
            && share > HeadRoom::ONE
        {
            let text = format!(" is {share}/{}: it can be at most 1", HeadRoom::ONE);
            return Err(ConfigError::new("head_room", text));
        }
        if self.max_num_batched_tokens <= self.max_other_decodes() {
            let text = format!(
                " is {}: {} decoding requests would leave no token for prefill; raise it, or lower ",
                self.max_num_batched_tokens,
                self.max_other_decodes()
            );
            let error = ConfigError::new("max_num_batched_tokens", text);
            return Err(error
                .then("max_num_seqs", " or ")
                .then("max_decode_seqs", ""));
        }
        Ok(())
    }
}

/// The capacity of an executor's queue of steps. Within this limit, submitting a step never blocks the engine loop,
/// which also waits for returned steps.
const MAX_INFLIGHT_STEPS: u32 = 16;

/// The queue remembers the steps in which a request may have been passed over, so their number must be bounded.
const MAX_PASSED_OVER: u32 = 1 << 16;

/// The sum of two lengths must fit into 32 bits.
const MAX_MODEL_LEN: u32 = 1 << 30;
