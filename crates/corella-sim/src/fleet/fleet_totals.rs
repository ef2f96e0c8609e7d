//! What runs of a fleet have come to, so that nobody mistakes quiet runs for passed ones.

use corella_core::session::{LoadEnd, LoadFailure};

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FleetTotals {
    pub num_runs: u64,
    pub num_events: u64,
    pub num_completed: u64,
    pub num_aborted: u64,
    pub num_failed: u64,
    /// Their node died.
    pub num_lost: u64,
    pub num_crashes: u64,
    pub num_messages_lost: u64,
    pub num_messages_repeated: u64,
    pub num_torn_parts: u64,
    pub num_refused_loads: u64,
    pub num_loaded: u64,
    pub num_not_found: u64,
    pub num_without_pages: u64,
    /// Computing was chosen.
    pub num_not_worth: u64,
    pub num_cancelled: u64,
    pub num_timed_out: u64,
    pub num_rows_lost: u64,
    pub num_not_here: u64,
    pub num_refused: u64,
    pub num_holds_ended: u64,
    pub num_stalled: u64,
    pub num_unknown: u64,
    pub num_sources_lost: u64,
    /// Loads whose node died.
    pub num_loaders_lost: u64,
    pub num_fetched_blocks: u64,
    /// Blocks that were published before their load was over.
    pub num_early_blocks: u64,
    pub num_window_blocks: u64,
    /// Parts that were read in the memory of a node that had released them.
    pub num_read_late: u64,
}

impl FleetTotals {
    fn counts(&self) -> [u64; 29] {
        [
            self.num_runs,
            self.num_events,
            self.num_completed,
            self.num_aborted,
            self.num_failed,
            self.num_lost,
            self.num_crashes,
            self.num_messages_lost,
            self.num_messages_repeated,
            self.num_torn_parts,
            self.num_refused_loads,
            self.num_loaded,
            self.num_not_found,
            self.num_without_pages,
            self.num_not_worth,
            self.num_cancelled,
            self.num_timed_out,
            self.num_rows_lost,
            self.num_not_here,
            self.num_refused,
            self.num_holds_ended,
            self.num_stalled,
            self.num_unknown,
            self.num_sources_lost,
            self.num_loaders_lost,
            self.num_fetched_blocks,
            self.num_early_blocks,
            self.num_window_blocks,
            self.num_read_late,
        ]
    }

    const NAMES: [&str; 29] = [
        "runs",
        "events",
        "completed requests",
        "aborted requests",
        "failed requests",
        "lost requests",
        "crashes",
        "lost messages",
        "repeated messages",
        "torn parts",
        "loads beyond the limit",
        "loads",
        "loads of which nothing is found",
        "loads without pages",
        "loads that are not worth it",
        "cancelled loads",
        "loads that take too long",
        "loads whose rows are lost",
        "loads of blocks that have gone",
        "loads that a source refuses",
        "holds that end early",
        "loads that a source gives up",
        "loads that a source does not know",
        "loads whose source is lost",
        "loads whose node is lost",
        "fetched blocks",
        "blocks that come before the end of their load",
        "blocks of models with windows",
        "parts that are read too late",
    ];

    pub fn add(&mut self, run: &Self) {
        let counts = run.counts();
        for (sum, count) in self.counts_mut().into_iter().zip(counts) {
            *sum += count;
        }
    }

    fn counts_mut(&mut self) -> [&mut u64; 29] {
        [
            &mut self.num_runs,
            &mut self.num_events,
            &mut self.num_completed,
            &mut self.num_aborted,
            &mut self.num_failed,
            &mut self.num_lost,
            &mut self.num_crashes,
            &mut self.num_messages_lost,
            &mut self.num_messages_repeated,
            &mut self.num_torn_parts,
            &mut self.num_refused_loads,
            &mut self.num_loaded,
            &mut self.num_not_found,
            &mut self.num_without_pages,
            &mut self.num_not_worth,
            &mut self.num_cancelled,
            &mut self.num_timed_out,
            &mut self.num_rows_lost,
            &mut self.num_not_here,
            &mut self.num_refused,
            &mut self.num_holds_ended,
            &mut self.num_stalled,
            &mut self.num_unknown,
            &mut self.num_sources_lost,
            &mut self.num_loaders_lost,
            &mut self.num_fetched_blocks,
            &mut self.num_early_blocks,
            &mut self.num_window_blocks,
            &mut self.num_read_late,
        ]
    }

    /// What has not happened.
    pub fn missing(&self) -> Vec<String> {
        let named = self.counts().into_iter().zip(Self::NAMES);
        let missing = named.filter(|&(count, _)| count == 0);
        missing.map(|(_, name)| name.into()).collect()
    }

    pub(super) fn count_end(&mut self, end: LoadEnd) {
        let count = match end {
            LoadEnd::Loaded { .. } => &mut self.num_loaded,
            LoadEnd::NotFound => &mut self.num_not_found,
            LoadEnd::NoPages(_) => &mut self.num_without_pages,
            LoadEnd::Cancelled => &mut self.num_cancelled,
            LoadEnd::NotWorth => &mut self.num_not_worth,
            LoadEnd::TimedOut => &mut self.num_timed_out,
            LoadEnd::RowsLost => &mut self.num_rows_lost,
            LoadEnd::SourceLost => &mut self.num_sources_lost,
            LoadEnd::Failed(failure) => match failure {
                LoadFailure::NotHere { .. } => &mut self.num_not_here,
                LoadFailure::Refused => &mut self.num_refused,
                LoadFailure::HoldEnded => &mut self.num_holds_ended,
                LoadFailure::Stalled => &mut self.num_stalled,
                LoadFailure::Unknown => &mut self.num_unknown,
            },
        };
        *count += 1;
    }
}
