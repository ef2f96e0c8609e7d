//! The formats of elements as constants, for kernels that are compiled once for each format.

/// Formats as constants, because const generics take no enums.
pub const F32: u8 = 0;
pub const BF16: u8 = 1;
pub const F16: u8 = 2;
/// Used for keys and values only.
pub const INT8: u8 = 3;

pub const fn element_size(format: u8) -> usize {
    match format {
        F32 => 4,
        INT8 => 1,
        _ => 2,
    }
}
