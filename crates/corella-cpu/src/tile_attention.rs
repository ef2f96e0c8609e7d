//! Attention through matrix tiles: what `attention` does, for keys, values and queries in bf16.
//!
//! A task's rows are cut into tiles of 32. Every row walks its sequence in blocks of 256 positions
//! counted from position 0, of which it takes the softmax 64 by 64. A block's values are copied once
//! for all tiles, because a tile of values holds 32 positions and a page may hold 16; keys are read
//! where they lie, unless pages cut them differently.

use std::io;
use std::ops::Range;

use corella_core::PageId;

use crate::attention::AttentionLayer;
use crate::attention_plan::AttentionTask;
use crate::kernels::{
    KEY_TILE, QUERY_TILE_ROWS, ROW_TILE_LEN, RowSums, TILE_ATTENTION_BLOCK, TILE_K,
    TILE_SOFTMAX_BLOCK, TileAttention, TileSoftmax, VALUE_TILE, tile_out_index,
};
use crate::kv_memory::{HeadPage, KvForm};
use crate::region::Region;
use crate::step_plan::SpanPlan;

/// Rows of a task.
pub const MAX_TASK_ROWS: usize = 256;

/// A worker's own memory for one task.
pub struct TileScratch {
    _memory: Region,
    /// Tile by tile, as `TileScores` reads them.
    q: *mut u16,
    /// Tile by tile, as `TileValues` adds to it.
    out: *mut f32,
    /// Of a tile and a softmax block.
    scores: *mut f32,
    /// Of a tile and a block.
    weights: *mut u16,
    /// Of the current block.
    values: *mut u16,
    /// What of the current block's keys cannot be read where it lies.
    copied_keys: *mut u16,
    rows: Vec<RowSums>,
    /// Of the current block, an even number.
    keys: Vec<*const u8>,
    row: Vec<f32>,
    /// The number of rows that the thread's tiles are configured for.
    configured: usize,
}

// SAFETY: the memory is the scratch's own, and the pointers in `keys` are dead once a task is done.
unsafe impl Send for TileScratch {}

impl TileScratch {
    pub fn new(head_dim: usize, form: KvForm) -> io::Result<Self> {
        const F32: usize = size_of::<f32>();
        let copied_keys = match form {
            KvForm::Plain => TILE_ATTENTION_BLOCK * head_dim * 2,
            KvForm::Tiles => 0,
        };
        let lens = [
            MAX_TASK_ROWS * head_dim * 2,
            MAX_TASK_ROWS * head_dim * F32,
            QUERY_TILE_ROWS * TILE_SOFTMAX_BLOCK * F32,
            QUERY_TILE_ROWS * TILE_ATTENTION_BLOCK * 2,
            TILE_ATTENTION_BLOCK * head_dim * 2,
            copied_keys,
        ];
        let memory = Region::new(lens.iter().sum())?;
        let mut next = memory.as_ptr();
        let [q, out, scores, weights, values, copied_keys] = lens.map(|len| {
            let start = next;
            // SAFETY: inside the region, or at its end.
            next = unsafe { next.add(len) };
            start
        });
        Ok(Self {
            _memory: memory,
            q: q.cast(),
            out: out.cast(),
            scores: scores.cast(),
            weights: weights.cast(),
            values: values.cast(),
            copied_keys: copied_keys.cast(),
            rows: vec![RowSums::NONE; MAX_TASK_ROWS],
            keys: Vec::with_capacity(TILE_ATTENTION_BLOCK / KEY_TILE),
            row: vec![0.0; head_dim],
            configured: 0,
        })
    }
}

impl AttentionLayer<'_> {
    fn tile_kernels(&self) -> &TileAttention {
        let kernels = self.kernels.tile_attention.as_ref();
        kernels.expect("KV memory in tiles")
    }

    pub(crate) fn release_tiles(&self, scratch: &mut TileScratch) {
        scratch.configured = 0;
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
        let head_dim = self.spec.head_dim;
        let num_rows = task.positions.len() * task.heads.len();
        assert!(num_rows <= MAX_TASK_ROWS);
        self.round_queries(task, span, scratch);
        scratch.rows.fill(RowSums::NONE);
        // SAFETY: room for MAX_TASK_ROWS rows.
        unsafe { (scratch.out).write_bytes(0, num_rows.next_multiple_of(32) * head_dim) };
        let last_end = span.start + task.positions.end;
        for block in (0..last_end).step_by(TILE_ATTENTION_BLOCK) {
            let end = last_end.min(block + TILE_ATTENTION_BLOCK);
            self.load_block(task.kv_head, pages, block..end, scratch);
            for tile in 0..num_rows.div_ceil(QUERY_TILE_ROWS) {
                let first = tile * QUERY_TILE_ROWS;
                let rows = first..num_rows.min(first + QUERY_TILE_ROWS);
                self.run_block(task, span, block, tile, rows, scratch);
            }
        }
        for (r, at) in self.rows(task, span).enumerate() {
            let (tile, row) = (r / QUERY_TILE_ROWS, r % QUERY_TILE_ROWS);
            for (i, values) in scratch.row.chunks_exact_mut(16).enumerate() {
                let from = tile * QUERY_TILE_ROWS * head_dim + tile_out_index(row, i * 16);
                // SAFETY: 16 dimensions of the row.
                values.copy_from_slice(unsafe {
                    std::slice::from_raw_parts(scratch.out.add(from), 16)
                });
            }
            self.store_row(at, &mut scratch.row, &scratch.rows[r].sums);
        }
    }

    /// What one tile of rows makes of the block from position `block` on.
    fn run_block(
        &self,
        task: &AttentionTask,
        span: &SpanPlan,
        block: usize,
        tile: usize,
        rows: Range<usize>,
        scratch: &mut TileScratch,
    ) {
        let kernels = self.tile_kernels();
        let head_dim = self.spec.head_dim;
        let key_stride = match self.kv.form {
            KvForm::Plain => KEY_TILE * 4,
            KvForm::Tiles => self.kv.key_stride(),
        };
        let row_end = |row: usize| span.start + task.positions.start + row / task.heads.len() + 1;
        let end = row_end(rows.end - 1).min(block + TILE_ATTENTION_BLOCK);
        if end <= block {
            return;
        }
        let num_rows = rows.len();
        let tile_len = tile * QUERY_TILE_ROWS * head_dim;
        // SAFETY: the tiles lie in KV memory, which no one writes during attention, or in the
        // scratch, where everything has room for QUERY_TILE_ROWS rows.
        unsafe {
            if scratch.configured != num_rows {
                (kernels.configure)(num_rows);
                scratch.configured = num_rows;
            }
            let out = scratch.out.add(tile_len);
            for start in (block..end).step_by(TILE_SOFTMAX_BLOCK) {
                let len = (end - start).min(TILE_SOFTMAX_BLOCK);
                let first = start - block;
                let keys = &scratch.keys[first / KEY_TILE..];
                (kernels.scores)(
                    scratch.q.add(tile_len),
                    num_rows,
                    &keys[..len.div_ceil(VALUE_TILE) * 2],
                    key_stride,
                    head_dim,
                    scratch.scores,
                );
                let mut num_seen = [0; QUERY_TILE_ROWS];
                for (num_seen, row) in num_seen.iter_mut().zip(rows.clone()) {
                    *num_seen = row_end(row).saturating_sub(start).min(TILE_SOFTMAX_BLOCK);
                }
                (kernels.softmax)(TileSoftmax {
                    scores: scratch.scores,
                    scale: (1.0 / (head_dim as f64).sqrt()) as f32,
                    num_seen: &num_seen[..num_rows],
                    rows: &mut scratch.rows[rows.clone()],
                    weights: scratch.weights,
                    first,
                    head_dim,
                    out,
                });
            }
            (kernels.values)(
                scratch.weights,
                num_rows,
                scratch.values,
                (end - block).div_ceil(VALUE_TILE),
                head_dim,
                out,
            );
        }
    }

    fn round_queries(&self, task: &AttentionTask, span: &SpanPlan, scratch: &mut TileScratch) {
        let head_dim = self.spec.head_dim;
        for (r, (row, head)) in self.rows(task, span).enumerate() {
            // SAFETY: no one writes queries during attention.
            let q = unsafe { self.qkv.row(row) };
            let q = &q[head * head_dim..][..head_dim];
            let (tile, row) = (r / QUERY_TILE_ROWS, r % QUERY_TILE_ROWS);
            for (block, q) in q.chunks_exact(TILE_K).enumerate() {
                let at = tile * QUERY_TILE_ROWS * head_dim + block * ROW_TILE_LEN + row * TILE_K;
                // SAFETY: TILE_K elements each.
                unsafe { (self.kernels.round)(q.as_ptr(), TILE_K, scratch.q.add(at)) };
            }
        }
    }

    /// Copies the values of a block's positions and lists the tiles of their keys.
    fn load_block(
        &self,
        head: usize,
        pages: &[PageId],
        positions: Range<usize>,
        scratch: &mut TileScratch,
    ) {
        let head_dim = self.spec.head_dim;
        let page_size = self.kv.page_size();
        let at = |position: usize| HeadPage {
            layer: self.layer,
            page: pages[position / page_size].0 as usize,
            head,
        };
        scratch.keys.clear();
        let end = positions.end - positions.start;
        for first in (0..end.next_multiple_of(VALUE_TILE)).step_by(KEY_TILE) {
            let half = first % VALUE_TILE / KEY_TILE;
            let tile =
                positions.start + first..positions.end.min(positions.start + first + KEY_TILE);
            // SAFETY: room for TILE_ATTENTION_BLOCK positions.
            let values = unsafe {
                scratch
                    .values
                    .add(first / VALUE_TILE * VALUE_TILE * head_dim)
            };
            let offset = tile.start % page_size;
            match self.kv.form {
                KvForm::Tiles => {
                    // Behind the end any keys will do: their weights are 0.
                    let page = at(tile.start.min(positions.end - 1));
                    scratch.keys.push(self.kv.key_tile(page, offset));
                    // SAFETY: so many positions of the page; half a tile of values.
                    unsafe {
                        let from = self.kv.value_tile(page, offset);
                        let to = values.add(half * KEY_TILE / 2 * 32);
                        (self.tile_kernels().copy_values)(from, tile.len(), head_dim, to);
                    }
                }
                KvForm::Plain => {
                    // SAFETY: room for TILE_ATTENTION_BLOCK positions of each.
                    let (keys, values) = unsafe {
                        let keys = scratch.copied_keys.add(first * head_dim);
                        (
                            std::slice::from_raw_parts_mut(keys, KEY_TILE * head_dim),
                            std::slice::from_raw_parts_mut(values, VALUE_TILE * head_dim),
                        )
                    };
                    if half == 0 {
                        // Not every 0 times what would stand there is 0.
                        values.fill(0);
                    }
                    for (to, position) in tile.enumerate() {
                        let (page, offset) = (at(position), position % page_size);
                        self.kv.copy_key(page, offset, to, keys);
                        self.kv
                            .copy_value(page, offset, half * KEY_TILE + to, values);
                    }
                    scratch.keys.push(keys.as_ptr().cast());
                }
            }
        }
    }
}
