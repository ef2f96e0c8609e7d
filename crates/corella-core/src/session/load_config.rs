//! The times and limits of loads of cached blocks.

use alloc::vec::Vec;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadConfig {
    pub page_size: u32,
    /// The number of layers of each KV group.
    pub num_layers: Vec<u32>,
    /// The most loads at a time, on either side.
    pub max_loads: u32,
    /// How long a node may take to answer a lookup.
    pub lookup_us: u64,
    /// A load ends when it makes no progress for so long.
    pub stall_us: u64,
    /// The longest time for which blocks are held for a load.
    pub lease_us: u64,
    /// The number of blocks that may be on their way without having landed.
    pub credit_blocks: u32,
    /// How long it is remembered that a load has ended.
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
