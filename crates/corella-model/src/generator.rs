//! The counter-based random number generator: a number is a pure function of the seed, the choice and the position,
//! without state.

/// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
fn philox4x32(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let a = u64::from(counter[0]) * 0xD251_1F53;
        let b = u64::from(counter[2]) * 0xCD9E_8D57;
        counter = [
            (b >> 32) as u32 ^ counter[1] ^ key[0],
            b as u32,
            (a >> 32) as u32 ^ counter[3] ^ key[1],
            a as u32,
        ];
        key[0] = key[0].wrapping_add(0x9E37_79B9);
        key[1] = key[1].wrapping_add(0xBB67_AE85);
    }
    counter
}

/// A number in [0, 1) with 53 random bits. `position` is the position of the token to draw.
pub fn uniform(seed: u64, choice: u32, position: u32) -> f64 {
    let key = [seed as u32, (seed >> 32) as u32];
    let [high, low, ..] = philox4x32([position, choice, 0, 0], key);
    let bits = u64::from(high) << 32 | u64::from(low);
    (bits >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

/// A hash of two words (the finaliser of SplitMix64, Steele et al. 2014).
pub fn mix(a: u64, b: u64) -> u64 {
    let mut z = a
        .rotate_left(23)
        .wrapping_add(b)
        .wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ z >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_answers_of_the_random123_distribution() {
        assert_eq!(
            philox4x32([0; 4], [0; 2]),
            [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]
        );
        assert_eq!(
            philox4x32([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            philox4x32(
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0]
            ),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    /// Varies one coordinate at a time: consecutive positions, choices and seeds must look uniform.
    #[test]
    fn every_coordinate_is_uniform_and_uncorrelated() {
        type Draw = fn(u32) -> f64;
        let coordinates: [Draw; 3] = [
            |i| uniform(0, 0, i),
            |i| uniform(42, i, 7),
            |i| uniform(u64::from(i), 0, 0),
        ];
        const N: u32 = 64_000;
        const BINS: usize = 64;
        for draw in coordinates {
            let mut bins = [0u32; BINS];
            let (mut products, mut last) = (0.0, draw(N) - 0.5);
            for i in 0..N {
                let u = draw(i);
                assert!((0.0..1.0).contains(&u));
                bins[(u * BINS as f64) as usize] += 1;
                products += last * (u - 0.5);
                last = u - 0.5;
            }
            let expected = f64::from(N) / BINS as f64;
            let chi_square: f64 = bins
                .iter()
                .map(|&n| (f64::from(n) - expected).powi(2) / expected)
                .sum();
            // With 63 degrees of freedom, 99.99 % of the values are below 113.
            assert!(chi_square < 113.0, "chi square {chi_square}");
            // The product of two uniform numbers in [-1/2, 1/2) has variance 1/144.
            let correlation = products / (f64::from(N) / 144.0).sqrt();
            assert!(correlation.abs() < 4.0, "lag-1 correlation {correlation} σ");
        }
    }
}
