//! The arithmetic of the sampler: loops over many logits, with the same bits on every machine.
//!
//! Lanes are summed separately and then in order, so that the sum does not depend on the width of
//! an instruction. Wider instructions are chosen at run time; they execute the same operations, and
//! Rust never fuses them.

const LANES: usize = 16;

/// Compiles a function a second time for AVX2, and calls the version that the machine supports.
macro_rules! dispatch {
    ($(#[$doc:meta])* fn $name:ident($($argument:ident: $type:ty),*) $(-> $result:ty)? $body:block) => {
        $(#[$doc])*
        pub fn $name($($argument: $type),*) $(-> $result)? {
            #[inline(always)]
            fn portable($($argument: $type),*) $(-> $result)? $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2")]
                fn avx2($($argument: $type),*) $(-> $result)? {
                    portable($($argument),*)
                }
                if is_x86_feature_detected!("avx2") {
                    // SAFETY: the machine has AVX2.
                    return unsafe { avx2($($argument),*) };
                }
            }
            portable($($argument),*)
        }
    };
}

dispatch! {
    /// Returns the largest logit, and whether all logits are below infinity. NaN is never the largest, and does not
    /// count as below infinity.
    fn max(logits: &[f32]) -> (f32, bool) {
        let mut lanes = [f32::NEG_INFINITY; LANES];
        let mut finite = [true; LANES];
        let (chunks, rest) = logits.as_chunks::<LANES>();
        for chunk in chunks {
            for lane in 0..LANES {
                let logit = chunk[lane];
                lanes[lane] = if logit > lanes[lane] { logit } else { lanes[lane] };
                finite[lane] &= logit < f32::INFINITY;
            }
        }
        let largest = lanes.into_iter().chain(rest.iter().copied()).fold(f32::NEG_INFINITY, f32::max);
        let all_finite = finite.into_iter().chain(rest.iter().map(|&l| l < f32::INFINITY)).all(|f| f);
        (largest, all_finite)
    }
}

dispatch! {
    /// Computes `exp((logit - max) / temperature)` for each logit.
    fn weigh(logits: &[f32], max: f32, temperature: f32, weights: &mut [f32]) {
        for (weight, &logit) in weights.iter_mut().zip(logits) {
            *weight = exp((logit - max) / temperature);
        }
    }
}

dispatch! {
    fn sum(weights: &[f32]) -> f64 {
        let mut lanes = [0.0f64; LANES];
        let (chunks, rest) = weights.as_chunks::<LANES>();
        for chunk in chunks {
            for lane in 0..LANES {
                lanes[lane] += f64::from(chunk[lane]);
            }
        }
        for (lane, &weight) in lanes.iter_mut().zip(rest) {
            *lane += f64::from(weight);
        }
        lanes.into_iter().sum()
    }
}

/// Computes eˣ for x ≤ 0 with an error of at most 2 units in the last place; 0 where the result
/// would be subnormal.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    // ln 2 is split in two parts, so that `n * LN_2_HIGH` is exact.
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    // Adding this rounds to an integer, which is then in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let clamped = if x > -87.3 { x } else { -87.3 };
    let shifted = clamped * LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = clamped - n * LN_2_HIGH - n * LN_2_LOW;
    // The Taylor polynomial has degree 6: with |r| ≤ ln 2 / 2, its error is below 1.3e-7.
    let p = 1.0 / 720.0;
    let p = p * r + 1.0 / 120.0;
    let p = p * r + 1.0 / 24.0;
    let p = p * r + 1.0 / 6.0;
    let p = p * r + 0.5;
    let p = p * r + 1.0;
    let p = p * r + 1.0;
    let power = f32::from_bits(shifted.to_bits().wrapping_add(127) << 23);
    if x > -87.3 { p * power } else { 0.0 }
}

/// Computes the natural logarithm of a number ≥ 1.
pub fn ln(x: f64) -> f64 {
    let bits = x.to_bits();
    let mut exponent = (bits >> 52) as i64 - 1023;
    let mut mantissa = f64::from_bits(bits & !(0x7ff << 52) | 1023 << 52);
    if mantissa > std::f64::consts::SQRT_2 {
        mantissa *= 0.5;
        exponent += 1;
    }
    // The series is ln m = 2 artanh((m - 1) / (m + 1)); as |s| ≤ 0.172, the omitted term is below
    // 1e-17.
    let s = (mantissa - 1.0) / (mantissa + 1.0);
    let square = s * s;
    let mut series = 0.0;
    for odd in (1..=21).rev().step_by(2) {
        series = series * square + 1.0 / f64::from(odd);
    }
    2.0 * s * series + exponent as f64 * std::f64::consts::LN_2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponential_and_logarithm_agree_with_the_standard_library() {
        for i in 0..=87_000 {
            let x = -(i as f32) / 1000.0;
            let expected = f64::from(x).exp();
            let error = (f64::from(exp(x)) - expected).abs() / expected;
            assert!(error < 3e-7, "exp({x}) is off by {error}");
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-100.0), 0.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        for x in [1.0, 1.000_000_1, 1.414_3, 2.0, 3.7, 151_936.0, 1e17] {
            let expected = f64::ln(x);
            assert!(
                (ln(x) - expected).abs() <= 4e-16 * expected.max(0.1),
                "ln({x}) = {}",
                ln(x)
            );
        }
    }

    /// Compares the instructions of this machine with one element at a time.
    #[test]
    fn vector_loops_have_the_bits_of_scalar_ones() {
        let logits: Vec<f32> = (0..1000)
            .map(|i| ((i * 7919) % 1000) as f32 / 90.0)
            .collect();
        let mut weights = vec![0.0; 1000];
        weigh(&logits, 11.1, 0.7, &mut weights);
        let one_by_one: Vec<f32> = logits.iter().map(|l| exp((l - 11.1) / 0.7)).collect();
        assert_eq!(weights, one_by_one);
        let mut lanes = [0.0; LANES];
        for (i, &weight) in weights.iter().enumerate() {
            lanes[i % LANES] += f64::from(weight);
        }
        assert_eq!(sum(&weights), lanes.into_iter().sum::<f64>());
        assert_eq!(max(&logits), (11.1, true));
    }
}
