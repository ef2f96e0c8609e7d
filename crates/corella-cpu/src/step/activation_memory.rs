//! The memory of a forward pass, allocated once for the largest step.

use std::io;

use corella_model::{
    AttentionSpec, DecoderSpec, FeedForward, GatedDeltaSpec, LayerSpec, RecurrentSpec,
};

use crate::attention::Queries;
use crate::dense::{Buffer, PackedRows};
use crate::kernels::{Kernels, PANEL_LANES};
use crate::kv::KvMemory;
use crate::weights::{PackedLayer, PackedWeights};

use super::forward::adapter::AdapterRows;
use super::forward::expert_layer::ExpertRows;
use super::forward::norm::norms_sums;
use super::forward::per_layer::PerLayerRows;
use super::forward::projection::is_normed_apart;
use super::forward::recurrent_layer::gated_delta;
use super::head_groups::HeadGroups;

pub struct Activations {
    /// The residual stream, `[rows][hidden_size]`.
    pub hidden: Buffer,
    /// For each kind of RoPE, the cosines and sines of each row's position.
    pub angles: Vec<Buffer>,
    pub normed: PackedRows,
    /// For each worker, the queries, keys and values of one group of heads.
    pub heads: Vec<Buffer>,
    /// The queries, keys and values of all heads, for layers that norm them across groups.
    pub projected: Option<Buffer>,
    /// For each worker, one head of normed values, for layers that norm values.
    pub values: Vec<Buffer>,
    pub queries: Queries,
    /// The gates of the outputs of query heads.
    pub gates: Option<Buffer>,
    /// The rows of recurrent layers.
    pub recurrent: Option<RecurrentActivations>,
    /// The layers' own inputs, if layers have any.
    pub per_layer: Option<PerLayerRows>,
    /// The output of a layer's part, for parts with a norm after them and for shared experts.
    pub branch: Option<Buffer>,
    pub experts: Option<ExpertRows>,
    /// The memory for adapters, if supported.
    pub adapters: Option<AdapterRows>,
    pub layers: Vec<LayerRows>,
    /// The final norm's output, for one block of the sampled rows.
    pub head_input: PackedRows,
    pub logits: Buffer,
}

/// Rows inside of recurrent layers.
pub struct RecurrentActivations {
    /// In a gated delta network, `[rows][queries, keys, values, gates, strengths, decays]`; in a short
    /// convolution, `[rows][gates of inputs, gates of outputs, inputs]`.
    pub projected: Buffer,
    /// The queries, keys and values of gated delta networks after the convolution.
    pub convolved: Buffer,
}

/// Rows whose length differs from layer to layer. All layers use the same memory.
pub struct LayerRows {
    pub attended: PackedRows,
    /// The input of the down projection of the layer's MLP, or of its shared expert.
    pub gated: PackedRows,
    /// The input of the down projection of the layer's experts.
    pub expert_gated: Option<PackedRows>,
}

/// The sizes of a forward pass.
pub struct Sizes {
    pub max_rows: usize,
    /// The number of rows whose logits are computed at once.
    pub logit_rows: usize,
    pub num_threads: usize,
    /// The length of the heads of each kind of RoPE.
    pub rotated_lens: Vec<usize>,
    /// The largest rank of an adapter's matrices, if adapters are supported.
    pub max_adapter_rank: Option<usize>,
}

impl Activations {
    pub fn new(
        spec: &DecoderSpec,
        kernels: &Kernels,
        weights: &PackedWeights,
        kv: &KvMemory,
        sizes: Sizes,
    ) -> io::Result<Self> {
        let (max_rows, hidden) = (sizes.max_rows, spec.hidden_size);
        let head = &weights.ends.head;
        let form = weights.form();
        let has_groups = weights.layers.iter().any(PackedLayer::has_groups);
        let packed = |num_rows, k| PackedRows::new(num_rows, k, form, has_groups);
        let expert_form = weights.expert_form();
        let gathered = |num_rows, k| PackedRows::new(num_rows, k, expert_form, has_groups);
        let most = |len: &dyn Fn(&LayerSpec) -> usize| spec.layers.iter().map(len).max();
        let most = |len: &dyn Fn(&LayerSpec) -> usize| most(len).unwrap_or(0);
        let attended = packed(max_rows, most(&LayerSpec::mixed_len))?;
        let gated = packed(max_rows, most(&gated_len))?;
        let experts = ExpertRows::new(spec, kernels, max_rows, gathered)?;
        let layers = spec.layers.iter().map(|layer| LayerRows {
            attended: attended.shortened(layer.mixed_len()),
            gated: gated.shortened(gated_len(layer)),
            expert_gated: experts.as_ref().and_then(|experts| experts.gated_of(layer)),
        });
        let layers = layers.collect();
        let attentions = || spec.layers.iter().map(|layer| &layer.attention);
        let group_len = attentions().map(|attention| HeadGroups::new(attention).num_lanes());
        // The stride differs from the stride of the angles: a load waits for a recent store whose address has the same
        // low 12 bits (4K aliasing).
        let heads_len = group_len.max().unwrap_or(0) + PANEL_LANES;
        let heads = (0..sizes.num_threads).map(|_| Buffer::new(max_rows, heads_len));
        let angles = sizes.rotated_lens.iter();
        let angles = angles.map(|&head_dim| Buffer::new(max_rows, head_dim));
        let normed = attentions().filter(|attention| attention.value_norm.is_some());
        let normed = normed.map(|attention| attention.head_dim).max();
        let values = normed
            .into_iter()
            .flat_map(|len| (0..sizes.num_threads).map(move |_| len));
        let values = values.map(|len| Buffer::new(max_rows, len));
        let with_gates = spec.layers.iter().filter(|layer| layer.recurrent.is_none());
        let with_gates = with_gates.filter(|layer| layer.attention.has_output_gate);
        let gates = with_gates.map(|layer| layer.attention.query_len()).max();
        let projected = attentions().filter(|attention| is_normed_apart(attention));
        let projected = projected.map(|attention| attention.query_len() + 2 * attention.kv_len());
        let query_len = attentions().map(AttentionSpec::query_len).max();
        let has_branch = !norms_sums(spec) && spec.layers.iter().any(keeps_branch);
        Ok(Self {
            hidden: Buffer::new(max_rows, hidden)?,
            angles: angles.collect::<io::Result<_>>()?,
            normed: packed(max_rows, hidden)?,
            heads: heads.collect::<io::Result<_>>()?,
            projected: (projected.max())
                .map(|len| Buffer::new(max_rows, len))
                .transpose()?,
            values: values.collect::<io::Result<_>>()?,
            queries: Queries::new(kernels, query_len.unwrap_or(0), kv, max_rows)?,
            gates: gates.map(|len| Buffer::new(max_rows, len)).transpose()?,
            recurrent: RecurrentActivations::new(spec, max_rows)?,
            per_layer: PerLayerRows::new(spec, kernels, (max_rows, sizes.num_threads), packed)?,
            branch: has_branch
                .then(|| Buffer::new(max_rows, hidden))
                .transpose()?,
            experts,
            adapters: { sizes.max_adapter_rank }
                .map(|rank| AdapterRows::new(spec, max_rows, sizes.num_threads, rank))
                .transpose()?,
            layers,
            head_input: PackedRows::new(sizes.logit_rows, hidden, head.form, head.is_grouped())?,
            logits: Buffer::new(sizes.logit_rows, spec.vocab_size)?,
        })
    }
}

impl RecurrentActivations {
    /// `None` for models without such a layer.
    fn new(spec: &DecoderSpec, max_rows: usize) -> io::Result<Option<Self>> {
        let specs = spec
            .layers
            .iter()
            .filter_map(|layer| layer.recurrent.as_ref());
        let projected = specs.map(|spec| match spec {
            RecurrentSpec::GatedDelta(spec) => {
                spec.num_channels() + spec.value_len() + 2 * spec.num_value_heads
            }
            RecurrentSpec::ShortConvolution(spec) => 3 * spec.num_channels,
        });
        let Some(projected) = projected.max() else {
            return Ok(None);
        };
        let deltas = spec.layers.iter().filter_map(gated_delta);
        let convolved = deltas.map(GatedDeltaSpec::num_channels).max();
        Ok(Some(Self {
            projected: Buffer::new(max_rows, projected)?,
            convolved: Buffer::new(max_rows, convolved.unwrap_or(0))?,
        }))
    }
}

/// The input length of the down projection that all rows of a layer pass through: of the layer's MLP, or of its shared
/// expert.
fn gated_len(layer: &LayerSpec) -> usize {
    match &layer.feed_forward {
        FeedForward::Mlp(mlp) => mlp.intermediate_size,
        FeedForward::Experts(experts) => {
            let shared = experts.shared.as_ref();
            shared.map_or(0, |shared| shared.mlp.intermediate_size)
        }
    }
}

/// Whether a part of the layer is stored before its addition to the residual stream.
fn keeps_branch(layer: &LayerSpec) -> bool {
    let norms = [&layer.attention_norms, &layer.feed_forward_norms];
    let is_shared = |experts: &FeedForward| match experts {
        FeedForward::Experts(experts) => experts.shared.is_some(),
        FeedForward::Mlp(_) => false,
    };
    norms.into_iter().any(|norms| norms.after.is_some())
        || is_shared(&layer.feed_forward)
        || layer.per_layer.is_some()
}

/// Whether two layers have the same division of attention into tasks.
pub fn divide_alike(a: &AttentionSpec, b: &AttentionSpec) -> bool {
    let key = |it: &AttentionSpec| (it.num_heads, it.num_kv_heads, it.window, it.is_causal);
    key(a) == key(b)
}
