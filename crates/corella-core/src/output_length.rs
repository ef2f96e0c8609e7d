//! How long outputs become, going by those that have ended.
//!
//! A survival curve in buckets, as Kaplan and Meier (1958) estimate it: of the outputs that have
//! reached a length, how many ended there. Outputs that are still growing count for the lengths
//! that they have reached, so that the first to end, which are the short ones, do not pass for
//! all. Whole numbers only: equal histories expect equal lengths.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;

use crate::Namespace;
use crate::log_buckets::{NUM_LOG_BUCKETS, bucket_range, log_bucket};

/// Until outputs have ended, lengths are expected to be spread evenly up to this one.
const PRIOR_LEN: u32 = 512;
/// Outputs that the prior counts for.
const PRIOR_WEIGHT: u32 = 4;
/// Counts are kept in sixteenths, so that halving them loses little.
const ONE: u32 = 16;
/// Outputs that are remembered: when as many have begun, all counts are halved.
const MEMORY: u32 = 1024 * ONE;
/// Namespaces with a curve of their own, at most. Clients choose salts, so the number is bounded.
const MAX_NAMESPACES: usize = 64;
/// Outputs that must have ended in a namespace before its own curve is asked.
const MIN_ENDED: u32 = 32 * ONE;

/// What is expected of outputs: overall, and for the namespaces seen lately.
#[derive(Debug)]
pub(crate) struct OutputLengths {
    overall: Curve,
    namespaces: BTreeMap<Namespace, NamespaceCurve>,
    num_notes: u64,
}

#[derive(Debug)]
struct NamespaceCurve {
    curve: Box<Curve>,
    last_noted: u64,
}

/// By bucket of lengths: outputs that have reached its first length, and those that ended in it.
#[derive(Debug)]
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

    /// An output has grown to `len` tokens.
    pub fn note_grown(&mut self, namespace: &Namespace, len: u32) {
        let bucket = log_bucket(len);
        if bucket_range(bucket).start == len {
            self.overall.note_reached(bucket);
            self.curve_of(namespace).note_reached(bucket);
        }
    }

    /// An output has ended at `len` tokens, and not because it was not allowed more.
    pub fn note_ended(&mut self, namespace: &Namespace, len: u32) {
        self.overall.note_ended(len);
        self.curve_of(namespace).note_ended(len);
    }

    /// The length that an output which has `len` tokens is expected to end with: the quantile
    /// of those that got so far. `quantile` is a share in 1/2^32.
    pub fn expected(&self, namespace: &Namespace, len: u32, quantile: u32) -> u32 {
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
        // No bucket is reached more often than that of the first token.
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

    /// Counts of a bucket, those of the prior included: reached and ended.
    fn counts(&self, bucket: usize) -> (u64, u64) {
        let lens = bucket_range(bucket);
        let left = PRIOR_LEN.saturating_sub(lens.start);
        let within = left.min(lens.end - lens.start);
        let prior = |len: u32| u64::from(PRIOR_WEIGHT * ONE) * u64::from(len) / u64::from(PRIOR_LEN);
        let reached = u64::from(self.reached[bucket]) + prior(left);
        let ended = u64::from(self.ended[bucket]) + prior(within);
        (reached, ended.min(reached))
    }

    fn quantile(&self, len: u32, quantile: u32) -> u32 {
        const WHOLE: u64 = 1 << 32;
        let target = WHOLE - u64::from(quantile);
        let mut surviving = WHOLE;
        let mut from = len.max(1);
        // No output ends before its first token.
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
        // Nobody knows outputs as long as this: as much again as there is.
        from.saturating_add(from.max(1))
    }
}
