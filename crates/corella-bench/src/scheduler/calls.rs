//! Times calls of one kind, up to a limited number and for a limited time.

use std::time::{Duration, Instant};

use crate::sample::summary::Summary;
use crate::sample::thread_time::thread_time;

/// The limits for measuring one kind of call, and a counter of allocations if they are counted.
#[derive(Debug, Clone, Copy)]
pub struct CallLimits {
    pub num_calls: usize,
    /// No further call begins once this much time has passed since the measurement began. The time between calls
    /// counts.
    pub max_time: Duration,
    /// Returns the number of allocations of this process so far.
    pub num_allocations: Option<fn() -> u64>,
}

#[derive(Debug)]
pub(super) struct Calls {
    limits: CallLimits,
    micros: Vec<f64>,
    num_allocations: u64,
    start: Instant,
}

/// The cost of one kind of call.
#[derive(Debug, Clone)]
pub struct CallCost {
    pub num_calls: usize,
    /// Processor time in microseconds.
    pub micros: Summary,
    /// Allocations per call on average, or `None` if they are not counted.
    pub num_allocations: Option<f64>,
}

impl Calls {
    pub fn new(limits: CallLimits) -> Self {
        Self {
            limits,
            micros: Vec::with_capacity(limits.num_calls),
            num_allocations: 0,
            start: Instant::now(),
        }
    }

    pub fn time<T>(&mut self, call: impl FnOnce() -> T) -> T {
        let num_allocations = self.limits.num_allocations.unwrap_or(|| 0);
        let num_before = num_allocations();
        let start = thread_time();
        let result = call();
        let elapsed = thread_time() - start;
        self.num_allocations += num_allocations() - num_before;
        self.micros.push(elapsed.as_secs_f64() * 1e6);
        result
    }

    /// Returns whether more calls are needed. True before the first call.
    pub fn go_on(&self) -> bool {
        let num_calls = self.num_calls();
        num_calls == 0
            || (num_calls < self.limits.num_calls && self.start.elapsed() < self.limits.max_time)
    }

    pub fn num_calls(&self) -> usize {
        self.micros.len()
    }

    pub fn cost(self) -> CallCost {
        let num_calls = self.num_calls();
        let counted = self.limits.num_allocations.map(|_| self.num_allocations);
        CallCost {
            num_calls,
            micros: Summary::new(self.micros),
            num_allocations: counted.map(|number| number as f64 / num_calls.max(1) as f64),
        }
    }
}
