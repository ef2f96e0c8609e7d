//! RoPE as data: the frequencies of the pairs of a head's elements.

use std::f64::consts::TAU;

/// RoPE in NeoX order: element `i` of a head is rotated together with element `i + head_dim / 2`. Only the first
/// `num_dims / 2` pairs are rotated. The loader reorders checkpoint rows to match.
#[derive(Clone, Debug, PartialEq)]
pub struct RotarySpec {
    pub theta: f64,
    /// The number of rotated elements; the others stay unchanged (Phi-4-mini).
    pub num_dims: usize,
    pub scaling: RotaryScaling,
}

/// The change of RoPE's frequencies for longer contexts.
#[derive(Clone, Debug, PartialEq)]
pub enum RotaryScaling {
    None,
    /// All positions are divided by `factor`.
    Linear {
        factor: f64,
    },
    /// The base grows with the part of the context beyond the original one.
    Dynamic {
        factor: f64,
        original_max_position: f64,
    },
    /// Llama 3.1: low frequencies are divided by `factor`, high ones are kept, and the frequencies between them are
    /// interpolated.
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_max_position: f64,
    },
    /// YaRN: like `Llama3`, but frequencies are interpolated by the pair's index instead of its frequency.
    Yarn {
        factor: f64,
        original_max_position: f64,
        /// Frequencies with at least this number of turns over the original context are kept.
        beta_fast: f64,
        /// Frequencies with at most this number of turns over the original context are divided by `factor`.
        beta_slow: f64,
        /// The factor of cosines and sines.
        attention_factor: f64,
        /// Whether the ends of the range of interpolated pairs are rounded to whole numbers.
        truncate: bool,
    },
    /// The frequency of each pair is divided by a number of its own, with other numbers for contexts longer than the
    /// original one (Phi-3).
    LongRope {
        short: Vec<f64>,
        long: Vec<f64>,
        original_max_position: usize,
        /// The factor of cosines and sines.
        attention_factor: f64,
    },
    /// Only the first pairs are rotated, with their frequencies in a full rotation, divided by `factor` (Gemma 4).
    Proportional {
        num_pairs: usize,
        factor: f64,
    },
    /// The frequency of each pair of dimensions is divided by a number of its own.
    Divisors(Vec<f32>),
}

/// The input of RoPE's cosines and sines.
#[derive(Clone, Debug, PartialEq)]
pub struct RotaryFrequencies {
    /// The angle per position for each rotated pair, in radians.
    pub frequencies: Vec<f64>,
    /// The factor of all cosines and sines of rotated pairs; usually 1.
    pub magnitude: f64,
}

impl RotarySpec {
    /// RoPE over whole heads in its original form.
    pub fn plain(theta: f64, head_dim: usize) -> Self {
        Self {
            theta,
            num_dims: head_dim,
            scaling: RotaryScaling::None,
        }
    }

    /// The longest context of a model whose configuration states `max_position`. Qwen's recipe for YaRN leaves the
    /// stated length unchanged. Here, as in vLLM, the scaled length replaces it.
    pub fn longest_context(&self, max_position: usize) -> usize {
        /// Products of a few sizes must not overflow.
        const LONGEST: f64 = (1u64 << 31) as f64;
        match self.scaling {
            RotaryScaling::Yarn {
                factor,
                original_max_position,
                ..
            } => max_position.max((factor * original_max_position).min(LONGEST) as usize),
            _ => max_position,
        }
    }

    /// The frequencies for contexts of up to `max_context` tokens. Scalings that depend on the context's length use the
    /// longest one for all sequences, because rows of the KV cache cannot be rotated again.
    pub fn frequencies(&self, max_context: usize) -> RotaryFrequencies {
        let original = |pair| self.frequency(self.theta, pair);
        let pairs = 0..self.num_dims / 2;
        let mut magnitude = 1.0;
        let frequencies = match self.scaling {
            RotaryScaling::None => pairs.map(original).collect(),
            RotaryScaling::Linear { factor } => pairs.map(|i| original(i) / factor).collect(),
            RotaryScaling::Dynamic {
                factor,
                original_max_position,
            } => {
                let length = original_max_position.max(max_context as f64);
                let growth = factor * length / original_max_position - (factor - 1.0);
                let num_dims = self.num_dims as f64;
                let theta = self.theta * growth.powf(num_dims / (num_dims - 2.0));
                pairs.map(|i| self.frequency(theta, i)).collect()
            }
            RotaryScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position,
            } => {
                let scale = |frequency: f64| {
                    let turns = original_max_position * frequency / TAU;
                    if turns < low_freq_factor {
                        frequency / factor
                    } else if turns > high_freq_factor {
                        frequency
                    } else {
                        let kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                        frequency * kept + frequency / factor * (1.0 - kept)
                    }
                };
                pairs.map(|i| scale(original(i))).collect()
            }
            RotaryScaling::Yarn {
                factor,
                original_max_position,
                beta_fast,
                beta_slow,
                attention_factor,
                truncate,
            } => {
                magnitude = attention_factor;
                let betas = [beta_fast, beta_slow];
                let (low, high) = self.yarn_ramp(betas, original_max_position, truncate);
                let scale = |i: usize| {
                    let divided = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                    original(i) / factor * divided + original(i) * (1.0 - divided)
                };
                pairs.map(scale).collect()
            }
            RotaryScaling::LongRope {
                ref short,
                ref long,
                original_max_position,
                attention_factor,
            } => {
                magnitude = attention_factor;
                let divisors = match max_context > original_max_position {
                    true => long,
                    false => short,
                };
                pairs.map(|i| original(i) / divisors[i]).collect()
            }
            RotaryScaling::Proportional { num_pairs, factor } => pairs
                .take(num_pairs)
                .map(|i| original(i) / factor)
                .collect(),
            RotaryScaling::Divisors(ref divisors) => pairs
                .map(|i| original(i) / f64::from(divisors[i]))
                .collect(),
        };
        RotaryFrequencies {
            frequencies,
            magnitude,
        }
    }

    /// The pairs between which YaRN goes from kept frequencies to divided ones. Over the original context, these pairs
    /// make `betas` turns.
    fn yarn_ramp(&self, betas: [f64; 2], original_max_position: f64, truncate: bool) -> (f64, f64) {
        let [mut low, mut high] = betas.map(|turns| {
            let wavelength = original_max_position / (turns * TAU);
            self.num_dims as f64 * wavelength.ln() / (2.0 * self.theta.ln())
        });
        if truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        low = low.max(0.0);
        high = high.min((self.num_dims - 1) as f64);
        // The paper's code avoids a division by 0 in this way, and other implementations follow it.
        if low == high {
            high += 0.001;
        }
        (low, high)
    }

    fn frequency(&self, theta: f64, pair: usize) -> f64 {
        theta.powf(-((2 * pair) as f64 / self.num_dims as f64))
    }
}
