//! The KV cache: pages and their owners, the blocks of the prefix tree, KV groups and windows, and pages that other
//! nodes or host memory read or write.

pub(crate) mod announcement;
pub(crate) mod eviction;
pub(crate) mod first_block;
pub(crate) mod hold;
pub(crate) mod kv_cache;
#[cfg(test)]
pub(crate) mod kv_cache_model;
pub(crate) mod kv_event;
pub(crate) mod kv_group;
pub(crate) mod page_map;
pub(crate) mod page_pool;
pub(crate) mod page_table;
pub(crate) mod pin;
pub(crate) mod prefix_tree;
pub(crate) mod publication;
pub(crate) mod receipt;
pub(crate) mod residency;
#[cfg(test)]
pub(crate) mod residency_model;
pub(crate) mod spill;
pub(crate) mod window;
