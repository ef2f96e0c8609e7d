//! `bench compare`: the numbers of two benchmarks beside each other.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::BenchError;
use crate::report::number::number;
use crate::report::result_file::{LATENCIES, ResultFile};
use crate::report::{html_report, report_file};

#[derive(Debug, Clone)]
pub struct Comparison {
    pub results: [ResultFile; 2],
}

/// One number from both results, and the ratio of the second value to the first.
pub(crate) struct Row {
    pub name: String,
    pub values: [f64; 2],
}

impl Row {
    pub(crate) fn ratio(&self) -> Option<f64> {
        let [first, second] = self.values;
        (first > 0.0).then(|| second / first)
    }
}

/// Settings that must agree for two results to be comparable.
const SETTINGS: [(&str, &str); 9] = [
    ("model_id", "model"),
    ("backend", "backend"),
    ("num_prompts", "requests"),
    ("request_rate", "rate"),
    ("max_concurrency", "requests at a time"),
    ("max_tokens", "max tokens"),
    ("ignore_eos", "ignore_eos"),
    ("machine", "machine"),
    ("server_version", "server version"),
];

const THROUGHPUTS: [(&str, &str); 4] = [
    ("duration", "Duration (s)"),
    ("request_throughput", "Requests/s"),
    ("output_throughput", "Output tokens/s"),
    ("total_token_throughput", "Total tokens/s"),
];

impl Comparison {
    /// Compares two files, and writes a report of both to `report` if it is given.
    pub fn run(paths: [&Path; 2], report: Option<PathBuf>) -> Result<Self, BenchError> {
        let [first, second] = paths;
        let results = [ResultFile::read(first)?, ResultFile::read(second)?];
        if let Some(path) = report {
            report_file::write(&path, &html_report::write(&results))?;
        }
        Ok(Self { results })
    }

    /// Describes each setting in which the two results differ. If no setting differs, the ratios compare like with
    /// like.
    pub(crate) fn differences(results: &[ResultFile; 2]) -> Vec<String> {
        let [first, second] = results;
        let settings = SETTINGS.iter().filter_map(|(key, name)| {
            let values = [first.text(key), second.text(key)];
            let [a, b] = values.map(|value| value.unwrap_or_else(|| "none".to_owned()));
            (a != b).then(|| format!("{name}: {a} and {b}"))
        });
        settings.collect()
    }

    pub(crate) fn rows(results: &[ResultFile; 2]) -> Vec<Row> {
        let row = |key: &str, name: String| {
            let [first, second] = results;
            let values = [first.number(key)?, second.number(key)?];
            Some(Row { name, values })
        };
        let throughputs = THROUGHPUTS
            .iter()
            .filter_map(|(key, name)| row(key, (*name).into()));
        let latencies = LATENCIES
            .iter()
            .flat_map(|(key, name)| ["mean", "median", "p95", "p99"].map(|kind| (key, name, kind)));
        let latencies = latencies.filter_map(|(key, name, kind)| {
            row(&format!("{kind}_{key}_ms"), format!("{name}, {kind} (ms)"))
        });
        throughputs.chain(latencies).collect()
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [first, second] = &self.results;
        writeln!(f, "A: {}\nB: {}\n", first.name, second.name)?;
        for difference in Self::differences(&self.results) {
            writeln!(f, "they differ in {difference}")?;
        }
        for results in &self.results {
            for warning in results.warnings() {
                writeln!(f, "{}: {warning}", results.name)?;
            }
        }
        writeln!(f, "\n{:<38}{:>11}{:>11}{:>9}", "", "A", "B", "B/A")?;
        for row in Self::rows(&self.results) {
            let [a, b] = row.values.map(number);
            let ratio = row
                .ratio()
                .map_or_else(String::new, |ratio| format!("{ratio:.2}"));
            writeln!(f, "{:<38}{a:>11}{b:>11}{ratio:>9}", row.name)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn ratios_and_differences_are_told() {
        let results = |name: &str, rate: serde_json::Value, throughput: f64| {
            let json = json!({
                "model_id": "m", "request_rate": rate, "output_throughput": throughput,
                "mean_ttft_ms": 0.0, "p99_itl_ms": 12.5, "completed": 4, "failed": 1,
            });
            ResultFile::new(name.into(), json)
        };
        let results = [
            results("a", json!("inf"), 100.0),
            results("b", json!(2.0), 150.0),
        ];
        let text = Comparison { results }.to_string();
        let lines: Vec<Vec<&str>> = text
            .lines()
            .map(|line| line.split_whitespace().collect())
            .collect();
        assert!(
            lines.contains(&vec!["Output", "tokens/s", "100", "150", "1.50"]),
            "{text}"
        );
        assert!(lines.contains(&vec![
            "Inter-token",
            "latency,",
            "p99",
            "(ms)",
            "12.5",
            "12.5",
            "1.00"
        ]));
        // A value is no multiple of 0.
        assert!(lines.contains(&vec![
            "Time", "to", "first", "token,", "mean", "(ms)", "0", "0"
        ]));
        assert!(text.contains("they differ in rate: inf and 2.0"), "{text}");
        assert!(
            !text.contains("model:") && text.contains("a: 1 requests failed"),
            "{text}"
        );
    }
}
