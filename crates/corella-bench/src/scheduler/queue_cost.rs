//! The costs of the scheduler's calls with very many waiting requests.

use std::fmt;
use std::time::Duration;

use serde_json::{Value, json};

use super::calls::{CallCost, CallLimits};
use super::{ageing, late_request, queue_change, steady_queue, undrawn_step};

#[derive(Debug, Clone)]
pub struct QueueBenchOptions {
    /// The number of running requests.
    pub num_running: usize,
    /// Numbers of waiting requests, for some rows each.
    pub num_waiting: Vec<usize>,
    /// The number of waiting requests with a latency objective and a long cached prompt.
    pub num_late: usize,
    pub limits: CallLimits,
}

impl Default for QueueBenchOptions {
    fn default() -> Self {
        Self {
            num_running: 1024,
            num_waiting: vec![10_000, 100_000],
            num_late: 4000,
            limits: CallLimits {
                num_calls: 2000,
                max_time: Duration::from_secs(3),
                num_allocations: None,
            },
        }
    }
}

#[derive(Debug, Clone)]
pub struct QueueCost {
    pub case: String,
    /// The timed method.
    pub call: &'static str,
    pub page_size: u32,
    pub num_running: usize,
    pub num_waiting: usize,
    pub cost: CallCost,
}

/// Measures all cases, with a row for each kind of call.
pub fn run(options: &QueueBenchOptions) -> Vec<QueueCost> {
    let &QueueBenchOptions {
        num_running,
        num_late,
        limits,
        ..
    } = options;
    let mut rows = Vec::new();
    for &num_waiting in &options.num_waiting {
        rows.extend(steady_queue::costs(num_running, num_waiting, limits));
        rows.extend(ageing::costs(num_running, num_waiting, limits));
        rows.extend(undrawn_step::costs(num_running, num_waiting, limits));
        rows.extend(queue_change::costs(num_waiting, limits));
    }
    if num_late > 0 {
        rows.extend(late_request::costs(num_running, num_late, limits));
    }
    rows
}

impl QueueCost {
    pub fn to_json(&self) -> Value {
        let micros = &self.cost.micros;
        json!({
            "case": self.case,
            "call": self.call,
            "page_size": self.page_size,
            "num_running": self.num_running,
            "num_waiting": self.num_waiting,
            "num_calls": self.cost.num_calls,
            "us": { "p50": micros.p50, "p99.9": micros.p999, "max": micros.max },
            "num_allocations": self.cost.num_allocations,
        })
    }

    pub fn write_table(rows: &[Self], f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "Many waiting, microseconds of processor time a call")?;
        writeln!(
            f,
            "{:<32} {:<8} {:>4} {:>8} {:>8} {:>6} {:>12} {:>12} {:>12} {:>12}",
            "", "call", "page", "running", "waiting", "calls", "p50", "p99.9", "max", "allocations"
        )?;
        for row in rows {
            let CallCost {
                num_calls,
                micros,
                num_allocations,
            } = &row.cost;
            let allocations = match num_allocations {
                Some(number) => format!("{number:.1}"),
                None => "-".to_owned(),
            };
            writeln!(
                f,
                "{:<32} {:<8} {:>4} {:>8} {:>8} {:>6} {:>12.1} {:>12.1} {:>12.1} {allocations:>12}",
                row.case,
                row.call,
                row.page_size,
                row.num_running,
                row.num_waiting,
                num_calls,
                micros.p50,
                micros.p999,
                micros.max,
            )?;
        }
        Ok(())
    }
}
