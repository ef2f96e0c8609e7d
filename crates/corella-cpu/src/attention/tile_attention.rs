//! Attention by matrix-tile instructions, with keys, values and queries in bf16.
//!
//! A task's rows are cut into tiles of 32 rows. Every row walks its sequence in blocks of 256 positions counted from
//! position 0, and a softmax takes 64 of them at a time. With a sliding window, the walk begins with the 64 positions
//! that include the first position of the window. The values of a block are copied once for all tiles, because a tile
//! of values holds 32 positions and a page may hold only 16. Keys are read from their pages, unless they are integers.
//! Some processors have kernels for tasks of a few rows that read both keys and values from the pages
//! (`in_place_attention`).
//!
//! The positions of a tile of keys lie in one page. Pages of other sizes get attention row by row
//! (`Kernels::attends_through_tiles`), and so do models with a layer whose heads fill no tiles.

use std::ops::Range;

use corella_model::KvFormat;

use crate::kernels::{
    Form, IN_PLACE_ROWS, KEY_TILE, KeyTiles, PageValues, QUERY_TILE_ROWS, ROW_TILE_LEN, RowSums,
    TILE_ATTENTION_BLOCK, TILE_K, TILE_SOFTMAX_BLOCK, TileProduct, TileSoftmax, VALUE_TILE,
    ValueTiles, tile_out_index,
};

use super::kv_fetch::KvFetch;
use super::layer::AttentionLayer;
use super::plan::{AttentionTask, MAX_TASK_ROWS};
use super::queries::TileQueries;
use super::span::StepSpan;
use super::tile_block::Work;
use super::tile_scratch::{RowTile, TileScratch, reads_keys_in_place};

impl AttentionLayer<'_> {
    pub(super) fn run_tiles(
        &self,
        tasks: &[AttentionTask],
        queries: &TileQueries,
        scratch: &mut TileScratch,
    ) {
        let kernels = self.tile_kernels();
        let in_place = match self.kv.format {
            KvFormat::Int8 => kernels.int8_in_place,
            KvFormat::Float(_) => kernels.in_place,
        };
        let mut fetch = KvFetch::new(self.kv, self.kv_layer, self.spec, self.spans, tasks);
        for (index, task) in tasks.iter().enumerate() {
            let span = &self.spans[task.span];
            let num_rows = task.positions.len() * task.heads.len();
            let work = Work {
                index,
                task,
                span,
                table: self.spans.table(span, self.kv_layer.group),
                queries: queries.ptr(
                    span.first_row + task.positions.start,
                    (
                        task.kv_head * self.group_len() + task.heads.start,
                        self.spec.head_dim,
                    ),
                    self.group_len(),
                ),
                first: self.spec.first_seen(span.start + task.positions.start),
                end: task.end_seen(span, self.spec),
                has_one_tile: num_rows <= QUERY_TILE_ROWS,
                in_place: in_place.filter(|_| num_rows <= IN_PLACE_ROWS),
            };
            self.run_work(&work, &mut fetch, scratch);
        }
        scratch.configured = 0;
        // SAFETY: the kernels exist only on processors with tiles.
        unsafe { (kernels.release)() };
    }

    fn run_work(&self, work: &Work<'_>, fetch: &mut KvFetch<'_>, scratch: &mut TileScratch) {
        let (task, span) = (work.task, work.span);
        let num_rows = task.positions.len() * task.heads.len();
        assert!(num_rows <= MAX_TASK_ROWS);
        self.clear_rows(task, span, scratch);
        // Tasks of a few rows are bound by memory, and smaller blocks let them start sooner. The sums of values are the
        // same.
        let block_len = match num_rows {
            ..=16 => TILE_SOFTMAX_BLOCK,
            _ => TILE_ATTENTION_BLOCK,
        };
        let mut start = work.first / TILE_SOFTMAX_BLOCK * TILE_SOFTMAX_BLOCK;
        while start < work.end {
            let end = (start / block_len + 1) * block_len;
            let block = start..work.end.min(end);
            start = end;
            self.list_tiles(work, block.clone(), fetch, scratch);
            if !work.has_one_tile {
                self.copy_values(work, block.clone(), fetch, scratch);
            }
            self.run_block(work, block, num_rows, fetch, scratch);
        }
        self.store_rows(task, span, scratch);
    }

    /// Writes the task's rows to the input of the output projection.
    fn store_rows(&self, task: &AttentionTask, span: &StepSpan, scratch: &mut TileScratch) {
        let kernels = self.tile_kernels();
        let head_dim = self.spec.head_dim;
        for (r, (row, head)) in self.rows(task, span).enumerate() {
            let (tile, row_in_tile) = (r / QUERY_TILE_ROWS, r % QUERY_TILE_ROWS);
            let from = tile * QUERY_TILE_ROWS * head_dim + tile_out_index(row_in_tile, 0);
            let sums = &scratch.rows[r];
            let rows = self.tiles.rows(self.tiles.tile_of(row));
            let first = head * head_dim;
            // SAFETY: the source is a row of `out`; each (row, head) belongs to one task.
            unsafe {
                let from = scratch.out.add(from);
                if let Some(gates) = self.gates {
                    let values = &mut scratch.row[..head_dim];
                    (kernels.store_row)(from, sums, head_dim, values.as_mut_ptr());
                    self.gate(gates, (row, head), values);
                    self.out.write(self.kernels, &rows, row, first, values);
                    continue;
                }
                match self.out.form() {
                    Form::MatrixTiles => {
                        let to = self.out.row_ptr(&rows, row, first);
                        let stride = rows.len() * TILE_K;
                        (kernels.store_rounded)(from, sums, head_dim, to, stride);
                    }
                    Form::Int8 => {
                        let to = self.out.wide_ptr(&(row..row + 1), first);
                        let (to, _) = to.expect("rows are not in Form::Int8");
                        (kernels.store_row)(from, sums, head_dim, to.cast_mut());
                    }
                    Form::Columns => {
                        // Other layers may have longer heads.
                        let values = &mut scratch.row[..head_dim];
                        (kernels.store_row)(from, sums, head_dim, values.as_mut_ptr());
                        self.out.write(self.kernels, &rows, row, first, values);
                    }
                }
            }
        }
    }

    /// Adds a block of positions to all of the task's rows, tile by tile. During the softmax of one
    /// tile, the tile unit adds the values of the previous tile and computes the next scores.
    fn run_block(
        &self,
        work: &Work<'_>,
        block: Range<usize>,
        num_rows: usize,
        fetch: &mut KvFetch<'_>,
        scratch: &mut TileScratch,
    ) {
        let tile_at = |first: usize, scratch: &TileScratch| {
            let rows = first..num_rows.min(first + QUERY_TILE_ROWS);
            let seen = block.start..scratch.row_ends[rows.end - 1].min(block.end);
            RowTile { rows, seen }
        };
        let sees_block = |tile: &RowTile, scratch: &TileScratch| {
            !tile.seen.is_empty() && scratch.row_starts[tile.rows.start] < block.end
        };
        // The previous tile, if its values are not added yet. It has the same number of rows as the current one, so
        // that the tile registers need no new configuration.
        let mut before: Option<RowTile> = None;
        let mut has_scores = false;
        for first in (0..num_rows).step_by(QUERY_TILE_ROWS) {
            let tile = tile_at(first, scratch);
            if !sees_block(&tile, scratch) {
                continue;
            }
            let next = (first + QUERY_TILE_ROWS < num_rows)
                .then(|| tile_at(first + QUERY_TILE_ROWS, scratch))
                .filter(|next| next.rows.len() == tile.rows.len() && sees_block(next, scratch));
            let num_softmaxes = tile.seen.len().div_ceil(TILE_SOFTMAX_BLOCK);
            for index in 0..num_softmaxes {
                let start = block.start + index * TILE_SOFTMAX_BLOCK;
                fetch.reach(work.index, start);
                if !has_scores {
                    self.score(work, &tile, start, fetch, scratch);
                }
                if work.has_one_tile && work.in_place.is_none() && index == 0 {
                    // An earlier copy would delay reads of keys until its stores are done.
                    self.copy_values(work, block.clone(), fetch, scratch);
                }
                let scores = scratch.scores;
                std::mem::swap(&mut scratch.scores, &mut scratch.next_scores);
                scratch.products.clear();
                has_scores = false;
                if tile.rows.len() > QUERY_TILE_ROWS / 2 {
                    let following = match index + 1 < num_softmaxes {
                        true => Some((&tile, start + TILE_SOFTMAX_BLOCK)),
                        false => next.as_ref().map(|next| (next, block.start)),
                    };
                    if let Some((tile, start)) = following {
                        self.add_scores(work, tile, start, scratch);
                        has_scores = true;
                    }
                    if let Some(before) = &before {
                        self.add_values(before, (index, num_softmaxes), scratch);
                    }
                }
                self.softmax(&tile, start, scores, scratch);
            }
            before = match next {
                Some(_) if has_scores => Some(tile),
                _ => {
                    self.weigh_values(work, &tile, fetch, scratch);
                    None
                }
            };
        }
    }

    /// Turns the scores from position `start` on into weights, and computes the products listed in
    /// the scratch at the same time.
    fn softmax(&self, tile: &RowTile, start: usize, scores: *mut f32, scratch: &mut TileScratch) {
        static ONES: [f32; TILE_SOFTMAX_BLOCK] = [1.0; TILE_SOFTMAX_BLOCK];
        let head_dim = self.spec.head_dim;
        let first = start - tile.seen.start;
        let [mut keys, values] = scratch
            .scales
            .each_ref()
            .map(|scales| scales[first..].as_ptr());
        let mut scale = self.spec.scale;
        let mut ends = &scratch.row_ends[tile.rows.clone()];
        if self.spec.soft_cap.is_some() || scratch.row_starts[tile.rows.end - 1] > start {
            // SAFETY: no other thread uses the tile's scores.
            unsafe { self.shape_scores(tile, start, scores, scratch) };
            ends = &scratch.block_ends[..tile.rows.len()];
            keys = ONES.as_ptr();
            if self.spec.soft_cap.is_some() {
                scale = 1.0;
            }
        }
        let scales = (self.kv.format == KvFormat::Int8).then_some([keys, values]);
        let weights = scratch.weights_of(tile);
        // SAFETY: scores, weights and sums belong to this tile; the products' operands do not overlap them.
        unsafe {
            (self.tile_kernels().softmax)(
                TileSoftmax {
                    scores,
                    scale,
                    scales,
                    start,
                    ends,
                    weights,
                    rows: &mut scratch.rows[tile.rows.clone()],
                    head_dim,
                    out: scratch.out.add(tile.rows.start * head_dim),
                },
                &scratch.products,
            );
        }
    }

    /// Applies the steps that the softmax leaves out: soft caps, and hiding positions before the window. Scores of
    /// integer keys first get their keys' scales. Sets `block_ends`.
    ///
    /// # Safety
    /// No other thread uses the scores of the tile meanwhile.
    unsafe fn shape_scores(
        &self,
        tile: &RowTile,
        start: usize,
        scores: *mut f32,
        scratch: &mut TileScratch,
    ) {
        let scales = &scratch.scales[0][start - tile.seen.start..][..TILE_SOFTMAX_BLOCK];
        for (index, row) in tile.rows.clone().enumerate() {
            // SAFETY: each row has one softmax block of scores.
            let scores = unsafe {
                let first = scores.add(index * TILE_SOFTMAX_BLOCK);
                std::slice::from_raw_parts_mut(first, TILE_SOFTMAX_BLOCK)
            };
            if self.kv.format == KvFormat::Int8 {
                let scores = scores.iter_mut();
                scores
                    .zip(scales)
                    .for_each(|(score, scale)| *score *= scale);
            }
            if let Some(cap) = self.spec.soft_cap {
                let (x, n) = (scores.as_mut_ptr(), scores.len());
                // SAFETY: the row has this many scores.
                unsafe { (self.kernels.soft_cap)(x, n, self.spec.scale, cap) };
            }
            let end = scratch.row_ends[row];
            let num_unseen = scratch.row_starts[row].saturating_sub(start);
            scratch.block_ends[index] =
                match num_unseen < scores.len().min(end.saturating_sub(start)) {
                    true => end,
                    false => 0,
                };
            let num_unseen = num_unseen.min(scores.len());
            scores[..num_unseen].fill(f32::NEG_INFINITY);
        }
    }

    fn configure(&self, tile: &RowTile, scratch: &mut TileScratch) {
        if scratch.configured != tile.rows.len() {
            scratch.configured = tile.rows.len();
            // SAFETY: the kernels exist only on processors with tiles.
            unsafe { (self.tile_kernels().configure)(tile.rows.len()) };
        }
    }

    /// The tiles of keys of the softmax block that starts at position `start`.
    fn keys<'a>(&self, tile: &RowTile, start: usize, scratch: &'a TileScratch) -> &'a [*const u8] {
        let len = (tile.seen.end - start).min(TILE_SOFTMAX_BLOCK);
        &scratch.keys[(start - tile.seen.start) / KEY_TILE..][..len.div_ceil(VALUE_TILE) * 2]
    }

    fn tile_key_stride(&self, work: &Work<'_>) -> usize {
        match work.in_place.is_some() || reads_keys_in_place(self.kv.format) {
            true => self.kv.key_stride(),
            false => KEY_TILE * 4,
        }
    }

    /// Computes the scores of the softmax block that starts at position `start`.
    fn score(
        &self,
        work: &Work<'_>,
        tile: &RowTile,
        start: usize,
        fetch: &mut KvFetch<'_>,
        scratch: &mut TileScratch,
    ) {
        self.configure(tile, scratch);
        let head_dim = self.spec.head_dim;
        let keys = KeyTiles {
            tiles: self.keys(tile, start, scratch),
            stride: self.tile_key_stride(work),
            head_dim,
        };
        let kernel = (work.in_place).map_or(self.tile_kernels().scores, |kernels| kernels.scores);
        // SAFETY: the operands lie among the queries and in KV memory, which is not written during attention, or in the
        // scratch, whose scores have room for `QUERY_TILE_ROWS` rows.
        unsafe {
            kernel(
                work.queries.add(tile.rows.start * head_dim),
                tile.rows.len(),
                head_dim * 2,
                keys,
                scratch.scores,
                fetch.lines(work.index, start),
            );
        }
    }

    /// Lists the products of `score`, to be computed during a softmax.
    fn add_scores(&self, work: &Work<'_>, tile: &RowTile, start: usize, scratch: &mut TileScratch) {
        let head_dim = self.spec.head_dim;
        let stride = self.tile_key_stride(work);
        let num_pairs = self.keys(tile, start, scratch).len() / 2;
        for pair in 0..num_pairs {
            let keys = self.keys(tile, start, scratch);
            let product = TileProduct {
                a: work.queries.wrapping_add(tile.rows.start * head_dim).cast(),
                a_stride: head_dim * 2,
                a_step: TILE_K * 2,
                b: [keys[2 * pair], keys[2 * pair + 1]],
                b_stride: stride,
                b_step: TILE_K / 2 * stride,
                num_blocks: head_dim / TILE_K,
                out: scratch.scores.wrapping_add(pair * 2 * KEY_TILE),
                out_stride: TILE_SOFTMAX_BLOCK * 4,
                right: KEY_TILE * 4,
                below: QUERY_TILE_ROWS / 2 * TILE_SOFTMAX_BLOCK * 4,
                adds: false,
            };
            scratch.products.push(product);
        }
    }

    /// Multiplies the block's values by the weights of the softmax, and adds them to a tile's output.
    fn weigh_values(
        &self,
        work: &Work<'_>,
        tile: &RowTile,
        fetch: &mut KvFetch<'_>,
        scratch: &mut TileScratch,
    ) {
        let head_dim = self.spec.head_dim;
        let first_tile = tile.seen.start % TILE_ATTENTION_BLOCK / VALUE_TILE;
        if let Some(kernels) = &work.in_place {
            let values = PageValues {
                tiles: &scratch.page_values,
                num_positions: tile.seen.len(),
                head_dim,
            };
            // SAFETY: values lie in KV memory, which is not written during attention, and the rest in the scratch. The
            // task has only this tile.
            unsafe {
                let weights = scratch.weights_of(tile).add(first_tile * ROW_TILE_LEN);
                let lines = fetch.lines(work.index, tile.seen.start);
                return (kernels.values)(weights, tile.rows.len(), values, scratch.out, lines);
            }
        }
        self.configure(tile, scratch);
        let half = (head_dim / 2).next_multiple_of(64).min(head_dim);
        let values = ValueTiles {
            first: scratch.values,
            num_tiles: tile.seen.len().div_ceil(VALUE_TILE),
            head_dim,
        };
        for dims in [0..half, half..head_dim] {
            // SAFETY: all operands lie in the scratch, which has room for `QUERY_TILE_ROWS` rows.
            unsafe {
                (self.tile_kernels().values)(
                    scratch.weights_of(tile).add(first_tile * ROW_TILE_LEN),
                    tile.rows.len(),
                    values,
                    dims,
                    scratch.out.add(tile.rows.start * head_dim),
                    fetch.lines(work.index, tile.seen.start),
                );
            }
        }
    }

    /// Lists one of `num_parts` equal parts of the products of `weigh_values`, to be computed during a softmax.
    fn add_values(
        &self,
        tile: &RowTile,
        (part, num_parts): (usize, usize),
        scratch: &mut TileScratch,
    ) {
        const TILE_BYTES: usize = ROW_TILE_LEN;
        let head_dim = self.spec.head_dim;
        let num_products = head_dim / 32;
        let out = scratch.out.wrapping_add(tile.rows.start * head_dim);
        let at = |part: usize| part * num_products / num_parts;
        let first_tile = tile.seen.start % TILE_ATTENTION_BLOCK / VALUE_TILE;
        let weights = (scratch.weights_of(tile)).wrapping_add(first_tile * ROW_TILE_LEN);
        for dim in (at(part)..at(part + 1)).map(|index| index * 32) {
            let values = scratch.values.wrapping_add(dim * VALUE_TILE).cast::<u8>();
            let product = TileProduct {
                a: weights.cast(),
                a_stride: VALUE_TILE * 2,
                a_step: ROW_TILE_LEN * 2,
                b: [values.cast_const(), values.wrapping_add(TILE_BYTES)],
                b_stride: VALUE_TILE * 2,
                b_step: head_dim * VALUE_TILE * 2,
                num_blocks: tile.seen.len().div_ceil(VALUE_TILE),
                out: out.wrapping_add(dim * QUERY_TILE_ROWS),
                out_stride: 64,
                right: 2 * TILE_BYTES,
                below: TILE_BYTES,
                adds: true,
            };
            scratch.products.push(product);
        }
    }

    /// Resets the accumulators of the task's rows.
    fn clear_rows(&self, task: &AttentionTask, span: &StepSpan, scratch: &mut TileScratch) {
        let head_dim = self.spec.head_dim;
        for (r, (row, head)) in self.rows(task, span).enumerate() {
            scratch.rows[r] = self.sink(head).map_or(RowSums::NONE, RowSums::of_sink);
            let position = span.start + row - span.first_row;
            scratch.row_starts[r] = self.spec.first_seen(position);
            scratch.row_ends[r] = self.spec.end_seen(position, span.start + span.num_rows);
            let (tile, row_in_tile) = (r / QUERY_TILE_ROWS, r % QUERY_TILE_ROWS);
            let tile_start = tile * QUERY_TILE_ROWS * head_dim;
            for i in (0..head_dim).step_by(16) {
                // SAFETY: these 16 elements belong to the row's tile.
                unsafe {
                    let out = scratch.out.add(tile_start + tile_out_index(row_in_tile, i));
                    out.cast::<[f32; 16]>().write([0.0; 16]);
                }
            }
        }
    }
}
