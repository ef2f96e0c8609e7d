//! The forward pass: interprets a `DecoderSpec` for the rows of one step.
//!
//! All workers walk through it together. Between two barriers each worker writes rows, heads or
//! output channels of its own, and reads only what was written before the first of the two.

use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use corella_model::{
    Activation, AttentionSpec, BranchNorms, DecoderSpec, KvFormat, LayerInput, NormSpec, QkNorm,
};

use crate::attention::{AttentionLayer, AttentionScratch, Queries, TaskShape};
use crate::cpu_error::CpuError;
use crate::dense::{Buffer, Epilogue, Grid, PackedRows, Part, Tiles, gemm, shared_gemm};
use crate::kernels::{Form, Kernels, NormRotate, PANEL_LANES, TILE_K};
use crate::kv::{HeadPage, KvMemory, Rows, Side};
use crate::system::Worker;
use crate::weights::{PackedLayer, PackedMatrix, PackedWeights};

use super::head_groups::HeadGroups;
use super::layout::StepLayout;
use super::profile::{Operation, Profile, Walk};
use super::rotary::Rotary;

/// The number of elements of a row that are normalised and packed at a time.
const NORM_CHUNK: usize = 256;

pub struct Forward {
    spec: DecoderSpec,
    kernels: &'static Kernels,
    /// The number of rows in a tile of the layers' GEMMs.
    tile_rows: usize,
    /// The number of rows in a tile of the head's GEMM.
    head_tile_rows: usize,
    weights: PackedWeights,
    rotary: Rotary,
    pub kv: Arc<KvMemory>,
    activations: Activations,
    scratch: Vec<Mutex<AttentionScratch>>,
    pub profile: Option<Arc<Profile>>,
}

/// Looks at the inputs of the dense layers, after the barrier that completes them and before they
/// are overwritten.
pub trait Observer: Sync {
    fn observe(&self, input: LayerInput, rows: &PackedRows, tiles: Tiles, worker: &Worker<'_>);
}

impl Observer for () {
    fn observe(&self, _: LayerInput, _: &PackedRows, _: Tiles, _: &Worker<'_>) {}
}

/// Activation buffers, allocated once for the largest step.
struct Activations {
    /// The residual stream, `[rows][hidden_size]`.
    hidden: Buffer,
    /// The cosines and sines of RoPE for each row's position.
    angles: Buffer,
    normed: PackedRows,
    /// For each worker, the queries, keys and values of one group of heads.
    heads: Vec<Buffer>,
    queries: Queries,
    attended: PackedRows,
    gated: PackedRows,
    /// The final norm's output, for one block of the rows that are sampled.
    head_input: PackedRows,
    logits: Buffer,
}

/// What a forward pass is built from, in a stage of the pipeline and for calibration.
pub struct ForwardParts {
    /// The model, cut down to the layers of `weights`.
    pub spec: DecoderSpec,
    pub kernels: &'static Kernels,
    pub weights: PackedWeights,
    pub num_pages: usize,
    pub page_size: u32,
    pub kv_format: KvFormat,
    /// The number of rows of the largest step.
    pub max_rows: usize,
    pub num_threads: usize,
    /// Whether logits are computed.
    pub draws: bool,
}

impl Forward {
    /// Allocates the KV pages and the activations.
    pub fn new(parts: ForwardParts) -> Result<Self, CpuError> {
        let kv = KvMemory::for_kernels(
            parts.kernels,
            parts.spec.layers.len(),
            &parts.spec.layers[0].attention,
            parts.num_pages,
            parts.page_size,
            parts.kv_format,
        );
        let no_memory =
            |what: &'static str| move |error| CpuError(format!("no memory for {what}: {error}"));
        let kv = kv.map_err(no_memory("the KV pages"))?;
        Self::with_kv(parts, Arc::new(kv)).map_err(no_memory("the activations"))
    }

    fn with_kv(parts: ForwardParts, kv: Arc<KvMemory>) -> io::Result<Self> {
        let ForwardParts {
            spec,
            kernels,
            weights,
            max_rows,
            num_threads,
            draws,
            ..
        } = parts;
        // `check_spec` refuses layers of different shapes.
        let layer = &spec.layers[0];
        let attention = &layer.attention;
        let groups = HeadGroups::new(attention);
        // The stride differs from that of the angles: a load whose address equals a recent store's
        // in the low 12 bits waits for that store (4K aliasing).
        let heads_len = groups.num_lanes() + PANEL_LANES;
        let heads = (0..num_threads).map(|_| Buffer::new(max_rows, heads_len));
        let head_form = weights.ends.head.form;
        let head_tile_rows = kernels.rows_at_once(head_form);
        let form = weights.layers.first().map_or(head_form, PackedLayer::form);
        let tile_rows = kernels.rows_at_once(form);
        let packed = |k| {
            PackedRows::new(
                max_rows,
                k,
                form,
                weights.layers.iter().any(PackedLayer::has_groups),
            )
        };
        let head_is_grouped = weights.ends.head.is_grouped();
        let logit_rows = if draws { logit_rows(head_tile_rows) } else { 0 };
        let activations = Activations {
            hidden: Buffer::new(max_rows, spec.hidden_size)?,
            angles: Buffer::new(max_rows, attention.head_dim)?,
            normed: packed(spec.hidden_size)?,
            heads: heads.collect::<io::Result<_>>()?,
            queries: Queries::new(kernels, attention, &kv, max_rows)?,
            attended: packed(attention.query_len())?,
            gated: packed(layer.feed_forward.mlp().intermediate_size)?,
            head_input: PackedRows::new(logit_rows, spec.hidden_size, head_form, head_is_grouped)?,
            logits: Buffer::new(logit_rows, spec.vocab_size)?,
        };
        Ok(Self {
            rotary: Rotary::new(attention, spec.max_position),
            scratch: (0..num_threads)
                .map(|_| AttentionScratch::new(kernels, &kv, attention.head_dim).map(Mutex::new))
                .collect::<io::Result<_>>()?,
            spec,
            kernels,
            tile_rows,
            head_tile_rows,
            weights,
            kv,
            activations,
            profile: None,
        })
    }

    pub fn spec(&self) -> &DecoderSpec {
        &self.spec
    }

    /// The largest number of rows that one call of `logits` takes.
    pub fn logit_rows(&self) -> usize {
        logit_rows(self.head_tile_rows)
    }

    pub fn tile_rows(&self) -> usize {
        self.tile_rows
    }

    pub fn attention_shape(&self) -> TaskShape {
        TaskShape::new(self.kernels, &self.kv)
    }

    /// Runs all layers for all rows of the step. `incoming` is the residual stream that the
    /// previous pipeline stage computed, `[rows][hidden_size]`; without it, the tokens are
    /// embedded.
    pub fn layers(&self, layout: &StepLayout, incoming: Option<&[f32]>, worker: &Worker<'_>) {
        self.layers_with(layout, incoming, worker, &());
    }

    /// Does what `layers` does and shows the dense layers' inputs to an observer.
    pub fn layers_with(
        &self,
        layout: &StepLayout,
        incoming: Option<&[f32]>,
        worker: &Worker<'_>,
        observer: &impl Observer,
    ) {
        let scratch = &self.scratch[worker.index()];
        let mut scratch = scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let walk = &mut Walk::new(worker, self.profile.as_deref(), layout.is_prefill());
        self.enter(layout, incoming, worker);
        barrier_after(Operation::Embed, walk);
        for (index, layer) in self.weights.layers.iter().enumerate() {
            self.attention(layout, index, layer, walk, &mut scratch, observer);
            self.mlp(layout, index, layer, walk, observer);
        }
    }

    /// Computes the logits of the given rows, at most `logit_rows` of them, in the given order. All
    /// layers must have run.
    pub fn logits(&self, layout: &StepLayout, rows: &[usize], worker: &Worker<'_>) {
        let act = &self.activations;
        let tiles = Tiles::new(rows.len(), self.head_tile_rows);
        let grid = Grid::new(tiles, self.scratch.len());
        let walk = &mut Walk::new(worker, self.profile.as_deref(), layout.is_prefill());
        let norm = (self.spec.norm, &self.weights.ends.norm[..]);
        let head = &self.weights.ends.head;
        self.normalise(norm, |r| rows[r], grid, (&act.head_input, head), worker);
        barrier_after(Operation::Norm, walk);
        let out = Epilogue::Store(&act.logits);
        self.dense(Operation::Head, &act.head_input, grid, head, out, walk);
    }

    /// # Safety
    /// Nobody else may use the row's logits while the slice is in use.
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
            // SAFETY: `&mut self` keeps the workers out.
            let row = unsafe { self.activations.hidden.row(r) };
            rows.extend_from_slice(&row[..len]);
        }
        rows
    }

    fn enter(&self, layout: &StepLayout, incoming: Option<&[f32]>, worker: &Worker<'_>) {
        for r in layout.grid.own_rows(worker.index()) {
            let row = &layout.rows[r];
            // SAFETY: the row belongs to this worker.
            let (hidden, angles) = unsafe {
                (
                    self.activations.hidden.row_mut(r),
                    self.activations.angles.row_mut(r),
                )
            };
            let hidden = &mut hidden[..self.spec.hidden_size];
            match incoming {
                Some(rows) => hidden.copy_from_slice(&rows[r * hidden.len()..][..hidden.len()]),
                None => self.weights.ends.embed(row.token as usize, hidden),
            }
            let angles = &mut angles[..self.spec.layers[0].attention.head_dim];
            self.rotary.angles(row.position, angles);
        }
    }

    fn attention(
        &self,
        layout: &StepLayout,
        index: usize,
        layer: &PackedLayer,
        walk: &mut Walk<'_>,
        scratch: &mut AttentionScratch,
        observer: &impl Observer,
    ) {
        let (act, grid) = (&self.activations, layout.grid);
        let worker = walk.worker;
        let spec = &self.spec.layers[index];
        let norm = input_norm(&spec.attention_norms, &layer.attention_norm);
        let input = (&act.normed, &layer.qkv);
        self.normalise(norm, |r| r, grid, input, worker);
        barrier_after(Operation::Norm, walk);
        observer.observe(LayerInput::Attention, &act.normed, grid.tiles, worker);
        self.project(layout, index, layer, walk);
        barrier_after(Operation::Rope, walk);
        // This is behind the barrier before which every worker's keys and values were written.
        if let Some(step) = layout.step.filter(|_| worker.index() == 0) {
            self.kv.counter.advance(step, index + 1);
        }
        AttentionLayer {
            kernels: self.kernels,
            spec: &spec.attention,
            kv: &self.kv,
            layer: index,
            spans: &layout.spans,
            plan: &layout.attention,
            queries: &act.queries,
            out: &act.attended,
            tiles: grid.tiles,
        }
        .run(worker, scratch);
        let (flops, bytes) = self.attention_cost(layout, &spec.attention);
        walk.count(Operation::Attention, flops, bytes);
        barrier_after(Operation::Attention, walk);
        self.complete(&act.attended, &layer.output, grid, walk);
        observer.observe(
            LayerInput::AttentionOutput,
            &act.attended,
            grid.tiles,
            worker,
        );
        let out = Epilogue::Add(&act.hidden);
        let (rows, weights) = (&act.attended, &layer.output);
        self.dense(Operation::Output, rows, grid, weights, out, walk);
    }

    fn mlp(
        &self,
        layout: &StepLayout,
        index: usize,
        layer: &PackedLayer,
        walk: &mut Walk<'_>,
        observer: &impl Observer,
    ) {
        let (act, grid) = (&self.activations, layout.grid);
        let spec = &self.spec.layers[index];
        let norm = input_norm(&spec.feed_forward_norms, &layer.mlp_norm);
        let input = (&act.normed, &layer.gate_up);
        self.normalise(norm, |r| r, grid, input, walk.worker);
        barrier_after(Operation::Norm, walk);
        observer.observe(LayerInput::Mlp, &act.normed, grid.tiles, walk.worker);
        let out = match spec.feed_forward.mlp().activation {
            Activation::Silu => Epilogue::SiluMul(&act.gated),
            other => unreachable!("`check_spec` refuses {other:?}"),
        };
        let (rows, weights) = (&act.normed, &layer.gate_up);
        self.dense(Operation::GateUp, rows, grid, weights, out, walk);
        self.complete(&act.gated, &layer.down, grid, walk);
        observer.observe(LayerInput::MlpOutput, &act.gated, grid.tiles, walk.worker);
        let out = Epilogue::Add(&act.hidden);
        self.dense(Operation::Down, &act.gated, grid, &layer.down, out, walk);
    }

    fn dense(
        &self,
        operation: Operation,
        rows: &PackedRows,
        grid: Grid,
        weights: &PackedMatrix,
        out: Epilogue<'_>,
        walk: &mut Walk<'_>,
    ) {
        shared_gemm(self.kernels, rows, &grid, weights, out, walk.worker);
        self.count_dense(operation, rows, grid, weights, walk);
        barrier_after(operation, walk);
    }

    fn count_dense(
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
            let pairs = (span.start + 1 + end) * span.num_rows / 2;
            let width = spec.num_heads * spec.head_dim;
            (flops + 4 * width * pairs, bytes + end * row_bytes)
        })
    }

    /// Writes the RMS norm of rows of the residual stream, as the dense layer with these weights
    /// reads them.
    fn normalise(
        &self,
        (norm, weight): (NormSpec, &[f32]),
        row_of: impl Fn(usize) -> usize,
        grid: Grid,
        (out, weights): (&PackedRows, &PackedMatrix),
        worker: &Worker<'_>,
    ) {
        for row in grid.own_rows(worker.index()) {
            let tile = grid.tiles.rows(grid.tiles.tile_of(row));
            // SAFETY: nobody writes the residual stream before the next barrier.
            let x = unsafe { self.activations.hidden.row(row_of(row)) };
            let x = &x[..weight.len()];
            let scale = self.norm_scale(norm, x);
            if let Some(tiles) = self.kernels.tile_gemm
                && out.form() == Form::MatrixTiles
                && x.len().is_multiple_of(TILE_K)
            {
                let to = out.row_ptr(&tile, row, 0);
                let stride = tile.len() * TILE_K;
                // SAFETY: the row, its weights and the output have the same length; the row belongs
                // to this worker.
                unsafe {
                    (tiles.weigh)(x.as_ptr(), weight.as_ptr(), scale, x.len(), to, stride);
                }
                continue;
            }
            let mut values = [0.0; NORM_CHUNK];
            for first in (0..x.len()).step_by(NORM_CHUNK) {
                let len = NORM_CHUNK.min(x.len() - first);
                let (x, weight) = (&x[first..][..len], &weight[first..][..len]);
                // SAFETY: each pointer is to `len` elements; the row belongs to this worker.
                unsafe {
                    let to = values.as_mut_ptr();
                    (self.kernels.weigh)(x.as_ptr(), weight.as_ptr(), scale, len, to);
                    out.write(self.kernels, &tile, row, first, &values[..len]);
                }
            }
            // SAFETY: the row has been written, and belongs to this worker.
            unsafe { out.complete(self.kernels, &tile, row, weights) };
        }
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

    fn norm_scale(&self, norm: NormSpec, x: &[f32]) -> f32 {
        // SAFETY: the pointer and the length are those of `x`.
        let sum = unsafe { (self.kernels.sum_of_squares)(x.as_ptr(), x.len()) };
        1.0 / (sum / x.len() as f32 + norm.eps).sqrt()
    }

    /// Projects to queries, keys and values, one group of heads at a time, while the group's rows
    /// are in the cache. Applies norm and RoPE to queries and keys, and writes keys and values to
    /// their pages.
    fn project(&self, layout: &StepLayout, index: usize, layer: &PackedLayer, walk: &mut Walk<'_>) {
        let spec = &self.spec.layers[index].attention;
        let (act, weights) = (&self.activations, &layer.qkv);
        let (worker, grid) = (walk.worker, layout.grid);
        let groups = HeadGroups::new(spec);
        let share_of = |owner| grid.share(owner, groups.len());
        worker.take_shares(
            |owner| share_of(owner).len(),
            |owner, units| {
                let first = share_of(owner).start;
                for group in first + units.start..first + units.end {
                    let mut panels = groups.panels(group);
                    panels.end = panels.end.min(weights.num_panels);
                    let next = (group + 1 < share_of(owner).end).then_some(panels.end);
                    let taken = grid.tiles_of(owner);
                    let mut part = Part::new(self.kernels, &act.normed, grid.tiles, taken, panels);
                    part.first_panel = part.panels.start;
                    let units = 0..part.num_units();
                    let out = Epilogue::Store(&act.heads[worker.index()]);
                    gemm(self.kernels, &act.normed, &part, units, next, weights, out);
                    walk.note(Operation::Qkv);
                    for run in layout.page_runs(grid.rows_of(owner), self.kv.page_size()) {
                        for (i, head) in groups.heads(group).enumerate() {
                            let lane = i * spec.head_dim;
                            self.store_heads(layout, index, layer, &run, head, (worker, lane));
                        }
                    }
                    walk.note(Operation::Rope);
                }
            },
        );
        self.count_dense(Operation::Qkv, &act.normed, layout.grid, weights, walk);
    }

    /// Finishes one head of a run of rows. The head starts at `lane` of the worker's group of
    /// heads.
    fn store_heads(
        &self,
        layout: &StepLayout,
        index: usize,
        layer: &PackedLayer,
        run: &Range<usize>,
        head: usize,
        (worker, lane): (&Worker<'_>, usize),
    ) {
        let spec = &self.spec.layers[index].attention;
        let first = &layout.rows[run.start];
        let page_size = self.kv.page_size();
        let pages = layout.spans.pages_of(&layout.spans[first.span]);
        let page = pages[first.position / page_size];
        let at = |head| HeadPage {
            layer: index,
            page: page.0 as usize,
            head,
        };
        let offset = first.position % page_size;
        let act = &self.activations;
        let heads = &act.heads[worker.index()];
        // Without a norm, nothing reads the epsilon.
        let eps = match spec.qk_norm {
            Some(QkNorm::Heads(norm) | QkNorm::Whole(norm)) => norm.eps,
            None => 0.0,
        };
        assert!(run.end <= layout.rows.len() && lane + spec.head_dim <= heads.stride());
        // SAFETY: these heads belong to this worker.
        let rows = unsafe {
            Rows {
                first: heads.row_ptr(run.start).add(lane),
                stride: heads.stride(),
                len: run.len(),
            }
        };
        let row_head = |weight: &Option<Vec<f32>>, r: usize| {
            let weight = weight.as_deref();
            assert!(weight.is_none_or(|weight| weight.len() == spec.head_dim));
            // SAFETY: the row belongs to the run, and angles are not written after the first
            // barrier.
            let (x, angles) = unsafe {
                (
                    rows.first.add((r - run.start) * rows.stride),
                    act.angles.row(r).as_ptr(),
                )
            };
            NormRotate {
                x,
                weight: weight.map_or(std::ptr::null(), <[f32]>::as_ptr),
                eps,
                angles,
                head_dim: spec.head_dim,
            }
        };
        if head < spec.num_heads {
            for r in run.clone() {
                let from = row_head(&layer.q_norm, r);
                // SAFETY: a head has `head_dim` elements, weights and angles; this (row, head)
                // belongs to this worker.
                unsafe { act.queries.store(self.kernels, from, r, head) };
            }
        } else if head < spec.num_heads + spec.num_kv_heads {
            for r in run.clone() {
                let from = row_head(&layer.k_norm, r);
                // SAFETY: the same holds as for queries; these heads belong to this worker.
                unsafe { (self.kernels.norm_rotate)(from, from.x.cast_mut()) };
            }
            let at = at(head - spec.num_heads);
            // SAFETY: each position of a sequence is one row, and this head of it belongs to this
            // worker. Shared pages are written only by the span that fills them.
            unsafe { self.kv.write(self.kernels, Side::Keys, at, offset, rows) };
        } else {
            let at = at(head - spec.num_heads - spec.num_kv_heads);
            // SAFETY: the same holds as for keys.
            unsafe { self.kv.write(self.kernels, Side::Values, at, offset, rows) };
        }
    }
}

/// The norm of the input of a layer's part, with its weights.
fn input_norm<'a>(norms: &BranchNorms, weight: &'a [f32]) -> (NormSpec, &'a [f32]) {
    let norm = norms
        .before
        .expect("`check_spec` refuses layers without it");
    (norm, weight)
}

/// The barrier behind an operation: every worker has done its part of it, so that all may read what
/// it wrote, and overwrite what it read. Correctness needs it, with a profile and without.
pub fn barrier_after(operation: Operation, walk: &mut Walk<'_>) {
    walk.note(operation);
    walk.worker.barrier();
    walk.note_waiting(operation);
}

/// The number of rows whose logits are computed at once: whole tiles, enough of them that few steps
/// read the head's weights twice, and few enough that the logits take about 40 MB for a large
/// vocabulary.
fn logit_rows(tile_rows: usize) -> usize {
    const MAX_ROWS: usize = 64;
    (MAX_ROWS / tile_rows).max(1) * tile_rows
}
