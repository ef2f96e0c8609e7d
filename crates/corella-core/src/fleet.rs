//! The fleet: what this node knows about its peers, the choice of a decode node, and where blocks are worth fetching from.

pub(crate) mod block_source_map;
pub(crate) mod fetch_choice;
pub(crate) mod peer;
pub(crate) mod peer_table;
pub(crate) mod placement;
