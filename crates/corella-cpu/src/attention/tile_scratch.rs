//! The memory in which one worker computes attention by matrix tiles.

use std::io;
use std::ops::Range;

use corella_model::KvFormat;

use crate::kernels::{
    KEY_TILE, QUERY_TILE_ROWS, RowSums, TILE_ATTENTION_BLOCK, TILE_SOFTMAX_BLOCK, TileProduct,
};
use crate::system::Region;

use super::plan::MAX_TASK_ROWS;

/// The number of softmax weights for a tile of rows and a block of positions.
const WEIGHTS_LEN: usize = QUERY_TILE_ROWS * TILE_ATTENTION_BLOCK;

/// The memory in which one worker computes an attention task.
pub struct TileScratch {
    _memory: Region,
    /// Output accumulators of all rows, in tiles as `TileValues` writes them.
    pub out: *mut f32,
    /// Scores of a tile of rows and one softmax block.
    pub scores: *mut f32,
    /// Scores of the following tile or softmax block, which are computed during the softmax of `scores`.
    pub next_scores: *mut f32,
    /// Softmax weights of a tile of rows and a block, for two tiles in turn.
    pub weights: *mut u16,
    /// Copied values of the current block.
    pub values: *mut u16,
    /// Widened keys of the current block; empty if keys are read from their pages.
    pub copied_keys: *mut u16,
    /// Running maximum and sum of each row.
    pub rows: Vec<RowSums>,
    /// The first position that each row attends to, ascending.
    pub row_starts: Vec<usize>,
    /// The number of positions up to the last one that each row attends to.
    pub row_ends: Vec<usize>,
    /// The `row_ends` of one tile and softmax block: 0 for rows that see no position of the block.
    pub block_ends: [usize; QUERY_TILE_ROWS],
    /// A tile of zeros, for values that no row sees.
    pub zeros: *const u8,
    /// Scales of the current block's keys and values, used with int8 KV only.
    pub scales: [[f32; TILE_ATTENTION_BLOCK]; 2],
    /// The current block's tiles of keys, an even number.
    pub keys: Vec<*const u8>,
    /// The current block's tiles of values, if they are read from their pages.
    pub page_values: Vec<*const u8>,
    /// Matrix products that run during one softmax: scores of the next tile and values of the previous tile.
    pub products: Vec<TileProduct>,
    /// The number of rows that the thread's tile registers are configured for; 0 if unknown.
    pub configured: usize,
    /// One row's output, with room for the longest head.
    pub row: Vec<f32>,
}

// SAFETY: the memory belongs to the scratch, and the pointers in `keys`, `page_values` and
// `products` are not used after the task that set them.
unsafe impl Send for TileScratch {}

impl TileScratch {
    /// Allocates memory for heads of up to `head_dim` elements.
    pub fn new(head_dim: usize, format: KvFormat) -> io::Result<Self> {
        const F32: usize = size_of::<f32>();
        let copied_keys = match reads_keys_in_place(format) {
            true => 0,
            false => TILE_ATTENTION_BLOCK * head_dim * 2,
        };
        let lens = [
            MAX_TASK_ROWS * head_dim * F32,
            QUERY_TILE_ROWS * TILE_SOFTMAX_BLOCK * F32,
            QUERY_TILE_ROWS * TILE_SOFTMAX_BLOCK * F32,
            2 * WEIGHTS_LEN * 2,
            TILE_ATTENTION_BLOCK * head_dim * 2,
            copied_keys,
            KEY_TILE * head_dim * 2,
        ];
        let memory = Region::new(lens.iter().sum())?;
        let mut next = memory.as_ptr();
        let [
            out,
            scores,
            next_scores,
            weights,
            values,
            copied_keys,
            zeros,
        ] = lens.map(|len| {
            let start = next;
            // SAFETY: the address is inside the region, or at its end.
            next = unsafe { next.add(len) };
            start
        });
        Ok(Self {
            _memory: memory,
            out: out.cast(),
            scores: scores.cast(),
            next_scores: next_scores.cast(),
            weights: weights.cast(),
            values: values.cast(),
            copied_keys: copied_keys.cast(),
            rows: vec![RowSums::NONE; MAX_TASK_ROWS],
            row_starts: vec![0; MAX_TASK_ROWS],
            row_ends: vec![0; MAX_TASK_ROWS],
            block_ends: [0; QUERY_TILE_ROWS],
            zeros,
            scales: [[0.0; TILE_ATTENTION_BLOCK]; 2],
            keys: Vec::with_capacity(TILE_ATTENTION_BLOCK / KEY_TILE),
            page_values: Vec::with_capacity(TILE_ATTENTION_BLOCK / KEY_TILE),
            products: Vec::with_capacity(TILE_SOFTMAX_BLOCK / 32 + head_dim / 32),
            configured: 0,
            row: vec![0.0; head_dim],
        })
    }

    /// The weights of a tile of rows. Tiles use two halves in turn, so that a tile's weights
    /// survive the softmax of the next tile.
    pub fn weights_of(&self, tile: &RowTile) -> *mut u16 {
        let side = tile.rows.start / QUERY_TILE_ROWS % 2;
        self.weights.wrapping_add(side * WEIGHTS_LEN)
    }
}

/// A tile of the task's rows, and the positions of the current block that they attend to.
pub struct RowTile {
    pub rows: Range<usize>,
    pub seen: Range<usize>,
}

/// Whether tiles of keys are read from their pages. Otherwise they are widened from integers first.
pub fn reads_keys_in_place(format: KvFormat) -> bool {
    format != KvFormat::Int8
}
