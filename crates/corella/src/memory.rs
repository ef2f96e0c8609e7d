//! KV pages and weights in the memory of a device, and limits of certain kinds of models.

pub(crate) mod draft_head_limit;
pub(crate) mod encoder_limit;
pub(crate) mod kv_disk_limit;
pub(crate) mod kv_plan;
pub(crate) mod recurrent_limit;
pub(crate) mod shared_kv_limit;
pub(crate) mod token_cost;
pub(crate) mod weight_fit;
