//! What loads of blocks have come to.

use corella_core::session::{LoadEnd, LoadFailure};

use crate::count::counts;

counts! {
    pub struct LoadTotals {
        num_messages_lost,
        num_messages_repeated,
        num_torn_parts,
        num_refused_loads,
        num_loaded,
        num_not_found,
        num_without_pages,
        /// Computing was chosen.
        num_not_worth,
        num_cancelled,
        num_timed_out,
        num_rows_lost,
        num_not_here,
        num_refused,
        num_holds_ended,
        num_stalled,
        num_unknown,
        num_sources_lost,
        /// Loads whose node died.
        num_loaders_lost,
        num_fetched_blocks,
        /// Lookups of nodes that could not borrow all the blocks that were there.
        num_part_offers,
        /// Fetches that have pages for a part of their blocks.
        num_part_grants,
        /// Messages in which a node lied, and in which it spoke of loads of others.
        num_lies,
        num_lies_for_others,
        /// Loads that went on with fewer blocks than their source was asked for.
        num_shortened,
        /// Blocks that were published before their load was over.
        num_early_blocks,
        num_window_blocks,
        /// Parts that were read in the memory of a node that had released them.
        num_read_late,
    }
}

impl LoadTotals {
    pub fn count_end(&mut self, end: LoadEnd) {
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
