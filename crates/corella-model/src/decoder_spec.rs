//! A decoder as data. One `forward.rs` per backend interprets it; a new architecture is a
//! mapping from `config.json` and tensor names, not new kernels.

#[derive(Clone, Debug, PartialEq)]
pub struct DecoderSpec {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub num_layers: usize,
    /// Longest context the checkpoint was made for.
    pub max_position: usize,
    /// RMS norm before attention, before the MLP and before the head.
    pub norm_eps: f32,
    pub rotary: RotarySpec,
    pub attention: AttentionSpec,
    pub mlp: MlpSpec,
    /// The head shares the embedding matrix.
    pub tied_embeddings: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub struct AttentionSpec {
    pub num_heads: usize,
    /// Query heads `h * num_heads / num_kv_heads ..` share KV head `h`.
    pub num_kv_heads: usize,
    pub head_dim: usize,
    /// RMS norm over each query and key head before rotation (Qwen3).
    pub qk_norm: bool,
    pub qkv_bias: bool,
    pub output_bias: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub struct MlpSpec {
    pub intermediate_size: usize,
    /// Of the gate: `down(activation(gate(x)) * up(x))`.
    pub activation: Activation,
    pub bias: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    Silu,
}

/// Rotary embedding over whole heads, halves rotated against each other (NeoX order).
#[derive(Clone, Debug, PartialEq)]
pub struct RotarySpec {
    pub theta: f64,
    pub scaling: RotaryScaling,
}

#[derive(Clone, Debug, PartialEq)]
pub enum RotaryScaling {
    None,
    Linear {
        factor: f64,
    },
    /// Llama 3.1: low frequencies divided by `factor`, high ones kept, a ramp between.
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_max_position: f64,
    },
    /// The frequency of each pair of dimensions divided by a number of its own.
    Divisors(Vec<f32>),
}
