//! Drives the session machines of `corella-core` over gRPC.
//!
//! A server submits requests to the [`PrefillNode`] of one node, and the [`DecodeNode`] of another
//! takes them over. Both pass messages, facts and the time to their state machine, and carry out
//! its actions. `corella_core` makes every decision.

mod decode_node;
mod export;
mod health;
mod link;
mod node_listener;
mod prefill_node;
mod service;
mod stage_times;
mod stay;
mod wire;

pub use decode_node::{DecodeNode, DecodeParts, NodeSite};
pub use node_listener::NodeListener;
pub use prefill_node::{PrefillNode, PrefillNodeStats, PrefillParts, RouteWatch};
pub use service::serve_sessions;
pub use stage_times::{DecodeTimes, PrefillTimes};
pub use stay::StayCounts;
pub use wire::KvAddress;
