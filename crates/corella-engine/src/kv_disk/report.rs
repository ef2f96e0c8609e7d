//! Reports of the threads to the loop.

use std::thread;

use corella_core::{FetchEnd, FetchId};

use crate::wake::doorbell::LoopSender;

/// A report of the threads to the loop.
pub(super) enum Report {
    /// The pages of the hold were copied to memory.
    Copied,
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
    /// The measured duration of reading `num_pages` pages from a disk.
    Timed {
        disk: usize,
        num_pages: u32,
        elapsed_us: u64,
    },
    /// The thread that writes has panicked, and releases no hold.
    WriterDied,
}

/// Makes a report if the thread that owns it panics.
pub(super) struct DeathReport {
    report: LoopSender<Report>,
    of_death: Option<Report>,
}

impl DeathReport {
    pub fn new(report: &LoopSender<Report>, of_death: Report) -> Self {
        Self {
            report: report.clone(),
            of_death: Some(of_death),
        }
    }
}

impl Drop for DeathReport {
    fn drop(&mut self) {
        if thread::panicking()
            && let Some(of_death) = self.of_death.take()
        {
            self.report.send(of_death);
        }
    }
}
