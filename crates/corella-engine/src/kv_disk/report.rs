//! Reports of the threads to the loop.

use corella_core::{FetchEnd, FetchId};
use crossbeam_channel::Sender;

/// A report of the threads to the loop.
pub(super) enum Report {
    /// Pages were copied to memory. The answer by `is_valid` says whether the pages stayed unchanged meanwhile.
    Copied {
        is_valid: Sender<bool>,
    },
    /// A part of a path of the prefix tree was written to the disk, or writing failed.
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
    /// The measured duration of reading `num_blocks` blocks.
    Timed {
        num_blocks: u32,
        elapsed_us: u64,
    },
}
