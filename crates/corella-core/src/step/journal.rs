//! Reports of the scheduler: outputs of requests, in order, and counts.

use alloc::collections::VecDeque;

use crate::{RequestOutput, SchedulerStats};

#[derive(Debug, Default)]
pub(crate) struct Journal {
    outputs: VecDeque<RequestOutput>,
    /// Counts since the start. The fields for the present state are unused here.
    counters: SchedulerStats,
}

impl Journal {
    pub fn emit(&mut self, output: RequestOutput) {
        self.outputs.push_back(output);
    }

    pub fn pop(&mut self) -> Option<RequestOutput> {
        self.outputs.pop_front()
    }

    pub fn counters(&mut self) -> &mut SchedulerStats {
        &mut self.counters
    }

    pub fn counts(&self) -> SchedulerStats {
        self.counters
    }
}
