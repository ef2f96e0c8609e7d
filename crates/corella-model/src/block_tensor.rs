//! Tensors as GGUF files store them: rows of blocks, possibly in another order.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use half::bf16;

use crate::{BlockFormat, DType, Storage, Tensor};

/// A tensor in blocks. Kernels that compute with blocks read `stored_row`; all others use
/// `write_rows`.
pub struct BlockTensor {
    pub format: BlockFormat,
    pub row_order: RowOrder,
    num_rows: usize,
    num_columns: usize,
    dtype: DType,
    file: Arc<Storage>,
    range: Range<usize>,
    values: OnceLock<Vec<u8>>,
}

/// The order in which a file stores the rows of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowOrder {
    /// Row r is stored at r.
    AsStored,
    /// Each head is stored in the order in which its makers rotate it. Ours rotates row i with row
    /// `i + head_dim / 2`, and the first `num_dims / 2` of these pairs.
    Heads {
        head_dim: usize,
        /// The number of rows that are rotated. The file has these first.
        num_dims: usize,
        /// Whether rows that are rotated together are neighbours. Otherwise they are
        /// `num_dims / 2` apart.
        are_neighbours: bool,
    },
    /// Another tensor's rows lie between these. `first` is 0 or 1.
    EverySecond { first: usize },
    /// Blocks of `len` rows begin every `stride` rows, the first one at row `first`. Other tensors' rows
    /// lie between them.
    Blocks {
        first: usize,
        len: usize,
        stride: usize,
        /// The number of rows of a block that are rotated, if it is a head that is rotated in part. The
        /// file has these first; ours are in the order of `Heads`.
        num_rotated: Option<usize>,
    },
}

impl RowOrder {
    /// The number of stored rows among which a tensor's are.
    pub(crate) fn num_stored(self, num_rows: usize) -> usize {
        match self {
            Self::AsStored | Self::Heads { .. } => num_rows,
            Self::EverySecond { .. } => 2 * num_rows,
            Self::Blocks { len, stride, .. } => num_rows / len * stride,
        }
    }

    /// The number of a tensor's rows among some stored ones.
    pub(crate) fn num_rows(self, num_stored: usize) -> usize {
        match self {
            Self::AsStored | Self::Heads { .. } => num_stored,
            Self::EverySecond { .. } => num_stored / 2,
            Self::Blocks { len, stride, .. } => num_stored / stride * len,
        }
    }

    /// The stored position of a row.
    pub(crate) fn stored(self, row: usize) -> usize {
        let (head_dim, num_dims, are_neighbours) = match self {
            Self::AsStored => return row,
            Self::EverySecond { first } => return 2 * row + first,
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
    /// Makes a tensor of `range` of `file`, which holds whole rows of whole blocks, those between the
    /// tensor's among them. A vector has
    /// rows of one element.
    pub fn tensor(
        file: &Arc<Storage>,
        range: Range<usize>,
        format: BlockFormat,
        row_order: RowOrder,
        shape: Vec<usize>,
    ) -> Tensor {
        let plain = match format {
            BlockFormat::F32 => Some(DType::F32),
            BlockFormat::F16 => Some(DType::F16),
            BlockFormat::Bf16 => Some(DType::Bf16),
            _ => None,
        };
        if let (Some(dtype), RowOrder::AsStored) = (plain, row_order) {
            return Tensor {
                storage: file.clone(),
                range,
                dtype,
                shape,
            };
        }
        let num_rows = shape[0];
        let num_columns = shape[1..].iter().product();
        let dtype = plain.unwrap_or(DType::Bf16);
        let blocks = Self {
            format,
            row_order,
            num_rows,
            num_columns,
            dtype,
            file: file.clone(),
            range,
            values: OnceLock::new(),
        };
        let num_stored = row_order.num_stored(num_rows);
        assert_eq!(num_stored * blocks.stored_row_bytes(), blocks.range.len());
        Tensor {
            range: 0..num_rows * blocks.row_bytes(),
            storage: Arc::new(Storage::Blocks(blocks)),
            dtype,
            shape,
        }
    }

    /// The blocks of a row, as the file stores them.
    pub fn stored_row(&self, row: usize) -> &[u8] {
        let row_bytes = self.stored_row_bytes();
        let start = self.row_order.stored(row) * row_bytes;
        &self.file.bytes()[self.range.clone()][start..start + row_bytes]
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
