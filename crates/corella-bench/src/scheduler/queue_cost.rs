//! The costs of the scheduler's calls with very many waiting requests.

use std::fmt;

use serde_json::{Value, json};

use super::calls::CallCost;

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
            "us": { "p50": micros.median, "p99.9": micros.p999, "max": micros.max },
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
                micros.median,
                micros.p999,
                micros.max,
            )?;
        }
        Ok(())
    }
}
