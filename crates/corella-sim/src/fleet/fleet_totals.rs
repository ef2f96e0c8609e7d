//! The outcomes of fleet runs.

use crate::count::counts;
use crate::pair::blocks::load_totals::LoadTotals;

counts! {
    pub struct CallTotals {
        num_runs,
        num_events,
        num_completed,
        num_aborted,
        num_failed,
        /// Calls whose node died.
        num_lost,
        num_crashes,
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FleetTotals {
    pub calls: CallTotals,
    pub loads: LoadTotals,
}

impl FleetTotals {
    pub fn add(&mut self, run: &Self) {
        self.calls.add(&run.calls);
        self.loads.add(&run.loads);
    }

    /// Returns the names of counts that are 0.
    pub fn missing(&self) -> Vec<String> {
        [self.calls.missing(), self.loads.missing()].concat()
    }
}
