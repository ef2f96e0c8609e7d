//! The division of rows into tiles, which GEMM kernels compute at once.

use std::ops::Range;

/// The division of a step's rows into tiles: as few tiles as possible, of sizes as equal as
/// possible.
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
