//! Loops over one row that the compiler vectorises. Each instruction set has its own compiled copy, and all copies
//! compute the same bits.

use super::grouped::CHUNK_K;
use super::{INT8_TILE_K, PANEL_LANES};

/// Quantises a row into its tile, in blocks of `INT8_TILE_K` elements, the last padded with zeros,
/// and sums its chunks of integers.
pub struct QuantiseRow {
    pub x: *const f32,
    pub n: usize,
    pub scale: f32,
    /// The destination of the row's first block.
    pub out: *mut i8,
    /// The destination of the sum of the row's first chunk, or null. The sums of a tile's rows are adjacent.
    pub sums: *mut i32,
    /// The number of rows of the tile.
    pub num_rows: usize,
}

/// One head before RMS norm (unless `weight` is null) and RoPE. RoPE rotates element i together with element
/// `i + head_dim / 2`.
#[derive(Clone, Copy)]
pub struct NormRotate {
    pub x: *const f32,
    /// `head_dim` norm weights, or null.
    pub weight: *const f32,
    pub eps: f32,
    /// The cosines for half a head, then the sines.
    pub angles: *const f32,
    pub head_dim: usize,
}

/// The number of elements read before the first of them is written, so that results may replace inputs.
const CHUNK: usize = 16;

/// Separates chunks of one vector each. Otherwise the compiler may take several chunks at a time, element by element,
/// with gathers and scatters.
#[inline(always)]
fn end_chunk() {
    std::hint::black_box(());
}

/// # Safety
/// See `Kernels::weigh`.
#[inline(always)]
pub unsafe fn weigh(x: *const f32, weight: *const f32, scale: f32, n: usize, out: *mut f32) {
    let mut i = 0;
    // SAFETY: the caller upholds the contract; chunks end at n.
    unsafe {
        while i + CHUNK <= n {
            let x = x.add(i).cast::<[f32; CHUNK]>().read_unaligned();
            let weight = weight.add(i).cast::<[f32; CHUNK]>().read_unaligned();
            let mut y = [0.0; CHUNK];
            for j in 0..CHUNK {
                y[j] = x[j] * scale * weight[j];
            }
            out.add(i).cast::<[f32; CHUNK]>().write_unaligned(y);
            i += CHUNK;
            end_chunk();
        }
        while i < n {
            *out.add(i) = *x.add(i) * scale * *weight.add(i);
            i += 1;
        }
    }
}

/// # Safety
/// See [`NormRotate`].
#[inline(always)]
pub unsafe fn norm_rotate(
    NormRotate {
        x,
        weight,
        eps,
        angles,
        head_dim,
    }: NormRotate,
    out: *mut f32,
    sum_of_squares: impl Fn(*const f32, usize) -> f32,
) {
    // SAFETY: the caller upholds the contract.
    unsafe {
        if weight.is_null() {
            std::ptr::copy(x, out, head_dim);
        } else {
            let scale = 1.0 / (sum_of_squares(x, head_dim) / head_dim as f32 + eps).sqrt();
            weigh(x, weight, scale, head_dim, out);
        }
        rotate(out, angles, head_dim / 2);
    }
}

/// Applies RoPE to a head in place.
///
/// # Safety
/// See [`NormRotate`].
#[inline(always)]
unsafe fn rotate(head: *mut f32, angles: *const f32, half: usize) {
    let mut i = 0;
    // SAFETY: the caller upholds the contract; chunks end at `half`.
    unsafe {
        while i + CHUNK <= half {
            let read = |p: *const f32| p.add(i).cast::<[f32; CHUNK]>().read_unaligned();
            let (a, b) = (read(head), read(head.add(half)));
            let (cos, sin) = (read(angles), read(angles.add(half)));
            let (mut first, mut second) = ([0.0; CHUNK], [0.0; CHUNK]);
            for j in 0..CHUNK {
                first[j] = a[j] * cos[j] - b[j] * sin[j];
                second[j] = b[j] * cos[j] + a[j] * sin[j];
            }
            head.add(i).cast::<[f32; CHUNK]>().write_unaligned(first);
            let at = head.add(half + i);
            at.cast::<[f32; CHUNK]>().write_unaligned(second);
            i += CHUNK;
            end_chunk();
        }
        while i < half {
            let (a, b) = (*head.add(i), *head.add(half + i));
            let (cos, sin) = (*angles.add(i), *angles.add(half + i));
            *head.add(i) = a * cos - b * sin;
            *head.add(half + i) = b * cos + a * sin;
            i += 1;
        }
    }
}

/// # Safety
/// See `Kernels::round`.
#[inline(always)]
pub unsafe fn round(x: *const f32, n: usize, out: *mut u16) {
    // SAFETY: the caller upholds the contract.
    unsafe { convert(x, n, out, round_to_bf16) };
}

/// `out[i] = to(x[i])`.
///
/// # Safety
/// Both have `n` elements.
#[inline(always)]
unsafe fn convert<T: Copy + Default>(x: *const f32, n: usize, out: *mut T, to: impl Fn(f32) -> T) {
    let mut i = 0;
    // SAFETY: the caller upholds the contract; chunks end at n.
    unsafe {
        while i + CHUNK <= n {
            let x = x.add(i).cast::<[f32; CHUNK]>().read_unaligned();
            let mut y = [T::default(); CHUNK];
            for j in 0..CHUNK {
                y[j] = to(x[j]);
            }
            out.add(i).cast::<[T; CHUNK]>().write_unaligned(y);
            i += CHUNK;
            end_chunk();
        }
        while i < n {
            *out.add(i) = to(*x.add(i));
            i += 1;
        }
    }
}

/// # Safety
/// See `Kernels::add_lanes`.
#[inline(always)]
pub unsafe fn add_lanes(x: *const f32, num_rows: usize, out: *mut f32, stride: usize) {
    for row in 0..num_rows {
        // SAFETY: the caller upholds the contract.
        unsafe {
            let x = x.add(row * PANEL_LANES).cast::<[f32; PANEL_LANES]>();
            let out = out.add(row * stride).cast::<[f32; PANEL_LANES]>();
            let (x, mut sums) = (x.read_unaligned(), out.read_unaligned());
            for j in 0..PANEL_LANES {
                sums[j] += x[j];
            }
            out.write_unaligned(sums);
        }
        end_chunk();
    }
}

/// # Safety
/// See `Kernels::add_bias`.
#[inline(always)]
pub unsafe fn add_bias(bias: *const f32, num_rows: usize, values: *mut f32) {
    // SAFETY: the caller upholds the contract.
    let bias = unsafe { bias.cast::<[f32; PANEL_LANES]>().read_unaligned() };
    for row in 0..num_rows {
        // SAFETY: the caller upholds the contract.
        unsafe {
            let values = values.add(row * PANEL_LANES).cast::<[f32; PANEL_LANES]>();
            let mut sums = values.read_unaligned();
            for j in 0..PANEL_LANES {
                sums[j] += bias[j];
            }
            values.write_unaligned(sums);
        }
        end_chunk();
    }
}

/// # Safety
/// See `Kernels::largest_bits`.
#[inline(always)]
pub unsafe fn largest_bits(x: *const f32, n: usize) -> u32 {
    const SIGN: u32 = 1 << 31;
    // SAFETY: the caller upholds the contract.
    let x = unsafe { std::slice::from_raw_parts(x, n) };
    let mut lanes = [0; CHUNK];
    let chunks = x.chunks_exact(CHUNK);
    let rest = chunks.remainder();
    for chunk in chunks {
        for j in 0..CHUNK {
            lanes[j] = lanes[j].max(chunk[j].to_bits() & !SIGN);
        }
        end_chunk();
    }
    let most = lanes.into_iter().fold(0, u32::max);
    rest.iter()
        .fold(most, |most, x| most.max(x.to_bits() & !SIGN))
}

/// # Safety
/// See `Kernels::quantise`.
#[inline(always)]
pub unsafe fn quantise(x: *const f32, n: usize, scale: f32, out: *mut i8) {
    // Adding 1.5 * 2^23 rounds to an integer, because the sum has no bits for a fraction. Its low byte is that integer.
    const SHIFT: f32 = 12_582_912.0;
    // SAFETY: the caller upholds the contract.
    unsafe { convert(x, n, out, |x| (x * scale + SHIFT).to_bits() as i8) };
}

/// # Safety
/// See `Kernels::scale_sums` and `Kernels::scale_rows`.
// Arguments: those of the table of kernels, and a conversion.
#[inline(always)]
pub unsafe fn scale_rows<T: Copy>(
    x: *const T,
    to_f32: impl Fn(T) -> f32,
    num_rows: usize,
    row_scales: *const f32,
    lane_scales: *const f32,
    out: *mut f32,
    stride: usize,
) {
    // SAFETY: the caller upholds the contract.
    let lane_scales = unsafe { lane_scales.cast::<[f32; PANEL_LANES]>().read_unaligned() };
    for row in 0..num_rows {
        // SAFETY: the caller upholds the contract, and each row is read before it is written.
        unsafe {
            let x = x.add(row * PANEL_LANES).cast::<[T; PANEL_LANES]>();
            let (x, row_scale) = (x.read_unaligned(), *row_scales.add(row));
            let mut values = [0.0; PANEL_LANES];
            for j in 0..PANEL_LANES {
                values[j] = to_f32(x[j]) * row_scale * lane_scales[j];
            }
            let out = out.add(row * stride).cast::<[f32; PANEL_LANES]>();
            out.write_unaligned(values);
        }
        end_chunk();
    }
}

/// # Safety
/// See [`QuantiseRow`].
#[inline(always)]
pub unsafe fn quantise_row(
    QuantiseRow {
        x,
        n,
        scale,
        out,
        sums,
        num_rows,
    }: QuantiseRow,
) -> i32 {
    const CHUNKS: usize = INT8_TILE_K / CHUNK_K;
    let mut total = 0;
    for block in 0..n.div_ceil(INT8_TILE_K) {
        // SAFETY: the caller upholds the contract.
        unsafe {
            let len = INT8_TILE_K.min(n - block * INT8_TILE_K);
            let out = out.add(block * num_rows * INT8_TILE_K);
            if len < INT8_TILE_K {
                out.write_bytes(0, INT8_TILE_K);
            }
            quantise(x.add(block * INT8_TILE_K), len, scale, out);
            for chunk in 0..len.div_ceil(CHUNK_K) {
                let x = *out.add(chunk * CHUNK_K).cast::<[u8; CHUNK_K]>();
                // There is an instruction that sums unsigned bytes, but none for signed ones.
                let sum = x.iter().map(|&x| u32::from(x ^ 0x80)).sum::<u32>();
                let sum = sum as i32 - 0x80 * CHUNK_K as i32;
                total += sum;
                if !sums.is_null() {
                    *sums.add((block * CHUNKS + chunk) * num_rows) = sum;
                }
            }
        }
    }
    total
}

/// The value, in steps, to which a group's element of largest magnitude is scaled. The negative side has 8 steps, the
/// other side 7. With 7.5, no element is clipped by more than half a step. Errors of the largest weights cost a model
/// more than their share of the squared error.
const EXTREME: f32 = -7.5;

/// Rounds to the nearest integers, and then chooses the scale with the least squared error for these.
///
/// # Safety
/// See `Kernels::quantise_groups`.
#[inline(always)]
pub unsafe fn quantise_groups(
    x: *const f32,
    num_groups: usize,
    group_len: usize,
    q: *mut u8,
    scales: *mut f32,
) {
    // As in `quantise`, the lowest byte of the sum is then the integer.
    const SHIFT: f32 = 12_582_912.0;
    for group in 0..num_groups {
        // SAFETY: the caller upholds the contract.
        let (x, q, scale) = unsafe {
            let (x, q) = (x.add(group * group_len), q.add(group * group_len));
            let num_chunks = group_len / CHUNK;
            (
                std::slice::from_raw_parts(x.cast::<[f32; CHUNK]>(), num_chunks),
                std::slice::from_raw_parts_mut(q.cast::<[u8; CHUNK]>(), num_chunks),
                &mut *scales.add(group),
            )
        };
        let (mut least, mut most) = ([0.0; CHUNK], [0.0; CHUNK]);
        for x in x {
            for j in 0..CHUNK {
                least[j] = if x[j] < least[j] { x[j] } else { least[j] };
                most[j] = if x[j] > most[j] { x[j] } else { most[j] };
            }
        }
        for half in [8, 4, 2, 1] {
            for j in 0..half {
                least[j] = if least[j + half] < least[j] {
                    least[j + half]
                } else {
                    least[j]
                };
                most[j] = if most[j + half] > most[j] {
                    most[j + half]
                } else {
                    most[j]
                };
            }
        }
        let extreme = if most[0] > -least[0] {
            most[0]
        } else {
            least[0]
        };
        // The inverse of subnormal magnitudes overflows; such groups become zeros.
        let inverse = match extreme.abs() < 16.0 * f32::MIN_POSITIVE {
            true => 0.0,
            false => EXTREME / extreme,
        };
        let (mut products, mut squares) = ([0.0; CHUNK], [0.0; CHUNK]);
        for (x, q) in x.iter().zip(q) {
            for j in 0..CHUNK {
                let steps = x[j] * inverse;
                let nearest = steps + SHIFT - SHIFT;
                let nearest = if nearest < -8.0 { -8.0 } else { nearest };
                let nearest = if nearest > 7.0 { 7.0 } else { nearest };
                products[j] += steps * nearest;
                squares[j] += nearest * nearest;
                q[j] = (nearest + (SHIFT + 8.0)).to_bits() as u8;
            }
        }
        // If the group has a NaN or an infinity, the products are NaN, and so is the scale.
        let (products, squares) = (sum_lanes(&products), sum_lanes(&squares));
        *scale = match products == 0.0 {
            true => 0.0,
            false => products / squares * (extreme / EXTREME),
        };
    }
}

/// Rounds to nearest even. It has no branches, so that a loop over it can be vectorised.
#[inline(always)]
fn round_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    let quiet_nan = bits >> 16 | 0x40;
    (if value.is_nan() { quiet_nan } else { rounded }) as u16
}

/// The sum of 16 partial sums, added pairwise: halves onto halves.
#[inline(always)]
pub fn sum_lanes(lanes: &[f32; 16]) -> f32 {
    let mut sums = *lanes;
    for half in [8, 4, 2, 1] {
        for l in 0..half {
            sums[l] += sums[l + half];
        }
    }
    sums[0]
}

/// Defines the functions of this file for an instruction set, compiled with its features.
macro_rules! elementwise {
    ($($features:literal)?) => {
        $(#[target_feature(enable = $features)])?
        unsafe fn weigh(x: *const f32, weight: *const f32, scale: f32, n: usize, out: *mut f32) {
            // SAFETY: the caller upholds the contract.
            unsafe { super::elementwise::weigh(x, weight, scale, n, out) }
        }

        $(#[target_feature(enable = $features)])?
        unsafe fn moments(x: *const f32, n: usize) -> [f32; 2] {
            // SAFETY: the caller upholds the contract.
            unsafe { super::layer_norm::moments(x, n) }
        }

        $(#[target_feature(enable = $features)])?
        unsafe fn weigh_centred(
            x: *const f32,
            weight: *const f32,
            bias: *const f32,
            mean_and_scale: [f32; 2],
            n: usize,
            out: *mut f32,
        ) {
            // SAFETY: the caller upholds the contract.
            unsafe { super::layer_norm::weigh_centred(x, weight, bias, mean_and_scale, n, out) }
        }

        $(#[target_feature(enable = $features)])?
        unsafe fn activate(activation: Activation, x: *mut f32, n: usize) {
            // SAFETY: the caller upholds the contract.
            unsafe { super::activation::activate(activation, x, n) }
        }

        $(#[target_feature(enable = $features)])?
        unsafe fn soft_cap(x: *mut f32, n: usize, scale: f32, cap: f32) {
            // SAFETY: the caller upholds the contract.
            unsafe { super::activation::soft_cap(x, n, scale, cap) }
        }

        $(#[target_feature(enable = $features)])?
        unsafe fn delta_rows(rows: super::DeltaRows<'_>) {
            // SAFETY: the caller upholds the contract.
            unsafe { super::gated_delta::delta_rows::<Lanes>(rows) }
        }

        $(#[target_feature(enable = $features)])?
        unsafe fn update_state(update: super::StateUpdate<'_>) {
            // SAFETY: the caller upholds the contract.
            unsafe { super::gated_delta::update_state::<Lanes>(update) }
        }

        $(#[target_feature(enable = $features)])?
        unsafe fn convolve(convolution: super::Convolution<'_>) {
            // SAFETY: the caller upholds the contract.
            unsafe { super::gated_delta::convolve::<Lanes>(convolution) }
        }

        $(#[target_feature(enable = $features)])?
        unsafe fn gate(x: *mut f32, gates: *const f32, n: usize) {
            // SAFETY: the caller upholds the contract.
            unsafe { super::gated_delta::gate(x, gates, n) }
        }

        $(#[target_feature(enable = $features)])?
        unsafe fn low_rank_down(product: super::LowRankDown) {
            // SAFETY: the caller upholds the contract.
            unsafe { super::low_rank::low_rank_down(product) }
        }

        $(#[target_feature(enable = $features)])?
        unsafe fn low_rank_up(product: super::LowRankUp) {
            // SAFETY: the caller upholds the contract.
            unsafe { super::low_rank::low_rank_up(product) }
        }

        $(#[target_feature(enable = $features)])?
        unsafe fn norm_rotate(head: super::NormRotate, out: *mut f32) {
            // SAFETY: the caller upholds the contract.
            unsafe {
                super::elementwise::norm_rotate(head, out, |x, n| sum_of_squares(x, n));
            }
        }

        $(#[target_feature(enable = $features)])?
        unsafe fn round(x: *const f32, n: usize, out: *mut u16) {
            // SAFETY: the caller upholds the contract.
            unsafe { super::elementwise::round(x, n, out) }
        }

        $(#[target_feature(enable = $features)])?
        unsafe fn add_bias(bias: *const f32, num_rows: usize, values: *mut f32) {
            // SAFETY: the caller upholds the contract.
            unsafe { super::elementwise::add_bias(bias, num_rows, values) }
        }

        $(#[target_feature(enable = $features)])?
        unsafe fn add_lanes(x: *const f32, num_rows: usize, out: *mut f32, stride: usize) {
            // SAFETY: the caller upholds the contract.
            unsafe { super::elementwise::add_lanes(x, num_rows, out, stride) }
        }

        $(#[target_feature(enable = $features)])?
        unsafe fn largest_bits(x: *const f32, n: usize) -> u32 {
            // SAFETY: the caller upholds the contract.
            unsafe { super::elementwise::largest_bits(x, n) }
        }

        $(#[target_feature(enable = $features)])?
        unsafe fn quantise(x: *const f32, n: usize, scale: f32, out: *mut i8) {
            // SAFETY: the caller upholds the contract.
            unsafe { super::elementwise::quantise(x, n, scale, out) }
        }

        $(#[target_feature(enable = $features)])?
        unsafe fn hadamard(x: *mut f32, n: usize) {
            // SAFETY: the caller upholds the contract.
            unsafe { super::hadamard::hadamard(x, n) }
        }

        $(#[target_feature(enable = $features)])?
        unsafe fn scale_sums(
            sums: *const i32,
            num_rows: usize,
            row_scales: *const f32,
            lane_scales: *const f32,
            out: *mut f32,
            stride: usize,
        ) {
            // SAFETY: the caller upholds the contract.
            unsafe {
                super::elementwise::scale_rows(
                    sums,
                    |sum| sum as f32,
                    num_rows,
                    row_scales,
                    lane_scales,
                    out,
                    stride,
                )
            }
        }

        $(#[target_feature(enable = $features)])?
        unsafe fn scale_rows(
            x: *const f32,
            num_rows: usize,
            row_scales: *const f32,
            lane_scales: *const f32,
            out: *mut f32,
            stride: usize,
        ) {
            // SAFETY: the caller upholds the contract.
            unsafe {
                super::elementwise::scale_rows(
                    x,
                    |x| x,
                    num_rows,
                    row_scales,
                    lane_scales,
                    out,
                    stride,
                )
            }
        }

        $(#[target_feature(enable = $features)])?
        unsafe fn quantise_groups(
            x: *const f32,
            num_groups: usize,
            group_len: usize,
            q: *mut u8,
            scales: *mut f32,
        ) {
            // SAFETY: the caller upholds the contract.
            unsafe { super::elementwise::quantise_groups(x, num_groups, group_len, q, scales) }
        }
    };
}
pub(super) use elementwise;

#[cfg(test)]
mod tests {
    #[test]
    fn rounding_is_that_of_the_library() {
        let mut bits = 0_u32;
        for _ in 0..1 << 20 {
            let value = f32::from_bits(bits);
            let expected = half::bf16::from_f32(value);
            assert_eq!(super::round_to_bf16(value), expected.to_bits(), "{value}");
            bits = bits.wrapping_add(4099);
        }
    }
}
