//! A histogram of Prometheus metrics, as it grew during a run.

use std::collections::BTreeMap;

use crate::sample::timeline::{labelled, metric};

/// The observations made during a run.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Histogram {
    pub count: f64,
    pub sum: f64,
    /// The upper bound of each bucket, with the number of observations up to the bound. Empty if the server gives no
    /// buckets.
    buckets: Vec<(f64, f64)>,
}

impl Histogram {
    /// Returns the observations between two texts of metrics, or `None` if there were none.
    pub fn grown(name: &str, before: &str, after: &str) -> Option<Self> {
        let growth = |kind: &str| {
            let name = format!("{name}_{kind}");
            Some(metric(after, &name)? - metric(before, &name).unwrap_or(0.0))
        };
        let count = growth("count").filter(|count| *count > 0.0)?;
        let earlier = buckets(before, name);
        let gained = buckets(after, name)
            .into_iter()
            .map(|(bits, (bound, sum))| {
                let before = earlier.get(&bits).map_or(0.0, |(_, sum)| *sum);
                (bound, sum - before)
            });
        Some(Self {
            count,
            sum: growth("sum")?,
            buckets: gained.collect(),
        })
    }

    /// Estimates a percentile like PromQL's `histogram_quantile`: linearly within a bucket. Beyond the highest finite
    /// bound, it is that bound.
    pub fn percentile(&self, percent: f64) -> Option<f64> {
        let rank = self.count * percent / 100.0;
        let (mut low, mut num_below) = (0.0, 0.0);
        for &(bound, num_up_to) in &self.buckets {
            if num_up_to >= rank && num_up_to > num_below {
                return Some(match bound.is_finite() {
                    true => low + (bound - low) * (rank - num_below) / (num_up_to - num_below),
                    false => low,
                });
            }
            (low, num_below) = (bound, num_up_to);
        }
        None
    }
}

/// The counts of the buckets, summed over all labels other than the bound. The keys put the bounds in order.
fn buckets(text: &str, name: &str) -> BTreeMap<u64, (f64, f64)> {
    let mut sums = BTreeMap::new();
    for (labels, value) in labelled(text, &format!("{name}_bucket")) {
        let bound = labels.split_once("le=\"").and_then(|(_, rest)| {
            let (bound, _) = rest.split_once('"')?;
            bound.parse::<f64>().ok()
        });
        if let Some(bound) = bound.filter(|bound| *bound >= 0.0) {
            // The bits of numbers that are not negative have the order of the numbers.
            sums.entry(bound.to_bits()).or_insert((bound, 0.0)).1 += value;
        }
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The counts up to 0.01, 0.05, 1 and beyond, of each of two models.
    fn page(counts: [[u32; 4]; 2]) -> String {
        let mut text = String::new();
        for (model, counts) in counts.iter().enumerate() {
            for (bound, count) in ["0.01", "0.05", "1.0", "+Inf"].iter().zip(counts) {
                text += &format!("wait_bucket{{model=\"{model}\",le=\"{bound}\"}} {count}\n");
            }
            text += &format!("wait_count{{model=\"{model}\"}} {}\n", counts[3]);
            text += &format!("wait_sum{{model=\"{model}\"}} {}\n", counts[3]);
        }
        text
    }

    #[test]
    fn percentiles_are_those_of_the_run() {
        let before = page([[5, 5, 5, 5], [0, 7, 7, 7]]);
        // 10 observations up to 0.01, 20 up to 0.05, 60 up to 1 and 10 beyond.
        let after = page([[10, 25, 55, 65], [5, 17, 47, 47]]);
        let grown = Histogram::grown("wait", &before, &after).unwrap();
        assert_eq!((grown.count, grown.sum), (100.0, 100.0));
        for (percent, expected) in [
            (5.0, 0.005),
            (10.0, 0.01),
            (20.0, 0.03),
            (60.0, 0.525),
            (90.0, 1.0),
            (99.0, 1.0),
        ] {
            let found = grown.percentile(percent).unwrap();
            assert!((found - expected).abs() < 1e-9, "{percent}: {found}");
        }
    }

    #[test]
    fn a_server_may_have_no_buckets_or_no_requests() {
        let text = "wait_count 2\nwait_sum 3\n";
        let grown = Histogram::grown("wait", "", text).unwrap();
        assert_eq!((grown.sum, grown.percentile(50.0)), (3.0, None));
        assert_eq!(Histogram::grown("wait", text, text), None);
        assert_eq!(Histogram::grown("other", "", text), None);
    }
}
