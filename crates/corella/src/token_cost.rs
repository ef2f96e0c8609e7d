//! The least work that a token can take, to judge speeds by.

use corella_model::{DecoderSpec, KvFormat, WeightFormat};

/// Operations and bytes that any implementation of a model needs.
pub struct TokenCost<'a> {
    pub spec: &'a DecoderSpec,
    pub weight_format: WeightFormat,
    pub kv_format: KvFormat,
}

impl TokenCost<'_> {
    /// Weights of all matrices. Norms and biases are so few that they are not counted.
    pub fn num_weights(spec: &DecoderSpec) -> usize {
        let embeddings = match spec.tied_embeddings {
            true => 1,
            false => 2,
        };
        num_layer_weights(spec) + embeddings * num_head_weights(spec)
    }

    /// Operations to compute a prompt and generate one token. A multiply-add counts as two.
    pub fn prefill_flops(&self, num_tokens: usize) -> f64 {
        let spec = self.spec;
        let tokens = num_tokens as f64;
        let pairs = tokens * (tokens + 1.0) / 2.0;
        // Attention computes a score and a weighted sum for each pair of positions.
        let attention =
            4.0 * (spec.num_layers * spec.attention.num_heads * spec.attention.head_dim) as f64;
        2.0 * tokens * num_layer_weights(spec) as f64
            + 2.0 * num_head_weights(spec) as f64
            + pairs * attention
    }

    /// Bytes that a decode step reads to generate a token after `num_context_tokens`.
    pub fn decode_bytes(&self, num_context_tokens: f64) -> f64 {
        let spec = self.spec;
        let weights = num_layer_weights(spec) + num_head_weights(spec);
        let heads = 2 * spec.num_layers * spec.attention.num_kv_heads;
        let kv_row = heads * self.kv_format.row_bytes(spec.attention.head_dim);
        self.weight_format.num_bytes(weights) as f64 + num_context_tokens * kv_row as f64
    }
}

fn num_layer_weights(spec: &DecoderSpec) -> usize {
    let heads = &spec.attention;
    let attention = 2 * (heads.num_heads + heads.num_kv_heads) * heads.head_dim;
    spec.num_layers * spec.hidden_size * (attention + 3 * spec.mlp.intermediate_size)
}

fn num_head_weights(spec: &DecoderSpec) -> usize {
    spec.vocab_size * spec.hidden_size
}
