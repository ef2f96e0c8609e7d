//! KV and blocks that other nodes bring or fetch.

pub(crate) mod block_exchange;
pub(crate) mod kv_exchange;
