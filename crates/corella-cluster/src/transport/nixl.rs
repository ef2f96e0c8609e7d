//! KV rows by NIXL, NVIDIA's library for transfers between nodes.
//!
//! A sender registers its pages with its agent and tells a receiver how to reach them. The sender then
//! sends where pages lie, as it does inside a host, and the receiver reads them from there: no node
//! ever writes to another's memory. A read that has begun cannot be recalled, so none goes to pages:
//! rows are read into memory beside them, and copied from there while the load is not over.

mod agent;
mod library;
mod path;
mod reader;
mod staging;

pub use agent::NixlAgent;
pub use library::{NixlError, NixlLibrary, exit};
pub(super) use path::NAME;
