//! Named, typed views of a checkpoint's bytes. The bytes are not copied until an executor packs them.

pub(crate) mod block_tensor;
pub(crate) mod converted_tensor;
pub(crate) mod file_bytes;
pub(crate) mod mapped_file;
pub(crate) mod packed_tensor;
#[cfg(target_os = "linux")]
mod page_fault;
pub(crate) mod storage;
pub(crate) mod transposed_tensor;

use std::fmt::Display;
use std::ops::Range;
use std::sync::Arc;

use half::{bf16, f16};

use self::block_tensor::{BlockTensor, RowOrder};
use self::converted_tensor::ConvertedTensor;
use self::packed_tensor::{PackedParts, PackedTensor};
use self::storage::Storage;
use self::transposed_tensor::TransposedTensor;
use crate::{BlockFormat, DType, GroupFormat, GroupedRow};

/// A dense row-major tensor, whose bytes may be unaligned.
#[derive(Clone)]
pub struct Tensor {
    pub storage: Arc<Storage>,
    pub range: Range<usize>,
    pub dtype: DType,
    pub shape: Vec<usize>,
}

impl Tensor {
    /// Makes a tensor of `range` of `file`. The range holds whole rows of whole blocks, and may have rows of other
    /// tensors between this tensor's rows. A vector has rows of one element.
    pub fn of_blocks(
        file: &Arc<Storage>,
        range: Range<usize>,
        format: BlockFormat,
        row_order: RowOrder,
        shape: Vec<usize>,
    ) -> Self {
        Self::of_ordered_blocks(file, range, format, [row_order, RowOrder::AsStored], shape)
    }

    /// Makes a tensor with reordered columns. If the order splits groups of a format with scales, the tensor has no
    /// `group_format`.
    pub(crate) fn of_ordered_blocks(
        file: &Arc<Storage>,
        range: Range<usize>,
        format: BlockFormat,
        orders: [RowOrder; 2],
        shape: Vec<usize>,
    ) -> Self {
        let plain = format.float_type();
        if let Some(dtype) = plain.filter(|_| orders == [RowOrder::AsStored; 2]) {
            return Self {
                storage: file.clone(),
                range,
                dtype,
                shape,
            };
        }
        let dtype = plain.unwrap_or(DType::Bf16);
        let size = [shape[0], shape[1..].iter().product()];
        let blocks = BlockTensor::new(file.clone(), range, format, orders, size, dtype);
        Self {
            range: 0..shape[0] * blocks.row_bytes(),
            storage: Arc::new(Storage::Blocks(blocks)),
            dtype,
            shape,
        }
    }

    /// Makes a matrix of integers and scales.
    pub fn of_integers(parts: PackedParts) -> Self {
        let shape = vec![parts.view.num_rows, parts.shape[1]];
        let packed = PackedTensor::new(parts);
        Self {
            range: 0..shape[0] * packed.row_bytes(),
            storage: Arc::new(Storage::Packed(Box::new(packed))),
            dtype: DType::Bf16,
            shape,
        }
    }

    /// Makes the tensor of `outputs` of a matrix with the shape `[num_inputs, num_stored]`, or of the outputs in
    /// `order`.
    pub(crate) fn of_columns(
        file: Arc<Storage>,
        range: Range<usize>,
        dtype: DType,
        size: [usize; 2],
        outputs: Range<usize>,
        order: RowOrder,
    ) -> Self {
        let transposed = TransposedTensor::new(file, range, dtype, size, outputs, order);
        let shape = vec![transposed.num_outputs(), size[0]];
        Self {
            range: 0..shape[0] * transposed.row_bytes(),
            storage: Arc::new(Storage::Transposed(transposed)),
            dtype,
            shape,
        }
    }

    /// The tensor's `num_bytes` bytes, little-endian. For quantised tensors `row` is cheaper.
    pub fn bytes(&self) -> &[u8] {
        &self.storage.bytes()[self.range.clone()]
    }

    /// The size of the tensor: `shape.product() * dtype.size()`.
    pub fn num_bytes(&self) -> usize {
        self.range.len()
    }

    /// The bytes of one row of a matrix. Rows of quantised matrices are dequantised into `scratch`.
    pub fn row<'a>(&'a self, row: usize, scratch: &'a mut Vec<u8>) -> &'a [u8] {
        if let Storage::Blocks(blocks) = &*self.storage {
            scratch.resize(blocks.row_bytes(), 0);
            blocks.write_rows(row..row + 1, scratch);
            return scratch;
        }
        if let Storage::Packed(packed) = &*self.storage {
            scratch.resize(packed.row_bytes(), 0);
            packed.write_rows(row..row + 1, scratch);
            return scratch;
        }
        if let Storage::Transposed(transposed) = &*self.storage {
            scratch.resize(transposed.row_bytes(), 0);
            transposed.write_row(row, scratch);
            return scratch;
        }
        let row_bytes = self.num_bytes() / self.shape[0];
        &self.bytes()[row * row_bytes..][..row_bytes]
    }

    /// Reads one row of a matrix as f32.
    pub fn read_row(&self, row: usize, scratch: &mut Vec<u8>, out: &mut [f32]) {
        let bytes = self.row(row, scratch);
        assert_eq!(bytes.len(), out.len() * self.dtype.size());
        match self.dtype {
            DType::F32 => {
                for (value, bytes) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                    *value = f32::from_le_bytes(*bytes);
                }
            }
            DType::F16 => {
                for (value, bytes) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *value = f16::from_le_bytes(*bytes).to_f32();
                }
            }
            DType::Bf16 => {
                for (value, bytes) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *value = bf16::from_le_bytes(*bytes).to_f32();
                }
            }
        }
    }

    /// The stored blocks, for a tensor of a GGUF file in a block format.
    pub fn blocks(&self) -> Option<&BlockTensor> {
        match &*self.storage {
            Storage::Blocks(blocks) => Some(blocks),
            _ => None,
        }
    }

    /// Whether the checkpoint stores the values with fewer bits than `dtype`.
    pub fn is_quantised(&self) -> bool {
        match &*self.storage {
            Storage::Blocks(blocks) => blocks.format.block_len() > 1,
            Storage::Packed(_) => true,
            _ => false,
        }
    }

    /// The format of the stored integers and scales, if any.
    pub fn group_format(&self) -> Option<GroupFormat> {
        match &*self.storage {
            Storage::Blocks(blocks) => blocks.group_format(),
            Storage::Packed(packed) => packed.group_format(),
            _ => None,
        }
    }

    /// Whether the checkpoint stores 8-bit integers with per-channel scales, which executors use
    /// unchanged.
    pub fn has_int8_rows(&self) -> bool {
        let Storage::Packed(packed) = &*self.storage else {
            return false;
        };
        let format = packed.group_format();
        format.is_some_and(|format| format.bits == 8 && format.group_len == self.shape[1])
    }

    /// Reads a row of a tensor that has a `group_format`.
    pub fn read_groups(&self, row: usize, out: &mut GroupedRow) {
        match &*self.storage {
            Storage::Blocks(blocks) => blocks.read_groups(row, out),
            Storage::Packed(packed) => packed.read_groups(row, out),
            _ => panic!("the tensor has no groups of integers"),
        }
    }

    /// A vector in f32 with converted elements.
    pub(crate) fn converted(&self, conversion: fn(f32) -> f32) -> Self {
        Self {
            range: 0..self.shape.iter().product::<usize>() * DType::F32.size(),
            dtype: DType::F32,
            shape: self.shape.clone(),
            storage: Arc::new(Storage::Converted(Box::new(ConvertedTensor::new(
                self.clone(),
                conversion,
            )))),
        }
    }

    /// The bytes of this tensor in the checkpoint's files.
    pub fn stored_bytes(&self) -> usize {
        match &*self.storage {
            Storage::Blocks(blocks) => blocks.stored_bytes(),
            Storage::Packed(packed) => packed.stored_bytes(),
            Storage::Converted(converted) => converted.stored.stored_bytes(),
            _ => self.num_bytes(),
        }
    }

    /// Checks the shape, and that all bytes are present. `Err` names the tensor.
    pub fn check_shape(&self, name: impl Display, shape: &[usize]) -> Result<(), String> {
        let num_bytes = shape.iter().product::<usize>() * self.dtype.size();
        if self.shape != shape || self.num_bytes() != num_bytes {
            return Err(format!(
                "{name} has shape {:?} and {} bytes; the model needs shape {shape:?}",
                self.shape,
                self.num_bytes()
            ));
        }
        Ok(())
    }

    /// Releases the tensor's memory where possible. Call it after packing.
    pub fn release(&self) {
        self.storage.release(self.range.clone());
    }
}
