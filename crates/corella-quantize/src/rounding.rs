//! Rounding of weights to integers: the scale of a group, and the nearest integer.

use half::{bf16, f16};

use corella_model::{DType, Scheme};

/// The integers of a scheme, counted from the smallest one that its bits can hold.
#[derive(Clone, Copy, Debug)]
pub struct Codes {
    least: f32,
    most: f32,
    /// The code of 0, unless weights have zero points.
    middle: f32,
    symmetric: bool,
    /// The number of steps in the range of the weights, for the first scale that is tried, and for the last. The range
    /// is from 0 to the largest magnitude, or, with zero points, from the smallest weight to the largest.
    steps: [f32; 2],
}

/// A group's scale, and the code of 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scale {
    pub scale: f32,
    pub zero: f32,
}

/// The number of scales that are tried for a group of 4-bit weights; the scale with the least squared error wins.
const NUM_TRIALS: usize = 24;

impl Codes {
    /// The codes of a scheme.
    pub fn of(scheme: Scheme) -> Self {
        match scheme.num_bits {
            // -128 is not used, so that kernels may negate all integers.
            8 => Self {
                least: 1.0,
                most: 255.0,
                middle: 128.0,
                symmetric: true,
                steps: [127.0, 127.0],
            },
            _ => Self {
                least: 0.0,
                most: 15.0,
                middle: 8.0,
                symmetric: scheme.symmetric,
                // The first scale covers every weight, the last one clips the largest by a step.
                // Clipping more lowers the squared error but raises the perplexity.
                steps: match scheme.symmetric {
                    true => [7.0, 8.0],
                    false => [15.0, 16.0],
                },
            },
        }
    }

    /// Finds the scale that fits weights best, rounded to `dtype`.
    pub fn fit(&self, weights: &[f32], dtype: DType) -> Scale {
        let (least, most) = weights.iter().fold((0.0f32, 0.0f32), |(least, most), &w| {
            (least.min(w), most.max(w))
        });
        if least == most {
            return Scale {
                scale: 1.0,
                zero: self.middle,
            };
        }
        let num_trials = match self.steps[0] == self.steps[1] {
            true => 1,
            false => NUM_TRIALS,
        };
        let trials = (0..num_trials).map(|trial| {
            let part = trial as f32 / NUM_TRIALS as f32;
            let steps = self.steps[0] + part * (self.steps[1] - self.steps[0]);
            let range = match self.symmetric {
                true => most.max(-least),
                false => most - least,
            };
            let scale = at_least_normal(round_to(range / steps, dtype), dtype);
            // Both ends of the range are clipped by the same share.
            let cut = self.steps[0] / steps;
            let zero = match self.symmetric {
                true => self.middle,
                false => round(-least * cut / scale).clamp(self.least, self.most),
            };
            Scale { scale, zero }
        });
        let with_errors = trials.map(|scale| (scale, self.squared_error(weights, scale)));
        // `min_by` returns the first of several equal errors.
        let best = with_errors.min_by(|(_, a), (_, b)| a.total_cmp(b));
        best.expect("no scale was tried").0
    }

    /// The code nearest to a weight.
    #[inline]
    pub fn code(&self, weight: f32, Scale { scale, zero }: Scale) -> f32 {
        (round(weight / scale) + zero).clamp(self.least, self.most)
    }

    fn squared_error(&self, weights: &[f32], scale: Scale) -> f32 {
        // Several sums allow vector instructions.
        const LANES: usize = 16;
        let inverse = 1.0 / scale.scale;
        let error = |weight: f32| {
            let code = (round(weight * inverse) + scale.zero).clamp(self.least, self.most);
            let error = (code - scale.zero) * scale.scale - weight;
            error * error
        };
        let (chunks, rest) = weights.as_chunks::<LANES>();
        let mut sums = [0.0f32; LANES];
        for chunk in chunks {
            for (sum, &weight) in sums.iter_mut().zip(chunk) {
                *sum += error(weight);
            }
        }
        sums.iter().sum::<f32>() + rest.iter().map(|&weight| error(weight)).sum::<f32>()
    }
}

/// The value of a code.
#[inline]
pub fn value(code: f32, Scale { scale, zero }: Scale) -> f32 {
    (code - zero) * scale
}

/// Rounds to the nearest integer, ties to even, for magnitudes below 2^22. The addition pushes the
/// fraction out of the mantissa.
#[inline]
fn round(x: f32) -> f32 {
    const MAGIC: f32 = 12_582_912.0;
    (x.clamp(-4_194_304.0, 4_194_304.0) + MAGIC) - MAGIC
}

fn round_to(x: f32, dtype: DType) -> f32 {
    match dtype {
        DType::F32 => x,
        DType::F16 => f16::from_f32(x).to_f32(),
        DType::Bf16 => bf16::from_f32(x).to_f32(),
    }
}

/// Raises a scale to the smallest normal number, so that dividing by it does not overflow.
fn at_least_normal(x: f32, dtype: DType) -> f32 {
    let least = match dtype {
        DType::F32 | DType::Bf16 => f32::MIN_POSITIVE,
        DType::F16 => f16::MIN_POSITIVE.to_f32(),
    };
    x.max(least)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scheme(num_bits: usize, symmetric: bool) -> Scheme {
        Scheme {
            num_bits,
            group_len: None,
            symmetric,
            is_packed: num_bits == 4,
        }
    }

    #[test]
    fn halves_go_to_the_even_neighbour() {
        for (x, expected) in [
            (0.5, 0.0),
            (1.5, 2.0),
            (-2.5, -2.0),
            (2.4999, 2.0),
            (-7.6, -8.0),
        ] {
            assert_eq!(round(x), expected);
        }
        assert_eq!(round(f32::MAX), 4_194_304.0);
    }

    #[test]
    fn weights_that_are_codes_are_kept() {
        let weights: Vec<f32> = (-8..8).map(|q| q as f32 * 0.25).collect();
        let codes = Codes::of(scheme(4, true));
        let scale = codes.fit(&weights, DType::F32);
        let error = codes.squared_error(&weights, scale);
        // One of the scales tried is within 1 % of a quarter.
        assert!(error < 16.0 * 0.02 * 0.02, "{scale:?}: {error}");

        let weights: Vec<f32> = (0..16).map(|q| (q as f32 - 3.0) * 0.5).collect();
        let codes = Codes::of(scheme(4, false));
        let scale = codes.fit(&weights, DType::Bf16);
        assert_eq!(
            scale,
            Scale {
                scale: 0.5,
                zero: 3.0
            }
        );
        assert!(
            weights
                .iter()
                .all(|&w| value(codes.code(w, scale), scale) == w)
        );
    }

    #[test]
    fn bytes_reach_127_steps_and_no_further() {
        let codes = Codes::of(scheme(8, true));
        let weights = [-1.0, 0.3, 1.0];
        let scale = codes.fit(&weights, DType::F32);
        assert_eq!(weights.map(|w| codes.code(w, scale)), [1.0, 166.0, 255.0]);
    }

    #[test]
    fn groups_of_zeros_and_of_next_to_nothing() {
        for symmetric in [true, false] {
            let codes = Codes::of(scheme(4, symmetric));
            let scale = codes.fit(&[0.0; 32], DType::F16);
            assert_eq!(value(codes.code(0.0, scale), scale), 0.0);
            let scale = codes.fit(&[1e-30, -1e-31], DType::F16);
            assert!(scale.scale > 0.0);
            assert!(value(codes.code(1e-30, scale), scale).abs() < 1e-3);
        }
    }

    /// Groups whose weights all have one sign must still be able to represent 0.
    #[test]
    fn a_zero_point_stays_within_its_bits() {
        let codes = Codes::of(scheme(4, false));
        for sign in [1.0, -1.0] {
            let weights: Vec<f32> = (0..32).map(|i| sign * (3.0 + i as f32 / 32.0)).collect();
            let scale = codes.fit(&weights, DType::Bf16);
            assert!((0.0..=15.0).contains(&scale.zero), "{scale:?}");
            for &weight in &weights {
                let error = value(codes.code(weight, scale), scale) - weight;
                assert!(error.abs() < 0.3, "{weight}: {error}");
            }
        }
    }
}
