//! The results of a run, as a table and as JSON with the keys of `vllm bench serve`.

pub(crate) mod comparison;
pub(crate) mod html_report;
pub(crate) mod number;
pub(crate) mod plot;
pub(crate) mod provenance;
pub(crate) mod repeat;
pub(crate) mod report_file;
pub(crate) mod result_file;

use std::collections::BTreeMap;
use std::fmt;
use std::iter;
use std::time::Duration;

use serde_json::{Map, Value, json};

use crate::Summary;
use crate::report::provenance::Provenance;
use crate::report::result_file::ResultFile;
use crate::sample::timeline::Timeline;

/// The record of one request: the times of its tokens, or the reason of its failure.
#[derive(Debug, Clone, Default)]
pub struct RequestRecord {
    pub num_input_tokens: u64,
    /// The server's count of output tokens. Without a count, each event with text counts as one token.
    pub num_output_tokens: u64,
    /// The requested limit of output tokens. `None` if the model must reach the limit.
    pub max_output_tokens: Option<u64>,
    /// When the request was sent, measured from the start of the run.
    pub start: Duration,
    /// How long submitting took: opening the connection (before `start`), or the call into the engine (from `start`
    /// on).
    pub submit: Option<Duration>,
    /// Time from sending the request to its first token. `None` without a token.
    pub ttft: Option<Duration>,
    /// Times between tokens. They add up to `latency - ttft`.
    pub itls: Vec<Duration>,
    /// Time from sending the request to its last token.
    pub latency: Duration,
    /// Time from submission to the first step that computes the request. Only the engine itself can
    /// measure it.
    pub queue: Option<Duration>,
    /// How much later than planned the request was sent. `None` without a planned time.
    pub lag: Option<Duration>,
    pub error: Option<String>,
}

impl RequestRecord {
    /// Time from the first step that computes the request to its first token.
    pub fn prefill(&self) -> Option<Duration> {
        Some(self.ttft?.saturating_sub(self.queue?))
    }

    /// Whether the request was answered and meets the objective.
    pub fn keeps(&self, objective: Objective) -> bool {
        let seconds = match objective.metric {
            Metric::Ttft => self.ttft.map(|ttft| ttft.as_secs_f64()),
            Metric::Tpot => Some(self.tpot().unwrap_or(0.0)),
            Metric::E2el => Some(self.latency.as_secs_f64()),
        };
        self.error.is_none() && seconds.is_some_and(|seconds| seconds * 1e3 <= objective.limit_ms)
    }

    /// Time per output token after the first, in seconds.
    pub fn tpot(&self) -> Option<f64> {
        let num_after_first = self
            .num_output_tokens
            .checked_sub(1)
            .filter(|&num| num > 0)?;
        Some((self.latency - self.ttft?).as_secs_f64() / num_after_first as f64)
    }
}

impl ServerPhase {
    /// Returns the mean and, if they are known, median, p95 and p99.
    pub(crate) fn values(&self) -> impl Iterator<Item = f64> {
        [self.mean_ms]
            .into_iter()
            .chain(self.percentiles_ms.into_iter().flatten())
    }
}

/// The limit of one of a request's latencies.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Objective {
    pub metric: Metric,
    pub limit_ms: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Metric {
    Ttft,
    Tpot,
    E2el,
}

/// A description of the measurement.
#[derive(Debug, Clone, Default)]
pub struct ReportHead {
    /// The backend, by its name in `vllm bench serve`.
    pub backend: &'static str,
    pub model: String,
    /// Requests per second. `None` if all requests were sent at once.
    pub request_rate: Option<f64>,
    pub burstiness: f64,
    pub max_concurrency: Option<usize>,
    /// The limit of output tokens for each request. `None` if the prompts have their own limits.
    pub max_tokens: Option<u32>,
    pub ignore_eos: bool,
    /// The server's address, if there is one.
    pub base_url: Option<String>,
    /// Percentiles to report beside the median, p95 and p99.
    pub percentiles: Vec<f64>,
    pub provenance: Provenance,
}

/// The results of a run. Times in the summaries are in milliseconds. Failed requests count only in
/// `num_failed`.
#[derive(Debug, Clone)]
pub struct Report {
    pub head: ReportHead,
    pub duration: Duration,
    pub num_completed: usize,
    pub num_failed: usize,
    /// The number of requests that meet all objectives. `None` without objectives.
    pub num_good: Option<usize>,
    pub total_input_tokens: u64,
    pub total_output_tokens: u64,
    /// How much later than planned the requests were sent. This and the following summaries are `None` if not measured.
    pub lag_ms: Option<Summary>,
    pub submit_ms: Option<Summary>,
    pub queue_ms: Option<Summary>,
    pub prefill_ms: Option<Summary>,
    pub ttft_ms: Summary,
    pub tpot_ms: Summary,
    pub itl_ms: Summary,
    pub e2el_ms: Summary,
    /// Phases that only the server can measure.
    pub server_phases: Vec<ServerPhase>,
    /// The highest number of steps in which one waiting request was passed over, since the engine started.
    pub max_passed_over: Option<u32>,
    /// The records of all requests, in the order of the prompts.
    pub requests: Vec<RequestRecord>,
    /// The engine's state during the run. `None` unless it was recorded.
    pub timeline: Option<Timeline>,
}

/// The time of a phase of requests, in milliseconds, from the server's metrics.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ServerPhase {
    pub key: &'static str,
    pub name: &'static str,
    pub mean_ms: f64,
    /// Median, p95 and p99 by the buckets of the server's histogram. `None` if it has no buckets.
    pub percentiles_ms: Option<[f64; 3]>,
}

impl Report {
    pub(crate) fn new(head: ReportHead, duration: Duration, requests: Vec<RequestRecord>) -> Self {
        let completed = || requests.iter().filter(|request| request.error.is_none());
        let ms = |duration: Duration| duration.as_secs_f64() * 1e3;
        let ttfts = completed()
            .filter_map(|request| request.ttft)
            .map(ms)
            .collect();
        let tpots = completed()
            .filter_map(RequestRecord::tpot)
            .map(|tpot| tpot * 1e3)
            .collect();
        let itls = completed()
            .flat_map(|request| &request.itls)
            .map(|&itl| ms(itl))
            .collect();
        let e2els = completed().map(|request| ms(request.latency)).collect();
        let num_completed = completed().count();
        let phase = |time: fn(&RequestRecord) -> Option<Duration>| {
            let times: Vec<f64> = completed().filter_map(time).map(ms).collect();
            (!times.is_empty()).then(|| Summary::new(times))
        };
        Self {
            head,
            duration,
            num_completed,
            num_failed: requests.len() - num_completed,
            total_input_tokens: completed().map(|request| request.num_input_tokens).sum(),
            total_output_tokens: completed().map(|request| request.num_output_tokens).sum(),
            num_good: None,
            lag_ms: phase(|request| request.lag),
            submit_ms: phase(|request| request.submit),
            queue_ms: phase(|request| request.queue),
            prefill_ms: phase(RequestRecord::prefill),
            ttft_ms: Summary::new(ttfts),
            tpot_ms: Summary::new(tpots),
            itl_ms: Summary::new(itls),
            e2el_ms: Summary::new(e2els),
            server_phases: Vec::new(),
            max_passed_over: None,
            requests,
            timeline: None,
        }
    }

    /// Counts the requests that meet all objectives.
    pub(crate) fn judge(mut self, objectives: &[Objective]) -> Self {
        let is_good = |request: &&RequestRecord| objectives.iter().all(|o| request.keeps(*o));
        self.num_good =
            (!objectives.is_empty()).then(|| self.requests.iter().filter(is_good).count());
        self
    }

    /// Completed requests per second.
    pub fn request_throughput(&self) -> f64 {
        self.per_second(self.num_completed as f64)
    }

    /// Output tokens per second.
    pub fn output_throughput(&self) -> f64 {
        self.per_second(self.total_output_tokens as f64)
    }

    fn total_token_throughput(&self) -> f64 {
        self.per_second((self.total_input_tokens + self.total_output_tokens) as f64)
    }

    /// The number of answers that the model ended before the limit. `None` if every answer has to reach the limit.
    fn num_ended_early(&self) -> Option<usize> {
        let limits = self
            .completed()
            .filter_map(|request| Some(request.num_output_tokens < request.max_output_tokens?));
        let ends: Vec<bool> = limits.collect();
        (!ends.is_empty()).then(|| ends.iter().filter(|is_early| **is_early).count())
    }

    fn completed(&self) -> impl Iterator<Item = &RequestRecord> {
        self.requests
            .iter()
            .filter(|request| request.error.is_none())
    }

    /// The highest number of requests that ran at the same moment, from their start to their last token.
    fn max_concurrent_requests(&self) -> usize {
        let times = self.completed().flat_map(|request| {
            let end = request.start + request.latency;
            [(request.start, 1), (end, -1)]
        });
        // At equal times, ends come before starts.
        let mut times: Vec<(Duration, isize)> = times.collect();
        times.sort_unstable();
        let running = times.iter().scan(0, |running, (_, change)| {
            *running += change;
            Some(*running)
        });
        running.max().unwrap_or(0) as usize
    }

    /// The highest number of tokens in one second. Seconds are counted from the start of the first request.
    fn max_output_tokens_per_s(&self) -> usize {
        let mut per_second = BTreeMap::new();
        let first = self.completed().map(|request| request.start).min();
        for request in self.completed() {
            let Some(ttft) = request.ttft else { continue };
            let mut at = request.start - first.unwrap_or_default() + ttft;
            *per_second.entry(at.as_secs()).or_insert(0) += 1;
            for &itl in &request.itls {
                at += itl;
                *per_second.entry(at.as_secs()).or_insert(0) += 1;
            }
        }
        per_second.into_values().max().unwrap_or(0)
    }

    fn per_second(&self, count: f64) -> f64 {
        let seconds = self.duration.as_secs_f64();
        if seconds > 0.0 { count / seconds } else { 0.0 }
    }

    pub(crate) fn metrics(&self) -> Vec<(&'static str, &'static str, &Summary)> {
        let phases = [
            ("lag", "Sent later than planned", self.lag_ms.as_ref()),
            ("submit", "Submission", self.submit_ms.as_ref()),
            ("queue", "Queue wait", self.queue_ms.as_ref()),
            (
                "prefill",
                "Prefill to first token",
                self.prefill_ms.as_ref(),
            ),
            ("ttft", "Time to first token", Some(&self.ttft_ms)),
            ("tpot", "Time per output token", Some(&self.tpot_ms)),
            ("itl", "Inter-token latency", Some(&self.itl_ms)),
            ("e2el", "End-to-end latency", Some(&self.e2el_ms)),
        ];
        let known = phases.into_iter();
        known
            .filter_map(|(key, name, summary)| Some((key, name, summary?)))
            .collect()
    }

    fn percents(&self) -> impl Iterator<Item = f64> {
        let others = self.head.percentiles.iter().copied();
        let others = others.filter(|percent| ![50.0, 95.0, 99.0].contains(percent));
        [95.0, 99.0].into_iter().chain(others)
    }

    /// The report as JSON. With `detailed` it includes the numbers of every request, in seconds.
    pub fn to_json(&self, detailed: bool) -> Value {
        let mut json = json!({
            "backend": self.head.backend,
            "model_id": self.head.model,
            "num_prompts": self.requests.len(),
            "request_rate": self.head.request_rate.map_or_else(|| "inf".into(), Value::from),
            "burstiness": self.head.burstiness,
            "max_concurrency": self.head.max_concurrency,
            "max_tokens": self.head.max_tokens,
            "ignore_eos": self.head.ignore_eos,
            "base_url": self.head.base_url,
            "ended_early": self.num_ended_early(),
            "duration": self.duration.as_secs_f64(),
            "completed": self.num_completed,
            "failed": self.num_failed,
            "request_goodput": self.num_good.map(|good| self.per_second(good as f64)),
            "total_input_tokens": self.total_input_tokens,
            "total_output_tokens": self.total_output_tokens,
            "request_throughput": self.request_throughput(),
            "output_throughput": self.output_throughput(),
            "total_token_throughput": self.total_token_throughput(),
            "max_output_tokens_per_s": self.max_output_tokens_per_s(),
            "max_concurrent_requests": self.max_concurrent_requests(),
        });
        for (key, value) in self
            .head
            .provenance
            .to_json()
            .as_object()
            .into_iter()
            .flatten()
        {
            json[key] = value.clone();
        }
        if let Some(max_passed_over) = self.max_passed_over {
            json["max_passed_over"] = max_passed_over.into();
        }
        for phase in &self.server_phases {
            let key = phase.key;
            let median = phase.percentiles_ms.map(|[median, ..]| median);
            let kinds = ["mean", "median", "p95", "p99", "p50"];
            for (kind, value) in kinds.into_iter().zip(phase.values().chain(median)) {
                json[format!("{kind}_{key}_ms")] = value.into();
            }
        }
        for (key, _, summary) in self.metrics() {
            for (kind, value) in [
                ("mean", summary.mean),
                ("median", summary.median),
                ("std", summary.std),
            ] {
                json[format!("{kind}_{key}_ms")] = value.into();
            }
            for percent in iter::once(50.0).chain(self.percents()) {
                json[format!("p{percent}_{key}_ms")] = summary.percentile(percent).into();
            }
        }
        if detailed && let Some(json) = json.as_object_mut() {
            self.add_details(json);
        }
        json
    }

    fn add_details(&self, json: &mut Map<String, Value>) {
        let mut add = |key: &str, value: &dyn Fn(&RequestRecord) -> Value| {
            json.insert(key.to_owned(), self.requests.iter().map(value).collect());
        };
        add("input_lens", &|request| request.num_input_tokens.into());
        add("output_lens", &|request| request.num_output_tokens.into());
        add("start_times", &|request| request.start.as_secs_f64().into());
        add("ttfts", &|request| {
            request.ttft.map(|ttft| ttft.as_secs_f64()).into()
        });
        if self.queue_ms.is_some() {
            add("queue_times", &|request| {
                request.queue.map(|queue| queue.as_secs_f64()).into()
            });
        }
        add("itls", &|request| {
            request.itls.iter().map(Duration::as_secs_f64).collect()
        });
        add("e2els", &|request| request.latency.as_secs_f64().into());
        add("errors", &|request| {
            request.error.as_deref().unwrap_or_default().into()
        });
        if let Some(timeline) = &self.timeline {
            json.insert("timeline".to_owned(), timeline.to_json());
        }
    }
}

/// Formats the report as a table.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let concurrency = match self.head.max_concurrency {
            Some(max_concurrency) => format!("{max_concurrency} at a time"),
            None => "any number at a time".into(),
        };
        writeln!(
            f,
            "{} requests to {}, {concurrency}",
            self.requests.len(),
            self.head.model
        )?;
        writeln!(f)?;
        for (name, value) in [
            ("Completed requests", self.num_completed as f64),
            ("Failed requests", self.num_failed as f64),
            ("Input tokens", self.total_input_tokens as f64),
            ("Output tokens", self.total_output_tokens as f64),
        ] {
            writeln!(f, "{name:<28}{value:>12}")?;
        }
        for (name, value) in [
            ("Duration (s)", self.duration.as_secs_f64()),
            ("Requests/s", self.request_throughput()),
            ("Output tokens/s", self.output_throughput()),
            ("Total tokens/s", self.total_token_throughput()),
        ] {
            writeln!(f, "{name:<28}{value:>12.2}")?;
        }
        if let Some(num_good) = self.num_good {
            writeln!(f, "{:<28}{num_good:>12}", "Good requests")?;
            writeln!(
                f,
                "{:<28}{:>12.2}",
                "Good requests/s",
                self.per_second(num_good as f64)
            )?;
        }
        if let Some(max_passed_over) = self.max_passed_over {
            writeln!(f, "{:<28}{max_passed_over:>12}", "Passed over at most")?;
        }
        writeln!(f)?;
        let header = self.percents().map(|percent| format!("p{percent}"));
        let header: String = header.map(|name| format!("{name:>11}")).collect();
        writeln!(
            f,
            "{:<38}{:>11}{:>11}{header}",
            "Milliseconds", "mean", "median"
        )?;
        for (key, name, summary) in self.metrics() {
            let percentiles = self.percents().map(|percent| summary.percentile(percent));
            let values = [summary.mean, summary.median]
                .into_iter()
                .chain(percentiles);
            let values: String = values.map(|value| format!("{value:>11.2}")).collect();
            writeln!(
                f,
                "{:<38}{values}",
                format!("{name} ({})", key.to_uppercase())
            )?;
        }
        for phase in &self.server_phases {
            let values = phase.values().map(|value| format!("{value:>11.2}"));
            let values = values.collect::<String>();
            writeln!(
                f,
                "{:<38}{values}",
                format!("{}, by the server", phase.name)
            )?;
        }
        self.write_errors(f)?;
        write_warnings(f, self.to_json(false))
    }
}

/// Writes the reasons to trust the results less, if there are any.
pub(crate) fn write_warnings(f: &mut fmt::Formatter<'_>, json: Value) -> fmt::Result {
    for warning in ResultFile::new(String::new(), json).warnings() {
        writeln!(f, "\n{warning}")?;
    }
    Ok(())
}

impl Report {
    /// Lists each kind of error once, the most frequent first.
    pub(crate) fn write_errors(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MAX_ERRORS: usize = 5;
        let mut counts = BTreeMap::new();
        for error in self
            .requests
            .iter()
            .filter_map(|request| request.error.as_deref())
        {
            *counts.entry(error).or_insert(0) += 1;
        }
        if counts.is_empty() {
            return Ok(());
        }
        let mut counts: Vec<(&str, usize)> = counts.into_iter().collect();
        counts.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        writeln!(f, "\nErrors")?;
        for (error, count) in counts.iter().take(MAX_ERRORS) {
            writeln!(f, "{count:>6} x {error}")?;
        }
        match counts.len().checked_sub(MAX_ERRORS) {
            Some(more @ 1..) => writeln!(f, "       and {more} other kinds"),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn asked_percentiles_follow_the_usual_ones() {
        let head = ReportHead {
            percentiles: vec![90.0, 99.0, 99.9],
            ..ReportHead::default()
        };
        let request = |ttft_ms| RequestRecord {
            ttft: Some(Duration::from_millis(ttft_ms)),
            ..RequestRecord::default()
        };
        let requests = vec![request(10), request(20)];
        let report = Report::new(head, Duration::from_secs(1), requests);
        let json = report.to_json(false);
        let expected = [
            ("p50", 15.0),
            ("p90", 19.0),
            ("p99", 19.9),
            ("p99.9", 19.99),
        ];
        for (kind, expected) in expected {
            let value = json[format!("{kind}_ttft_ms")].as_f64();
            assert!(
                (value.unwrap() - expected).abs() < 1e-9,
                "{kind}: {value:?}"
            );
        }
        let table = report.to_string();
        let words = |start: &str| -> Vec<&str> {
            let line = table.lines().find(|line| line.starts_with(start));
            line.expect(start).split_whitespace().rev().collect()
        };
        let header = ["p99.9", "p90", "p99", "p95", "median", "mean"];
        assert_eq!(words("Milliseconds")[..6], header);
        let times = ["19.99", "19.00", "19.90", "19.50", "15.00", "15.00"];
        assert_eq!(words("Time to first token")[..6], times);
    }

    #[test]
    fn peaks_are_counted() {
        let ms = Duration::from_millis;
        // Two requests run at a time: the third starts when the first has ended.
        let request = |start, ttft, itl| RequestRecord {
            start: ms(start),
            ttft: Some(ms(ttft)),
            itls: vec![ms(itl)],
            latency: ms(ttft + itl),
            ..RequestRecord::default()
        };
        let failed = RequestRecord {
            error: Some("no".into()),
            ..request(600, 100, 100)
        };
        let requests = vec![
            request(500, 100, 1000),
            request(600, 500, 300),
            request(1600, 100, 100),
            failed,
        ];
        let report = Report::new(ReportHead::default(), ms(1800), requests);
        assert_eq!(report.max_concurrent_requests(), 2);
        // The tokens come 0.1, 1.1, 0.6, 0.9, 1.2 and 1.3 s after the first start.
        assert_eq!(report.max_output_tokens_per_s(), 3);
        let empty = Report::new(ReportHead::default(), ms(1), Vec::new());
        assert_eq!(empty.max_concurrent_requests(), 0);
        assert_eq!(empty.max_output_tokens_per_s(), 0);
    }
}
