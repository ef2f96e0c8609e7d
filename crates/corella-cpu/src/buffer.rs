//! Activations: rows that workers write between barriers, each its own part.

use std::io;
use std::ops::Range;

use crate::kernels::grouped::{CHUNK_K, SummedRows};
use crate::kernels::{INT8_TILE_K, Int8Rows, Kernels, PANEL_LANES, QuantiseRow, TILE_K};
use crate::region::Region;

/// Rows of f32, one after the other, the stride off a power of two so that rows do not fight
/// for the same cache sets.
pub struct Buffer {
    region: Region,
    stride: usize,
    num_rows: usize,
}

impl Buffer {
    /// Rows have room for `len` elements, rounded up to whole panels.
    pub fn new(num_rows: usize, len: usize) -> io::Result<Self> {
        let stride = len.next_multiple_of(PANEL_LANES) + 16;
        Ok(Self {
            region: Region::new(num_rows * stride * size_of::<f32>())?,
            stride,
            num_rows,
        })
    }

    /// # Safety
    /// Nobody writes the row meanwhile.
    pub unsafe fn row(&self, row: usize) -> &[f32] {
        // SAFETY: inside the region, which is zeroed f32s from the start.
        unsafe { std::slice::from_raw_parts(self.row_ptr(row), self.stride) }
    }

    /// # Safety
    /// Nobody else uses the row meanwhile.
    #[expect(clippy::mut_from_ref, reason = "workers write different rows")]
    pub unsafe fn row_mut(&self, row: usize) -> &mut [f32] {
        // SAFETY: inside the region, which is zeroed f32s from the start.
        unsafe { std::slice::from_raw_parts_mut(self.row_ptr(row), self.stride) }
    }

    pub fn row_ptr(&self, row: usize) -> *mut f32 {
        assert!(row < self.num_rows);
        // SAFETY: just checked.
        unsafe { self.region.as_ptr().cast::<f32>().add(row * self.stride) }
    }
}

impl Buffer {
    /// From one row to the next, in elements.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// The lanes of a panel in the first of some rows.
    pub fn lanes_ptr(&self, rows: &Range<usize>, panel: usize) -> *mut f32 {
        assert!(rows.end <= self.num_rows && (panel + 1) * PANEL_LANES <= self.stride);
        // SAFETY: just checked.
        unsafe { self.row_ptr(rows.start).add(panel * PANEL_LANES) }
    }
}

/// How a dense layer's input and weights lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// As `Kernels::gemm` reads them. Rows are f32, tile by tile, in a tile k by k, and for each k
    /// the tile's rows side by side.
    Columns,
    /// As `Kernels::tile_gemm` does. Rows are bf16, tile by tile, in a tile 32 k by 32 k, and for
    /// those one row after the other.
    MatrixTiles,
    /// As `Kernels::int8_gemm` and `Kernels::grouped_gemm` do. Rows are 8-bit integers, in a tile 64 k
    /// by 64 k, and for those one row after the other; a row has a scale, which is known once the
    /// row is complete, and the sums of its chunks.
    Int8,
}

impl Form {
    /// Inputs that lie together.
    pub fn block_k(self) -> usize {
        match self {
            Self::Columns => 1,
            Self::MatrixTiles => TILE_K,
            Self::Int8 => INT8_TILE_K,
        }
    }
}

/// Rows in the form that a GEMM reads.
pub struct PackedRows {
    region: Region,
    form: Form,
    max_rows: usize,
    pub k: usize,
    quantised: Option<Quantised>,
}

/// What rows of 8-bit integers need beside them.
struct Quantised {
    /// Rows as they are written.
    wide: Buffer,
    /// One f32 a row.
    scales: Region,
    /// Of a row's integers, one i32 each.
    row_sums: Region,
    /// Tile by tile, in a tile chunk by chunk, for each chunk the tile's rows: one i32 each. Only
    /// for weights in groups.
    sums: Option<Region>,
}

impl PackedRows {
    pub fn new(max_rows: usize, k: usize, form: Form, for_groups: bool) -> io::Result<Self> {
        let num_sums = max_rows * num_chunks(k);
        let quantised = match form {
            Form::Columns | Form::MatrixTiles => None,
            Form::Int8 => Some(Quantised {
                wide: Buffer::new(max_rows, k)?,
                scales: Region::new(max_rows * size_of::<f32>())?,
                row_sums: Region::new(max_rows * size_of::<i32>())?,
                sums: for_groups
                    .then(|| Region::new(num_sums * size_of::<i32>()))
                    .transpose()?,
            }),
        };
        let mut packed = Self {
            region: Region::new(0)?,
            form,
            max_rows,
            k,
            quantised,
        };
        packed.region = Region::new(max_rows * packed.row_bytes())?;
        Ok(packed)
    }

    pub fn form(&self) -> Form {
        self.form
    }

    /// From one row to the next, or what each adds to its tile.
    pub fn row_bytes(&self) -> usize {
        let k = self.k.next_multiple_of(self.form.block_k());
        match self.form {
            Form::Columns => k * size_of::<f32>(),
            Form::MatrixTiles => k * 2,
            Form::Int8 => k,
        }
    }

    /// Whether rows, once written, must still be quantised before a GEMM reads them.
    pub fn needs_scales(&self) -> bool {
        self.quantised.is_some()
    }

    /// In `Form::Int8`: of a tile's first row.
    pub fn scales_ptr(&self, rows: &Range<usize>) -> *const f32 {
        assert!(rows.end <= self.max_rows);
        let quantised = self.quantised.as_ref().expect("rows of 8-bit integers");
        // SAFETY: just checked.
        unsafe { quantised.scales.as_ptr().cast::<f32>().add(rows.start) }
    }

    /// In `Form::Int8`: the rows of a tile.
    pub fn int8_rows(&self, rows: &Range<usize>) -> Int8Rows {
        Int8Rows {
            rows: self.tile_ptr(rows),
            num_rows: rows.len(),
            sums: self.row_sums_ptr(rows),
        }
    }

    fn row_sums_ptr(&self, rows: &Range<usize>) -> *mut i32 {
        assert!(rows.end <= self.max_rows);
        let quantised = self.quantised.as_ref().expect("rows of 8-bit integers");
        // SAFETY: just checked.
        unsafe { quantised.row_sums.as_ptr().cast::<i32>().add(rows.start) }
    }

    /// The same, for weights in groups.
    pub fn summed_rows(&self, rows: &Range<usize>) -> SummedRows {
        SummedRows {
            rows: self.tile_ptr(rows),
            num_rows: rows.len(),
            sums: self.sums_ptr(rows).expect("rows for weights in groups"),
        }
    }

    fn sums_ptr(&self, rows: &Range<usize>) -> Option<*mut i32> {
        assert!(rows.end <= self.max_rows);
        let quantised = self.quantised.as_ref().expect("rows of 8-bit integers");
        let start = rows.start * num_chunks(self.k);
        let sums = quantised.sums.as_ref()?.as_ptr().cast::<i32>();
        // SAFETY: just checked.
        Some(unsafe { sums.add(start) })
    }

    /// Multiplies a row by the Hadamard matrix, before it is quantised.
    ///
    /// # Safety
    /// All of the row has been written, and nobody else uses it meanwhile.
    pub unsafe fn hadamard(&self, kernels: &Kernels, row: usize) {
        let quantised = self.quantised.as_ref().expect("rows of 8-bit integers");
        // SAFETY: exclusive by the caller's promise; k elements.
        unsafe { (kernels.hadamard)(quantised.wide.row_ptr(row), self.k) };
    }

    /// Quantises a row of a tile, if its form asks for that: to ±127 times its largest magnitude.
    ///
    /// # Safety
    /// All of the row has been written, and nobody else uses it meanwhile.
    pub unsafe fn quantise(&self, kernels: &Kernels, tile: &Range<usize>, row: usize) {
        const INFINITE: u32 = f32::INFINITY.to_bits();
        let Some(quantised) = &self.quantised else {
            return;
        };
        assert!(tile.contains(&row));
        // SAFETY: exclusive by the caller's promise; blocks lie inside the tile.
        unsafe {
            let values = &quantised.wide.row(row)[..self.k];
            let most = (kernels.largest_bits)(values.as_ptr(), values.len());
            // What is no number, or no finite one, spoils all outputs of its row.
            let (scale, inverse) = match most {
                0 => (0.0, 0.0),
                1..INFINITE => (f32::from_bits(most) / 127.0, 127.0 / f32::from_bits(most)),
                _ => (f32::NAN, 0.0),
            };
            *self.scales_ptr(&(row..row + 1)).cast_mut() = scale;
            // Of the smallest numbers the inverse is infinite.
            let inverse = if inverse.is_finite() { inverse } else { 0.0 };
            let start = self.tile_ptr(tile).cast::<i8>();
            let sums = self.sums_ptr(tile).map(|sums| sums.add(row - tile.start));
            let sum = (kernels.quantise_row)(QuantiseRow {
                x: values.as_ptr(),
                n: values.len(),
                scale: inverse,
                out: start.add((row - tile.start) * INT8_TILE_K),
                sums: sums.unwrap_or(std::ptr::null_mut()),
                num_rows: tile.len(),
            });
            *self.row_sums_ptr(&(row..row + 1)) = sum;
        }
    }

    /// Of a tile's first row.
    pub fn tile_ptr(&self, rows: &Range<usize>) -> *mut u8 {
        assert!(rows.end <= self.max_rows);
        // SAFETY: just checked.
        unsafe { self.region.as_ptr().add(rows.start * self.row_bytes()) }
    }

    /// In `Form::MatrixTiles`: element `k` of a tile's first row. The same elements of the others
    /// follow `TILE_K` elements after each other.
    pub fn block_ptr(&self, tile: &Range<usize>, k: usize) -> *mut u16 {
        assert!(self.form == Form::MatrixTiles && k < self.k);
        let at = k / TILE_K * tile.len() * TILE_K + k % TILE_K;
        // SAFETY: inside the tile.
        unsafe { self.tile_ptr(tile).cast::<u16>().add(at) }
    }

    /// In `Form::MatrixTiles`: `TILE_K` elements of a row of a tile from element `k` on; the next
    /// are `tile.len() * TILE_K` elements on.
    pub fn row_ptr(&self, tile: &Range<usize>, row: usize, k: usize) -> *mut u16 {
        assert!(tile.contains(&row));
        // SAFETY: inside the tile.
        unsafe { self.block_ptr(tile, k).add((row - tile.start) * TILE_K) }
    }

    /// Where `write` puts element `k` of a tile's first row before it is quantised, and elements
    /// from row to row. `None` in other forms.
    pub fn wide_ptr(&self, tile: &Range<usize>, k: usize) -> Option<(*const f32, usize)> {
        let wide = &self.quantised.as_ref()?.wide;
        assert!(k < self.k);
        // SAFETY: an element of the row.
        let first = unsafe { wide.row_ptr(tile.start).add(k) };
        Some((first, wide.stride()))
    }

    /// The elements of a row of a tile, as they are before they are quantised.
    ///
    /// # Safety
    /// Nobody writes the row meanwhile.
    pub unsafe fn read(&self, tile: &Range<usize>, row: usize, out: &mut [f32]) {
        assert!(tile.contains(&row) && out.len() == self.k);
        let (start, row_in_tile) = (self.tile_ptr(tile), row - tile.start);
        // SAFETY: inside the tile; not written by the caller's promise.
        unsafe {
            match self.form {
                Form::Columns => {
                    for (k, value) in out.iter_mut().enumerate() {
                        *value = *start.cast::<f32>().add(k * tile.len() + row_in_tile);
                    }
                }
                Form::MatrixTiles => {
                    for (k, value) in out.iter_mut().enumerate() {
                        let block = k / TILE_K * tile.len() + row_in_tile;
                        let at = block * TILE_K + k % TILE_K;
                        let bits = u32::from(*start.cast::<u16>().add(at));
                        *value = f32::from_bits(bits << 16);
                    }
                }
                Form::Int8 => {
                    let quantised = self.quantised.as_ref().expect("rows of 8-bit integers");
                    out.copy_from_slice(&quantised.wide.row(row)[..self.k]);
                }
            }
        }
    }

    /// Writes elements `first..` of row `row` of a tile.
    ///
    /// # Safety
    /// Nobody else uses these elements meanwhile.
    pub unsafe fn write(
        &self,
        kernels: &Kernels,
        tile: &Range<usize>,
        row: usize,
        first: usize,
        values: &[f32],
    ) {
        assert!(tile.contains(&row) && first + values.len() <= self.k);
        let start = self.tile_ptr(tile);
        match self.form {
            Form::Columns => {
                let column = start.cast::<f32>();
                for (i, value) in values.iter().enumerate() {
                    let at = (first + i) * tile.len() + row - tile.start;
                    // SAFETY: inside the tile; exclusive by the caller's promise.
                    unsafe { *column.add(at) = *value };
                }
            }
            Form::MatrixTiles => {
                let mut values = values;
                let mut k = first;
                while !values.is_empty() {
                    let in_block = k % TILE_K;
                    let (part, rest) = values.split_at((TILE_K - in_block).min(values.len()));
                    let at = (k / TILE_K * tile.len() + row - tile.start) * TILE_K + in_block;
                    // SAFETY: inside the tile; exclusive by the caller's promise.
                    unsafe {
                        let out = start.cast::<u16>().add(at);
                        (kernels.round)(part.as_ptr(), part.len(), out);
                    }
                    values = rest;
                    k += part.len();
                }
            }
            Form::Int8 => {
                let quantised = self.quantised.as_ref().expect("rows of 8-bit integers");
                // SAFETY: exclusive by the caller's promise.
                let row = unsafe {
                    let row = quantised.wide.row_ptr(row).add(first);
                    std::slice::from_raw_parts_mut(row, values.len())
                };
                row.copy_from_slice(values);
            }
        }
    }
}

fn num_chunks(k: usize) -> usize {
    k.div_ceil(CHUNK_K)
}

/// How a step's rows are cut into tiles: as few as possible, as even as possible.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tiles {
    num_rows: usize,
    num_tiles: usize,
}

impl Tiles {
    pub fn new(num_rows: usize, tile_rows: usize) -> Self {
        Self {
            num_rows,
            num_tiles: num_rows.div_ceil(tile_rows),
        }
    }

    pub fn len(&self) -> usize {
        self.num_tiles
    }

    pub fn num_rows(&self) -> usize {
        self.num_rows
    }

    pub fn rows(&self, tile: usize) -> Range<usize> {
        tile * self.num_rows / self.num_tiles..(tile + 1) * self.num_rows / self.num_tiles
    }

    pub fn tile_of(&self, row: usize) -> usize {
        ((row + 1) * self.num_tiles - 1) / self.num_rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_all_rows_within_the_limit() {
        for tile_rows in [1, 4, 6, 14] {
            for num_rows in 1..200 {
                let tiles = Tiles::new(num_rows, tile_rows);
                let mut next = 0;
                for tile in 0..tiles.len() {
                    let rows = tiles.rows(tile);
                    assert_eq!(rows.start, next);
                    assert!((1..=tile_rows).contains(&rows.len()));
                    assert!(rows.clone().all(|row| tiles.tile_of(row) == tile));
                    next = rows.end;
                }
                assert_eq!(next, num_rows);
            }
        }
    }
}
