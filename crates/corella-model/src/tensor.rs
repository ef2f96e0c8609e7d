//! Named, typed views of a checkpoint's bytes. Nothing is copied until an executor packs it.

use std::ops::Range;
use std::sync::Arc;

use crate::block_tensor::BlockTensor;
use crate::{GroupFormat, GroupedRow};

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
    /// Integers of 4 bits, times a scale for each `group_len` weights of an output; what they are
    /// multiplied with is rounded as for `Int8`.
    Int4 {
        group_len: usize,
    },
}

impl WeightFormat {
    /// Of so many weights, with the scales of their groups; those of outputs do not show.
    pub fn num_bytes(self, num_weights: usize) -> usize {
        match self {
            Self::Float(dtype) => num_weights * dtype.size(),
            Self::Int8 => num_weights,
            Self::Int4 { group_len } => num_weights / 2 + num_weights / group_len * 2,
        }
    }
}

impl WeightFormat {
    /// Smaller groups cost memory, larger ones quality.
    pub const INT4: Self = Self::Int4 { group_len: 32 };
}

/// Where bytes live.
pub enum Storage {
    Mapped(memmap2::Mmap),
    Static(&'static [u8]),
    Owned(Vec<u8>),
    /// Elsewhere, in another form.
    Blocks(BlockTensor),
}

impl Storage {
    /// Of blocks, their values: computed when first asked for, and then kept.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Self::Mapped(map) => map,
            Self::Static(bytes) => bytes,
            Self::Owned(bytes) => bytes,
            Self::Blocks(blocks) => blocks.values(),
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
    /// Little-endian bytes, `num_bytes` of them. Of blocks, `row` is the cheaper way.
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
        let row_bytes = self.num_bytes() / self.shape[0];
        &self.bytes()[row * row_bytes..][..row_bytes]
    }

    /// What the checkpoint stores, where that is not these numbers themselves.
    pub fn blocks(&self) -> Option<&BlockTensor> {
        match &*self.storage {
            Storage::Blocks(blocks) => Some(blocks),
            _ => None,
        }
    }

    /// `None` where integers and scales are not what the checkpoint stores.
    pub fn group_format(&self) -> Option<GroupFormat> {
        match &*self.storage {
            Storage::Blocks(blocks) => blocks.format.group_format(),
            _ => None,
        }
    }

    /// A row of a tensor with a `group_format`.
    pub fn read_groups(&self, row: usize, out: &mut GroupedRow) {
        match &*self.storage {
            Storage::Blocks(blocks) => blocks.format.read_groups(blocks.stored_row(row), out),
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
    /// What keeps the matrices as the checkpoint has them: of a checkpoint of several formats, the
    /// one that most bytes are saved by.
    pub fn format(&self) -> WeightFormat {
        let groups = self.matrices().filter_map(Tensor::group_format);
        match groups
            .filter(|groups| groups.bits == 4)
            .map(|groups| groups.group_len)
            .min()
        {
            Some(group_len) => WeightFormat::Int4 { group_len },
            None => WeightFormat::Float(self.embed.dtype),
        }
    }

    /// Those of the layers and of the head.
    pub fn matrices(&self) -> impl Iterator<Item = &Tensor> {
        let layers = self.layers.iter();
        layers
            .flat_map(|l| [&l.q, &l.k, &l.v, &l.o, &l.gate, &l.up, &l.down])
            .chain([self.lm_head.as_ref().unwrap_or(&self.embed)])
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
