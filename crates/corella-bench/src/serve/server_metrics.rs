//! The server's own metrics of a run: phases of requests that clients cannot see.

use crate::report::{Report, ServerMean};
use crate::timeline::metric;

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

/// Adds the mean of each phase, from the Prometheus metrics before and after the run. Requests of
/// other clients during the run are included. Missing metrics are left out.
pub(super) fn add_server_metrics(report: &mut Report, before: &str, after: &str) {
    let means = PHASES.iter().filter_map(|&(key, histogram, name)| {
        let growth = |kind| {
            let name = format!("{histogram}_{kind}");
            Some(metric(after, &name)? - metric(before, &name).unwrap_or(0.0))
        };
        let count = growth("count").filter(|count| *count > 0.0)?;
        let mean_ms = growth("sum")? * 1e3 / count;
        Some(ServerMean { key, name, mean_ms })
    });
    report.server_means = means.collect();
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
        let [queue] = &report.server_means[..] else {
            panic!("nothing was prefilled: {:?}", report.server_means);
        };
        assert_eq!((queue.key, queue.mean_ms), ("queue", 125.0));
        assert_eq!(report.max_passed_over, Some(4));
        assert_eq!(report.to_json(false)["mean_queue_ms"], 125.0);
        assert!(report.to_string().contains("Queue wait, by the server"));

        // Metrics may be missing before a server's first run, or altogether.
        add_server_metrics(&mut report, "", &before);
        assert_eq!(report.server_means[0].mean_ms, 500.0);
        add_server_metrics(&mut report, "", "");
        assert_eq!(
            (report.server_means.len(), report.max_passed_over),
            (0, None)
        );
    }
}
