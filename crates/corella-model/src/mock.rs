//! The mock executor.

pub(crate) mod mock_adapters;
pub(crate) mod mock_executor;
pub(crate) mod mock_factory;
pub(crate) mod mock_kv;
pub(crate) mod mock_model;
pub(crate) mod mock_script;
