//! The results of all rules, as a table and as JSON.

use std::fmt;

use serde_json::{Value, json};

use super::workload::Workload;
use super::{AdmissionOptions, Replay};

#[derive(Debug, Clone)]
pub struct AdmissionReport {
    pub num_requests: usize,
    /// The number of requests that are too long for the context or the pool.
    pub num_left_out: usize,
    /// The number of tokens that the pool holds.
    pub pool_len: u64,
    pub replays: Vec<Replay>,
}

impl AdmissionReport {
    pub(super) fn new(
        options: &AdmissionOptions,
        workload: &Workload,
        replays: Vec<Replay>,
    ) -> Self {
        let config = &options.config;
        Self {
            num_requests: workload.items.len(),
            num_left_out: workload.num_left_out,
            pool_len: u64::from(config.num_pages) * u64::from(config.page_size),
            replays,
        }
    }

    pub fn replay(&self, rule_name: &str) -> Option<&Replay> {
        let mut replays = self.replays.iter();
        replays.find(|replay| replay.rule.name == rule_name)
    }

    /// The makespan and the TTFT p99, each divided by the best value of all oracles. `None` if no oracle was played.
    pub fn ratios(&self, replay: &Replay) -> Option<(f64, f64)> {
        let oracles = self.replays.iter().filter(|replay| replay.rule.is_oracle);
        let makespan_s = oracles.clone().map(|oracle| oracle.makespan_s);
        let ttft_ms = oracles.map(|oracle| oracle.ttft_ms.p99);
        Some((
            replay.makespan_s / makespan_s.reduce(f64::min)?,
            replay.ttft_ms.p99 / ttft_ms.reduce(f64::min)?,
        ))
    }

    pub fn to_json(&self) -> Value {
        let rules = self.replays.iter().map(|replay| {
            let (makespan_ratio, ttft_ratio) = self.ratios(replay).unzip();
            json!({
                "rule": replay.rule.name,
                "makespan_s": replay.makespan_s,
                "makespan_to_oracle": makespan_ratio,
                "output_tokens_per_s": replay.output_tokens_per_s,
                "num_steps": replay.num_steps,
                "num_preemptions": replay.num_preemptions,
                "preemptions_per_finished": replay.preemptions_per_finished(),
                "num_finished": replay.num_finished,
                "num_failed": replay.num_failed,
                "p50_ttft_ms": replay.ttft_ms.median,
                "p99_ttft_ms": replay.ttft_ms.p99,
                "p99_ttft_to_oracle": ttft_ratio,
                "worst_gap_ms": replay.worst_gap_ms,
                "pool_share": replay.pool_share,
                "mean_running": replay.mean_running,
                "mean_waiting": replay.mean_waiting,
                "page_limited_share": replay.page_limited_share,
            })
        });
        json!({
            "num_requests": self.num_requests,
            "num_left_out": self.num_left_out,
            "pool_tokens": self.pool_len,
            "rules": rules.collect::<Vec<_>>(),
        })
    }
}

impl Replay {
    pub fn preemptions_per_finished(&self) -> f64 {
        self.num_preemptions as f64 / (self.num_finished as f64).max(1.0)
    }
}

impl fmt::Display for AdmissionReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} requests, pool of {} tokens",
            self.num_requests, self.pool_len
        )?;
        match self.num_left_out {
            0 => writeln!(f)?,
            more => writeln!(f, "; {more} more could never fit and are left out")?,
        }
        writeln!(
            f,
            "{:<15} {:>11} {:>7} {:>9} {:>8} {:>9} {:>7} {:>6} {:>10} {:>10} {:>7} {:>10} {:>6} \
             {:>8} {:>8} {:>8}",
            "rule",
            "makespan s",
            "ratio",
            "tokens/s",
            "steps",
            "preempted",
            "each",
            "failed",
            "TTFT p50 s",
            "TTFT p99 s",
            "ratio",
            "worst gap",
            "pool %",
            "running",
            "waiting",
            "by pages"
        )?;
        for replay in &self.replays {
            let ratios = self.ratios(replay);
            let shown = |ratio: Option<f64>| match ratio {
                Some(ratio) => format!("{ratio:.3}"),
                None => "-".to_owned(),
            };
            writeln!(
                f,
                "{:<15} {:>11.2} {:>7} {:>9.1} {:>8} {:>9} {:>7.3} {:>6} {:>10.3} {:>10.3} {:>7} \
                 {:>10.3} {:>6.1} {:>8.1} {:>8.1} {:>6.1} %",
                replay.rule.name,
                replay.makespan_s,
                shown(ratios.map(|(makespan, _)| makespan)),
                replay.output_tokens_per_s,
                replay.num_steps,
                replay.num_preemptions,
                replay.preemptions_per_finished(),
                replay.num_failed,
                replay.ttft_ms.median / 1e3,
                replay.ttft_ms.p99 / 1e3,
                shown(ratios.map(|(_, ttft)| ttft)),
                replay.worst_gap_ms / 1e3,
                100.0 * replay.pool_share,
                replay.mean_running,
                replay.mean_waiting,
                100.0 * replay.page_limited_share,
            )?;
        }
        Ok(())
    }
}
