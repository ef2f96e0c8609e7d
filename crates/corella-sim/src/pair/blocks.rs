//! Loads of cached blocks between nodes of any role: the real machines of both ends, over a network that loses, repeats
//! and reorders messages.

pub mod block_net;
pub mod exchange;
mod liar;
pub mod load_totals;
mod loading;
mod part_reader;
mod part_store;
mod serving;
mod whole_load;
