//! The description of a count for operators. It stands beside the count, and a server shows it at `/metrics`.

use core::time::Duration;

/// A metric of the counts `S`.
pub struct Metric<S: 'static> {
    pub name: &'static str,
    pub help: &'static str,
    pub value: MetricValue<S>,
    /// Whether vLLM has a metric of the same name.
    pub is_in_vllm: bool,
}

/// The kind of a metric, and the function that reads its value.
pub enum MetricValue<S: 'static> {
    Gauge(fn(&S) -> u64),
    /// A gauge from 0 to 1, as a part and its whole.
    Share(fn(&S) -> [usize; 2]),
    Counter(fn(&S) -> u64),
    Time(fn(&S) -> Duration),
    /// A counter for each value of a label.
    Counters(&'static str, &'static [LabelCount<S>]),
}

/// A label's value, and the function that reads its count.
type LabelCount<S> = (&'static str, fn(&S) -> u64);

impl<S> Metric<S> {
    pub const fn new(name: &'static str, value: MetricValue<S>) -> Self {
        Self {
            name,
            help: "",
            value,
            is_in_vllm: false,
        }
    }

    pub const fn gauge(name: &'static str, value: fn(&S) -> u64) -> Self {
        Self::new(name, MetricValue::Gauge(value))
    }

    pub const fn counter(name: &'static str, value: fn(&S) -> u64) -> Self {
        Self::new(name, MetricValue::Counter(value))
    }

    pub const fn help(mut self, help: &'static str) -> Self {
        self.help = help;
        self
    }

    pub const fn in_vllm(mut self) -> Self {
        self.is_in_vllm = true;
        self
    }
}
