//! Layers with a state for each sequence instead of attention. Their time for a token is independent of the sequence's
//! length.

use crate::NormSpec;

/// The shape of a layer's replacement for attention.
#[derive(Clone, Debug, PartialEq)]
pub enum RecurrentSpec {
    GatedDelta(GatedDeltaSpec),
    ShortConvolution(ShortConvolutionSpec),
}

/// A gated delta network (Yang et al. 2024, Qwen3-Next).
///
/// Queries, keys and values go through a convolution over the last `kernel_len` tokens and SiLU. Queries
/// and keys of a head are divided by their lengths. A value head has a matrix S as its state, and for each
/// token a decay `exp(-exp(rate) * softplus(d + bias))` and a strength `sigmoid(b)`, with b and d projected
/// from the layer's input:
///
/// ```text
/// S = decay * S
/// S = S + k (strength * (v - Sᵀk))ᵀ
/// o = Sᵀq / sqrt(key_dim)
/// ```
///
/// The outputs are normed head by head and multiplied by `silu(z)`, with z projected from the input.
#[derive(Clone, Debug, PartialEq)]
pub struct GatedDeltaSpec {
    pub num_key_heads: usize,
    /// The number of value heads. With `n = num_value_heads / num_key_heads`, the value heads `h * n..(h + 1) * n` use
    /// the queries and keys of key head `h`.
    pub num_value_heads: usize,
    pub key_dim: usize,
    pub value_dim: usize,
    /// The number of tokens that the convolution reads.
    pub kernel_len: usize,
    /// The norm of the outputs, whose `value_dim` weights all heads share.
    pub norm: NormSpec,
}

/// A gated short convolution (LFM2).
///
/// The layer's input is projected to b, c and x. In each channel, `b * x` goes through a convolution over the last
/// `kernel_len` tokens, and the result is multiplied by c. The state is `b * x` of the last `kernel_len - 1` tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct ShortConvolutionSpec {
    pub num_channels: usize,
    /// The number of tokens that the convolution reads.
    pub kernel_len: usize,
    /// Whether both projections and the convolution have biases.
    pub bias: bool,
}

impl GatedDeltaSpec {
    /// The number of elements of a token's queries, over all heads. It is the same for the token's keys.
    pub fn key_len(&self) -> usize {
        self.num_key_heads * self.key_dim
    }

    /// The number of elements of all values of a token.
    pub fn value_len(&self) -> usize {
        self.num_value_heads * self.value_dim
    }

    /// The number of channels of the convolution: queries, keys and values.
    pub fn num_channels(&self) -> usize {
        2 * self.key_len() + self.value_len()
    }

    /// The number of value heads that share a key head.
    pub fn heads_of_group(&self) -> usize {
        self.num_value_heads / self.num_key_heads
    }
}
