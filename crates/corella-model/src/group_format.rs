//! Rows of integers with a scale for each group of them.

/// How a matrix is stored whose values are integers times scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupFormat {
    /// 4 or 8.
    pub bits: usize,
    /// Weights of a row that share a scale.
    pub group_len: usize,
    /// A value is `scale * q + minimum`, q from 0 to 15; without, `scale * q`, q from -8
    /// to 7 or -128 to 127.
    pub has_minimum: bool,
}

/// One row of such a matrix.
#[derive(Clone, Debug, Default)]
pub struct GroupedRow {
    pub quants: Vec<i8>,
    /// By group.
    pub scales: Vec<f32>,
    /// By group; empty without minimums.
    pub minimums: Vec<f32>,
}
