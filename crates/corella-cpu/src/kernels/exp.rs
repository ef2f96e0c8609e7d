//! The exponential function: constants with which all instruction sets compute the same bits.
//!
//! exp on [-87.3, 88] is 2ⁿ · p(r), |r| ≤ ln 2 / 2, with n ln 2 in two parts. p is the Taylor
//! polynomial of degree 7, whose error is below half a unit in the last place.

pub const MIN: f32 = -87.3;
pub const MAX: f32 = 88.0;
pub const LOG2_E: f32 = std::f32::consts::LOG2_E;
pub const LN_2_HIGH: f32 = 0.693_359_4;
pub const LN_2_LOW: f32 = -2.121_944_4e-4;
/// The coefficients, highest power first. The powers 1 and 0 have coefficient 1.
pub const COEFFICIENTS: [f32; 6] = [
    1.0 / 5040.0,
    1.0 / 720.0,
    1.0 / 120.0,
    1.0 / 24.0,
    1.0 / 6.0,
    0.5,
];

/// The exponential function with separate roundings of products and sums.
#[inline(always)]
pub fn exp_lane(x: f32) -> f32 {
    // `clamp` keeps a NaN.
    let x = x.clamp(MIN, MAX);
    // Adding 1.5 · 2²³ rounds to the nearest integer, and the low bits of the sum hold this integer. A cast to an
    // integer type would take four more instructions, which handle numbers out of range.
    const ROUND: f32 = 12_582_912.0;
    let shifted = x * LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = x - n * LN_2_HIGH;
    let r = r - n * LN_2_LOW;
    let mut p = COEFFICIENTS[0];
    for c in &COEFFICIENTS[1..] {
        p = p * r + c;
    }
    p = p * r + 1.0;
    p = p * r + 1.0;
    p * f32::from_bits(shifted.to_bits().wrapping_add(127) << 23)
}
