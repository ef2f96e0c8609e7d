//! The state that handlers share, and the parts of the state that other crates provide.

pub mod cluster_status;
pub mod engine_feed;
pub mod role_control;
pub mod server_parts;
pub mod server_state;
pub mod use_count;
