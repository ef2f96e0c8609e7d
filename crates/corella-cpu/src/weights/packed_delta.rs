//! The weights of a gated delta network beside its matrices, in f32.

use corella_model::{GatedDeltaSpec, LayerTensor, LayerWeights};

use super::lane::elements;
use super::norm::PackedNorm;

/// The most tokens that a convolution reads.
pub const MAX_KERNEL_LEN: usize = 16;

pub struct PackedDelta {
    /// `[token][channel]`, the oldest token first.
    pub convolution: Vec<f32>,
    pub decay_bias: Vec<f32>,
    /// What the logarithms of decays are multiplied by.
    pub rates: Vec<f32>,
    pub norm: PackedNorm,
}

impl PackedDelta {
    /// Packs a layer whose tensors were checked.
    pub fn new(spec: &GatedDeltaSpec, layer: &LayerWeights) -> Self {
        let by_channel = elements(&layer[LayerTensor::DeltaConvolution]);
        let token = |token| by_channel.iter().skip(token).step_by(spec.kernel_len);
        let rates = elements(&layer[LayerTensor::DeltaRate]);
        Self {
            convolution: (0..spec.kernel_len).flat_map(token).copied().collect(),
            decay_bias: elements(&layer[LayerTensor::DeltaDecayBias]),
            rates: rates.iter().map(|rate| -rate.exp()).collect(),
            norm: PackedNorm::of_layer(spec.norm, layer, LayerTensor::DeltaNorm),
        }
    }

    pub fn num_bytes(&self) -> usize {
        let vectors = [&self.convolution, &self.decay_bias, &self.rates];
        vectors.map(|values| size_of_val(&values[..])).iter().sum()
    }
}
