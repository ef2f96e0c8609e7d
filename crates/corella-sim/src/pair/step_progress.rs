//! The rows that steps in flight compute, and the layers that are done.
//!
//! The executor writes all rows of a step when the step begins. A device has them layer by layer, so a reader of an
//! unfinished layer would get rows that are not there yet.

use std::collections::{BTreeMap, BTreeSet};

use corella_core::{PageId, StepId};

#[derive(Default)]
pub struct StepProgress {
    inflight: BTreeMap<StepId, Step>,
}

struct Step {
    /// Pages and places in them.
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

    /// The layers of a step are done in order.
    pub fn handle_layer_done(&mut self, step: StepId) {
        if let Some(step) = self.inflight.get_mut(&step) {
            step.num_layers_done += 1;
        }
    }

    pub fn end(&mut self, step: StepId) {
        self.inflight.remove(&step);
    }

    /// True unless a step in flight still has to compute the row in this layer.
    pub fn is_computed(&self, page: PageId, at: usize, layer: u32) -> bool {
        let mut steps = self.inflight.values();
        steps.all(|step| layer < step.num_layers_done || !step.rows.contains(&(page, at)))
    }
}
