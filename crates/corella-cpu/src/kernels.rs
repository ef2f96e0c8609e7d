//! The kernels of all instruction sets, and the table that each set fills in.
//!
//! `table` lists the functions. The modules `gemm`, `grouped`, `row_attention` and `tile_attention` define their
//! arguments, and `form` defines the layouts in memory. Each instruction set has a file and a folder with its name.
//! Files of the same name in these folders have the same functions in the same order.
//!
//! Within one table, a value is always computed by the same sequence of roundings, whatever the
//! number of rows, panels or threads. Different tables may differ in the last bits.
#![expect(
    clippy::needless_range_loop,
    reason = "an index names the same row or lane in several arrays"
)]

mod activation;
#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512_bf16;
mod element;
mod elementwise;
mod exp;
mod form;
mod gated_delta;
mod gemm;
pub mod grouped;
mod hadamard;
mod isa;
mod layer_norm;
mod line_queue;
mod low_rank;
mod peak;
mod portable;
mod prefetch;
mod processor;
mod products;
mod row_attention;
mod row_count;
mod table;
#[cfg(test)]
mod tests;
mod tile_attention;
mod vector;

pub use self::elementwise::{NormRotate, QuantiseRow, sum_lanes};
pub use self::form::{
    Form, INT8_TILE_K, PANEL_LANES, TILE_K, int8_position, panel_position, tile_position,
};
pub use self::gated_delta::{Convolution, DELTA_CHUNK, DeltaRow, DeltaRows, StateUpdate};
pub use self::gemm::{
    FEW_ROWS, Int8Rows, MAX_MATRIX_ROWS, MAX_TILE_ROWS, NEXT_LINES, TilePart, TileRows, TileUnit,
};
pub use self::hadamard::HADAMARD_ORDER;
#[cfg(test)]
pub use self::isa::kernels;
pub use self::isa::{Isa, choose_kernels, detect_isa, is_supported};
pub use self::line_queue::{LineQueue, fetch_line};
pub use self::low_rank::{LowRankDown, LowRankUp};
pub use self::peak::Peak;
pub use self::prefetch::Prefetch;
pub use self::processor::wants_prefetch;
pub use self::products::{PRODUCT_LANES, add_products};
pub use self::row_attention::{ATTENTION_BLOCK, ATTENTION_LANES, KeyGroup, ValueRun, value_stride};
pub use self::table::Kernels;
pub use self::tile_attention::{
    IN_PLACE_ROWS, InPlaceAttention, KEY_TILE, KeyTiles, PageValues, QUERY_TILE_ROWS, ROW_TILE_LEN,
    RowSums, TILE_ATTENTION_BLOCK, TILE_SOFTMAX_BLOCK, TileAttention, TileProduct, TileSoftmax,
    VALUE_TILE, ValueTiles, tile_out_index,
};

use self::element::{BF16, F16, F32, INT8, element_size};
#[cfg(target_arch = "x86_64")]
use self::prefetch::{in_steps, line_ahead};
use self::row_count::with_rows;
use self::table::{ByFormat, ByKvFormat};
