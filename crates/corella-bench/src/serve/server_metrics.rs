//! The server's own metrics of a run: phases of requests that clients cannot see.

use super::histogram::Histogram;
use crate::report::{Report, ServerPhase};
use crate::sample::timeline::metric;

/// Each phase's key in the report, its Prometheus histogram, and its display name. Histograms
/// without the `corella_` prefix use vLLM's metric names.
const PHASES: [(&str, &str, &str); 3] = [
    (
        "tokenize",
        "corella_request_tokenize_time_seconds",
        "Reading and tokenising",
    ),
    ("queue", "vllm:request_queue_time_seconds", "Queue wait"),
    (
        "prefill",
        "vllm:request_prefill_time_seconds",
        "Prefill to first token",
    ),
];

/// Adds the mean and the percentiles of each phase, from the Prometheus metrics before and after the run. They include
/// requests of other clients. A phase without metrics is left out.
pub(super) fn add_server_metrics(report: &mut Report, before: &str, after: &str) {
    let phases = PHASES.iter().filter_map(|&(key, histogram, name)| {
        let grown = Histogram::grown(histogram, before, after)?;
        let percentile_ms = |percent| Some(grown.percentile(percent)? * 1e3);
        let percentiles = || {
            Some([
                percentile_ms(50.0)?,
                percentile_ms(95.0)?,
                percentile_ms(99.0)?,
            ])
        };
        Some(ServerPhase {
            key,
            name,
            mean_ms: grown.sum * 1e3 / grown.count,
            percentiles_ms: percentiles(),
        })
    });
    report.server_phases = phases.collect();
    report.max_passed_over = metric(after, "corella_max_passed_over").map(|times| times as u32);
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::ReportHead;

    #[test]
    fn means_are_those_of_the_run() {
        let mut report = Report::new(ReportHead::default(), Duration::from_secs(1), Vec::new());
        let page = |count: u32, sum: f64, passed_over: &str| {
            format!(
                "vllm:request_queue_time_seconds_count{{engine=\"0\"}} {count}\n\
                 vllm:request_queue_time_seconds_sum{{engine=\"0\"}} {sum}\n\
                 vllm:request_prefill_time_seconds_count 3\n\
                 vllm:request_prefill_time_seconds_sum 7.5\n{passed_over}"
            )
        };
        let (before, after) = (
            page(2, 1.0, ""),
            page(6, 1.5, "corella_max_passed_over 4\n"),
        );
        add_server_metrics(&mut report, &before, &after);
        let [queue] = &report.server_phases[..] else {
            panic!("nothing was prefilled: {:?}", report.server_phases);
        };
        assert_eq!((queue.key, queue.mean_ms), ("queue", 125.0));
        assert_eq!(report.max_passed_over, Some(4));
        assert_eq!(report.to_json(false)["mean_queue_ms"], 125.0);
        assert_eq!(queue.percentiles_ms, None);
        assert!(report.to_string().contains("Queue wait, by the server"));

        let buckets = |counts: [u32; 3]| {
            let bounds = ["0.1", "0.2", "+Inf"].iter().zip(counts);
            let lines = bounds.map(|(bound, count)| {
                format!("vllm:request_queue_time_seconds_bucket{{le=\"{bound}\"}} {count}\n")
            });
            lines.collect::<String>()
        };
        let (with_before, with_after) = (
            format!("{}{before}", buckets([2, 2, 2])),
            format!("{}{after}", buckets([4, 6, 6])),
        );
        add_server_metrics(&mut report, &with_before, &with_after);
        let json = report.to_json(false);
        let queue = ["mean", "p50", "median", "p95", "p99"].map(|kind| {
            let value = json[format!("{kind}_queue_ms")].as_f64();
            value.unwrap().round()
        });
        assert_eq!(queue, [125.0, 100.0, 100.0, 190.0, 198.0]);
        let table = report.to_string();
        let line = table
            .lines()
            .find(|line| line.starts_with("Queue wait, by the server"));
        let words: Vec<_> = line.unwrap().split_whitespace().skip(5).collect();
        assert_eq!(words, ["125.00", "100.00", "190.00", "198.00"]);

        // A server may have no metrics before its first request, or none at all.
        add_server_metrics(&mut report, "", &before);
        assert_eq!(report.server_phases[0].mean_ms, 500.0);
        add_server_metrics(&mut report, "", "");
        assert_eq!(
            (report.server_phases.len(), report.max_passed_over),
            (0, None)
        );
    }
}
