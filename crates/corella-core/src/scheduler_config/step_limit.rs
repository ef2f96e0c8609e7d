//! The limits of one step. Several apply to the same tokens, and the smallest of them counts.

use alloc::format;
use alloc::vec::Vec;

use crate::{ConfigError, SchedulerConfig};

/// The name of a limit and its value.
type Limit = (&'static str, u32);

impl SchedulerConfig {
    /// The largest number of tokens of one prompt in one step. Without chunked prefill, a longer prompt gets a step of
    /// its own.
    pub fn largest_chunk(&self) -> u32 {
        let of_all = self.max_prefill_tokens.min(self.max_num_batched_tokens);
        match self.enable_chunked_prefill {
            true => of_all.min(self.max_chunk_tokens),
            false => of_all,
        }
    }

    /// Returns a fault for each limit of a step that no step can reach, because another limit is lower. Such a
    /// configuration works, but does less than the limit seems to allow.
    pub fn overruled_limits(&self) -> Vec<ConfigError> {
        let of_step = ("max_num_batched_tokens", self.max_num_batched_tokens);
        let of_prefill = ("max_prefill_tokens", self.max_prefill_tokens);
        let of_chunk = ("max_chunk_tokens", self.max_chunk_tokens);
        let mut faults = Vec::new();
        let mut compare = |(name, value): Limit, what: &str, others: &[Limit]| {
            let lowest = others.iter().min_by_key(|(_, value)| *value);
            if let Some(&(other, lower)) = lowest.filter(|(_, lower)| *lower < value) {
                let text = format!(" is {value}, but {what} at most {lower} tokens, because ");
                let fault = ConfigError::new(name, text);
                faults.push(fault.then(other, format!(" is {lower}")));
            }
        };
        compare(of_prefill, "the prompts of a step get", &[of_step]);
        if !self.enable_chunked_prefill {
            if self.max_chunk_tokens != u32::MAX {
                let text = format!(
                    " is {}, and has no effect: every prompt is computed whole",
                    self.max_chunk_tokens
                );
                faults.push(ConfigError::new("max_chunk_tokens", text));
            }
            return faults;
        }
        if self.max_chunk_tokens != u32::MAX {
            compare(of_chunk, "a prompt gets", &[of_step, of_prefill]);
        }
        let of_share = (
            "long_prefill_token_threshold",
            self.long_prefill_token_threshold,
        );
        compare(of_share, "a prompt gets", &[of_step, of_prefill, of_chunk]);
        faults
    }
}

#[cfg(test)]
mod tests {
    use alloc::string::{String, ToString};

    use super::*;

    fn sentences(config: &SchedulerConfig) -> Vec<String> {
        let faults = config.overruled_limits();
        faults.iter().map(ToString::to_string).collect()
    }

    fn config(step: u32, prefill: u32, chunk: u32) -> SchedulerConfig {
        let mut config = SchedulerConfig::new(64, 16, 1024);
        config.max_num_batched_tokens = step;
        config.max_prefill_tokens = prefill;
        config.max_chunk_tokens = chunk;
        config
    }

    #[test]
    fn a_limit_that_a_lower_one_overrules_is_named_with_it() {
        let chunk = |lower: u32, other: &str| {
            format!(
                "max_chunk_tokens is 1000, but a prompt gets at most {lower} tokens, because {other} is {lower}"
            )
        };
        for (limits, expected) in [
            (config(512, 512, u32::MAX), None),
            (config(512, 512, 512), None),
            (config(2048, 800, 400), None),
            (
                config(512, 512, 1000),
                Some(chunk(512, "max_num_batched_tokens")),
            ),
            (
                config(2048, 300, 1000),
                Some(chunk(300, "max_prefill_tokens")),
            ),
            (
                config(512, 800, 400),
                Some(
                    "max_prefill_tokens is 800, but the prompts of a step get at most 512 tokens, because \
                     max_num_batched_tokens is 512"
                        .into(),
                ),
            ),
        ] {
            assert_eq!(sentences(&limits), expected.as_slice(), "{limits:?}");
            let least = limits.max_num_batched_tokens.min(limits.max_prefill_tokens);
            assert_eq!(limits.largest_chunk(), limits.max_chunk_tokens.min(least));
        }
    }

    #[test]
    fn a_share_above_the_chunk_and_a_chunk_of_whole_prompts_are_named() {
        let mut shared = config(512, 512, 100);
        shared.long_prefill_token_threshold = 200;
        assert_eq!(
            sentences(&shared),
            [
                "long_prefill_token_threshold is 200, but a prompt gets at most 100 tokens, because \
                 max_chunk_tokens is 100"
            ]
        );
        let mut whole = config(512, 512, 100);
        whole.enable_chunked_prefill = false;
        assert_eq!(
            sentences(&whole),
            ["max_chunk_tokens is 100, and has no effect: every prompt is computed whole"]
        );
    }
}
