//! Loads of cached blocks between nodes of any role: the real machines of both ends, over a network that loses, repeats
//! and reorders messages.

pub mod block_net;
pub mod exchange;
pub mod fetch_totals;
mod fetching;
mod liar;
mod part_reader;
mod part_store;
mod serving;
mod whole_load;
