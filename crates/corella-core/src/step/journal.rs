//! What the scheduler tells: outputs of requests, in order, and counts.

use alloc::collections::VecDeque;

use crate::{RequestOutput, SchedulerStats};

#[derive(Debug, Default)]
pub(crate) struct Journal {
    outputs: VecDeque<RequestOutput>,
    /// What has been counted since the start. The fields that describe the current state are not kept here.
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
