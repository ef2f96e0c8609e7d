//! The weights of one layer, packed for the forward pass.

use corella_model::{
    DeviceError, ExpertSpec, FeedForward, LayerSpec, LayerTensor, LayerWeights, Mlp, MlpSpec,
    NormSpec, PerLayerSpec, QkNorm, RecurrentSpec, Tensor,
};

use crate::kernels::{Form, PANEL_LANES};

use super::format_plan::Role;
use super::lane::{Lane, elements};
use super::norm::{PackedNorm, PackedNorms};
use super::packed_recurrent::PackedRecurrent;
use super::packer::{Packer, Part};
use super::panel::{PackedMatrix, Packing};

pub struct PackedLayer {
    pub attention_norms: PackedNorms,
    /// The projections to queries, keys and values; in a gated delta network, the projections to gates, strengths and
    /// decays follow. In a short convolution, the projection of its input.
    pub qkv: PackedMatrix,
    pub q_norm: Option<PackedNorm>,
    pub k_norm: Option<PackedNorm>,
    /// The norm of values, whose weights are 1.
    pub v_norm: Option<PackedNorm>,
    /// The sink of each query head; empty without sinks.
    pub sinks: Vec<f32>,
    /// The projection to the gates of each query head's output.
    pub gate: Option<PackedMatrix>,
    /// The parts of a recurrent layer apart from its matrices.
    pub recurrent: Option<PackedRecurrent>,
    pub output: PackedMatrix,
    pub feed_forward_norms: PackedNorms,
    pub feed_forward: PackedFeedForward,
    /// The part that adds the layer's own input.
    pub per_layer: Option<PackedPerLayer>,
    /// The factor by which the residual stream is multiplied at the layer's end.
    pub scale: f32,
}

/// The part of a layer that adds its own input.
pub struct PackedPerLayer {
    pub gate: PackedMatrix,
    pub output: PackedMatrix,
    pub norm: PackedNorm,
}

pub enum PackedFeedForward {
    Mlp(PackedMlp),
    Experts(Box<PackedExperts>),
}

/// The matrices of an MLP, or of several MLPs of the same shape, one after the other. Each begins
/// with a panel of its own.
pub struct PackedMlp {
    /// The projections to gates and gated values: each panel has 16 gates, then the 16 values they
    /// gate. Without gates, the projection to the values alone.
    pub gate_up: PackedMatrix,
    pub down: PackedMatrix,
}

pub struct PackedExperts {
    /// The projection to a score for each expert and, after the scores, to the weight of a weighed shared expert.
    pub router: PackedMatrix,
    pub selection_bias: Option<Vec<f32>>,
    pub experts: PackedMlp,
    pub shared: Option<PackedMlp>,
    /// For each expert, the factor of the weight with which rows choose it.
    pub scales: Option<Vec<f32>>,
    pub own_norms: Option<PackedExpertNorms>,
}

/// The norms of experts beside an MLP.
pub struct PackedExpertNorms {
    pub shared_output: PackedNorm,
    pub input: PackedNorm,
    pub output: PackedNorm,
    pub router: PackedNorm,
}

impl PackedLayer {
    /// The form of all of the layer's matrices, and of their input rows. Experts and routers have forms of their own.
    pub fn form(&self) -> Form {
        self.qkv.form
    }

    /// The layer's matrices, in the order in which they are packed.
    pub fn matrices(&self) -> impl Iterator<Item = &PackedMatrix> {
        let (mlp, router, shared) = match &self.feed_forward {
            PackedFeedForward::Mlp(mlp) => (mlp, None, None),
            PackedFeedForward::Experts(experts) => (
                &experts.experts,
                Some(&experts.router),
                experts.shared.as_ref(),
            ),
        };
        let mlps = [mlp].into_iter().chain(shared);
        let mlps = mlps.flat_map(|mlp| [&mlp.gate_up, &mlp.down]);
        let per_layer = self.per_layer.iter().flat_map(|it| [&it.gate, &it.output]);
        [&self.qkv]
            .into_iter()
            .chain(&self.gate)
            .chain([&self.output])
            .chain(router)
            .chain(mlps)
            .chain(per_layer)
    }

    /// The form of the experts' matrices, if any.
    pub fn expert_form(&self) -> Option<Form> {
        match &self.feed_forward {
            PackedFeedForward::Mlp(_) => None,
            PackedFeedForward::Experts(experts) => Some(experts.experts.gate_up.form),
        }
    }

    pub fn has_groups(&self) -> bool {
        self.matrices().any(PackedMatrix::is_grouped)
    }
}

/// The roles of an MLP's two matrices, if all rows pass through the MLP.
pub(super) const OF_ALL: [Role; 2] = [Role::Projection, Role::Down];
pub(super) const OF_EXPERTS: [Role; 2] = [Role::Expert, Role::ExpertDown];

/// The matrices that read the input of attention, or of its replacement.
pub(super) fn input_matrices(spec: &LayerSpec) -> &'static [LayerTensor] {
    use LayerTensor::*;
    match &spec.recurrent {
        None if spec.attention.kv_source.is_some() => &[Q],
        None if spec.attention.values_are_keys => &[Q, K],
        None => &[Q, K, V],
        Some(RecurrentSpec::GatedDelta(_)) => {
            &[DeltaQ, DeltaK, DeltaV, DeltaGate, DeltaStrength, DeltaDecay]
        }
        Some(RecurrentSpec::ShortConvolution(_)) => &[ConvolutionInput],
    }
}

pub(super) fn output_matrix(spec: &LayerSpec) -> LayerTensor {
    match &spec.recurrent {
        None => LayerTensor::O,
        Some(RecurrentSpec::GatedDelta(_)) => LayerTensor::DeltaO,
        Some(RecurrentSpec::ShortConvolution(_)) => LayerTensor::ConvolutionOutput,
    }
}

/// The matrices of one MLP.
struct MlpParts<'a> {
    gate: Option<Part<'a>>,
    up: Part<'a>,
    down: Part<'a>,
}

impl Packer<'_> {
    pub(super) fn layer(
        &mut self,
        spec: &LayerSpec,
        hidden: usize,
        layer: &LayerWeights,
    ) -> Result<PackedLayer, DeviceError> {
        layer.check(spec, hidden).map_err(DeviceError)?;
        let attention = &spec.attention;
        let qk_norm = attention.qk_norm.filter(|_| spec.recurrent.is_none());
        let head_norm = |tensor| {
            let norm = qk_norm.filter(|_| layer.get(tensor).is_some());
            norm.map(|norm| {
                let (QkNorm::Heads(norm) | QkNorm::Whole(norm)) = norm;
                PackedNorm::of_layer(norm, layer, tensor)
            })
        };
        let qkv = input_matrices(spec).iter();
        let qkv: Vec<_> = qkv.map(|matrix| part(layer, *matrix)).collect();
        let gate = layer.get(LayerTensor::AttentionGate);
        let gate = gate.map(|_| [part(layer, LayerTensor::AttentionGate)]);
        let output = part(layer, output_matrix(spec));
        Ok(PackedLayer {
            attention_norms: PackedNorms::new(
                &spec.attention_norms,
                layer,
                [LayerTensor::AttentionNorm, LayerTensor::AttentionOutputNorm],
            ),
            qkv: self.matrix(Role::Projection, &qkv, hidden)?,
            q_norm: head_norm(LayerTensor::QNorm),
            k_norm: head_norm(LayerTensor::KNorm),
            v_norm: attention.value_norm.map(|spec| PackedNorm {
                spec,
                weight: vec![1.0; attention.head_dim],
                bias: Vec::new(),
            }),
            sinks: layer.get(LayerTensor::Sinks).map_or(Vec::new(), elements),
            gate: (gate.as_ref())
                .map(|gate| self.matrix(Role::Projection, gate, hidden))
                .transpose()?,
            recurrent: (spec.recurrent.as_ref())
                .map(|recurrent| PackedRecurrent::new(recurrent, layer)),
            output: self.matrix(Role::Projection, &[output], spec.mixed_len())?,
            feed_forward_norms: PackedNorms::new(
                &spec.feed_forward_norms,
                layer,
                [LayerTensor::MlpNorm, LayerTensor::MlpOutputNorm],
            ),
            feed_forward: match &spec.feed_forward {
                FeedForward::Mlp(spec) => {
                    PackedFeedForward::Mlp(self.mlps(OF_ALL, spec, hidden, layer, [Mlp::Only])?)
                }
                FeedForward::Experts(spec) => {
                    PackedFeedForward::Experts(Box::new(self.experts(spec, hidden, layer)?))
                }
            },
            per_layer: (spec.per_layer.as_ref())
                .map(|spec| self.per_layer(spec, hidden, layer))
                .transpose()?,
            scale: { layer.get(LayerTensor::LayerScale) }.map_or(1.0, |scale| elements(scale)[0]),
        })
    }

    fn per_layer(
        &mut self,
        spec: &PerLayerSpec,
        hidden: usize,
        layer: &LayerWeights,
    ) -> Result<PackedPerLayer, DeviceError> {
        let (gate, output) = (LayerTensor::PerLayerGate, LayerTensor::PerLayerOutput);
        Ok(PackedPerLayer {
            gate: self.matrix(Role::Projection, &[part(layer, gate)], hidden)?,
            output: self.matrix(Role::Projection, &[part(layer, output)], spec.len)?,
            norm: PackedNorm::of_layer(spec.norm, layer, LayerTensor::PerLayerNorm),
        })
    }

    fn experts(
        &mut self,
        spec: &ExpertSpec,
        hidden: usize,
        layer: &LayerWeights,
    ) -> Result<PackedExperts, DeviceError> {
        let shared = spec.shared.as_ref();
        Ok(PackedExperts {
            router: self.router(layer, hidden)?,
            selection_bias: layer.get(LayerTensor::SelectionBias).map(elements),
            experts: {
                let experts = (0..spec.num_experts).map(Mlp::Expert);
                self.mlps(OF_EXPERTS, &spec.expert, hidden, layer, experts)?
            },
            shared: shared
                .map(|shared| self.mlps(OF_ALL, &shared.mlp, hidden, layer, [Mlp::Shared]))
                .transpose()?,
            scales: layer.get(LayerTensor::ExpertScales).map(elements),
            own_norms: spec
                .own_norms
                .map(|norm| PackedExpertNorms::new(norm, layer)),
        })
    }

    /// Packs the router, and after it the vector that weighs the shared expert. Rounding the router's input would
    /// change the choice of experts, so its input rows are in f32 for any form of the layer.
    fn router(&mut self, layer: &LayerWeights, k: usize) -> Result<PackedMatrix, DeviceError> {
        let router = &layer[LayerTensor::Router];
        let shared = layer.get(LayerTensor::SharedWeight).map(|weight| Tensor {
            shape: vec![1, k],
            ..weight.clone()
        });
        let shared = shared.as_ref().map(|weight| (weight, None));
        let parts = [Some(part(layer, LayerTensor::Router)), shared];
        let lanes: Vec<_> = parts.into_iter().flatten().flat_map(lanes).collect();
        self.pack_or_read(&lanes, router_packing(router, k))
    }

    /// Packs MLPs of the same shape.
    fn mlps(
        &mut self,
        [first, down]: [Role; 2],
        spec: &MlpSpec,
        hidden: usize,
        layer: &LayerWeights,
        mlps: impl IntoIterator<Item = Mlp>,
    ) -> Result<PackedMlp, DeviceError> {
        let mlps = mlps.into_iter().map(|mlp| MlpParts {
            gate: spec.is_gated.then(|| part(layer, LayerTensor::Gate(mlp))),
            up: part(layer, LayerTensor::Up(mlp)),
            down: part(layer, LayerTensor::Down(mlp)),
        });
        let mlps: Vec<_> = mlps.collect();
        let ups: Vec<_> = mlps
            .iter()
            .flat_map(|mlp| mlp.gate.into_iter().chain([mlp.up]))
            .collect();
        let up_lanes = mlps.iter().flat_map(|mlp| match mlp.gate {
            Some(gate) => whole_panels(pairs(gate, mlp.up)),
            None => whole_panels(lanes(mlp.up).collect()),
        });
        let up_lanes: Vec<_> = up_lanes.collect();
        let downs: Vec<_> = mlps.iter().map(|mlp| mlp.down).collect();
        let down_lanes = mlps.iter().map(|mlp| lanes(mlp.down).collect());
        let down_lanes: Vec<_> = down_lanes.flat_map(whole_panels).collect();
        Ok(PackedMlp {
            gate_up: self.pack(first, &ups, &up_lanes, hidden)?,
            down: self.pack(down, &downs, &down_lanes, spec.intermediate_size)?,
        })
    }
}

impl PackedExpertNorms {
    fn new(spec: NormSpec, layer: &LayerWeights) -> Self {
        let norm = |tensor| PackedNorm::of_layer(spec, layer, tensor);
        let mut router = norm(LayerTensor::RouterNorm);
        let root = (router.weight.len() as f32).sqrt();
        router.weight.iter_mut().for_each(|weight| *weight /= root);
        Self {
            shared_output: norm(LayerTensor::SharedOutputNorm),
            input: norm(LayerTensor::ExpertNorm),
            output: norm(LayerTensor::ExpertOutputNorm),
            router,
        }
    }
}

/// The packing of a router, independent of the format of other matrices.
pub(super) fn router_packing(router: &Tensor, k: usize) -> Packing {
    Packing {
        k,
        dtype: router.dtype,
        form: Form::Columns,
        groups: None,
        hadamard: false,
    }
}

/// A matrix of a layer whose tensors were checked, with its bias.
fn part(layer: &LayerWeights, matrix: LayerTensor) -> Part<'_> {
    let bias = matrix.bias().and_then(|bias| layer.get(bias));
    (&layer[matrix], bias)
}

/// The output channels of a matrix.
pub(super) fn lanes<'a>((weight, bias): Part<'a>) -> impl Iterator<Item = Option<Lane<'a>>> {
    (0..weight.shape[0]).map(move |row| Some(Lane { weight, bias, row }))
}

/// The output channels of gate and up projections in common panels: 16 of each in turn.
fn pairs<'a>(gate: Part<'a>, up: Part<'a>) -> Vec<Option<Lane<'a>>> {
    let lanes = paired(gate.0.shape[0], [gate, up]).into_iter();
    let lane = |((weight, bias), row)| Lane { weight, bias, row };
    lanes.map(|source| source.map(lane)).collect()
}

/// The rows of a gate and an up projection in the order of panels.
pub(super) fn paired<T: Copy>(num_rows: usize, [gate, up]: [T; 2]) -> Vec<Option<(T, usize)>> {
    let blocks = (0..num_rows).step_by(16).flat_map(|first| {
        [gate, up].into_iter().flat_map(move |matrix| {
            (first..first + 16).map(move |row| (row < num_rows).then_some((matrix, row)))
        })
    });
    blocks.collect()
}

/// Fills the last panel with channels without a source.
fn whole_panels(mut lanes: Vec<Option<Lane<'_>>>) -> Vec<Option<Lane<'_>>> {
    lanes.resize_with(lanes.len().next_multiple_of(PANEL_LANES), || None);
    lanes
}
