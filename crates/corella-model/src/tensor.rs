//! Named, typed views of a checkpoint's bytes. They are not copied until an executor packs them.

use std::fmt::Display;
use std::ops::Range;
use std::sync::Arc;

use half::{bf16, f16};

use crate::block_tensor::BlockTensor;
use crate::converted_tensor::ConvertedTensor;
use crate::packed_tensor::PackedTensor;
use crate::transposed_tensor::TransposedTensor;
use crate::{EncoderWeights, GroupFormat, GroupedRow, LayerWeights};

/// A floating-point type of weights or activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DType {
    F32,
    F16,
    Bf16,
}

impl DType {
    /// The size of an element, in bytes.
    pub fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// The name in options.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }
}

/// The format in which an executor stores keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvFormat {
    Float(DType),
    /// 8-bit integers with one scale per token, KV head and side (key or value): the largest
    /// magnitude becomes 127.
    Int8,
}

impl KvFormat {
    /// The size of an element, in bytes.
    pub fn size(self) -> usize {
        match self {
            Self::Float(dtype) => dtype.size(),
            Self::Int8 => 1,
        }
    }

    /// The name in options.
    pub fn name(self) -> &'static str {
        match self {
            Self::Float(dtype) => dtype.name(),
            Self::Int8 => "int8",
        }
    }

    /// The size of a key or a value of `head_dim` elements with its scale, in bytes.
    pub fn row_bytes(self, head_dim: usize) -> usize {
        let scale = match self {
            Self::Float(_) => 0,
            Self::Int8 => size_of::<f32>(),
        };
        head_dim * self.size() + scale
    }
}

impl From<DType> for KvFormat {
    fn from(dtype: DType) -> Self {
        Self::Float(dtype)
    }
}

/// The format in which an executor stores the weights of matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightFormat {
    Float(DType),
    /// 8-bit integers with per-channel scales. Activations are rounded to 8 bits as well, with a
    /// scale per row.
    Int8,
    /// 8-bit integers with one scale per `group_len` weights of an output channel.
    Int8Grouped {
        group_len: usize,
    },
    /// 4-bit integers with one scale per `group_len` weights of an output channel. Activations are
    /// rounded as for `Int8`.
    Int4 {
        group_len: usize,
    },
}

impl WeightFormat {
    /// Whether matrix products multiply integers.
    pub fn has_integers(self) -> bool {
        !matches!(self, Self::Float(_))
    }

    /// The name in options, without the length of groups.
    pub fn name(self) -> &'static str {
        match self {
            Self::Float(dtype) => dtype.name(),
            Self::Int8 => "int8",
            Self::Int8Grouped { .. } => "int8-grouped",
            Self::Int4 { .. } => "int4",
        }
    }

    /// The size of weights with the scales of their groups, in bytes. Per-channel scales are too
    /// few to count.
    pub fn num_bytes(self, num_weights: usize) -> usize {
        match self {
            Self::Float(dtype) => num_weights * dtype.size(),
            Self::Int8 => num_weights,
            Self::Int8Grouped { group_len } => num_weights + num_weights / group_len * 2,
            Self::Int4 { group_len } => num_weights / 2 + num_weights / group_len * 2,
        }
    }
}

impl WeightFormat {
    /// The default for 4 bits. Smaller groups cost memory, larger ones quality.
    pub const INT4: Self = Self::Int4 { group_len: 128 };
    /// The default for 8 bits with group-wise scales.
    pub const INT8_GROUPED: Self = Self::Int8Grouped { group_len: 128 };
}

/// The place of a tensor's bytes.
pub enum Storage {
    Mapped(memmap2::Mmap),
    Static(&'static [u8]),
    Owned(Vec<u8>),
    /// The values of a block-quantised tensor, dequantised on demand.
    Blocks(BlockTensor),
    /// The values of a tensor of integers and scales, dequantised on demand.
    Packed(Box<PackedTensor>),
    /// The values of a matrix that is stored column by column.
    Transposed(TransposedTensor),
    /// The values of a vector that is stored in another form.
    Converted(Box<ConvertedTensor>),
}

impl Storage {
    /// All bytes. Bytes of quantised tensors are computed on first use and then kept.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Self::Mapped(map) => map,
            Self::Static(bytes) => bytes,
            Self::Owned(bytes) => bytes,
            Self::Blocks(blocks) => blocks.values(),
            Self::Packed(packed) => packed.values(),
            Self::Transposed(transposed) => transposed.values(),
            Self::Converted(converted) => converted.values(),
        }
    }

    /// Releases the memory of mapped bytes, which are read from the file again when needed.
    pub fn release(&self, range: Range<usize>) {
        match self {
            #[cfg(unix)]
            Self::Mapped(map) => {
                let advice = memmap2::UncheckedAdvice::DontNeed;
                // SAFETY: the map is shared and read only, so a released page is read again from
                // the file with the same bytes. A failure leaves the map unchanged.
                let _ = unsafe { map.unchecked_advise_range(advice, range.start, range.len()) };
            }
            Self::Blocks(blocks) => blocks.release(),
            Self::Packed(packed) => packed.release(),
            Self::Transposed(transposed) => transposed.release(),
            _ => {}
        }
    }
}

/// A dense row-major tensor, whose bytes may be unaligned.
#[derive(Clone)]
pub struct Tensor {
    pub storage: Arc<Storage>,
    pub range: Range<usize>,
    pub dtype: DType,
    pub shape: Vec<usize>,
}

impl Tensor {
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

    /// Whether the checkpoint stores fewer bits, from which the values are computed.
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

/// The sources of the layers' own inputs. A row has the inputs of all layers, one after the other.
#[derive(Clone)]
pub struct PerLayerWeights {
    /// The looked-up half, `[token][layer][element]`.
    pub table: Tensor,
    /// The projection of embeddings.
    pub projection: Tensor,
    /// The norm of the projected half, which all layers share.
    pub norm: Tensor,
}

/// The weights of a draft head. It shares the model's embedding and output head.
#[derive(Clone)]
pub struct DraftHeadWeights {
    /// The norm of a token's embedding.
    pub embedding_norm: Tensor,
    /// The norm of the previous token's hidden state, which already has the model's final norm.
    pub hidden_norm: Tensor,
    /// The projection of both to the input, `[hidden_size, 2 * hidden_size]`, embedding first.
    pub join: Tensor,
    pub layer: LayerWeights,
    /// The norm before the output head.
    pub norm: Tensor,
}

/// A decoder's weights under this project's own names. Matrices are `[out, in]`.
#[derive(Clone)]
pub struct DecoderWeights {
    pub embed: Tensor,
    /// The table of learned positions.
    pub positions: Option<Tensor>,
    pub layers: Vec<LayerWeights>,
    pub norm: Tensor,
    pub norm_bias: Option<Tensor>,
    /// The output head; `None` if it is tied to the embedding.
    pub lm_head: Option<Tensor>,
    /// The weights of encoders only; empty for a decoder.
    pub encoder: EncoderWeights,
    /// The sources of the layers' own inputs, if any.
    pub per_layer: Option<PerLayerWeights>,
    /// The draft head, if requested.
    pub draft_head: Option<DraftHeadWeights>,
    /// The names of tensors of other parts of the model, such as vision.
    pub left_out: Vec<String>,
}
