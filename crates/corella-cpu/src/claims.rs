//! Shares of work that a worker has for itself until another one is done with its own.
//!
//! An owner takes from the front of its share, others from its back: cores are not equally fast
//! where neighbours use them too, and what is left in the end is small.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// One job, between two barriers.
pub struct Claims {
    /// Of each worker's share.
    shares: Vec<Taken>,
}

/// Units taken from the front (low half) and from the back. On a cache line of its own.
#[repr(align(64))]
#[derive(Default)]
struct Taken(AtomicU64);

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Side {
    Front,
    Back,
}

/// Of what is left, the part that is taken at once.
const PARTS: usize = 4;

impl Claims {
    pub fn new(num_workers: usize) -> Self {
        let shares = (0..num_workers).map(|_| Taken::default()).collect();
        Self { shares }
    }

    /// Nothing is taken. Nobody takes anything meanwhile.
    pub fn clear(&self) {
        for Taken(taken) in &self.shares {
            taken.store(0, Ordering::Relaxed);
        }
    }

    /// Units of an owner's share of `len` that are now the caller's alone. What an owner has written
    /// before the last barrier is what others see.
    pub fn take(&self, owner: usize, len: usize, side: Side) -> Option<Range<usize>> {
        let Taken(taken) = &self.shares[owner];
        let mut seen = taken.load(Ordering::Relaxed);
        loop {
            let (front, back) = (seen as u32 as usize, (seen >> 32) as usize);
            let left = len - front - back;
            if left == 0 {
                return None;
            }
            let count = left.div_ceil(PARTS);
            let (added, units) = match side {
                Side::Front => (count as u64, front..front + count),
                Side::Back => ((count as u64) << 32, len - back - count..len - back),
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
                let sides = [Side::Front, Side::Back, Side::Back];
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
            assert_eq!(claims.take(1, len, Side::Front), None);
            assert!(len == 0 || claims.take(0, len, Side::Front).is_some());
        }
    }
}
