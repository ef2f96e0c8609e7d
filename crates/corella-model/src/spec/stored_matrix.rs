//! The stored form of the matrices of dense layers, and the formats that keep it.

use crate::{
    DType, DecoderWeights, GroupFormat, LayerInput, LayerWeights, Tensor, TensorRole, WeightFormat,
};

/// The stored form of a matrix.
#[derive(Clone, Copy, Debug)]
pub struct StoredMatrix {
    /// The type of its elements, or the type to which its integers are decoded.
    pub dtype: DType,
    /// Whether the checkpoint stores the elements with fewer bits than `dtype`.
    pub is_quantised: bool,
    pub groups: Option<GroupFormat>,
    /// Whether the matrix consists of 8-bit integers with a scale per output channel.
    pub has_int8_rows: bool,
}

impl StoredMatrix {
    pub fn floats(dtype: DType) -> Self {
        Self {
            dtype,
            is_quantised: false,
            groups: None,
            has_int8_rows: false,
        }
    }

    /// The groups that are kept by default.
    pub fn kept_groups(&self) -> Option<GroupFormat> {
        let is_long = |groups: &GroupFormat| groups.group_len >= 128 && !self.has_int8_rows;
        self.groups
            .filter(|groups| groups.bits == 4 || is_long(groups))
    }
}

impl From<&Tensor> for StoredMatrix {
    fn from(tensor: &Tensor) -> Self {
        Self {
            dtype: tensor.dtype,
            is_quantised: tensor.is_quantised(),
            groups: tensor.group_format(),
            has_int8_rows: tensor.has_int8_rows(),
        }
    }
}

/// The stored matrices of dense layers.
pub struct StoredMatrices {
    /// The matrices of layers, without the experts' matrices.
    pub layers: Vec<StoredMatrix>,
    pub experts: Vec<StoredMatrix>,
    pub head: StoredMatrix,
}

impl StoredMatrices {
    pub fn new<'a>(layers: impl IntoIterator<Item = &'a LayerWeights>, head: &Tensor) -> Self {
        let mut stored = Self {
            layers: Vec::new(),
            experts: Vec::new(),
            head: StoredMatrix::from(head),
        };
        for (tensor, values) in layers.into_iter().flat_map(LayerWeights::iter) {
            let TensorRole::Matrix(input) = tensor.role() else {
                continue;
            };
            let of_experts = matches!(input, LayerInput::Expert | LayerInput::ExpertOutput);
            let matrices = match of_experts {
                true => &mut stored.experts,
                false => &mut stored.layers,
            };
            matrices.push(StoredMatrix::from(values));
        }
        stored
    }

    /// The format of integers that keeps matrices in their stored form, or nearly so. Of several such formats, the
    /// smallest. `None` if matrices of the layers stay floats.
    pub fn integer_format(&self) -> Option<WeightFormat> {
        let of_layers = || self.layers.iter().chain(&self.experts);
        let group_len = |bits| {
            let groups = of_layers().chain([&self.head]);
            let groups = groups.filter_map(StoredMatrix::kept_groups);
            let groups = groups.filter(|groups| groups.bits == bits);
            groups.map(|groups| groups.group_len).min()
        };
        let are_quantised =
            of_layers().all(|matrix| matrix.is_quantised) && !self.layers.is_empty();
        match (group_len(4), group_len(8)) {
            (Some(group_len), _) => Some(WeightFormat::Int4 { group_len }),
            (None, _) if !are_quantised => None,
            (None, Some(group_len)) => Some(WeightFormat::Int8Grouped { group_len }),
            (None, None) => Some(WeightFormat::Int8),
        }
    }
}

impl DecoderWeights {
    /// Returns the format that is nearest to the stored one. Of several, the smallest.
    pub fn stored_format(&self) -> WeightFormat {
        let head = self.lm_head.as_ref().unwrap_or(&self.embed);
        let integers = StoredMatrices::new(&self.layers, head).integer_format();
        integers.unwrap_or(WeightFormat::Float(self.embed.dtype))
    }
}
