//! The forward pass: interprets a `DecoderSpec` for the rows of one step.
//!
//! All workers walk through the layers together. Between two barriers, each worker writes rows, heads or output
//! channels of its own, and reads only data that was written before the first barrier.

pub(super) mod adapter;
pub(super) mod expert_layer;
pub(super) mod norm;
pub(super) mod per_layer;
pub(super) mod projection;
pub(super) mod recurrent_layer;

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use corella_core::TokenId;
use corella_model::{
    AttentionSpec, DecoderSpec, DeviceError, FeedForward, KvFormat, KvLayer, LayerInput, LayerSpec,
    MlpSpec,
};

use crate::attention::{AttentionLayer, AttentionScratch, TaskShape};
use crate::dense::{Buffer, Epilogue, Grid, PackedRows, Tiles, Weights, shared_gemm};
use crate::kernels::{Kernels, PANEL_LANES};
use crate::kv::{KvMemory, RowShape};
use crate::recurrent::{DeltaScratch, StateLimits, StateMemory};
use crate::system::Worker;
use crate::weights::{
    AdaptedMatrix, PackedEnds, PackedFeedForward, PackedLayer, PackedMatrix, PackedMlp, PackedNorm,
    PackedWeights,
};

use self::norm::{RowNorm, norms_sums};
use self::recurrent_layer::gated_delta;
use super::activation_memory::{Activations, Sizes, divide_alike};
use super::expert_plan::ExpertPlan;
use super::layout::StepLayout;
use super::profile::{Operation, Profile, Walk, barrier_after};
use super::rotary::Rotary;

pub struct Forward {
    pub(super) spec: DecoderSpec,
    pub(super) kernels: &'static Kernels,
    /// The number of rows in a tile of the layers' GEMMs.
    pub(super) tile_rows: usize,
    pub(super) expert_tile_rows: usize,
    /// The number of rows in a tile of the head's GEMM.
    head_tile_rows: usize,
    weights: PackedWeights,
    /// The different kinds of RoPE.
    rotaries: Vec<Rotary>,
    /// For each way to divide attention into tasks, the index of a layer that uses it.
    attention_kinds: Vec<usize>,
    pub(super) layers: Vec<LayerParts>,
    /// The number of layers in the stages before this one.
    pub(super) first_layer: usize,
    pub kv: Arc<KvMemory>,
    /// The states of sequences, if layers have any.
    pub states: Option<StateMemory>,
    pub(super) activations: Activations,
    pub(super) scratch: Vec<Mutex<Scratch>>,
    pub profile: Option<Arc<Profile>>,
}

/// The shared parts that a layer uses.
pub struct LayerParts {
    /// The index of the RoPE of keys; `query_rotary` is the index for queries.
    pub rotary: usize,
    pub query_rotary: usize,
    attention_kind: usize,
    /// `None` for recurrent layers.
    kv: Option<KvLayer>,
    /// The number of a page's layers that are complete in all KV groups once this layer has written its keys and
    /// values.
    num_page_layers_done: usize,
}

/// The private memory of one worker.
pub struct Scratch {
    attention: AttentionScratch,
    delta: DeltaScratch,
    experts: ExpertPlan,
}

/// The initial residual stream.
#[derive(Clone, Copy)]
pub enum Incoming<'a> {
    /// The embeddings of the tokens.
    Tokens,
    /// The output of another stage, `[rows][hidden_size]`.
    Rows(&'a [f32]),
    /// The current content of this stage's residual stream.
    InPlace,
}

/// Sees the inputs of the dense layers, after the barrier that completes them and before they are overwritten.
pub trait Observer: Sync {
    fn observe(&self, input: LayerInput, rows: &PackedRows, tiles: Tiles, worker: &Worker<'_>);
}

impl Observer for () {
    fn observe(&self, _: LayerInput, _: &PackedRows, _: Tiles, _: &Worker<'_>) {}
}

/// The parts of a forward pass, in a stage of the pipeline and for calibration.
pub struct ForwardParts {
    /// The model, cut down to the layers of `weights`.
    pub spec: DecoderSpec,
    pub kernels: &'static Kernels,
    pub weights: PackedWeights,
    /// The number of layers in the stages before this one.
    pub first_layer: usize,
    /// The places of the layers' keys and values; `None` for recurrent layers.
    pub kv_layers: Vec<Option<KvLayer>>,
    /// The rows of all layers of the model: pages have one size and order in all stages.
    pub row_shapes: Vec<RowShape>,
    pub limits: ForwardLimits,
    pub num_threads: usize,
    /// Whether logits are computed.
    pub draws: bool,
    /// The largest rank of an adapter's matrices, if adapters are supported.
    pub max_adapter_rank: Option<usize>,
}

/// The sizes of steps and of their memory.
#[derive(Clone, Copy)]
pub struct ForwardLimits {
    pub num_pages: usize,
    pub page_size: u32,
    pub kv_format: KvFormat,
    /// The number of rows of the largest step.
    pub max_rows: usize,
    /// The longest computed context, on which some kinds of RoPE depend.
    pub max_context: usize,
    pub states: StateLimits,
}

impl LayerParts {
    pub fn kv(&self) -> KvLayer {
        self.kv.expect("a recurrent layer has no keys and values")
    }
}

impl Forward {
    /// Allocates the KV pages and the activations.
    pub fn new(parts: ForwardParts) -> Result<Self, DeviceError> {
        let in_page = parts
            .kv_layers
            .iter()
            .flatten()
            .map(|layer| layer.in_page + 1);
        let kv = KvMemory::for_kernels(
            parts.kernels,
            in_page.max().unwrap_or(0),
            &parts.row_shapes,
            parts.limits.num_pages,
            parts.limits.page_size,
            parts.limits.kv_format,
        );
        let no_memory =
            |what: &'static str| move |error| DeviceError(format!("no memory for {what}: {error}"));
        let kv = kv.map_err(no_memory("the KV pages"))?;
        Self::with_kv(parts, Arc::new(kv)).map_err(no_memory("the activations"))
    }

    fn with_kv(parts: ForwardParts, kv: Arc<KvMemory>) -> io::Result<Self> {
        let ForwardParts {
            spec,
            kernels,
            weights,
            first_layer,
            kv_layers,
            limits,
            num_threads,
            draws,
            max_adapter_rank,
            ..
        } = parts;
        let head_form = weights.ends.head.form;
        let head_tile_rows = kernels.rows_at_once(head_form);
        let num_page_layers = kv.num_places();
        let (mut rotaries, mut kinds, mut layers) = (Vec::new(), Vec::new(), Vec::new());
        for (index, (layer, &kv_layer)) in spec.layers.iter().zip(&kv_layers).enumerate() {
            let attention = &layer.attention;
            let to_come = spec.layers.iter().zip(&kv_layers).skip(index + 1);
            let to_come = to_come.filter(|(layer, _)| layer.has_kv());
            let to_come = to_come.filter_map(|(_, place)| Some(place.as_ref()?.in_page));
            let alike = |&index: &usize| divide_alike(&spec.layers[index].attention, attention);
            let attention_kind = match layer.recurrent {
                None => index_or_add(&mut kinds, alike, layers.len()),
                Some(_) => 0,
            };
            let rotary = attention.rotary.as_ref();
            let [rotary, query_rotary] = [None, attention.query_growth].map(|growth| {
                let kind = (rotary, growth, attention.head_dim);
                index_or_add(&mut rotaries, |other| *other == kind, kind)
            });
            layers.push(LayerParts {
                rotary,
                query_rotary,
                attention_kind,
                kv: kv_layer,
                num_page_layers_done: to_come.min().unwrap_or(num_page_layers),
            });
        }
        let sizes = Sizes {
            max_rows: limits.max_rows,
            logit_rows: if draws { logit_rows(head_tile_rows) } else { 0 },
            num_threads,
            rotated_lens: rotaries.iter().map(|&(.., head_dim)| head_dim).collect(),
            max_adapter_rank,
        };
        let activations = Activations::new(&spec, kernels, &weights, &kv, sizes)?;
        let deltas = || (spec.layers.iter()).filter_map(|layer| gated_delta(layer));
        let scratch = (0..num_threads).map(|_| {
            Ok(Mutex::new(Scratch {
                attention: AttentionScratch::new(kernels, &kv)?,
                delta: DeltaScratch::new(deltas().map(|spec| (spec.key_dim, spec.value_dim))),
                experts: ExpertPlan::default(),
            }))
        });
        Ok(Self {
            rotaries: (rotaries.iter())
                .map(|&kind| Rotary::new(kind, limits.max_context))
                .collect(),
            attention_kinds: kinds,
            layers,
            first_layer,
            scratch: scratch.collect::<io::Result<_>>()?,
            kernels,
            tile_rows: kernels.rows_at_once(weights.form()),
            expert_tile_rows: kernels.rows_at_once(weights.expert_form()),
            head_tile_rows,
            weights,
            kv,
            states: StateMemory::new(&spec, limits.states),
            activations,
            profile: None,
            spec,
        })
    }

    pub fn spec(&self) -> &DecoderSpec {
        &self.spec
    }

    pub(super) fn ends(&self) -> &PackedEnds {
        &self.weights.ends
    }

    /// The largest number of rows for one call of `logits`.
    pub fn logit_rows(&self) -> usize {
        logit_rows(self.head_tile_rows)
    }

    pub fn tile_rows(&self) -> usize {
        self.tile_rows
    }

    pub(super) fn kernels(&self) -> &'static Kernels {
        self.kernels
    }

    pub(super) fn task_shape(&self) -> TaskShape {
        TaskShape::new(self.kernels, &self.kv)
    }

    /// The output of a dense layer that makes the initial residual stream.
    pub(super) fn stream_output(&self) -> Epilogue<'_> {
        Epilogue::Store(&self.activations.hidden)
    }

    /// Writes a token's embedding.
    pub(super) fn embed(&self, token: TokenId, out: &mut [f32]) {
        self.weights.ends.embed(token as usize, out);
        let scale = self.spec.embedding_scale;
        if scale != 1.0 {
            out.iter_mut().for_each(|value| *value *= scale);
        }
    }

    /// Divides the rows of a layout, and the work among the workers. Call it after the last span.
    pub fn divide(&self, layout: &mut StepLayout) {
        let kinds = self.attention_kinds.iter();
        let kinds = kinds.map(|&layer| &self.spec.layers[layer].attention);
        layout.finish(kinds, self.tile_rows, self.task_shape(), self.scratch.len());
    }

    /// Runs all layers for all rows of the step.
    pub fn layers(&self, layout: &StepLayout, incoming: Incoming<'_>, worker: &Worker<'_>) {
        self.layers_with(layout, incoming, worker, &());
    }

    /// Like `layers`, and shows the dense layers' inputs to an observer.
    pub fn layers_with(
        &self,
        layout: &StepLayout,
        incoming: Incoming<'_>,
        worker: &Worker<'_>,
        observer: &impl Observer,
    ) {
        let scratch = &self.scratch[worker.index()];
        let mut scratch = scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let walk = &mut Walk::new(worker, self.profile.as_deref(), layout.is_prefill());
        self.enter(layout, incoming, worker);
        self.enter_per_layer(layout, walk.worker);
        barrier_after(Operation::Embed, walk);
        self.make_per_layer(layout, walk);
        for (index, layer) in self.weights.layers.iter().enumerate() {
            self.mix(layout, index, layer, walk, &mut scratch, observer);
            match &layer.feed_forward {
                PackedFeedForward::Mlp(mlp) => {
                    self.mlp(layout, index, (layer, mlp), walk, observer);
                }
                PackedFeedForward::Experts(experts) => {
                    let norms = &layer.feed_forward_norms;
                    if !self.spec.layers[index].is_parallel {
                        let norm = norms.before.as_ref();
                        let input = match &experts.own_norms {
                            Some(own) => [Some(&own.input), Some(&own.router)],
                            None => [norm; 2],
                        };
                        self.enter_experts(layout, input, walk);
                        if let Some(shared) = &experts.shared {
                            let input = (&self.activations.normed, &shared.gate_up);
                            self.normalise(norm, |r| r, layout.grid, input, worker);
                        }
                        barrier_after(Operation::Norm, walk);
                    }
                    let after = norms.after.as_ref();
                    self.experts(layout, index, experts, after, &mut scratch.experts, walk);
                }
            }
            self.end_layer(layout, index, layer, walk);
        }
    }

    /// Writes the keys and values of the first layer for the current residual stream, and computes nothing that needs
    /// the keys and values.
    pub fn keys_and_values(&self, layout: &StepLayout, walk: &mut Walk<'_>) {
        let (act, layer, worker) = (&self.activations, &self.weights.layers[0], walk.worker);
        self.enter(layout, Incoming::InPlace, worker);
        let before = layer.attention_norms.before.as_ref();
        let input = (&act.normed, &layer.qkv);
        self.normalise(before, |r| r, layout.grid, input, worker);
        barrier_after(Operation::Norm, walk);
        self.project(layout, 0, layer, walk);
    }

    /// Computes the logits of the given rows, at most `logit_rows` of them, in the given order. All
    /// layers must have run.
    pub fn logits(&self, layout: &StepLayout, rows: &[usize], worker: &Worker<'_>) {
        let act = &self.activations;
        let tiles = Tiles::new(rows.len(), self.head_tile_rows);
        let grid = Grid::new(tiles, self.scratch.len());
        let walk = &mut Walk::new(worker, self.profile.as_deref(), layout.is_prefill());
        let (norm, head) = (&self.weights.ends.norm, &self.weights.ends.head);
        self.normalise(
            Some(norm),
            |r| rows[r],
            grid,
            (&act.head_input, &**head),
            worker,
        );
        barrier_after(Operation::Norm, walk);
        let out = Epilogue::logits(&act.logits, self.spec.logit_scale, self.spec.logit_soft_cap);
        self.dense(
            Operation::Head,
            &act.head_input,
            grid,
            (&**head).into(),
            out,
            walk,
        );
    }

    /// # Safety
    /// No other thread uses the row's logits while the slice is in use.
    #[expect(clippy::mut_from_ref, reason = "workers take different rows")]
    pub unsafe fn logits_mut(&self, row: usize) -> &mut [f32] {
        // SAFETY: the caller promises exclusive access.
        let row = unsafe { self.activations.logits.row_mut(row) };
        &mut row[..self.spec.vocab_size]
    }

    /// Returns the residual stream after the last layer, `[rows][hidden_size]`.
    pub fn outgoing(&mut self, num_rows: usize, mut rows: Vec<f32>) -> Vec<f32> {
        let len = self.spec.hidden_size;
        rows.clear();
        rows.reserve(num_rows * len);
        for r in 0..num_rows {
            // SAFETY: `&mut self` excludes the workers.
            let row = unsafe { self.activations.hidden.row(r) };
            rows.extend_from_slice(&row[..len]);
        }
        rows
    }

    /// Writes the final norm of a row of the residual stream. All layers must have run.
    pub fn hidden_state(&mut self, row: usize, state: &mut [f32]) {
        // SAFETY: `&mut self` excludes the workers.
        unsafe { self.read_hidden_state(row, state) };
    }

    /// Like `hidden_state`.
    ///
    /// # Safety
    /// No worker writes the residual stream during the call.
    pub unsafe fn read_hidden_state(&self, row: usize, state: &mut [f32]) {
        // SAFETY: the caller promises that no worker writes the residual stream.
        let x = unsafe { self.activations.hidden.row(row) };
        let x = &x[..self.spec.hidden_size];
        let norm = RowNorm::new(self.kernels, Some(&self.weights.ends.norm), x);
        norm.for_each_part(x, |first, part| {
            state[first..][..part.len()].copy_from_slice(part);
        });
    }

    fn enter(&self, layout: &StepLayout, incoming: Incoming<'_>, worker: &Worker<'_>) {
        let ends = &self.weights.ends;
        for r in layout.grid.own_rows(worker.index()) {
            let row = &layout.rows.rows[r];
            // SAFETY: the row belongs to this worker.
            let hidden = unsafe { self.activations.hidden.row_mut(r) };
            let hidden = &mut hidden[..self.spec.hidden_size];
            match incoming {
                Incoming::InPlace => {}
                Incoming::Rows(rows) => {
                    hidden.copy_from_slice(&rows[r * hidden.len()..][..hidden.len()])
                }
                Incoming::Tokens => {
                    self.embed(row.token, hidden);
                    ends.add_position(row.position, hidden);
                    ends.encoder.add_segment(row.is_second_text, hidden);
                    if let Some(norm) = &ends.encoder.norm {
                        RowNorm::new(self.kernels, Some(norm), hidden).apply(hidden);
                    }
                }
            }
            for (rotary, angles) in self.rotaries.iter().zip(&self.activations.angles) {
                // SAFETY: the row belongs to this worker.
                let angles = unsafe { angles.row_mut(r) };
                rotary.angles(row.position, &mut angles[..rotary.head_dim]);
            }
        }
    }

    /// The part of a layer that mixes tokens: attention or its replacement.
    fn mix(
        &self,
        layout: &StepLayout,
        index: usize,
        layer: &PackedLayer,
        walk: &mut Walk<'_>,
        scratch: &mut Scratch,
        observer: &impl Observer,
    ) {
        let (act, grid) = (&self.activations, layout.grid);
        let worker = walk.worker;
        let (spec, norms) = (&self.spec.layers[index], &layer.attention_norms);
        let before = norms.before.as_ref();
        self.normalise(before, |r| r, grid, (&act.normed, &layer.qkv), worker);
        if spec.is_parallel && matches!(spec.feed_forward, FeedForward::Experts(_)) {
            self.enter_experts(layout, [before; 2], walk);
        }
        barrier_after(Operation::Norm, walk);
        observer.observe(LayerInput::Attention, &act.normed, grid.tiles, worker);
        match &spec.recurrent {
            None => self.attend(layout, index, layer, walk, &mut scratch.attention),
            Some(spec) => {
                self.run_recurrent(layout, index, (spec, layer), walk, &mut scratch.delta);
            }
        }
        let attended = &act.layers[index].attended;
        self.complete(attended, &layer.output, grid, walk);
        observer.observe(LayerInput::AttentionOutput, attended, grid.tiles, worker);
        let after = norms.after.as_ref();
        let out = self.part_output(spec, after);
        let place = (index, AdaptedMatrix::Output);
        let weights = self.adapted(layout, place, attended, &layer.output, walk);
        self.dense(Operation::Output, attended, grid, weights, out, walk);
        self.add_part(spec, after, grid, worker);
    }

    fn attend(
        &self,
        layout: &StepLayout,
        index: usize,
        layer: &PackedLayer,
        walk: &mut Walk<'_>,
        scratch: &mut AttentionScratch,
    ) {
        let (act, grid, worker) = (&self.activations, layout.grid, walk.worker);
        let spec = &self.spec.layers[index];
        if let (Some(weights), Some(gates)) = (&layer.gate, &act.gates) {
            let out = Epilogue::Store(gates);
            // The barrier after the projection completes the gates, too.
            shared_gemm(
                self.kernels,
                &act.normed,
                &grid,
                weights.into(),
                out,
                worker,
            );
            self.count_dense(Operation::Qkv, &act.normed, grid, weights, walk);
            barrier_after(Operation::Qkv, walk);
        }
        self.project(layout, index, layer, walk);
        // This is after the barrier that follows every worker's writes of keys and values.
        if let Some(step) = layout.step.filter(|_| worker.index() == 0) {
            let num_done = self.layers[index].num_page_layers_done;
            self.kv.counter.advance(step, num_done);
        }
        AttentionLayer {
            kernels: self.kernels,
            spec: &spec.attention,
            sinks: &layer.sinks,
            kv: self.kv.rows_of(&spec.attention),
            kv_layer: self.layers[index].kv(),
            spans: &layout.spans,
            plan: &layout.attention[self.layers[index].attention_kind],
            queries: &act.queries,
            gates: act.gates.as_ref().filter(|_| layer.gate.is_some()),
            out: &act.layers[index].attended,
            tiles: grid.tiles,
        }
        .run(worker, scratch);
        let (flops, bytes) = self.attention_cost(layout, &spec.attention);
        walk.count(Operation::Attention, flops, bytes);
        barrier_after(Operation::Attention, walk);
    }

    fn mlp(
        &self,
        layout: &StepLayout,
        index: usize,
        (layer, mlp): (&PackedLayer, &PackedMlp),
        walk: &mut Walk<'_>,
        observer: &impl Observer,
    ) {
        let (act, grid) = (&self.activations, layout.grid);
        let (spec, norms) = (&self.spec.layers[index], &layer.feed_forward_norms);
        if !spec.is_parallel {
            let input = (&act.normed, &mlp.gate_up);
            self.normalise(norms.before.as_ref(), |r| r, grid, input, walk.worker);
            barrier_after(Operation::Norm, walk);
        }
        let after = norms.after.as_ref();
        let out = self.part_output(spec, after);
        let gated = &act.layers[index].gated;
        let mlp = (spec.feed_forward.mlp(), mlp);
        self.run_mlp(layout, Some(index), mlp, (gated, out), walk, observer);
        self.add_part(spec, after, grid, walk.worker);
    }

    /// Computes an MLP of the normed rows. Adapters may update the MLP of the layer `adapted_layer`.
    pub(super) fn run_mlp(
        &self,
        layout: &StepLayout,
        adapted_layer: Option<usize>,
        (spec, weights): (&MlpSpec, &PackedMlp),
        (gated, out): (&PackedRows, Epilogue<'_>),
        walk: &mut Walk<'_>,
        observer: &impl Observer,
    ) {
        let (rows, grid) = (&self.activations.normed, layout.grid);
        observer.observe(LayerInput::Mlp, rows, grid.tiles, walk.worker);
        let activated = Epilogue::activate(gated, spec);
        let adapted = |place, rows, matrix, walk: &mut Walk<'_>| match adapted_layer {
            Some(layer) => self.adapted(layout, (layer, place), rows, matrix, walk),
            None => matrix.into(),
        };
        let gate_up = adapted(AdaptedMatrix::GateUp, rows, &weights.gate_up, walk);
        self.dense(Operation::GateUp, rows, grid, gate_up, activated, walk);
        self.complete(gated, &weights.down, grid, walk);
        observer.observe(LayerInput::MlpOutput, gated, grid.tiles, walk.worker);
        let down = adapted(AdaptedMatrix::Down, gated, &weights.down, walk);
        self.dense(Operation::Down, gated, grid, down, out, walk);
    }

    /// The output of the last dense layer of a layer's part: the residual stream, unless a norm comes first.
    fn part_output(&self, spec: &LayerSpec, after: Option<&PackedNorm>) -> Epilogue<'_> {
        match after {
            Some(_) if !norms_sums(&self.spec) => Epilogue::Store(self.branch()),
            _ => Epilogue::add(&self.activations.hidden, spec.residual_scale),
        }
    }

    /// Adds the output kept by `part_output` to the residual stream, or norms the sum. Each worker does so for the rows
    /// that it reads next, so no barrier is needed afterwards.
    fn add_part(
        &self,
        spec: &LayerSpec,
        after: Option<&PackedNorm>,
        grid: Grid,
        worker: &Worker<'_>,
    ) {
        match after {
            Some(norm) if norms_sums(&self.spec) => self.norm_sums(norm, grid, worker),
            Some(norm) => {
                self.add_normed(self.branch(), norm, spec.residual_scale, grid, worker);
            }
            None => {}
        }
    }

    pub(super) fn branch(&self) -> &Buffer {
        let branch = self.activations.branch.as_ref();
        branch.expect("a part of a layer is stored, but there are no rows for it")
    }

    pub(super) fn dense(
        &self,
        operation: Operation,
        rows: &PackedRows,
        grid: Grid,
        weights: Weights<'_>,
        out: Epilogue<'_>,
        walk: &mut Walk<'_>,
    ) {
        shared_gemm(self.kernels, rows, &grid, weights, out, walk.worker);
        self.count_dense(operation, rows, grid, weights.matrix, walk);
        barrier_after(operation, walk);
    }

    pub(super) fn count_dense(
        &self,
        operation: Operation,
        rows: &PackedRows,
        grid: Grid,
        weights: &PackedMatrix,
        walk: &Walk<'_>,
    ) {
        let num_lanes = weights.num_panels * PANEL_LANES;
        let flops = 2 * grid.tiles.num_rows() * rows.k * num_lanes;
        walk.count(operation, flops, weights.num_bytes());
    }

    /// Estimates the attention's floating-point operations and the bytes of K and V that it reads.
    fn attention_cost(&self, layout: &StepLayout, spec: &AttentionSpec) -> (usize, usize) {
        let row_bytes = 2 * spec.num_kv_heads * self.kv.format.row_bytes(spec.head_dim);
        layout.spans.iter().fold((0, 0), |(flops, bytes), span| {
            let end = span.start + span.num_rows;
            let num_unseen = spec.first_seen(span.start) + spec.first_seen(end - 1);
            let num_seen = spec.end_seen(span.start, end) + spec.end_seen(end - 1, end);
            let pairs = (num_seen - num_unseen) * span.num_rows / 2;
            let width = spec.num_heads * spec.head_dim;
            let num_read = end - spec.first_seen(span.start);
            (flops + 4 * width * pairs, bytes + num_read * row_bytes)
        })
    }

    /// Completes rows to which several workers have contributed, if their form needs it.
    fn complete(&self, rows: &PackedRows, weights: &PackedMatrix, grid: Grid, walk: &mut Walk<'_>) {
        if !rows.needs_completion() {
            return;
        }
        for row in grid.own_rows(walk.worker.index()) {
            let tile = grid.tiles.rows(grid.tiles.tile_of(row));
            // SAFETY: the row was written before the last barrier, and belongs to this worker.
            unsafe { rows.complete(self.kernels, &tile, row, weights) };
        }
        barrier_after(Operation::Quantise, walk);
    }
}

/// The index of the first element that `is_it` accepts. If it accepts none, appends `other` and returns the index of
/// `other`.
fn index_or_add<T>(list: &mut Vec<T>, is_it: impl FnMut(&T) -> bool, other: T) -> usize {
    list.iter().position(is_it).unwrap_or_else(|| {
        list.push(other);
        list.len() - 1
    })
}

/// The number of rows whose logits are computed at once: whole tiles, large enough that few steps read the head's
/// weights twice, and small enough that the logits take about 40 MB for a large vocabulary.
fn logit_rows(tile_rows: usize) -> usize {
    const MAX_ROWS: usize = 64;
    (MAX_ROWS / tile_rows).max(1) * tile_rows
}
