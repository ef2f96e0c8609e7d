//! Recurrent state: behind which rows of a request a snapshot is taken, and what a model with recurrent layers cannot do
//! yet.

use alloc::format;

use crate::{ConfigError, SchedulerConfig};

/// How prefixes are cached for a model with recurrent layers, which keep one state for each sequence
/// instead of rows: copies of a slot's state behind whole blocks, from which other requests go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecurrentState {
    /// The states that the executor has room for beside those of its slots. With 0, every prompt is
    /// computed from its beginning.
    pub num_snapshots: u32,
    /// A snapshot is taken behind every block whose number, counted from 1, is a multiple of this,
    /// and behind the last whole block of a prompt.
    pub snapshot_interval: u32,
}

impl RecurrentState {
    /// The first number of blocks beyond `num_rows` rows behind which a request takes a snapshot.
    pub(crate) fn next_point(&self, num_rows: u32, num_prompt_tokens: u32, page_size: u32) -> u32 {
        let num_blocks = num_rows / page_size;
        let next = (num_blocks / self.snapshot_interval + 1).saturating_mul(self.snapshot_interval);
        match num_prompt_tokens / page_size {
            last if last > num_blocks => last.min(next),
            _ => next,
        }
    }

    /// The last number of blocks, of at most `num_blocks`, behind which a request takes a snapshot.
    pub(crate) fn last_point(
        &self,
        num_blocks: u32,
        num_prompt_tokens: u32,
        page_size: u32,
    ) -> u32 {
        let last = num_blocks - num_blocks % self.snapshot_interval;
        match num_prompt_tokens / page_size {
            of_prompt if of_prompt <= num_blocks => last.max(of_prompt),
            _ => last,
        }
    }
}

impl SchedulerConfig {
    /// Makes it the configuration of a model with recurrent layers. Nothing is kept in host memory for it, or held for
    /// other nodes.
    pub fn set_recurrent_state(&mut self, state: RecurrentState) {
        self.recurrent_state = Some(state);
        self.max_held_pages = 0;
        self.max_fetched_pages = 0;
        self.max_served_pages = 0;
        self.max_spilled_pages = 0;
    }

    pub(super) fn validate_recurrent_state(&self) -> Result<(), ConfigError> {
        let Some(state) = self.recurrent_state else {
            return Ok(());
        };
        if state.snapshot_interval == 0 {
            return Err(ConfigError("snapshot_interval must be at least 1".into()));
        }
        let refused = [
            (
                "max_spilled_pages",
                self.max_spilled_pages,
                "keep the KV of preempted requests in host memory",
            ),
            (
                "max_held_pages",
                self.max_held_pages,
                "keep KV for other nodes",
            ),
            (
                "max_fetched_pages",
                self.max_fetched_pages,
                "fetch KV from elsewhere",
            ),
            (
                "max_served_pages",
                self.max_served_pages,
                "keep blocks for other nodes",
            ),
        ];
        for (name, value, what) in refused {
            if value > 0 {
                return Err(ConfigError(format!(
                    "{name} is {value}: a model with recurrent layers cannot {what} yet; set it to 0"
                )));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goes through all numbers of blocks one by one.
    #[test]
    fn points_are_multiples_of_the_interval_and_the_end_of_the_prompt() {
        for (interval, num_prompt_tokens) in
            (1..5).flat_map(|interval| (1..40).map(move |num_tokens| (interval, num_tokens)))
        {
            let state = RecurrentState {
                num_snapshots: 1,
                snapshot_interval: interval,
            };
            let is_point = |&num_blocks: &u32| {
                num_blocks > 0
                    && (num_blocks.is_multiple_of(interval)
                        || (num_blocks * 3..num_blocks * 3 + 3).contains(&num_prompt_tokens))
            };
            for num_rows in 0..60 {
                let next = (num_rows / 3 + 1..).find(is_point);
                assert_eq!(Some(state.next_point(num_rows, num_prompt_tokens, 3)), next);
                let num_blocks = num_rows / 3;
                let last = (1..=num_blocks).rev().find(is_point).unwrap_or(0);
                assert_eq!(state.last_point(num_blocks, num_prompt_tokens, 3), last);
            }
        }
    }
}
