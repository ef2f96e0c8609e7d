//! The check that requests give back the pages that fell out of a window.

use std::collections::{BTreeMap, VecDeque};

use corella_core::{RequestId, SchedulerConfig};

use crate::check::verdict::{Checker, Planned, Verdict, ensure};
use crate::workload::{Answer, Workload};

/// A request of any length holds no more pages than its windows and its rows in flight need.
pub struct WindowBound {
    config: SchedulerConfig,
    /// The final length of each request, in tokens.
    lengths: BTreeMap<RequestId, u32>,
    /// The number of row copies in each step that may be in flight.
    num_copies: VecDeque<usize>,
}

impl WindowBound {
    pub fn new(workload: &Workload) -> Self {
        Self {
            config: workload.config.clone(),
            lengths: BTreeMap::new(),
            num_copies: VecDeque::new(),
        }
    }

    /// Returns the largest number of pages that a request with `num_rows` rows may hold.
    fn num_pages(&self, num_rows: u32) -> usize {
        let config = &self.config;
        let num_step_rows = match config.enable_chunked_prefill {
            true => config.largest_chunk().max(1 + config.max_draft_tokens),
            false => num_rows,
        };
        // Rows of a step count as in flight until it has returned.
        let num_rows_at_once = num_step_rows.saturating_mul(config.max_inflight_steps);
        let groups = config.kv_groups.iter();
        let num_pages = groups.map(|group| {
            let num_rows = num_rows + config.max_draft_tokens;
            group.num_pages(num_rows, num_rows_at_once, config.page_size) as usize
        });
        num_pages.sum()
    }
}

impl Checker for WindowBound {
    fn rule(&self) -> &'static str {
        "what fell out of a window is given back"
    }

    fn queued(&mut self, answer: &Answer) {
        let num_tokens = answer.request.prompt.len() + answer.output.len();
        self.lengths.insert(answer.request.id, num_tokens as u32);
    }

    fn planned(&mut self, step: &Planned<'_>) -> Verdict {
        // Spilled requests, fetches and loads of other nodes hold pages without a slot.
        let num_loads = step.stats.num_fetching_pages + step.stats.num_block_holds;
        let holds_others = self.config.max_spilled_pages > 0 || num_loads > 0;
        if !self.config.has_windows() || holds_others {
            return Ok(());
        }
        self.num_copies.push_back(step.batch.copies.len());
        if self.num_copies.len() > self.config.max_inflight_steps as usize {
            self.num_copies.pop_front();
        }
        let holders = step.slots.values();
        let bound: usize = holders.map(|id| self.num_pages(self.lengths[id])).sum();
        // Sources of copies are in use until the step has returned, and pinned pages for ever.
        let num_others = self.num_copies.iter().sum::<usize>() + step.stats.num_pinned_pages;
        let bound = bound + num_others;
        let num_pages = step.stats.num_in_use_pages;
        ensure(num_pages <= bound, || {
            format!("{num_pages} pages are in use, and windows allow {bound}")
        })
    }
}
