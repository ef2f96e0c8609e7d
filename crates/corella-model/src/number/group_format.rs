//! Rows of integers with one scale per group.

/// The format of a matrix whose values are integers times group-wise scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupFormat {
    /// The number of bits per integer, 4 or 8.
    pub bits: usize,
    /// The number of a row's weights that share a scale.
    pub group_len: usize,
    /// Whether a value is `scale * q + minimum` with q from 0 to 15. Otherwise it is `scale * q`
    /// with q from -8 to 7, from -128 to 127, or one of `FP4_LEVELS`.
    pub has_minimum: bool,
    /// Whether q is the 4-bit index of one of `FP4_LEVELS`.
    pub is_fp4: bool,
}

/// The values of 4-bit floats with 2 bits of exponent and 1 of mantissa (E2M1 of the OCP's
/// microscaling formats), times 2.
pub const FP4_LEVELS: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// The factor of `FP4_LEVELS` in a group of FP4 whose scale is stored as this byte (E8M0): half of the stored power
/// of two, because the levels are doubled.
pub fn fp4_scale(exponent: u8) -> f32 {
    f32::from_bits(match exponent {
        // These are subnormal.
        0 | 1 => 0x0020_0000 << exponent,
        _ => (u32::from(exponent) - 1) << 23,
    })
}

/// One row of a matrix in a [`GroupFormat`].
#[derive(Clone, Debug, Default)]
pub struct GroupedRow {
    /// The integers, one per weight.
    pub quants: Vec<i8>,
    /// The scales, one per group.
    pub scales: Vec<f32>,
    /// The minimums, one per group; empty for formats without minimums.
    pub minimums: Vec<f32>,
}
