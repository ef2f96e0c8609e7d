//! Dense layers: the GEMM of packed rows and packed weight panels.
//!
//! Each output is computed by one worker, which accumulates over k in order. Neither the number of
//! workers nor the rows beside a row affect its result.
//!
//! With bf16 products, rows are rounded to bf16 and multiplied pair by pair. With 8-bit weights, each row is quantised
//! to 8 bits by its own largest magnitude, and the sums are exact integers. With grouped weights, each group has an
//! integer sum. The sums are scaled and added in f32 in the order of the groups.

use std::cell::Cell;
use std::mem::MaybeUninit;
use std::ops::{Range, RangeInclusive};

use corella_model::MlpSpec;

use crate::kernels::grouped::{GroupedShape, GroupedTile};
use crate::kernels::{
    FEW_ROWS, Form, Kernels, MAX_MATRIX_ROWS, NEXT_LINES, PANEL_LANES, Prefetch, TILE_K, TilePart,
    TileRows, TileUnit, wants_prefetch,
};
use crate::system::Worker;
use crate::weights::PackedMatrix;

use super::epilogue::Epilogue;
use super::grid::Grid;
use super::packed_rows::PackedRows;
use super::tiles::Tiles;
use super::update::{Updates, Weights};

/// The size of a block of packed rows. A block stays in the second-level cache while a worker reads all panels of its
/// part.
const ROWS_BYTES: usize = 3 << 19;
/// With these numbers of tiles, a block of rows is multiplied one part of k at a time.
const PART_TILES: RangeInclusive<usize> = PANEL_BLOCK_BYTES / 64 / NEXT_LINES..=MAX_PART_TILES;
/// The largest number of tiles in a block of rows.
const MAX_PART_TILES: usize = 16;
/// The number of k blocks in a part: 32 KiB of a panel, two thirds of a first-level cache.
const PART_BLOCKS: usize = 16;
/// The bytes of one row in a block of k, in every form that matrix tiles read.
const ROW_BLOCK_BYTES: usize = TILE_K * 2;
const PANEL_BLOCK_BYTES: usize = PANEL_LANES * ROW_BLOCK_BYTES;

/// One worker's part of a dense layer. A unit of work is one panel times one block of rows.
pub struct Part {
    /// The tiles of all rows of the step.
    pub tiles: Tiles,
    /// The tiles whose rows belong to this part.
    pub taken: Range<usize>,
    /// The panels that belong to this part.
    pub panels: Range<usize>,
    /// The panel whose outputs go to channel 0 of the epilogue's rows.
    pub first_panel: usize,
    /// The panel that the worker reads after its last unit, if known.
    pub next_panel: Option<usize>,
    /// The number of blocks into which the tiles are cut. Units go through all panels of one block first.
    num_blocks: usize,
}

impl Part {
    pub fn new(
        kernels: &Kernels,
        a: &PackedRows,
        tiles: Tiles,
        taken: Range<usize>,
        panels: Range<usize>,
    ) -> Self {
        let max_rows = ROWS_BYTES / a.row_bytes();
        let max_tiles = (max_rows / kernels.rows_at_once(a.form())).clamp(1, MAX_PART_TILES);
        Self {
            num_blocks: taken.len().div_ceil(max_tiles),
            tiles,
            taken,
            panels,
            first_panel: 0,
            next_panel: None,
        }
    }

    pub fn num_units(&self) -> usize {
        self.num_blocks * self.panels.len()
    }

    fn unit(&self, unit: usize) -> (Range<usize>, usize) {
        let block = unit / self.panels.len();
        let at = |block: usize| self.taken.start + block * self.taken.len() / self.num_blocks;
        let panel = self.panels.start + unit % self.panels.len();
        (at(block)..at(block + 1), panel)
    }
}

/// Computes some units of a part.
pub fn gemm(
    kernels: &Kernels,
    a: &PackedRows,
    part: &Part,
    units: Range<usize>,
    Weights {
        matrix: weights,
        updates,
    }: Weights<'_>,
    epilogue: Epilogue<'_>,
) {
    assert_eq!((a.k, a.form()), (weights.k, weights.form));
    let call = Call {
        kernels,
        a,
        tiles: part.tiles,
        weights,
        updates,
        first_panel: part.first_panel,
        epilogue,
        tile_rows: kernels.tile_gemm.filter(|_| weights.form != Form::Columns),
        configured_rows: Cell::new(0),
    };
    for unit in units.clone() {
        let (block, panel) = part.unit(unit);
        let next = match unit + 1 < units.end {
            true => Some(part.unit(unit + 1).1),
            false => part.next_panel,
        };
        match call.tile_unit() {
            _ if let Some(shape) = weights.groups => call.grouped_tiles(panel, block, shape),
            Some(tile_unit) if PART_TILES.contains(&block.len()) => {
                call.parts(&tile_unit, panel, block, next);
            }
            _ => {
                for tile in block.clone() {
                    let prefetch = call.prefetch(&block, tile, next);
                    call.tile(panel, tile, prefetch);
                }
            }
        }
    }
    if let Some(unit) = call.tile_unit() {
        // SAFETY: a tile unit exists only where the processor has tiles.
        unsafe { (unit.release)() };
    }
}

/// Computes a dense layer with all workers together. May be called once between two barriers.
pub fn shared_gemm(
    kernels: &Kernels,
    a: &PackedRows,
    grid: &Grid,
    weights: Weights<'_>,
    epilogue: Epilogue<'_>,
    worker: &Worker<'_>,
) {
    let part_of = |owner| {
        let panels = grid.share(owner, weights.matrix.num_panels);
        Part::new(kernels, a, grid.tiles, grid.tiles_of(owner), panels)
    };
    worker.take_shares(
        |owner| part_of(owner).num_units(),
        |owner, units| {
            let mut part = part_of(owner);
            let goes_on = owner == worker.index() && units.end < part.num_units();
            part.next_panel = goes_on.then(|| part.unit(units.end).1);
            gemm(kernels, a, &part, units, weights, epilogue);
        },
    );
}

struct Call<'a> {
    kernels: &'a Kernels,
    a: &'a PackedRows,
    tiles: Tiles,
    weights: &'a PackedMatrix,
    updates: Option<Updates<'a>>,
    first_panel: usize,
    epilogue: Epilogue<'a>,
    tile_rows: Option<TileRows>,
    configured_rows: Cell<usize>,
}

/// The memory to which a GEMM kernel writes the outputs of a tile.
struct OutputTile {
    to: *mut f32,
    /// The distance between rows, in elements.
    stride: usize,
    /// Whether the kernel writes final outputs. Otherwise `finish` processes its outputs.
    is_final: bool,
}

impl Call<'_> {
    fn tile_unit(&self) -> Option<TileUnit> {
        self.tile_rows?.unit
    }

    /// Whether to prefetch panels in software. With many rows every processor needs it: a kernel alternates between two
    /// cache lines of a panel, a pattern that hardware prefetchers do not follow.
    fn fetches_ahead(&self) -> bool {
        self.tiles.num_rows() > FEW_ROWS || wants_prefetch()
    }

    /// Returns the prefetch for the computation of one tile of a block of rows.
    fn prefetch(&self, block: &Range<usize>, tile: usize, next: Option<usize>) -> Prefetch {
        let index = tile - block.start;
        let takes_halves = self.tile_rows.is_some_and(|tiles| tiles.unit.is_none());
        if block.len() == 1 || !takes_halves {
            return match index == 0 && self.fetches_ahead() {
                true => Prefetch::Ahead,
                false => Prefetch::Nothing,
            };
        }
        match next {
            Some(next) if index < 2 => {
                let half = index * self.weights.panel_bytes() / 2;
                Prefetch::Half(self.weights.panel(next).wrapping_add(half))
            }
            _ => Prefetch::Nothing,
        }
    }

    /// Computes the product of a tile of rows and a panel.
    fn tile(&self, panel: usize, tile: usize, prefetch: Prefetch) {
        let rows = self.tiles.rows(tile);
        let num_rows = rows.len();
        let mut values = MaybeUninit::<[Lanes; MAX_MATRIX_ROWS]>::uninit();
        let values = values.as_mut_ptr().cast::<Lanes>();
        let (a, b) = (self.a.tile_ptr(&rows), self.weights.panel(panel));
        let num_blocks = self.weights.k.div_ceil(self.weights.form.block_k());
        self.prepare(panel, &rows, true);
        let target = self.output_tile(panel, &rows, values);
        // SAFETY: the tile holds `num_rows` rows of k elements, written before the last barrier, and the panel holds k
        // rows. The target has room for `num_rows` rows of 32 values; in a buffer, these belong to this worker.
        unsafe {
            match (self.weights.form, &self.tile_rows) {
                (Form::MatrixTiles, Some(tiles)) => {
                    let out_bytes = target.stride * 4;
                    (tiles.gemm)(a, num_rows, b, num_blocks, prefetch, target.to, out_bytes);
                }
                (Form::Int8, _) => {
                    let sums = values.cast::<i32>();
                    let (a, out_bytes) = (self.a.int8_rows(&rows), PANEL_LANES * 4);
                    (self.kernels.int8_gemm)(a, b, num_blocks, prefetch, sums, out_bytes);
                    self.scale(panel, &rows, sums, &target);
                }
                _ => {
                    let gemm = self.kernels.gemm.of(self.weights.dtype);
                    let k = self.weights.k;
                    let fetch_ahead = prefetch == Prefetch::Ahead;
                    gemm(a.cast(), num_rows, b, k, fetch_ahead, values.cast());
                    self.finish(panel, rows, values);
                    return;
                }
            }
        }
        if !target.is_final {
            self.finish(panel, rows, values);
        }
    }

    /// Computes the products of some tiles of rows and a panel with group-wise scales. The kernel
    /// divides k into parts itself.
    fn grouped_tiles(&self, panel: usize, tiles: Range<usize>, shape: GroupedShape) {
        let mut sums = MaybeUninit::<[[Lanes; MAX_MATRIX_ROWS]; MAX_PART_TILES]>::uninit();
        let sums = sums.as_mut_ptr().cast::<[Lanes; MAX_MATRIX_ROWS]>();
        let mut calls = [GroupedTile::NONE; MAX_PART_TILES];
        let calls = &mut calls[..tiles.len()];
        for ((index, tile), call) in tiles.clone().enumerate().zip(&mut *calls) {
            *call = GroupedTile {
                rows: self.a.summed_rows(&self.tiles.rows(tile)),
                // SAFETY: `sums` has one element per tile.
                out: unsafe { sums.add(index).cast() },
            };
        }
        let b = self.weights.panel(panel);
        // SAFETY: the tiles were written before the last barrier, and the panel has this shape.
        unsafe { (self.kernels.grouped_gemm)(calls, b, shape, self.fetches_ahead()) };
        for (tile, call) in tiles.zip(calls) {
            let rows = self.tiles.rows(tile);
            let values = call.out;
            let target = self.output_tile(panel, &rows, values.cast());
            let (by_row, by_lane) = (self.a.scales_ptr(&rows), self.weights.scales_ptr(panel));
            // SAFETY: there are as many rows as the kernel wrote; in a buffer, they belong to this worker.
            unsafe {
                let scale = self.kernels.scale_rows;
                scale(
                    values,
                    rows.len(),
                    by_row,
                    by_lane,
                    target.to,
                    target.stride,
                );
            }
            if !target.is_final {
                self.finish(panel, rows, values.cast());
            }
        }
    }

    /// Computes the products of some tiles of rows and a panel, k part by part, and prefetches the
    /// next panel to the second-level cache meanwhile.
    fn parts(&self, unit: &TileUnit, panel: usize, tiles: Range<usize>, next: Option<usize>) {
        const ENOUGH_TILES: usize = *PART_TILES.start();
        let mut sums = MaybeUninit::<[[Lanes; MAX_MATRIX_ROWS]; MAX_PART_TILES]>::uninit();
        let sums = sums.as_mut_ptr().cast::<[Lanes; MAX_MATRIX_ROWS]>();
        let mut values = MaybeUninit::<[Lanes; MAX_MATRIX_ROWS]>::uninit();
        let values = values.as_mut_ptr().cast::<Lanes>();
        let num_blocks = self.weights.k.div_ceil(self.weights.form.block_k());
        let gemm = match self.weights.form {
            Form::Int8 => unit.int8_gemm_part,
            _ => unit.gemm_part,
        };
        let num_parts = num_blocks.div_ceil(PART_BLOCKS);
        let at = |part: usize| part * num_blocks / num_parts;
        for part in 0..num_parts {
            let (first, num_blocks) = (at(part), at(part + 1) - at(part));
            let is_last = part + 1 == num_parts;
            let part_of = |panel| {
                self.weights
                    .panel(panel)
                    .wrapping_add(first * PANEL_BLOCK_BYTES)
            };
            for (index, tile) in tiles.clone().enumerate() {
                let rows = self.tiles.rows(tile);
                self.prepare(panel, &rows, is_last);
                // SAFETY: `sums` has one element per tile.
                let sums = unsafe { sums.add(index) };
                let target = self.output_tile(panel, &rows, values);
                let (out, stride) = match self.weights.form {
                    Form::MatrixTiles if is_last => (target.to.cast(), target.stride),
                    _ => (sums.cast(), PANEL_LANES),
                };
                let next = next.filter(|_| index < ENOUGH_TILES);
                let ahead = index * NEXT_LINES * 64 * num_blocks;
                // SAFETY: the blocks of a tile and of a panel are contiguous. The target has room
                // for rows of 32 values; in a buffer, these belong to this worker.
                unsafe {
                    let skipped = first * rows.len() * ROW_BLOCK_BYTES;
                    gemm(&TilePart {
                        rows: self.a.tile_ptr(&rows).add(skipped),
                        num_rows: rows.len(),
                        panel: part_of(panel),
                        num_blocks,
                        sums: match part {
                            0 => std::ptr::null(),
                            _ => sums.cast(),
                        },
                        next: next
                            .map_or(std::ptr::null(), |next| part_of(next).wrapping_add(ahead)),
                        out,
                        out_bytes: stride * 4,
                    });
                    if is_last && self.weights.form == Form::Int8 {
                        self.scale(panel, &rows, sums.cast(), &target);
                    }
                }
                if is_last && !target.is_final {
                    self.finish(panel, rows, values);
                }
            }
        }
    }

    /// Configures the tile unit for a tile of rows, and prefetches the outputs if the kernel writes them.
    fn prepare(&self, panel: usize, rows: &Range<usize>, are_written: bool) {
        let Some(tiles) = &self.tile_rows else {
            return;
        };
        if let Some(unit) = &tiles.unit
            && self.configured_rows.replace(rows.len()) != rows.len()
        {
            // SAFETY: a tile unit exists only where the processor has tiles.
            unsafe { (unit.configure)(rows.len()) };
        }
        if are_written && let Some((first, stride, num_lines)) = self.written_lines(rows, panel) {
            (tiles.fetch_to_write)(first, rows.len(), stride * 4, num_lines);
        }
    }

    fn output_tile(&self, panel: usize, rows: &Range<usize>, values: *mut Lanes) -> OutputTile {
        match self.epilogue {
            Epilogue::Store(out) if self.adds_nothing() => OutputTile {
                to: out.lanes_ptr(rows, panel - self.first_panel),
                stride: out.stride(),
                is_final: true,
            },
            _ => OutputTile {
                to: values.cast(),
                stride: PANEL_LANES,
                is_final: false,
            },
        }
    }

    /// Whether neither a bias nor an update is added, so that the products are the outputs.
    fn adds_nothing(&self) -> bool {
        self.weights.bias.is_none() && self.updates.is_none()
    }

    /// # Safety
    /// `sums` holds the sums of all `rows`, and `target` has room for as many values.
    unsafe fn scale(
        &self,
        panel: usize,
        rows: &Range<usize>,
        sums: *const i32,
        target: &OutputTile,
    ) {
        let (by_row, by_lane) = (self.a.scales_ptr(rows), self.weights.scales_ptr(panel));
        // SAFETY: the caller upholds the contract.
        unsafe {
            (self.kernels.scale_sums)(sums, rows.len(), by_row, by_lane, target.to, target.stride);
        }
    }

    /// Returns the cache lines of a tile's outputs: the first one, the distance between rows in elements, and the
    /// number of lines per row.
    fn written_lines(
        &self,
        rows: &Range<usize>,
        panel: usize,
    ) -> Option<(*const f32, usize, usize)> {
        match self.epilogue {
            Epilogue::Store(out)
            | Epilogue::StoreShaped { out, .. }
            | Epilogue::Add(out)
            | Epilogue::AddScaled(out, _) => Some((
                out.lanes_ptr(rows, panel - self.first_panel),
                out.stride(),
                2,
            )),
            Epilogue::SiluMul(out) => {
                let first = (panel - self.first_panel) * PANEL_LANES / 2;
                let (first, stride) = out.wide_ptr(rows, first)?;
                Some((first, stride, 1))
            }
            Epilogue::Activate { .. } => None,
        }
    }

    /// Adds the bias and the updates of adapters to a tile's outputs, and puts them where the epilogue says.
    fn finish(&self, panel: usize, rows: Range<usize>, values: *mut Lanes) {
        if let Some(bias) = &self.weights.bias {
            let bias = &bias[panel * PANEL_LANES..][..PANEL_LANES];
            // SAFETY: the kernel has just written these rows, and the panel has as many biases as lanes.
            unsafe { (self.kernels.add_bias)(bias.as_ptr(), rows.len(), values.cast()) };
        }
        // SAFETY: the kernel has just written these rows.
        let values = unsafe { std::slice::from_raw_parts_mut(values, rows.len()) };
        if let Some(updates) = &self.updates {
            for (row, values) in rows.clone().zip(&mut *values) {
                if let Some(update) = updates.of(row) {
                    // SAFETY: no worker writes inner values between the last barrier and the next.
                    let inner = unsafe { updates.inner.row(row) };
                    update.add(self.kernels, panel, inner, &mut values.0);
                }
            }
        }
        match self.epilogue {
            Epilogue::StoreShaped {
                scale,
                soft_cap: None,
                ..
            }
            | Epilogue::AddScaled(_, scale) => {
                let values = values.iter_mut().flat_map(|values| &mut values.0);
                values.for_each(|value| *value *= scale);
            }
            Epilogue::StoreShaped {
                scale,
                soft_cap: Some(cap),
                ..
            } => {
                let values = values.as_mut_ptr().cast::<f32>();
                // SAFETY: there are `PANEL_LANES` values of each row.
                unsafe { (self.kernels.soft_cap)(values, rows.len() * PANEL_LANES, scale, cap) };
            }
            _ => {}
        }
        match self.epilogue {
            Epilogue::Store(out) | Epilogue::StoreShaped { out, .. } => {
                let to = out.lanes_ptr(&rows, panel - self.first_panel);
                for (i, values) in values.iter().enumerate() {
                    // SAFETY: each panel's channels of a row belong to one worker.
                    unsafe { *to.add(i * out.stride()).cast::<[f32; PANEL_LANES]>() = values.0 };
                }
            }
            Epilogue::Add(out) | Epilogue::AddScaled(out, _) => {
                let to = out.lanes_ptr(&rows, panel - self.first_panel);
                // SAFETY: each panel's channels of a row belong to one worker.
                unsafe {
                    (self.kernels.add_lanes)(values.as_ptr().cast(), rows.len(), to, out.stride())
                };
            }
            Epilogue::SiluMul(out) => self.multiply_gates(panel, rows, values, out),
            Epilogue::Activate { out, mlp } => self.activate(panel, rows, values, out, mlp),
        }
    }

    /// Multiplies gated values by their gates and writes them as rows of the next layer.
    fn multiply_gates(&self, panel: usize, rows: Range<usize>, values: &[Lanes], out: &PackedRows) {
        let from = values.as_ptr().cast();
        let first = (panel - self.first_panel) * PANEL_LANES / 2;
        let num_lanes = (PANEL_LANES / 2).min(out.k - first);
        if let Some(tiles) = &self.tile_rows
            && num_lanes == PANEL_LANES / 2
        {
            // SAFETY: each panel's channels belong to one worker; half a block has room for 16 of them.
            unsafe {
                if let Some((to, stride)) = out.wide_ptr(&rows, first) {
                    (tiles.silu_mul_wide)(from, rows.len(), to.cast_mut(), stride);
                } else {
                    (tiles.silu_mul)(from, rows.len(), out.block_ptr(&rows, first));
                }
            }
            return;
        }
        let mut products = [[0.0; PANEL_LANES / 2]; MAX_MATRIX_ROWS];
        // SAFETY: the input has rows of 32, the output rows of 16, and a tile at most this many.
        unsafe { (self.kernels.silu_mul)(from, rows.len(), products.as_mut_ptr().cast()) };
        for (row, products) in rows.clone().zip(&products) {
            let products = &products[..num_lanes];
            // SAFETY: each panel's channels of a row belong to one worker.
            unsafe { out.write(self.kernels, &rows, row, first, products) };
        }
    }

    /// Applies an activation function to a tile's outputs and writes them as rows of the next layer.
    fn activate(
        &self,
        panel: usize,
        rows: Range<usize>,
        values: &mut [Lanes],
        out: &PackedRows,
        mlp: &MlpSpec,
    ) {
        const GATES: usize = PANEL_LANES / 2;
        let num_lanes = if mlp.is_gated { GATES } else { PANEL_LANES };
        let first = (panel - self.first_panel) * num_lanes;
        let activate = |values: &mut [Lanes], num_lanes| {
            let values = values.as_mut_ptr().cast();
            // SAFETY: there are as many values, one after the other.
            unsafe { (self.kernels.activate)(mlp.activation, values, num_lanes) };
        };
        if !mlp.is_gated {
            // One call for all rows, because each call loads the function's constants.
            activate(values, rows.len() * PANEL_LANES);
        }
        for (row, values) in rows.clone().zip(values) {
            if mlp.is_gated {
                if let Some(limit) = mlp.gate_limit {
                    limit_gates(&mut values.0, limit);
                }
                activate(std::slice::from_mut(values), GATES);
                let (gates, gated) = values.0.split_at_mut(GATES);
                for (gate, value) in gates.iter_mut().zip(gated) {
                    *gate *= *value;
                }
            }
            let values = &values.0[..num_lanes.min(out.k - first)];
            // SAFETY: each panel's channels of a row belong to one worker.
            unsafe { out.write(self.kernels, &rows, row, first, values) };
        }
    }
}

/// See [`MlpSpec::gate_limit`].
fn limit_gates(values: &mut [f32; PANEL_LANES], limit: f32) {
    let (gates, gated) = values.split_at_mut(PANEL_LANES / 2);
    for gate in gates {
        // Unlike `min`, this keeps NaN.
        *gate = if *gate > limit { limit } else { *gate };
    }
    for value in gated {
        *value = value.clamp(-limit, limit) + 1.0;
    }
}

#[derive(Clone, Copy)]
#[repr(align(64))]
struct Lanes([f32; PANEL_LANES]);
