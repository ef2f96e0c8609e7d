//! The rows that steps in flight compute, and the number of layers that each step has computed.
//!
//! The executor writes all rows of a step when the step begins. A device computes them layer by layer, so a reader of
//! an unfinished layer would read missing rows.

use std::collections::{BTreeMap, BTreeSet};

use corella_core::{PageId, StepId};

#[derive(Default)]
pub struct StepProgress {
    inflight: BTreeMap<StepId, Step>,
}

struct Step {
    /// Rows, by page and offset.
    rows: BTreeSet<(PageId, usize)>,
    num_layers_done: u32,
}

impl StepProgress {
    pub fn begin(&mut self, step: StepId, rows: BTreeSet<(PageId, usize)>) {
        let num_layers_done = 0;
        self.inflight.insert(
            step,
            Step {
                rows,
                num_layers_done,
            },
        );
    }

    /// Handles the end of a step's next layer.
    pub fn handle_layer_done(&mut self, step: StepId) {
        if let Some(step) = self.inflight.get_mut(&step) {
            step.num_layers_done += 1;
        }
    }

    pub fn end(&mut self, step: StepId) {
        self.inflight.remove(&step);
    }

    /// Returns false while a step in flight still has to compute the row in this layer.
    pub fn is_computed(&self, page: PageId, at: usize, layer: u32) -> bool {
        let mut steps = self.inflight.values();
        steps.all(|step| layer < step.num_layers_done || !step.rows.contains(&(page, at)))
    }
}
