//! Drives the session machines of `corella-core` over gRPC.
//!
//! A [`PrefillNode`] is what a server submits to on one node, a [`DecodeNode`] takes over on another.
//! Both only carry: messages, facts and time into their machine, its actions out. What is decided is
//! decided in `corella_core::session`.

mod clock;
mod decode_node;
mod decode_peers;
mod export;
mod link;
mod prefill_node;
mod service;
mod wire;

pub use decode_node::DecodeNode;
pub use decode_peers::RegistryPeers;
pub use prefill_node::{DecodePeers, PrefillNode, PrefillNodeStats};
pub use service::serve_sessions;
pub use wire::KvAddress;
