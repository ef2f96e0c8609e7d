//! Compares activations with their definitions in f64.

use super::*;
use crate::kernels::test_memory::{Random, device, download_as, is_near, rounded, upload_as};

/// Φ(x), by the series `1/2 + φ(x) (x + x³/3 + x⁵/15 + …)`.
fn normal_distribution(x: f64) -> f64 {
    let (mut term, mut sum) = (x, x);
    for n in 1..200 {
        term *= x * x / f64::from(2 * n + 1);
        sum += term;
    }
    0.5 + sum * (-x * x / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt()
}

fn exact(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::Gelu => x * normal_distribution(x),
        Activation::GeluTanh => {
            let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
            0.5 * x * (1.0 + u.tanh())
        }
        Activation::GeluSigmoid => x / (1.0 + (-1.702 * x).exp()),
    }
}

fn check(activation: Activation, is_gated: bool, element: Element, num_rows: usize, width: usize) {
    let device = device();
    let input_width = width * if is_gated { 2 } else { 1 };
    let numbers = Random::new(width as u64).numbers(num_rows * input_width);
    let numbers = rounded(element, numbers.iter().map(|x| 5.0 * x).collect());
    let input = upload_as(&device, element, &numbers);
    let out = upload_as(&device, element, &vec![0.0; num_rows * width]);
    let kernel = ActivationKernel::load(&device, activation, is_gated, element).unwrap();
    let step = ActivationStep {
        num_rows,
        width,
        input: input.pointer(),
        out: out.pointer(),
    };
    // SAFETY: the buffers have the shapes of the step.
    unsafe { kernel.launch(&device, &step) }.unwrap();
    let outs = download_as(&device, element, &out, num_rows * width);
    for (row, outs) in outs.chunks(width).enumerate() {
        for (i, actual) in outs.iter().enumerate() {
            let at = |i: usize| f64::from(numbers[row * input_width + i]);
            let gated = if is_gated { at(width + i) } else { 1.0 };
            let exact = exact(activation, at(i)) * gated;
            assert!(
                is_near(element, *actual, exact),
                "{activation:?}: {actual} {exact}"
            );
        }
    }
}

#[test]
fn gates_and_single_values() {
    check(Activation::Silu, true, Element::Bf16, 3, 40);
    check(Activation::Silu, true, Element::F32, 2, 21);
    // More than one block for a row.
    check(Activation::Silu, false, Element::Bf16, 2, 1100);
    check(Activation::Gelu, false, Element::F32, 1, 64);
    check(Activation::Gelu, true, Element::Bf16, 2, 13);
    check(Activation::GeluTanh, true, Element::F32, 2, 24);
    check(Activation::GeluTanh, false, Element::Bf16, 5, 8);
    check(Activation::GeluSigmoid, true, Element::F32, 3, 9);
}

#[test]
fn large_values_stay_numbers() {
    let device = device();
    let inputs = [100.0, -100.0, 1e4, -1e4, 0.0, -0.0, 1e30, -1e30];
    for activation in [
        Activation::Silu,
        Activation::Gelu,
        Activation::GeluTanh,
        Activation::GeluSigmoid,
    ] {
        let input = upload_as(&device, Element::F32, &inputs);
        let kernel = ActivationKernel::load(&device, activation, false, Element::F32).unwrap();
        let step = ActivationStep {
            num_rows: 1,
            width: inputs.len(),
            input: input.pointer(),
            out: input.pointer(),
        };
        // SAFETY: the buffer has the shape of the step.
        unsafe { kernel.launch(&device, &step) }.unwrap();
        let outs = download_as(&device, Element::F32, &input, inputs.len());
        let expected = [100.0, 0.0, 1e4, 0.0, 0.0, 0.0, 1e30, 0.0];
        for (actual, expected) in outs.iter().zip(expected) {
            assert!(
                (actual - expected).abs() <= 1e-30,
                "{activation:?}: {outs:?}"
            );
        }
    }
}
