//! Work stealing: each worker owns a share of a job, and other workers help when they have finished their own shares.
//!
//! An owner takes units from the front of its share, other workers from the back. Cores that other
//! processes use too are slower, so equal shares do not end at the same time.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// The claims of all workers on the units of one job between two barriers.
pub struct Claims {
    /// The claimed units of each worker's share.
    shares: Vec<Taken>,
}

/// The number of units taken from the front (low 32 bits) and from the back (high 32 bits) of a
/// share. It has a cache line of its own.
#[repr(align(64))]
#[derive(Default)]
struct Taken(AtomicU64);

/// The end of a share that units are taken from.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum ShareEnd {
    Front,
    Back,
}

/// Each claim takes 1 / `PARTS` of the rest of a share.
const PARTS: usize = 4;

impl Claims {
    pub fn new(num_workers: usize) -> Self {
        let shares = (0..num_workers).map(|_| Taken::default()).collect();
        Self { shares }
    }

    /// Marks all shares as unclaimed. No units may be taken during the call.
    pub fn clear(&self) {
        for Taken(taken) in &self.shares {
            taken.store(0, Ordering::Relaxed);
        }
    }

    /// Claims units of `owner`'s share of `len` units, for the caller alone. A claim orders no memory accesses: other
    /// workers see the owner's writes from before the last barrier.
    pub fn take(&self, owner: usize, len: usize, end: ShareEnd) -> Option<Range<usize>> {
        let Taken(taken) = &self.shares[owner];
        let mut seen = taken.load(Ordering::Relaxed);
        loop {
            let (front, back) = (seen as u32 as usize, (seen >> 32) as usize);
            let left = len - front - back;
            if left == 0 {
                return None;
            }
            let count = left.div_ceil(PARTS);
            let (added, units) = match end {
                ShareEnd::Front => (count as u64, front..front + count),
                ShareEnd::Back => ((count as u64) << 32, len - back - count..len - back),
            };
            let (same, changed) = (Ordering::Relaxed, seen + added);
            match taken.compare_exchange_weak(seen, changed, same, same) {
                Ok(_) => return Some(units),
                Err(now) => seen = now,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_unit_is_taken_once_by_whoever_comes() {
        for len in [0, 1, 2, 7, 192, 100_000] {
            let claims = Claims::new(3);
            let takers: Vec<Vec<Range<usize>>> = std::thread::scope(|scope| {
                let sides = [ShareEnd::Front, ShareEnd::Back, ShareEnd::Back];
                let threads = sides.map(|side| {
                    let claims = &claims;
                    scope.spawn(move || {
                        std::iter::from_fn(|| claims.take(1, len, side)).collect::<Vec<_>>()
                    })
                });
                threads.map(|thread| thread.join().unwrap()).into()
            });
            let mut units: Vec<usize> = takers.into_iter().flatten().flatten().collect();
            units.sort_unstable();
            assert!(units.into_iter().eq(0..len));
            assert_eq!(claims.take(1, len, ShareEnd::Front), None);
            assert!(len == 0 || claims.take(0, len, ShareEnd::Front).is_some());
        }
    }
}
