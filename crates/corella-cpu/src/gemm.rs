//! Dense layers: weights in panels, packed once; rows times panels, shared out by panel.
//!
//! An output is one worker's, who walks k in order, so neither the number of workers nor the rows
//! around a row reach its result.

use std::cell::Cell;
use std::io;
use std::mem::MaybeUninit;
use std::ops::{Range, RangeInclusive};

use corella_model::{DType, GroupedRow, Tensor};
use half::{bf16, f16};

use crate::buffer::{Buffer, Form, PackedRows, Tiles};
use crate::grid::Grid;
use crate::int4_matrix::{self, Int4Packing};
use crate::kernels::int4::Int4Shape;
use crate::kernels::{
    Kernels, MAX_MATRIX_ROWS, NEXT_LINES, PANEL_LANES, TILE_K, TilePart, TileRows, int8_position,
    panel_position, tile_position,
};
use crate::region::Region;
use crate::thread_pool::{ThreadPool, Worker};

/// A matrix `[out, in]` as panels of 32 outputs, each contiguous and k-major.
pub struct PackedMatrix {
    dtype: DType,
    form: Form,
    k: usize,
    num_panels: usize,
    panels: Region,
    /// By lane, as the panels.
    bias: Option<Vec<f32>>,
    /// In `Form::Int8`: what each lane's integers, or the scales of their groups, are multiplied by,
    /// one f32 a lane.
    scales: Region,
    /// In `Form::Int8`, of weights in 4 bits.
    int4: Option<Int4Shape>,
}

/// What one output lane computes.
#[derive(Clone, Copy)]
pub struct Lane<'a> {
    pub weight: &'a Tensor,
    pub bias: Option<&'a Tensor>,
    pub row: usize,
}

impl PackedMatrix {
    /// `lanes[i]` says what lane i computes; lanes without a source give 0. In `Form::Int8` weights
    /// are rounded to ±127 times their lane's largest magnitude, whatever the type, unless they are
    /// integers of 8 bits with a scale for each output, or packed into 4 bits as `int4` says.
    pub fn pack(
        lanes: &[Option<Lane<'_>>],
        k: usize,
        dtype: DType,
        form: Form,
        int4: Option<Int4Packing>,
        kernels: &Kernels,
        pool: &mut ThreadPool,
    ) -> io::Result<Self> {
        let num_panels = lanes.len().div_ceil(PANEL_LANES);
        let panel_bytes = match int4 {
            Some(int4) => int4.shape.panel_bytes(),
            None => panel_bytes(k, dtype, form),
        };
        let panels = Region::new(num_panels * panel_bytes)?;
        let scales = match form {
            Form::Columns | Form::MatrixTiles => Region::new(0)?,
            Form::Int8 => Region::new(num_panels * PANEL_LANES * size_of::<f32>())?,
        };
        pool.run(&|worker| {
            for panel in worker.share(num_panels) {
                let first = panel * PANEL_LANES;
                let lanes = &lanes[first..lanes.len().min(first + PANEL_LANES)];
                // SAFETY: panels lie one after the other, and each worker fills its own.
                let bytes = unsafe {
                    let start = panels.as_ptr().add(panel * panel_bytes);
                    std::slice::from_raw_parts_mut(start, panel_bytes)
                };
                match form {
                    Form::Columns | Form::MatrixTiles => pack_panel(lanes, k, dtype, form, bytes),
                    Form::Int8 => {
                        // SAFETY: as above.
                        let scales = unsafe {
                            let start = scales.as_ptr().cast::<f32>().add(first);
                            std::slice::from_raw_parts_mut(start, PANEL_LANES)
                        };
                        match int4 {
                            Some(int4) => int4.pack_panel(lanes, k, kernels, scales, bytes),
                            None => quantise_panel(lanes, k, kernels, scales, bytes),
                        }
                    }
                }
            }
        })
        .map_err(io::Error::other)?;
        let has_bias = lanes.iter().flatten().any(|lane| lane.bias.is_some());
        let bias = has_bias.then(|| {
            let mut bias = vec![0.0; num_panels * PANEL_LANES];
            for (value, lane) in bias.iter_mut().zip(lanes) {
                if let Some(Lane {
                    bias: Some(tensor),
                    row,
                    ..
                }) = lane
                {
                    *value = element(tensor, *row);
                }
            }
            bias
        });
        Ok(Self {
            dtype,
            form,
            k,
            num_panels,
            panels,
            bias,
            scales,
            int4: int4.map(|int4| int4.shape),
        })
    }

    pub fn num_bytes(&self) -> usize {
        self.num_panels * self.panel_bytes()
    }

    pub fn num_panels(&self) -> usize {
        self.num_panels
    }

    /// The weights of one output: a row of the matrix, back from the panels.
    pub fn read_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.num_panels * PANEL_LANES && out.len() == self.k);
        let panel = self.panel(row / PANEL_LANES);
        if self.form == Form::Int8 {
            // SAFETY: the scale of a lane.
            let scale = unsafe { *self.scales_ptr(row / PANEL_LANES).add(row % PANEL_LANES) };
            if let Some(shape) = self.int4 {
                // SAFETY: the whole panel.
                let panel = unsafe { std::slice::from_raw_parts(panel, shape.panel_bytes()) };
                return int4_matrix::read_lane(panel, shape, row % PANEL_LANES, scale, out);
            }
            for (i, value) in out.iter_mut().enumerate() {
                let at = int8_position(i, row % PANEL_LANES);
                // SAFETY: an element of the panel.
                *value = f32::from(unsafe { *panel.cast::<i8>().add(at) }) * scale;
            }
            return;
        }
        for (i, value) in out.iter_mut().enumerate() {
            let at = position(self.dtype, self.form, i, row % PANEL_LANES);
            // SAFETY: an element of the panel.
            unsafe {
                let element = panel.add(at * self.dtype.size());
                *value = match self.dtype {
                    DType::F32 => *element.cast::<f32>(),
                    DType::Bf16 => bf16::from_bits(*element.cast()).to_f32(),
                    DType::F16 => f16::from_bits(*element.cast()).to_f32(),
                };
            }
        }
    }

    pub fn form(&self) -> Form {
        self.form
    }

    pub fn is_int4(&self) -> bool {
        self.int4.is_some()
    }

    fn panel_bytes(&self) -> usize {
        match self.int4 {
            Some(shape) => shape.panel_bytes(),
            None => panel_bytes(self.k, self.dtype, self.form),
        }
    }

    fn scales_ptr(&self, panel: usize) -> *const f32 {
        assert!(panel < self.num_panels && self.form == Form::Int8);
        // SAFETY: just checked.
        unsafe { self.scales.as_ptr().cast::<f32>().add(panel * PANEL_LANES) }
    }

    fn panel(&self, panel: usize) -> *const u8 {
        assert!(panel < self.num_panels);
        // SAFETY: just checked.
        unsafe { self.panels.as_ptr().add(panel * self.panel_bytes()) }
    }
}

fn panel_bytes(k: usize, dtype: DType, form: Form) -> usize {
    let element = match form {
        Form::Columns | Form::MatrixTiles => dtype.size(),
        Form::Int8 => 1,
    };
    k.next_multiple_of(form.block_k()) * PANEL_LANES * element
}

/// Where element k of a lane stands in its panel.
fn position(dtype: DType, form: Form, k: usize, lane: usize) -> usize {
    match form {
        Form::Columns => k * PANEL_LANES + panel_position(dtype, lane),
        Form::MatrixTiles => tile_position(k, lane),
        Form::Int8 => int8_position(k, lane),
    }
}

/// Where the outputs of a dense layer go.
#[derive(Clone, Copy)]
pub enum Epilogue<'a> {
    /// `out[row][lane] = value`
    Store(&'a Buffer),
    /// `out[row][lane] += value`
    Add(&'a Buffer),
    /// Lanes 0–15 of a panel are gates, 16–31 the values they gate; `out` is the next
    /// layer's input.
    SiluMul(&'a PackedRows),
}

/// Packed rows that a worker keeps in its second-level cache while all its panels pass by.
const ROWS_BYTES: usize = 3 << 19;
/// Tiles of rows from which on a panel is taken in parts, and at most at once.
const PART_TILES: RangeInclusive<usize> = PANEL_BLOCK_BYTES / 64 / NEXT_LINES..=MAX_PART_TILES;
const MAX_PART_TILES: usize = 16;
/// Blocks of k of a part: 32 KiB of a panel, two thirds of a first-level cache.
const PART_BLOCKS: usize = 16;
/// Of a block of k, in tiles of any kind.
const ROW_BLOCK_BYTES: usize = TILE_K * 2;
const PANEL_BLOCK_BYTES: usize = PANEL_LANES * ROW_BLOCK_BYTES;

/// What one worker has to compute of a dense layer. A unit is a panel times a block of rows.
pub struct Part {
    /// Of all rows.
    pub tiles: Tiles,
    pub taken: Range<usize>,
    pub panels: Range<usize>,
    /// The panel whose outputs are lanes 0 and on.
    pub first_panel: usize,
    /// Blocks of the taken tiles, one after the other for all panels.
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

/// Some units of a part. `next` is the panel that the worker goes on with, if it is known.
pub fn gemm(
    kernels: &Kernels,
    a: &PackedRows,
    part: &Part,
    units: Range<usize>,
    next: Option<usize>,
    weights: &PackedMatrix,
    epilogue: Epilogue<'_>,
) {
    assert_eq!((a.k, a.form()), (weights.k, weights.form));
    let call = Call {
        kernels,
        a,
        tiles: part.tiles,
        weights,
        first_panel: part.first_panel,
        epilogue,
        matrix_tiles: kernels.tile_gemm.filter(|_| weights.form != Form::Columns),
        configured_rows: Cell::new(0),
    };
    for unit in units.clone() {
        let (block, panel) = part.unit(unit);
        match call.matrix_tiles {
            // Of weights in 4 bits, a kernel takes a panel part by part itself.
            Some(matrix_tiles) if weights.int4.is_none() && PART_TILES.contains(&block.len()) => {
                let next = match unit + 1 < units.end {
                    true => Some(part.unit(unit + 1).1),
                    false => next,
                };
                call.parts(&matrix_tiles, panel, block, next);
            }
            _ => {
                for tile in block.clone() {
                    call.tile(panel, tile, tile == block.start);
                }
            }
        }
    }
    if let Some(tiles) = call.matrix_tiles {
        // SAFETY: the processor has tiles.
        unsafe { (tiles.release)() };
    }
}

/// All of a dense layer, by all workers together. Once between two barriers.
pub fn shared_gemm(
    kernels: &Kernels,
    a: &PackedRows,
    grid: &Grid,
    weights: &PackedMatrix,
    epilogue: Epilogue<'_>,
    worker: &Worker<'_>,
) {
    let part_of = |owner| {
        let panels = grid.share(owner, weights.num_panels);
        Part::new(kernels, a, grid.tiles, grid.tiles_of(owner), panels)
    };
    worker.take_shares(
        |owner| part_of(owner).num_units(),
        |owner, units| {
            let part = part_of(owner);
            let goes_on = owner == worker.index() && units.end < part.num_units();
            let next = goes_on.then(|| part.unit(units.end).1);
            gemm(kernels, a, &part, units, next, weights, epilogue);
        },
    );
}

struct Call<'a> {
    kernels: &'a Kernels,
    a: &'a PackedRows,
    tiles: Tiles,
    weights: &'a PackedMatrix,
    first_panel: usize,
    epilogue: Epilogue<'a>,
    matrix_tiles: Option<TileRows>,
    configured_rows: Cell<usize>,
}

/// Where a tile's outputs go at first.
struct Place {
    to: *mut f32,
    /// In elements, from row to row.
    stride: usize,
    /// Whether that is where they belong, since nothing is to be done to them.
    is_final: bool,
}

impl Call<'_> {
    fn tile(&self, panel: usize, tile: usize, fetch_ahead: bool) {
        let rows = self.tiles.rows(tile);
        let num_rows = rows.len();
        let mut values = MaybeUninit::<[Lanes; MAX_MATRIX_ROWS]>::uninit();
        let values = values.as_mut_ptr().cast::<Lanes>();
        let (a, b) = (self.a.tile_ptr(&rows), self.weights.panel(panel));
        let num_blocks = self.weights.k.div_ceil(self.weights.form.block_k());
        self.prepare(panel, &rows, true);
        let place = self.place(panel, &rows, values);
        // SAFETY: the tile holds num_rows rows of k elements, written before the last barrier; the
        // panel holds k rows; there is room for num_rows rows of 32 values, which in a buffer
        // belong to this worker.
        unsafe {
            match (self.weights.form, &self.matrix_tiles, self.weights.int4) {
                (Form::MatrixTiles, Some(tiles), _) => {
                    let out_bytes = place.stride * 4;
                    (tiles.gemm)(a, num_rows, b, num_blocks, fetch_ahead, place.to, out_bytes);
                }
                (Form::Int8, _, Some(shape)) => {
                    let int4_rows = self.a.int4_rows(&rows);
                    (self.kernels.int4_gemm)(&int4_rows, b, shape, fetch_ahead, values.cast());
                    let (by_row, by_lane) =
                        (self.a.scales_ptr(&rows), self.weights.scales_ptr(panel));
                    let scale = self.kernels.scale_rows;
                    scale(
                        values.cast(),
                        num_rows,
                        by_row,
                        by_lane,
                        place.to,
                        place.stride,
                    );
                }
                (Form::Int8, _, None) => {
                    let sums = values.cast::<i32>();
                    let gemm = self.kernels.int8_gemm;
                    gemm(
                        a,
                        num_rows,
                        b,
                        num_blocks,
                        fetch_ahead,
                        sums,
                        PANEL_LANES * 4,
                    );
                    self.scale(panel, &rows, sums, &place);
                }
                _ => {
                    let gemm = self.kernels.gemm.of(self.weights.dtype);
                    let k = self.weights.k;
                    gemm(a.cast(), num_rows, b, k, fetch_ahead, values.cast());
                    self.finish(panel, rows, values);
                    return;
                }
            }
        }
        if !place.is_final {
            self.finish(panel, rows, values);
        }
    }

    /// Some tiles of rows times a panel, part by part of k, while the next panel is on its way to
    /// the second-level cache.
    fn parts(
        &self,
        matrix_tiles: &TileRows,
        panel: usize,
        tiles: Range<usize>,
        next: Option<usize>,
    ) {
        const ENOUGH_TILES: usize = *PART_TILES.start();
        let mut sums = MaybeUninit::<[[Lanes; MAX_MATRIX_ROWS]; MAX_PART_TILES]>::uninit();
        let sums = sums.as_mut_ptr().cast::<[Lanes; MAX_MATRIX_ROWS]>();
        let mut values = MaybeUninit::<[Lanes; MAX_MATRIX_ROWS]>::uninit();
        let values = values.as_mut_ptr().cast::<Lanes>();
        let num_blocks = self.weights.k.div_ceil(self.weights.form.block_k());
        let gemm = match self.weights.form {
            Form::Int8 => matrix_tiles.int8_gemm_part,
            _ => matrix_tiles.gemm_part,
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
                // SAFETY: there is one for each tile.
                let sums = unsafe { sums.add(index) };
                let place = self.place(panel, &rows, values);
                let (out, stride) = match self.weights.form {
                    Form::MatrixTiles if is_last => (place.to.cast(), place.stride),
                    _ => (sums.cast(), PANEL_LANES),
                };
                let next = next.filter(|_| index < ENOUGH_TILES);
                let ahead = index * NEXT_LINES * 64 * num_blocks;
                // SAFETY: the blocks of a tile and of a panel lie one after the other; there is
                // room for rows of 32 values, which in a buffer belong to this worker.
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
                        self.scale(panel, &rows, sums.cast(), &place);
                    }
                }
                if is_last && !place.is_final {
                    self.finish(panel, rows, values);
                }
            }
        }
    }

    /// Before a tile is computed, whose outputs are perhaps written then.
    fn prepare(&self, panel: usize, rows: &Range<usize>, are_written: bool) {
        let Some(tiles) = &self.matrix_tiles else {
            return;
        };
        if self.configured_rows.replace(rows.len()) != rows.len() {
            // SAFETY: the processor has tiles.
            unsafe { (tiles.configure)(rows.len()) };
        }
        if are_written && let Some((first, stride, num_lines)) = self.written_lines(rows, panel) {
            (tiles.fetch_to_write)(first, rows.len(), stride * 4, num_lines);
        }
    }

    fn place(&self, panel: usize, rows: &Range<usize>, values: *mut Lanes) -> Place {
        match self.epilogue {
            Epilogue::Store(out) if self.weights.bias.is_none() => Place {
                to: out.lanes_ptr(rows, panel - self.first_panel),
                stride: out.stride(),
                is_final: true,
            },
            _ => Place {
                to: values.cast(),
                stride: PANEL_LANES,
                is_final: false,
            },
        }
    }

    /// # Safety
    /// `sums` are those of the rows, and there is room at the place for as many values.
    unsafe fn scale(&self, panel: usize, rows: &Range<usize>, sums: *const i32, place: &Place) {
        let (by_row, by_lane) = (self.a.scales_ptr(rows), self.weights.scales_ptr(panel));
        // SAFETY: the caller's promise.
        unsafe {
            (self.kernels.scale_sums)(sums, rows.len(), by_row, by_lane, place.to, place.stride);
        }
    }

    /// The first of the cache lines that a tile's outputs go to, elements from row to row, and
    /// lines of each row.
    fn written_lines(
        &self,
        rows: &Range<usize>,
        panel: usize,
    ) -> Option<(*const f32, usize, usize)> {
        match self.epilogue {
            Epilogue::Store(out) | Epilogue::Add(out) => Some((
                out.lanes_ptr(rows, panel - self.first_panel),
                out.stride(),
                2,
            )),
            Epilogue::SiluMul(out) => {
                let (first, stride) = out.wide_ptr(rows, panel * PANEL_LANES / 2)?;
                Some((first, stride, 1))
            }
        }
    }

    fn finish(&self, panel: usize, rows: Range<usize>, values: *mut Lanes) {
        // SAFETY: just written.
        let values = unsafe { std::slice::from_raw_parts_mut(values, rows.len()) };
        if let Some(bias) = &self.weights.bias {
            let bias = &bias[panel * PANEL_LANES..][..PANEL_LANES];
            for values in &mut *values {
                for (value, bias) in values.0.iter_mut().zip(bias) {
                    *value += bias;
                }
            }
        }
        let from = values.as_ptr().cast();
        match self.epilogue {
            Epilogue::Store(out) => {
                let to = out.lanes_ptr(&rows, panel - self.first_panel);
                for (i, values) in values.iter().enumerate() {
                    // SAFETY: a panel's lanes of a row belong to one worker.
                    unsafe { *to.add(i * out.stride()).cast::<[f32; PANEL_LANES]>() = values.0 };
                }
            }
            Epilogue::Add(out) => {
                let to = out.lanes_ptr(&rows, panel - self.first_panel);
                // SAFETY: as above.
                unsafe { (self.kernels.add_lanes)(from, rows.len(), to, out.stride()) };
            }
            Epilogue::SiluMul(out) => {
                let first = panel * PANEL_LANES / 2;
                let num_lanes = (PANEL_LANES / 2).min(out.k - first);
                if let Some(tiles) = &self.matrix_tiles
                    && num_lanes == PANEL_LANES / 2
                {
                    // SAFETY: a panel's lanes belong to one worker; half a block is 16 lanes.
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
                // SAFETY: rows of 32 in, rows of 16 out, at most a tile of them.
                unsafe {
                    let to = products.as_mut_ptr().cast();
                    (self.kernels.silu_mul)(from, rows.len(), to);
                }
                for (row, products) in rows.clone().zip(&products) {
                    let products = &products[..num_lanes];
                    // SAFETY: a panel's lanes belong to one worker.
                    unsafe { out.write(self.kernels, &rows, row, first, products) };
                }
            }
        }
    }
}

#[derive(Clone, Copy)]
#[repr(align(64))]
struct Lanes([f32; PANEL_LANES]);

fn pack_panel(lanes: &[Option<Lane<'_>>], k: usize, dtype: DType, form: Form, out: &mut [u8]) {
    // Blocks of k, so that both sides stay in the first-level cache.
    const BLOCK: usize = 64;
    let size = dtype.size();
    // Filled only of tensors that are stored as something else.
    let mut scratch = [const { Vec::new() }; PANEL_LANES];
    let lanes = lanes.iter().zip(&mut scratch).map(|(lane, scratch)| {
        let source = (*lane)?;
        let row = source.weight.row(source.row, scratch);
        assert_eq!(row.len(), k * source.weight.dtype.size());
        Some((source.weight.dtype, row))
    });
    let lanes: Vec<_> = lanes.collect();
    for start in (0..k).step_by(BLOCK) {
        let block = start..k.min(start + BLOCK);
        for (lane, source) in lanes.iter().enumerate() {
            let Some((from, row)) = *source else { continue };
            let row = &row[block.start * from.size()..block.end * from.size()];
            let block = block.clone();
            // Lengths are constants where nothing is converted: this runs for every weight.
            if from != dtype {
                for (k, element) in block.zip(row.chunks_exact(from.size())) {
                    let at = position(dtype, form, k, lane) * size;
                    encode(decode(element, from), dtype, &mut out[at..at + size]);
                }
            } else if form == Form::MatrixTiles {
                copy_elements::<4>(row, block.step_by(2), out, |k| 2 * tile_position(k, lane));
            } else if size == 2 {
                copy_elements::<2>(row, block, out, |k| 2 * position(dtype, form, k, lane));
            } else {
                copy_elements::<4>(row, block, out, |k| 4 * position(dtype, form, k, lane));
            }
        }
    }
}

fn quantise_panel(
    lanes: &[Option<Lane<'_>>],
    k: usize,
    kernels: &Kernels,
    scales: &mut [f32],
    out: &mut [u8],
) {
    let (mut row, mut quantised) = (vec![0.0; k], vec![0_i8; k]);
    // Filled only of tensors that are stored as something else.
    let mut scratch = Vec::new();
    let mut groups = GroupedRow::default();
    for (lane, source) in lanes.iter().enumerate() {
        let Some(source) = source else { continue };
        if source.weight.has_int8_rows() {
            source.weight.read_groups(source.row, &mut groups);
            scales[lane] = groups.scales[0];
            write_integers(&groups.quants, lane, out);
            continue;
        }
        decode_lane(source, &mut scratch, &mut row);
        // SAFETY: k elements each.
        unsafe {
            let most = f32::from_bits((kernels.largest_bits)(row.as_ptr(), k));
            scales[lane] = most / 127.0;
            let inverse = match scales[lane] > 0.0 {
                true => (127.0 / most).min(f32::MAX),
                false => 0.0,
            };
            (kernels.quantise)(row.as_ptr(), k, inverse, quantised.as_mut_ptr());
        }
        write_integers(&quantised, lane, out);
    }
}

fn write_integers(row: &[i8], lane: usize, out: &mut [u8]) {
    let (quads, rest) = row.as_chunks::<4>();
    for (quad, values) in quads.iter().enumerate() {
        let at = int8_position(quad * 4, lane);
        out[at..at + 4].copy_from_slice(&values.map(|value| value as u8));
    }
    for (i, value) in rest.iter().enumerate() {
        out[int8_position(quads.len() * 4 + i, lane)] = *value as u8;
    }
}

/// All weights of a lane.
pub fn decode_lane(source: &Lane<'_>, scratch: &mut Vec<u8>, out: &mut [f32]) {
    let dtype = source.weight.dtype;
    let bytes = source.weight.row(source.row, scratch);
    assert_eq!(bytes.len(), out.len() * dtype.size());
    if dtype == DType::Bf16 {
        // Most checkpoints: a loop that becomes vectors.
        for (value, &[low, high]) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
            *value = f32::from_bits(u32::from_le_bytes([0, 0, low, high]));
        }
    } else {
        for (value, bytes) in out.iter_mut().zip(bytes.chunks_exact(dtype.size())) {
            *value = decode(bytes, dtype);
        }
    }
}

/// Copies `N` bytes of a row for each k to the place that `at` says; fewer at its end.
fn copy_elements<const N: usize>(
    row: &[u8],
    ks: impl Iterator<Item = usize>,
    out: &mut [u8],
    at: impl Fn(usize) -> usize,
) {
    for (k, bytes) in ks.zip(row.chunks(N)) {
        let at = at(k);
        match bytes.try_into() {
            Ok::<[u8; N], _>(bytes) => out[at..at + N].copy_from_slice(&bytes),
            Err(_) => out[at..at + bytes.len()].copy_from_slice(bytes),
        }
    }
}

/// Element `index` of a tensor, in row-major order.
fn element(tensor: &Tensor, index: usize) -> f32 {
    let size = tensor.dtype.size();
    decode(&tensor.bytes()[index * size..][..size], tensor.dtype)
}

/// One row of a matrix.
pub fn decode_row(tensor: &Tensor, row: usize, scratch: &mut Vec<u8>, out: &mut [f32]) {
    let row = tensor.row(row, scratch).chunks_exact(tensor.dtype.size());
    assert_eq!(row.len(), out.len());
    for (bytes, value) in row.zip(out) {
        *value = decode(bytes, tensor.dtype);
    }
}

/// All elements of a tensor.
pub fn elements(tensor: &Tensor) -> Vec<f32> {
    tensor
        .bytes()
        .chunks_exact(tensor.dtype.size())
        .map(|bytes| decode(bytes, tensor.dtype))
        .collect()
}

fn decode(bytes: &[u8], dtype: DType) -> f32 {
    match (dtype, bytes) {
        (DType::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
        (DType::Bf16, &[a, b]) => bf16::from_le_bytes([a, b]).to_f32(),
        (DType::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f32(),
        _ => unreachable!("{} bytes of {dtype:?}", bytes.len()),
    }
}

/// Rounds to nearest even.
fn encode(value: f32, dtype: DType, out: &mut [u8]) {
    match dtype {
        DType::F32 => out.copy_from_slice(&value.to_ne_bytes()),
        DType::Bf16 => out.copy_from_slice(&bf16::from_f32(value).to_ne_bytes()),
        DType::F16 => out.copy_from_slice(&f16::from_f32(value).to_ne_bytes()),
    }
}
