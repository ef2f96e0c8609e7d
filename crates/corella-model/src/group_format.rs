//! Rows of integers with one scale per group.

/// The format of a matrix whose values are integers times group-wise scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupFormat {
    /// The number of bits per integer, 4 or 8.
    pub bits: usize,
    /// The number of a row's weights that share a scale.
    pub group_len: usize,
    /// Whether a value is `scale * q + minimum` with q from 0 to 15. Otherwise it is `scale * q`
    /// with q from -8 to 7, or from -128 to 127.
    pub has_minimum: bool,
}

/// One row of such a matrix.
#[derive(Clone, Debug, Default)]
pub struct GroupedRow {
    /// The integers, one per weight.
    pub quants: Vec<i8>,
    /// The scales, one per group.
    pub scales: Vec<f32>,
    /// The minimums, one per group; empty if the format has none.
    pub minimums: Vec<f32>,
}
