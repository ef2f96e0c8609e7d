//! KV rows by NIXL, NVIDIA's library for transfers between nodes.
//!
//! A sender registers its pages with its agent and tells a receiver how to reach them. The sender then sends the places
//! of pages, as it does inside a host, and the receiver reads them: no node ever writes to another's memory. A read
//! that has begun cannot be recalled, so no read writes to KV pages. Rows are read into staging memory, and copied from
//! there to the pages unless the load is over.

mod agent;
mod library;
mod path;
mod reader;
mod staging;

pub use agent::NixlAgent;
pub use library::{NixlError, NixlLibrary, exit};
pub(super) use path::KIND;
