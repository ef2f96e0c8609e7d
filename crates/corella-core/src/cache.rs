//! The KV cache: pages and their owners, the blocks of the prefix tree, KV groups and windows, and pages that other
//! nodes or host memory read or write.

pub(crate) mod block_hold;
pub(crate) mod fetch;
pub(crate) mod first_block;
pub(crate) mod hold;
pub(crate) mod kv_cache;
#[cfg(test)]
pub(crate) mod kv_cache_model;
pub(crate) mod kv_event;
pub(crate) mod kv_group;
pub(crate) mod page_forecast;
pub(crate) mod page_hash;
pub(crate) mod page_map;
pub(crate) mod page_pool;
pub(crate) mod page_table;
pub(crate) mod prefix_tree;
pub(crate) mod residency;
#[cfg(test)]
pub(crate) mod residency_model;
pub(crate) mod snapshot;
#[cfg(test)]
mod snapshot_model;
pub(crate) mod spill;
