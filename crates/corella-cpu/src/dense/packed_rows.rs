//! The input rows of dense layers, in tiles as GEMM kernels read them. Between two barriers each
//! worker writes its own part of them.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use corella_model::int8_scale;

use crate::kernels::grouped::{CHUNK_K, SummedRows};
use crate::kernels::{Form, INT8_TILE_K, Int8Rows, Kernels, QuantiseRow, TILE_K};
use crate::system::Region;
use crate::weights::PackedMatrix;

use super::buffer::Buffer;

/// Input rows of a dense layer, in the layout that its GEMM reads.
pub struct PackedRows {
    region: Arc<Region>,
    form: Form,
    max_rows: usize,
    pub k: usize,
    quantised: Option<Arc<Quantised>>,
}

/// The values of rows in `Form::Int8` besides their integers.
struct Quantised {
    /// The rows in f32, before they are quantised.
    wide: Buffer,
    /// One f32 scale per row.
    scales: Region,
    /// The sum of each row's integers, one i32 per row.
    row_sums: Region,
    /// Sums of each row's chunks of `CHUNK_K` integers, one i32 each, stored per tile as
    /// `[chunk][row]`. Present only if the weights are quantised in groups.
    sums: Option<Region>,
}

impl PackedRows {
    pub fn new(max_rows: usize, k: usize, form: Form, for_groups: bool) -> io::Result<Self> {
        let num_sums = max_rows * num_chunks(k);
        let quantised = match form {
            Form::Columns | Form::MatrixTiles => None,
            Form::Int8 => Some(Arc::new(Quantised {
                wide: Buffer::new(max_rows, k)?,
                scales: Region::new(max_rows * size_of::<f32>())?,
                row_sums: Region::new(max_rows * size_of::<i32>())?,
                sums: for_groups
                    .then(|| Region::new(num_sums * size_of::<i32>()))
                    .transpose()?,
            })),
        };
        let mut packed = Self {
            region: Arc::new(Region::new(0)?),
            form,
            max_rows,
            k,
            quantised,
        };
        packed.region = Arc::new(Region::new(max_rows * packed.row_bytes())?);
        Ok(packed)
    }

    /// Returns a view of the same memory with shorter rows. A write through one view overwrites the rows of the other.
    pub fn shortened(&self, k: usize) -> Self {
        assert!(k <= self.k);
        Self {
            region: Arc::clone(&self.region),
            form: self.form,
            max_rows: self.max_rows,
            k,
            quantised: self.quantised.clone(),
        }
    }

    pub fn form(&self) -> Form {
        self.form
    }

    /// Bytes that a row takes, alone or as its part of a tile.
    pub fn row_bytes(&self) -> usize {
        let k = self.k.next_multiple_of(self.form.block_k());
        match self.form {
            Form::Columns => k * size_of::<f32>(),
            Form::MatrixTiles => k * 2,
            Form::Int8 => k,
        }
    }

    /// Whether rows have to be completed between `write` and the GEMM.
    pub fn needs_completion(&self) -> bool {
        self.quantised.is_some()
    }

    /// Points to the scale of the first of the given rows (`Form::Int8` only).
    pub fn scales_ptr(&self, rows: &Range<usize>) -> *const f32 {
        assert!(rows.end <= self.max_rows);
        let quantised = self.quantised.as_ref().expect("rows are not in Form::Int8");
        // SAFETY: the assertion above keeps the access in bounds.
        unsafe { quantised.scales.as_ptr().cast::<f32>().add(rows.start) }
    }

    /// The integers of a tile of rows and their sums (`Form::Int8` only).
    pub fn int8_rows(&self, rows: &Range<usize>) -> Int8Rows {
        Int8Rows {
            rows: self.tile_ptr(rows),
            num_rows: rows.len(),
            sums: self.row_sums_ptr(rows),
        }
    }

    fn row_sums_ptr(&self, rows: &Range<usize>) -> *mut i32 {
        assert!(rows.end <= self.max_rows);
        let quantised = self.quantised.as_ref().expect("rows are not in Form::Int8");
        // SAFETY: the assertion above keeps the access in bounds.
        unsafe { quantised.row_sums.as_ptr().cast::<i32>().add(rows.start) }
    }

    /// The integers of a tile of rows and the sums of their chunks, for weights in groups.
    pub fn summed_rows(&self, rows: &Range<usize>) -> SummedRows {
        SummedRows {
            rows: self.tile_ptr(rows),
            num_rows: rows.len(),
            sums: self
                .sums_ptr(rows)
                .expect("rows have no sums for weights in groups"),
        }
    }

    fn sums_ptr(&self, rows: &Range<usize>) -> Option<*mut i32> {
        assert!(rows.end <= self.max_rows);
        let quantised = self.quantised.as_ref().expect("rows are not in Form::Int8");
        let start = rows.start * num_chunks(self.k);
        let sums = quantised.sums.as_ref()?.as_ptr().cast::<i32>();
        // SAFETY: the assertion above keeps the access in bounds.
        Some(unsafe { sums.add(start) })
    }

    /// Completes a row. In `Form::Int8`, applies the transform of the weights to it, and rounds it to integers. Does
    /// nothing in the other forms.
    ///
    /// # Safety
    /// The whole row has been written, and no other thread uses it during the call.
    pub unsafe fn complete(
        &self,
        kernels: &Kernels,
        tile: &Range<usize>,
        row: usize,
        weights: &PackedMatrix,
    ) {
        let Some(quantised) = &self.quantised else {
            return;
        };
        assert!(weights.k == self.k);
        if weights.hadamard {
            // SAFETY: the caller promises exclusive access; the row has `k` elements.
            unsafe { (kernels.hadamard)(quantised.wide.row_ptr(row), self.k) };
        }
        // SAFETY: the caller upholds the contract.
        unsafe { self.quantise(quantised, kernels, tile, row) };
    }

    /// Rounds a row of a tile to integers from -127 to 127, with the scale `max |x| / 127`. One NaN
    /// or infinity makes all outputs of its row NaN.
    ///
    /// # Safety
    /// See `complete`.
    unsafe fn quantise(
        &self,
        quantised: &Quantised,
        kernels: &Kernels,
        tile: &Range<usize>,
        row: usize,
    ) {
        assert!(tile.contains(&row));
        // SAFETY: the caller promises exclusive access; the row's blocks lie inside the tile.
        unsafe {
            let values = &quantised.wide.row(row)[..self.k];
            let most = (kernels.largest_bits)(values.as_ptr(), values.len());
            let (scale, inverse) = int8_scale(most);
            *self.scales_ptr(&(row..row + 1)).cast_mut() = scale;
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

    /// Points to the tile of the given rows.
    pub fn tile_ptr(&self, rows: &Range<usize>) -> *mut u8 {
        assert!(rows.end <= self.max_rows);
        // SAFETY: the assertion above keeps the access in bounds.
        unsafe { self.region.as_ptr().add(rows.start * self.row_bytes()) }
    }

    /// Points to element `k` of a tile's first row (`Form::MatrixTiles` only). The same element of
    /// the next row is `TILE_K` elements further on.
    pub fn block_ptr(&self, tile: &Range<usize>, k: usize) -> *mut u16 {
        assert!(self.form == Form::MatrixTiles && k < self.k);
        let at = k / TILE_K * tile.len() * TILE_K + k % TILE_K;
        // SAFETY: the position is inside the tile.
        unsafe { self.tile_ptr(tile).cast::<u16>().add(at) }
    }

    /// Points to the block of `TILE_K` elements from element `k` on of a row (`Form::MatrixTiles`
    /// only). The row's next block is `tile.len() * TILE_K` elements further on.
    pub fn row_ptr(&self, tile: &Range<usize>, row: usize, k: usize) -> *mut u16 {
        assert!(tile.contains(&row));
        // SAFETY: the row is inside the tile.
        unsafe { self.block_ptr(tile, k).add((row - tile.start) * TILE_K) }
    }

    /// Points to element `k` of a tile's first row as `write` leaves it before quantisation, and
    /// gives the distance between rows in elements. `None` in other forms than `Form::Int8`.
    pub fn wide_ptr(&self, tile: &Range<usize>, k: usize) -> Option<(*const f32, usize)> {
        let wide = &self.quantised.as_ref()?.wide;
        assert!(k < self.k);
        // SAFETY: the element is inside the row.
        let first = unsafe { wide.row_ptr(tile.start).add(k) };
        Some((first, wide.stride()))
    }

    /// Reads a row of a tile back as f32; in `Form::Int8`, as it was before quantisation.
    ///
    /// # Safety
    /// No thread may write the row during the call.
    pub unsafe fn read(&self, tile: &Range<usize>, row: usize, out: &mut [f32]) {
        assert!(tile.contains(&row) && out.len() == self.k);
        let (start, row_in_tile) = (self.tile_ptr(tile), row - tile.start);
        // SAFETY: the row is inside the tile, and the caller promises that no thread writes it.
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
                    let quantised = self.quantised.as_ref().expect("rows are not in Form::Int8");
                    out.copy_from_slice(&quantised.wide.row(row)[..self.k]);
                }
            }
        }
    }

    /// Writes `values` as the elements of a row of a tile from `first` on.
    ///
    /// # Safety
    /// No other thread may use these elements during the call.
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
                    // SAFETY: the element is inside the tile; the caller promises exclusive access.
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
                    // SAFETY: the elements are inside the tile; the caller promises exclusive access.
                    unsafe {
                        let out = start.cast::<u16>().add(at);
                        (kernels.round)(part.as_ptr(), part.len(), out);
                    }
                    values = rest;
                    k += part.len();
                }
            }
            Form::Int8 => {
                let quantised = self.quantised.as_ref().expect("rows are not in Form::Int8");
                // SAFETY: the caller promises exclusive access.
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
