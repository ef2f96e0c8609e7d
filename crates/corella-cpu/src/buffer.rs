//! Activations: rows that workers write between barriers, each its own part.

use std::io;
use std::ops::Range;

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
        let stride = len.next_multiple_of(32) + 16;
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

/// Rows in the form that `Kernels::gemm` reads: tile by tile, in a tile k by k, and for each
/// k the tile's rows side by side.
pub struct PackedRows {
    region: Region,
    max_rows: usize,
    pub k: usize,
}

impl PackedRows {
    pub fn new(max_rows: usize, k: usize) -> io::Result<Self> {
        Ok(Self {
            region: Region::new(max_rows * k * size_of::<f32>())?,
            max_rows,
            k,
        })
    }

    /// Element k of the tile's row r is at `[k * rows.len() + r]`.
    pub fn tile_ptr(&self, rows: &Range<usize>) -> *mut f32 {
        assert!(rows.end <= self.max_rows);
        // SAFETY: just checked.
        unsafe { self.region.as_ptr().cast::<f32>().add(rows.start * self.k) }
    }
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
