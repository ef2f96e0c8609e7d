//! Number formats of weights and rows: floats, integers with scales, and blocks.

pub(crate) mod block_format;
pub(crate) mod dtype;
pub(crate) mod group_format;
pub(crate) mod int8_row;
