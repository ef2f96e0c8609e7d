//! Numbers from a seed (SplitMix64, by Steele, Lea and Flood).

#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// Returns the numbers of one run of a seed, or of a part of a run.
    pub fn new(seed: u64, parts: &[u64]) -> Self {
        let mut random = Self(seed);
        for &part in parts {
            random.0 = random.next() ^ part;
        }
        random
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    /// Returns a number below `end`, which is small compared to 2⁶⁴, so that all are about equally likely.
    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for left in (1..items.len()).rev() {
            let other = self.below(left as u64 + 1) as usize;
            items.swap(left, other);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_that_the_algorithm_gives() {
        // The first numbers for seed 1234567 are published with other implementations of SplitMix64.
        let mut random = Random::new(1_234_567, &[]);
        let numbers = [(); 3].map(|()| random.next());
        let published = [
            6_457_827_717_110_365_317,
            3_203_168_211_198_807_973,
            9_817_491_932_198_370_423,
        ];
        assert_eq!(numbers, published);
    }

    #[test]
    fn a_seed_and_a_run_decide_the_order() {
        let order = |seed, run| {
            let mut items: Vec<u32> = (0..20).collect();
            Random::new(seed, &[run]).shuffle(&mut items);
            items
        };
        assert_eq!(order(1, 2), order(1, 2));
        assert_ne!(order(1, 2), order(1, 3));
        assert_ne!(order(1, 2), order(2, 2));
        let mut sorted = order(1, 2);
        sorted.sort();
        assert_eq!(sorted, (0..20).collect::<Vec<_>>());
    }
}
