//! Named, typed views of a checkpoint's bytes. Nothing is copied until an executor packs it.

use std::ops::Range;
use std::sync::Arc;

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

/// What an executor keeps the weights of matrices in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightFormat {
    Float(DType),
    /// Integers of 8 bits, times a scale for each output; what they are multiplied with is rounded
    /// to 8 bits as well, times a scale for each row.
    Int8,
}

impl WeightFormat {
    /// Of one weight, without the scales.
    pub fn num_bits(self) -> usize {
        match self {
            Self::Float(dtype) => 8 * dtype.size(),
            Self::Int8 => 8,
        }
    }
}

/// Where bytes live.
pub enum Storage {
    Mapped(memmap2::Mmap),
    Static(&'static [u8]),
    Owned(Vec<u8>),
}

impl Storage {
    pub fn bytes(&self) -> &[u8] {
        match self {
            Self::Mapped(map) => map,
            Self::Static(bytes) => bytes,
            Self::Owned(bytes) => bytes,
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
    /// Little-endian bytes, `shape.product() * dtype.size()` of them.
    pub fn bytes(&self) -> &[u8] {
        &self.storage.bytes()[self.range.clone()]
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
