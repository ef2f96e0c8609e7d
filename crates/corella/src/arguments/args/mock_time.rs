//! The time that the steps of the mock take, in microseconds.

use clap::Args;
use corella_model::CostModel;

#[derive(Args)]
#[command(next_help_heading = "Device")]
pub struct MockTimeArgs {
    /// With --device mock: time of every step, in microseconds [default: 0]
    #[arg(long, value_name = "US", value_parser = parse_micros)]
    pub mock_step_us: Option<f64>,
    /// With --device mock: further time for each token of a step, in microseconds [default: 0]
    #[arg(long, value_name = "US", value_parser = parse_micros)]
    pub mock_token_us: Option<f64>,
    /// With --device mock: further time for each request that decodes in a step, instead of that for its token
    #[arg(long, value_name = "US", value_parser = parse_micros)]
    pub mock_decode_us: Option<f64>,
}

impl MockTimeArgs {
    /// `None` if steps take no time.
    pub fn cost(&self) -> Option<CostModel> {
        let given = [self.mock_step_us, self.mock_token_us, self.mock_decode_us];
        given.iter().any(Option::is_some).then(|| {
            let per_token_us = self.mock_token_us.unwrap_or(0.0);
            CostModel {
                per_step_us: self.mock_step_us.unwrap_or(0.0),
                per_token_us,
                per_decode_us: self.mock_decode_us.unwrap_or(per_token_us),
                per_attended_kilotoken_us: 0.0,
            }
        })
    }
}

/// Parses a time of at most one minute. A longer step would be a mistake, and `inf` is no `Duration`.
fn parse_micros(text: &str) -> Result<f64, String> {
    const MOST: f64 = 60e6;
    match text.trim().parse::<f64>() {
        Ok(micros) if (0.0..=MOST).contains(&micros) => Ok(micros),
        _ => Err(format!("must be a number from 0 to {MOST}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_decode_costs_a_token_unless_it_has_a_time_of_its_own() {
        let cost = |step, token, decode| {
            let args = MockTimeArgs {
                mock_step_us: step,
                mock_token_us: token,
                mock_decode_us: decode,
            };
            args.cost()
                .map(|cost| [cost.per_step_us, cost.per_token_us, cost.per_decode_us])
        };
        assert_eq!(cost(None, None, None), None);
        assert_eq!(cost(Some(9.0), None, None), Some([9.0, 0.0, 0.0]));
        assert_eq!(cost(None, Some(2.5), None), Some([0.0, 2.5, 2.5]));
        assert_eq!(cost(Some(9.0), Some(2.5), Some(7.0)), Some([9.0, 2.5, 7.0]));
        assert_eq!(cost(None, None, Some(7.0)), Some([0.0, 0.0, 7.0]));
    }

    #[test]
    fn times_have_durations() {
        assert_eq!(parse_micros("0.5"), Ok(0.5));
        for text in ["-1", "inf", "NaN", "1e99", "1 ms"] {
            assert!(parse_micros(text).is_err(), "{text}");
        }
    }
}
