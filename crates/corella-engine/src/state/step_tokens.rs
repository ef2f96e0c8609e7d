//! A histogram of the steps' numbers of tokens.

const NUM_BOUNDS: usize = 13;

/// Counts steps by their numbers of tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTokens {
    /// The tokens of all steps.
    pub num_tokens: u64,
    /// The number of steps in each bucket. A bucket counts steps with more tokens than the previous bound, and at most
    /// its own bound. The last bucket has no bound.
    pub num_steps: [u64; NUM_BOUNDS + 1],
}

impl StepTokens {
    /// The bounds of vLLM's histogram.
    pub const BOUNDS: [u64; NUM_BOUNDS] = [
        1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384,
    ];

    pub(crate) fn add(&mut self, num_tokens: usize) {
        let num_tokens = num_tokens as u64;
        self.num_tokens += num_tokens;
        self.num_steps[Self::BOUNDS.partition_point(|&bound| bound < num_tokens)] += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_counted_at_the_first_bound_that_holds_it() {
        let mut tokens = StepTokens::default();
        for num_tokens in [1, 2, 8, 9, 16384, 16385] {
            tokens.add(num_tokens);
        }
        assert_eq!(tokens.num_tokens, 32789);
        assert_eq!(tokens.num_steps[..3], [1, 2, 1]);
        assert_eq!(tokens.num_steps[12..], [1, 1]);
    }
}
