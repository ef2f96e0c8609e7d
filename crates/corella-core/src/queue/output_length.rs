//! Predicts the lengths of outputs from the lengths of outputs that have ended.
//!
//! The prediction is a survival curve in buckets, as Kaplan and Meier (1958) estimate it: for each length, the share of
//! the outputs of at least this length that ended there. Outputs that are still growing count for the lengths that they
//! have reached. Otherwise the curve would at first know only short outputs, because those end first. All numbers are
//! whole, so that equal histories lead to equal predictions.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;

use crate::queue::log_buckets::{NUM_LOG_BUCKETS, bucket_range, log_bucket};
use crate::{FinishReason, Namespace, StoppingCriteria};

/// Before any output has ended, all lengths up to `PRIOR_LEN` count as equally likely.
const PRIOR_LEN: u32 = 512;
/// The prior weighs as much as this number of outputs.
const PRIOR_WEIGHT: u32 = 4;
/// The count of one output. It is above 1, so that halving a count loses little.
const ONE: u32 = 256;
/// The count of begun outputs above which all counts are halved, so that old outputs lose weight.
const MEMORY: u32 = 1024 * ONE;
/// The limit of namespaces with a curve of their own. Clients choose the salts of namespaces, so the number must be
/// bounded.
const MAX_NAMESPACES: usize = 64;
/// The count of ended outputs from which a namespace's own curve is used.
const MIN_ENDED: u32 = 32 * ONE;

/// The survival curve of all outputs, and the curves of the most recently used namespaces.
#[derive(Clone, Debug)]
pub(crate) struct OutputLengths {
    overall: Curve,
    namespaces: BTreeMap<Namespace, NamespaceCurve>,
    num_notes: u64,
}

#[derive(Clone, Debug)]
struct NamespaceCurve {
    curve: Box<Curve>,
    last_noted: u64,
}

/// For each bucket of lengths, the number of outputs that have reached its first length, and of
/// outputs that ended within it.
#[derive(Clone, Debug)]
struct Curve {
    reached: [u32; NUM_LOG_BUCKETS],
    ended: [u32; NUM_LOG_BUCKETS],
    num_ended: u32,
}

impl OutputLengths {
    pub fn new() -> Self {
        Self {
            overall: Curve::new(),
            namespaces: BTreeMap::new(),
            num_notes: 0,
        }
    }

    /// Records that an output has grown to `len` tokens.
    pub fn note_grown(&mut self, namespace: &Namespace, len: u32) {
        let bucket = log_bucket(len);
        if bucket_range(bucket).start == len {
            self.overall.note_reached(bucket);
            self.curve_of(namespace).note_reached(bucket);
        }
    }

    /// Records an output that has ended with `len` tokens, without reaching its limit or an error.
    fn note_ended(&mut self, namespace: &Namespace, len: u32) {
        self.overall.note_ended(len);
        self.curve_of(namespace).note_ended(len);
    }

    /// Records the length of an ended output. Only outputs that ended by themselves, or because the reader left,
    /// predict later lengths.
    pub fn note_finished(
        &mut self,
        namespace: &Namespace,
        stopping: &StoppingCriteria,
        len: u32,
        reason: &FinishReason,
    ) {
        let is_natural = match reason {
            FinishReason::EndToken | FinishReason::StopToken | FinishReason::Aborted => true,
            FinishReason::Length | FinishReason::Error(_) => false,
        };
        if is_natural && len > 0 && !stopping.is_length_known() {
            self.note_ended(namespace, len);
        }
    }

    /// Returns the length that an output which has `len` tokens is expected to reach within its limits.
    pub fn expected_within(
        &self,
        namespace: &Namespace,
        stopping: &StoppingCriteria,
        len: u32,
        max_tokens: u32,
        quantile: u32,
    ) -> u32 {
        if stopping.is_length_known() {
            return max_tokens;
        }
        let expected = self.expected(namespace, len, quantile);
        expected.max(stopping.min_tokens).min(max_tokens)
    }

    /// Returns the expected length of an output that has `len` tokens: the given quantile of the
    /// outputs that reached `len`. `quantile` is in units of 1/2^32.
    fn expected(&self, namespace: &Namespace, len: u32, quantile: u32) -> u32 {
        let own = self.namespaces.get(namespace).map(|own| &own.curve);
        match own.filter(|curve| curve.num_ended >= MIN_ENDED) {
            Some(curve) => curve.quantile(len, quantile),
            None => self.overall.quantile(len, quantile),
        }
    }

    fn curve_of(&mut self, namespace: &Namespace) -> &mut Curve {
        self.num_notes += 1;
        if !self.namespaces.contains_key(namespace) {
            if self.namespaces.len() >= MAX_NAMESPACES {
                self.forget_oldest();
            }
            let curve = Box::new(Curve::new());
            let last_noted = self.num_notes;
            let new = NamespaceCurve { curve, last_noted };
            self.namespaces.insert(namespace.clone(), new);
        }
        let own = self.namespaces.get_mut(namespace);
        let own = own.expect("it was inserted if it was missing");
        own.last_noted = self.num_notes;
        &mut own.curve
    }

    fn forget_oldest(&mut self) {
        let oldest = self.namespaces.iter().min_by_key(|(_, own)| own.last_noted);
        if let Some(oldest) = oldest.map(|(namespace, _)| namespace.clone()) {
            self.namespaces.remove(&oldest);
        }
    }
}

impl Curve {
    fn new() -> Self {
        Self {
            reached: [0; NUM_LOG_BUCKETS],
            ended: [0; NUM_LOG_BUCKETS],
            num_ended: 0,
        }
    }

    fn note_reached(&mut self, bucket: usize) {
        self.reached[bucket] += ONE;
        // The bucket of the first token is reached most often, so no count exceeds the limit by more than one output.
        if self.reached[bucket] > MEMORY {
            for count in self.reached.iter_mut().chain(&mut self.ended) {
                *count /= 2;
            }
            self.num_ended /= 2;
        }
    }

    fn note_ended(&mut self, len: u32) {
        let bucket = log_bucket(len);
        self.ended[bucket] += ONE;
        self.num_ended += ONE;
    }

    /// Returns the counts of outputs that reached a bucket and of outputs that ended in it, with the prior added.
    fn counts(&self, bucket: usize) -> (u64, u64) {
        let lens = bucket_range(bucket);
        let left = PRIOR_LEN.saturating_sub(lens.start);
        let within = left.min(lens.end - lens.start);
        let prior =
            |len: u32| u64::from(PRIOR_WEIGHT * ONE) * u64::from(len) / u64::from(PRIOR_LEN);
        let reached = u64::from(self.reached[bucket]) + prior(left);
        let ended = u64::from(self.ended[bucket]) + prior(within);
        (reached, ended.min(reached))
    }

    fn quantile(&self, len: u32, quantile: u32) -> u32 {
        const WHOLE: u64 = 1 << 32;
        let target = WHOLE - u64::from(quantile);
        let mut surviving = WHOLE;
        let mut from = len.max(1);
        // No output is shorter than one token.
        for bucket in log_bucket(len.max(1))..NUM_LOG_BUCKETS {
            let lens = bucket_range(bucket);
            let (reached, ended) = self.counts(bucket);
            if reached == 0 {
                break;
            }
            let width = u64::from(lens.end - lens.start);
            let left = u64::from(lens.end - from);
            let dying = surviving * ended / reached * left / width;
            if surviving - dying <= target && dying > 0 {
                let share = (left * (surviving - target)).div_ceil(dying);
                return (from + share.min(left) as u32).max(len + 1);
            }
            surviving -= dying;
            from = lens.end;
        }
        // No output of this length is known, so it is expected to double.
        from.saturating_add(from.max(1))
    }
}

#[cfg(test)]
mod tests {
    use alloc::format;

    use super::*;

    const HALF: u32 = 1 << 31;
    const NINE_IN_TEN: u32 = HALF / 5 * 9;

    fn salted(name: &str) -> Namespace {
        Namespace {
            lora: None,
            cache_salt: Some(name.into()),
            arithmetic: None,
        }
    }

    fn end_at(lengths: &mut OutputLengths, namespace: &Namespace, len: u32) {
        grow_to(lengths, namespace, len);
        lengths.note_ended(namespace, len);
    }

    fn grow_to(lengths: &mut OutputLengths, namespace: &Namespace, len: u32) {
        for len in 1..=len {
            lengths.note_grown(namespace, len);
        }
    }

    #[test]
    fn before_anything_has_ended_lengths_are_spread_up_to_the_prior() {
        let (lengths, default) = (OutputLengths::new(), Namespace::default());
        let expected = |len, quantile| lengths.expected(&default, len, quantile);
        assert!((250..=262).contains(&expected(0, HALF)));
        assert!((455..=467).contains(&expected(0, NINE_IN_TEN)));
        assert_eq!(expected(0, u32::MAX), PRIOR_LEN);
        // Half of the outputs that are longer than 400 are shorter than 456.
        assert!((450..=462).contains(&expected(400, HALF)));
        // An output longer than the prior is expected to double.
        assert_eq!(expected(700, 0), 1400);
    }

    #[test]
    fn what_has_ended_is_expected_again() {
        let (mut lengths, default) = (OutputLengths::new(), Namespace::default());
        for at in 0..200 {
            end_at(&mut lengths, &default, 100 + at % 2 * 900);
        }
        let expected = |len, quantile| lengths.expected(&default, len, quantile);
        // Buckets are an eighth of a length wide.
        assert!((96..=112).contains(&expected(0, HALF / 2)));
        assert!((960..=1024).contains(&expected(0, HALF / 2 * 3)));
        // An output longer than the short ones is expected to be long.
        assert!((960..=1024).contains(&expected(200, HALF)));
    }

    /// Half of the outputs ended at 10 tokens, and the others have grown to 200. So the chances of
    /// ending at 10 and of exceeding 200 are equal.
    #[test]
    fn outputs_that_still_grow_count() {
        let (mut lengths, default) = (OutputLengths::new(), Namespace::default());
        for _ in 0..100 {
            end_at(&mut lengths, &default, 10);
            grow_to(&mut lengths, &default, 200);
        }
        let expected = |quantile| lengths.expected(&default, 0, quantile);
        assert!((10..=11).contains(&expected(HALF / 4)));
        assert!(expected(HALF / 4 * 5) > 200);
    }

    #[test]
    fn what_has_changed_is_learned() {
        let (mut lengths, default) = (OutputLengths::new(), Namespace::default());
        for _ in 0..2000 {
            end_at(&mut lengths, &default, 1000);
        }
        for _ in 0..5000 {
            end_at(&mut lengths, &default, 20);
        }
        assert!(lengths.expected(&default, 0, NINE_IN_TEN) <= 24);
    }

    #[test]
    fn namespaces_have_their_own_lengths_and_are_bounded() {
        let mut lengths = OutputLengths::new();
        let (short, long) = (salted("short"), salted("long"));
        for _ in 0..40 {
            end_at(&mut lengths, &short, 5);
            end_at(&mut lengths, &long, 300);
        }
        assert!(lengths.expected(&short, 0, NINE_IN_TEN) <= 6);
        assert!(lengths.expected(&long, 0, HALF) >= 288);
        for at in 0..1000 {
            end_at(&mut lengths, &salted(&format!("{at}")), 5);
            end_at(&mut lengths, &long, 300);
        }
        assert_eq!(lengths.namespaces.len(), MAX_NAMESPACES);
        // Recently used namespaces keep their curves. The others use the curve of all outputs.
        assert!(lengths.expected(&long, 0, HALF) >= 288);
        assert!(!lengths.namespaces.contains_key(&short));
    }
}
