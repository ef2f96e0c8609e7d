//! Shapes of common models, with random weights.

use std::sync::Arc;

use corella_model::{
    Activation, AttentionSpec, BlockFormat, BranchNorms, DecoderSpec, DecoderWeights, FeedForward,
    LayerSpec, LayerWeights, MlpSpec, NormSpec, QkNorm, RotarySpec, RowOrder, Storage, Tensor,
};

use super::random_bytes;

/// Hidden size, layers, query heads, KV heads, head size, intermediate size, vocabulary.
type Sizes = [usize; 7];

/// A model by its name: `qwen3-0.6b`, `llama-3-8b`, or `tiny`.
pub fn shape(name: &str) -> Option<DecoderSpec> {
    match name {
        "qwen3-0.6b" => {
            let sizes = [1024, 28, 16, 8, 128, 3072, 151_936];
            Some(decoder(sizes, 1e6, true, 40_960))
        }
        "llama-3-8b" => {
            let sizes = [4096, 32, 32, 8, 128, 14_336, 128_256];
            Some(decoder(sizes, 5e5, false, 8192 + 256))
        }
        "tiny" => Some(decoder([32, 2, 4, 2, 16, 48, 128], 1e4, false, 64)),
        _ => None,
    }
}

/// A decoder in the shape of Llama, or, with norms of queries and keys and tied embeddings, of Qwen3.
fn decoder(sizes: Sizes, theta: f64, is_qwen3: bool, max_position: usize) -> DecoderSpec {
    let [
        hidden_size,
        num_layers,
        num_heads,
        num_kv_heads,
        head_dim,
        intermediate_size,
        vocab_size,
    ] = sizes;
    let norm = NormSpec::rms(1e-6);
    let rotary = RotarySpec::plain(theta, head_dim);
    let attention = AttentionSpec {
        qk_norm: is_qwen3.then_some(QkNorm::Heads(norm)),
        ..AttentionSpec::plain(num_heads, num_kv_heads, head_dim, rotary)
    };
    let mlp = FeedForward::Mlp(MlpSpec::gated(intermediate_size, Activation::Silu));
    let layer = LayerSpec::plain(attention, BranchNorms::before(norm), mlp);
    let layers = vec![layer; num_layers];
    DecoderSpec {
        tied_embeddings: is_qwen3,
        ..DecoderSpec::plain(vocab_size, hidden_size, max_position, layers, norm)
    }
}

/// Weights in bf16, which share the same random numbers, so that they take little memory.
pub fn random_weights(spec: &DecoderSpec) -> DecoderWeights {
    let hidden = spec.hidden_size;
    let shapes: Vec<_> = spec
        .layers
        .iter()
        .map(|layer| layer.tensors(hidden))
        .collect();
    let embed_shape = vec![spec.vocab_size, hidden];
    let lens = shapes
        .iter()
        .flatten()
        .map(|tensor| tensor.shape.iter().product());
    let longest: usize = lens.chain([spec.vocab_size * hidden]).max().unwrap_or(0);
    let storage = Arc::new(Storage::Owned(random_bytes(2 * longest, 2)));
    let tensor = |shape: Vec<usize>| -> Tensor {
        let len: usize = shape.iter().product();
        let format = BlockFormat::Bf16;
        Tensor::of_blocks(&storage, 0..2 * len, format, RowOrder::AsStored, shape)
    };
    let layers = shapes.iter().map(|tensors| {
        let mut weights = LayerWeights::default();
        for spec in tensors {
            weights.insert(spec.tensor, tensor(spec.shape.clone()));
        }
        weights
    });
    DecoderWeights {
        layers: layers.collect(),
        embed: tensor(embed_shape.clone()),
        positions: { spec.learned_positions }.then(|| tensor(vec![spec.max_position, hidden])),
        norm: tensor(vec![hidden]),
        norm_bias: None,
        encoder: Default::default(),
        lm_head: (!spec.tied_embeddings).then(|| tensor(embed_shape)),
        per_layer: None,
        draft_head: None,
        left_out: Vec::new(),
        files: None,
    }
}
