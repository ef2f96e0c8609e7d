//! Several runs of one load: medians and spreads.

use std::fmt;

use serde_json::{Map, Value, json};

use crate::Report;
use crate::report::write_warnings;
use crate::sample::summary::Summary;

/// The reports of at least one run.
#[derive(Debug, Clone)]
pub struct Repeats {
    pub runs: Vec<Report>,
}

/// The spread of one number of the reports over all runs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spread {
    pub median: f64,
    pub min: f64,
    pub max: f64,
}

impl Spread {
    /// Returns the spread of `values`, which must not be empty.
    fn new(values: Vec<f64>) -> Self {
        Self {
            min: values.iter().copied().fold(f64::INFINITY, f64::min),
            max: values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            median: Summary::new(values).median,
        }
    }
}

impl Repeats {
    /// The JSON of a single run is the report's. The JSON of several runs has the description of the first run, the
    /// medians of all numbers, their lowest and highest values in `spread`, and the JSON of each run in `runs`.
    pub fn to_json(&self, detailed: bool) -> Value {
        let mut runs: Vec<Value> = self.runs.iter().map(|run| run.to_json(detailed)).collect();
        if runs.len() == 1 {
            return runs.remove(0);
        }
        let mut whole = self.runs[0].to_json(false);
        let mut spreads = Map::new();
        for (key, value) in whole.as_object_mut().into_iter().flatten() {
            let Some(spread) = spread(&runs, key) else {
                continue;
            };
            // A count that is equal in all runs stays a whole number.
            if spread.min < spread.max {
                *value = spread.median.into();
                spreads.insert(key.clone(), json!({ "min": spread.min, "max": spread.max }));
            }
        }
        whole["repeats"] = runs.len().into();
        whole["spread"] = spreads.into();
        whole["runs"] = runs.into();
        whole
    }

    /// The spreads of the most important numbers, with the keys that the numbers have in the JSON.
    pub(crate) fn spreads(&self) -> Vec<(String, Spread)> {
        let runs: Vec<Value> = self.runs.iter().map(|run| run.to_json(false)).collect();
        let mut keys = [
            "completed",
            "duration",
            "request_throughput",
            "request_goodput",
            "output_throughput",
            "total_token_throughput",
        ]
        .map(str::to_owned)
        .to_vec();
        for (metric, ..) in self.runs[0].metrics() {
            keys.extend(["mean", "median", "p99"].map(|kind| format!("{kind}_{metric}_ms")));
        }
        for phase in &self.runs[0].server_phases {
            keys.extend(["mean", "median", "p99"].map(|kind| format!("{kind}_{}_ms", phase.key)));
        }
        let spreads = keys.into_iter().filter_map(|key| {
            let spread = spread(&runs, &key)?;
            Some((key, spread))
        });
        spreads.collect()
    }
}

/// Returns the spread of a number, or `None` if a run lacks the number.
fn spread(runs: &[Value], key: &str) -> Option<Spread> {
    let values: Option<Vec<f64>> = runs.iter().map(|run| run[key].as_f64()).collect();
    values.map(Spread::new)
}

/// Formats one run as its table, and several runs as the spreads of the most important numbers.
impl fmt::Display for Repeats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let [run] = &self.runs[..] {
            return run.fmt(f);
        }
        writeln!(
            f,
            "{} runs of {} requests to {}\n",
            self.runs.len(),
            self.runs[0].requests.len(),
            self.runs[0].head.model
        )?;
        writeln!(
            f,
            "{:<28}{:>12}{:>12}{:>12}",
            "", "median", "lowest", "highest"
        )?;
        for (key, spread) in self.spreads() {
            let Spread { median, min, max } = spread;
            writeln!(f, "{key:<28}{median:>12.2}{min:>12.2}{max:>12.2}")?;
        }
        for (index, run) in self.runs.iter().enumerate() {
            if run.num_failed > 0 {
                write!(f, "\nRun {}", index + 1)?;
                run.write_errors(f)?;
            }
        }
        write_warnings(f, self.to_json(false))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{ReportHead, RequestRecord, ResultFile};

    /// A run of one request with ten tokens.
    fn run(seconds: u64, ttft_ms: u64) -> Report {
        let head = ReportHead {
            model: "parrot".into(),
            ..ReportHead::default()
        };
        let request = RequestRecord {
            num_output_tokens: 10,
            ttft: Some(Duration::from_millis(ttft_ms)),
            latency: Duration::from_secs(seconds),
            ..RequestRecord::default()
        };
        Report::new(head, Duration::from_secs(seconds), vec![request])
    }

    #[test]
    fn medians_and_spread_are_those_of_the_runs() {
        let repeats = Repeats {
            runs: vec![run(10, 70), run(1, 20), run(2, 900)],
        };
        let json = repeats.to_json(true);
        // The throughputs are 1, 10 and 5 tokens/s.
        let typical = ResultFile::new(String::new(), json.clone());
        assert_eq!(typical.series("ttfts"), [0.9]);
        assert_eq!(json["output_throughput"], 5.0);
        assert_eq!(
            json["spread"]["output_throughput"],
            json!({"min": 1.0, "max": 10.0})
        );
        assert_eq!(
            json["mean_ttft_ms"], 70.0,
            "the median of 70, 20 and 900 ms"
        );
        assert_eq!(json["completed"], 1);
        assert_eq!(json["spread"].get("completed"), None);
        assert_eq!(
            (&json["model_id"], &json["repeats"]),
            (&json!("parrot"), &json!(3))
        );
        assert_eq!(json["max_concurrency"], Value::Null);
        assert_eq!(json.get("ttfts"), None);
        let ttfts = |run: usize| json["runs"][run]["ttfts"][0].as_f64().unwrap();
        assert_eq!([ttfts(0), ttfts(1), ttfts(2)], [0.07, 0.02, 0.9]);
        let table = repeats.to_string();
        let line = |key: &str| {
            let line = table.lines().find(|line| line.starts_with(key)).unwrap();
            line.split_whitespace()
                .skip(1)
                .collect::<Vec<_>>()
                .join(" ")
        };
        assert_eq!(line("output_throughput"), "5.00 1.00 10.00");
        assert_eq!(line("mean_ttft_ms"), "70.00 20.00 900.00");
    }

    #[test]
    fn one_run_is_itself() {
        let repeats = Repeats {
            runs: vec![run(1, 20)],
        };
        assert_eq!(repeats.to_json(true), repeats.runs[0].to_json(true));
        assert_eq!(repeats.to_string(), repeats.runs[0].to_string());
    }

    #[test]
    fn the_middle_of_two_is_between_them() {
        let repeats = Repeats {
            runs: vec![run(1, 20), run(2, 40)],
        };
        assert_eq!(repeats.to_json(false)["mean_ttft_ms"], 30.0);
        let typical = ResultFile::new(String::new(), repeats.to_json(true));
        assert_eq!(typical.series("ttfts"), [0.04]);
    }
}
