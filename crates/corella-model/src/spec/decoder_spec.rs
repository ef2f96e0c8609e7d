//! A decoder, or an encoder, as data. Each backend has one `forward.rs` that interprets it; a new family of models
//! means mapping its configuration and its tensor names, not writing new kernels.

use crate::{EncoderSpec, RecurrentSpec, RotarySpec};

/// The shape of a decoder, or of an encoder, which has the same parts and some more.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderSpec {
    pub vocab_size: usize,
    pub hidden_size: usize,
    /// The longest context that the checkpoint was made for.
    pub max_position: usize,
    pub layers: Vec<LayerSpec>,
    /// Whether a table with `max_position` rows is added to the embeddings of tokens (GPT-2).
    pub learned_positions: bool,
    /// The factor of token embeddings (Gemma, Granite); otherwise 1.
    pub embedding_scale: f32,
    /// The norm before the head.
    pub norm: NormSpec,
    /// The factor of logits (Granite, Cohere); otherwise 1.
    pub logit_scale: f32,
    /// Logits become `cap * tanh(logit / cap)` (Gemma 2).
    pub logit_soft_cap: Option<f32>,
    /// Whether the head shares the embedding matrix.
    pub tied_embeddings: bool,
    /// The parts of encoders only; `None` for a decoder.
    pub encoder: Option<EncoderSpec>,
    /// The layer of the draft head, which guesses further tokens; `None` if none is loaded.
    pub draft_head: Option<LayerSpec>,
}

/// The shape of one layer. Unless it is parallel, it computes
/// `x += scale * after(attention(before(x)))`, then the same with the feed-forward part.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerSpec {
    /// The attention. A recurrent layer has the shape of the other layers' attention here, and computes no attention.
    pub attention: AttentionSpec,
    /// In a recurrent layer, the part that replaces attention: it keeps a state for each sequence instead of keys and
    /// values.
    pub recurrent: Option<RecurrentSpec>,
    pub attention_norms: BranchNorms,
    pub feed_forward: FeedForward,
    pub feed_forward_norms: BranchNorms,
    /// The factor of additions to the residual stream (Granite); otherwise 1.
    pub residual_scale: f32,
    /// Whether the feed-forward part has the same input as attention, so that both outputs are added to the same
    /// residual stream (GPT-J, Cohere). Such a layer has only the norm before attention.
    pub is_parallel: bool,
    /// The addition after the feed-forward part, from the layer's own embedding of the token (Gemma 4).
    pub per_layer: Option<PerLayerSpec>,
    /// Whether the layer ends with the multiplication of the residual stream by a number of its own
    /// (Gemma 4).
    pub has_scale: bool,
}

/// The part of a layer that computes `x += norm(out(activation(gate(x)) * input))`. The input belongs to the token and
/// the layer: half of it is looked up in a table, and half is projected from the embedding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PerLayerSpec {
    /// The number of elements of the input.
    pub len: usize,
    pub activation: Activation,
    /// The norm of the projected half of the input, and of the output.
    pub norm: NormSpec,
}

/// The norms of a layer's branch beside the residual stream.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BranchNorms {
    /// The norm of the branch's input (all except OLMo 2).
    pub before: Option<NormSpec>,
    /// The norm of the branch's output, before the output is added to the residual stream (OLMo 2, Gemma 2 and 3).
    pub after: Option<NormSpec>,
}

/// A norm with a weight for each element. "1 + weight" (Gemma) is not a separate kind: the loader adds 1 to the weights
/// if a format stores them without the 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormSpec {
    pub kind: NormKind,
    pub eps: f32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// Divides by the root mean square.
    Rms,
    /// Subtracts the mean, and divides by the standard deviation.
    Layer { bias: bool },
}

/// The shape of a layer's attention.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AttentionSpec {
    pub num_heads: usize,
    /// The number of KV heads. With `n = num_heads / num_kv_heads`, the query heads `h * n..(h + 1) * n` share KV head
    /// `h`.
    pub num_kv_heads: usize,
    pub head_dim: usize,
    /// `None` for layers without RoPE (SmolLM3, GPT-2).
    pub rotary: Option<RotarySpec>,
    /// The growth of queries with their positions.
    pub query_growth: Option<QueryGrowth>,
    /// The factor of products of queries and keys; usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// Scores become `cap * tanh(score / cap)` (Gemma 2).
    pub soft_cap: Option<f32>,
    /// A query sees itself and the `window - 1` positions before it. Unless attention is causal, the query also sees
    /// the `window - 1` positions after it.
    pub window: Option<usize>,
    /// Whether a query sees no position after it. In encoders it sees the whole text.
    pub is_causal: bool,
    /// Whether position 0 has no key: the input of a draft head's layer needs a token before its own.
    pub skips_first: bool,
    /// The norm of queries and keys before RoPE.
    pub qk_norm: Option<QkNorm>,
    pub qkv_bias: bool,
    pub output_bias: bool,
    /// Whether each query head has a sink: a score that its softmax counts beside the positions' scores, without a
    /// value (gpt-oss).
    pub has_sinks: bool,
    /// Whether each query head's output is multiplied by the sigmoid of a projection of the layer's input (Qwen3-Next).
    pub has_output_gate: bool,
    /// The norm of each head of the values. It has no weights (Gemma 4).
    pub value_norm: Option<NormSpec>,
    /// Whether the values have the same projection as the keys. They differ only in the norms and RoPE that follow
    /// (Gemma 4).
    pub values_are_keys: bool,
    /// The layer whose keys and values this layer reads instead of its own (Gemma 4).
    pub kv_source: Option<usize>,
}

/// The growth of queries with their positions, so that attention stays sharp in contexts longer than the original one
/// (Llama 4, Ministral 3): by `1 + beta * ln(1 + position / original_max_position)`, with a quotient that is rounded
/// down.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueryGrowth {
    pub beta: f64,
    pub original_max_position: usize,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum QkNorm {
    /// Each head has a norm, with `head_dim` weights that all heads share (Qwen3, Gemma 3).
    Heads(NormSpec),
    /// One norm for all query heads together, and one for all key heads (OLMo 2).
    Whole(NormSpec),
}

/// The part of a layer that computes each token independently of the others.
#[derive(Clone, Debug, PartialEq)]
pub enum FeedForward {
    Mlp(MlpSpec),
    Experts(ExpertSpec),
}

/// `down(activation(gate(x)) * up(x))`, or `down(activation(up(x)))` without gates.
#[derive(Clone, Debug, PartialEq)]
pub struct MlpSpec {
    pub intermediate_size: usize,
    pub activation: Activation,
    pub is_gated: bool,
    pub bias: bool,
    /// The upper limit of gates, and of the magnitude of the values that they gate. 1 is added to these values
    /// (gpt-oss).
    pub gate_limit: Option<f32>,
}

/// An activation function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    Silu,
    /// `x * Φ(x)`.
    Gelu,
    /// The approximation of `Gelu` with tanh.
    GeluTanh,
    /// The approximation `x * sigmoid(1.702 * x)` of `Gelu`.
    GeluSigmoid,
}

/// A mixture of experts.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertSpec {
    pub num_experts: usize,
    pub num_experts_per_token: usize,
    /// Whether the router has a bias for each expert (gpt-oss).
    pub router_bias: bool,
    /// The shape of each expert.
    pub expert: MlpSpec,
    /// An MLP for every token.
    pub shared: Option<SharedExpert>,
    /// The function from the router's outputs for all experts to scores.
    pub scoring: ExpertScoring,
    /// Whether each expert has a bias that counts in the choice of experts, but not in their weights.
    pub selection_bias: bool,
    /// Whether the weights of the chosen experts are divided by their sum. (Mixtral's softmax over
    /// the chosen ones is the same.)
    pub normalises: bool,
    /// The number added to the sum by which the weights are divided; usually 0.
    pub weight_sum_eps: f32,
    /// The factor of the weights; otherwise 1.
    pub weight_scale: f32,
    /// Whether each expert has a factor of its weights (Gemma 4).
    pub has_scales: bool,
    /// With a shared expert: the norm for the shared expert's output, the experts' input, their output and the router's
    /// input, each with weights of its own. The norm before the feed-forward part is the shared expert's alone (Gemma
    /// 4).
    pub own_norms: Option<NormSpec>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct SharedExpert {
    pub mlp: MlpSpec,
    /// Whether the MLP's output is multiplied by the sigmoid of the product of its input and a vector (Qwen2-MoE).
    pub is_weighed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertScoring {
    Softmax,
    Sigmoid,
}

impl NormSpec {
    pub const fn rms(eps: f32) -> Self {
        let kind = NormKind::Rms;
        Self { kind, eps }
    }

    pub fn layer(eps: f32, bias: bool) -> Self {
        let kind = NormKind::Layer { bias };
        Self { kind, eps }
    }
}

impl DecoderSpec {
    /// A decoder with a head of its own, and without learned positions, factors and caps.
    pub fn plain(
        vocab_size: usize,
        hidden_size: usize,
        max_position: usize,
        layers: Vec<LayerSpec>,
        norm: NormSpec,
    ) -> Self {
        Self {
            vocab_size,
            hidden_size,
            max_position,
            layers,
            learned_positions: false,
            embedding_scale: 1.0,
            norm,
            logit_scale: 1.0,
            logit_soft_cap: None,
            tied_embeddings: false,
            encoder: None,
            draft_head: None,
        }
    }

    /// Whether any layer keeps a state for each sequence.
    pub fn is_recurrent(&self) -> bool {
        self.layers.iter().any(|layer| layer.recurrent.is_some())
    }

    /// The shape of the layers' own inputs, if any. It is the same in all layers.
    pub fn per_layer(&self) -> Option<PerLayerSpec> {
        self.layers.first().and_then(|layer| layer.per_layer)
    }

    /// Whether any layer reads the keys and values of another.
    pub fn shares_kv(&self) -> bool {
        let mut layers = self.layers.iter();
        layers.any(|layer| layer.attention.kv_source.is_some())
    }

    /// Whether the layers' keys and values have heads of different lengths or numbers.
    pub fn has_mixed_kv(&self) -> bool {
        let shape = |layer: &LayerSpec| (layer.attention.num_kv_heads, layer.attention.head_dim);
        let mut layers = self.layers.iter().filter(|layer| layer.has_kv()).map(shape);
        let first = layers.next();
        layers.any(|shape| Some(shape) != first)
    }
}

impl LayerSpec {
    /// A layer with attention, the same norms for both parts, and no other part.
    pub fn plain(attention: AttentionSpec, norms: BranchNorms, feed_forward: FeedForward) -> Self {
        Self {
            attention,
            recurrent: None,
            attention_norms: norms,
            feed_forward,
            feed_forward_norms: norms,
            residual_scale: 1.0,
            is_parallel: false,
            per_layer: None,
            has_scale: false,
        }
    }

    /// Whether the layer has keys and values of its own.
    pub fn has_kv(&self) -> bool {
        self.recurrent.is_none() && self.attention.kv_source.is_none()
    }

    /// The number of elements of a token after attention, or after the recurrent part, and before the output
    /// projection.
    pub fn mixed_len(&self) -> usize {
        match &self.recurrent {
            None => self.attention.query_len(),
            Some(RecurrentSpec::GatedDelta(spec)) => spec.value_len(),
            Some(RecurrentSpec::ShortConvolution(spec)) => spec.num_channels,
        }
    }
}

impl BranchNorms {
    /// Only the norm of the input.
    pub fn before(norm: NormSpec) -> Self {
        Self {
            before: Some(norm),
            after: None,
        }
    }
}

impl QueryGrowth {
    /// The factor of the query of a position.
    pub fn at(&self, position: usize) -> f64 {
        let num_contexts = position / self.original_max_position;
        1.0 + self.beta * (num_contexts as f64).ln_1p()
    }
}

impl AttentionSpec {
    /// Heads with RoPE over whole heads, the usual scale and no other part.
    pub fn plain(
        num_heads: usize,
        num_kv_heads: usize,
        head_dim: usize,
        rotary: RotarySpec,
    ) -> Self {
        Self {
            num_heads,
            num_kv_heads,
            head_dim,
            rotary: Some(rotary),
            scale: Self::usual_scale(head_dim),
            is_causal: true,
            ..Self::default()
        }
    }

    /// `1 / sqrt(head_dim)`.
    pub fn usual_scale(head_dim: usize) -> f32 {
        (1.0 / (head_dim as f64).sqrt()) as f32
    }

    /// The first position that a query sees.
    pub fn first_seen(&self, position: usize) -> usize {
        let of_window = self
            .window
            .map(|window| (position + 1).saturating_sub(window));
        of_window.unwrap_or(0).max(usize::from(self.skips_first))
    }

    /// The end, exclusive, of the positions that a query sees in a sequence of `num_positions`.
    pub fn end_seen(&self, position: usize, num_positions: usize) -> usize {
        match (self.is_causal, self.window) {
            (true, _) => position + 1,
            (false, None) => num_positions,
            (false, Some(window)) => num_positions.min(position + window),
        }
    }

    /// The number of elements of all queries of a token.
    pub fn query_len(&self) -> usize {
        self.num_heads * self.head_dim
    }

    /// The number of elements of a token's keys, over all heads. It is the same for the token's values.
    pub fn kv_len(&self) -> usize {
        self.num_kv_heads * self.head_dim
    }
}

impl MlpSpec {
    /// An MLP with gates, without biases and limits.
    pub fn gated(intermediate_size: usize, activation: Activation) -> Self {
        Self {
            intermediate_size,
            activation,
            is_gated: true,
            bias: false,
            gate_limit: None,
        }
    }
}

impl FeedForward {
    /// The MLP, or the shape of each expert.
    pub fn mlp(&self) -> &MlpSpec {
        match self {
            Self::Mlp(mlp) => mlp,
            Self::Experts(experts) => &experts.expert,
        }
    }
}
