//! The expected output length of a request.

use crate::cache::page_forecast::Contribution;
use crate::request_state::RequestState;

/// 2^32 divided by the golden ratio: its multiples modulo 2^32 are spread evenly.
const GOLDEN_SHARE: u32 = 0x9e37_79b9;

/// The quantile of the `number`-th request. The quantiles of consecutive requests are spread evenly, so that the sum of
/// their expected lengths is right.
pub(crate) fn quantile_of(number: u64) -> u32 {
    (number as u32).wrapping_mul(GOLDEN_SHARE)
}

#[derive(Debug)]
pub(super) struct Expectation {
    /// The expected number of output tokens: the `quantile` of the lengths of all outputs.
    expected_output: u32,
    quantile: u32,
    /// The request's numbers in the forecast, while it runs or receives KV.
    contribution: Option<Contribution>,
}

impl Expectation {
    /// `arrival` is the number of requests that were submitted earlier.
    pub fn new(arrival: u64) -> Self {
        Self {
            expected_output: 0,
            quantile: quantile_of(arrival),
            contribution: None,
        }
    }
}

impl RequestState {
    reads! {
        expectation:
        expected_output: u32,
        quantile: u32,
    }

    pub fn expect_output(&mut self, num_output_tokens: u32) {
        self.expectation.expected_output = num_output_tokens;
    }

    /// Advances to the next quantile of a low-discrepancy sequence, so that any first few quantiles are spread evenly.
    pub fn next_quantile(&mut self) {
        let quantile = &mut self.expectation.quantile;
        *quantile = quantile.wrapping_add(GOLDEN_SHARE);
    }

    pub fn contribution(&self) -> Option<&Contribution> {
        self.expectation.contribution.as_ref()
    }

    pub fn set_contribution(&mut self, contribution: Contribution) {
        self.expectation.contribution = Some(contribution);
    }

    pub fn take_contribution(&mut self) -> Option<Contribution> {
        self.expectation.contribution.take()
    }
}
