//! Measures the executor's speed, and the device's limits for comparison. Decode steps and prompts run on models with
//! random weights, because speed depends on shapes and not on values.
//!
//! No data is read from disk, and contexts are pages with random numbers, so that minutes on a GPU suffice for all
//! measurements.

mod limit;
mod model;
mod model_bench;

pub use limit::{LimitSizes, Limits};
pub use model::{random_weights, shape};
pub use model_bench::{ModelBench, ModelCost};

/// The median of times.
fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// `num_bytes` bytes, an even number, of random numbers in bf16, most of them between -1/32 and 1/32.
fn random_bytes(num_bytes: usize, seed: u64) -> Vec<u8> {
    let mut state = seed;
    let mut bytes = Vec::with_capacity(num_bytes);
    while bytes.len() < num_bytes {
        // SplitMix64.
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^= bits >> 31;
        for bits in bits.to_le_bytes().as_chunks::<2>().0 {
            let value = f32::from(i16::from_le_bytes(*bits)) / (1 << 20) as f32;
            bytes.extend(half::bf16::from_f32(value).to_le_bytes());
        }
    }
    bytes.truncate(num_bytes);
    bytes
}

#[cfg(all(test, feature = "emulated-device"))]
mod tests {
    use super::*;
    use crate::device::test_device;

    #[test]
    fn everything_is_measured() {
        let device = test_device();
        let sizes = LimitSizes {
            copied_bytes: 1 << 20,
            product_len: 32,
        };
        let limits = Limits::measure(&device, sizes).unwrap();
        assert!(limits.copied_bytes_per_s > 0.0 && limits.flops_per_s > 0.0);

        let spec = shape("tiny").unwrap();
        // 4 steps of warm-up and 4 timed steps take another page after the one with 16 positions.
        let mut bench = ModelBench::new(&device, spec.clone(), true, &[(2, 16)], 20, 8).unwrap();
        assert!(bench.decode(2, 16).unwrap().unwrap() > 0.0);
        assert!(bench.decode(1, 16).unwrap().unwrap() > 0.0);
        assert_eq!(
            bench.decode(2, 48).unwrap(),
            None,
            "there are no pages for it"
        );
        assert!(bench.prefill(20).unwrap() > 0.0);
    }

    /// Llama 3 8B has 6,979,321,856 weights in its layers' matrices, 525,336,576 in its head, and takes 131,072 bytes
    /// for the keys and values of a token.
    #[test]
    fn costs_are_those_of_the_shape() {
        let spec = shape("llama-3-8b").unwrap();
        let cost = ModelCost::of(&spec);
        let weights = 2.0 * (6_979_321_856.0 + 525_336_576.0);
        assert_eq!(cost.decode_bytes(3, 1000), weights + 3000.0 * 131_072.0);
        let attention = 2.0 * 1000.0 * 1000.0 * 4096.0 * 32.0;
        let products = 2.0 * (1000.0 * 6_979_321_856.0 + 525_336_576.0);
        assert_eq!(cost.prefill_flops(1000), products + attention);
    }

    #[test]
    fn random_weights_are_neither_zero_nor_large() {
        let bytes = random_bytes(1 << 12, 1);
        let values = bytes
            .as_chunks()
            .0
            .iter()
            .map(|&bytes| half::bf16::from_le_bytes(bytes).to_f32().abs());
        let values: Vec<f32> = values.collect();
        assert_eq!(values.len(), 1 << 11);
        assert!(values.iter().all(|value| *value <= 1.0 / 32.0));
        let mean = values.iter().sum::<f32>() / values.len() as f32;
        assert!((0.014..0.017).contains(&mean), "{mean}");
    }
}
