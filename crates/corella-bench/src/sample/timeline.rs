//! The state of the engine over time, sampled at equal intervals during a run.

use std::time::Duration;

use serde_json::{Value, json};

/// The limit of moments. When it is exceeded, every other moment is dropped and the interval doubles.
const MAX_MOMENTS: usize = 2000;

/// The state of an engine at one moment, and its counters since it started.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Moment {
    pub at: Duration,
    pub num_running: f64,
    pub num_waiting: f64,
    /// The share of KV pages in use, from 0 to 1.
    pub kv_usage: f64,
    pub num_prefilled: f64,
    pub num_generated: f64,
}

#[derive(Debug, Clone)]
pub struct Timeline {
    pub interval: Duration,
    pub moments: Vec<Moment>,
}

impl Timeline {
    pub fn new(interval: Duration) -> Self {
        Self {
            interval,
            moments: Vec::new(),
        }
    }

    pub fn push(&mut self, moment: Moment) {
        if self.moments.len() == MAX_MOMENTS {
            let mut is_kept = false;
            self.moments.retain(|_| {
                is_kept = !is_kept;
                is_kept
            });
            self.interval *= 2;
        }
        self.moments.push(moment);
    }

    /// The moments as parallel lists, with times in seconds.
    pub(crate) fn to_json(&self) -> Value {
        let list = |value: fn(&Moment) -> f64| self.moments.iter().map(value).collect::<Vec<_>>();
        json!({
            "at": list(|moment| moment.at.as_secs_f64()),
            "running": list(|moment| moment.num_running),
            "waiting": list(|moment| moment.num_waiting),
            "kv_usage": list(|moment| moment.kv_usage),
            "prefilled": list(|moment| moment.num_prefilled),
            "generated": list(|moment| moment.num_generated),
        })
    }
}

/// Reads a moment from Prometheus metrics with vLLM's names. Returns `None` without the counts of running and waiting
/// requests. Other missing metrics count as 0.
pub fn parse_metrics(text: &str, at: Duration) -> Option<Moment> {
    let value = |name| metric(text, name);
    Some(Moment {
        at,
        num_running: value("vllm:num_requests_running")?,
        num_waiting: value("vllm:num_requests_waiting")?,
        kv_usage: value("vllm:kv_cache_usage_perc").unwrap_or(0.0),
        num_prefilled: value("vllm:prompt_tokens_total").unwrap_or(0.0),
        num_generated: value("vllm:generation_tokens_total").unwrap_or(0.0),
    })
}

/// The value of a metric, summed over all label values. `None` if the metric is missing.
pub fn metric(text: &str, name: &str) -> Option<f64> {
    let values = labelled(text, name).map(|(_, value)| value);
    values.reduce(|sum, value| sum + value)
}

/// The values of a metric, each with its labels as text.
pub fn labelled<'a>(text: &'a str, name: &'a str) -> impl Iterator<Item = (&'a str, f64)> {
    text.lines().filter_map(move |line| {
        let rest = line.strip_prefix(name)?;
        let (labels, rest) = match rest.strip_prefix('{') {
            Some(labelled) => labelled.split_once('}')?,
            None => ("", rest),
        };
        let value = rest.strip_prefix(' ')?.split(' ').next()?;
        Some((labels, value.parse::<f64>().ok()?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_run_is_thinned() {
        let mut timeline = Timeline::new(Duration::from_millis(5));
        for second in 0..5000 {
            timeline.push(Moment {
                at: Duration::from_secs(second),
                ..Moment::default()
            });
        }
        assert!(timeline.moments.len() <= MAX_MOMENTS);
        assert_eq!(timeline.interval, Duration::from_millis(40));
        assert!(timeline.moments.is_sorted_by_key(|moment| moment.at));
        assert_eq!(timeline.moments[0].at, Duration::ZERO);
    }

    #[test]
    fn metrics_are_read_by_name() {
        let text = "# HELP vllm:num_requests_running x\n\
            vllm:num_requests_running{model_name=\"a b\"} 3\n\
            vllm:num_requests_running_max 99\n\
            vllm:num_requests_waiting{model_name=\"a b\"} 2.0\n\
            vllm:kv_cache_usage_perc 0.25\n\
            vllm:prompt_tokens_total{engine=\"0\"} 10\n\
            vllm:prompt_tokens_total{engine=\"1\"} 5\n";
        let moment = parse_metrics(text, Duration::ZERO).unwrap();
        assert_eq!((moment.num_running, moment.num_waiting), (3.0, 2.0));
        assert_eq!((moment.kv_usage, moment.num_prefilled), (0.25, 15.0));
        assert_eq!(parse_metrics("up 1\n", Duration::ZERO), None);
    }
}
