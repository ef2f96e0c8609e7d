//! Attention computed in f32.
//!
//! Every row walks its sequence in blocks of 64 positions counted from position 0, with a running maximum and a running
//! sum (online softmax). Rows of one task share only the reads of K and V, so prefill rows and decode rows have the
//! same arithmetic. Rows with a sliding window begin at the block of the first position that they see.

use std::ops::Range;

use corella_model::{KvFormat, PageTable};

use crate::dense::Buffer;
use crate::kernels::{
    ATTENTION_BLOCK, ATTENTION_LANES, KeyGroup, MAX_TILE_ROWS, ValueRun, sum_lanes, value_stride,
};
use crate::kv::{HeadPage, Side};

use super::layer::AttentionLayer;
use super::plan::AttentionTask;
use super::span::StepSpan;

/// Scratch of the f32 kernels, sized for `MAX_TILE_ROWS` query rows.
pub struct RowScratch {
    /// Queries, transposed to `[head_dim][row]` and multiplied by the layer's scale.
    q: Vec<f32>,
    /// `[row][ATTENTION_BLOCK]`: scores, which the softmax replaces by weights.
    scores: [f32; MAX_TILE_ROWS * ATTENTION_BLOCK],
    max: [f32; MAX_TILE_ROWS],
    sums: [[f32; 16]; MAX_TILE_ROWS],
    scale: [f32; MAX_TILE_ROWS],
    /// `[row][head_dim]`, with `head_dim` rounded up to whole vectors.
    out: Vec<f32>,
    /// The places of the current block's keys.
    groups: Vec<KeyGroup>,
    /// The places of the current block's values.
    runs: Vec<ValueRun>,
    /// Scales of the current block's keys and values, used with int8 KV only.
    scales: [[f32; ATTENTION_BLOCK]; 2],
}

// SAFETY: the pointers in `groups` and `runs` are not used after the task that set them.
unsafe impl Send for RowScratch {}

impl RowScratch {
    pub fn new(head_dim: usize) -> Self {
        Self {
            q: vec![0.0; head_dim * MAX_TILE_ROWS],
            scores: [0.0; MAX_TILE_ROWS * ATTENTION_BLOCK],
            max: [0.0; MAX_TILE_ROWS],
            sums: [[0.0; 16]; MAX_TILE_ROWS],
            scale: [0.0; MAX_TILE_ROWS],
            out: vec![0.0; value_stride(head_dim) * MAX_TILE_ROWS],
            groups: Vec::with_capacity(ATTENTION_BLOCK),
            runs: Vec::with_capacity(ATTENTION_BLOCK),
            scales: [[0.0; ATTENTION_BLOCK]; 2],
        }
    }
}

impl AttentionLayer<'_> {
    pub(super) fn run_rows(
        &self,
        tasks: &[AttentionTask],
        queries: &Buffer,
        scratch: &mut RowScratch,
    ) {
        for task in tasks {
            let span = &self.spans[task.span];
            self.load_queries(task, span, queries, scratch);
            let table = self.spans.table(span, self.kv_layer.group);
            self.run_task(task, span, table, scratch);
        }
    }

    // Long: the loops over blocks and rows share the task's sizes, and run for each token.
    fn run_task(
        &self,
        task: &AttentionTask,
        span: &StepSpan,
        table: PageTable<'_>,
        scratch: &mut RowScratch,
    ) {
        let num_rows = task.positions.len() * task.heads.len();
        scratch.max = [f32::NEG_INFINITY; MAX_TILE_ROWS];
        scratch.sums = [[0.0; 16]; MAX_TILE_ROWS];
        scratch.out.fill(0.0);
        for (r, (_, head)) in self.rows(task, span).enumerate() {
            // A row begins as if it had seen a position with the sink as its score and zeros as its value.
            if let Some(sink) = self.sink(head) {
                scratch.max[r] = sink;
                scratch.sums[r][0] = 1.0;
            }
        }
        let first_position = span.start + task.positions.start;
        let num_positions = span.start + span.num_rows;
        // No row of the task sees positions outside this range.
        let last_end = task.end_seen(span, self.spec);
        let first_seen = self.spec.first_seen(first_position);
        let first_block = first_seen / ATTENTION_BLOCK * ATTENTION_BLOCK;
        let head_dim = self.spec.head_dim;
        for block in (first_block..last_end).step_by(ATTENTION_BLOCK) {
            let start = block.max(first_seen);
            let end = last_end.min(block + ATTENTION_BLOCK);
            self.list_block(task.kv_head, table, block, start..end, scratch);
            // SAFETY: `q` holds `head_dim * num_rows` elements. The groups point into KV memory, which is not written
            // during attention, and their offsets lie inside a block.
            unsafe {
                (self.kernels.scores.of(self.kv.format))(
                    scratch.q.as_ptr(),
                    num_rows,
                    &scratch.groups,
                    self.kv.key_stride(),
                    head_dim,
                    scratch.scores.as_mut_ptr(),
                );
            }
            for row in 0..num_rows {
                let position = first_position + row / task.heads.len();
                let num_unseen = self.spec.first_seen(position).saturating_sub(block);
                let row_end = self.spec.end_seen(position, num_positions);
                let limit = row_end.saturating_sub(block).min(ATTENTION_BLOCK);
                let limit = if num_unseen < limit { limit } else { 0 };
                let scores = &mut scratch.scores[row * ATTENTION_BLOCK..][..ATTENTION_BLOCK];
                let is_scaled = self.kv.format == KvFormat::Int8;
                let [key_scales, value_scales] = &scratch.scales;
                if is_scaled {
                    let scores = scores[..limit].iter_mut();
                    scores
                        .zip(key_scales)
                        .for_each(|(score, scale)| *score *= scale);
                }
                if let Some(cap) = self.spec.soft_cap {
                    // SAFETY: the row has one block of scores.
                    unsafe { (self.kernels.soft_cap)(scores.as_mut_ptr(), limit, 1.0, cap) };
                }
                let unseen = 0..num_unseen.min(limit);
                scores[unseen.clone()].fill(f32::NEG_INFINITY);
                // SAFETY: the row has one block of scores and 16 partial sums.
                scratch.scale[row] = unsafe {
                    (self.kernels.softmax_block)(
                        scores.as_mut_ptr(),
                        limit,
                        &mut scratch.max[row],
                        scratch.sums[row].as_mut_ptr(),
                    )
                };
                // The exponential function has a smallest result, about 1e-38, which is lost in the sum beside the
                // largest weight, 1. But unseen values may be anything, so their weights must be 0.
                scores[unseen].fill(0.0);
                if is_scaled {
                    let weights = scores[..limit].iter_mut();
                    weights
                        .zip(value_scales)
                        .for_each(|(weight, scale)| *weight *= scale);
                }
            }
            // SAFETY: the runs point into KV memory and cover at most one block; `out` has
            // `MAX_TILE_ROWS` rows.
            unsafe {
                (self.kernels.values.of(self.kv.format))(
                    scratch.scores.as_ptr().add(start - block),
                    num_rows,
                    scratch.scale.as_ptr(),
                    &scratch.runs,
                    head_dim,
                    scratch.out.as_mut_ptr(),
                );
            }
        }
        self.store(task, span, scratch);
    }

    fn load_queries(
        &self,
        task: &AttentionTask,
        span: &StepSpan,
        queries: &Buffer,
        scratch: &mut RowScratch,
    ) {
        let head_dim = self.spec.head_dim;
        let num_rows = task.positions.len() * task.heads.len();
        let scale = self.spec.scale;
        for (r, (row, head)) in self.rows(task, span).enumerate() {
            // SAFETY: queries are not written during attention.
            let q = unsafe { queries.row(row) };
            let column = scratch.q[r..].iter_mut().step_by(num_rows);
            for (out, value) in column.zip(&q[head * head_dim..][..head_dim]) {
                *out = value * scale;
            }
        }
    }

    fn store(&self, task: &AttentionTask, span: &StepSpan, scratch: &mut RowScratch) {
        let head_dim = self.spec.head_dim;
        let stride = value_stride(head_dim);
        for (r, at) in self.rows(task, span).enumerate() {
            let values = &mut scratch.out[r * stride..][..head_dim];
            let scale = 1.0 / sum_lanes(&scratch.sums[r]);
            for value in &mut *values {
                // Adding 0 turns -0 into 0, so that the sign does not depend on masked positions.
                *value = *value * scale + 0.0;
            }
            if let Some(gates) = self.gates {
                self.gate(gates, at, values);
            }
            self.write_row(at, values);
        }
    }

    /// Writes one head of a row to the input of the output projection.
    fn write_row(&self, (row, head): (usize, usize), values: &[f32]) {
        let rows = self.tiles.rows(self.tiles.tile_of(row));
        // SAFETY: each (row, head) pair belongs to one task.
        unsafe { (self.out).write(self.kernels, &rows, row, head * values.len(), values) };
    }

    /// Lists the places of the keys and values of some of a block's positions, page by page.
    fn list_block(
        &self,
        head: usize,
        table: PageTable<'_>,
        block: usize,
        positions: Range<usize>,
        scratch: &mut RowScratch,
    ) {
        scratch.groups.clear();
        scratch.runs.clear();
        let page_size = self.kv.page_size();
        let mut position = positions.start;
        while position < positions.end {
            let offset = position % page_size;
            let num_positions = (page_size - offset).min(positions.end - position);
            let at = HeadPage {
                layer: self.kv.layer(self.kv_layer),
                page: table.page(position / page_size),
                head,
            };
            scratch.runs.push(self.kv.values(at, offset, num_positions));
            if self.kv.format == KvFormat::Int8 {
                let first = position - block;
                for (side, scales) in Side::BOTH.into_iter().zip(&mut scratch.scales) {
                    let scales = &mut scales[first..first + num_positions];
                    self.kv.copy_scales(at, side, offset, scales);
                }
            }
            for first in (0..num_positions).step_by(ATTENTION_LANES) {
                let count = (num_positions - first).min(ATTENTION_LANES);
                let mut group = self.kv.keys(at, offset + first, count);
                group.offset = position + first - block;
                scratch.groups.push(group);
            }
            position += num_positions;
        }
    }
}
