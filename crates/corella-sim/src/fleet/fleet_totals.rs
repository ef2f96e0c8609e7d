//! What runs of a fleet have come to.

use crate::blocks::load_totals::LoadTotals;
use crate::count::counts;

counts! {
    pub struct CallTotals {
        num_runs,
        num_events,
        num_completed,
        num_aborted,
        num_failed,
        /// Their node died.
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

    /// What has not happened once.
    pub fn missing(&self) -> Vec<String> {
        [self.calls.missing(), self.loads.missing()].concat()
    }
}
