//! The fleet: what this node knows about its peers, the choice of a decode node, where blocks are worth fetching
//! from, and which node computes a prompt.

pub(crate) mod block_source_map;
pub(crate) mod compute_choice;
pub(crate) mod fetch_choice;
pub(crate) mod peer;
pub(crate) mod peer_table;
pub(crate) mod placement;
