//! A prefill node: the other nodes as it knows them, and its choice for each request. Production and the simulator call
//! these functions and choose nothing themselves.

pub(crate) mod directory;
pub(crate) mod prefill_node;
pub(crate) mod route;
