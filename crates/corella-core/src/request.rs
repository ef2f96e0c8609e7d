//! Requests of callers, and their outputs.

use alloc::boxed::Box;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;

use xxhash_rust::xxh3::Xxh3;

use crate::{
    FetchedTokens, HiddenState, LatencyObjectives, MissedObjective, Pooling, PromptLogprob,
    RequestId, Sample, SamplingParams, TokenId,
};

/// A request for one generated sequence.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    pub id: RequestId,
    pub prompt: Vec<TokenId>,
    /// Tokens that another node drew for the request. They count as output, and are never emitted again.
    pub output: Vec<TokenId>,
    /// Another node reads the KV of the prompt: see [`poll_kv_fact`](crate::Scheduler::poll_kv_fact).
    pub exports_kv: bool,
    /// Each output token is drawn through a mask that depends on all tokens before it. So no step is planned after a
    /// token that has not been drawn yet, and no drafts are made.
    pub is_masked: bool,
    pub sampling: SamplingParams,
    pub stopping: StoppingCriteria,
    /// Urgency under the policy `priority`: a smaller number is more urgent, as in vLLM.
    pub priority: i32,
    pub arrival_us: u64,
    pub objectives: LatencyObjectives,
    pub namespace: Namespace,
    /// The beginnings of the prompt that the cache retains, the shortest first.
    pub retentions: Vec<Retention>,
}

/// A caller's mark: the first tokens of a prompt are retained for a time after each use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retention {
    pub num_tokens: u32,
    pub ttl_us: u64,
}

impl Request {
    /// Whether rows of the prompt may come from the cache. All poolings except `LastToken` need hidden states of other
    /// tokens, and cached pages hold no hidden states.
    pub(crate) fn takes_hits(&self) -> bool {
        matches!(self.sampling.pooling, None | Some(Pooling::LastToken))
    }

    /// A request that generates `max_tokens` tokens greedily, without an end token.
    pub fn greedy(id: RequestId, prompt: Vec<TokenId>, max_tokens: u32) -> Self {
        Self {
            id,
            prompt,
            output: Vec::new(),
            exports_kv: false,
            is_masked: false,
            sampling: SamplingParams::GREEDY,
            stopping: StoppingCriteria {
                max_tokens: Some(max_tokens),
                ..StoppingCriteria::default()
            },
            priority: 0,
            arrival_us: 0,
            objectives: LatencyObjectives::default(),
            namespace: Namespace::default(),
            retentions: Vec::new(),
        }
    }
}

/// The criteria that end a request, checked in this order: end tokens, stop tokens, length.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StoppingCriteria {
    /// The limit of output tokens; with `None`, only the context length and the pool limit them. 0 is for requests that
    /// want only log-probabilities of their prompt, or its hidden state.
    pub max_tokens: Option<u32>,
    /// End and stop tokens are masked until this many output tokens have been drawn.
    pub min_tokens: u32,
    /// The model's own end tokens. Empty with `ignore_eos`.
    pub end_token_ids: Vec<TokenId>,
    /// The caller's stop tokens.
    pub stop_token_ids: Vec<TokenId>,
}

impl StoppingCriteria {
    /// Whether only `max_tokens` can end the output.
    pub fn is_length_known(&self) -> bool {
        self.end_token_ids.is_empty() && self.stop_token_ids.is_empty()
    }

    /// The reason for which the newest token ends the request, if any. `num_output_tokens` counts that token, and
    /// `max_tokens` is the request's limit.
    pub fn finish_reason(
        &self,
        newest: TokenId,
        num_output_tokens: u32,
        max_tokens: u32,
    ) -> Option<FinishReason> {
        let may_stop = num_output_tokens > self.min_tokens;
        if may_stop && self.end_token_ids.contains(&newest) {
            Some(FinishReason::EndToken)
        } else if may_stop && self.stop_token_ids.contains(&newest) {
            Some(FinishReason::StopToken)
        } else if num_output_tokens >= max_tokens {
            Some(FinishReason::Length)
        } else {
            None
        }
    }
}

/// Separates cached prefixes: requests share cached pages only within one namespace. Names are compared as text, never
/// by hash.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Namespace {
    pub lora: Option<Arc<str>>,
    pub cache_salt: Option<Arc<str>>,
    /// The arithmetic of the node that computes the prompt, if it gives other bits than this node's. Only rows that
    /// this node has received are published in such a namespace. Requests of this node's own clients have `None`.
    pub arithmetic: Option<Arithmetic>,
}

/// A digest of everything that decides the bits of KV rows apart from the model and the tokens. Nodes with equal
/// digests compute the same rows. The digest salts the hashes of blocks, so that a node finds no block of other bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Arithmetic(pub u64);

impl Arithmetic {
    pub fn new(weight_format: &str, kv_format: &str, instruction_set: &str) -> Self {
        let mut hasher = Xxh3::new();
        for name in [weight_format, kv_format, instruction_set] {
            hasher.update(&(name.len() as u64).to_le_bytes());
            hasher.update(name.as_bytes());
        }
        Self(hasher.digest())
    }
}

/// One event of a request. Only the last one has `finish` set.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RequestOutput {
    pub request: RequestId,
    /// The new token. Absent only in a terminal event, and in an event with log-probabilities of the prompt or its
    /// hidden state.
    pub sample: Option<Sample>,
    /// Log-probabilities of the prompt's next tokens. The first token has none, and every other token comes once, in
    /// order, before the first sample.
    pub prompt_logprobs: Box<[PromptLogprob]>,
    /// The hidden state of the prompt, if requested. It comes once, and the terminal event is next.
    pub hidden_state: Option<HiddenState>,
    pub finish: Option<FinishReason>,
    pub num_prompt_tokens: u32,
    /// Known from the first sample on.
    pub cache_use: CacheUse,
    /// The number of output tokens so far, including this event's.
    pub num_output_tokens: u32,
    /// Time from arrival to the first step that computes the request.
    pub queue_us: u64,
}

// Each token moves an output. One of more than 128 bytes made a decode step's update a fifth slower.
const _: () = assert!(size_of::<RequestOutput>() <= 128);

/// The tokens of a prompt that the prefix cache had, fetched and retains.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheUse {
    /// Prompt tokens whose KV came from the prefix cache at first admission.
    pub num_cached_tokens: u32,
    /// The cached tokens in blocks that a fetch has brought and that no request had used before.
    pub fetched_tokens: FetchedTokens,
    /// Tokens in the longest marked beginning of the prompt that is retained.
    pub num_retained_tokens: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// An end token was drawn. The token is this event's sample and not part of the text. The event has no sample if
    /// the request ended because no token may follow.
    EndToken,
    /// One of the caller's stop tokens was drawn. The token is this event's sample.
    StopToken,
    Length,
    Aborted,
    Error(RequestError),
}

/// The beginning of the text of [`RequestError::NotMasked`], also in another node's report.
pub const NOT_MASKED: &str = "what may come next cannot be worked out";

/// The reason for which an admitted request ended without its answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RequestError {
    /// The executor failed in a step that computed this request.
    StepFailed(Box<str>),
    /// No token could be drawn from the logits.
    NotDrawn(Box<str>),
    /// The hidden state has elements that are not numbers.
    NoHiddenState(Box<str>),
    /// No mask could be made for the next token.
    NotMasked(Box<str>),
    /// The request's KV does not fit into the pool even when the request runs alone.
    PoolExhausted { num_pages: u32 },
    /// The request was preempted more often than the configuration allows.
    PreemptedTooOften { num_preemptions: u32 },
    /// The request waited until it could no longer meet its latency objectives.
    ObjectiveMissed(MissedObjective),
    /// The other node has not filled the request's KV pages.
    KvNotReceived(Box<str>),
    /// The prompt was computed on another node, and this node cannot keep the KV.
    KvNotKept(Box<str>),
    /// The request failed on another node, which reports this reason.
    Elsewhere(Box<str>),
    /// The decode node was lost, and no other node may continue the request.
    DecodeLost(Box<str>),
    /// The engine stopped before the request had ended.
    EngineLost(Box<str>),
}

/// The reason for refusing a request at submission. The scheduler keeps no part of the request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AdmissionError {
    EmptyPrompt,
    ZeroMaxTokens,
    /// The tokens that other nodes drew have reached the request's limit.
    OutputComplete {
        num_output_tokens: u32,
        max_tokens: u32,
    },
    DuplicateId(RequestId),
    /// Prompt plus output cannot fit the model's context.
    ContextExceeded {
        num_prompt_tokens: u32,
        max_tokens: u32,
        max_model_len: u32,
    },
    /// Prompt plus output, rounded up to pages, cannot fit the pool.
    PoolExceeded {
        num_prompt_tokens: u32,
        max_tokens: u32,
        needed_pages: u32,
        num_pages: u32,
    },
    /// Chunked prefill is off and the request, resumed after preemption, would be longer than a step may be.
    StepExceeded {
        num_prompt_tokens: u32,
        max_tokens: u32,
        limit: u32,
    },
    QueueFull {
        num_waiting: usize,
        limit: u32,
    },
    QueuedTokensFull {
        num_queued_tokens: u64,
        limit: u64,
    },
    /// The request could not meet its latency objectives.
    ObjectiveMissed(MissedObjective),
    /// No KV pages can be reserved now for a prompt that another node computes.
    NoRoom {
        num_needed_pages: usize,
        num_available_pages: usize,
    },
    /// No decode node takes the request, and the prefill node must not decode it.
    NoDecodeNode,
}

impl fmt::Display for AdmissionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::EmptyPrompt => write!(f, "the prompt has no tokens"),
            Self::ZeroMaxTokens => write!(f, "max_tokens must be at least 1"),
            Self::OutputComplete {
                num_output_tokens,
                max_tokens,
            } => write!(
                f,
                "{num_output_tokens} tokens have been drawn already, and max_tokens is {max_tokens}"
            ),
            Self::DuplicateId(id) => write!(f, "request {id} is already known"),
            Self::ContextExceeded {
                num_prompt_tokens,
                max_tokens,
                max_model_len,
            } => write!(
                f,
                "{num_prompt_tokens} prompt tokens and {max_tokens} new tokens exceed the \
                 context of {max_model_len} tokens"
            ),
            Self::PoolExceeded {
                num_prompt_tokens,
                max_tokens,
                needed_pages,
                num_pages,
            } => write!(
                f,
                "{num_prompt_tokens} prompt tokens and {max_tokens} new tokens need \
                 {needed_pages} KV pages; the pool has {num_pages}"
            ),
            Self::StepExceeded {
                num_prompt_tokens,
                max_tokens,
                limit,
            } => write!(
                f,
                "{num_prompt_tokens} prompt tokens and {max_tokens} new tokens exceed the \
                 {limit} prefill tokens of one step, and chunked prefill is off"
            ),
            Self::QueueFull { num_waiting, limit } => {
                write!(
                    f,
                    "{num_waiting} requests are already waiting, of at most {limit}"
                )
            }
            Self::QueuedTokensFull {
                num_queued_tokens,
                limit,
            } => write!(
                f,
                "{num_queued_tokens} prompt tokens are already waiting, of at most {limit}"
            ),
            Self::ObjectiveMissed(missed) => missed.fmt(f),
            Self::NoRoom {
                num_needed_pages,
                num_available_pages,
            } => write!(
                f,
                "with it, requests are expected to take {num_needed_pages} more KV pages, and \
                 {num_available_pages} are available"
            ),
            Self::NoDecodeNode => f.write_str("no decode node takes the request"),
        }
    }
}

impl core::error::Error for AdmissionError {}

impl fmt::Display for RequestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::StepFailed(reason) => write!(f, "the step failed: {reason}"),
            Self::NotDrawn(reason) => write!(f, "no token can be drawn: {reason}"),
            Self::NoHiddenState(reason) => write!(f, "there is no hidden state: {reason}"),
            Self::NotMasked(reason) => write!(f, "{NOT_MASKED}: {reason}"),
            Self::PoolExhausted { num_pages } => {
                write!(f, "its KV cache does not fit the pool of {num_pages} pages")
            }
            Self::PreemptedTooOften { num_preemptions } => {
                write!(f, "preempted {num_preemptions} times for lack of KV pages")
            }
            Self::ObjectiveMissed(missed) => missed.fmt(f),
            Self::KvNotReceived(reason) => write!(f, "its KV cache has not arrived: {reason}"),
            Self::KvNotKept(reason) => write!(f, "its KV cache could not be kept: {reason}"),
            Self::Elsewhere(reason) => f.write_str(reason),
            Self::DecodeLost(reason) => write!(f, "its decode node was lost: {reason}"),
            Self::EngineLost(reason) => write!(f, "the engine has stopped: {reason}"),
        }
    }
}

impl core::error::Error for RequestError {}

impl From<&str> for RequestError {
    fn from(reason: &str) -> Self {
        Self::StepFailed(String::from(reason).into_boxed_str())
    }
}
