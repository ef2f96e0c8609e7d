//! GEMM of many rows with AMX tiles, one part of k at a time, so that the part's weights stay in
//! the first-level cache while all rows pass by.
//!
//! Rows are loaded with `tileloaddt1`, which hints that they are not needed again soon. Otherwise they would evict the
//! weights. Between two parts, sums are stored to memory and loaded again, which changes no bit of them.

use std::arch::asm;

use crate::kernels::{NEXT_LINES, TilePart};

use super::tile::apart;

const TILE_ROW_BYTES: usize = 64;

macro_rules! fetch {
    () => {
        concat!(
            "prefetcht1 [{next}]\n",
            "prefetcht1 [{next} + 64]\n",
            "prefetcht1 [{next} + 128]\n",
            "prefetcht1 [{next} + 192]\n",
            "add {next}, 256\n",
        )
    };
}

macro_rules! multiply_low {
    ($multiply:literal, [$($start:literal)*], $fetch:expr, $part:ident) => {
        asm!(
            $($start,)*
            "2:",
            $fetch, "/* {next} {sums} */",
            apart!("tileloaddt1 tmm4, [{a} + {line}]"),
            apart!("tileloadd tmm6, [{b} + {line}]"),
            apart!("tileloadd tmm7, [{b} + {line} + 1024]"),
            apart!(concat!($multiply, " tmm0, tmm4, tmm6")),
            apart!(concat!($multiply, " tmm1, tmm4, tmm7")),
            "add {a}, {block_bytes}", "add {b}, 2048", "dec {n}", "jnz 2b",
            "tilestored [{out} + {out_bytes}], tmm0",
            "tilestored [{out} + {out_bytes} + 64], tmm1",
            a = inout(reg) $part.rows => _, b = inout(reg) $part.panel => _,
            n = inout(reg) $part.num_blocks => _,
            block_bytes = in(reg) $part.num_rows * TILE_ROW_BYTES, line = in(reg) TILE_ROW_BYTES,
            sums = in(reg) $part.sums, next = inout(reg) $part.next => _,
            out = in(reg) $part.out, out_bytes = in(reg) $part.out_bytes,
            out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        )
    };
}

macro_rules! multiply_both {
    ($multiply:literal, [$($start:literal)*], $fetch:expr, $part:ident) => {
        asm!(
            $($start,)*
            "2:",
            $fetch, "/* {next} {sums} */",
            apart!("tileloaddt1 tmm4, [{a} + {line}]"),
            apart!("tileloadd tmm6, [{b} + {line}]"),
            apart!("tileloadd tmm7, [{b} + {line} + 1024]"),
            apart!(concat!($multiply, " tmm0, tmm4, tmm6")),
            apart!("tileloaddt1 tmm5, [{a} + {line} + 1024]"),
            apart!(concat!($multiply, " tmm1, tmm4, tmm7")),
            apart!(concat!($multiply, " tmm2, tmm5, tmm6")),
            apart!(concat!($multiply, " tmm3, tmm5, tmm7")),
            "add {a}, {block_bytes}", "add {b}, 2048", "dec {n}", "jnz 2b",
            "tilestored [{out} + {out_bytes}], tmm0",
            "tilestored [{out} + {out_bytes} + 64], tmm1",
            "tilestored [{below} + {out_bytes}], tmm2",
            "tilestored [{below} + {out_bytes} + 64], tmm3",
            a = inout(reg) $part.rows => _, b = inout(reg) $part.panel => _,
            n = inout(reg) $part.num_blocks => _,
            block_bytes = in(reg) $part.num_rows * TILE_ROW_BYTES, line = in(reg) TILE_ROW_BYTES,
            sums = in(reg) $part.sums, next = inout(reg) $part.next => _,
            out = in(reg) $part.out, out_bytes = in(reg) $part.out_bytes,
            below = in(reg) $part.out.wrapping_byte_add(16 * $part.out_bytes),
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        )
    };
}

/// Runs a kernel that starts from zeros or from earlier sums, which are contiguous rows of 32.
macro_rules! with_start {
    ($multiply:literal, $fetch:expr, $part:ident) => {
        match ($part.num_rows > 16, $part.sums.is_null()) {
            (true, true) => multiply_both!(
                $multiply,
                ["tilezero tmm0" "tilezero tmm1" "tilezero tmm2" "tilezero tmm3"],
                $fetch, $part
            ),
            (true, false) => multiply_both!(
                $multiply,
                [
                    "tileloadd tmm0, [{sums} + 2 * {line}]"
                    "tileloadd tmm1, [{sums} + 2 * {line} + 64]"
                    "tileloadd tmm2, [{sums} + 2 * {line} + 2048]"
                    "tileloadd tmm3, [{sums} + 2 * {line} + 2112]"
                ],
                $fetch, $part
            ),
            (false, true) => multiply_low!(
                $multiply,
                ["tilezero tmm0" "tilezero tmm1"],
                $fetch, $part
            ),
            (false, false) => multiply_low!(
                $multiply,
                [
                    "tileloadd tmm0, [{sums} + 2 * {line}]"
                    "tileloadd tmm1, [{sums} + 2 * {line} + 64]"
                ],
                $fetch, $part
            ),
        }
    };
}

macro_rules! part_gemm {
    ($name:ident, $multiply:literal) => {
        /// # Safety
        /// See [`TilePart`].
        pub unsafe fn $name(part: &TilePart) {
            debug_assert!((1..=32).contains(&part.num_rows) && part.num_blocks > 0);
            // SAFETY: per block, this reads `num_rows` times 64 bytes of the rows and 2,048 bytes of the panel. It
            // reads `num_rows` rows of 32 sums and writes as many to `out`. Prefetches may name any address.
            unsafe {
                match part.next.is_null() {
                    true => with_start!($multiply, "", part),
                    false => with_start!($multiply, fetch!(), part),
                }
            }
        }
    };
}

part_gemm!(gemm, "tdpbf16ps");
part_gemm!(int8_gemm, "tdpbssd");

const _: () = assert!(NEXT_LINES * 64 == 256);
