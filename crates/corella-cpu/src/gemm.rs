//! Dense layers: weights in panels, packed once; rows times panels, shared out by panel.
//!
//! A worker owns whole output lanes and walks k in order, so neither the number of workers
//! nor the rows around a row reach its result.

use std::cell::Cell;
use std::io;
use std::mem::MaybeUninit;
use std::ops::Range;

use corella_model::{DType, Tensor};
use half::{bf16, f16};

use crate::buffer::{Buffer, Form, PackedRows, Tiles};
use crate::kernels::{
    Ahead, Kernels, MAX_MATRIX_ROWS, NEXT_LINES, PANEL_LANES, TILE_K, TileRows, int8_position,
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
    /// In `Form::Int8`: what each lane's integers are multiplied by, one f32 a lane.
    scales: Region,
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
    /// are rounded to ±127 times their lane's largest magnitude, whatever the type.
    pub fn pack(
        lanes: &[Option<Lane<'_>>],
        k: usize,
        dtype: DType,
        form: Form,
        kernels: &Kernels,
        pool: &mut ThreadPool,
    ) -> io::Result<Self> {
        let num_panels = lanes.len().div_ceil(PANEL_LANES);
        let panel_bytes = panel_bytes(k, dtype, form);
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
                        quantise_panel(lanes, k, kernels, scales, bytes);
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
        })
    }

    pub fn num_bytes(&self) -> usize {
        self.num_panels * self.panel_bytes()
    }

    pub fn num_lanes(&self) -> usize {
        self.num_panels * PANEL_LANES
    }

    /// The weights of one output: a row of the matrix, back from the panels.
    pub fn read_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.num_panels * PANEL_LANES && out.len() == self.k);
        let panel = self.panel(row / PANEL_LANES);
        if self.form == Form::Int8 {
            // SAFETY: the scale of a lane.
            let scale = unsafe { *self.scales_ptr(row / PANEL_LANES).add(row % PANEL_LANES) };
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

    fn panel_bytes(&self) -> usize {
        panel_bytes(self.k, self.dtype, self.form)
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
const ROW_BLOCK_BYTES: usize = 1 << 20;
/// Cache lines of a block of k of a panel, in tiles.
const BLOCK_LINES: usize = TILE_K * PANEL_LANES * 2 / 64;

/// Every worker computes its share of the output lanes for all rows.
pub fn gemm(
    kernels: &Kernels,
    a: &PackedRows,
    tiles: Tiles,
    weights: &PackedMatrix,
    epilogue: Epilogue<'_>,
    worker: &Worker<'_>,
) {
    assert_eq!((a.k, a.form()), (weights.k, weights.form));
    let panels = worker.share(weights.num_panels);
    let max_rows = ROW_BLOCK_BYTES / a.row_bytes();
    let max_tiles = (max_rows / kernels.rows_at_once(weights.form)).max(1);
    let num_blocks = tiles.len().div_ceil(max_tiles).max(1);
    let call = Call {
        kernels,
        a,
        weights,
        epilogue,
        matrix_tiles: kernels.tile_gemm.filter(|_| weights.form != Form::Columns),
        configured_rows: Cell::new(0),
        tiles_at_once: tiles.len() / num_blocks,
    };
    for block in 0..num_blocks {
        let block = block * tiles.len() / num_blocks..(block + 1) * tiles.len() / num_blocks;
        for panel in panels.clone() {
            for tile in block.clone() {
                let next = panels.contains(&(panel + 1)).then_some(tile - block.start);
                call.tile(panel, tiles.rows(tile), tile == block.start, next);
            }
        }
    }
    if let Some(tiles) = call.matrix_tiles {
        // SAFETY: the processor has tiles.
        unsafe { (tiles.release)() };
    }
}

struct Call<'a> {
    kernels: &'a Kernels,
    a: &'a PackedRows,
    weights: &'a PackedMatrix,
    epilogue: Epilogue<'a>,
    matrix_tiles: Option<TileRows>,
    configured_rows: Cell<usize>,
    /// Of one block of rows, at least.
    tiles_at_once: usize,
}

impl Call<'_> {
    /// `next` says which part of the next panel, if there is one, this tile may ask for.
    fn tile(&self, panel: usize, rows: Range<usize>, fetch_ahead: bool, next: Option<usize>) {
        let num_rows = rows.len();
        let mut values = MaybeUninit::<[Lanes; MAX_MATRIX_ROWS]>::uninit();
        let values = values.as_mut_ptr().cast::<Lanes>();
        let (a, b) = (self.a.tile_ptr(&rows), self.weights.panel(panel));
        let num_blocks = self.weights.k.div_ceil(self.weights.form.block_k());
        if let Some(tiles) = &self.matrix_tiles
            && self.configured_rows.replace(num_rows) != num_rows
        {
            // SAFETY: the processor has tiles.
            unsafe { (tiles.configure)(num_rows) };
        }
        let ahead = self.ahead(panel, num_blocks, fetch_ahead, next);
        // Outputs go where they belong, if nothing is to be done to them.
        let direct = match self.epilogue {
            Epilogue::Store(out) if self.weights.bias.is_none() => Some(out),
            _ => None,
        };
        let (to, stride) = match direct {
            Some(out) => (out.lanes_ptr(&rows, panel), out.stride()),
            None => (values.cast(), PANEL_LANES),
        };
        if let Some(tiles) = &self.matrix_tiles
            && let Some((first, stride, num_lines)) = self.written_lines(&rows, panel)
        {
            (tiles.fetch_to_write)(first, num_rows, stride * 4, num_lines);
        }
        // SAFETY: the tile holds num_rows rows of k elements, written before the last barrier; the
        // panel holds k rows; there is room for num_rows rows of 32 values, which in a buffer
        // belong to this worker.
        let is_done = unsafe {
            match (self.weights.form, &self.matrix_tiles) {
                (Form::MatrixTiles, Some(tiles)) => {
                    (tiles.gemm)(a, num_rows, b, num_blocks, ahead, to, stride * 4);
                    direct.is_some()
                }
                (Form::Int8, _) => {
                    let sums = values.cast::<i32>();
                    let gemm = self.kernels.int8_gemm;
                    gemm(a, num_rows, b, num_blocks, ahead, sums, PANEL_LANES * 4);
                    let (rows, lanes) = (self.a.scales_ptr(&rows), self.weights.scales_ptr(panel));
                    (self.kernels.scale_sums)(sums, num_rows, rows, lanes, to, stride);
                    direct.is_some()
                }
                _ => {
                    let gemm = self.kernels.gemm.of(self.weights.dtype);
                    let k = self.weights.k;
                    gemm(a.cast(), num_rows, b, k, fetch_ahead, values.cast());
                    false
                }
            }
        };
        if !is_done {
            // SAFETY: just written.
            let values = unsafe { std::slice::from_raw_parts_mut(values, num_rows) };
            self.finish(panel, rows, values);
        }
    }

    /// What a tile asks for while it is computed: of few tiles the first all that lies behind its
    /// panel, of many each a part of the next panel.
    fn ahead(
        &self,
        panel: usize,
        num_blocks: usize,
        fetch_ahead: bool,
        next: Option<usize>,
    ) -> Ahead {
        const ENOUGH_TILES: usize = BLOCK_LINES / NEXT_LINES;
        if self.matrix_tiles.is_none() || self.tiles_at_once < ENOUGH_TILES {
            return match fetch_ahead {
                true => Ahead::Behind,
                false => Ahead::Nothing,
            };
        }
        match next.filter(|&part| part < ENOUGH_TILES) {
            Some(part) => {
                let at = part * NEXT_LINES * 64 * num_blocks;
                Ahead::Lines(self.weights.panel(panel + 1).wrapping_add(at))
            }
            None => Ahead::Nothing,
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
            Epilogue::Store(out) | Epilogue::Add(out) => {
                Some((out.lanes_ptr(rows, panel), out.stride(), 2))
            }
            Epilogue::SiluMul(out) => {
                let (first, stride) = out.wide_ptr(rows, panel * PANEL_LANES / 2)?;
                Some((first, stride, 1))
            }
        }
    }

    fn finish(&self, panel: usize, rows: Range<usize>, values: &mut [Lanes]) {
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
                let to = out.lanes_ptr(&rows, panel);
                for (i, values) in values.iter().enumerate() {
                    // SAFETY: a panel's lanes of a row belong to one worker.
                    unsafe { *to.add(i * out.stride()).cast::<[f32; PANEL_LANES]>() = values.0 };
                }
            }
            Epilogue::Add(out) => {
                let to = out.lanes_ptr(&rows, panel);
                // SAFETY: as above.
                unsafe { (self.kernels.add_lanes)(from, rows.len(), to, out.stride()) };
            }
            Epilogue::SiluMul(out) => {
                let first = panel * PANEL_LANES / 2;
                let num_lanes = (PANEL_LANES / 2).min(out.k - first);
                if let Some(tiles) = &self.matrix_tiles
                    && out.form() == Form::MatrixTiles
                    && num_lanes == PANEL_LANES / 2
                {
                    let to = out.block_ptr(&rows, first);
                    // SAFETY: a panel's lanes belong to one worker; half a block is 16 lanes.
                    unsafe { (tiles.silu_mul)(from, rows.len(), to) };
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
    for (lane, source) in lanes.iter().enumerate() {
        let Some(source) = source else { continue };
        let dtype = source.weight.dtype;
        let bytes = source.weight.row(source.row, &mut scratch);
        assert_eq!(bytes.len(), k * dtype.size());
        if dtype == DType::Bf16 {
            // Most checkpoints: a loop that becomes vectors.
            for (value, &[low, high]) in row.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *value = f32::from_bits(u32::from_le_bytes([0, 0, low, high]));
            }
        } else {
            for (value, bytes) in row.iter_mut().zip(bytes.chunks_exact(dtype.size())) {
                *value = decode(bytes, dtype);
            }
        }
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
        let (quads, rest) = quantised.as_chunks::<4>();
        for (quad, values) in quads.iter().enumerate() {
            let at = int8_position(quad * 4, lane);
            out[at..at + 4].copy_from_slice(&values.map(|value| value as u8));
        }
        for (i, value) in rest.iter().enumerate() {
            out[int8_position(quads.len() * 4 + i, lane)] = *value as u8;
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
