//! The times and limits of loads of cached blocks.

use alloc::vec::Vec;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadConfig {
    pub page_size: u32,
    pub num_layers: Vec<u32>,
    /// The limit of simultaneous loads, for a fetcher and for a source.
    pub max_loads: u32,
    /// The time within which a lookup must be answered.
    pub lookup_us: u64,
    /// The time without progress after which a load ends.
    pub stall_us: u64,
    /// The longest time for which blocks are held for a load.
    pub lease_us: u64,
    /// The number of blocks that may be in transit.
    pub credit_blocks: u32,
    /// The time for which ended loads are remembered.
    pub tombstone_us: u64,
}

impl LoadConfig {
    pub fn new(page_size: u32, num_layers: Vec<u32>) -> Self {
        Self {
            page_size,
            num_layers,
            max_loads: 64,
            lookup_us: 100_000,
            stall_us: 1_000_000,
            lease_us: 30_000_000,
            credit_blocks: 16,
            tombstone_us: 60_000_000,
        }
    }
}
