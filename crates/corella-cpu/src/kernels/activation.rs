//! Activation functions and soft caps, element by element. Each instruction set has its own compiled
//! copy, and all copies compute the same bits.

use corella_model::Activation;

use super::exp::exp_lane;

/// The number of elements that are computed side by side.
const LANES: usize = 16;

/// # Safety
/// See `Kernels::activate`.
#[inline(always)]
pub unsafe fn activate(activation: Activation, x: *mut f32, n: usize) {
    // SAFETY: the caller upholds the contract.
    let x = unsafe { std::slice::from_raw_parts_mut(x, n) };
    match activation {
        Activation::Silu => for_each(x, |x| x / (1.0 + exp_lane(-x))),
        Activation::Gelu => for_each(x, gelu),
        Activation::GeluTanh => for_each(x, gelu_tanh),
        Activation::GeluSigmoid => for_each(x, |x| x / (1.0 + exp_lane(-1.702 * x))),
    }
}

/// # Safety
/// See `Kernels::soft_cap`.
#[inline(always)]
pub unsafe fn soft_cap(x: *mut f32, n: usize, scale: f32, cap: f32) {
    // SAFETY: the caller upholds the contract.
    let x = unsafe { std::slice::from_raw_parts_mut(x, n) };
    let twice = 2.0 * scale / cap;
    for_each(x, |x| cap - 2.0 * cap / (exp_lane(x * twice) + 1.0));
}

/// `x * Φ(x)`, by formula 7.1.26 of Abramowitz and Stegun, whose error is below 1.5e-7.
#[inline(always)]
fn gelu(x: f32) -> f32 {
    const COEFFICIENTS: [f32; 5] = [
        1.061_405_4,
        -1.453_152,
        1.421_413_7,
        -0.284_496_74,
        0.254_829_6,
    ];
    let z = x.abs() * std::f32::consts::FRAC_1_SQRT_2;
    let t = 1.0 / (1.0 + 0.327_591_1 * z);
    let mut p = COEFFICIENTS[0];
    for c in &COEFFICIENTS[1..] {
        p = p * t + c;
    }
    // This is Φ(-|x|).
    let tail = 0.5 * p * t * exp_lane(-z * z);
    x * if x < 0.0 { tail } else { 1.0 - tail }
}

/// `x * (1 + tanh(u)) / 2`, which is `x / (1 + exp(-2 u))`.
#[inline(always)]
fn gelu_tanh(x: f32) -> f32 {
    const TWICE_SQRT_2_OVER_PI: f32 = 1.595_769;
    let twice = TWICE_SQRT_2_OVER_PI * (x + 0.044_715 * x * x * x);
    x / (1.0 + exp_lane(-twice))
}

#[inline(always)]
fn for_each(x: &mut [f32], f: impl Fn(f32) -> f32) {
    let (chunks, rest) = x.as_chunks_mut::<LANES>();
    for chunk in chunks {
        for x in chunk {
            *x = f(*x);
        }
    }
    for x in rest {
        *x = f(*x);
    }
}
