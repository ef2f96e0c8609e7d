//! The core of Corella: decides what each step computes, and on which node a request decodes.
//!
//! It consists of pure state machines without IO, clock, randomness, or floats in decisions. Time
//! comes in as an argument (`now_us`), facts from outside through `handle_*` and
//! `update_from_output`, and what should happen goes out as inert data.
//!
//! To find your way, read `batch.rs` (what is decided), `request_state.rs` (the counters it is
//! decided from) and `step/scheduler.rs` (a step from top to bottom, and a map of the other files), then
//! `cache/kv_cache.rs` and `cache/prefix_tree.rs` for the pages. `queue` holds waiting requests and policies, `step`
//! what runs, `cache` pages and their owners. Beside the scheduler stand [`session`], how a
//! prefill node and a decode node serve a request together, and `fleet`, which chooses nodes.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod batch;
mod cache;
mod fleet;
mod id;
mod invariant;
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
    PageTableDelta, Pooling, PromptLogprob, Sample, SlotStart, Span, Yield,
};
pub use cache::hold::KvFact;
pub use cache::kv_cache::KvCache;
pub use cache::kv_event::{KvEvent, PageHash};
pub use cache::kv_group::{KvGroup, MAX_KV_GROUPS};
pub use cache::page_map::{PageMap, PageState};
pub use cache::pin::PinError;
pub use cache::prefix_tree::{Parent, PrefixMatch};
pub use cache::receipt::{LostKv, Reservation};
pub use cache::spill::SpillTask;
pub use fleet::peer::{PeerFacts, ReservationId};
pub use fleet::peer_table::{PeerChange, PeerRecord, PeerTable, PeerTableConfig};
pub use fleet::placement::{
    DecodeNode, Fleet, LoadReport, PeerPolicy, PeerStanding, Placement, PlacementConfig,
    PlacementRequest,
};
pub use id::{
    BlockId, Incarnation, KvGroupId, NodeId, PageId, PeerId, RequestId, SessionId, SlotId, StepId,
    TokenId,
};
pub use queue::latency_objective::{LatencyObjectives, MissedObjective, ObjectiveKind};
pub use queue::policy::{PrefillAdmissionPolicy, SchedulingPolicy};
pub use request::{
    AdmissionError, FinishReason, NOT_MASKED, Namespace, Request, RequestError, RequestOutput,
    StoppingCriteria,
};
pub use request_view::{RequestStatus, RequestView};
pub use sampling::SamplingParams;
pub use scheduler_config::{ConfigError, HeadRoom, SchedulerConfig, Speculation};
pub use stats::{PrefixHits, SchedulerStats};
pub use step::scheduler::{CacheInUse, Scheduler};
pub use step::speculation::DraftRequest;
pub use token_rule::TokenRules;
