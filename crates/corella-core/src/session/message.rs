//! What two nodes tell each other, as plain data.

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;

use crate::{
    AdmissionError, Arithmetic, FinishReason, Incarnation, LatencyObjectives, MissedObjective,
    Namespace, Request, RequestId, Sample, SamplingParams, SessionId, StoppingCriteria, TokenId,
};

/// Messages of a prefill node. `Hello` and then `Allocate` come first.
#[derive(Clone, Debug, PartialEq)]
pub enum ToDecode {
    Hello(Box<Hello>),
    Allocate(Box<Allocate>),
    /// The prompt is computed. This is never sent if a step that computes the prompt has failed.
    FirstToken(Box<FirstToken>),
    /// No rows come: the decode node computes the rest of the prompt, and draws the first token. Only for nodes that
    /// [know it](Hello::knows_compute), and only in answer to `Allocated`.
    Compute,
    Heartbeat,
    Abort(AbortReason),
}

/// Messages of a decode node.
#[derive(Clone, Debug, PartialEq)]
pub enum ToPrefill {
    Hello(Box<Hello>),
    Allocated(Allocated),
    Refused(Refusal),
    /// All rows have arrived: the prefill node may let go of them.
    LoadDone,
    Tokens(Tokens),
    Finish(Finish),
    Heartbeat,
    Abort(AbortReason),
}

/// Who a node is. Each node checks that the other fits before it reserves pages or sends rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The node's name in the registry.
    pub instance: Box<str>,
    pub incarnation: Incarnation,
    pub protocol_major: u32,
    /// May differ: a minor version adds only what others may ignore.
    pub protocol_minor: u32,
    /// Architecture and weights as they were published, not how a node stores them.
    pub model_fingerprint: u128,
    pub tokenizer_digest: u128,
    pub kv_shape: KvShape,
    /// Converted by the receiver where it differs.
    pub kv_format: Box<str>,
    /// Converted by the receiver where it differs, in models without windows.
    pub page_size: u32,
    /// Converted by the receiver where it differs.
    pub element_order: Box<str>,
    /// May differ.
    pub weight_format: Box<str>,
    /// May differ.
    pub instruction_set: Box<str>,
    /// The operator's name for the nodes that work together.
    pub group: Box<str>,
}

/// What one token's keys and values consist of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    pub num_layers: u32,
    pub num_kv_heads: u32,
    pub head_dim: u32,
    /// Nodes that the heads are split over.
    pub num_ranks: u32,
    /// What is made of the layers' windows behind which rows are not sent; 0 without any.
    pub window_digest: u64,
}

/// Why two nodes cannot serve a request together, however healthy they are: ours, then theirs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mismatch {
    Protocol(u32, u32),
    Model(u128, u128),
    Tokenizer(u128, u128),
    KvShape(KvShape, KvShape),
    Group(Box<str>, Box<str>),
    /// Only with windows: the first page that is sent would begin with rows that the other node's page lacks.
    PageSize(u32, u32),
}

/// A request, without what only its own node has to know of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Allocate {
    pub prompt: Vec<TokenId>,
    /// Tokens that were drawn before: another decode node was lost behind them. Their rows come with those of the prompt.
    /// Only for nodes that [know it](Hello::knows_output).
    pub output: Vec<TokenId>,
    pub sampling: SamplingParams,
    /// `max_tokens` is the prefill node's own limit where the client gave none, so that an answer is
    /// of the same length wherever it is decoded.
    pub stopping: StoppingCriteria,
    pub priority: i32,
    pub namespace: Namespace,
    /// The time left, not a point in time, because clocks differ. `None` means no limit.
    pub remaining_us: Option<u64>,
    /// The longest useful time per output token. A decode node that would take longer refuses the request.
    pub max_tpot_us: Option<u64>,
    /// The session of the first choice, where several choices have this prompt. Their rows are sent
    /// once.
    pub siblings: Option<SessionId>,
    /// The fingerprint of the adapter that it is computed with. Each node has a name of its own for it, which is part of
    /// its namespace there.
    pub adapter: Option<u128>,
    /// What the answer is held to, from its first token on, which the prefill node draws. The decode node makes of it
    /// the constraint that the prefill node has.
    pub constraint: Option<Arc<str>>,
    /// What logs call the request on both nodes.
    pub trace_id: Option<Arc<str>>,
}

/// Pages are reserved, or will be when the rows of another choice have come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocated {
    /// Leading rows that the decode node has already. They are not sent.
    pub num_cached_rows: u32,
    /// The number of this reservation among all that the node has granted since it started, counted
    /// from 1. Load reports with at least this number count its pages. `None` as long as it waits
    /// for another choice; what it then gets is said in a second message.
    pub granted_as: Option<u64>,
}

/// Why a decode node does not take a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// There is no room now.
    Exhausted,
    /// There could never be room.
    Never,
    /// Its tokens would come too slowly.
    TooSlow(MissedObjective),
    /// The node has not the request's adapter, or cannot hold an answer to its constraint.
    Unsuitable,
    Incompatible(Mismatch),
    /// The key names another start of either node than the one that is known here.
    StaleIncarnation,
    /// The session has ended before.
    Ended,
    /// The node takes no new work.
    Draining,
}

impl From<&AdmissionError> for Refusal {
    fn from(error: &AdmissionError) -> Self {
        match error {
            AdmissionError::NoRoom { .. }
            | AdmissionError::QueueFull { .. }
            | AdmissionError::QueuedTokensFull { .. } => Self::Exhausted,
            AdmissionError::ObjectiveMissed(missed) => Self::TooSlow(*missed),
            AdmissionError::NoDecodeNode
            | AdmissionError::EmptyPrompt
            | AdmissionError::ZeroMaxTokens
            | AdmissionError::OutputComplete { .. }
            | AdmissionError::DuplicateId(_)
            | AdmissionError::ContextExceeded { .. }
            | AdmissionError::PoolExceeded { .. }
            | AdmissionError::StepExceeded { .. } => Self::Never,
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct FirstToken {
    pub sample: Sample,
    /// Prompt tokens that the prefill node had in its prefix cache.
    pub num_cached_tokens: u32,
}

/// Output tokens in their order.
#[derive(Clone, Debug, PartialEq)]
pub struct Tokens {
    /// Position of the first one in the output, where the first token has position 0.
    pub first_position: u32,
    pub samples: Vec<Sample>,
}

/// The request has ended, and all its tokens have been sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finish {
    pub reason: FinishReason,
    /// All of the output, the first token included.
    pub num_output_tokens: u32,
}

/// Why one side gives up an attempt. Both sides then free what they hold for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AbortReason {
    /// The client has left, or wants no more.
    Cancelled,
    /// The request ended on the prefill node, such as with its first token.
    Finished,
    /// The request's own deadline.
    DeadlinePassed,
    /// The other end was silent for too long, or its connection closed.
    PeerLost,
    /// Nobody answered `Allocate` in time.
    AllocateTimedOut,
    /// The first token did not come in time.
    FirstTokenTimedOut,
    LoadFailed,
    LoadTimedOut,
    /// Nothing was loaded for as long as pages are held.
    HoldExpired,
    /// The decode node has no room to go on, and gives the request back.
    OutOfPages,
    /// The decode node failed while it computed the request.
    DecodeFailed(Box<str>),
    /// The other side sent something that the protocol does not allow at this point.
    ProtocolViolated,
}

impl Hello {
    /// The first minor version of the protocol with [`ToDecode::Compute`].
    const MINOR_WITH_COMPUTE: u32 = 1;

    /// The first minor version of the protocol with [`Allocate::output`].
    const MINOR_WITH_OUTPUT: u32 = 3;

    /// Whether the node understands [`Allocate::output`].
    pub fn knows_output(&self) -> bool {
        self.protocol_minor >= Self::MINOR_WITH_OUTPUT
    }

    /// Whether the node understands [`ToDecode::Compute`].
    pub fn knows_compute(&self) -> bool {
        self.protocol_minor >= Self::MINOR_WITH_COMPUTE
    }

    /// What decides the bits of the node's rows.
    pub fn arithmetic(&self) -> Arithmetic {
        Arithmetic::new(&self.weight_format, &self.kv_format, &self.instruction_set)
    }

    /// Whether the node computes the same bits as `other`. Otherwise tokens would depend on which of the two computes a
    /// prompt.
    pub fn computes_like(&self, other: &Self) -> bool {
        self.arithmetic() == other.arithmetic()
    }

    /// Whether a request can be served together with `other`.
    pub fn check(&self, other: &Self) -> Result<(), Mismatch> {
        if self.protocol_major != other.protocol_major {
            let mismatch = Mismatch::Protocol(self.protocol_major, other.protocol_major);
            return Err(mismatch);
        }
        if self.group != other.group {
            let mismatch = Mismatch::Group(self.group.clone(), other.group.clone());
            return Err(mismatch);
        }
        if self.model_fingerprint != other.model_fingerprint {
            let mismatch = Mismatch::Model(self.model_fingerprint, other.model_fingerprint);
            return Err(mismatch);
        }
        if self.tokenizer_digest != other.tokenizer_digest {
            let mismatch = Mismatch::Tokenizer(self.tokenizer_digest, other.tokenizer_digest);
            return Err(mismatch);
        }
        if self.kv_shape != other.kv_shape {
            return Err(Mismatch::KvShape(self.kv_shape, other.kv_shape));
        }
        if self.kv_shape.window_digest != 0 && self.page_size != other.page_size {
            return Err(Mismatch::PageSize(self.page_size, other.page_size));
        }
        Ok(())
    }
}

impl Mismatch {
    /// As the other node would say it.
    pub fn seen_from_other(self) -> Self {
        match self {
            Self::Protocol(ours, theirs) => Self::Protocol(theirs, ours),
            Self::Group(ours, theirs) => Self::Group(theirs, ours),
            Self::Model(ours, theirs) => Self::Model(theirs, ours),
            Self::Tokenizer(ours, theirs) => Self::Tokenizer(theirs, ours),
            Self::KvShape(ours, theirs) => Self::KvShape(theirs, ours),
            Self::PageSize(ours, theirs) => Self::PageSize(theirs, ours),
        }
    }
}

impl Allocate {
    /// The rows that are computed before the first token that this attempt draws.
    pub fn num_rows(&self) -> u32 {
        (self.prompt.len() + self.output.len()) as u32
    }

    /// The request as a scheduler takes it.
    pub fn into_request(self, id: RequestId, now_us: u64) -> Request {
        Request {
            id,
            prompt: self.prompt,
            output: self.output,
            exports_kv: false,
            is_masked: self.constraint.is_some(),
            sampling: self.sampling,
            stopping: self.stopping,
            priority: self.priority,
            arrival_us: now_us,
            objectives: LatencyObjectives {
                ttft_us: None,
                tpot_us: self.max_tpot_us,
            },
            namespace: self.namespace,
        }
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Protocol(ours, theirs) => write!(
                f,
                "this node speaks version {ours} of the protocol and the peer version {theirs}: \
                 run versions of Corella whose protocol agrees"
            ),
            Self::Group(ours, theirs) => write!(
                f,
                "this node has --group {ours:?} and the peer {theirs:?}: nodes of one group work together"
            ),
            Self::Model(ours, theirs) => write!(
                f,
                "this node serves model {ours:032x} and the peer model {theirs:032x}: \
                 start both with the same model"
            ),
            Self::Tokenizer(ours, theirs) => write!(
                f,
                "this node has tokenizer {ours:032x} and the peer tokenizer {theirs:032x}: \
                 start both with the same tokenizer files"
            ),
            Self::PageSize(ours, theirs) => write!(
                f,
                "this node has pages of {ours} tokens and the peer pages of {theirs}, and the model has sliding \
                 windows: start both with the same --block-size"
            ),
            Self::KvShape(ours, theirs) => write!(
                f,
                "KV rows differ: this node has {ours}, the peer {theirs}: \
                 start both with the same model, tensor parallelism and version of Corella"
            ),
        }
    }
}

impl fmt::Display for KvShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            num_layers,
            num_kv_heads,
            head_dim,
            num_ranks,
            window_digest,
        } = self;
        write!(
            f,
            "{num_layers} layers, {num_kv_heads} heads of {head_dim} on {num_ranks} ranks"
        )?;
        match window_digest {
            0 => f.write_str(" and no windows"),
            _ => write!(f, " and windows {window_digest:016x}"),
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exhausted => f.write_str("the decode node has no room now"),
            Self::Never => f.write_str("the request can never fit the decode node"),
            Self::TooSlow(missed) => missed.fmt(f),
            Self::Unsuitable => {
                f.write_str("the decode node cannot follow the request's adapter or constraint")
            }
            Self::Incompatible(mismatch) => mismatch.fmt(f),
            Self::StaleIncarnation => f.write_str("one of the nodes has been started again"),
            Self::Ended => f.write_str("the session has ended"),
            Self::Draining => f.write_str("the decode node takes no new requests"),
        }
    }
}

impl AbortReason {
    /// The reason in a word, as the label of a metric: it never changes, and says nothing of one request.
    pub fn label(&self) -> &'static str {
        match self {
            Self::Cancelled => "cancelled",
            Self::Finished => "finished",
            Self::DeadlinePassed => "deadline_passed",
            Self::PeerLost => "peer_lost",
            Self::AllocateTimedOut => "not_taken",
            Self::FirstTokenTimedOut => "first_token_timed_out",
            Self::LoadFailed => "load_failed",
            Self::LoadTimedOut => "load_timed_out",
            Self::HoldExpired => "hold_expired",
            Self::OutOfPages => "out_of_pages",
            Self::DecodeFailed(_) => "decode_failed",
            Self::ProtocolViolated => "protocol_violated",
        }
    }
}

impl fmt::Display for AbortReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cancelled => "the client has cancelled the request",
            Self::Finished => "the request has ended on the prefill node",
            Self::DeadlinePassed => "the request's deadline has passed",
            Self::PeerLost => "the peer is lost",
            Self::AllocateTimedOut => "the decode node did not answer in time",
            Self::FirstTokenTimedOut => "the first token did not come in time",
            Self::LoadFailed => "the KV load failed",
            Self::LoadTimedOut => "the KV load took too long",
            Self::HoldExpired => "the KV was not loaded while it was held",
            Self::OutOfPages => "the decode node ran out of KV pages",
            Self::DecodeFailed(reason) => return write!(f, "decoding failed: {reason}"),
            Self::ProtocolViolated => "the peer broke the protocol",
        })
    }
}
