//! The messages of a session as protocol buffers, written by hand without a `.proto` file.

use prost::Message;

/// One message of a session, in either direction. The first message carries the key.
#[derive(Clone, PartialEq, Message)]
pub struct Envelope {
    #[prost(message, optional, tag = "1")]
    pub key: Option<Key>,
    #[prost(oneof = "Body", tags = "2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12")]
    pub body: Option<Body>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
pub enum Body {
    #[prost(message, tag = "2")]
    Hello(Hello),
    #[prost(message, tag = "3")]
    Allocate(Allocate),
    #[prost(message, tag = "4")]
    Allocated(Allocated),
    #[prost(message, tag = "5")]
    Refused(Refused),
    #[prost(message, tag = "6")]
    FirstToken(FirstToken),
    #[prost(message, tag = "7")]
    LoadDone(Empty),
    #[prost(message, tag = "8")]
    Tokens(Tokens),
    #[prost(message, tag = "9")]
    Finish(Finish),
    #[prost(message, tag = "10")]
    Heartbeat(Empty),
    #[prost(message, tag = "11")]
    Abort(Abort),
    /// Since version 3.1.
    #[prost(message, tag = "12")]
    Compute(Empty),
}

#[derive(Clone, Copy, PartialEq, Message)]
pub struct Empty {}

#[derive(Clone, PartialEq, Message)]
pub struct Key {
    /// 16 bytes.
    #[prost(bytes = "vec", tag = "1")]
    pub session: Vec<u8>,
    #[prost(uint32, tag = "2")]
    pub attempt: u32,
    #[prost(fixed64, tag = "3")]
    pub prefill_incarnation: u64,
    #[prost(fixed64, tag = "4")]
    pub decode_incarnation: u64,
}

#[derive(Clone, PartialEq, Message)]
pub struct Hello {
    #[prost(string, tag = "1")]
    pub instance: String,
    #[prost(fixed64, tag = "2")]
    pub incarnation: u64,
    #[prost(uint32, tag = "3")]
    pub protocol_major: u32,
    #[prost(uint32, tag = "4")]
    pub protocol_minor: u32,
    /// 16 bytes.
    #[prost(bytes = "vec", tag = "5")]
    pub model_fingerprint: Vec<u8>,
    /// 16 bytes.
    #[prost(bytes = "vec", tag = "6")]
    pub tokenizer_digest: Vec<u8>,
    #[prost(message, optional, tag = "7")]
    pub kv_shape: Option<KvShape>,
    #[prost(string, tag = "8")]
    pub kv_format: String,
    #[prost(uint32, tag = "9")]
    pub page_size: u32,
    #[prost(string, tag = "10")]
    pub element_order: String,
    #[prost(string, tag = "11")]
    pub weight_format: String,
    #[prost(string, tag = "12")]
    pub instruction_set: String,
    /// The source of rows when the sender is a prefill node.
    #[prost(string, tag = "13")]
    pub kv_address: String,
    /// The load of a decode node, in its answer to a probe.
    #[prost(message, optional, tag = "14")]
    pub load: Option<NodeLoad>,
    /// The source of rows for a node on the same host: the abstract name of a socket.
    #[prost(string, tag = "15")]
    pub kv_socket: String,
    /// The name of the sender's host. Nodes with the same name share memory and socket names.
    #[prost(string, tag = "16")]
    pub host: String,
    #[prost(string, tag = "17")]
    pub group: String,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub struct NodeLoad {
    #[prost(uint32, tag = "1")]
    pub num_free_pages: u32,
    #[prost(uint32, tag = "2")]
    pub num_running: u32,
    #[prost(uint32, tag = "3")]
    pub num_waiting: u32,
    #[prost(uint64, tag = "4")]
    pub num_reservations: u64,
    #[prost(bool, tag = "5")]
    pub is_draining: bool,
    /// Since version 3.1; 0 before the node has computed a prompt.
    #[prost(uint64, tag = "6")]
    pub prefill_us: u64,
    #[prost(uint64, tag = "7")]
    pub tpot_us: u64,
    #[prost(uint32, optional, tag = "8")]
    pub max_prompt_tokens: Option<u32>,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub struct KvShape {
    #[prost(uint32, tag = "1")]
    pub num_layers: u32,
    #[prost(uint32, tag = "2")]
    pub num_kv_heads: u32,
    #[prost(uint32, tag = "3")]
    pub head_dim: u32,
    #[prost(uint32, tag = "4")]
    pub num_ranks: u32,
    #[prost(fixed64, tag = "5")]
    pub window_digest: u64,
}

#[derive(Clone, PartialEq, Message)]
pub struct Allocate {
    #[prost(uint32, repeated, tag = "1")]
    pub prompt: Vec<u32>,
    #[prost(message, optional, tag = "2")]
    pub sampling: Option<Sampling>,
    #[prost(message, optional, tag = "3")]
    pub stopping: Option<Stopping>,
    #[prost(sint32, tag = "4")]
    pub priority: i32,
    #[prost(string, optional, tag = "6")]
    pub cache_salt: Option<String>,
    #[prost(uint64, optional, tag = "7")]
    pub remaining_us: Option<u64>,
    /// 16 bytes: the session of the prompt's first choice, if it has several.
    #[prost(bytes = "vec", optional, tag = "8")]
    pub siblings: Option<Vec<u8>>,
    #[prost(string, optional, tag = "9")]
    pub trace_id: Option<String>,
    /// 16 bytes: the fingerprint of the adapter. Tag 5 used to be the adapter's name.
    #[prost(bytes = "vec", optional, tag = "11")]
    pub adapter: Option<Vec<u8>>,
    /// The source of the constraint that the prefill node's server made from the request's format or tools.
    #[prost(string, optional, tag = "10")]
    pub constraint: Option<String>,
    #[prost(uint64, optional, tag = "12")]
    pub max_tpot_us: Option<u64>,
    /// Tokens that were drawn before, at other decode nodes.
    #[prost(uint32, repeated, tag = "13")]
    pub output: Vec<u32>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Sampling {
    #[prost(float, tag = "1")]
    pub temperature: f32,
    #[prost(uint32, tag = "2")]
    pub top_k: u32,
    #[prost(float, tag = "3")]
    pub top_p: f32,
    #[prost(float, tag = "4")]
    pub min_p: f32,
    #[prost(float, tag = "5")]
    pub presence_penalty: f32,
    #[prost(float, tag = "6")]
    pub frequency_penalty: f32,
    #[prost(float, tag = "7")]
    pub repetition_penalty: f32,
    #[prost(fixed64, tag = "8")]
    pub seed: u64,
    #[prost(uint32, tag = "9")]
    pub choice: u32,
    #[prost(uint32, optional, tag = "10")]
    pub logprobs: Option<u32>,
    #[prost(message, optional, tag = "11")]
    pub rules: Option<Rules>,
}

/// Rules about single tokens.
#[derive(Clone, PartialEq, Message)]
pub struct Rules {
    /// Tokens with a bias. `biases` has their biases in the same order.
    #[prost(uint32, repeated, tag = "1")]
    pub biased_tokens: Vec<u32>,
    #[prost(float, repeated, tag = "2")]
    pub biases: Vec<f32>,
    /// The only tokens that may be drawn. Absent if all tokens may be drawn, because an empty list looks like no list.
    #[prost(message, optional, tag = "3")]
    pub allowed: Option<TokenList>,
    /// Sequences that must not appear in the output.
    #[prost(message, repeated, tag = "4")]
    pub banned: Vec<TokenList>,
}

#[derive(Clone, PartialEq, Message)]
pub struct TokenList {
    #[prost(uint32, repeated, tag = "1")]
    pub tokens: Vec<u32>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Stopping {
    #[prost(uint32, optional, tag = "1")]
    pub max_tokens: Option<u32>,
    #[prost(uint32, tag = "2")]
    pub min_tokens: u32,
    #[prost(uint32, repeated, tag = "3")]
    pub end_token_ids: Vec<u32>,
    #[prost(uint32, repeated, tag = "4")]
    pub stop_token_ids: Vec<u32>,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub struct Allocated {
    #[prost(uint32, tag = "1")]
    pub num_cached_rows: u32,
    #[prost(uint64, optional, tag = "2")]
    pub granted_as: Option<u64>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Refused {
    #[prost(enumeration = "RefusalKind", tag = "1")]
    pub kind: i32,
    /// The facts of a node that refuses because it is incompatible. The other node compares them with its own facts.
    #[prost(message, optional, tag = "2")]
    pub hello: Option<Hello>,
    /// The time per token of a node that refuses because it is too slow, and the objective.
    #[prost(uint64, tag = "3")]
    pub expected_us: u64,
    #[prost(uint64, tag = "4")]
    pub objective_us: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub enum RefusalKind {
    Unknown = 0,
    Exhausted = 1,
    Never = 2,
    Incompatible = 3,
    StaleIncarnation = 4,
    Ended = 5,
    Draining = 6,
    Unsuitable = 7,
    TooSlow = 8,
}

#[derive(Clone, PartialEq, Message)]
pub struct FirstToken {
    #[prost(message, optional, tag = "1")]
    pub sample: Option<DrawnToken>,
    #[prost(uint32, tag = "2")]
    pub num_cached_tokens: u32,
}

#[derive(Clone, PartialEq, Message)]
pub struct DrawnToken {
    #[prost(uint32, tag = "1")]
    pub token: u32,
    /// The token's own log-probability. Absent if no log-probabilities were asked for.
    #[prost(float, optional, tag = "2")]
    pub logprob: Option<f32>,
    #[prost(uint32, repeated, tag = "3")]
    pub top_tokens: Vec<u32>,
    #[prost(float, repeated, tag = "4")]
    pub top_logprobs: Vec<f32>,
    /// The token's rank among all tokens by probability, if it has a log-probability. The most likely token has rank 1.
    /// Since version 4.2.
    #[prost(uint32, tag = "5")]
    pub rank: u32,
}

#[derive(Clone, PartialEq, Message)]
pub struct Tokens {
    #[prost(uint32, tag = "1")]
    pub first_position: u32,
    #[prost(message, repeated, tag = "2")]
    pub samples: Vec<DrawnToken>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Finish {
    #[prost(enumeration = "FinishKind", tag = "1")]
    pub kind: i32,
    #[prost(uint32, tag = "2")]
    pub num_output_tokens: u32,
    /// Why the request failed, for a reader.
    #[prost(string, tag = "3")]
    pub error: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub enum FinishKind {
    Unknown = 0,
    EndToken = 1,
    StopToken = 2,
    Length = 3,
    Aborted = 4,
    Error = 5,
}

#[derive(Clone, PartialEq, Message)]
pub struct Abort {
    #[prost(enumeration = "AbortKind", tag = "1")]
    pub kind: i32,
    #[prost(string, tag = "2")]
    pub error: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub enum AbortKind {
    Unknown = 0,
    Cancelled = 1,
    Finished = 2,
    DeadlinePassed = 3,
    PeerLost = 4,
    AllocateTimedOut = 5,
    FirstTokenTimedOut = 6,
    LoadFailed = 7,
    LoadTimedOut = 8,
    HoldExpired = 9,
    OutOfPages = 10,
    DecodeFailed = 11,
    ProtocolViolated = 12,
}
