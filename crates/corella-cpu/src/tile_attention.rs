//! Attention through matrix tiles: what `attention` does, for keys, values and queries in bf16.
//!
//! A task's rows are cut into tiles of 32. Every row walks its sequence in blocks of 256 positions
//! counted from position 0, of which it takes the softmax 64 by 64. A block's values are copied once
//! for all tiles, because a tile of values holds 32 positions and a page may hold 16; keys are read
//! where they lie, unless pages cut them differently.

use std::io;
use std::ops::Range;

use corella_core::PageId;
use corella_model::KvFormat;

use crate::attention::AttentionLayer;
use crate::attention_plan::AttentionTask;
use crate::buffer::Form;
use crate::kernels::{
    KEY_TILE, QUERY_TILE_ROWS, ROW_TILE_LEN, RowSums, TILE_ATTENTION_BLOCK, TILE_K,
    TILE_SOFTMAX_BLOCK, TileAttention, TileSoftmax, VALUE_TILE, tile_out_index,
};
use crate::kv_fetch::KvFetch;
use crate::kv_memory::{HeadPage, KvForm, KvMemory};
use crate::queries::TileQueries;
use crate::region::Region;
use crate::step_plan::{SpanPlan, StepPlan};

/// Rows of a task.
pub const MAX_TASK_ROWS: usize = 256;

/// A worker's own memory for one task.
pub struct TileScratch {
    _memory: Region,
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
    /// How many positions of the sequence each row may see.
    row_ends: Vec<usize>,
    /// Of keys and of values of the current block, where these are integers.
    scales: [[f32; TILE_ATTENTION_BLOCK]; 2],
    /// Of the current block, an even number.
    keys: Vec<*const u8>,
    /// The number of rows that the thread's tiles are configured for.
    configured: usize,
    row: Vec<f32>,
}

// SAFETY: the memory is the scratch's own, and the pointers in `keys` are dead once a task is done.
unsafe impl Send for TileScratch {}

impl TileScratch {
    pub fn new(head_dim: usize, kv: &KvMemory) -> io::Result<Self> {
        const F32: usize = size_of::<f32>();
        let copied_keys = match reads_keys_in_place(kv) {
            true => 0,
            false => TILE_ATTENTION_BLOCK * head_dim * 2,
        };
        let lens = [
            MAX_TASK_ROWS * head_dim * F32,
            QUERY_TILE_ROWS * TILE_SOFTMAX_BLOCK * F32,
            QUERY_TILE_ROWS * TILE_ATTENTION_BLOCK * 2,
            TILE_ATTENTION_BLOCK * head_dim * 2,
            copied_keys,
        ];
        let memory = Region::new(lens.iter().sum())?;
        let mut next = memory.as_ptr();
        let [out, scores, weights, values, copied_keys] = lens.map(|len| {
            let start = next;
            // SAFETY: inside the region, or at its end.
            next = unsafe { next.add(len) };
            start
        });
        Ok(Self {
            _memory: memory,
            out: out.cast(),
            scores: scores.cast(),
            weights: weights.cast(),
            values: values.cast(),
            copied_keys: copied_keys.cast(),
            rows: vec![RowSums::NONE; MAX_TASK_ROWS],
            row_ends: vec![0; MAX_TASK_ROWS],
            scales: [[0.0; TILE_ATTENTION_BLOCK]; 2],
            keys: Vec::with_capacity(TILE_ATTENTION_BLOCK / KEY_TILE),
            configured: 0,
            row: vec![0.0; head_dim],
        })
    }
}

/// One task's view of the step.
struct Work<'a> {
    /// Among the worker's.
    index: usize,
    task: &'a AttentionTask,
    span: &'a SpanPlan,
    pages: &'a [PageId],
    /// Of its first row.
    queries: *const u16,
    /// How much of the sequence it reads.
    end: usize,
    has_one_tile: bool,
}

impl AttentionLayer<'_> {
    fn tile_kernels(&self) -> &TileAttention {
        let kernels = self.kernels.tile_attention.as_ref();
        kernels.expect("KV memory in tiles")
    }

    pub(crate) fn run_tiles(
        &self,
        plan: &StepPlan,
        tasks: &[AttentionTask],
        queries: &TileQueries,
        scratch: &mut TileScratch,
    ) {
        let kernels = self.tile_kernels();
        let mut fetch = KvFetch::new(self, plan, tasks, kernels.fetch);
        for (index, task) in tasks.iter().enumerate() {
            let span = &plan.spans[task.span];
            let work = Work {
                index,
                task,
                span,
                pages: plan.pages_of(span),
                queries: queries.ptr(
                    span.first_row + task.positions.start,
                    task.kv_head * self.group_len() + task.heads.start,
                ),
                end: span.start + task.positions.end,
                has_one_tile: task.positions.len() * task.heads.len() <= QUERY_TILE_ROWS,
            };
            self.run_work(&work, &mut fetch, scratch);
        }
        scratch.configured = 0;
        // SAFETY: the processor has tiles.
        unsafe { (kernels.release)() };
    }

    fn run_work(&self, work: &Work<'_>, fetch: &mut KvFetch<'_>, scratch: &mut TileScratch) {
        let (task, span) = (work.task, work.span);
        let num_rows = task.positions.len() * task.heads.len();
        assert!(num_rows <= MAX_TASK_ROWS);
        self.clear_rows(task, span, scratch);
        // Few rows wait for memory, and take what it sends in smaller pieces: of values, the sums are
        // the same.
        let block_len = match num_rows {
            ..=16 => TILE_SOFTMAX_BLOCK,
            _ => TILE_ATTENTION_BLOCK,
        };
        for block in (0..work.end).step_by(block_len) {
            let block = block..work.end.min(block + block_len);
            self.list_keys(work, block.clone(), scratch);
            if !work.has_one_tile {
                self.copy_values(work, block.clone(), fetch, scratch);
            }
            for first in (0..num_rows).step_by(QUERY_TILE_ROWS) {
                let rows = first..num_rows.min(first + QUERY_TILE_ROWS);
                self.run_block(work, block.clone(), rows, fetch, scratch);
            }
        }
        self.store_rows(task, span, scratch);
    }

    /// Hands the task's rows to the next layer.
    fn store_rows(&self, task: &AttentionTask, span: &SpanPlan, scratch: &mut TileScratch) {
        let kernels = self.tile_kernels();
        let head_dim = self.spec.head_dim;
        for (r, (row, head)) in self.rows(task, span).enumerate() {
            let (tile, row_in_tile) = (r / QUERY_TILE_ROWS, r % QUERY_TILE_ROWS);
            let from = tile * QUERY_TILE_ROWS * head_dim + tile_out_index(row_in_tile, 0);
            let sums = &scratch.rows[r];
            let rows = self.tiles.rows(self.tiles.tile_of(row));
            let first = head * head_dim;
            // SAFETY: a row of `out`; a row's head belongs to one task.
            unsafe {
                let from = scratch.out.add(from);
                match self.out.form() {
                    Form::MatrixTiles => {
                        let to = self.out.row_ptr(&rows, row, first);
                        let stride = rows.len() * TILE_K;
                        (kernels.store_rounded)(from, sums, head_dim, to, stride);
                    }
                    Form::Int8 => {
                        let to = self.out.wide_ptr(&(row..row + 1), first);
                        let (to, _) = to.expect("rows of 8-bit integers");
                        (kernels.store_row)(from, sums, head_dim, to.cast_mut());
                    }
                    Form::Columns => {
                        let values = &mut scratch.row;
                        (kernels.store_row)(from, sums, head_dim, values.as_mut_ptr());
                        self.out.write(self.kernels, &rows, row, first, values);
                    }
                }
            }
        }
    }

    /// What one tile of rows makes of the block from position `block` on.
    fn run_block(
        &self,
        work: &Work<'_>,
        block: Range<usize>,
        rows: Range<usize>,
        fetch: &mut KvFetch<'_>,
        scratch: &mut TileScratch,
    ) {
        let kernels = self.tile_kernels();
        let head_dim = self.spec.head_dim;
        let key_stride = match reads_keys_in_place(self.kv) {
            true => self.kv.key_stride(),
            false => KEY_TILE * 4,
        };
        let end = scratch.row_ends[rows.end - 1].min(block.end);
        if end <= block.start {
            return;
        }
        let scale = (1.0 / (head_dim as f64).sqrt()) as f32;
        let num_rows = rows.len();
        // SAFETY: the tiles lie among the queries or in KV memory, which no one writes during
        // attention, or in the scratch, where everything has room for QUERY_TILE_ROWS rows.
        unsafe {
            if scratch.configured != num_rows {
                (kernels.configure)(num_rows);
                scratch.configured = num_rows;
            }
            let q = work.queries.add(rows.start * head_dim);
            let out = scratch.out.add(rows.start * head_dim);
            for start in (block.start..end).step_by(TILE_SOFTMAX_BLOCK) {
                fetch.reach(work.index, start);
                fetch.run_ahead(work.index, start, 4);
                let len = (end - start).min(TILE_SOFTMAX_BLOCK);
                let keys = &scratch.keys[(start - block.start) / KEY_TILE..];
                (kernels.scores)(
                    q,
                    num_rows,
                    head_dim * 2,
                    &keys[..len.div_ceil(VALUE_TILE) * 2],
                    key_stride,
                    head_dim,
                    scratch.scores,
                );
                if work.has_one_tile && start == block.start {
                    // Not earlier: reads of keys would wait for the copy to be written.
                    self.copy_values(work, block.clone(), fetch, scratch);
                }
                let first = start - block.start;
                let is_scaled = self.kv.format == KvFormat::Int8;
                (kernels.softmax)(TileSoftmax {
                    scores: scratch.scores,
                    scale,
                    scales: is_scaled.then(|| {
                        scratch
                            .scales
                            .each_ref()
                            .map(|scales| scales[first..].as_ptr())
                    }),
                    start,
                    ends: &scratch.row_ends[rows.clone()],
                    rows: &mut scratch.rows[rows.clone()],
                    weights: scratch.weights,
                    head_dim,
                    out,
                });
            }
            let first_tile = block.start % TILE_ATTENTION_BLOCK / VALUE_TILE;
            let weights = scratch.weights.add(first_tile * ROW_TILE_LEN);
            let half = (head_dim / 2).next_multiple_of(64).min(head_dim);
            for dims in [0..half, half..head_dim] {
                fetch.run_ahead(work.index, block.start, 2);
                (kernels.values)(
                    weights,
                    num_rows,
                    scratch.values,
                    (end - block.start).div_ceil(VALUE_TILE),
                    head_dim,
                    dims,
                    out,
                );
            }
        }
    }

    /// Clears what the task's rows accumulate.
    fn clear_rows(&self, task: &AttentionTask, span: &SpanPlan, scratch: &mut TileScratch) {
        let head_dim = self.spec.head_dim;
        for (r, (row, _)) in self.rows(task, span).enumerate() {
            scratch.rows[r] = RowSums::NONE;
            scratch.row_ends[r] = span.start + row - span.first_row + 1;
            let (tile, row_in_tile) = (r / QUERY_TILE_ROWS, r % QUERY_TILE_ROWS);
            let tile_start = tile * QUERY_TILE_ROWS * head_dim;
            for i in (0..head_dim).step_by(16) {
                // SAFETY: the row's places in a tile.
                unsafe {
                    let out = scratch.out.add(tile_start + tile_out_index(row_in_tile, i));
                    out.cast::<[f32; 16]>().write([0.0; 16]);
                }
            }
        }
    }

    fn head_page(&self, work: &Work<'_>, position: usize) -> HeadPage {
        HeadPage {
            layer: self.layer,
            page: work.pages[position / self.kv.page_size()].0 as usize,
            head: work.task.kv_head,
        }
    }

    /// Lists the tiles of keys of a block's positions, an even number.
    fn list_keys(&self, work: &Work<'_>, block: Range<usize>, scratch: &mut TileScratch) {
        let page_size = self.kv.page_size();
        let tile_len = KEY_TILE * self.spec.head_dim;
        scratch.keys.clear();
        for (index, first) in tiles(&block).enumerate() {
            // Behind the end any keys will do: their weights are 0.
            let page = self.head_page(work, first.min(block.end - 1));
            if self.kv.format == KvFormat::Int8 {
                self.copy_scales(
                    work,
                    first..block.end.min(first + KEY_TILE),
                    &block,
                    scratch,
                );
            }
            let copied = scratch.copied_keys.wrapping_add(index * tile_len);
            scratch.keys.push(match (self.kv.form, self.kv.format) {
                (KvForm::Tiles, KvFormat::Int8) => {
                    let from = self.kv.key_tile(page, first % page_size);
                    let widen = self.tile_kernels().widen_keys;
                    // SAFETY: a tile of the page; room for TILE_ATTENTION_BLOCK positions.
                    unsafe { widen(from, self.kv.key_stride(), self.spec.head_dim, copied) };
                    copied.cast()
                }
                (KvForm::Tiles, KvFormat::Float(_)) => self.kv.key_tile(page, first % page_size),
                (KvForm::Plain, _) => {
                    // SAFETY: room for TILE_ATTENTION_BLOCK positions.
                    let tile = unsafe { std::slice::from_raw_parts_mut(copied, tile_len) };
                    for (to, position) in (first..block.end).take(KEY_TILE).enumerate() {
                        let page = self.head_page(work, position);
                        self.kv.copy_key(page, position % page_size, to, tile);
                    }
                    tile.as_ptr().cast()
                }
            });
        }
    }

    /// Of a tile's positions, as far as they are there.
    fn copy_scales(
        &self,
        work: &Work<'_>,
        tile: Range<usize>,
        block: &Range<usize>,
        scratch: &mut TileScratch,
    ) {
        let page_size = self.kv.page_size();
        let mut position = tile.start;
        while position < tile.end {
            let offset = position % page_size;
            let len = (page_size - offset).min(tile.end - position);
            let page = self.head_page(work, position);
            for (which, scales) in scratch.scales.iter_mut().enumerate() {
                let scales = &mut scales[position - block.start..][..len];
                self.kv.copy_scales(page, which, offset, scales);
            }
            position += len;
        }
    }

    /// Copies the values of a block's positions.
    fn copy_values(
        &self,
        work: &Work<'_>,
        block: Range<usize>,
        fetch: &mut KvFetch<'_>,
        scratch: &mut TileScratch,
    ) {
        let head_dim = self.spec.head_dim;
        let page_size = self.kv.page_size();
        for (index, first) in tiles(&block).enumerate() {
            let len = block.end.saturating_sub(first).min(KEY_TILE);
            let page = self.head_page(work, first.min(block.end - 1));
            let (tile, half) = (index / 2, index % 2);
            // SAFETY: room for TILE_ATTENTION_BLOCK positions.
            let to = unsafe { scratch.values.add(tile * VALUE_TILE * head_dim) };
            match self.kv.form {
                KvForm::Tiles => {
                    fetch.run_ahead(work.index, first, 2);
                    let from = self.kv.value_tile(page, first % page_size);
                    // SAFETY: so many positions of the page; half a tile of values.
                    unsafe {
                        let to = to.add(half * KEY_TILE / 2 * 32);
                        let copy = match self.kv.format {
                            KvFormat::Int8 => self.tile_kernels().widen_values,
                            KvFormat::Float(_) => self.tile_kernels().copy_values,
                        };
                        copy(from, len, head_dim, to);
                    }
                }
                KvForm::Plain => {
                    // SAFETY: as above.
                    let to = unsafe { std::slice::from_raw_parts_mut(to, VALUE_TILE * head_dim) };
                    if half == 0 {
                        // Not every 0 times what would stand there is 0.
                        to.fill(0);
                    }
                    for position in first..first + len {
                        let page = self.head_page(work, position);
                        let at = half * KEY_TILE + position - first;
                        self.kv.copy_value(page, position % page_size, at, to);
                    }
                }
            }
        }
    }
}

/// Otherwise they are copied.
fn reads_keys_in_place(kv: &KvMemory) -> bool {
    kv.form == KvForm::Tiles && kv.format != KvFormat::Int8
}

/// Where the tiles of a block's positions begin, an even number of them.
fn tiles(block: &Range<usize>) -> impl Iterator<Item = usize> + use<> {
    let end = block.start + block.len().next_multiple_of(VALUE_TILE);
    (block.start..end).step_by(KEY_TILE)
}
