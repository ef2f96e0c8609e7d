//! The weights of norms, in f32.

use corella_model::{BranchNorms, LayerTensor, LayerWeights, NormKind, NormSpec, Tensor};

use super::lane::elements;

/// A norm with its weights.
pub struct PackedNorm {
    pub spec: NormSpec,
    pub weight: Vec<f32>,
    /// The bias, added after the multiplication by the weights: zeros for a layer norm without one, empty for an RMS
    /// norm.
    pub bias: Vec<f32>,
}

/// The norms before and after a part of a layer.
pub struct PackedNorms {
    pub before: Option<PackedNorm>,
    pub after: Option<PackedNorm>,
}

impl PackedNorm {
    pub fn new(spec: NormSpec, weight: &Tensor, bias: Option<&Tensor>) -> Self {
        let weight = elements(weight);
        Self {
            bias: match (spec.kind, bias) {
                (NormKind::Rms, _) => Vec::new(),
                (NormKind::Layer { .. }, None) => vec![0.0; weight.len()],
                (NormKind::Layer { .. }, Some(bias)) => elements(bias),
            },
            spec,
            weight,
        }
    }

    /// A norm of a layer whose tensors were checked.
    pub fn of_layer(spec: NormSpec, layer: &LayerWeights, tensor: LayerTensor) -> Self {
        let bias = tensor.bias().and_then(|bias| layer.get(bias));
        Self::new(spec, &layer[tensor], bias)
    }
}

impl PackedNorms {
    pub fn new(spec: &BranchNorms, layer: &LayerWeights, tensors: [LayerTensor; 2]) -> Self {
        let [before, after] = tensors;
        let pack = |spec: Option<NormSpec>, tensor| {
            spec.map(|spec| PackedNorm::of_layer(spec, layer, tensor))
        };
        Self {
            before: pack(spec.before, before),
            after: pack(spec.after, after),
        }
    }
}
