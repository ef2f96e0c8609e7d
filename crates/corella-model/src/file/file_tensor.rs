//! A file of tensors, and a tensor in it.

use std::ops::Range;
use std::sync::Arc;

use crate::tensor::packed_tensor::StoredTensor;
use crate::{BlockFormat, CheckpointError, RowOrder, Storage, Tensor};

/// A file of tensors in any format.
pub trait TensorSource {
    /// The file's name in error messages.
    fn file(&self) -> &str;
    /// The names of all tensors.
    fn names(&self) -> Vec<String>;
    /// The number of elements and the number of bytes of each tensor.
    fn sizes(&self) -> Vec<(usize, usize)>;
    /// The tensor of a name; `None` if the file has no such tensor.
    fn tensor(&self, name: &str) -> Result<Option<FileTensor>, CheckpointError>;
    /// The tensor of a name in any type, for the parts of quantised matrices. Formats whose quantised matrices are
    /// single tensors need not implement this.
    fn stored(&self, _name: &str) -> Option<StoredTensor> {
        None
    }
}

impl<S: TensorSource> TensorSource for &S {
    fn file(&self) -> &str {
        (*self).file()
    }

    fn names(&self) -> Vec<String> {
        (*self).names()
    }

    fn sizes(&self) -> Vec<(usize, usize)> {
        (*self).sizes()
    }

    fn tensor(&self, name: &str) -> Result<Option<FileTensor>, CheckpointError> {
        (*self).tensor(name)
    }

    fn stored(&self, name: &str) -> Option<StoredTensor> {
        (*self).stored(name)
    }
}

/// A tensor as its file stores it.
pub struct FileTensor {
    pub storage: Arc<Storage>,
    pub range: Range<usize>,
    pub format: BlockFormat,
    /// The shape. Its last size is the length of a row.
    pub shape: Vec<usize>,
}

impl FileTensor {
    /// Some rows of a tensor, whose last size is the length of a row; a vector has rows of one element. `order` may
    /// name only some of these rows.
    pub fn rows(self, rows: Range<usize>, order: RowOrder) -> Tensor {
        self.rows_with_columns(rows, [order, RowOrder::AsStored])
    }

    /// Some rows of a tensor whose columns may be reordered, too.
    pub fn rows_with_columns(self, rows: Range<usize>, [order, columns]: [RowOrder; 2]) -> Tensor {
        let num_rows = order.num_rows(rows.len());
        let (num_columns, shape) = match self.shape[..] {
            [.., num_columns] if self.shape.len() > 1 => (num_columns, vec![num_rows, num_columns]),
            _ => (1, vec![num_rows]),
        };
        let row_bytes = num_columns / self.format.block_len() * self.format.block_bytes();
        let start = self.range.start + rows.start * row_bytes;
        let range = start..start + rows.len() * row_bytes;
        Tensor::of_ordered_blocks(&self.storage, range, self.format, [order, columns], shape)
    }

    /// The vectors of several experts, concatenated.
    pub fn flat(mut self) -> Self {
        self.shape = vec![self.shape.iter().product()];
        self
    }
}
