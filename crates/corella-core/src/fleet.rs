//! Other nodes: what is known about them, and which of them decodes a request.

pub(crate) mod peer;
pub(crate) mod peer_table;
pub(crate) mod placement;
