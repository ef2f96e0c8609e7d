//! Recurrent state: the rows of a request after which a snapshot is taken, and the limits of models with recurrent
//! layers.

use alloc::format;

use crate::{ConfigError, SchedulerConfig};

/// Prefix caching for a model with recurrent layers. These layers keep one state for each sequence instead of rows. The
/// cache has snapshots, copies of a slot's state after whole blocks, and other requests continue from these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecurrentState {
    /// The number of states that the executor can keep beside those of its slots. With 0, every prompt is computed from
    /// its beginning.
    pub num_snapshots: u32,
    /// A prompt has a snapshot after every block whose index, counted from 1, is a multiple of `snapshot_interval`, and
    /// after the last whole block that an equal prompt would find.
    pub snapshot_interval: u32,
    /// The smallest number of blocks that a further snapshot must save from being computed again. A prompt takes a
    /// snapshot where its tokens diverge from other requests, unless it has a snapshot within this distance before that
    /// point. A decode takes a snapshot after every block whose index is a multiple of `least_distance`, in place of
    /// its previous one.
    pub least_distance: u32,
}

/// The blocks after which a request takes snapshots.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SnapshotPoints {
    pub page_size: u32,
    pub interval: u32,
    /// The number of whole blocks of the prompt without its last token. The last token is always computed, so an equal
    /// prompt does not continue after a block that ends with the last token.
    pub end_of_prompt: u32,
    /// The number of blocks up to the point where the request's tokens diverge from other requests, or 0.
    pub branch: u32,
    /// The first block of the request's decode, and the number of blocks between snapshots there. `None` if decodes
    /// take none.
    pub decode: Option<DecodePoints>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct DecodePoints {
    /// The number of whole blocks before the first decode.
    pub start: u32,
    pub distance: u32,
}

impl SnapshotPoints {
    /// The number of blocks up to the request's first snapshot after `num_rows` rows.
    pub fn next(&self, num_rows: u32) -> u32 {
        let num_blocks = num_rows / self.page_size;
        let multiple = |of: u32, from: u32| (from / of + 1).saturating_mul(of);
        let decode = self
            .decode
            .map(|it| multiple(it.distance, num_blocks.max(it.start)));
        let single = [self.end_of_prompt, self.branch].into_iter();
        let single = single.filter(|&point| point > num_blocks);
        let next = multiple(self.interval, num_blocks);
        single.chain(decode).fold(next, u32::min)
    }

    /// The number of blocks up to the request's last snapshot within its first `num_blocks` blocks; 0 if there is none.
    pub fn last(&self, num_blocks: u32) -> u32 {
        let decode = self
            .decode
            .map(|it| (num_blocks - num_blocks % it.distance, it.start))
            .filter(|(point, start)| point > start);
        let single = [self.end_of_prompt, self.branch].into_iter();
        let single = single.filter(|&point| point <= num_blocks);
        let last = num_blocks - num_blocks % self.interval;
        let decode = decode.map(|(point, _)| point);
        single.chain(decode).fold(last, u32::max)
    }

    /// Whether a snapshot after `num_blocks` blocks is one that the decode's next snapshot replaces.
    pub fn is_passing(&self, num_blocks: u32) -> bool {
        self.decode.is_some_and(|it| num_blocks > it.start)
            && !num_blocks.is_multiple_of(self.interval)
    }
}

impl SchedulerConfig {
    /// Configures a model with recurrent layers. Its KV is not kept in host memory. Its cached blocks are neither
    /// fetched nor held for readers, unless `max_fetched_pages` and `max_served_pages` are set later.
    pub fn set_recurrent_state(&mut self, state: RecurrentState) {
        self.recurrent_state = Some(state);
        self.max_fetched_pages = 0;
        self.max_served_pages = 0;
        self.max_spilled_pages = 0;
    }

    pub(super) fn validate_recurrent_state(&self) -> Result<(), ConfigError> {
        let Some(state) = self.recurrent_state else {
            return Ok(());
        };
        for (name, distance) in [
            ("snapshot_interval", state.snapshot_interval),
            ("least_distance", state.least_distance),
        ] {
            if distance == 0 {
                return Err(ConfigError::new(name, " must be at least 1"));
            }
        }
        match self.max_spilled_pages {
            0 => Ok(()),
            num_pages => {
                let text = format!(
                    " is {num_pages}: a model with recurrent layers cannot keep the KV of preempted requests in host \
                     memory yet; set it to 0"
                );
                Err(ConfigError::new("max_spilled_pages", text))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tries all numbers of blocks.
    #[test]
    fn points_are_multiples_the_end_of_the_prompt_and_the_branch() {
        let lens =
            (1..5).flat_map(|interval| (1..40).map(move |num_tokens| (interval, num_tokens)));
        let decodes = [None, Some(1), Some(2), Some(3)];
        let cases = lens.flat_map(|lens| decodes.map(|distance| (lens, distance)));
        for ((interval, num_prompt_tokens), distance) in cases {
            let branch = num_prompt_tokens % 7;
            let points = SnapshotPoints {
                page_size: 3,
                interval,
                end_of_prompt: (num_prompt_tokens - 1) / 3,
                branch,
                decode: distance.map(|distance| DecodePoints {
                    start: num_prompt_tokens / 3,
                    distance,
                }),
            };
            let is_in_answer = |num_blocks: u32| num_blocks * 3 > num_prompt_tokens;
            let is_point = |&num_blocks: &u32| {
                num_blocks > 0
                    && (num_blocks.is_multiple_of(interval)
                        || num_blocks == branch
                        // The prompt extends one to three tokens after the block.
                        || (num_blocks * 3 + 1..num_blocks * 3 + 4).contains(&num_prompt_tokens)
                        || distance.is_some_and(|distance| {
                            is_in_answer(num_blocks) && num_blocks.is_multiple_of(distance)
                        }))
            };
            for num_rows in 0..60 {
                let next = (num_rows / 3 + 1..).find(is_point);
                assert_eq!(Some(points.next(num_rows)), next);
                let num_blocks = num_rows / 3;
                let last = (1..=num_blocks).rev().find(is_point).unwrap_or(0);
                assert_eq!(points.last(num_blocks), last);
                assert_eq!(
                    points.is_passing(num_blocks),
                    distance.is_some()
                        && is_in_answer(num_blocks)
                        && !num_blocks.is_multiple_of(interval)
                );
            }
        }
    }
}
