//! The division of rows into tiles, which GEMM kernels compute at once.

use std::ops::Range;

/// The division of consecutive rows into tiles: as few tiles as possible, of sizes as equal as possible.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tiles {
    first_row: usize,
    num_rows: usize,
    num_tiles: usize,
}

impl Tiles {
    /// The division of a step's rows.
    pub fn new(num_rows: usize, tile_rows: usize) -> Self {
        Self::of_rows(0..num_rows, tile_rows)
    }

    pub fn of_rows(rows: Range<usize>, tile_rows: usize) -> Self {
        let num_rows = rows.len();
        Self {
            first_row: rows.start,
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
        let at = |tile: usize| self.first_row + tile * self.num_rows / self.num_tiles;
        at(tile)..at(tile + 1)
    }

    pub fn tile_of(&self, row: usize) -> usize {
        ((row - self.first_row + 1) * self.num_tiles - 1) / self.num_rows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_all_rows_within_the_limit() {
        for tile_rows in [1, 4, 6, 14] {
            for num_rows in 1..200 {
                let first_row = num_rows % 3;
                let tiles = Tiles::of_rows(first_row..first_row + num_rows, tile_rows);
                let mut next = first_row;
                for tile in 0..tiles.len() {
                    let rows = tiles.rows(tile);
                    assert_eq!(rows.start, next);
                    assert!((1..=tile_rows).contains(&rows.len()));
                    assert!(rows.clone().all(|row| tiles.tile_of(row) == tile));
                    next = rows.end;
                }
                assert_eq!(next, first_row + num_rows);
            }
        }
    }
}
