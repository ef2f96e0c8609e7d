//! KV pages and recurrent states: their groups, forms, and other threads' access to them.

pub(crate) mod element_order;
pub(crate) mod kv_groups;
pub(crate) mod kv_layers;
pub(crate) mod kv_pages;
pub(crate) mod layer_counter;
pub(crate) mod page_conversion;
pub(crate) mod page_table;
pub(crate) mod state_record;
