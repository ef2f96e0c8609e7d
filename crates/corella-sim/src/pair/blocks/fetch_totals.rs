//! The outcomes of fetches of blocks.

use corella_core::session::{BlockFetchEnd, LoadFailure};

use crate::count::counts;

counts! {
    pub struct FetchTotals {
        num_messages_lost,
        num_messages_repeated,
        num_torn_parts,
        num_refused_loads,
        num_loaded,
        num_not_found,
        num_without_pages,
        /// Fetches that ended because computing is as quick.
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
        /// Loads that were open when the loading node died.
        num_fetchers_lost,
        num_fetched_blocks,
        /// Lookups that offered fewer blocks than the source has cached.
        num_part_offers,
        /// Fetches that got pages for only a part of their blocks.
        num_part_grants,
        /// All lies, and the lies about loads between two other nodes.
        num_lies,
        num_lies_for_others,
        /// Loads that continued with fewer blocks than they had asked for.
        num_shortened,
        /// Blocks that were published before the end of their load.
        num_early_blocks,
        num_window_blocks,
        /// Parts that were read in the source's memory after the source had released their blocks.
        num_read_late,
    }
}

impl FetchTotals {
    pub fn count_end(&mut self, end: BlockFetchEnd) {
        let count = match end {
            BlockFetchEnd::Loaded { .. } => &mut self.num_loaded,
            BlockFetchEnd::NotFound => &mut self.num_not_found,
            BlockFetchEnd::NoPages(_) => &mut self.num_without_pages,
            BlockFetchEnd::Cancelled => &mut self.num_cancelled,
            BlockFetchEnd::NotWorth => &mut self.num_not_worth,
            BlockFetchEnd::TimedOut => &mut self.num_timed_out,
            BlockFetchEnd::RowsLost => &mut self.num_rows_lost,
            BlockFetchEnd::SourceLost => &mut self.num_sources_lost,
            BlockFetchEnd::Failed(failure) => match failure {
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
