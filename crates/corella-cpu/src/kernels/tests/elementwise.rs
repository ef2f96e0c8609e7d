//! Activation functions, soft caps and layer norms.

use corella_model::Activation;

use crate::kernels::PANEL_LANES;

use super::*;

/// Numbers from -`most` to `most`, with 0 among them.
fn line(most: f32, n: usize) -> Vec<f32> {
    let middle = (n / 2) as f32;
    (0..n)
        .map(|i| (i as f32 - middle) / middle * most)
        .collect()
}

/// Φ(x), by the series `1/2 + φ(x) (x + x³/3 + x⁵/15 + …)`.
fn normal_distribution(x: f64) -> f64 {
    let (mut term, mut sum) = (x, x);
    for n in 1..400 {
        term *= x * x / f64::from(2 * n + 1);
        sum += term;
    }
    0.5 + sum * (-x * x / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt()
}

const ACTIVATIONS: [Activation; 4] = [
    Activation::Silu,
    Activation::Gelu,
    Activation::GeluTanh,
    Activation::GeluSigmoid,
];

#[test]
fn activations_are_what_they_are_called() {
    let silu = |x: f64| x / (1.0 + (-x).exp());
    let gelu_tanh = |x: f64| {
        let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
        0.5 * x * (1.0 + u.tanh())
    };
    for (isa, kernels) in tables() {
        for activation in ACTIVATIONS {
            for n in [1, 16, 37, 1001] {
                let x = line(9.0, n.max(3));
                let mut out = x.clone();
                // SAFETY: the slice has as many elements.
                unsafe { (kernels.activate)(activation, out.as_mut_ptr(), out.len()) };
                for (&x, &out) in x.iter().zip(&out) {
                    let wide = f64::from(x);
                    let expected = match activation {
                        Activation::Silu => silu(wide),
                        Activation::Gelu => wide * normal_distribution(wide),
                        Activation::GeluTanh => gelu_tanh(wide),
                        Activation::GeluSigmoid => wide / (1.0 + (-1.702 * wide).exp()),
                    };
                    let error = (f64::from(out) - expected).abs();
                    assert!(
                        error < 2e-6,
                        "{isa} {activation:?} of {x}: {out}, not {expected}"
                    );
                }
            }
        }
    }
}

#[test]
fn activations_of_huge_numbers_are_finite() {
    for (isa, kernels) in tables() {
        for activation in ACTIVATIONS {
            let mut x = [1e4, -1e4, f32::NAN];
            // SAFETY: the slice has three elements.
            unsafe { (kernels.activate)(activation, x.as_mut_ptr(), x.len()) };
            assert_eq!(x[0], 1e4, "{isa} {activation:?}");
            assert!(x[1].abs() < 1e-30, "{isa} {activation:?}");
            assert!(x[2].is_nan(), "{isa} {activation:?}");
        }
    }
}

#[test]
fn biases_are_added_to_the_given_rows_only() {
    const NUM_ROWS: usize = 15;
    for (isa, kernels) in tables() {
        let bias = random(PANEL_LANES, 1);
        let before = random(NUM_ROWS * PANEL_LANES, 2);
        for num_rows in [1, 6, 14] {
            let mut values = before.clone();
            // SAFETY: there are more rows than are given.
            unsafe { (kernels.add_bias)(bias.as_ptr(), num_rows, values.as_mut_ptr()) };
            for (at, (&value, before)) in values.iter().zip(&before).enumerate() {
                let (row, lane) = (at / PANEL_LANES, at % PANEL_LANES);
                let added = if row < num_rows { bias[lane] } else { 0.0 };
                assert_eq!(
                    value,
                    before + added,
                    "{isa} row {row} of {num_rows}, lane {lane}"
                );
            }
        }
    }
}

#[test]
fn soft_caps_bend_and_do_not_cut() {
    for (isa, kernels) in tables() {
        for (scale, cap) in [(1.0, 30.0), (0.25, 50.0), (3.0, 1.5)] {
            let x = line(200.0, 131);
            let mut out = x.clone();
            // SAFETY: the slice has as many elements.
            unsafe { (kernels.soft_cap)(out.as_mut_ptr(), out.len(), scale, cap) };
            for (&x, &out) in x.iter().zip(&out) {
                let cap = f64::from(cap);
                let expected = cap * (f64::from(x) * f64::from(scale) / cap).tanh();
                let error = (f64::from(out) - expected).abs();
                assert!(error < 1e-6 * cap, "{isa} {x}: {out}, not {expected}");
            }
        }
    }
}

#[test]
fn layer_norms_subtract_the_mean() {
    for (isa, kernels) in tables() {
        for n in [2, 16, 33, 768] {
            // The mean is large beside the deviations from it.
            let x: Vec<f32> = random(n, 1).iter().map(|x| 100.0 + x).collect();
            let (weight, bias) = (random(n, 2), random(n, 3));
            let mut out = vec![0.0_f32; n];
            // SAFETY: all slices have n elements.
            let [mean, variance] = unsafe { (kernels.moments)(x.as_ptr(), n) };
            let scale = 1.0 / (variance + 1e-5).sqrt();
            // SAFETY: all slices have n elements.
            unsafe {
                let (x, weight, bias) = (x.as_ptr(), weight.as_ptr(), bias.as_ptr());
                (kernels.weigh_centred)(x, weight, bias, [mean, scale], n, out.as_mut_ptr());
            }
            let wide: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
            let mean = wide.iter().sum::<f64>() / n as f64;
            let variance = wide.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n as f64;
            for i in 0..n {
                let normed = (wide[i] - mean) / (variance + 1e-5).sqrt();
                let expected = normed * f64::from(weight[i]) + f64::from(bias[i]);
                let error = (f64::from(out[i]) - expected).abs();
                // The mean itself is rounded, by 100 * 2^-24 at least.
                assert!(error < 2e-4, "{isa} {i} of {n}: {}, not {expected}", out[i]);
            }
        }
    }
}
