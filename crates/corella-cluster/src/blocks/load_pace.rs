//! How quickly blocks come from other nodes, as measured.

use std::time::Duration;

/// A new measurement has this weight.
const WEIGHT: f64 = 0.25;

/// Smoothed times of loads. Before the first measurement they are 0, so that the first load is made.
#[derive(Clone, Copy, Debug, Default)]
pub struct LoadPace {
    round_trip_us: Option<f64>,
    /// For one block.
    block_us: Option<f64>,
}

impl LoadPace {
    /// From a lookup to its answer.
    pub fn note_round_trip(&mut self, elapsed: Duration) {
        smooth(&mut self.round_trip_us, elapsed.as_secs_f64() * 1e6);
    }

    /// From asking for the rows of blocks to the end of their load.
    pub fn note_load(&mut self, num_blocks: u32, elapsed: Duration) {
        let round_trip_us = self.round_trip_us.unwrap_or(0.0);
        // Messages go and come twice: the load, and the word that the hold has lived.
        let loading_us = elapsed.as_secs_f64() * 1e6 - 2.0 * round_trip_us;
        if num_blocks > 0 {
            smooth(
                &mut self.block_us,
                loading_us.max(0.0) / f64::from(num_blocks),
            );
        }
    }

    /// Until the first blocks come behind a lookup: its answer is there when this is asked.
    pub fn round_trip_us(&self) -> u64 {
        self.round_trip_us.map_or(0, |us| (2.0 * us) as u64)
    }

    /// For 1,024 blocks.
    pub fn kiloblock_us(&self) -> u64 {
        self.block_us.map_or(0, |us| (us * 1024.0) as u64)
    }

    /// For a lookup and the blocks behind it; 0 without blocks.
    pub fn load_us(&self, num_blocks: u32) -> u64 {
        match num_blocks {
            0 => 0,
            _ => self.round_trip_us() + u64::from(num_blocks) * self.kiloblock_us() / 1024,
        }
    }
}

fn smooth(value: &mut Option<f64>, new: f64) {
    *value = Some(value.map_or(new, |old| old + WEIGHT * (new - old)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_follow_what_is_measured() {
        let mut pace = LoadPace::default();
        assert_eq!((pace.round_trip_us(), pace.kiloblock_us()), (0, 0));
        pace.note_round_trip(Duration::from_micros(100));
        assert_eq!(pace.round_trip_us(), 200);
        // 10 blocks take 1,200 us; messages take 200 of them.
        pace.note_load(10, Duration::from_micros(1_200));
        assert_eq!(pace.kiloblock_us(), 102_400);
        assert_eq!((pace.load_us(0), pace.load_us(3)), (0, 500));
        pace.note_load(10, Duration::from_micros(5_200));
        assert_eq!(pace.kiloblock_us(), 204_800);
        pace.note_load(0, Duration::from_secs(9));
        assert_eq!(pace.kiloblock_us(), 204_800);
    }
}
