//! The division of a step's work among workers by rows and output channels.
//!
//! A worker that is done takes work from the end of another worker's share (`system/claims.rs`). Neither the
//! grid nor the worker that computes a row affects a result.

use std::ops::Range;

use super::tiles::Tiles;

/// Each worker computes some output channels of some rows.
///
/// With few rows, every worker takes all rows and some of the channels, so that only one worker reads each weight. With
/// many rows, every worker takes some rows and all channels: all workers read the weights, but a worker's rows stay in
/// its own cache from one operation to the next.
#[derive(Clone, Copy, Debug, Default)]
pub struct Grid {
    pub tiles: Tiles,
    row_parts: usize,
    lane_parts: usize,
}

/// From this number of rows on, a worker computes on a panel for so long that the next panel's weights arrive
/// meanwhile.
const MIN_ROWS: usize = 256;

impl Grid {
    pub fn new(tiles: Tiles, num_workers: usize) -> Self {
        let are_enough = |parts: &usize| {
            num_workers.is_multiple_of(*parts) && tiles.num_rows() >= parts * MIN_ROWS
        };
        let row_parts = (1..=num_workers).rev().find(are_enough).unwrap_or(1);
        Self {
            tiles,
            row_parts,
            lane_parts: num_workers / row_parts,
        }
    }

    /// The tiles of rows in which a worker computes outputs.
    pub fn tiles_of(&self, worker: usize) -> Range<usize> {
        let (part, len) = (worker / self.lane_parts, self.tiles.len());
        part * len / self.row_parts..(part + 1) * len / self.row_parts
    }

    /// The rows of `tiles_of`.
    pub fn rows_of(&self, worker: usize) -> Range<usize> {
        let tiles = self.tiles_of(worker);
        match tiles.is_empty() {
            true => 0..0,
            false => self.tiles.rows(tiles.start).start..self.tiles.rows(tiles.end - 1).end,
        }
    }

    /// A worker's share of `0..n`, which is divided among the workers that have the same rows.
    pub fn share(&self, worker: usize, n: usize) -> Range<usize> {
        let part = worker % self.lane_parts;
        part * n / self.lane_parts..(part + 1) * n / self.lane_parts
    }

    /// The rows that a worker has for itself in row-by-row operations.
    pub fn own_rows(&self, worker: usize) -> Range<usize> {
        let rows = self.rows_of(worker);
        let share = self.share(worker, rows.len());
        rows.start + share.start..rows.start + share.end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_lane_of_every_row_is_one_workers() {
        const NUM_PANELS: usize = 7;
        for num_workers in 1..=6 {
            for num_rows in [1, 5, 32, 255, 256, 511, 512, 900, 2048] {
                let grid = Grid::new(Tiles::new(num_rows, 32), num_workers);
                let mut takers = vec![0; num_rows * NUM_PANELS];
                let mut owners = vec![0; num_rows];
                for worker in 0..num_workers {
                    for row in grid.tiles_of(worker).flat_map(|tile| grid.tiles.rows(tile)) {
                        assert!(grid.rows_of(worker).contains(&row));
                        for panel in grid.share(worker, NUM_PANELS) {
                            takers[row * NUM_PANELS + panel] += 1;
                        }
                    }
                    for row in grid.own_rows(worker) {
                        assert!(grid.rows_of(worker).contains(&row));
                        owners[row] += 1;
                    }
                }
                assert!(takers.iter().chain(&owners).all(|&count| count == 1));
            }
        }
    }

    #[test]
    fn workers_take_rows_where_there_are_enough_of_them() {
        let parts = |num_rows, num_workers| {
            let grid = Grid::new(Tiles::new(num_rows, 32), num_workers);
            (grid.row_parts, grid.lane_parts)
        };
        assert_eq!(parts(511, 2), (1, 2));
        assert_eq!(parts(512, 2), (2, 1));
        assert_eq!(parts(2048, 2), (2, 1));
        assert_eq!(parts(1024, 6), (3, 2));
    }
}
