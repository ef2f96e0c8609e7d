//! `bench scheduler`: the scheduler's cost of a step, and the prefix cache's cost of a token.

mod ageing;
mod calls;
mod late_request;
mod queue_bench;
mod queue_change;
mod queue_cost;
mod steady_queue;
mod traffic;
mod turnover;
mod undrawn_step;

use std::fmt;
use std::time::{Duration, Instant};

use corella_core::{Scheduler, SchedulerConfig};
use serde_json::{Value, json};

use crate::prefix_cache::{self, CacheCost, OperationCosts, Shape};
use crate::sample::summary::Summary;
use traffic::{drawn, request};

pub use calls::{CallCost, CallLimits};
pub use queue_bench::QueueBenchOptions;
pub use queue_cost::QueueCost;

const PAGE_SIZE: u32 = 16;

#[derive(Debug, Clone)]
pub struct SchedulerBenchOptions {
    /// Numbers of decoding requests, for the rows of the first table.
    pub num_running: Vec<usize>,
    /// Numbers of waiting requests, for the rows of the first table.
    pub num_waiting: Vec<usize>,
    /// The number of steps timed for a row.
    pub num_steps: usize,
    /// Lengths of a prompt in tokens, for the rows of the second table.
    pub num_tokens: Vec<usize>,
    pub queue: QueueBenchOptions,
    /// Numbers of pages in a full prefix cache, for the rows of the third table.
    pub num_cached_pages: Vec<usize>,
}

impl Default for SchedulerBenchOptions {
    fn default() -> Self {
        Self {
            num_running: vec![16, 64, 256, 1024],
            num_waiting: vec![0, 256, 1024, 4096],
            num_steps: 500,
            num_tokens: vec![10_000, 100_000, 1_000_000, 10_000_000],
            queue: QueueBenchOptions::default(),
            num_cached_pages: vec![10_000, 100_000],
        }
    }
}

#[derive(Debug, Clone)]
pub struct SchedulerReport {
    pub steps: Vec<StepCost>,
    pub queues: Vec<QueueCost>,
    pub caches: Vec<CacheCost>,
    pub operations: Vec<OperationCosts>,
}

/// The cost of a decode step in microseconds, summarised over all steps.
#[derive(Debug, Clone)]
pub struct StepCost {
    pub num_running: usize,
    pub num_waiting: usize,
    pub schedule_us: Summary,
    pub update_us: Summary,
}

pub fn run(options: &SchedulerBenchOptions) -> SchedulerReport {
    let mut steps = Vec::new();
    for &num_running in &options.num_running {
        for &num_waiting in &options.num_waiting {
            steps.push(step_cost(num_running, num_waiting, options.num_steps));
        }
    }
    let caches = options.num_tokens.iter();
    let caches = caches.map(|&num_tokens| prefix_cache::cache_cost(num_tokens, PAGE_SIZE));
    SchedulerReport {
        steps,
        queues: queue_bench::run(&options.queue),
        caches: caches.collect(),
        operations: operations(options),
    }
}

fn operations(options: &SchedulerBenchOptions) -> Vec<OperationCosts> {
    let mut rows = Vec::new();
    for shape in Shape::ALL {
        for page_size in [1, PAGE_SIZE] {
            for &num_pages in &options.num_cached_pages {
                let num_steps = options.num_steps;
                rows.push(prefix_cache::operation_costs(
                    shape, num_pages, page_size, num_steps,
                ));
            }
        }
    }
    rows
}

/// All running requests decode. The waiting requests find no free slot, and all prompts differ.
fn step_cost(num_running: usize, num_waiting: usize, num_steps: usize) -> StepCost {
    const NUM_PROMPT_TOKENS: usize = 64;
    let max_tokens = num_steps + 64;
    let pages_each = (NUM_PROMPT_TOKENS + max_tokens).div_ceil(PAGE_SIZE as usize) + 1;
    let num_pages = (num_running * pages_each) as u32;
    let mut config = SchedulerConfig::new(num_pages, PAGE_SIZE, 1 << 20);
    config.max_num_seqs = num_running as u32;
    config.max_num_batched_tokens = 8192;
    config.max_prefill_tokens = 8192;
    config.max_queued_requests = (num_running + num_waiting) as u32;
    let mut scheduler = Scheduler::new(config).expect("the limits contradict each other");
    let mut num_added = 0;
    let mut add = |scheduler: &mut Scheduler, count: usize| {
        for _ in 0..count {
            let request = request(num_added, NUM_PROMPT_TOKENS, max_tokens as u32);
            num_added += 1;
            scheduler
                .add_requests(vec![request])
                .expect("the queue is full");
        }
    };
    add(&mut scheduler, num_running);
    while scheduler.stats().num_running < num_running {
        step(&mut scheduler);
    }
    add(&mut scheduler, num_waiting);
    for _ in 0..16 {
        step(&mut scheduler);
    }
    let (schedule_us, update_us) = (0..num_steps).map(|_| step(&mut scheduler)).unzip();
    assert_eq!(scheduler.stats().num_running, num_running);
    assert_eq!(scheduler.stats().num_waiting, num_waiting);
    StepCost {
        num_running,
        num_waiting,
        schedule_us: Summary::new(schedule_us),
        update_us: Summary::new(update_us),
    }
}

/// Runs a step, and returns the microseconds for planning it and for processing its result.
fn step(scheduler: &mut Scheduler) -> (f64, f64) {
    let micros = |time: Duration| time.as_secs_f64() * 1e6;
    let start = Instant::now();
    let batch = scheduler
        .schedule(0)
        .expect("no step was planned although requests run");
    let schedule = start.elapsed();
    let output = drawn(&batch);
    let start = Instant::now();
    scheduler.update_from_output(&output);
    while scheduler.poll_output().is_some() {}
    (micros(schedule), micros(start.elapsed()))
}

impl SchedulerReport {
    pub fn to_json(&self) -> Value {
        let steps = self.steps.iter().map(|cost| {
            json!({
                "num_running": cost.num_running,
                "num_waiting": cost.num_waiting,
                "schedule_us": { "p50": cost.schedule_us.median, "p99": cost.schedule_us.p99 },
                "update_us": { "p50": cost.update_us.median, "p99": cost.update_us.p99 },
            })
        });
        let caches = self.caches.iter().map(|cost| cost.to_json());
        let operations = self.operations.iter().map(OperationCosts::to_json);
        json!({
            "steps": steps.collect::<Vec<_>>(),
            "queues": self.queues.iter().map(QueueCost::to_json).collect::<Vec<_>>(),
            "prefix_cache": caches.collect::<Vec<_>>(),
            "full_prefix_cache": operations.collect::<Vec<_>>(),
        })
    }
}

impl fmt::Display for SchedulerReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "A decode step, microseconds")?;
        writeln!(
            f,
            "{:>8} {:>8} {:>13} {:>13} {:>11} {:>11}",
            "running", "waiting", "schedule p50", "schedule p99", "update p50", "update p99"
        )?;
        for cost in &self.steps {
            writeln!(
                f,
                "{:>8} {:>8} {:>13.1} {:>13.1} {:>11.1} {:>11.1}",
                cost.num_running,
                cost.num_waiting,
                cost.schedule_us.median,
                cost.schedule_us.p99,
                cost.update_us.median,
                cost.update_us.p99
            )?;
        }
        writeln!(f)?;
        QueueCost::write_table(&self.queues, f)?;
        writeln!(f)?;
        CacheCost::write_table(&self.caches, f)?;
        writeln!(f)?;
        OperationCosts::write_table(&self.operations, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_size_has_its_row() {
        let report = run(&SchedulerBenchOptions {
            num_running: vec![2, 4],
            num_waiting: vec![0, 3],
            num_steps: 5,
            num_tokens: vec![160, 1600],
            queue: QueueBenchOptions {
                num_running: 8,
                num_waiting: vec![20, 40],
                num_late: 3,
                limits: CallLimits {
                    num_calls: 70,
                    ..QueueBenchOptions::default().limits
                },
            },
            num_cached_pages: vec![20, 200],
        });
        assert_eq!((report.steps.len(), report.caches.len()), (4, 2));
        assert_eq!(report.operations.len(), 12);
        assert_eq!(report.to_json()["steps"][3]["num_waiting"], 3);
        let queues = report.to_json()["queues"].as_array().unwrap().clone();
        assert!(queues.iter().all(|row| row["num_calls"] == 70));
        let num_with =
            |name: &str, value: u64| queues.iter().filter(|row| row[name] == value).count();
        assert_eq!(num_with("num_waiting", 20), num_with("num_waiting", 40));
        assert_eq!(num_with("num_waiting", 3), 2);
        assert!(num_with("page_size", 1) > 0);
        assert_eq!(report.to_json()["full_prefix_cache"][11]["num_pages"], 200);
        assert!(report.to_string().contains("1600"));
    }
}
