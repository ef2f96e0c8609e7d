//! Pseudorandom numbers: a seed and a case are the only sources of randomness.

/// The generator SplitMix64 (Steele, Lea, Flood 2014).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Returns the generator of one case. Its numbers do not depend on other cases.
    pub fn new(seed: u64, case: u64) -> Self {
        let mut random = Self(seed);
        random.0 = random.next_u64().wrapping_add(case);
        random.0 = random.next_u64();
        random
    }

    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound`, or 0 if `bound` is 0.
    pub fn below(&mut self, bound: usize) -> usize {
        match bound {
            0 => 0,
            bound => (self.next_u64() % bound as u64) as usize,
        }
    }

    /// A number below `bound`, whose magnitude is evenly distributed.
    pub fn magnitude_below(&mut self, bound: usize) -> usize {
        let bits = usize::BITS - bound.leading_zeros();
        let bits = self.below(bits as usize + 1);
        let mask = 1usize
            .checked_shl(bits as u32)
            .map_or(usize::MAX, |power| power - 1);
        (self.next_u64() as usize & mask).min(bound.saturating_sub(1))
    }

    /// True with the probability 1/`times`.
    pub fn once_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }

    pub fn pick<T: Clone>(&mut self, values: &[T]) -> T {
        values[self.below(values.len())].clone()
    }
}
