//! The least operations and bytes to compute a token. Measured speeds are compared with them.

use corella_model::LayerTensor::{Down, Gate, Up};
use corella_model::{
    AttentionSpec, DecoderSpec, FeedForward, KvFormat, LayerSpec, Mlp, RecurrentSpec, TensorSpec,
    WeightFormat,
};

/// Operations and bytes that any implementation of a model needs.
pub struct TokenCost<'a> {
    pub spec: &'a DecoderSpec,
    pub weight_format: WeightFormat,
    pub kv_format: KvFormat,
}

impl TokenCost<'_> {
    /// The number of weights of all matrices. Norms and biases have too few weights to count.
    pub fn num_weights(spec: &DecoderSpec) -> usize {
        let embeddings = match spec.tied_embeddings {
            true => 1,
            false => 2,
        };
        let layers = num_layer_weights(spec, Experts::All);
        layers + embeddings * num_head_weights(spec) + num_draft_head_weights(spec, Experts::All)
    }

    /// The number of weights that a guess of the model's own draft head reads.
    pub fn num_guess_weights(spec: &DecoderSpec) -> usize {
        num_draft_head_weights(spec, Experts::OfToken) + num_head_weights(spec)
    }

    /// Operations to compute a prompt and generate one token. A multiply-add counts as two.
    pub fn prefill_flops(&self, num_tokens: usize) -> f64 {
        let spec = self.spec;
        let tokens = num_tokens as f64;
        // Attention computes a score and a weighted sum for each pair of positions.
        let attention: f64 = (spec.layers.iter())
            .map(|layer| {
                let attention = &layer.attention;
                match &layer.recurrent {
                    None => 4.0 * num_pairs(attention, tokens) * attention.query_len() as f64,
                    // A token's query and key read the state, and its key changes the state.
                    Some(RecurrentSpec::GatedDelta(spec)) => {
                        6.0 * tokens * (spec.value_len() * spec.key_dim) as f64
                    }
                    Some(RecurrentSpec::ShortConvolution(spec)) => {
                        2.0 * tokens * (spec.num_channels * (spec.kernel_len + 1)) as f64
                    }
                }
            })
            .sum();
        2.0 * tokens * num_layer_weights(spec, Experts::OfToken) as f64
            + 2.0 * num_head_weights(spec) as f64
            + attention
    }

    /// Bytes that a decode step reads to generate a token after `num_context_tokens`.
    pub fn decode_bytes(&self, num_context_tokens: f64) -> f64 {
        let spec = self.spec;
        let weights = num_layer_weights(spec, Experts::OfToken) + num_head_weights(spec);
        let kv_bytes = |layer: &LayerSpec| {
            let state_len = layer.recurrent.as_ref().map(|recurrent| match recurrent {
                RecurrentSpec::GatedDelta(spec) => spec.value_len() * spec.key_dim,
                RecurrentSpec::ShortConvolution(spec) => spec.num_channels * (spec.kernel_len - 1),
            });
            if let Some(len) = state_len {
                return (len * size_of::<f32>()) as f64;
            }
            let attention = &layer.attention;
            let row = 2 * attention.num_kv_heads * self.kv_format.row_bytes(attention.head_dim);
            let num_rows = (attention.window).map_or(num_context_tokens, |window| {
                num_context_tokens.min(window as f64)
            });
            num_rows * row as f64
        };
        let kv: f64 = spec.layers.iter().map(kv_bytes).sum();
        self.weight_format.num_bytes(weights) as f64 + kv
    }
}

/// The number of pairs of a query and a key that it sees, in a sequence of `num_tokens`.
fn num_pairs(attention: &AttentionSpec, num_tokens: f64) -> f64 {
    let window = attention.window.map_or(num_tokens, |window| window as f64);
    let short = num_tokens.min(window);
    short * (short + 1.0) / 2.0 + (num_tokens - short) * window
}

/// The number of weights of the layers' matrices, with all experts or with those of one token.
fn num_layer_weights(spec: &DecoderSpec, of_experts: Experts) -> usize {
    let layers = spec.layers.iter();
    layers
        .map(|layer| num_weights(layer, spec.hidden_size, of_experts))
        .sum()
}

/// The number of weights of the draft head's matrices, without the matrices that it shares with the model.
fn num_draft_head_weights(spec: &DecoderSpec, of_experts: Experts) -> usize {
    let hidden = spec.hidden_size;
    let join = 2 * hidden * hidden;
    let head = spec.draft_head.as_ref();
    head.map_or(0, |layer| join + num_weights(layer, hidden, of_experts))
}

fn num_weights(layer: &LayerSpec, hidden: usize, of_experts: Experts) -> usize {
    let counts = |tensor: &TensorSpec| match (&layer.feed_forward, tensor.tensor) {
        (
            FeedForward::Experts(experts),
            Gate(Mlp::Expert(expert)) | Up(Mlp::Expert(expert)) | Down(Mlp::Expert(expert)),
        ) => of_experts == Experts::All || expert < experts.num_experts_per_token,
        _ => tensor.tensor.is_matrix(),
    };
    let tensors = layer.tensors(hidden).into_iter().filter(counts);
    tensors
        .map(|tensor| tensor.shape.iter().product::<usize>())
        .sum()
}

/// The experts of a layer whose weights count. It does not matter which experts a token chooses, because all have the
/// same shape.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Experts {
    All,
    OfToken,
}

fn num_head_weights(spec: &DecoderSpec) -> usize {
    spec.vocab_size * spec.hidden_size
}

#[cfg(test)]
mod tests {
    use corella_model::RotarySpec;

    use super::*;

    #[test]
    fn a_window_limits_the_pairs() {
        let mut attention = AttentionSpec::plain(2, 1, 8, RotarySpec::plain(1e4, 8));
        assert_eq!(num_pairs(&attention, 5.0), 15.0);
        attention.window = Some(3);
        // Queries see 1, 2, 3, 3 and 3 keys.
        assert_eq!(num_pairs(&attention, 5.0), 12.0);
        assert_eq!(num_pairs(&attention, 2.0), 3.0);
    }
}
