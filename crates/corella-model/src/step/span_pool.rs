//! The hidden state of a sequence that one span computes, for poolings without sums.

use corella_core::{HiddenState, Pooling};

/// Takes the hidden states of a span one by one, in the order of their positions. The first token and the largest
/// values need a span that begins at position 0; otherwise the result is `None`.
#[derive(Clone, Debug)]
pub struct SpanPool {
    pooling: Pooling,
    state: Vec<f32>,
}

impl SpanPool {
    pub fn new(pooling: Pooling) -> Self {
        Self {
            pooling,
            state: Vec::new(),
        }
    }

    pub fn add(&mut self, position: usize, state: &[f32]) {
        match self.pooling {
            Pooling::LastToken => self.set(state),
            Pooling::FirstToken | Pooling::Max if position == 0 => self.set(state),
            Pooling::Max => {
                for (largest, &value) in self.state.iter_mut().zip(state) {
                    // Unlike `f32::max`, this keeps a NaN, which ends the request with an error.
                    if value > *largest || value.is_nan() {
                        *largest = value;
                    }
                }
            }
            Pooling::FirstToken | Pooling::Mean => {}
        }
    }

    /// The pooled hidden state; `None` if the span began after the states that it needs.
    pub fn pooled(&self) -> Option<HiddenState> {
        (!self.state.is_empty()).then(|| self.state[..].into())
    }

    fn set(&mut self, state: &[f32]) {
        self.state.clear();
        self.state.extend_from_slice(state);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pooled(pooling: Pooling, first: usize) -> Option<Vec<f32>> {
        let mut pool = SpanPool::new(pooling);
        for (position, state) in (first..).zip([[1.0, -3.0], [2.0, -5.0], [0.5, -4.0]]) {
            pool.add(position, &state);
        }
        pool.pooled().map(|state| state.to_vec())
    }

    #[test]
    fn a_span_has_a_first_a_last_and_a_largest_state() {
        assert_eq!(pooled(Pooling::FirstToken, 0), Some(vec![1.0, -3.0]));
        assert_eq!(pooled(Pooling::LastToken, 0), Some(vec![0.5, -4.0]));
        assert_eq!(pooled(Pooling::Max, 0), Some(vec![2.0, -3.0]));
    }

    #[test]
    fn a_later_span_has_only_a_last_state() {
        assert_eq!(pooled(Pooling::LastToken, 5), Some(vec![0.5, -4.0]));
        assert_eq!(pooled(Pooling::FirstToken, 5), None);
        assert_eq!(pooled(Pooling::Max, 5), None);
    }

    #[test]
    fn a_value_that_is_no_number_stays() {
        let mut pool = SpanPool::new(Pooling::Max);
        for (position, value) in [1.0, f32::NAN, 2.0].into_iter().enumerate() {
            pool.add(position, &[value]);
        }
        assert!(pool.pooled().is_some_and(|state| state[0].is_nan()));
    }
}
