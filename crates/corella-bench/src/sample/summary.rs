//! Mean, standard deviation and percentiles, as NumPy computes them.

/// A summary of some values. Without values, all fields are 0, so that a report is always valid JSON.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Summary {
    pub mean: f64,
    pub median: f64,
    /// Population standard deviation.
    pub std: f64,
    pub p99: f64,
    pub p999: f64,
    pub max: f64,
    sorted: Vec<f64>,
}

impl Summary {
    pub fn new(mut values: Vec<f64>) -> Self {
        if values.is_empty() {
            return Self::default();
        }
        values.sort_by(f64::total_cmp);
        let num_values = values.len() as f64;
        let mean = values.iter().sum::<f64>() / num_values;
        let variance = values
            .iter()
            .map(|value| (value - mean).powi(2))
            .sum::<f64>()
            / num_values;
        Self {
            mean,
            median: percentile(&values, 50.0),
            std: variance.sqrt(),
            p99: percentile(&values, 99.0),
            p999: percentile(&values, 99.9),
            max: values[values.len() - 1],
            sorted: values,
        }
    }

    /// Any percentile of the values.
    pub fn percentile(&self, percent: f64) -> f64 {
        match self.sorted.is_empty() {
            true => 0.0,
            false => percentile(&self.sorted, percent),
        }
    }
}

/// A percentile of sorted values, interpolated linearly between the two nearest ranks.
fn percentile(sorted: &[f64], percent: f64) -> f64 {
    let rank = percent / 100.0 * (sorted.len() - 1) as f64;
    let below = sorted[rank.floor() as usize];
    let above = sorted[rank.ceil() as usize];
    below + (above - below) * rank.fract()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The expected numbers come from NumPy, for `v = [9, 1, 4, 7, 30]`: mean, median, std, and the
    /// percentiles 95, 99 and 99.9.
    #[test]
    fn agrees_with_numpy() {
        let summary = Summary::new(vec![9.0, 1.0, 4.0, 7.0, 30.0]);
        let expected = [10.2, 7.0, 10.264_501_936_285, 25.8, 29.16, 29.916, 30.0];
        let got = [
            summary.mean,
            summary.median,
            summary.std,
            summary.percentile(95.0),
            summary.p99,
            summary.p999,
            summary.max,
        ];
        for (got, expected) in got.iter().zip(expected) {
            assert!((got - expected).abs() < 1e-9, "{got} instead of {expected}");
        }
        assert_eq!(Summary::new(vec![2.0, 4.0]).median, 3.0);
        assert_eq!(Summary::new(vec![5.0]).p99, 5.0);
        // 0.9 of the way from the first value to the last is 3.6 steps: 9 + 0.6 · 21.
        assert!((summary.percentile(90.0) - 21.6).abs() < 1e-9);
        assert_eq!(Summary::default().percentile(90.0), 0.0);
        assert_eq!(Summary::new(Vec::new()), Summary::default());
    }
}
