//! The mean of a sequence's hidden states, whose bits do not depend on the division into spans.

use corella_core::HiddenState;

/// Adds hidden states one by one, in the order of their positions.
#[derive(Clone, Debug, Default)]
pub struct MeanPool {
    sum: Vec<f64>,
    num_tokens: usize,
}

impl MeanPool {
    /// Adds the hidden state of the token at `position`. Position 0 begins a new sum. If a failed step leaves a gap
    /// before the position, there is no mean.
    pub fn add(&mut self, position: usize, state: &[f32]) {
        if position == 0 {
            self.sum.clear();
            self.sum.resize(state.len(), 0.0);
            self.num_tokens = 0;
        }
        if position == self.num_tokens {
            for (sum, &value) in self.sum.iter_mut().zip(state) {
                *sum += f64::from(value);
            }
            self.num_tokens += 1;
        }
    }

    /// The mean of the first `num_tokens` hidden states, if exactly these were added.
    pub fn mean(&self, num_tokens: usize) -> Option<HiddenState> {
        let divisor = num_tokens as f64;
        let mean = self.sum.iter().map(|sum| (sum / divisor) as f32);
        (num_tokens == self.num_tokens && num_tokens > 0).then(|| mean.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mean_is_of_all_tokens_or_there_is_none() {
        let mut pool = MeanPool::default();
        assert_eq!(pool.mean(0), None);
        pool.add(0, &[1.0, 8.0]);
        pool.add(1, &[2.0, -4.0]);
        assert_eq!(pool.mean(2).as_deref(), Some(&[1.5, 2.0][..]));
        assert_eq!(pool.mean(1), None);
        pool.add(3, &[100.0, 100.0]);
        assert_eq!(pool.mean(4), None, "position 2 is missing");
        pool.add(0, &[5.0, 6.0]);
        assert_eq!(pool.mean(1).as_deref(), Some(&[5.0, 6.0][..]));
    }

    /// In f32, the ones would be lost beside 2^24.
    #[test]
    fn small_values_are_not_lost_beside_a_large_sum() {
        let mut pool = MeanPool::default();
        pool.add(0, &[16_777_216.0]);
        for position in 1..=8 {
            pool.add(position, &[1.0]);
        }
        let expected = (16_777_216.0f64 + 8.0) / 9.0;
        assert_eq!(pool.mean(9).as_deref(), Some(&[expected as f32][..]));
    }
}
