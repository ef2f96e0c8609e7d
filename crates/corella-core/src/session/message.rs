//! The messages of a session, as plain data.

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
    /// The prompt is computed. If a step of the prompt fails, this message is never sent.
    FirstToken(Box<FirstToken>),
    /// The decode node computes the rest of the prompt and draws the first token; no rows come. Sent only after
    /// `Allocated`, and only to nodes that [know the message](Hello::knows_compute).
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
    /// All rows have arrived, so the prefill node may release them.
    LoadDone,
    Tokens(Tokens),
    Finish(Finish),
    Heartbeat,
    Abort(AbortReason),
}

/// Describes a node. Each node checks the other's description before it reserves pages or sends rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The node's name in the registry.
    pub instance: Box<str>,
    pub incarnation: Incarnation,
    pub protocol_major: u32,
    /// Nodes may differ in the minor version: it adds only fields and messages that older nodes can ignore.
    pub protocol_minor: u32,
    /// Identifies the published architecture and weights, in any format in memory.
    pub model_fingerprint: u128,
    pub tokenizer_digest: u128,
    pub kv_shape: KvShape,
    /// Nodes may differ in the KV format: the receiver converts rows.
    pub kv_format: Box<str>,
    /// Nodes may differ in the page size, unless the model has windows: the receiver converts pages.
    pub page_size: u32,
    /// Nodes may differ in the order of elements: the receiver converts rows.
    pub element_order: Box<str>,
    /// Nodes may differ in the weight format.
    pub weight_format: Box<str>,
    /// Nodes may differ in the instruction set.
    pub instruction_set: Box<str>,
    /// The operator's name for nodes that work together.
    pub group: Box<str>,
}

/// The shape of one token's keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    pub num_layers: u32,
    pub num_kv_heads: u32,
    pub head_dim: u32,
    /// The number of ranks over which the KV heads are split.
    pub num_ranks: u32,
    /// A digest of the layers' windows, outside which rows are not sent; 0 without windows.
    pub window_digest: u64,
}

/// The reason why two healthy nodes cannot serve a request together: this node's value, then the other's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mismatch {
    Protocol(u32, u32),
    Model(u128, u128),
    Tokenizer(u128, u128),
    KvShape(KvShape, KvShape),
    Group(Box<str>, Box<str>),
    /// Only in models with windows. The first page sent is the one with the window's first row, and a page of another
    /// size would begin at another row.
    PageSize(u32, u32),
}

/// A request, as far as a decode node needs it.
#[derive(Clone, Debug, PartialEq)]
pub struct Allocate {
    pub prompt: Vec<TokenId>,
    /// Tokens that were drawn before another decode node was lost. Their rows are sent with the rows of the prompt.
    /// Sent only to nodes that [know the field](Hello::knows_output).
    pub output: Vec<TokenId>,
    pub sampling: SamplingParams,
    /// If the client sets no limit, `max_tokens` is the prefill node's limit, so that every node stops the answer at
    /// the same length.
    pub stopping: StoppingCriteria,
    pub priority: i32,
    pub namespace: Namespace,
    /// The time left until the request's deadline, and not the deadline itself, because the nodes' clocks differ.
    /// `None` means no deadline.
    pub remaining_us: Option<u64>,
    /// The longest useful time per output token. A decode node that would take longer refuses the request.
    pub max_tpot_us: Option<u64>,
    /// The session of the first choice, if the prompt has several choices. The rows are sent once for all choices.
    pub siblings: Option<SessionId>,
    /// The fingerprint of the request's adapter. Each node has its own name for the adapter, which is part of the
    /// namespace there.
    pub adapter: Option<u128>,
    /// The source of the answer's constraint. Each node compiles it. The prefill node applies it to the first token,
    /// and the decode node to the later tokens.
    pub constraint: Option<Arc<str>>,
    /// The request's name in the logs of both nodes.
    pub trace_id: Option<Arc<str>>,
}

/// Pages are reserved, or will be when the rows of another choice have arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocated {
    /// The number of leading rows that the decode node has cached. They are not sent.
    pub num_cached_rows: u32,
    /// The index of this reservation among all reservations that the node has granted since its start, counted from 1.
    /// A load report includes the pages of this reservation if its `num_reservations` is at least this index. `None`
    /// while the request waits for the rows of another choice: a second message follows.
    pub granted_as: Option<u64>,
}

/// The reason why a decode node refuses a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The node has no room now.
    Exhausted,
    /// The node could never have room.
    Never,
    /// The request's tokens would come too slowly.
    TooSlow(MissedObjective),
    /// The node lacks the request's adapter, or cannot apply its constraint.
    Unsuitable,
    Incompatible(Mismatch),
    /// The key names another incarnation of one of the nodes.
    StaleIncarnation,
    /// The session has ended already.
    Ended,
    /// The node is draining, and takes no new requests.
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
    /// The number of prompt tokens that the prefill node had cached.
    pub num_cached_tokens: u32,
}

/// Output tokens in their order.
#[derive(Clone, Debug, PartialEq)]
pub struct Tokens {
    /// The position of the first of these tokens in the output, counted from 0.
    pub first_position: u32,
    pub samples: Vec<Sample>,
}

/// The request has ended, and all its tokens were sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finish {
    pub reason: FinishReason,
    /// The number of all output tokens, including the first.
    pub num_output_tokens: u32,
}

/// The reason why a node ends an attempt. Both nodes then free the attempt's pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AbortReason {
    /// The client has cancelled the request or left.
    Cancelled,
    /// The request ended on the prefill node, for example with its first token.
    Finished,
    /// The request's deadline has passed.
    DeadlinePassed,
    /// The peer was silent for too long, or its connection closed.
    PeerLost,
    /// `Allocate` was not answered in time.
    AllocateTimedOut,
    /// The first token did not come in time.
    FirstTokenTimedOut,
    LoadFailed,
    LoadTimedOut,
    /// The hold on the pages expired before anything was loaded.
    HoldExpired,
    /// The decode node has no pages left for the request, and gives it back.
    OutOfPages,
    /// The decode node failed while it computed the request.
    DecodeFailed(Box<str>),
    /// The peer sent a message that the protocol does not allow at this point.
    ProtocolViolated,
}

impl Hello {
    /// The first minor version of the protocol with [`ToDecode::Compute`].
    const MINOR_WITH_COMPUTE: u32 = 1;

    /// The first minor version of the protocol with [`Allocate::output`].
    const MINOR_WITH_OUTPUT: u32 = 3;

    /// Returns whether the node understands [`Allocate::output`].
    pub fn knows_output(&self) -> bool {
        self.protocol_minor >= Self::MINOR_WITH_OUTPUT
    }

    /// Returns whether the node understands [`ToDecode::Compute`].
    pub fn knows_compute(&self) -> bool {
        self.protocol_minor >= Self::MINOR_WITH_COMPUTE
    }

    /// Returns the properties that decide the bits of the node's rows.
    pub fn arithmetic(&self) -> Arithmetic {
        Arithmetic::new(&self.weight_format, &self.kv_format, &self.instruction_set)
    }

    /// Returns whether the node computes the same bits as `other`. Otherwise tokens would depend on the node that
    /// computes a prompt.
    pub fn computes_like(&self, other: &Self) -> bool {
        self.arithmetic() == other.arithmetic()
    }

    /// Checks that the two nodes can serve a request together.
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
    /// Returns the mismatch as the other node sees it.
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
    /// Returns the number of rows before the first token of this attempt.
    pub fn num_rows(&self) -> u32 {
        (self.prompt.len() + self.output.len()) as u32
    }

    /// Returns the request for a scheduler.
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
            // The node that computes the prompt retains it.
            retentions: Vec::new(),
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
    /// Returns the reason as the label of a metric: a constant without details of a request.
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
