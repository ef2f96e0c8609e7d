//! The weights of a recurrent layer apart from its matrices, in f32.

use corella_model::{
    GatedDeltaSpec, LayerTensor, LayerWeights, RecurrentSpec, ShortConvolutionSpec, Tensor,
};

use super::lane::elements;
use super::norm::PackedNorm;

/// The largest number of tokens that a convolution reads.
pub const MAX_KERNEL_LEN: usize = 16;

pub enum PackedRecurrent {
    GatedDelta(PackedDelta),
    ShortConvolution(PackedConvolution),
}

pub struct PackedDelta {
    /// `[token][channel]`, the oldest token first.
    pub convolution: Vec<f32>,
    pub decay_bias: Vec<f32>,
    /// The factors of the logarithms of decays.
    pub rates: Vec<f32>,
    pub norm: PackedNorm,
}

pub struct PackedConvolution {
    /// `[token][channel]`, the oldest token first.
    pub by_token: Vec<f32>,
    /// Empty for a convolution without biases.
    pub bias: Vec<f32>,
}

impl PackedRecurrent {
    /// Packs a layer whose tensors were checked.
    pub fn new(spec: &RecurrentSpec, layer: &LayerWeights) -> Self {
        match spec {
            RecurrentSpec::GatedDelta(spec) => Self::GatedDelta(PackedDelta::new(spec, layer)),
            RecurrentSpec::ShortConvolution(spec) => {
                Self::ShortConvolution(PackedConvolution::new(spec, layer))
            }
        }
    }

    pub fn num_bytes(&self) -> usize {
        let vectors = match self {
            Self::GatedDelta(it) => vec![&it.convolution, &it.decay_bias, &it.rates],
            Self::ShortConvolution(it) => vec![&it.by_token, &it.bias],
        };
        let bytes = vectors.iter().map(|values| size_of_val(&values[..]));
        bytes.sum()
    }
}

impl PackedDelta {
    fn new(spec: &GatedDeltaSpec, layer: &LayerWeights) -> Self {
        let rates = elements(&layer[LayerTensor::DeltaRate]);
        Self {
            convolution: by_token(&layer[LayerTensor::DeltaConvolution], spec.kernel_len),
            decay_bias: elements(&layer[LayerTensor::DeltaDecayBias]),
            rates: rates.iter().map(|rate| -rate.exp()).collect(),
            norm: PackedNorm::of_layer(spec.norm, layer, LayerTensor::DeltaNorm),
        }
    }
}

impl PackedConvolution {
    fn new(spec: &ShortConvolutionSpec, layer: &LayerWeights) -> Self {
        let bias = layer.get(LayerTensor::ConvolutionBias);
        Self {
            by_token: by_token(&layer[LayerTensor::Convolution], spec.kernel_len),
            bias: bias.map_or(Vec::new(), elements),
        }
    }
}

/// Reorders a convolution `[channel][token]` for its computation.
fn by_token(convolution: &Tensor, kernel_len: usize) -> Vec<f32> {
    let by_channel = elements(convolution);
    let token = |token| by_channel.iter().skip(token).step_by(kernel_len);
    (0..kernel_len).flat_map(token).copied().collect()
}
