//! The tensors of a layer, in one table. Loading, checking, packing, quantising, the fingerprint and the names in files
//! all use it.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Index;

use crate::{
    AttentionSpec, BranchNorms, FeedForward, GatedDeltaSpec, LayerSpec, MlpSpec, NormKind,
    NormSpec, QkNorm, RecurrentSpec, ShortConvolutionSpec, Tensor,
};

/// A tensor of a layer. Matrices are `[out, in]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LayerTensor {
    /// The norm of attention's input.
    AttentionNorm,
    AttentionNormBias,
    Q,
    QBias,
    K,
    KBias,
    V,
    VBias,
    QNorm,
    KNorm,
    /// A score for each query head.
    Sinks,
    /// The projection of the layer's input to gates for the output of each query head.
    AttentionGate,
    AttentionGateBias,
    O,
    OBias,
    /// The projections of a gated delta network: queries, keys, values, output gates, strengths and decays.
    DeltaQ,
    DeltaK,
    DeltaV,
    DeltaGate,
    DeltaStrength,
    DeltaDecay,
    /// The convolution of queries, keys and values, `[channels, tokens]`, the newest token last.
    DeltaConvolution,
    /// The bias of the projected decays.
    DeltaDecayBias,
    /// The logarithm of the decays' factor.
    DeltaRate,
    /// The norm of the outputs. Files always store its whole weights, never the weights minus 1.
    DeltaNorm,
    DeltaO,
    /// The projection of a short convolution's input: input gates, output gates, and the convolved values, in this
    /// order.
    ConvolutionInput,
    ConvolutionInputBias,
    /// A short convolution, `[channels, tokens]`, the newest token last.
    Convolution,
    ConvolutionBias,
    ConvolutionOutput,
    ConvolutionOutputBias,
    /// The norm of attention's output.
    AttentionOutputNorm,
    AttentionOutputNormBias,
    /// The norm of the feed-forward part's input.
    MlpNorm,
    MlpNormBias,
    Gate(Mlp),
    GateBias(Mlp),
    Up(Mlp),
    UpBias(Mlp),
    Down(Mlp),
    DownBias(Mlp),
    /// The norm of the output of the MLP beside the experts.
    SharedOutputNorm,
    /// The norms of the experts' input and output, if they differ from the feed-forward part's.
    ExpertNorm,
    ExpertOutputNorm,
    /// The norm of the router's input. The stored weights are not yet divided by the square root of their number.
    RouterNorm,
    /// A number for each expert.
    ExpertScales,
    /// The matrix that scores the experts.
    Router,
    RouterBias,
    /// A bias for each expert that counts in the choice of experts, but not in their weights.
    SelectionBias,
    /// The vector that weighs the shared expert: the weight for a row is the sigmoid of its product with this vector.
    SharedWeight,
    /// The norm of the feed-forward part's output.
    MlpOutputNorm,
    MlpOutputNormBias,
    /// The projection of the residual stream to gates for the layer's own input, and the projection back.
    PerLayerGate,
    PerLayerOutput,
    /// The norm of the addition from the layer's own input.
    PerLayerNorm,
    /// The factor of the residual stream.
    LayerScale,
}

/// The MLPs of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Mlp {
    /// The MLP of a layer without experts.
    Only,
    /// The MLP for every token, beside the experts.
    Shared,
    Expert(usize),
}

/// The use of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorRole {
    /// A matrix that may be stored and packed in any format.
    Matrix(LayerInput),
    /// A matrix that stays unchanged: it is small, and its rounding would choose other experts.
    Router,
    Vector,
}

/// The inputs of a layer's matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerInput {
    /// The normed input of the query, key and value projections.
    Attention,
    /// The input of the output projection.
    AttentionOutput,
    /// The normed input of the gate and up projections.
    Mlp,
    /// The input of the down projection.
    MlpOutput,
    /// The input of a shared expert's down projection.
    SharedOutput,
    /// The rows of `Mlp` whose tokens chose an expert.
    Expert,
    /// The input of an expert's down projection.
    ExpertOutput,
    /// The residual stream itself, which gates the layer's own input.
    Residual,
    /// The layer's own input, gated.
    PerLayer,
}

/// A tensor that a layer must have.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorSpec {
    pub tensor: LayerTensor,
    pub shape: Vec<usize>,
}

/// The weights of one layer.
#[derive(Clone, Default)]
pub struct LayerWeights(BTreeMap<LayerTensor, Tensor>);

impl LayerTensor {
    pub const GATE: Self = Self::Gate(Mlp::Only);
    pub const UP: Self = Self::Up(Mlp::Only);
    pub const DOWN: Self = Self::Down(Mlp::Only);

    pub fn role(self) -> TensorRole {
        TensorRole::Matrix(match self {
            Self::Q | Self::K | Self::V | Self::AttentionGate => LayerInput::Attention,
            Self::DeltaQ | Self::DeltaK | Self::DeltaV => LayerInput::Attention,
            Self::DeltaGate | Self::DeltaStrength | Self::DeltaDecay => LayerInput::Attention,
            Self::ConvolutionInput => LayerInput::Attention,
            Self::O | Self::DeltaO | Self::ConvolutionOutput => LayerInput::AttentionOutput,
            Self::Gate(Mlp::Expert(_)) | Self::Up(Mlp::Expert(_)) => LayerInput::Expert,
            Self::Gate(_) | Self::Up(_) => LayerInput::Mlp,
            Self::Down(Mlp::Only) => LayerInput::MlpOutput,
            Self::Down(Mlp::Shared) => LayerInput::SharedOutput,
            Self::Down(Mlp::Expert(_)) => LayerInput::ExpertOutput,
            Self::PerLayerGate => LayerInput::Residual,
            Self::PerLayerOutput => LayerInput::PerLayer,
            Self::Router => return TensorRole::Router,
            _ => return TensorRole::Vector,
        })
    }

    pub fn is_matrix(self) -> bool {
        matches!(self.role(), TensorRole::Matrix(_))
    }

    /// Whether the tensor has the weights of a norm.
    pub fn is_norm(self) -> bool {
        matches!(
            self,
            Self::AttentionNorm
                | Self::QNorm
                | Self::KNorm
                | Self::AttentionOutputNorm
                | Self::MlpNorm
                | Self::MlpOutputNorm
                | Self::SharedOutputNorm
                | Self::ExpertNorm
                | Self::ExpertOutputNorm
                | Self::RouterNorm
                | Self::PerLayerNorm
        )
    }

    /// The bias of a matrix's outputs, or of a norm's.
    pub fn bias(self) -> Option<Self> {
        Some(match self {
            Self::AttentionNorm => Self::AttentionNormBias,
            Self::Q => Self::QBias,
            Self::K => Self::KBias,
            Self::V => Self::VBias,
            Self::AttentionGate => Self::AttentionGateBias,
            Self::O => Self::OBias,
            Self::ConvolutionInput => Self::ConvolutionInputBias,
            Self::Convolution => Self::ConvolutionBias,
            Self::ConvolutionOutput => Self::ConvolutionOutputBias,
            Self::AttentionOutputNorm => Self::AttentionOutputNormBias,
            Self::MlpNorm => Self::MlpNormBias,
            Self::Gate(mlp) => Self::GateBias(mlp),
            Self::Up(mlp) => Self::UpBias(mlp),
            Self::Down(mlp) => Self::DownBias(mlp),
            Self::Router => Self::RouterBias,
            Self::MlpOutputNorm => Self::MlpOutputNormBias,
            _ => return None,
        })
    }

    /// The number of heads of this matrix, if it is stored in one tensor with others and their rows alternate head by
    /// head.
    pub fn num_stored_heads(self, layer: &LayerSpec) -> usize {
        match (&layer.recurrent, self) {
            (_, Self::Q | Self::AttentionGate) => layer.attention.num_heads,
            (Some(RecurrentSpec::GatedDelta(spec)), _) => spec.num_key_heads,
            (Some(RecurrentSpec::ShortConvolution(_)), _) => 1,
            (None, _) => layer.attention.num_kv_heads,
        }
    }

    /// The matrix or the norm of a bias.
    pub fn owner(self) -> Option<Self> {
        Some(match self {
            Self::AttentionNormBias => Self::AttentionNorm,
            Self::QBias => Self::Q,
            Self::KBias => Self::K,
            Self::VBias => Self::V,
            Self::AttentionGateBias => Self::AttentionGate,
            Self::OBias => Self::O,
            Self::ConvolutionInputBias => Self::ConvolutionInput,
            Self::ConvolutionBias => Self::Convolution,
            Self::ConvolutionOutputBias => Self::ConvolutionOutput,
            Self::AttentionOutputNormBias => Self::AttentionOutputNorm,
            Self::MlpNormBias => Self::MlpNorm,
            Self::GateBias(mlp) => Self::Gate(mlp),
            Self::UpBias(mlp) => Self::Up(mlp),
            Self::DownBias(mlp) => Self::Down(mlp),
            Self::RouterBias => Self::Router,
            Self::MlpOutputNormBias => Self::MlpOutputNorm,
            _ => return None,
        })
    }
}

impl fmt::Display for LayerTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(owner) = self.owner() {
            return write!(f, "{owner}_bias");
        }
        let of = |f: &mut fmt::Formatter<'_>, mlp: &Mlp, name| match mlp {
            Mlp::Only => f.write_str(name),
            Mlp::Shared => write!(f, "shared_expert.{name}"),
            Mlp::Expert(expert) => write!(f, "expert.{expert}.{name}"),
        };
        match self {
            Self::Gate(mlp) => of(f, mlp, "gate"),
            Self::Up(mlp) => of(f, mlp, "up"),
            Self::Down(mlp) => of(f, mlp, "down"),
            Self::AttentionNorm => f.write_str("attention_norm"),
            Self::Q => f.write_str("q"),
            Self::K => f.write_str("k"),
            Self::V => f.write_str("v"),
            Self::QNorm => f.write_str("q_norm"),
            Self::KNorm => f.write_str("k_norm"),
            Self::Sinks => f.write_str("sinks"),
            Self::AttentionGate => f.write_str("attention_gate"),
            Self::DeltaQ => f.write_str("delta_q"),
            Self::DeltaK => f.write_str("delta_k"),
            Self::DeltaV => f.write_str("delta_v"),
            Self::DeltaGate => f.write_str("delta_gate"),
            Self::DeltaStrength => f.write_str("delta_strength"),
            Self::DeltaDecay => f.write_str("delta_decay"),
            Self::DeltaConvolution => f.write_str("delta_convolution"),
            Self::DeltaDecayBias => f.write_str("delta_decay_bias"),
            Self::DeltaRate => f.write_str("delta_rate"),
            Self::DeltaNorm => f.write_str("delta_norm"),
            Self::DeltaO => f.write_str("delta_o"),
            Self::ConvolutionInput => f.write_str("convolution_input"),
            Self::Convolution => f.write_str("convolution"),
            Self::ConvolutionOutput => f.write_str("convolution_output"),
            Self::O => f.write_str("o"),
            Self::AttentionOutputNorm => f.write_str("attention_output_norm"),
            Self::MlpNorm => f.write_str("mlp_norm"),
            Self::Router => f.write_str("router"),
            Self::SelectionBias => f.write_str("selection_bias"),
            Self::SharedWeight => f.write_str("shared_weight"),
            Self::MlpOutputNorm => f.write_str("mlp_output_norm"),
            Self::SharedOutputNorm => f.write_str("shared_output_norm"),
            Self::ExpertNorm => f.write_str("expert_norm"),
            Self::ExpertOutputNorm => f.write_str("expert_output_norm"),
            Self::RouterNorm => f.write_str("router_norm"),
            Self::ExpertScales => f.write_str("expert_scales"),
            Self::PerLayerGate => f.write_str("per_layer_gate"),
            Self::PerLayerOutput => f.write_str("per_layer_output"),
            Self::PerLayerNorm => f.write_str("per_layer_norm"),
            Self::LayerScale => f.write_str("layer_scale"),
            other => write!(f, "{other:?}"),
        }
    }
}

impl LayerInput {
    /// The inputs of a layer without experts.
    pub const DENSE: [Self; 4] = [
        Self::Attention,
        Self::AttentionOutput,
        Self::Mlp,
        Self::MlpOutput,
    ];

    /// The number of elements in a row of this input.
    pub fn len(self, layer: &LayerSpec, hidden_size: usize) -> usize {
        match self {
            Self::Attention | Self::Mlp | Self::Expert | Self::Residual => hidden_size,
            Self::PerLayer => layer.per_layer.map_or(0, |spec| spec.len),
            Self::AttentionOutput => layer.mixed_len(),
            Self::MlpOutput | Self::ExpertOutput => layer.feed_forward.mlp().intermediate_size,
            Self::SharedOutput => match &layer.feed_forward {
                FeedForward::Experts(experts) => {
                    let shared = experts.shared.as_ref();
                    shared.map_or(0, |shared| shared.mlp.intermediate_size)
                }
                FeedForward::Mlp(_) => 0,
            },
        }
    }
}

impl LayerSpec {
    /// All tensors of the layer. Matrices with a common input follow each other.
    pub fn tensors(&self, hidden_size: usize) -> Vec<TensorSpec> {
        use LayerTensor::*;
        let mut list = TensorList(Vec::new());
        let hidden = hidden_size;
        list.norms(
            &self.attention_norms,
            [AttentionNorm, AttentionOutputNorm],
            hidden,
        );
        match &self.recurrent {
            None => list.attention(&self.attention, hidden),
            Some(RecurrentSpec::GatedDelta(spec)) => list.gated_delta(spec, hidden),
            Some(RecurrentSpec::ShortConvolution(spec)) => list.short_convolution(spec, hidden),
        }
        list.norms(&self.feed_forward_norms, [MlpNorm, MlpOutputNorm], hidden);
        match &self.feed_forward {
            FeedForward::Mlp(mlp) => list.mlp(Mlp::Only, mlp, hidden),
            FeedForward::Experts(experts) => {
                list.matrix(Router, experts.num_experts, hidden, experts.router_bias);
                if experts.selection_bias {
                    list.vector(SelectionBias, experts.num_experts);
                }
                for expert in 0..experts.num_experts {
                    list.mlp(Mlp::Expert(expert), &experts.expert, hidden);
                }
                if let Some(shared) = &experts.shared {
                    list.mlp(Mlp::Shared, &shared.mlp, hidden);
                    if shared.is_weighed {
                        list.vector(SharedWeight, hidden);
                    }
                }
                if experts.has_scales {
                    list.vector(ExpertScales, experts.num_experts);
                }
                if experts.own_norms.is_some() {
                    for norm in [SharedOutputNorm, ExpertNorm, ExpertOutputNorm, RouterNorm] {
                        list.vector(norm, hidden);
                    }
                }
            }
        }
        if let Some(spec) = &self.per_layer {
            list.matrix(PerLayerGate, spec.len, hidden, false);
            list.matrix(PerLayerOutput, hidden, spec.len, false);
            list.vector(PerLayerNorm, hidden);
        }
        if self.has_scale {
            list.vector(LayerScale, 1);
        }
        list.0
    }
}

struct TensorList(Vec<TensorSpec>);

impl TensorList {
    fn add(&mut self, tensor: LayerTensor, shape: Vec<usize>) {
        self.0.push(TensorSpec { tensor, shape });
    }

    fn vector(&mut self, tensor: LayerTensor, len: usize) {
        self.add(tensor, vec![len]);
    }

    fn matrix(&mut self, tensor: LayerTensor, out: usize, input: usize, has_bias: bool) {
        self.add(tensor, vec![out, input]);
        if let Some(bias) = tensor.bias().filter(|_| has_bias) {
            self.vector(bias, out);
        }
    }

    fn norms(&mut self, norms: &BranchNorms, [before, after]: [LayerTensor; 2], len: usize) {
        for (norm, tensor) in [(&norms.before, before), (&norms.after, after)] {
            if let Some(norm) = norm {
                self.vector(tensor, len);
                if let Some(bias) = tensor.bias().filter(|_| norm.has_bias()) {
                    self.vector(bias, len);
                }
            }
        }
    }

    fn attention(&mut self, attention: &AttentionSpec, hidden: usize) {
        use LayerTensor::*;
        let (query, key) = (attention.query_len(), attention.kv_len());
        self.matrix(Q, query, hidden, attention.qkv_bias);
        if attention.has_output_gate {
            self.matrix(AttentionGate, query, hidden, attention.qkv_bias);
        }
        let has_kv = attention.kv_source.is_none();
        if has_kv {
            self.matrix(K, key, hidden, attention.qkv_bias);
        }
        if has_kv && !attention.values_are_keys {
            self.matrix(V, key, hidden, attention.qkv_bias);
        }
        let norm_lens = attention.qk_norm.map(|norm| match norm {
            QkNorm::Heads(_) => [attention.head_dim; 2],
            QkNorm::Whole(_) => [query, key],
        });
        if let Some([query, key]) = norm_lens {
            self.vector(QNorm, query);
            if has_kv {
                self.vector(KNorm, key);
            }
        }
        if attention.has_sinks {
            self.vector(Sinks, attention.num_heads);
        }
        self.matrix(O, hidden, query, attention.output_bias);
    }

    fn gated_delta(&mut self, spec: &GatedDeltaSpec, hidden: usize) {
        use LayerTensor::*;
        let (key, value) = (spec.key_len(), spec.value_len());
        self.matrix(DeltaQ, key, hidden, false);
        self.matrix(DeltaK, key, hidden, false);
        self.matrix(DeltaV, value, hidden, false);
        self.matrix(DeltaGate, value, hidden, false);
        self.matrix(DeltaStrength, spec.num_value_heads, hidden, false);
        self.matrix(DeltaDecay, spec.num_value_heads, hidden, false);
        self.add(DeltaConvolution, vec![spec.num_channels(), spec.kernel_len]);
        self.vector(DeltaDecayBias, spec.num_value_heads);
        self.vector(DeltaRate, spec.num_value_heads);
        self.vector(DeltaNorm, spec.value_dim);
        self.matrix(DeltaO, hidden, value, false);
    }

    fn short_convolution(&mut self, spec: &ShortConvolutionSpec, hidden: usize) {
        use LayerTensor::*;
        let channels = spec.num_channels;
        self.matrix(ConvolutionInput, 3 * channels, hidden, spec.bias);
        self.matrix(Convolution, channels, spec.kernel_len, spec.bias);
        self.matrix(ConvolutionOutput, hidden, channels, spec.bias);
    }

    fn mlp(&mut self, which: Mlp, mlp: &MlpSpec, hidden: usize) {
        let inner = mlp.intermediate_size;
        if mlp.is_gated {
            self.matrix(LayerTensor::Gate(which), inner, hidden, mlp.bias);
        }
        self.matrix(LayerTensor::Up(which), inner, hidden, mlp.bias);
        self.matrix(LayerTensor::Down(which), hidden, inner, mlp.bias);
    }
}

impl NormSpec {
    pub fn has_bias(&self) -> bool {
        matches!(self.kind, NormKind::Layer { bias: true })
    }
}

impl LayerWeights {
    pub fn get(&self, tensor: LayerTensor) -> Option<&Tensor> {
        self.0.get(&tensor)
    }

    pub fn get_mut(&mut self, tensor: LayerTensor) -> Option<&mut Tensor> {
        self.0.get_mut(&tensor)
    }

    pub fn insert(&mut self, tensor: LayerTensor, values: Tensor) {
        self.0.insert(tensor, values);
    }

    pub fn remove(&mut self, tensor: LayerTensor) {
        self.0.remove(&tensor);
    }

    /// All tensors, in the order of `LayerTensor`.
    pub fn iter(&self) -> impl Iterator<Item = (LayerTensor, &Tensor)> {
        self.0.iter().map(|(tensor, values)| (*tensor, values))
    }

    /// The matrices that may have any format.
    pub fn matrices(&self) -> impl Iterator<Item = &Tensor> {
        let matrices = self.iter().filter(|(tensor, _)| tensor.is_matrix());
        matrices.map(|(_, values)| values)
    }

    /// Checks that the weights belong to a layer. `Err` names the tensor that is missing, has another shape or is
    /// superfluous.
    pub fn check(&self, layer: &LayerSpec, hidden_size: usize) -> Result<(), String> {
        let specs = layer.tensors(hidden_size);
        for TensorSpec { tensor, shape } in &specs {
            match self.get(*tensor) {
                Some(values) => values.check_shape(tensor, shape)?,
                None => return Err(format!("{tensor} is missing")),
            }
        }
        let is_known = |tensor: LayerTensor| specs.iter().any(|spec| spec.tensor == tensor);
        match self.iter().find(|(tensor, _)| !is_known(*tensor)) {
            Some((tensor, _)) => Err(format!(
                "the checkpoint has {tensor}, but the model does not use it"
            )),
            None => Ok(()),
        }
    }
}

/// A tensor that `LayerWeights::check` found.
impl Index<LayerTensor> for LayerWeights {
    type Output = Tensor;

    fn index(&self, tensor: LayerTensor) -> &Tensor {
        match self.get(tensor) {
            Some(values) => values,
            None => panic!("the layer has no {tensor}"),
        }
    }
}

#[cfg(test)]
mod tests;
