//! Conversion of rows, keys and values to the layouts that bf16 pair products read.

use std::arch::x86_64::*;

use crate::kernels::{KEY_TILE, LineQueue, NormRotate, TILE_K, VALUE_TILE, avx512};

/// # Safety
/// See `StoreRows`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub unsafe fn store_keys(
    rows: *const f32,
    stride: usize,
    positions: std::ops::Range<usize>,
    head_dim: usize,
    tile: *mut u8,
    tile_stride: usize,
) {
    debug_assert!(positions.end <= KEY_TILE && head_dim.is_multiple_of(TILE_K));
    if positions.len() == 1 {
        // SAFETY: the caller upholds the contract.
        return unsafe { store_key(rows, positions.start, head_dim, tile, tile_stride) };
    }
    let written = ((1_u32 << positions.end) - (1 << positions.start)) as __mmask16;
    for first in (0..head_dim).step_by(TILE_K) {
        let mut pairs = [_mm512_setzero_si512(); KEY_TILE];
        for (row, position) in positions.clone().enumerate() {
            // SAFETY: each row has `head_dim` elements.
            pairs[position] = unsafe { round_block(rows.add(row * stride + first)) };
        }
        for (pair, line) in transpose(pairs).into_iter().enumerate() {
            // SAFETY: the tile has these positions of the pair of dimensions.
            unsafe {
                let to = tile.add((first / 2 + pair) * tile_stride);
                _mm512_mask_storeu_epi32(to.cast(), written, line);
            }
        }
    }
}

/// Stores the key of one position, as decode rows do. There is nothing to transpose.
///
/// # Safety
/// See `StoreRows`; there is one position.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn store_key(
    row: *const f32,
    position: usize,
    head_dim: usize,
    tile: *mut u8,
    tile_stride: usize,
) {
    for first in (0..head_dim).step_by(TILE_K) {
        let mut pairs = [0_u32; TILE_K / 2];
        // SAFETY: the row has `head_dim` elements, and the tile has this position of the pair of dimensions.
        unsafe {
            _mm512_storeu_si512(pairs.as_mut_ptr().cast(), round_block(row.add(first)));
            for (index, pair) in pairs.into_iter().enumerate() {
                let to = tile.add((first / 2 + index) * tile_stride + position * 4);
                to.cast::<u32>().write_unaligned(pair);
            }
        }
    }
}

/// # Safety
/// See `StoreRows`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub unsafe fn store_values(
    rows: *const f32,
    stride: usize,
    positions: std::ops::Range<usize>,
    head_dim: usize,
    tile: *mut u8,
    tile_stride: usize,
) {
    debug_assert!(positions.end <= KEY_TILE && head_dim.is_multiple_of(TILE_K));
    let mut position = positions.start;
    while position < positions.end {
        // Writes the second position of a pair, the first one, or both.
        let is_second = position % 2 == 1;
        let has_both = !is_second && position + 1 < positions.end;
        let written = match (is_second, has_both) {
            (true, _) => 0xaaaa_aaaa,
            (false, false) => 0x5555_5555,
            (false, true) => !0,
        };
        // SAFETY: each row has `head_dim` elements, and the tile has this pair of positions.
        unsafe {
            let row = rows.add((position - positions.start) * stride);
            let other = if has_both { row.add(stride) } else { row };
            let (first, second) = if is_second {
                (other, row)
            } else {
                (row, other)
            };
            for i in (0..head_dim).step_by(16) {
                let low = _mm512_cvtepu16_epi32(round(first.add(i)));
                let high = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(round(second.add(i))));
                let to = tile.add(position / 2 * tile_stride + i * 4);
                _mm512_mask_storeu_epi16(to.cast(), written, _mm512_or_si512(low, high));
            }
        }
        position += if has_both { 2 } else { 1 };
    }
}

/// # Safety
/// See `Kernels::norm_rotate`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
pub unsafe fn norm_rotate(head: NormRotate, out: *mut f32) {
    // SAFETY: the caller upholds the contract.
    unsafe {
        if !head.head_dim.is_multiple_of(TILE_K) {
            return (avx512::KERNELS.norm_rotate)(head, out);
        }
        for_rotated(head, |i, values| _mm512_storeu_ps(out.add(i), values));
    }
}

/// # Safety
/// See `TileAttention::norm_rotate_rounded`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")]
pub unsafe fn norm_rotate_rounded(head: NormRotate, out: *mut u16) {
    // SAFETY: the caller upholds the contract; both types are 32 bytes.
    unsafe {
        for_rotated(head, |i, values| {
            let rounded = std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(values));
            _mm256_storeu_si256(out.add(i).cast(), rounded);
        });
    }
}

/// Applies norm and RoPE to a head, and calls `store` with each 16 elements and the index of the first. Elements that
/// have not been stored yet may still be read, so `store` may overwrite the head.
///
/// # Safety
/// See [`NormRotate`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,fma")]
unsafe fn for_rotated(head: NormRotate, store: impl Fn(usize, __m512)) {
    let half = head.head_dim / 2;
    debug_assert!(half.is_multiple_of(16));
    // SAFETY: the caller upholds the contract.
    unsafe {
        let mut sums = [_mm512_setzero_ps(); 2];
        for i in (0..half).step_by(16) {
            let (a, b) = (
                _mm512_loadu_ps(head.x.add(i)),
                _mm512_loadu_ps(head.x.add(half + i)),
            );
            sums = [
                _mm512_fmadd_ps(a, a, sums[0]),
                _mm512_fmadd_ps(b, b, sums[1]),
            ];
        }
        let sum = _mm512_reduce_add_ps(_mm512_add_ps(sums[0], sums[1]));
        let scale = _mm512_set1_ps(1.0 / (sum / head.head_dim as f32 + head.eps).sqrt());
        for i in (0..half).step_by(16) {
            let element = |at: usize| {
                let x = _mm512_loadu_ps(head.x.add(at));
                match head.weight.is_null() {
                    true => x,
                    false => {
                        let weight = _mm512_loadu_ps(head.weight.add(at));
                        _mm512_mul_ps(_mm512_mul_ps(x, scale), weight)
                    }
                }
            };
            let (a, b) = (element(i), element(half + i));
            let cos = _mm512_loadu_ps(head.angles.add(i));
            let sin = _mm512_loadu_ps(head.angles.add(half + i));
            store(i, _mm512_fmsub_ps(a, cos, _mm512_mul_ps(b, sin)));
            store(half + i, _mm512_fmadd_ps(b, cos, _mm512_mul_ps(a, sin)));
        }
    }
}

/// # Safety
/// See `TileAttention::copy_values`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub unsafe fn copy_values(
    from: *const u8,
    num_positions: usize,
    head_dim: usize,
    to: *mut u16,
    lines: &mut LineQueue,
) {
    for pair in 0..KEY_TILE / 2 {
        let mask = match num_positions.saturating_sub(pair * 2) {
            0 => 0,
            1 => 0x5555_5555,
            _ => !0,
        };
        for i in (0..head_dim).step_by(16) {
            if i % 32 == 0 {
                lines.prefetch_some();
            }
            // SAFETY: there are rows of `head_dim` pairs, and masked elements are not read.
            unsafe {
                let row = from.cast::<i16>().add((pair * head_dim + i) * 2);
                let elements = _mm512_maskz_loadu_epi16(mask, row);
                _mm512_storeu_si512(to.add(i * VALUE_TILE + pair * 32).cast(), elements);
            }
        }
    }
}

/// # Safety
/// See `TileAttention::widen_values`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
pub unsafe fn widen_values(
    from: *const u8,
    num_positions: usize,
    head_dim: usize,
    to: *mut u16,
    lines: &mut LineQueue,
) {
    for pair in 0..KEY_TILE / 2 {
        let mask = match num_positions.saturating_sub(pair * 2) {
            0 => 0,
            1 => 0x5555_5555_5555_5555,
            _ => !0,
        };
        for i in (0..head_dim).step_by(32) {
            if i % 64 == 0 {
                lines.prefetch_some();
            }
            // SAFETY: there are rows of `head_dim` pairs, a multiple of 32, and masked elements are not read.
            unsafe {
                let row = from.cast::<i8>().add((pair * head_dim + i) * 2);
                let wide = widen(_mm512_maskz_loadu_epi8(mask, row));
                for (half, wide) in wide.into_iter().enumerate() {
                    let to = to.add((i + half * 16) * VALUE_TILE + pair * 32);
                    _mm512_storeu_si512(to.cast(), wide);
                }
            }
        }
    }
}

/// # Safety
/// See `TileAttention::widen_keys`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
pub unsafe fn widen_keys(
    from: *const u8,
    stride: usize,
    head_dim: usize,
    to: *mut u16,
    lines: &mut LineQueue,
) {
    for pair in (0..head_dim / 2).step_by(2) {
        if pair % 4 == 0 {
            lines.prefetch_some();
        }
        // SAFETY: each pair of dimensions has 16 positions, and the number of pairs is even.
        unsafe {
            let row = |pair: usize| _mm256_loadu_si256(from.add(pair * stride).cast());
            let rows = _mm512_castsi256_si512(row(pair));
            let wide = widen(_mm512_inserti64x4::<1>(rows, row(pair + 1)));
            for (half, wide) in wide.into_iter().enumerate() {
                _mm512_storeu_si512(to.add((pair + half) * 32).cast(), wide);
            }
        }
    }
}

/// The low bytes of 0..128 in bf16, whose 8 bits of precision represent them exactly.
const LOW_BYTES: [u8; 128] = bytes_of_bf16(0);
/// The high bytes of 0..128 in bf16.
const HIGH_BYTES: [u8; 128] = bytes_of_bf16(1);

const fn bytes_of_bf16(byte: usize) -> [u8; 128] {
    let mut bytes = [0; 128];
    let mut i = 0;
    while i < bytes.len() {
        bytes[i] = (i as f32).to_bits().to_le_bytes()[2 + byte];
        i += 1;
    }
    bytes
}

/// Converts 64 integers, none of them -128, to bf16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
pub fn widen(bytes: __m512i) -> [__m512i; 2] {
    let look_up = |table: &[u8; 128], index| {
        // SAFETY: both halves of the table have 64 bytes.
        let [low, high] =
            [0, 64].map(|at| unsafe { _mm512_loadu_si512(table[at..].as_ptr().cast()) });
        _mm512_permutex2var_epi8(low, index, high)
    };
    // The instructions below interleave within 16-byte lanes.
    let order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    let bytes = _mm512_permutexvar_epi64(order, bytes);
    let magnitudes = _mm512_abs_epi8(bytes);
    let low = look_up(&LOW_BYTES, magnitudes);
    let sign = _mm512_and_si512(bytes, _mm512_set1_epi8(i8::MIN));
    let high = _mm512_or_si512(look_up(&HIGH_BYTES, magnitudes), sign);
    [
        _mm512_unpacklo_epi8(low, high),
        _mm512_unpackhi_epi8(low, high),
    ]
}

/// # Safety
/// See `TileRows::pack`.
#[target_feature(enable = "avx512f")]
pub unsafe fn pack(lanes: [*const u8; 16], num_blocks: usize, to: *mut u8) {
    const PANEL_BLOCK_BYTES: usize = 2 * 16 * 64;
    for block in 0..num_blocks {
        // SAFETY: each lane has 64 bytes per block, and so has each pair of k in the panel.
        unsafe {
            let rows = lanes.map(|lane| _mm512_loadu_si512(lane.add(block * 64).cast()));
            for (pair, line) in transpose(rows).into_iter().enumerate() {
                // The stores bypass the caches, which could not hold all weights anyway.
                _mm512_stream_si512(to.add(block * PANEL_BLOCK_BYTES + pair * 64).cast(), line);
            }
        }
    }
    _mm_sfence();
}

/// # Safety
/// See `TileRows::weigh`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")]
pub unsafe fn weigh(
    x: *const f32,
    weight: *const f32,
    scale: f32,
    n: usize,
    out: *mut u16,
    stride: usize,
) {
    debug_assert!(n.is_multiple_of(TILE_K));
    let scale = _mm512_set1_ps(scale);
    for first in (0..n).step_by(TILE_K) {
        // SAFETY: `x` and `weight` have `n` elements, and `out` has a line per block.
        unsafe {
            let product = |i: usize| {
                let x = _mm512_mul_ps(_mm512_loadu_ps(x.add(i)), scale);
                _mm512_mul_ps(x, _mm512_loadu_ps(weight.add(i)))
            };
            let rounded = _mm512_cvtne2ps_pbh(product(first + 16), product(first));
            let to = out.add(first / TILE_K * stride);
            _mm512_storeu_si512(to.cast(), std::mem::transmute::<__m512bh, __m512i>(rounded));
        }
    }
}

/// # Safety
/// `x` has 16 elements.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn round(x: *const f32) -> __m256i {
    // SAFETY: the caller upholds the contract; both types are 32 bytes.
    unsafe { std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(_mm512_loadu_ps(x))) }
}

/// # Safety
/// `x` has `TILE_K` elements.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn round_block(x: *const f32) -> __m512i {
    // SAFETY: the caller upholds the contract; both types are 64 bytes.
    unsafe {
        let (low, high) = (_mm512_loadu_ps(x), _mm512_loadu_ps(x.add(16)));
        std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(high, low))
    }
}

/// Transposes 16 rows of 16 elements.
#[inline]
#[target_feature(enable = "avx512f")]
fn transpose(r: [__m512i; 16]) -> [__m512i; 16] {
    // First pairs, then fours of rows are interleaved within 128-bit lanes; then the lanes are rearranged.
    let mut pairs = r;
    for i in (0..16).step_by(2) {
        pairs[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    let mut fours = r;
    for i in (0..16).step_by(4) {
        fours[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
        fours[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
        fours[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
        fours[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
    }
    let mut columns = r;
    for i in 0..4 {
        let even = [0, 8]
            .map(|at| _mm512_shuffle_i32x4::<0b10_00_10_00>(fours[at + i], fours[at + 4 + i]));
        let odd = [0, 8]
            .map(|at| _mm512_shuffle_i32x4::<0b11_01_11_01>(fours[at + i], fours[at + 4 + i]));
        columns[i] = _mm512_shuffle_i32x4::<0b10_00_10_00>(even[0], even[1]);
        columns[8 + i] = _mm512_shuffle_i32x4::<0b11_01_11_01>(even[0], even[1]);
        columns[4 + i] = _mm512_shuffle_i32x4::<0b10_00_10_00>(odd[0], odd[1]);
        columns[12 + i] = _mm512_shuffle_i32x4::<0b11_01_11_01>(odd[0], odd[1]);
    }
    columns
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::kernels::avx512_bf16::is_supported;

    const HEAD_DIM: usize = 64;
    const UNTOUCHED: u16 = 0xdead;

    fn rows() -> Vec<f32> {
        let value = |i: usize| ((i * 7919) % 1000) as f32 / 37.0 - 11.0;
        (0..KEY_TILE * HEAD_DIM).map(value).collect()
    }

    /// Stores rows at some positions, and checks that all elements are where `place` says and nothing else was written.
    fn check(
        store: impl Fn(&[f32], std::ops::Range<usize>, &mut [u16]),
        place: impl Fn(usize, usize) -> usize,
    ) {
        if !is_supported() {
            return;
        }
        let rows = rows();
        for start in 0..KEY_TILE {
            for end in start + 1..=KEY_TILE {
                let mut tile = vec![UNTOUCHED; KEY_TILE * HEAD_DIM];
                let mut expected = tile.clone();
                store(&rows, start..end, &mut tile);
                for (row, position) in (start..end).enumerate() {
                    for i in 0..HEAD_DIM {
                        let value = rows[row * HEAD_DIM + i];
                        expected[place(position, i)] = bf16::from_f32(value).to_bits();
                    }
                }
                assert_eq!(tile, expected, "{start}..{end}");
            }
        }
    }

    #[test]
    fn keys_stand_by_pairs_of_dimensions() {
        check(
            |rows, positions, tile| {
                // SAFETY: the tile has 64 bytes for each pair of dimensions.
                unsafe {
                    let to = tile.as_mut_ptr().cast();
                    store_keys(rows.as_ptr(), HEAD_DIM, positions, HEAD_DIM, to, 64);
                }
            },
            |position, i| (i / 2 * KEY_TILE + position) * 2 + i % 2,
        );
    }

    #[test]
    fn values_stand_by_pairs_of_positions() {
        check(
            |rows, positions, tile| {
                // SAFETY: the pointer is to a tile of values.
                unsafe {
                    let to = tile.as_mut_ptr().cast();
                    store_values(
                        rows.as_ptr(),
                        HEAD_DIM,
                        positions,
                        HEAD_DIM,
                        to,
                        HEAD_DIM * 4,
                    );
                }
            },
            |position, i| (position / 2 * HEAD_DIM + i) * 2 + position % 2,
        );
    }

    #[test]
    fn weighed_rows_are_rounded_into_their_blocks() {
        if !is_supported() {
            return;
        }
        const STRIDE: usize = 3 * TILE_K;
        let (x, weight) = (rows(), rows().split_off(HEAD_DIM));
        let mut out = vec![UNTOUCHED; HEAD_DIM / TILE_K * STRIDE];
        let mut expected = out.clone();
        // SAFETY: `out` has room for two blocks.
        unsafe {
            weigh(
                x.as_ptr(),
                weight.as_ptr(),
                0.3,
                HEAD_DIM,
                out.as_mut_ptr(),
                STRIDE,
            )
        };
        for i in 0..HEAD_DIM {
            let value = bf16::from_f32(x[i] * 0.3 * weight[i]);
            expected[i / TILE_K * STRIDE + i % TILE_K] = value.to_bits();
        }
        assert_eq!(out, expected);
    }
}
