//! Loops over one row that a compiler turns into vectors by itself: each instruction set has its
//! own copy, and all copies compute the same bits.

use super::PANEL_LANES;

/// Elements read before the first of them is written, so that results may replace their inputs.
const CHUNK: usize = 16;

/// A chunk is a vector. Without this the compiler may take several chunks at a time, element by
/// element, with gathers and scatters.
#[inline(always)]
fn end_chunk() {
    std::hint::black_box(());
}

/// # Safety
/// See `Kernels::weigh`.
#[inline(always)]
pub unsafe fn weigh(x: *const f32, weight: *const f32, scale: f32, n: usize, out: *mut f32) {
    let mut i = 0;
    // SAFETY: the caller's promise; chunks end at n.
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
/// See `Kernels::rotate`.
#[inline(always)]
pub unsafe fn rotate(head: *mut f32, angles: *const f32, half: usize) {
    let mut i = 0;
    // SAFETY: the caller's promise; chunks end at `half`.
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
    let mut i = 0;
    // SAFETY: the caller's promise; chunks end at n.
    unsafe {
        while i + CHUNK <= n {
            let x = x.add(i).cast::<[f32; CHUNK]>().read_unaligned();
            let mut y = [0; CHUNK];
            for j in 0..CHUNK {
                y[j] = round_to_bf16(x[j]);
            }
            out.add(i).cast::<[u16; CHUNK]>().write_unaligned(y);
            i += CHUNK;
            end_chunk();
        }
        while i < n {
            *out.add(i) = round_to_bf16(*x.add(i));
            i += 1;
        }
    }
}

/// # Safety
/// See `Kernels::add_lanes`.
#[inline(always)]
pub unsafe fn add_lanes(x: *const f32, num_rows: usize, out: *mut f32, stride: usize) {
    for row in 0..num_rows {
        // SAFETY: the caller's promise.
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
/// See `Kernels::largest_bits`.
#[inline(always)]
pub unsafe fn largest_bits(x: *const f32, n: usize) -> u32 {
    const SIGN: u32 = 1 << 31;
    // SAFETY: the caller's promise.
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
    // Adding 1.5 * 2^23 leaves no room for a fraction: the sum is rounded, and ends in the integer.
    const SHIFT: f32 = 12_582_912.0;
    let quantised = |x: f32| (x * scale + SHIFT).to_bits() as i8;
    let mut i = 0;
    // SAFETY: the caller's promise; chunks end at n.
    unsafe {
        while i + CHUNK <= n {
            let x = x.add(i).cast::<[f32; CHUNK]>().read_unaligned();
            let mut y = [0; CHUNK];
            for j in 0..CHUNK {
                y[j] = quantised(x[j]);
            }
            out.add(i).cast::<[i8; CHUNK]>().write_unaligned(y);
            i += CHUNK;
            end_chunk();
        }
        while i < n {
            *out.add(i) = quantised(*x.add(i));
            i += 1;
        }
    }
}

/// # Safety
/// See `Kernels::scale_sums`.
#[inline(always)]
pub unsafe fn scale_sums(
    sums: *const i32,
    num_rows: usize,
    row_scales: *const f32,
    lane_scales: *const f32,
    out: *mut f32,
    stride: usize,
) {
    // SAFETY: the caller's promise.
    let lane_scales = unsafe { lane_scales.cast::<[f32; PANEL_LANES]>().read_unaligned() };
    for row in 0..num_rows {
        // SAFETY: the caller's promise; a row is read before it is written.
        unsafe {
            let sums = sums.add(row * PANEL_LANES).cast::<[i32; PANEL_LANES]>();
            let (sums, row_scale) = (sums.read_unaligned(), *row_scales.add(row));
            let mut values = [0.0; PANEL_LANES];
            for j in 0..PANEL_LANES {
                values[j] = sums[j] as f32 * row_scale * lane_scales[j];
            }
            let out = out.add(row * stride).cast::<[f32; PANEL_LANES]>();
            out.write_unaligned(values);
        }
        end_chunk();
    }
}

/// To nearest even. Branchless, so that a loop of it becomes vectors.
#[inline(always)]
fn round_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    let quiet_nan = bits >> 16 | 0x40;
    (if value.is_nan() { quiet_nan } else { rounded }) as u16
}

/// The loops of this file, compiled with the given features.
macro_rules! elementwise {
    ($($features:literal)?) => {
        $(#[target_feature(enable = $features)])?
        unsafe fn weigh(x: *const f32, weight: *const f32, scale: f32, n: usize, out: *mut f32) {
            // SAFETY: the caller's promise, passed on.
            unsafe { super::elementwise::weigh(x, weight, scale, n, out) }
        }

        $(#[target_feature(enable = $features)])?
        unsafe fn rotate(head: *mut f32, angles: *const f32, half: usize) {
            // SAFETY: the caller's promise, passed on.
            unsafe { super::elementwise::rotate(head, angles, half) }
        }

        $(#[target_feature(enable = $features)])?
        pub unsafe fn round(x: *const f32, n: usize, out: *mut u16) {
            // SAFETY: the caller's promise, passed on.
            unsafe { super::elementwise::round(x, n, out) }
        }

        $(#[target_feature(enable = $features)])?
        unsafe fn add_lanes(x: *const f32, num_rows: usize, out: *mut f32, stride: usize) {
            // SAFETY: the caller's promise, passed on.
            unsafe { super::elementwise::add_lanes(x, num_rows, out, stride) }
        }

        $(#[target_feature(enable = $features)])?
        unsafe fn largest_bits(x: *const f32, n: usize) -> u32 {
            // SAFETY: the caller's promise, passed on.
            unsafe { super::elementwise::largest_bits(x, n) }
        }

        $(#[target_feature(enable = $features)])?
        unsafe fn quantise(x: *const f32, n: usize, scale: f32, out: *mut i8) {
            // SAFETY: the caller's promise, passed on.
            unsafe { super::elementwise::quantise(x, n, scale, out) }
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
            // SAFETY: the caller's promise, passed on.
            unsafe {
                super::elementwise::scale_sums(sums, num_rows, row_scales, lane_scales, out, stride)
            }
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
