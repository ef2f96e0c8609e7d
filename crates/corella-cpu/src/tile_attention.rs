//! Attention through matrix tiles: what `attention` does, for keys, values and queries in bf16.
//!
//! Every row walks its sequence in blocks of 256 positions counted from position 0. Keys and
//! values are read 16 positions at a time, where they lie, unless pages cut them differently.

use std::ops::Range;

use corella_core::PageId;

use crate::attention::AttentionLayer;
use crate::attention_plan::AttentionTask;
use crate::kernels::{TILE_ATTENTION_BLOCK, TILE_K, TILE_POSITIONS, TileAttention};
use crate::kv_memory::{HeadPage, KvForm};
use crate::step_plan::SpanPlan;

/// Rows of a task.
const MAX_ROWS: usize = 32;

/// A worker's own memory for one task.
pub struct TileScratch {
    /// Dimensions 32 by 32, and for those one row after the other.
    q: Vec<u16>,
    scores: Vec<f32>,
    weights: Vec<u16>,
    max: [f32; MAX_ROWS],
    sums: [[f32; 16]; MAX_ROWS],
    scale: [f32; MAX_ROWS],
    /// Rows of `head_dim`.
    out: Vec<f32>,
    /// What cannot be read where it lies, tile by tile.
    copied_keys: Vec<u16>,
    copied_values: Vec<u16>,
    /// Of the current block.
    keys: Vec<*const u8>,
    values: Vec<*const u8>,
}

// SAFETY: the pointers in `keys` and `values` are dead once a task is done.
unsafe impl Send for TileScratch {}

impl TileScratch {
    pub fn new(head_dim: usize, form: KvForm) -> Self {
        let num_copied = match form {
            KvForm::Plain => TILE_ATTENTION_BLOCK / TILE_POSITIONS,
            KvForm::Tiles => 1,
        };
        let block = MAX_ROWS * TILE_ATTENTION_BLOCK;
        Self {
            q: vec![0; MAX_ROWS * head_dim],
            scores: vec![0.0; block],
            weights: vec![0; block],
            max: [0.0; MAX_ROWS],
            sums: [[0.0; 16]; MAX_ROWS],
            scale: [0.0; MAX_ROWS],
            out: vec![0.0; MAX_ROWS * head_dim],
            copied_keys: vec![0; num_copied * TILE_POSITIONS * head_dim],
            copied_values: vec![0; num_copied * TILE_POSITIONS * head_dim],
            keys: Vec::with_capacity(TILE_ATTENTION_BLOCK / TILE_POSITIONS),
            values: Vec::with_capacity(TILE_ATTENTION_BLOCK / TILE_POSITIONS),
        }
    }
}

impl AttentionLayer<'_> {
    fn tile_kernels(&self) -> &TileAttention {
        let kernels = self.kernels.tile_attention.as_ref();
        kernels.expect("KV memory in tiles")
    }

    pub(crate) fn release_tiles(&self) {
        // SAFETY: the processor has tiles.
        unsafe { (self.tile_kernels().release)() };
    }

    pub(crate) fn run_tiles(
        &self,
        task: &AttentionTask,
        span: &SpanPlan,
        pages: &[PageId],
        scratch: &mut TileScratch,
    ) {
        let kernels = self.tile_kernels();
        let head_dim = self.spec.head_dim;
        let num_rows = task.positions.len() * task.heads.len();
        let key_stride = match self.kv.form {
            KvForm::Plain => TILE_POSITIONS * 4,
            KvForm::Tiles => self.kv.key_stride(),
        };
        let score_scale = (1.0 / (head_dim as f64).sqrt()) as f32;
        self.round_queries(task, span, scratch);
        scratch.max = [f32::NEG_INFINITY; MAX_ROWS];
        scratch.sums = [[0.0; 16]; MAX_ROWS];
        scratch.out[..num_rows * head_dim].fill(0.0);
        let first_end = span.start + task.positions.start + 1;
        let last_end = span.start + task.positions.end;
        for block in (0..last_end).step_by(TILE_ATTENTION_BLOCK) {
            let end = last_end.min(block + TILE_ATTENTION_BLOCK);
            self.list_tiles(task.kv_head, pages, block..end, scratch);
            let len = (end - block).next_multiple_of(TILE_POSITIONS);
            // SAFETY: the tiles lie in KV memory, which no one writes during attention, and cover
            // no more than a block; all else has room for MAX_ROWS rows of a block or a head.
            unsafe {
                (kernels.scores)(
                    scratch.q.as_ptr(),
                    num_rows,
                    &scratch.keys,
                    key_stride,
                    head_dim,
                    scratch.scores.as_mut_ptr(),
                );
                for row in 0..num_rows {
                    let row_end = first_end + row / task.heads.len();
                    let at = row * TILE_ATTENTION_BLOCK;
                    scratch.scale[row] = (kernels.softmax)(
                        scratch.scores[at..].as_ptr(),
                        score_scale,
                        row_end.saturating_sub(block).min(TILE_ATTENTION_BLOCK),
                        len,
                        &mut scratch.max[row],
                        scratch.sums[row].as_mut_ptr(),
                        scratch.weights[at..].as_mut_ptr(),
                    );
                }
                (kernels.values)(
                    scratch.weights.as_ptr(),
                    num_rows,
                    scratch.scale.as_ptr(),
                    &scratch.values,
                    head_dim,
                    scratch.out.as_mut_ptr(),
                );
            }
        }
        for (r, at) in self.rows(task, span).enumerate() {
            let values = &mut scratch.out[r * head_dim..][..head_dim];
            self.store_row(at, values, &scratch.sums[r]);
        }
    }

    fn round_queries(&self, task: &AttentionTask, span: &SpanPlan, scratch: &mut TileScratch) {
        let head_dim = self.spec.head_dim;
        let num_rows = task.positions.len() * task.heads.len();
        for (r, (row, head)) in self.rows(task, span).enumerate() {
            // SAFETY: no one writes queries during attention.
            let q = unsafe { self.qkv.row(row) };
            let q = &q[head * head_dim..][..head_dim];
            for (block, q) in q.chunks_exact(TILE_K).enumerate() {
                let out = &mut scratch.q[(block * num_rows + r) * TILE_K..][..TILE_K];
                // SAFETY: TILE_K elements each.
                unsafe { (self.kernels.round)(q.as_ptr(), TILE_K, out.as_mut_ptr()) };
            }
        }
    }

    /// Lists the tiles of keys and values of a block's positions.
    fn list_tiles(
        &self,
        head: usize,
        pages: &[PageId],
        positions: Range<usize>,
        scratch: &mut TileScratch,
    ) {
        let page_size = self.kv.page_size();
        let at = |position: usize| HeadPage {
            layer: self.layer,
            page: pages[position / page_size].0 as usize,
            head,
        };
        let tile_len = TILE_POSITIONS * self.spec.head_dim;
        scratch.keys.clear();
        scratch.values.clear();
        for position in positions.clone().step_by(TILE_POSITIONS) {
            let tile = position..positions.end.min(position + TILE_POSITIONS);
            let (page, offset) = (at(position), position % page_size);
            let is_full = tile.len() == TILE_POSITIONS;
            let copy_index = match self.kv.form {
                KvForm::Plain => scratch.keys.len(),
                KvForm::Tiles => 0,
            };
            let copied = copy_index * tile_len..(copy_index + 1) * tile_len;
            scratch.keys.push(match self.kv.form {
                KvForm::Tiles => self.kv.key_tile(page, offset),
                KvForm::Plain => {
                    let copy = &mut scratch.copied_keys[copied.clone()];
                    for (to, position) in tile.clone().enumerate() {
                        let offset = position % page_size;
                        self.kv.copy_key(at(position), offset, to, copy);
                    }
                    copy.as_ptr().cast()
                }
            });
            scratch.values.push(match self.kv.form {
                KvForm::Tiles if is_full => self.kv.value_tile(page, offset),
                _ => {
                    let copy = &mut scratch.copied_values[copied];
                    // What lies behind the last position may be anything, NaN too, and 0 times
                    // that is not always 0.
                    copy.fill(0);
                    for (to, position) in tile.enumerate() {
                        let offset = position % page_size;
                        self.kv.copy_value(at(position), offset, to, copy);
                    }
                    copy.as_ptr().cast()
                }
            });
        }
    }
}
