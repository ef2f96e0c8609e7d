//! The fleet: the peers of this node, the choice of a decode node, the source of fetched blocks, and the node that
//! computes a prompt.

pub(crate) mod block_source_map;
pub(crate) mod compute_choice;
pub(crate) mod fetch_choice;
pub(crate) mod peer;
pub(crate) mod peer_table;
pub(crate) mod placement;
