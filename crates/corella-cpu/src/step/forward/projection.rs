//! The projection to queries, keys and values, and their processing before attention: norms, RoPE, and writes to their
//! pages.

use std::ops::Range;

use corella_model::{AttentionSpec, NormKind, QkNorm};

use crate::dense::{Buffer, Epilogue, Part, gemm};
use crate::kernels::NormRotate;
use crate::kv::{HeadPage, KvRows, Rows, Side};
use crate::weights::{AdaptedMatrix, PackedLayer, PackedNorm};

use crate::step::forward::Forward;
use crate::step::forward::norm::RowNorm;
use crate::step::head_groups::{HeadGroups, num_projected};
use crate::step::layout::StepLayout;
use crate::step::profile::barrier_after;
use crate::step::profile::{Operation, Walk};

/// Whether queries and keys are normed in a pass of their own. The kernel that rotates heads can only norm one head at
/// a time, by its root mean square.
pub fn is_normed_apart(attention: &AttentionSpec) -> bool {
    match attention.qk_norm {
        Some(QkNorm::Whole(_)) => true,
        Some(QkNorm::Heads(norm)) => norm.kind != NormKind::Rms,
        None => false,
    }
}

/// The norms that are still to be applied to heads.
struct HeadNorms<'a> {
    queries: Option<&'a PackedNorm>,
    keys: Option<&'a PackedNorm>,
    values: Option<&'a PackedNorm>,
    /// The worker whose memory holds normed values.
    worker: usize,
}

impl<'a> HeadNorms<'a> {
    fn new(layer: &'a PackedLayer, worker: usize) -> Self {
        Self {
            queries: layer.q_norm.as_ref(),
            keys: layer.k_norm.as_ref(),
            values: layer.v_norm.as_ref(),
            worker,
        }
    }
}

impl Forward {
    pub(super) fn project(
        &self,
        layout: &StepLayout,
        index: usize,
        layer: &PackedLayer,
        walk: &mut Walk<'_>,
    ) {
        match is_normed_apart(&self.spec.layers[index].attention) {
            true => self.project_whole(layout, index, layer, walk),
            false => self.project_groups(layout, index, layer, walk),
        }
        barrier_after(Operation::Rope, walk);
    }

    /// Projects one group of heads at a time, while the group's rows are in the cache. Applies norm
    /// and RoPE to queries and keys, and writes keys and values to their pages.
    fn project_groups(
        &self,
        layout: &StepLayout,
        index: usize,
        layer: &PackedLayer,
        walk: &mut Walk<'_>,
    ) {
        let spec = &self.spec.layers[index].attention;
        let (act, weights) = (&self.activations, &layer.qkv);
        let place = (index, AdaptedMatrix::Qkv);
        let adapted = self.adapted(layout, place, &act.normed, weights, walk);
        let (worker, grid) = (walk.worker, layout.grid);
        let groups = HeadGroups::new(spec);
        let heads = &act.heads[worker.index()];
        let share_of = |owner| grid.share(owner, groups.len());
        worker.take_shares(
            |owner| share_of(owner).len(),
            |owner, units| {
                let first = share_of(owner).start;
                for group in first + units.start..first + units.end {
                    let mut panels = groups.panels(group);
                    panels.end = panels.end.min(weights.num_panels);
                    let next_panel = (group + 1 < share_of(owner).end).then_some(panels.end);
                    let taken = grid.tiles_of(owner);
                    let mut part = Part::new(self.kernels, &act.normed, grid.tiles, taken, panels);
                    part.first_panel = part.panels.start;
                    part.next_panel = next_panel;
                    let units = 0..part.num_units();
                    let out = Epilogue::Store(heads);
                    gemm(self.kernels, &act.normed, &part, units, adapted, out);
                    walk.note(Operation::Qkv);
                    for run in layout.page_runs(grid.rows_of(owner), self.kv.page_size()) {
                        for (i, head) in groups.heads(group).enumerate() {
                            let from = (heads, i * spec.head_dim);
                            let norms = HeadNorms::new(layer, worker.index());
                            self.store_head(layout, index, &run, head, from, norms);
                        }
                    }
                    walk.note(Operation::Rope);
                }
            },
        );
        self.count_dense(Operation::Qkv, &act.normed, layout.grid, weights, walk);
    }

    /// Like `project_groups`, but one step after the other for all heads, because norms need all of them.
    fn project_whole(
        &self,
        layout: &StepLayout,
        index: usize,
        layer: &PackedLayer,
        walk: &mut Walk<'_>,
    ) {
        let spec = &self.spec.layers[index].attention;
        let (worker, grid) = (walk.worker, layout.grid);
        let projected = self.activations.projected.as_ref();
        let projected = projected.expect("a layer has norms of its own, but no rows for them");
        let (rows, out) = (&self.activations.normed, Epilogue::Store(projected));
        let place = (index, AdaptedMatrix::Qkv);
        let weights = self.adapted(layout, place, rows, &layer.qkv, walk);
        self.dense(Operation::Qkv, rows, grid, weights, out, walk);
        for row in grid.own_rows(worker.index()) {
            // SAFETY: the row is complete since the last barrier, and belongs to this worker.
            let row = unsafe { projected.row_mut(row) };
            let (queries, others) = row.split_at_mut(spec.query_len());
            self.norm_in_place(layer.q_norm.as_ref(), queries);
            if let Some(keys) = others.get_mut(..spec.kv_len()) {
                self.norm_in_place(layer.k_norm.as_ref(), keys);
            }
        }
        barrier_after(Operation::Norm, walk);
        let num_heads = num_projected(spec);
        let share_of = |owner| grid.share(owner, num_heads);
        worker.take_shares(
            |owner| share_of(owner).len(),
            |owner, units| {
                let first = share_of(owner).start;
                for head in first + units.start..first + units.end {
                    for run in layout.page_runs(grid.rows_of(owner), self.kv.page_size()) {
                        let from = (projected, head * spec.head_dim);
                        let norms = HeadNorms {
                            queries: None,
                            keys: None,
                            ..HeadNorms::new(layer, worker.index())
                        };
                        self.store_head(layout, index, &run, head, from, norms);
                    }
                }
            },
        );
    }

    /// Norms as many elements at a time as the norm has weights.
    fn norm_in_place(&self, norm: Option<&PackedNorm>, row: &mut [f32]) {
        let Some(norm) = norm else {
            return;
        };
        for part in row.chunks_exact_mut(norm.weight.len()) {
            let row_norm = RowNorm::new(self.kernels, Some(norm), part);
            row_norm.apply(part);
        }
    }

    /// Finishes one head of a run of rows. The head starts at element `lane` of the rows of `heads`.
    // Long: queries, keys and values of a head share its rows, angles and place, for each token.
    fn store_head(
        &self,
        layout: &StepLayout,
        index: usize,
        run: &Range<usize>,
        head: usize,
        (heads, lane): (&Buffer, usize),
        norms: HeadNorms<'_>,
    ) {
        let spec = &self.spec.layers[index].attention;
        let kv = self.kv.rows_of(spec);
        let first = &layout.rows.rows[run.start];
        let page_size = self.kv.page_size();
        let kv_layer = self.layers[index].kv();
        let table = layout
            .spans
            .table(&layout.spans[first.span], kv_layer.group);
        let at = |head| HeadPage {
            layer: kv.layer(kv_layer),
            page: table.page(first.position / page_size),
            head,
        };
        let offset = first.position % page_size;
        let act = &self.activations;
        let parts = &self.layers[index];
        let rotary = match head < spec.num_heads {
            true => parts.query_rotary,
            false => parts.rotary,
        };
        let all_angles = &act.angles[rotary];
        assert!(run.end <= layout.rows.rows.len() && lane + spec.head_dim <= heads.stride());
        // SAFETY: these heads belong to this worker.
        let rows = unsafe {
            Rows {
                first: heads.row_ptr(run.start).add(lane),
                stride: heads.stride(),
                len: run.len(),
            }
        };
        let row_head = |norm: Option<&PackedNorm>, r: usize| {
            assert!(norm.is_none_or(|norm| norm.weight.len() == spec.head_dim));
            // SAFETY: the row belongs to the run, and angles are not written after the first barrier.
            let (x, angles) = unsafe {
                (
                    rows.first.add((r - run.start) * rows.stride),
                    all_angles.row(r).as_ptr(),
                )
            };
            NormRotate {
                x,
                weight: norm.map_or(std::ptr::null(), |norm| norm.weight.as_ptr()),
                // Without a norm, the epsilon is not read.
                eps: norm.map_or(0.0, |norm| norm.spec.eps),
                angles,
                head_dim: spec.head_dim,
            }
        };
        if head < spec.num_heads {
            let heads_of_group = spec.num_heads / spec.num_kv_heads;
            for r in run.clone() {
                let from = row_head(norms.queries, r);
                let to = (head, heads_of_group);
                // SAFETY: a head has `head_dim` elements, weights and angles; this (row, head) belongs to this worker.
                unsafe { act.queries.store(self.kernels, from, r, to) };
            }
        } else if head < spec.num_heads + spec.num_kv_heads {
            let at = at(head - spec.num_heads);
            if spec.values_are_keys {
                self.store_values(&norms, (kv, at, offset), run, rows);
            }
            for r in run.clone() {
                let from = row_head(norms.keys, r);
                // SAFETY: the same holds as for queries; these heads belong to this worker.
                unsafe { (self.kernels.norm_rotate)(from, from.x.cast_mut()) };
            }
            // SAFETY: each position of a sequence is one row, and this head of it belongs to this
            // worker. Shared pages are written only by the span that fills them.
            unsafe { kv.write(self.kernels, Side::Keys, at, offset, rows) };
        } else {
            let at = at(head - spec.num_heads - spec.num_kv_heads);
            self.store_values(&norms, (kv, at, offset), run, rows);
        }
    }

    /// Writes values to their page, with their norm, if any. The rows stay unchanged, because keys may share them.
    fn store_values(
        &self,
        norms: &HeadNorms<'_>,
        (kv, at, offset): (&KvRows, HeadPage, usize),
        run: &Range<usize>,
        mut rows: Rows,
    ) {
        if let Some(norm) = norms.values {
            let (normed, dim) = (&self.activations.values[norms.worker], norm.weight.len());
            assert!(dim <= normed.stride());
            for (r, row) in run.clone().enumerate() {
                // SAFETY: the rows of this run belong to this worker, and so does the buffer.
                let (from, to) = unsafe {
                    let from = rows.first.add(r * rows.stride);
                    (std::slice::from_raw_parts(from, dim), normed.row_mut(row))
                };
                let to = &mut to[..dim];
                to.copy_from_slice(from);
                RowNorm::new(self.kernels, Some(norm), to).apply(to);
            }
            rows.first = normed.row_ptr(run.start);
            rows.stride = normed.stride();
        }
        // SAFETY: each position of a sequence is one row, and this head of it belongs to this worker.
        // Shared pages are written only by the span that fills them.
        unsafe { kv.write(self.kernels, Side::Values, at, offset, rows) };
    }
}
