//! Buckets of whole numbers. Their width grows with the numbers: eight buckets for each power of two.

use core::ops::Range;

/// Each number below this has a bucket of its own.
const NUM_EXACT: u32 = 8;
const EXACT_BITS: u32 = NUM_EXACT.ilog2();
/// Numbers from 2^30 on share the last bucket. No context is longer than that.
const MAX_BITS: u32 = 30;

pub(crate) const NUM_LOG_BUCKETS: usize = (NUM_EXACT * (MAX_BITS - EXACT_BITS + 1)) as usize;

pub(crate) fn log_bucket(value: u32) -> usize {
    if value < NUM_EXACT {
        return value as usize;
    }
    let shift = value.ilog2() - EXACT_BITS;
    let bucket = NUM_EXACT * shift + (value >> shift);
    (bucket as usize).min(NUM_LOG_BUCKETS - 1)
}

/// The range of numbers that a bucket holds.
pub(crate) fn bucket_range(bucket: usize) -> Range<u32> {
    let bucket = bucket as u32;
    if bucket < NUM_EXACT {
        return bucket..bucket + 1;
    }
    let shift = bucket / NUM_EXACT - 1;
    let first = (NUM_EXACT + bucket % NUM_EXACT) << shift;
    first..first + (1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_follow_one_another() {
        let mut next = 0;
        for bucket in 0..NUM_LOG_BUCKETS {
            let range = bucket_range(bucket);
            assert_eq!(range.start, next);
            assert_eq!(log_bucket(range.start), bucket);
            assert_eq!(log_bucket(range.end - 1), bucket);
            next = range.end;
        }
        assert_eq!(next, 1 << MAX_BITS);
        assert_eq!(log_bucket(u32::MAX), NUM_LOG_BUCKETS - 1);
    }

    #[test]
    fn no_bucket_is_wider_than_an_eighth_of_what_it_holds() {
        for bucket in NUM_EXACT as usize..NUM_LOG_BUCKETS {
            let range = bucket_range(bucket);
            assert!(range.end - range.start <= range.start / 8);
        }
    }
}
