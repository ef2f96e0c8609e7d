//! The account of one transfer.

use std::time::{Duration, Instant};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TransferAccount {
    pub num_bytes: u64,
    /// The number of pages, which counts a page once for each layer.
    pub num_pages: u64,
    pub first_byte_at: Option<Instant>,
    pub last_byte_at: Option<Instant>,
    /// When the executor had computed the last of the rows, if known.
    pub computed_at: Option<Instant>,
    /// When the receiver reported that it had all rows.
    pub received_at: Option<Instant>,
}

impl TransferAccount {
    pub fn add(&mut self, num_bytes: usize, num_pages: usize, now: Instant) {
        self.num_bytes += num_bytes as u64;
        self.num_pages += num_pages as u64;
        self.last_byte_at = Some(now);
    }

    /// Time from the first byte to the last.
    pub fn duration(&self) -> Duration {
        match (self.first_byte_at, self.last_byte_at) {
            (Some(first), Some(last)) => last - first,
            _ => Duration::ZERO,
        }
    }
}
