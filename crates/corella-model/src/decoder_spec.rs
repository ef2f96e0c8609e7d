//! A decoder as data. Each backend has one `forward.rs` that interprets it; supporting a new
//! architecture means mapping `config.json` and tensor names, not writing new kernels.

/// The shape of a decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderSpec {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub num_layers: usize,
    /// The longest context that the checkpoint was made for.
    pub max_position: usize,
    /// The epsilon of the RMS norms before attention, before the MLP and before the head.
    pub norm_eps: f32,
    pub rotary: RotarySpec,
    pub attention: AttentionSpec,
    pub mlp: MlpSpec,
    /// Whether the head shares the embedding matrix.
    pub tied_embeddings: bool,
}

/// The shape of the attention layers.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionSpec {
    pub num_heads: usize,
    /// The number of KV heads. Query heads from `h * num_heads / num_kv_heads` on share KV head
    /// `h`.
    pub num_kv_heads: usize,
    pub head_dim: usize,
    /// Whether each query and key head has an RMS norm before RoPE (Qwen3).
    pub qk_norm: bool,
    pub qkv_bias: bool,
    pub output_bias: bool,
}

/// The shape of the gated MLP.
#[derive(Clone, Debug, PartialEq)]
pub struct MlpSpec {
    pub intermediate_size: usize,
    /// The activation of the gate: `down(activation(gate(x)) * up(x))`.
    pub activation: Activation,
    pub bias: bool,
}

/// An activation function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    Silu,
}

/// RoPE over whole heads, where element i is rotated together with element `i + head_dim / 2` (NeoX
/// order).
#[derive(Clone, Debug, PartialEq)]
pub struct RotarySpec {
    pub theta: f64,
    pub scaling: RotaryScaling,
}

/// How RoPE's frequencies are changed for longer contexts.
#[derive(Clone, Debug, PartialEq)]
pub enum RotaryScaling {
    None,
    /// All positions are divided by `factor`.
    Linear {
        factor: f64,
    },
    /// Llama 3.1: low frequencies are divided by `factor`, high ones are kept, and those between
    /// are interpolated.
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_max_position: f64,
    },
    /// The frequency of each pair of dimensions is divided by a number of its own.
    Divisors(Vec<f32>),
}
