//! Tensors as GGUF files store them: rows of blocks, possibly in another order.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use half::bf16;

use crate::tensor::file_bytes::FileBytes;
use crate::{BlockFormat, DType, GroupFormat, GroupedRow};

/// A tensor in blocks. Kernels that compute with blocks read `stored_row`; all others use
/// `write_rows`.
pub struct BlockTensor {
    pub format: BlockFormat,
    pub row_order: RowOrder,
    /// The stored place of each column of a row.
    column_order: RowOrder,
    num_rows: usize,
    num_columns: usize,
    dtype: DType,
    file: Arc<dyn FileBytes>,
    range: Range<usize>,
    values: OnceLock<Vec<u8>>,
}

/// The order in which a file stores the rows of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowOrder {
    /// Row r is stored at r.
    AsStored,
    /// Each head is stored in the order in which the model's makers rotate it. Corella rotates row i together with row
    /// `i + head_dim / 2`, for the first `num_dims / 2` of these pairs.
    Heads {
        head_dim: usize,
        /// The number of rotated rows. They come first in the file.
        num_dims: usize,
        /// Whether rows that are rotated together are neighbours. Otherwise they are
        /// `num_dims / 2` apart.
        are_neighbours: bool,
    },
    /// The rows of another tensor lie between this tensor's rows. `first` is 0 or 1.
    EverySecond { first: usize },
    /// Blocks of `len` rows begin every `stride` rows, the first one at row `first`. Other tensors' rows
    /// lie between them.
    Blocks {
        first: usize,
        len: usize,
        stride: usize,
        /// The number of rotated rows of a block, for a head that is rotated in part. The file has the rotated rows
        /// first; Corella's rows are in the order of `Heads`.
        num_rotated: Option<usize>,
    },
    /// Rows from `first` on are heads of `len`. Corella sorts heads by their group. The file has the first head of
    /// every group, then the second head of every group, and so on.
    Tiled {
        first: usize,
        len: usize,
        num_groups: usize,
        heads_of_group: usize,
    },
}

impl RowOrder {
    /// The number of stored rows that contain a tensor's rows.
    pub(crate) fn num_stored(self, num_rows: usize) -> usize {
        match self {
            Self::AsStored | Self::Heads { .. } | Self::Tiled { .. } => num_rows,
            Self::EverySecond { .. } => 2 * num_rows,
            Self::Blocks { len, stride, .. } => num_rows / len * stride,
        }
    }

    /// The number of the tensor's rows among `num_stored` stored rows.
    pub(crate) fn num_rows(self, num_stored: usize) -> usize {
        match self {
            Self::AsStored | Self::Heads { .. } | Self::Tiled { .. } => num_stored,
            Self::EverySecond { .. } => num_stored / 2,
            Self::Blocks { len, stride, .. } => num_stored / stride * len,
        }
    }

    /// The stored position of a row.
    pub(crate) fn stored(self, row: usize) -> usize {
        let (head_dim, num_dims, are_neighbours) = match self {
            Self::AsStored => return row,
            Self::EverySecond { first } => return 2 * row + first,
            Self::Tiled {
                first,
                len,
                num_groups,
                heads_of_group,
            } => {
                let Some(row) = row.checked_sub(first) else {
                    return row;
                };
                let (head, i) = (row / len, row % len);
                let stored = head % heads_of_group * num_groups + head / heads_of_group;
                return first + stored * len + i;
            }
            Self::Blocks {
                first,
                len,
                stride,
                num_rotated,
            } => {
                let in_block = match num_rotated {
                    None => Self::AsStored,
                    Some(num_dims) => Self::Heads {
                        head_dim: len,
                        num_dims,
                        are_neighbours: false,
                    },
                };
                return row / len * stride + first + in_block.stored(row % len);
            }
            Self::Heads {
                head_dim,
                num_dims,
                are_neighbours,
            } => (head_dim, num_dims, are_neighbours),
        };
        let (head, i) = (row / head_dim, row % head_dim);
        let (half, pair) = (i / (head_dim / 2), i % (head_dim / 2));
        let num_pairs = num_dims / 2;
        let stored = if pair >= num_pairs {
            num_dims + (pair - num_pairs) + half * (head_dim - num_dims) / 2
        } else if are_neighbours {
            2 * pair + half
        } else {
            pair + half * num_pairs
        };
        head * head_dim + stored
    }
}

impl BlockTensor {
    /// `orders` are the orders of rows and of columns. A vector has rows of one element.
    pub(crate) fn new(
        file: Arc<dyn FileBytes>,
        range: Range<usize>,
        format: BlockFormat,
        [row_order, column_order]: [RowOrder; 2],
        [num_rows, num_columns]: [usize; 2],
        dtype: DType,
    ) -> Self {
        let blocks = Self {
            format,
            row_order,
            column_order,
            num_rows,
            num_columns,
            dtype,
            file,
            range,
            values: OnceLock::new(),
        };
        let num_stored = row_order.num_stored(num_rows);
        assert_eq!(num_stored * blocks.stored_row_bytes(), blocks.range.len());
        blocks
    }

    /// The blocks of a row, as the file stores them.
    pub fn stored_row(&self, row: usize) -> &[u8] {
        let row_bytes = self.stored_row_bytes();
        let start = self.row_order.stored(row) * row_bytes;
        &self.file.bytes()[self.range.clone()][start..start + row_bytes]
    }

    /// The format of the integers and scales, if any.
    pub(crate) fn group_format(&self) -> Option<GroupFormat> {
        let format = self.format.group_format()?;
        let keeps_groups = match self.column_order {
            RowOrder::Tiled { len, .. } => len.is_multiple_of(format.group_len),
            _ => true,
        };
        keeps_groups.then_some(format)
    }

    /// Reads a row of a tensor that has a `group_format`.
    pub(crate) fn read_groups(&self, row: usize, out: &mut GroupedRow) {
        self.format.read_groups(self.stored_row(row), out);
        if self.column_order == RowOrder::AsStored {
            return;
        }
        let num_columns = self.num_columns;
        let reorder = |values: usize, at: usize| {
            let len = num_columns / values;
            self.column_order.stored(at * len) / len
        };
        out.quants = (0..num_columns)
            .map(|at| out.quants[reorder(num_columns, at)])
            .collect();
        for numbers in [&mut out.scales, &mut out.minimums] {
            let len = numbers.len();
            *numbers = (0..len).map(|at| numbers[reorder(len, at)]).collect();
        }
    }

    fn stored_row_bytes(&self) -> usize {
        self.num_columns / self.format.block_len() * self.format.block_bytes()
    }

    /// The size of the tensor's blocks, in bytes.
    pub fn stored_bytes(&self) -> usize {
        self.num_rows * self.stored_row_bytes()
    }

    /// The size of a row in the tensor's type, in bytes.
    pub fn row_bytes(&self) -> usize {
        self.num_columns * self.dtype.size()
    }

    /// Writes the values of some rows in the tensor's type, one row after the other.
    pub fn write_rows(&self, rows: Range<usize>, out: &mut [u8]) {
        // Rows are converted piece by piece, so that the f32 values stay in the first-level cache.
        const MAX_VALUES: usize = 1024;
        let mut values = [0.0; MAX_VALUES];
        let stored_step = MAX_VALUES / self.format.block_len() * self.format.block_bytes();
        for (row, out) in rows.zip(out.chunks_exact_mut(self.row_bytes())) {
            let stored = self.stored_row(row);
            if self.column_order != RowOrder::AsStored {
                self.write_reordered(stored, out);
                continue;
            }
            if self.format.block_len() == 1 {
                out.copy_from_slice(stored);
                continue;
            }
            let out = out.chunks_mut(MAX_VALUES * self.dtype.size());
            for (stored, out) in stored.chunks(stored_step).zip(out) {
                let values = &mut values[..out.len() / self.dtype.size()];
                self.format.dequantise(stored, values);
                for (value, out) in values.iter().zip(out.chunks_exact_mut(2)) {
                    out.copy_from_slice(&bf16::from_f32(*value).to_le_bytes());
                }
            }
        }
    }

    /// Writes the values of a row whose columns have another order.
    fn write_reordered(&self, stored: &[u8], out: &mut [u8]) {
        let size = self.dtype.size();
        let mut in_order = |bytes: &[u8]| {
            for (column, out) in out.chunks_exact_mut(size).enumerate() {
                let start = self.column_order.stored(column) * size;
                out.copy_from_slice(&bytes[start..start + size]);
            }
        };
        if self.format.block_len() == 1 {
            return in_order(stored);
        }
        let mut values = vec![0.0; self.num_columns];
        self.format.dequantise(stored, &mut values);
        let values: Vec<u8> = values
            .iter()
            .flat_map(|&value| bf16::from_f32(value).to_le_bytes())
            .collect();
        in_order(&values);
    }

    pub(crate) fn values(&self) -> &[u8] {
        self.values.get_or_init(|| {
            let mut values = vec![0; self.num_rows * self.row_bytes()];
            self.write_rows(0..self.num_rows, &mut values);
            values
        })
    }

    pub(crate) fn release(&self) {
        self.file.release(self.range.clone());
    }
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;
    use crate::{Storage, Tensor};

    /// Two groups of two heads of 32 columns. The file has the first heads of both groups first. Each head is a block,
    /// whose scale identifies it.
    #[test]
    fn heads_that_are_tiled_in_columns_are_sorted_by_their_group() {
        let mut bytes = Vec::new();
        for stored_head in 0..4u8 {
            bytes.extend(f16::from_f32(f32::from(1u8 << stored_head)).to_le_bytes());
            bytes.extend(1..=32u8);
        }
        let file = Arc::new(Storage::Owned(bytes));
        let tiled = |len| RowOrder::Tiled {
            first: 0,
            len,
            num_groups: 2,
            heads_of_group: 128 / len / 2,
        };
        let tensor = |columns| {
            let orders = [RowOrder::AsStored, columns];
            Tensor::of_ordered_blocks(&file, 0..136, BlockFormat::Q8_0, orders, vec![1, 128])
        };
        let by_group = tensor(tiled(32));
        let expected: Vec<f32> = [1.0, 4.0, 2.0, 8.0]
            .iter()
            .flat_map(|scale| (1..=32).map(move |quant| scale * quant as f32))
            .collect();
        let mut values = vec![0.0; 128];
        by_group.read_row(0, &mut Vec::new(), &mut values);
        assert_eq!(values, expected);
        let mut groups = GroupedRow::default();
        by_group.read_groups(0, &mut groups);
        assert_eq!(groups.scales, [1.0, 4.0, 2.0, 8.0]);
        let quants = groups.quants.iter().map(|&quant| f32::from(quant));
        let scaled = quants
            .enumerate()
            .map(|(at, quant)| quant * groups.scales[at / 32]);
        assert_eq!(scaled.collect::<Vec<_>>(), expected);
        // The order of heads shorter than a block splits blocks.
        let shorter = tensor(tiled(16));
        assert!(shorter.group_format().is_none());
        shorter.read_row(0, &mut Vec::new(), &mut values);
        let starts: Vec<_> = values.chunks(16).map(|head| head[0]).collect();
        assert_eq!(starts, [1.0, 2.0, 4.0, 8.0, 17.0, 34.0, 68.0, 136.0]);
    }
}
