//! A step as executors see it: its slots, rows, draws and outputs, and rules of batches.

pub(crate) mod batch_builder;
pub(crate) mod batch_check;
pub(crate) mod mean_pool;
pub(crate) mod sampler;
pub(crate) mod slot;
pub(crate) mod span_pool;
pub(crate) mod step_output;
pub(crate) mod step_rows;
