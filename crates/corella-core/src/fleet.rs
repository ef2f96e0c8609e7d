//! The fleet: what this node knows about its peers, and the choice of a decode node.

pub(crate) mod peer;
pub(crate) mod peer_table;
pub(crate) mod placement;
