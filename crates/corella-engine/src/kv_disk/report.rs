//! Reports of the threads to the loop.

use corella_core::{FetchEnd, FetchId};
use crossbeam_channel::Sender;

/// A report of the threads to the loop.
pub(super) enum Report {
    /// Pages were copied to memory. The answer says whether they stayed unchanged meanwhile.
    Copied {
        is_valid: Sender<bool>,
    },
    /// A part of the path was written, or could not be.
    Written {
        is_done: bool,
    },
    Fetched {
        id: FetchId,
        num_blocks: u32,
    },
    FetchEnded {
        id: FetchId,
        end: FetchEnd,
    },
    /// The time of some reads.
    Timed {
        num_blocks: u32,
        elapsed_us: u64,
    },
}
