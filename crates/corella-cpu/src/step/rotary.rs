//! Rotary position embedding (RoPE), computed in f64 and rounded to f32.

use corella_model::{QueryGrowth, RotaryFrequencies, RotarySpec};

/// The cosines and sines of layers with equal rotations.
pub struct Rotary {
    frequencies: RotaryFrequencies,
    /// The growth of queries with their positions. It multiplies the cosines and sines, so that a rotation multiplies
    /// all elements of a query.
    growth: Option<QueryGrowth>,
    /// The number of elements of a head with this rotation.
    pub head_dim: usize,
}

impl Rotary {
    /// Angles for contexts of up to `max_context` tokens. Without RoPE all of them are 0.
    pub fn new(
        (rotary, growth, head_dim): (Option<&RotarySpec>, Option<QueryGrowth>, usize),
        max_context: usize,
    ) -> Self {
        let frequencies = match rotary {
            Some(rotary) => rotary.frequencies(max_context),
            None => RotaryFrequencies {
                frequencies: Vec::new(),
                magnitude: 1.0,
            },
        };
        Self {
            frequencies,
            growth,
            head_dim,
        }
    }

    /// Writes the cosines and then the sines of a position's angles, one for each pair of elements of a head. Pairs
    /// after the rotated ones have angle 0.
    pub fn angles(&self, position: usize, out: &mut [f32]) {
        let (cos, sin) = out.split_at_mut(out.len() / 2);
        let growth = self.growth.map_or(1.0, |growth| growth.at(position));
        cos.fill(growth as f32);
        sin.fill(0.0);
        let RotaryFrequencies {
            frequencies,
            magnitude,
        } = &self.frequencies;
        let magnitude = magnitude * growth;
        for (i, frequency) in frequencies.iter().enumerate() {
            let (s, c) = (position as f64 * frequency).sin_cos();
            cos[i] = (c * magnitude) as f32;
            sin[i] = (s * magnitude) as f32;
        }
    }
}
