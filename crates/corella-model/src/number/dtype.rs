//! The types of weights, activations, keys and values.

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
