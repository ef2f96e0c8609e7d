//! The core of Corella: decides what each step computes, and on which node a request decodes.
//!
//! It consists of pure state machines without IO, clock, randomness, or floats in decisions. Time
//! comes in as an argument (`now_us`), facts from outside through `handle_*` and
//! `update_from_output`, and what should happen goes out as inert data.
//!
//! To find your way, read `batch.rs` (what is decided), `request_state/progress.rs` (the counters it is
//! decided from) and `step/scheduler.rs` (a step from top to bottom, and a map of the parts), then
//! `cache/kv_cache.rs` and `cache/prefix_tree.rs` for the pages. Beside the scheduler stand [`session`], how a
//! prefill node and a decode node serve a request together, and `fleet`, which chooses nodes.
//!
//! The rooms of the core, from bottom to top. A room uses only those above it in this list:
//!
//! * `id`: the numbers of things.
//! * `token_rule`: which tokens may be drawn where.
//! * `sampling`: how tokens are drawn, and hidden states made one.
//! * `batch`: the work of one step.
//! * `latency_objective`: how soon an answer is needed.
//! * `request`: what a caller asks for, and what it gets back.
//! * `stats`: counts.
//! * `pace`: the time, and how long steps take.
//! * `cache`: pages and their owners, and the blocks of the prefix tree.
//! * `scheduler_config`: limits and policies, and what follows from them for one request.
//! * `draft`: guesses of what will be drawn.
//! * `request_state`: the state of one request, and the table of all.
//! * `request_view`: a request as it is shown.
//! * `queue`: requests without a slot, and the expectations of all requests.
//! * `step`: the scheduler, and what runs.
//! * `fleet`: nodes, which of them decodes a request, and which has its blocks.
//! * `session`: both ends of a request that two nodes serve.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod batch;
mod cache;
mod draft;
mod fleet;
mod id;
mod latency_objective;
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
pub use fleet::block_source_map::{BlockSite, BlockSourceMap};
pub use fleet::compute_choice::{ComputeCost, ComputePlace, ComputeSite};
pub use fleet::fetch_choice::FetchCost;
pub use fleet::peer::{PeerFacts, ReservationId};
pub use fleet::peer_table::{PeerChange, PeerRecord, PeerTable, PeerTableConfig};
pub use fleet::placement::{
    DecodeNode, Fleet, LoadReport, PeerPolicy, PeerStanding, Placement, PlacementConfig,
    PlacementRequest,
};
pub use id::{
    BlockId, FetchId, HoldId, Incarnation, KvGroupId, NodeId, PageId, PeerId, RequestId, SessionId,
    SlotId, SnapshotId, StepId, TokenId,
};
pub use latency_objective::{LatencyObjectives, MissedObjective, ObjectiveKind};
pub use request::{
    AdmissionError, FinishReason, NOT_MASKED, Namespace, Request, RequestError, RequestOutput,
    StoppingCriteria,
};
pub use request_view::{RequestStatus, RequestView};
pub use sampling::{Pooling, SamplingParams};
pub use scheduler_config::policy::{PrefillAdmissionPolicy, SchedulingPolicy};
pub use scheduler_config::recurrent_state::RecurrentState;
pub use scheduler_config::{ConfigError, HeadRoom, SchedulerConfig, Speculation};
pub use stats::{PrefixHits, SchedulerStats};
pub use step::scheduler::receipt::{LostKv, Reservation};
pub use step::scheduler::speculation::DraftRequest;
pub use step::scheduler::{CacheInUse, Scheduler};
pub use token_rule::TokenRules;
