//! LoRA adapters. A caller names an adapter in `model` instead of the base model.

pub mod adapter_name;
pub mod adapter_use;
pub mod served_adapter;
