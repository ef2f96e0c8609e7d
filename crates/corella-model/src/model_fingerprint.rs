//! Whether two nodes have the same model.

use std::fmt;

use xxhash_rust::xxh3::Xxh3;

use crate::generator::mix;
use crate::{DecoderSpec, DecoderWeights, LayerWeights, Tensor};

/// A digest of a checkpoint: its shape, and some of every tensor as it is stored. The same weights in
/// another format are another model, because what they compute differs. The digest is no defence
/// against somebody who wants two models to look the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ModelFingerprint(pub u128);

/// Bytes of a tensor that count. Training changes nearly all numbers of the matrices that it changes.
const SAMPLE_BYTES: usize = 256;

impl ModelFingerprint {
    /// Reads so little of the weights that a start does not notice.
    pub fn new(spec: &DecoderSpec, weights: &DecoderWeights) -> Self {
        let mut hasher = Xxh3::new();
        // Any difference counts, those of fields that are yet to come too.
        hasher.update(format!("{spec:?}").as_bytes());
        let mut scratch = Vec::new();
        for (index, tensor) in tensors(weights).enumerate() {
            // Which are there is part of it.
            hasher.update(&(index as u64).to_le_bytes());
            if let Some(tensor) = tensor {
                hasher.update(format!("{:?} {:?}", tensor.dtype, tensor.shape).as_bytes());
                hasher.update(sample(tensor, index, &mut scratch));
            }
        }
        Self(hasher.digest128())
    }
}

impl fmt::Display for ModelFingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// The beginning of a vector, or of one row of a matrix. Which row is used differs from tensor to
/// tensor.
fn sample<'a>(tensor: &'a Tensor, index: usize, scratch: &'a mut Vec<u8>) -> &'a [u8] {
    let bytes = match tensor.shape[..] {
        [num_rows, _, ..] if num_rows > 0 => {
            let row = mix(num_rows as u64, index as u64) % num_rows as u64;
            tensor.row(row as usize, scratch)
        }
        _ => tensor.bytes(),
    };
    &bytes[..bytes.len().min(SAMPLE_BYTES)]
}

/// All tensors that a model may have, in a fixed order.
fn tensors(weights: &DecoderWeights) -> impl Iterator<Item = Option<&Tensor>> {
    let ends = [
        Some(&weights.embed),
        Some(&weights.norm),
        weights.lm_head.as_ref(),
    ];
    ends.into_iter()
        .chain(weights.layers.iter().flat_map(of_layer))
}

fn of_layer(layer: &LayerWeights) -> impl Iterator<Item = Option<&Tensor>> {
    let vectors = [
        Some(&layer.attention_norm),
        Some(&layer.mlp_norm),
        layer.q_norm.as_ref(),
        layer.k_norm.as_ref(),
        layer.q_bias.as_ref(),
        layer.k_bias.as_ref(),
        layer.v_bias.as_ref(),
        layer.o_bias.as_ref(),
        layer.gate_bias.as_ref(),
        layer.up_bias.as_ref(),
        layer.down_bias.as_ref(),
    ];
    layer.matrices().map(Some).into_iter().chain(vectors)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::path::Path;
    use std::sync::Arc;

    use super::*;
    use crate::{Checkpoint, Storage};

    fn open(model: &str) -> (DecoderSpec, DecoderWeights) {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
        let checkpoint = Checkpoint::open(golden.join(model)).unwrap();
        (
            checkpoint.config().spec.clone(),
            checkpoint.weights().unwrap(),
        )
    }

    #[test]
    fn a_model_is_itself_and_no_other() {
        let models = [
            "llama-gqa-tied",
            "llama-gqa-tied-bf16",
            "llama-gqa-untied",
            "llama-mha-tied",
        ];
        let fingerprint = |model: &&str| {
            let (spec, weights) = open(model);
            ModelFingerprint::new(&spec, &weights)
        };
        let fingerprints: HashSet<_> = models.iter().map(fingerprint).collect();
        assert_eq!(fingerprints.len(), models.len());
        assert_eq!(fingerprints, models.iter().map(fingerprint).collect());
    }

    /// As when another training has changed every number of it a little.
    #[test]
    fn every_tensor_counts() {
        let (spec, weights) = open("qwen2-gqa-untied");
        let original = ModelFingerprint::new(&spec, &weights);
        let change = |tensor: &mut Tensor| {
            let bytes: Vec<u8> = tensor.bytes().iter().map(|byte| byte ^ 1).collect();
            tensor.range = 0..bytes.len();
            tensor.storage = Arc::new(Storage::Owned(bytes));
        };
        type Find = fn(&mut DecoderWeights) -> &mut Tensor;
        let others: [Find; 7] = [
            |weights| &mut weights.embed,
            |weights| &mut weights.norm,
            |weights| weights.lm_head.as_mut().unwrap(),
            |weights| &mut weights.layers[0].attention_norm,
            |weights| &mut weights.layers[0].mlp_norm,
            |weights| weights.layers[0].q_bias.as_mut().unwrap(),
            |weights| weights.layers[0].v_bias.as_mut().unwrap(),
        ];
        for (i, find) in others.into_iter().enumerate() {
            let mut changed = weights.clone();
            change(find(&mut changed));
            assert_ne!(ModelFingerprint::new(&spec, &changed), original, "{i}");
        }
        for i in 0..7 {
            let mut changed = weights.clone();
            change(changed.layers[0].matrices_mut()[i]);
            assert_ne!(
                ModelFingerprint::new(&spec, &changed),
                original,
                "matrix {i}"
            );
        }
        let mut changed = weights.clone();
        changed.layers[0].q_bias = None;
        assert_ne!(ModelFingerprint::new(&spec, &changed), original);
    }

    #[test]
    fn the_arithmetic_counts() {
        let (spec, weights) = open("llama-gqa-tied");
        let original = ModelFingerprint::new(&spec, &weights);
        let mut changed = spec.clone();
        let rotary = &mut changed.layers[0].attention.rotary;
        rotary.as_mut().unwrap().theta += 1.0;
        assert_ne!(ModelFingerprint::new(&changed, &weights), original);
        let mut changed = spec;
        changed.norm.eps *= 2.0;
        assert_ne!(ModelFingerprint::new(&changed, &weights), original);
    }
}
