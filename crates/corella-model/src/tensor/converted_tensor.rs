//! Vectors that a file stores in another form, such as the norms of families that multiply by "1 + weight".

use std::sync::OnceLock;

use half::{bf16, f16};

use crate::{DType, Tensor};

/// A vector of f32. The file is read only when the values are needed.
pub struct ConvertedTensor {
    pub stored: Tensor,
    conversion: fn(f32) -> f32,
    values: OnceLock<Vec<u8>>,
}

impl ConvertedTensor {
    pub fn new(stored: Tensor, conversion: fn(f32) -> f32) -> Self {
        let values = OnceLock::new();
        Self {
            stored,
            conversion,
            values,
        }
    }

    pub fn values(&self) -> &[u8] {
        self.values.get_or_init(|| {
            let dtype = self.stored.dtype;
            let elements = self.stored.bytes().chunks_exact(dtype.size());
            let values = elements.map(|bytes| match *bytes {
                [a, b] if dtype == DType::F16 => f16::from_le_bytes([a, b]).to_f32(),
                [a, b] => bf16::from_le_bytes([a, b]).to_f32(),
                [a, b, c, d] => f32::from_le_bytes([a, b, c, d]),
                _ => unreachable!("elements have 2 or 4 bytes"),
            });
            let converted = values.map(self.conversion);
            converted.flat_map(f32::to_le_bytes).collect()
        })
    }
}
