//! Named, typed views of a checkpoint's bytes. Nothing is copied until an executor packs it.

use std::ops::Range;
use std::sync::Arc;

use half::{bf16, f16};

use crate::block_tensor::BlockTensor;
use crate::packed_tensor::PackedTensor;
use crate::{DecoderSpec, GroupFormat, GroupedRow};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DType {
    F32,
    F16,
    Bf16,
}

impl DType {
    pub fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

/// What an executor keeps keys and values in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvFormat {
    Float(DType),
    /// Integers of 8 bits, times a scale for each token and KV head, one for the key and one for the
    /// value: the largest magnitude is 127.
    Int8,
}

impl KvFormat {
    /// Of one element.
    pub fn size(self) -> usize {
        match self {
            Self::Float(dtype) => dtype.size(),
            Self::Int8 => 1,
        }
    }

    /// Of a key or a value of `head_dim` elements, with its scale.
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

/// What an executor keeps the weights of matrices in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightFormat {
    Float(DType),
    /// Integers of 8 bits, times a scale for each output; what they are multiplied with is rounded
    /// to 8 bits as well, times a scale for each row.
    Int8,
    /// The same with a scale for each `group_len` weights of an output.
    Int8Grouped {
        group_len: usize,
    },
    /// Integers of 4 bits, times a scale for each `group_len` weights of an output; what they are
    /// multiplied with is rounded as for `Int8`.
    Int4 {
        group_len: usize,
    },
}

impl WeightFormat {
    /// Whether steps multiply integers.
    pub fn has_integers(self) -> bool {
        !matches!(self, Self::Float(_))
    }

    /// Of so many weights, with the scales of their groups; those of outputs do not show.
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
    /// Smaller groups cost memory, larger ones quality.
    pub const INT4: Self = Self::Int4 { group_len: 128 };
    pub const INT8_GROUPED: Self = Self::Int8Grouped { group_len: 128 };
}

/// Where bytes live.
pub enum Storage {
    Mapped(memmap2::Mmap),
    Static(&'static [u8]),
    Owned(Vec<u8>),
    /// Elsewhere, in another form.
    Blocks(BlockTensor),
    /// Elsewhere, as integers and scales.
    Packed(PackedTensor),
}

impl Storage {
    /// Of blocks and integers, their values: computed when first asked for, and then kept.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Self::Mapped(map) => map,
            Self::Static(bytes) => bytes,
            Self::Owned(bytes) => bytes,
            Self::Blocks(blocks) => blocks.values(),
            Self::Packed(packed) => packed.values(),
        }
    }

    /// Lets go of the memory behind mapped bytes; they are read again when they are needed.
    pub fn release(&self, range: Range<usize>) {
        match self {
            #[cfg(unix)]
            Self::Mapped(map) => {
                let advice = memmap2::UncheckedAdvice::DontNeed;
                // SAFETY: the map is shared and read only, so a page that is dropped comes back
                // from the file with the bytes it had. That it fails changes nothing.
                let _ = unsafe { map.unchecked_advise_range(advice, range.start, range.len()) };
            }
            Self::Blocks(blocks) => blocks.release(),
            Self::Packed(packed) => packed.release(),
            _ => {}
        }
    }
}

/// A dense row-major tensor. The data may be unaligned.
#[derive(Clone)]
pub struct Tensor {
    pub storage: Arc<Storage>,
    pub range: Range<usize>,
    pub dtype: DType,
    pub shape: Vec<usize>,
}

impl Tensor {
    /// Little-endian bytes, `num_bytes` of them. Of blocks and integers, `row` is the cheaper way.
    pub fn bytes(&self) -> &[u8] {
        &self.storage.bytes()[self.range.clone()]
    }

    /// `shape.product() * dtype.size()`
    pub fn num_bytes(&self) -> usize {
        self.range.len()
    }

    /// The bytes of one row of a matrix. `scratch` is where they are written if they are not
    /// to be had as they are.
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
        let row_bytes = self.num_bytes() / self.shape[0];
        &self.bytes()[row * row_bytes..][..row_bytes]
    }

    /// The values of one row of a matrix.
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

    /// What the checkpoint stores, where that is not these numbers themselves.
    pub fn blocks(&self) -> Option<&BlockTensor> {
        match &*self.storage {
            Storage::Blocks(blocks) => Some(blocks),
            _ => None,
        }
    }

    /// Whether the checkpoint stores something smaller, which values are worked out of.
    pub fn is_quantised(&self) -> bool {
        match &*self.storage {
            Storage::Blocks(blocks) => blocks.format.block_len() > 1,
            Storage::Packed(_) => true,
            _ => false,
        }
    }

    /// `None` where integers and scales are not what the checkpoint stores.
    pub fn group_format(&self) -> Option<GroupFormat> {
        match &*self.storage {
            Storage::Blocks(blocks) => blocks.format.group_format(),
            Storage::Packed(packed) => packed.group_format(),
            _ => None,
        }
    }

    /// Groups that an executor computes with unless told otherwise. Small ones of 8 bits take long
    /// to scale, and with one scale an output little is lost.
    pub fn kept_groups(&self) -> Option<GroupFormat> {
        let format = self.group_format()?;
        let is_kept = format.bits == 4 || (format.group_len >= 128 && !self.has_int8_rows());
        is_kept.then_some(format)
    }

    /// Integers of 8 bits with one scale for each row, made to be computed with.
    pub fn has_int8_rows(&self) -> bool {
        let Storage::Packed(packed) = &*self.storage else {
            return false;
        };
        let format = packed.group_format();
        format.is_some_and(|format| format.bits == 8 && format.group_len == self.shape[1])
    }

    /// A row of a tensor with a `group_format`.
    pub fn read_groups(&self, row: usize, out: &mut GroupedRow) {
        match &*self.storage {
            Storage::Blocks(blocks) => blocks.format.read_groups(blocks.stored_row(row), out),
            Storage::Packed(packed) => packed.read_groups(row, out),
            _ => panic!("a tensor without groups"),
        }
    }

    /// To be called when the tensor has been packed.
    pub fn release(&self) {
        self.storage.release(self.range.clone());
    }
}

/// A decoder's weights under the names this project uses. Matrices are `[out, in]`.
#[derive(Clone)]
pub struct DecoderWeights {
    pub embed: Tensor,
    pub layers: Vec<LayerWeights>,
    pub norm: Tensor,
    /// Absent when tied.
    pub lm_head: Option<Tensor>,
}

impl DecoderWeights {
    /// What keeps the matrices as the checkpoint has them, or nearly so: of a checkpoint of several
    /// formats, the one that most bytes are saved by. Integers and blocks of more than 4 bits are
    /// computed with in 8, as who stored all matrices so expects of memory and speed.
    pub fn format(&self) -> WeightFormat {
        let head = self.lm_head.as_ref().unwrap_or(&self.embed);
        let layers = || self.layers.iter().flat_map(LayerWeights::matrices);
        let groups = || layers().chain([head]).filter_map(Tensor::kept_groups);
        let group_len = |bits| {
            let groups = groups().filter(|groups| groups.bits == bits);
            groups.map(|groups| groups.group_len).min()
        };
        let are_quantised = layers().all(Tensor::is_quantised) && !self.layers.is_empty();
        match (group_len(4), group_len(8)) {
            (Some(group_len), _) => WeightFormat::Int4 { group_len },
            (None, Some(group_len)) if are_quantised => WeightFormat::Int8Grouped { group_len },
            (None, None) if are_quantised => WeightFormat::Int8,
            _ => WeightFormat::Float(self.embed.dtype),
        }
    }
}

#[derive(Clone)]
pub struct LayerWeights {
    pub attention_norm: Tensor,
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub o: Tensor,
    pub q_bias: Option<Tensor>,
    pub k_bias: Option<Tensor>,
    pub v_bias: Option<Tensor>,
    pub o_bias: Option<Tensor>,
    pub q_norm: Option<Tensor>,
    pub k_norm: Option<Tensor>,
    pub mlp_norm: Tensor,
    pub gate: Tensor,
    pub up: Tensor,
    pub down: Tensor,
    pub gate_bias: Option<Tensor>,
    pub up_bias: Option<Tensor>,
    pub down_bias: Option<Tensor>,
}

/// What goes into a layer's matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerInput {
    /// Queries, keys and values.
    Attention,
    AttentionOutput,
    /// Gate and up.
    Mlp,
    MlpOutput,
}

impl LayerInput {
    pub const ALL: [Self; 4] = [
        Self::Attention,
        Self::AttentionOutput,
        Self::Mlp,
        Self::MlpOutput,
    ];

    /// In the order of `LayerWeights::matrices`.
    pub const OF_MATRICES: [Self; 7] = [
        Self::Attention,
        Self::Attention,
        Self::Attention,
        Self::AttentionOutput,
        Self::Mlp,
        Self::Mlp,
        Self::MlpOutput,
    ];

    pub fn len(self, spec: &DecoderSpec) -> usize {
        match self {
            Self::Attention | Self::Mlp => spec.hidden_size,
            Self::AttentionOutput => spec.attention.num_heads * spec.attention.head_dim,
            Self::MlpOutput => spec.mlp.intermediate_size,
        }
    }
}

impl LayerWeights {
    pub fn matrices_mut(&mut self) -> [&mut Tensor; 7] {
        [
            &mut self.q,
            &mut self.k,
            &mut self.v,
            &mut self.o,
            &mut self.gate,
            &mut self.up,
            &mut self.down,
        ]
    }

    pub fn matrices(&self) -> [&Tensor; 7] {
        [
            &self.q, &self.k, &self.v, &self.o, &self.gate, &self.up, &self.down,
        ]
    }
}
