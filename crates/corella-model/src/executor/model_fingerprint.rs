//! The fingerprint of a model, for comparison between two nodes.

use std::fmt;

use xxhash_rust::xxh3::Xxh3;

use crate::generator::mix;
use crate::kv::state_record::RECORD_VERSION;
use crate::{DecoderSpec, DecoderWeights, Tensor};

/// A digest of a checkpoint: its shape, and a sample of every stored tensor. The same weights in another format are
/// another model, because their results differ. The digest does not resist deliberate collisions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ModelFingerprint(pub u128);

/// The number of sampled bytes of a tensor. Training changes nearly all numbers of the matrices that it changes.
const SAMPLE_BYTES: usize = 256;

impl ModelFingerprint {
    /// Makes the fingerprint. It reads so little of the weights that the cost at start is negligible.
    pub fn new(spec: &DecoderSpec, weights: &DecoderWeights) -> Self {
        let mut hasher = Xxh3::new();
        // A model with a draft head computes the same as without it.
        let spec = DecoderSpec {
            draft_head: None,
            ..spec.clone()
        };
        // Any difference counts, also in fields added later.
        hasher.update(format!("{spec:?}").as_bytes());
        if spec.is_recurrent() {
            hasher.update(&RECORD_VERSION.to_le_bytes());
        }
        let mut scratch = Vec::new();
        for (index, (name, tensor)) in tensors(weights).enumerate() {
            // The set of tensors is part of the fingerprint.
            hasher.update(format!("{name} {:?} {:?}", tensor.dtype, tensor.shape).as_bytes());
            hasher.update(sample(tensor, index, &mut scratch));
        }
        Self(hasher.digest128())
    }
}

impl fmt::Display for ModelFingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// The beginning of a vector, or of one row of a matrix. The row differs from tensor to tensor.
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

/// All tensors of a model in a fixed order, with names that tell them apart.
fn tensors(weights: &DecoderWeights) -> impl Iterator<Item = (String, &Tensor)> {
    let per_layer = weights.per_layer.as_ref();
    let ends = [
        ("embed", Some(&weights.embed)),
        ("positions", weights.positions.as_ref()),
        ("norm", Some(&weights.norm)),
        ("norm_bias", weights.norm_bias.as_ref()),
        ("lm_head", weights.lm_head.as_ref()),
        ("per_layer.table", per_layer.map(|it| &it.table)),
        ("per_layer.projection", per_layer.map(|it| &it.projection)),
        ("per_layer.norm", per_layer.map(|it| &it.norm)),
    ];
    let ends = ends
        .into_iter()
        .filter_map(|(name, tensor)| Some((name.to_owned(), tensor?)));
    let encoder = weights.encoder.iter();
    let ends = ends.chain(encoder.map(|(name, tensor)| (name.to_owned(), tensor)));
    let layers = weights.layers.iter().enumerate();
    ends.chain(layers.flat_map(|(index, layer)| {
        let tensors = layer.iter();
        tensors.map(move |(tensor, values)| (format!("{index}.{tensor}"), values))
    }))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::path::Path;
    use std::sync::Arc;

    use super::*;
    use crate::{Checkpoint, LayerTensor, Storage};

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

    /// Each changed tensor differs in every number, as after another training.
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
        let others: [Find; 3] = [
            |weights| &mut weights.embed,
            |weights| &mut weights.norm,
            |weights| weights.lm_head.as_mut().unwrap(),
        ];
        for (i, find) in others.into_iter().enumerate() {
            let mut changed = weights.clone();
            change(find(&mut changed));
            assert_ne!(ModelFingerprint::new(&spec, &changed), original, "{i}");
        }
        let of_layer: Vec<_> = weights.layers[0].iter().map(|(name, _)| name).collect();
        assert_eq!(of_layer.len(), 12);
        for name in of_layer {
            let mut changed = weights.clone();
            change(changed.layers[0].get_mut(name).unwrap());
            assert_ne!(ModelFingerprint::new(&spec, &changed), original, "{name}");
        }
        let mut changed = weights.clone();
        changed.layers[0].remove(LayerTensor::QBias);
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
