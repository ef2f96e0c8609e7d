//! Rotary position embedding (RoPE), computed in f64 and rounded to f32.

use corella_model::{RotaryScaling, RotarySpec};

/// The frequencies of a model's RoPE.
pub struct Rotary {
    /// The angle per position for each pair of dimensions, in radians.
    frequencies: Vec<f64>,
}

impl Rotary {
    pub fn new(spec: &RotarySpec, head_dim: usize) -> Self {
        let frequencies = (0..head_dim / 2)
            .map(|i| {
                let exponent = (2 * i) as f64 / head_dim as f64;
                scale(spec.theta.powf(-exponent), i, &spec.scaling)
            })
            .collect();
        Self { frequencies }
    }

    /// Writes the cosines and then the sines of a position's angles, `head_dim / 2` of each.
    pub fn angles(&self, position: usize, out: &mut [f32]) {
        let (cos, sin) = out.split_at_mut(self.frequencies.len());
        for (i, frequency) in self.frequencies.iter().enumerate() {
            let (s, c) = (position as f64 * frequency).sin_cos();
            cos[i] = c as f32;
            sin[i] = s as f32;
        }
    }
}

/// Applies the checkpoint's context extension to the frequency of a pair of dimensions.
fn scale(frequency: f64, pair: usize, scaling: &RotaryScaling) -> f64 {
    match *scaling {
        RotaryScaling::None => frequency,
        RotaryScaling::Linear { factor } => frequency / factor,
        RotaryScaling::Divisors(ref divisors) => frequency / f64::from(divisors[pair]),
        RotaryScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position,
        } => {
            let turns = original_max_position * frequency / std::f64::consts::TAU;
            if turns < low_freq_factor {
                frequency / factor
            } else if turns > high_freq_factor {
                frequency
            } else {
                let kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                frequency * kept + frequency / factor * (1.0 - kept)
            }
        }
    }
}
