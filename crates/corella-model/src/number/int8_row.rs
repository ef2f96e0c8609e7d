//! Rows of 8-bit integers: a key or a value of `KvFormat::Int8`, and the activations that integer weights are
//! multiplied by.

/// Returns the scale of a row's integers, and the factor by which the row's numbers are multiplied before they are
/// rounded. `largest_bits` is the largest magnitude of the row, as the bits of an f32.
pub fn int8_scale(largest_bits: u32) -> (f32, f32) {
    const INFINITE: u32 = f32::INFINITY.to_bits();
    // A NaN or an infinity makes the whole row NaN.
    let (scale, inverse) = match largest_bits {
        0 => (0.0, 0.0),
        1..INFINITE => {
            let largest = f32::from_bits(largest_bits);
            (largest / 127.0, 127.0 / largest)
        }
        _ => (f32::NAN, 0.0),
    };
    // For the smallest scales the division gives an infinite inverse.
    let inverse = if inverse.is_finite() { inverse } else { 0.0 };
    (scale, inverse)
}

/// Writes the integers of a row, ties rounded to even, and returns their scale. Executors do the same
/// with instructions of their own.
pub fn quantise_int8_row(values: &[f32], out: &mut [u8]) -> f32 {
    // Adding 1.5 * 2^23 leaves no room for a fraction: the sum is rounded, and ends in the integer.
    const SHIFT: f32 = 12_582_912.0;
    assert_eq!(values.len(), out.len());
    let magnitudes = values.iter().map(|value| value.abs().to_bits());
    let (scale, inverse) = int8_scale(magnitudes.max().unwrap_or(0));
    for (out, value) in out.iter_mut().zip(values) {
        *out = (value * inverse + SHIFT).to_bits() as u8;
    }
    scale
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_is_127_and_ties_go_to_even() {
        let values = [254.0, -254.0, 3.0, 5.0, -3.0, 0.9, 1.1, 0.0];
        let mut out = [0; 8];
        let scale = quantise_int8_row(&values, &mut out);
        assert_eq!(scale, 2.0);
        assert_eq!(out.map(|byte| byte as i8), [127, -127, 2, 2, -2, 0, 1, 0]);
    }

    #[test]
    fn rows_of_nothing_and_of_no_numbers() {
        let mut out = [9; 2];
        assert_eq!(quantise_int8_row(&[0.0, -0.0], &mut out), 0.0);
        assert_eq!(out, [0, 0]);
        assert!(quantise_int8_row(&[1.0, f32::INFINITY], &mut out).is_nan());
        assert!(quantise_int8_row(&[1.0, f32::NAN], &mut out).is_nan());
        // The smallest number: its inverse is infinite.
        let scale = quantise_int8_row(&[f32::from_bits(1), 0.0], &mut out);
        assert_eq!((scale, out), (0.0, [0, 0]));
    }
}
