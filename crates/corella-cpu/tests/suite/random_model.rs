//! Tiny decoders with random weights, for any spec.

use std::sync::Arc;

use corella_model::{
    DType, DecoderSpec, DecoderWeights, LayerSpec, LayerTensor, LayerWeights, Storage, Tensor,
    TensorSpec,
};

/// Numbers from a seed, by SplitMix64.
struct Random(u64);

impl Random {
    /// A number between -1 and 1.
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ z >> 31) >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn tensor(&mut self, shape: &[usize], around: f32, scale: f32) -> Tensor {
        let len: usize = shape.iter().product();
        let values = (0..len).map(|_| around + scale * self.next());
        let bytes: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
        Tensor {
            range: 0..bytes.len(),
            storage: Arc::new(Storage::Owned(bytes)),
            dtype: DType::F32,
            shape: shape.to_vec(),
        }
    }

    /// Outputs of a matrix have about the variance of its inputs.
    fn matrix(&mut self, shape: &[usize]) -> Tensor {
        self.tensor(shape, 0.0, (3.0 / shape[1] as f32).sqrt())
    }

    fn bias(&mut self, len: usize) -> Tensor {
        self.tensor(&[len], 0.0, 0.3)
    }

    fn norm(&mut self, len: usize) -> Tensor {
        self.tensor(&[len], 1.0, 0.5)
    }

    fn layer(&mut self, spec: &LayerSpec, hidden: usize) -> LayerWeights {
        let mut layer = LayerWeights::default();
        for TensorSpec { tensor, shape } in spec.tensors(hidden) {
            let is_bias = tensor.owner().is_some() || tensor == LayerTensor::SelectionBias;
            let values = match shape[..] {
                [_, _] => self.matrix(&shape),
                _ if tensor == LayerTensor::SharedWeight => self.tensor(&shape, 0.0, 0.5),
                [len] if is_bias => self.bias(len),
                [len] => self.norm(len),
                _ => panic!("{tensor} has shape {shape:?}"),
            };
            layer.insert(tensor, values);
        }
        layer
    }
}

/// Random weights for a spec.
pub fn random_weights(spec: &DecoderSpec, seed: u64) -> DecoderWeights {
    let mut random = Random(seed);
    let hidden = spec.hidden_size;
    DecoderWeights {
        embed: random.tensor(&[spec.vocab_size, hidden], 0.0, 1.0),
        positions: (spec.learned_positions)
            .then(|| random.tensor(&[spec.max_position, hidden], 0.0, 1.0)),
        layers: (spec.layers.iter())
            .map(|layer| random.layer(layer, hidden))
            .collect(),
        norm: random.norm(hidden),
        norm_bias: spec.norm.has_bias().then(|| random.bias(hidden)),
        encoder: Default::default(),
        lm_head: (!spec.tied_embeddings).then(|| random.matrix(&[spec.vocab_size, hidden])),
        per_layer: None,
        draft_head: None,
        left_out: Vec::new(),
        files: None,
    }
}
