//! Facts about the holds and fetches of blocks.

use corella_core::{FetchId, HoldId};

/// A transfer that the driver of fetches has to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockFact {
    /// No new read of the blocks may begin. [`BlockExchange::release`](crate::BlockExchange::release) reports that all
    /// reads have ended.
    HoldEnded(HoldId),
    /// No new write to the pages may begin.
    /// [`BlockExchange::handle_fetch_ended`](crate::BlockExchange::handle_fetch_ended) reports that all writes have
    /// ended.
    FetchCancelled(FetchId),
}
