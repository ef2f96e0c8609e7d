//! The time that requests wait for blocks of the disk.

use corella_core::SchedulerStats;

/// Limits of the time from the beginning of a fetch.
pub(super) struct FetchWait {
    /// Requests wait this long.
    pub soft_us: u64,
    /// Reads go on this long.
    pub hard_us: u64,
}

/// Requests wait for blocks as long as computing them would take, and at least this long.
pub(super) const LEAST_WAIT_US: u64 = 200_000;
/// The longest wait. It also applies while the speed of computing is unknown.
pub(super) const LONGEST_WAIT_US: u64 = 30_000_000;
const DAY_US: u64 = 86_400_000_000;

impl FetchWait {
    /// For [`reads_always`](super::KvDiskConfig::reads_always): longer than reads take.
    pub const ENDLESS: Self = Self {
        soft_us: DAY_US,
        hard_us: DAY_US,
    };

    /// Requests wait as long as computing `num_blocks` blocks would take.
    pub fn new(stats: &SchedulerStats, num_blocks: u32, page_size: u32) -> Self {
        let num_tokens = u64::from(num_blocks) * u64::from(page_size);
        let compute_us = match stats.prefill_us {
            0 => LONGEST_WAIT_US,
            kilotoken_us => kilotoken_us.saturating_mul(num_tokens) / 1024,
        };
        Self {
            soft_us: compute_us.clamp(LEAST_WAIT_US, LONGEST_WAIT_US),
            hard_us: LONGEST_WAIT_US,
        }
    }
}
