//! The core of Corella: decides what each step computes, and on which node a request decodes.
//!
//! It consists of pure state machines without IO, clock, randomness, or floats in decisions. The time is an argument
//! (`now_us`), events from outside enter through `handle_*` and `update_from_output`, and decisions leave as inert
//! data.
//!
//! For an overview, read `batch.rs` (the decision), `request_state/progress.rs` (the counters behind it) and
//! `step/scheduler.rs` (a step from top to bottom, and a map of the parts), then `cache/kv_cache.rs` and
//! `cache/prefix_tree.rs` for the pages. Two rooms stand beside the scheduler: in [`session`], a prefill node and a
//! decode node serve a request together, and `node` chooses the decode node.
//!
//! The rooms of the core, from bottom to top. A room uses only the rooms above it in this list:
//!
//! * `id`: identifiers.
//! * `fetch_medium`: the medium from which a fetch brings KV.
//! * `token_rule`: the tokens that may be drawn at each position.
//! * `sampling`: drawing tokens, and pooling hidden states.
//! * `batch`: the work of one step.
//! * `latency_objective`: the latest useful times of an answer.
//! * `request`: requests of callers, and their outputs.
//! * `pace`: the time, and the duration of steps.
//! * `cache`: pages and their owners, and the blocks of the prefix tree.
//! * `scheduler_config`: limits and policies, and their consequences for one request.
//! * `stats`: counts, and their metrics.
//! * `draft`: guesses of the next tokens.
//! * `request_state`: the state of one request, and the table of all requests.
//! * `request_view`: the displayed state of a request.
//! * `queue`: requests without a slot, and the expectations of all requests.
//! * `step`: the scheduler, and the running requests.
//! * `fleet`: nodes, the choice of a decode node, and the nodes that have a request's blocks.
//! * `session`: both ends of a request that two nodes serve.
//! * `node`: the nodes that a prefill node knows, and its choice for each request.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod batch;
mod cache;
mod draft;
mod fetch_medium;
mod fleet;
mod id;
mod latency_objective;
mod node;
mod pace;
mod queue;
mod request;
mod request_state;
mod request_view;
mod sampling;
mod scheduler_config;
pub mod session;
mod stats;
mod step;
mod token_rule;

pub use batch::{
    Batch, BatchOutput, HiddenState, InputToken, Logprobs, NOTHING_ALLOWED, PageCopy,
    PageTableDelta, PromptLogprob, Sample, SlotStart, Span, StateSnapshot, Yield,
};
pub use cache::block_hold::{BlockList, HeldBlocks, HoldRefusal};
pub use cache::fetch::{FetchEnd, FetchGrant, FetchRefusal, FetchRequest};
pub use cache::hold::KvFact;
pub use cache::kv_cache::KvCache;
pub use cache::kv_cache::pin::PinError;
pub use cache::kv_event::KvEvent;
pub use cache::kv_group::{KvGroup, MAX_KV_GROUPS};
pub use cache::page_hash::{BlockHasher, PageHash};
pub use cache::page_map::{PageMap, PageState};
pub use cache::page_table::PageTable;
pub use cache::prefix_tree::{Parent, PrefixMatch};
pub use cache::spill::SpillTask;
pub use fetch_medium::{FetchMedium, FetchedTokens};
pub use fleet::compute_choice::{ComputeCost, ComputePlace, ComputeSite};
pub use fleet::peer::{PeerFacts, ReservationId};
pub use fleet::peer_table::{PeerChange, PeerRecord, PeerTable, PeerTableConfig};
pub use fleet::placement::{
    DecodeCandidate, Fleet, LoadReport, PeerPolicy, PeerStanding, Placement, PlacementConfig,
    PlacementRequest,
};
pub use id::{
    BlockId, FetchId, HoldId, Incarnation, KvGroupId, NodeId, PageId, RequestId, SessionId, SlotId,
    SnapshotId, StepId, TokenId,
};
pub use latency_objective::{LatencyObjectives, MissedObjective, ObjectiveKind};
pub use node::directory::{Directory, DirectoryConfig, Holder};
pub use node::prefill_node::{CachedRows, Call, PrefillNode};
pub use node::route::{ComputeDecision, ComputeQuery, Fetching, Route, RouteQuery, StayReason};
pub use request::{
    AdmissionError, Arithmetic, CacheUse, FinishReason, NOT_MASKED, Namespace, Request,
    RequestError, RequestOutput, Retention, StoppingCriteria,
};
pub use request_view::{RequestStatus, RequestView};
pub use sampling::{Pooling, SamplingParams};
pub use scheduler_config::policy::{PrefillAdmissionPolicy, SchedulingPolicy};
pub use scheduler_config::recurrent_state::RecurrentState;
pub use scheduler_config::{ConfigError, HeadRoom, SchedulerConfig, Speculation};
pub use stats::{AcceptedByPosition, Metric, MetricValue, PrefixHits, SchedulerStats};
pub use step::scheduler::remote_kv::{LostKv, Reservation};
pub use step::scheduler::speculation::DraftRequest;
pub use step::scheduler::{CacheInUse, Scheduler};
pub use token_rule::TokenRules;
