//! Matrices that a folder stores as `[in, out]`, read as `[out, in]`.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use crate::tensor::file_bytes::FileBytes;
use crate::{DType, RowOrder};

/// Some outputs of a matrix `[in, out]`, as rows.
pub struct TransposedTensor {
    file: Arc<dyn FileBytes>,
    range: Range<usize>,
    element_bytes: usize,
    /// The number of stored rows, each of which is an input, and the length of a row.
    num_inputs: usize,
    num_stored: usize,
    /// The first output and the number of outputs.
    first: usize,
    num_outputs: usize,
    order: RowOrder,
    values: OnceLock<Vec<u8>>,
}

impl TransposedTensor {
    /// `outputs` of a matrix with the shape `[num_inputs, num_stored]`, or of the outputs in `order`.
    pub(crate) fn new(
        file: Arc<dyn FileBytes>,
        range: Range<usize>,
        dtype: DType,
        [num_inputs, num_stored]: [usize; 2],
        outputs: Range<usize>,
        order: RowOrder,
    ) -> Self {
        assert_eq!(range.len(), num_inputs * num_stored * dtype.size());
        assert!(outputs.end <= num_stored);
        Self {
            file,
            range,
            element_bytes: dtype.size(),
            num_inputs,
            num_stored,
            first: outputs.start,
            num_outputs: outputs.len() / order.num_stored(1),
            order,
            values: OnceLock::new(),
        }
    }

    pub(crate) fn num_outputs(&self) -> usize {
        self.num_outputs
    }

    /// The size of a row, in bytes.
    pub fn row_bytes(&self) -> usize {
        self.num_inputs * self.element_bytes
    }

    pub fn write_row(&self, row: usize, out: &mut [u8]) {
        let size = self.element_bytes;
        let stored = &self.file.bytes()[self.range.clone()];
        let columns = stored.chunks_exact(self.num_stored * size);
        let at = (self.first + self.order.stored(row)) * size;
        for (column, out) in columns.zip(out.chunks_exact_mut(size)) {
            out.copy_from_slice(&column[at..at + size]);
        }
    }

    pub(crate) fn values(&self) -> &[u8] {
        self.values.get_or_init(|| {
            let mut values = vec![0; self.num_outputs * self.row_bytes()];
            let rows = values.chunks_exact_mut(self.row_bytes());
            for (row, out) in rows.enumerate() {
                self.write_row(row, out);
            }
            values
        })
    }

    pub(crate) fn release(&self) {
        self.file.release(self.range.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Storage, Tensor};

    #[test]
    fn outputs_are_rows() {
        // Three inputs of five outputs; element `[i, o]` is 10 i + o.
        let bytes = (0..3).flat_map(|i| (0..5).map(move |o| (10 * i + o) as f32));
        let bytes: Vec<u8> = bytes.flat_map(f32::to_le_bytes).collect();
        let file = Arc::new(Storage::Owned(bytes));
        let tensor = |outputs, order| {
            Tensor::of_columns(file.clone(), 0..60, DType::F32, [3, 5], outputs, order)
        };
        let second = tensor(0..4, RowOrder::EverySecond { first: 1 });
        assert_eq!(second.shape, [2, 3]);
        let tensor = tensor(1..3, RowOrder::AsStored);
        assert_eq!(tensor.shape, [2, 3]);
        let mut row = [0.0; 3];
        tensor.read_row(0, &mut Vec::new(), &mut row);
        assert_eq!(row, [1.0, 11.0, 21.0]);
        tensor.read_row(1, &mut Vec::new(), &mut row);
        assert_eq!(row, [2.0, 12.0, 22.0]);
        second.read_row(1, &mut Vec::new(), &mut row);
        assert_eq!(row, [3.0, 13.0, 23.0]);
        let values = tensor.bytes().as_chunks().0.iter();
        let values: Vec<f32> = values.map(|&bytes| f32::from_le_bytes(bytes)).collect();
        assert_eq!(values, [1.0, 11.0, 21.0, 2.0, 12.0, 22.0]);
    }
}
