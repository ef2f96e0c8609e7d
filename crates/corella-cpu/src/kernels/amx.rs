//! Dense layers with bf16 and 8-bit weights through AMX tiles; everything else as in `avx512_bf16.rs`.
//!
//! A tile instruction adds the products of 32 consecutive k to 16 channels in f32, pair by pair in a fixed order, for
//! each of its rows separately. So the number of rows in a tile does not affect a result.

mod attention;
#[cfg(all(feature = "emulated-tiles", target_os = "linux"))]
mod emulated_tiles;
mod grouped;
mod part;
mod products;
mod tile;

use std::arch::asm;
use std::sync::OnceLock;

use self::attention::TILE_ATTENTION;
use self::tile::{TILE_ROW_BYTES, apart, configure_rows, release};
use super::{
    INT8_TILE_K, Int8Rows, Kernels, Peak, Prefetch, TILE_K, TileRows, TileUnit, avx512_bf16,
};

pub static KERNELS: Kernels = Kernels {
    tile_gemm: Some(TileRows {
        max_rows: 32,
        gemm,
        peak: Peak {
            run: peak,
            ops: 4 * 16 * 16 * TILE_K * 2,
        },
        unit: Some(TileUnit {
            configure: configure_rows,
            gemm_part: part::gemm,
            int8_gemm_part: part::int8_gemm,
            release,
        }),
        ..avx512_bf16::TILE_ROWS
    }),
    int8_gemm,
    int8_peak: Some(Peak {
        run: int8_peak,
        ops: 4 * 16 * 16 * INT8_TILE_K * 2,
    }),
    grouped_gemm: grouped::gemm,
    tile_attention: Some(TILE_ATTENTION),
    ..avx512_bf16::KERNELS
};

/// Whether the processor has bf16 and int8 tiles, and the system lets this process use them.
pub fn is_supported() -> bool {
    static SUPPORTED: OnceLock<bool> = OnceLock::new();
    *SUPPORTED.get_or_init(|| {
        #[cfg(all(feature = "emulated-tiles", target_os = "linux"))]
        if !has_tiles() {
            return emulated_tiles::are_wanted() && emulated_tiles::install();
        }
        has_tiles() && may_use_tiles()
    })
}

fn has_tiles() -> bool {
    const AMX_BF16: u32 = 1 << 22;
    const AMX_TILE: u32 = 1 << 24;
    const AMX_INT8: u32 = 1 << 25;
    const ALL: u32 = AMX_BF16 | AMX_TILE | AMX_INT8;
    let most = std::arch::x86_64::__cpuid(0).eax;
    let features = std::arch::x86_64::__cpuid_count(7, 0).edx;
    most >= 7 && features & ALL == ALL
}

/// Asks Linux for the permission to use tile data, for all threads of the process.
#[cfg(target_os = "linux")]
fn may_use_tiles() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_ulong = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_ulong = 18;
    // SAFETY: the call takes two integers, and changes nothing but the permission.
    let refused = unsafe {
        libc::syscall(
            libc::SYS_arch_prctl,
            ARCH_REQ_XCOMP_PERM,
            XFEATURE_XTILEDATA,
        )
    };
    refused == 0
}

#[cfg(not(target_os = "linux"))]
fn may_use_tiles() -> bool {
    false
}

/// Computes `line_ahead` of the first cache line of the block of weights at `b`.
macro_rules! find_ahead {
    () => {
        concat!(
            "mov {ahead}, {b}\n",
            "and {ahead}, 0x3fff\n",
            "mov {t}, {ahead}\n",
            "shr {t}, 2\n",
            "neg {ahead}\n",
            "lea {ahead}, [{ahead} + {b} + 0x4000]\n",
            "add {ahead}, {t}\n",
        )
    };
}

/// Prefetches eight lines in one of four pages: a quarter of the lines ahead of a block.
macro_rules! fetch_page {
    ($page:literal) => {
        fetch_page!($page: "0" "64" "128" "192" "256" "320" "384" "448")
    };
    ($page:literal: $($line:literal)*) => {
        concat!($("prefetcht0 [{ahead} + ", $page, " + ", $line, "]\n",)*)
    };
}

/// Computes up to 16 rows, which need two tiles of sums. Prefetches are spread over the block.
macro_rules! multiply_low {
    ($multiply:literal, [$f0:expr, $f1:expr, $f2:expr, $f3:expr, $f4:expr], $call:ident) => {
        asm!(
            "tilezero tmm0", "tilezero tmm1",
            "2:",
            $f0, $f1, "/* {ahead} {t} */",
            apart!("tileloadd tmm4, [{a} + {line}]"),
            apart!("tileloadd tmm6, [{b} + {line}]"),
            $f2,
            apart!(concat!($multiply, " tmm0, tmm4, tmm6")),
            $f3,
            apart!("tileloadd tmm7, [{b} + {line} + 1024]"),
            $f4,
            apart!(concat!($multiply, " tmm1, tmm4, tmm7")),
            "add {a}, {block_bytes}", "add {b}, 2048", "dec {n}", "jnz 2b",
            "tilestored [{out} + {out_bytes}], tmm0",
            "tilestored [{out} + {out_bytes} + 64], tmm1",
            a = inout(reg) $call.rows => _, b = inout(reg) $call.panel => _,
            n = inout(reg) $call.num_blocks => _,
            block_bytes = in(reg) $call.block_bytes, line = in(reg) TILE_ROW_BYTES,
            out = in(reg) $call.out, out_bytes = in(reg) $call.out_bytes,
            ahead = out(reg) _, t = out(reg) _,
            out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        )
    };
}

/// Computes more than 16 rows, with four tiles of sums. Every tile that is loaded is used twice.
macro_rules! multiply_both {
    ($multiply:literal, [$f0:expr, $f1:expr, $f2:expr, $f3:expr, $f4:expr], $call:ident) => {
        asm!(
            "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
            "2:",
            $f0, $f1, "/* {ahead} {t} */",
            apart!("tileloadd tmm4, [{a} + {line}]"),
            apart!("tileloadd tmm6, [{b} + {line}]"),
            $f2,
            apart!("tileloadd tmm7, [{b} + {line} + 1024]"),
            $f3,
            apart!(concat!($multiply, " tmm0, tmm4, tmm6")),
            apart!("tileloadd tmm5, [{a} + {line} + 1024]"),
            $f4,
            apart!(concat!($multiply, " tmm1, tmm4, tmm7")),
            apart!(concat!($multiply, " tmm2, tmm5, tmm6")),
            apart!(concat!($multiply, " tmm3, tmm5, tmm7")),
            "add {a}, {block_bytes}", "add {b}, 2048", "dec {n}", "jnz 2b",
            "tilestored [{out} + {out_bytes}], tmm0",
            "tilestored [{out} + {out_bytes} + 64], tmm1",
            "tilestored [{below} + {out_bytes}], tmm2",
            "tilestored [{below} + {out_bytes} + 64], tmm3",
            a = inout(reg) $call.rows => _, b = inout(reg) $call.panel => _,
            n = inout(reg) $call.num_blocks => _,
            block_bytes = in(reg) $call.block_bytes, line = in(reg) TILE_ROW_BYTES,
            out = in(reg) $call.out, out_bytes = in(reg) $call.out_bytes,
            below = in(reg) $call.out.wrapping_byte_add(16 * $call.out_bytes),
            ahead = out(reg) _, t = out(reg) _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        )
    };
}

/// Runs a kernel with or without prefetches of the weights that follow.
macro_rules! with_fetches {
    ($fetch_ahead:expr, $multiply_rows:ident, $multiply:literal, $call:ident) => {
        match $fetch_ahead {
            false => $multiply_rows!($multiply, ["", "", "", "", ""], $call),
            true => $multiply_rows!(
                $multiply,
                [
                    find_ahead!(),
                    fetch_page!("0"),
                    fetch_page!("4096"),
                    fetch_page!("8192"),
                    fetch_page!("12288")
                ],
                $call
            ),
        }
    };
}

/// The operands of a kernel.
struct Call<T> {
    rows: *const u8,
    block_bytes: usize,
    panel: *const u8,
    num_blocks: usize,
    out: *mut T,
    out_bytes: usize,
}

/// Defines a GEMM kernel. bf16 and int8 need the same steps, because a row of a tile is 64 bytes in both.
macro_rules! tile_gemm {
    ($name:ident, $multiply:literal, $sum:ty) => {
        /// # Safety
        /// See `TileGemm` and `Int8Gemm`.
        unsafe fn $name(
            rows: *const u8,
            num_rows: usize,
            panel: *const u8,
            num_blocks: usize,
            prefetch: Prefetch,
            out: *mut $sum,
            out_bytes: usize,
        ) {
            debug_assert!((1..=32).contains(&num_rows) && num_blocks > 0);
            let call = Call {
                rows,
                block_bytes: num_rows * TILE_ROW_BYTES,
                panel,
                num_blocks,
                out,
                out_bytes,
            };
            // SAFETY: per block, this reads `num_rows` times 64 bytes of the rows and 2,048 bytes of the panel. It
            // writes `num_rows` rows of 32, `out_bytes` apart, to `out`. Prefetches may name any address.
            unsafe {
                if num_rows > 16 {
                    with_fetches!(prefetch.is_ahead(), multiply_both, $multiply, call);
                } else {
                    with_fetches!(prefetch.is_ahead(), multiply_low, $multiply, call);
                }
            }
        }
    };
}

tile_gemm!(gemm, "tdpbf16ps", f32);
tile_gemm!(int8_gemm_rows, "tdpbssd", i32);

/// # Safety
/// See `Int8Gemm`.
unsafe fn int8_gemm(
    Int8Rows { rows, num_rows, .. }: Int8Rows,
    panel: *const u8,
    num_blocks: usize,
    prefetch: Prefetch,
    out: *mut i32,
    out_bytes: usize,
) {
    // SAFETY: the caller upholds the contract.
    unsafe { int8_gemm_rows(rows, num_rows, panel, num_blocks, prefetch, out, out_bytes) };
}

const _: () = {
    assert!(TILE_K * 2 == TILE_ROW_BYTES && INT8_TILE_K == TILE_ROW_BYTES);
};

macro_rules! peak {
    ($name:ident, $multiply:literal) => {
        /// # Safety
        /// The process must have permission to use tiles.
        unsafe fn $name(iterations: usize) {
            // SAFETY: this uses tiles only, and none holds data between two kernels.
            unsafe {
                configure_rows(32);
                asm!(
                    "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                    "tilezero tmm4", "tilezero tmm5", "tilezero tmm6", "tilezero tmm7",
                    "2:",
                    apart!(concat!($multiply, " tmm0, tmm4, tmm6")),
                    apart!(concat!($multiply, " tmm1, tmm4, tmm7")),
                    apart!(concat!($multiply, " tmm2, tmm5, tmm6")),
                    apart!(concat!($multiply, " tmm3, tmm5, tmm7")),
                    "dec {n}", "jnz 2b",
                    n = inout(reg) iterations.max(1) => _,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack, nomem),
                );
                release();
            }
        }
    };
}

peak!(peak, "tdpbf16ps");
peak!(int8_peak, "tdpbssd");
