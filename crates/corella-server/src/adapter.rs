//! Adapters, which callers name instead of the model.

pub mod adapter_name;
pub mod adapter_use;
pub mod served_adapter;
