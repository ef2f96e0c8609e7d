//! The functions after the layers of a head.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadActivation {
    None,
    Tanh,
    Gelu,
    Relu,
    Sigmoid,
    Silu,
}

impl HeadActivation {
    /// The function of a class of PyTorch or a name of Transformers.
    pub(crate) fn named(name: &str) -> Option<Self> {
        let class = name.rsplit('.').next().unwrap_or(name);
        Some(match class.to_ascii_lowercase().as_str() {
            "identity" => Self::None,
            "tanh" => Self::Tanh,
            "gelu" => Self::Gelu,
            "relu" => Self::Relu,
            "sigmoid" => Self::Sigmoid,
            "silu" => Self::Silu,
            _ => return None,
        })
    }

    pub fn apply(self, x: f32) -> f32 {
        match self {
            Self::None => x,
            Self::Tanh => x.tanh(),
            Self::Gelu => {
                let x = f64::from(x);
                (x * 0.5 * (1.0 + erf(x / std::f64::consts::SQRT_2))) as f32
            }
            Self::Relu => x.max(0.0),
            Self::Sigmoid => 1.0 / (1.0 + (-x).exp()),
            Self::Silu => x / (1.0 + (-x).exp()),
        }
    }
}

/// The error function within 1.5e-7: formula 7.1.26 of Abramowitz and Stegun.
fn erf(x: f64) -> f64 {
    const FACTORS: [f64; 5] = [
        0.254829592,
        -0.284496736,
        1.421413741,
        -1.453152027,
        1.061405429,
    ];
    let t = 1.0 / (1.0 + 0.3275911 * x.abs());
    let sum = FACTORS
        .iter()
        .rev()
        .fold(0.0, |sum, factor| (sum + factor) * t);
    (1.0 - sum * (-x * x).exp()).copysign(x)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of Python's `math.erf`.
    #[test]
    fn the_error_function_is_close() {
        for (x, expected) in [
            (0.0, 0.0),
            (0.5, 0.5204998778130465),
            (-1.0, -0.8427007929497149),
            (3.0, 0.9999779095030014),
        ] {
            assert!((erf(x) - expected).abs() < 2e-7, "{x}");
        }
    }
}
