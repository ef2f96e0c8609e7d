//! The results of a benchmark as JSON, from this program or `vllm bench serve`. Both have the same keys.

use std::path::Path;

use serde_json::Value;

use crate::BenchError;

/// The latency metrics with their keys, in the order of a request's phases. A metric of the server and a metric of the
/// clients have the same key if they measure the same.
pub const LATENCIES: [(&str, &str); 9] = [
    ("lag", "Sent later than planned"),
    ("submit", "Submission"),
    ("tokenize", "Reading and tokenising"),
    ("queue", "Queue wait"),
    ("prefill", "Prefill to first token"),
    ("ttft", "Time to first token"),
    ("tpot", "Time per output token"),
    ("itl", "Inter-token latency"),
    ("e2el", "End-to-end latency"),
];

/// Results, with the name that a report gives them.
#[derive(Debug, Clone)]
pub struct ResultFile {
    pub name: String,
    /// The results of all repeats together.
    whole: Value,
}

impl ResultFile {
    pub fn new(name: String, whole: Value) -> Self {
        Self { name, whole }
    }

    /// Reads a file, whose name becomes the name of the results.
    pub fn read(path: &Path) -> Result<Self, BenchError> {
        let error = |reason: String| BenchError::File(format!("{}: {reason}", path.display()));
        let text = std::fs::read_to_string(path).map_err(|cause| error(cause.to_string()))?;
        let whole: Value = serde_json::from_str(&text)
            .map_err(|cause| error(format!("this is no JSON: {cause}")))?;
        if whole["output_throughput"].is_null() {
            let advice = "`corella bench serve --output-json` and `vllm bench serve --save-result` write such files";
            return Err(error(format!(
                "these are no results of a benchmark, because `output_throughput` is missing; {advice}"
            )));
        }
        let name = path.file_stem().unwrap_or_default();
        Ok(Self::new(name.to_string_lossy().into_owned(), whole))
    }

    /// Returns a number of the results. With several repeats, it is the median.
    pub fn number(&self, key: &str) -> Option<f64> {
        self.whole[key].as_f64()
    }

    /// Returns a text, or a number as text.
    pub fn text(&self, key: &str) -> Option<String> {
        match &self.whole[key] {
            Value::String(text) => Some(text.clone()),
            Value::Number(number) => Some(number.to_string()),
            Value::Bool(is_set) => Some(if *is_set { "yes" } else { "no" }.to_owned()),
            _ => None,
        }
    }

    /// The lowest and the highest value of a number over several repeats.
    pub fn spread(&self, key: &str) -> Option<(f64, f64)> {
        let spread = &self.whole["spread"][key];
        Some((spread["min"].as_f64()?, spread["max"].as_f64()?))
    }

    /// The numbers of every request of the run with the median throughput, if they were kept.
    pub fn series(&self, key: &str) -> Vec<f64> {
        numbers(&self.typical()[key])
    }

    /// The times between tokens, for each request.
    pub fn intervals(&self) -> Vec<Vec<f64>> {
        let requests = self.typical()["itls"].as_array().into_iter().flatten();
        requests.map(numbers).collect()
    }

    /// A series of the engine's state over time.
    pub fn timeline(&self, key: &str) -> Vec<f64> {
        numbers(&self.typical()["timeline"][key])
    }

    /// The run with the median throughput. Of two runs, it is the slower one.
    fn typical(&self) -> &Value {
        let Some(runs) = self.whole["runs"]
            .as_array()
            .filter(|runs| !runs.is_empty())
        else {
            return &self.whole;
        };
        let throughput = |run: &Value| run["output_throughput"].as_f64().unwrap_or(0.0);
        let mut sorted: Vec<&Value> = runs.iter().collect();
        sorted.sort_by(|a, b| throughput(a).total_cmp(&throughput(b)));
        sorted[(sorted.len() - 1) / 2]
    }

    /// Returns the reasons to trust these results less.
    pub fn warnings(&self) -> Vec<String> {
        let count = |key| self.number(key).unwrap_or(0.0);
        let mut warnings = Vec::new();
        let (completed, ended_early) = (count("completed"), count("ended_early"));
        if ended_early > completed / 2.0 {
            warnings.push(format!(
                "{ended_early} of {completed} answers ended before max tokens, so their lengths are the model's choice \
                 and two engines or models do not do the same work; --ignore-eos makes all equally long."
            ));
        }
        if count("failed") > 0.0 {
            warnings.push(format!(
                "{} requests failed; the numbers are those of the others.",
                count("failed")
            ));
        }
        warnings
    }
}

/// Returns the numbers of a list. A missing number, for example of a failed request, becomes 0, so that all lists have
/// the same length.
fn numbers(list: &Value) -> Vec<f64> {
    let values = list.as_array().into_iter().flatten();
    values.map(|value| value.as_f64().unwrap_or(0.0)).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn of_several_runs_the_typical_one_is_shown() {
        let run = |throughput| json!({ "output_throughput": throughput, "ttfts": [throughput] });
        let whole = json!({
            "output_throughput": 2.0,
            "spread": { "output_throughput": { "min": 1.0, "max": 3.0 } },
            "runs": [run(3.0), run(1.0), run(2.0)],
        });
        let results = ResultFile::new("a".into(), whole);
        assert_eq!(results.series("ttfts"), [2.0]);
        assert_eq!(results.spread("output_throughput"), Some((1.0, 3.0)));
        let one = ResultFile::new("b".into(), json!({ "ttfts": [0.5, null] }));
        assert_eq!(one.series("ttfts"), [0.5, 0.0]);
        assert_eq!(one.spread("output_throughput"), None);
    }

    #[test]
    fn early_ends_are_warned_of_if_they_are_most() {
        let warnings = |ended_early| {
            let json = json!({ "completed": 16, "failed": 0, "ended_early": ended_early });
            ResultFile::new("a".into(), json).warnings()
        };
        assert_eq!(warnings(json!(8)).len(), 0);
        // Results of other programs say nothing about the early ends.
        assert_eq!(warnings(json!(null)).len(), 0);
        let [warning] = &warnings(json!(9))[..] else {
            panic!("one warning")
        };
        assert!(warning.starts_with("9 of 16 answers"), "{warning}");
        assert!(warning.contains("--ignore-eos"), "{warning}");
    }

    #[test]
    fn other_files_are_refused_with_the_reason() {
        let path = std::env::temp_dir().join(format!("corella-results-{}", std::process::id()));
        for (text, reason) in [
            ("{", "this is no JSON"),
            ("{\"a\": 1}", "`output_throughput`"),
        ] {
            std::fs::write(&path, text).unwrap();
            let error = ResultFile::read(&path).unwrap_err().to_string();
            assert!(
                error.contains(reason) && error.contains("corella-results"),
                "{error}"
            );
        }
        std::fs::remove_file(&path).unwrap();
    }
}
