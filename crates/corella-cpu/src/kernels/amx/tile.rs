//! The configuration of tiles, and the `nop`s between tile instructions.

use std::arch::asm;

use crate::kernels::TILE_K;

/// The length of a tile register's row.
pub const TILE_ROW_BYTES: usize = 64;

/// The operand of `ldtilecfg` for palette 1.
#[repr(C, align(64))]
struct TileConfig {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// A tile configuration: sums in tiles 0–3, `num_rows` rows of `k` bf16 elements in tiles 4 and 5,
/// and weights of `k` inputs and 16 channels in tiles 6 and 7.
#[derive(Clone, Copy)]
pub struct TileShape {
    pub num_rows: usize,
    /// The number of elements of bf16, `TILE_K` at most.
    pub k: usize,
}

fn tile_config(TileShape { num_rows, k }: TileShape) -> TileConfig {
    let low = num_rows.min(16) as u8;
    let high = (num_rows as u8) - low;
    let weights = (k / 2) as u8;
    let rows = [low, low, high, high, low, high, weights, weights];
    let mut config = TileConfig {
        palette: 1,
        start_row: 0,
        reserved: [0; 14],
        row_bytes: [0; 16],
        rows: [0; 16],
    };
    for (tile, rows) in rows.into_iter().enumerate() {
        let row_bytes = if tile == 4 || tile == 5 { k * 2 } else { 64 };
        config.rows[tile] = rows;
        config.row_bytes[tile] = if rows > 0 { row_bytes as u16 } else { 0 };
    }
    config
}

/// # Safety
/// The process must have permission to use tiles.
pub unsafe fn configure(shape: TileShape) {
    // SAFETY: the caller upholds the contract.
    unsafe { load_config(&tile_config(shape)) };
}

/// Configures tiles 0–7 with the given numbers of rows, of 64 bytes each.
///
/// # Safety
/// The process must have permission to use tiles.
pub unsafe fn configure_full(rows: [usize; 8]) {
    let mut config = tile_config(TileShape { num_rows: 0, k: 0 });
    for (tile, num_rows) in rows.into_iter().enumerate() {
        config.rows[tile] = num_rows as u8;
        config.row_bytes[tile] = if num_rows > 0 { 64 } else { 0 };
    }
    // SAFETY: the caller upholds the contract.
    unsafe { load_config(&config) };
}

/// # Safety
/// The process must have permission to use tiles.
unsafe fn load_config(config: &TileConfig) {
    // SAFETY: the configuration is valid, and no tile holds data between two kernels.
    unsafe { asm!("ldtilecfg [{}]", in(reg) config, options(nostack, readonly)) };
}

/// # Safety
/// The process must have permission to use tiles.
pub unsafe fn configure_rows(num_rows: usize) {
    let k = TILE_K;
    // SAFETY: the caller upholds the contract.
    unsafe { configure(TileShape { num_rows, k }) };
}

/// # Safety
/// The process must have permission to use tiles.
pub unsafe fn release() {
    // SAFETY: no tile holds data between two kernels.
    unsafe { asm!("tilerelease", options(nostack, nomem)) };
}

/// Follows every tile instruction of a loop by eight `nop`s. A hardware thread that shares its core with a busy one
/// gets more of the core's cycles if other instructions separate the tile instructions. Measured on Sapphire Rapids: on
/// a shared core, dense layers ran 1.3 to 1.5 times as fast with the `nop`s as without them. On a core that was not
/// shared, the `nop`s made no difference.
macro_rules! apart {
    ($instruction:expr) => {
        concat!($instruction, "\n", apart!())
    };
    () => {
        "nop\nnop\nnop\nnop\nnop\nnop\nnop\nnop\n"
    };
}
pub(super) use apart;
