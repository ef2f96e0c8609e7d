//! The measured speed of fetches, and the number of blocks that are worth fetching.

use crate::fleet::fetch_choice::FetchCost;
use crate::stats::SchedulerStats;

/// Smoothed times of fetches. They are 0 before the first measurement, so that the first fetch happens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FetchPace {
    round_trip_us: Option<u64>,
    /// The time to load 1,024 blocks, because one block may take less than a microsecond.
    kiloblock_us: Option<u64>,
}

impl FetchPace {
    /// Records the time from a lookup to its answer.
    pub fn note_round_trip(&mut self, elapsed_us: u64) {
        smooth(&mut self.round_trip_us, elapsed_us);
    }

    /// Records the time from the request for blocks to the end of their load.
    pub fn note_load(&mut self, num_blocks: u32, elapsed_us: u64) {
        // A load has two round trips: one for the rows, and one for the confirmation of the hold.
        let loading_us = elapsed_us.saturating_sub(self.round_trip_us());
        let kiloblock_us = loading_us.saturating_mul(1024);
        if let Some(kiloblock_us) = kiloblock_us.checked_div(num_blocks.into()) {
            smooth(&mut self.kiloblock_us, kiloblock_us);
        }
    }

    /// Returns the time from a lookup's answer to the first blocks.
    pub fn round_trip_us(&self) -> u64 {
        self.round_trip_us.map_or(0, |us| us.saturating_mul(2))
    }

    /// Returns the time of 1,024 blocks.
    pub fn kiloblock_us(&self) -> u64 {
        self.kiloblock_us.unwrap_or(0)
    }

    /// Returns how many of the offered blocks are worth fetching, from the first on: 0 if computing them is as quick.
    /// Until a prompt has been computed and timed, all blocks are worth fetching.
    pub fn num_worth(&self, offer: BlockOffer, stats: &SchedulerStats, page_size: u32) -> u32 {
        let compute_us = stats.prefill_us;
        let cost = FetchCost {
            num_blocks: offer.num_blocks.saturating_sub(offer.num_here),
            num_offered: offer.num_offered.saturating_sub(offer.num_here),
            queue_us: stats.num_queued_tokens.saturating_mul(compute_us) / 1024,
            round_trip_us: self.round_trip_us(),
            fetch_kiloblock_us: self.kiloblock_us(),
            compute_kiloblock_us: compute_us.saturating_mul(page_size.into()),
        };
        // If this node has all offered blocks, the scheduler will answer that all are cached.
        if compute_us == 0 || cost.num_offered == 0 {
            return offer.num_offered;
        }
        match cost.num_to_fetch() {
            0 => 0,
            num => offer.num_here + num,
        }
    }

    /// Returns the time of a lookup and the load of `num_blocks` blocks; 0 without blocks.
    pub fn load_us(&self, num_blocks: u32) -> u64 {
        let loading_us = u64::from(num_blocks).saturating_mul(self.kiloblock_us()) / 1024;
        match num_blocks {
            0 => 0,
            _ => self.round_trip_us().saturating_add(loading_us),
        }
    }
}

/// A source's answer to a lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockOffer {
    /// The number of blocks of the sequence.
    pub num_blocks: u32,
    /// The number of first blocks that this node has.
    pub num_here: u32,
    /// The number of first blocks that the source has.
    pub num_offered: u32,
}

/// Gives a new value the weight 1/4.
fn smooth(mean: &mut Option<u64>, value: u64) {
    *mean = Some(mean.map_or(value, |mean| mean - mean / 4 + value / 4));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_follow_the_measurements() {
        let mut pace = FetchPace::default();
        assert_eq!((pace.round_trip_us(), pace.kiloblock_us()), (0, 0));
        pace.note_round_trip(100);
        assert_eq!(pace.round_trip_us(), 200);
        // 10 blocks take 1,200 us: 200 us for messages and 100 us for each block.
        pace.note_load(10, 1_200);
        assert_eq!(pace.kiloblock_us(), 102_400);
        assert_eq!((pace.load_us(0), pace.load_us(3)), (0, 500));
        pace.note_load(10, 5_200);
        assert_eq!(pace.kiloblock_us(), 204_800);
        pace.note_load(0, 9_000_000);
        assert_eq!(pace.kiloblock_us(), 204_800);
        pace.note_round_trip(u64::MAX);
        pace.note_load(1, u64::MAX);
        assert!(pace.load_us(u32::MAX) > 0);
    }
}
