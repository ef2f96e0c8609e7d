//! Masks of constrained answers.

pub(crate) mod mask_table;
pub(crate) mod mask_thread;
