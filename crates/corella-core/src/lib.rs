//! The core of Corella: decides what each step computes, and on which node a request decodes.
//!
//! It consists of pure state machines without IO, clock, randomness, or floats in decisions. Time
//! comes in as an argument (`now_us`), facts from outside through `handle_*` and
//! `update_from_output`, and what should happen goes out as inert data.
//!
//! To find your way, read `batch.rs` (what is decided), `request_state.rs` (the counters it is
//! decided from) and `scheduler.rs` (a step from top to bottom, and a map of the other files), then
//! `kv_cache.rs` and `prefix_tree.rs` for the pages. Beside the scheduler stand [`session`], how a
//! prefill node and a decode node serve a request together, and, for a fleet, `placement.rs` and
//! `peer_table.rs`.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod admission;
mod batch;
mod decode_turn;
mod departure;
mod draft_length;
mod feedback;
mod follower;
mod group_cache;
#[cfg(test)]
mod group_cache_model;
mod head_room;
mod hold;
mod id;
mod invariant;
mod kv_cache;
#[cfg(test)]
mod kv_cache_model;
mod kv_event;
mod kv_group;
mod latency_objective;
mod log_buckets;
mod output_length;
mod pace;
mod page_forecast;
mod page_map;
mod page_pool;
mod page_table;
mod patience;
mod peer;
mod peer_table;
mod pin;
mod placement;
mod prefix_tree;
mod receipt;
mod request;
mod request_state;
mod request_view;
mod sampling;
mod scheduler;
mod scheduler_config;
mod scheduling_policy;
pub mod session;
mod speculation;
mod spill;
mod stats;
mod step_plan;
mod suffix_index;
mod token_rule;
mod waiting_queue;
mod window;

pub use batch::{
    Batch, BatchOutput, HiddenState, InputToken, Logprobs, NOTHING_ALLOWED, PageCopy,
    PageTableDelta, Pooling, PromptLogprob, Sample, SlotStart, Span, Yield,
};
pub use hold::KvFact;
pub use id::{
    Incarnation, KvGroupId, NodeId, PageId, PeerId, RequestId, SessionId, SlotId, StepId, TokenId,
};
pub use kv_cache::KvCache;
pub use kv_event::{KvEvent, PageHash};
pub use kv_group::{KvGroup, MAX_KV_GROUPS};
pub use latency_objective::{LatencyObjectives, MissedObjective, ObjectiveKind};
pub use page_map::{PageMap, PageState};
pub use peer::{PeerFacts, ReservationId};
pub use peer_table::{PeerChange, PeerRecord, PeerTable, PeerTableConfig};
pub use pin::PinError;
pub use placement::{
    DecodeNode, Fleet, LoadReport, PeerPolicy, PeerStanding, Placement, PlacementConfig,
    PlacementRequest,
};
pub use prefix_tree::{Parent, PrefixMatch};
pub use receipt::{LostKv, Reservation};
pub use request::{
    AdmissionError, FinishReason, NOT_MASKED, Namespace, Request, RequestError, RequestOutput,
    StoppingCriteria,
};
pub use request_view::{RequestStatus, RequestView};
pub use sampling::SamplingParams;
pub use scheduler::{CacheInUse, Scheduler};
pub use scheduler_config::{
    ConfigError, HeadRoom, PrefillAdmissionPolicy, SchedulerConfig, SchedulingPolicy, Speculation,
};
pub use speculation::DraftRequest;
pub use spill::SpillTask;
pub use stats::{PrefixHits, SchedulerStats};
pub use token_rule::TokenRules;
