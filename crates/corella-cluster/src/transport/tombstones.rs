//! Remembers sessions that are over, so that a load that arrives late is refused.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use corella_core::session::SessionKey;

use super::Refusal;

/// The oldest go when their time is up, or when there are too many.
pub struct Tombstones {
    reasons: HashMap<SessionKey, Refusal>,
    /// In the order of their ends, because all stay equally long.
    ends: VecDeque<(Instant, SessionKey)>,
    stay: Duration,
    max_len: usize,
}

impl Tombstones {
    pub fn new(stay: Duration, max_len: usize) -> Self {
        Self {
            reasons: HashMap::new(),
            ends: VecDeque::new(),
            stay,
            max_len,
        }
    }

    /// A session that is over already keeps its reason.
    pub fn insert(&mut self, key: SessionKey, reason: Refusal, now: Instant) {
        self.expire(now);
        if self.reasons.contains_key(&key) {
            return;
        }
        self.reasons.insert(key, reason);
        self.ends.push_back((now + self.stay, key));
        while self.ends.len() > self.max_len {
            self.remove_oldest();
        }
    }

    pub fn get(&mut self, key: &SessionKey, now: Instant) -> Option<Refusal> {
        self.expire(now);
        self.reasons.get(key).copied()
    }

    pub fn expire(&mut self, now: Instant) {
        while self.ends.front().is_some_and(|&(end, _)| end <= now) {
            self.remove_oldest();
        }
    }

    pub fn len(&self) -> usize {
        self.ends.len()
    }

    fn remove_oldest(&mut self) {
        if let Some((_, key)) = self.ends.pop_front() {
            self.reasons.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use corella_core::{Incarnation, SessionId};

    use super::*;

    fn key(uuid: u128) -> SessionKey {
        SessionKey {
            session: SessionId(uuid),
            attempt: 0,
            prefill_incarnation: Incarnation(1),
            decode_incarnation: Incarnation(2),
        }
    }

    #[test]
    fn the_map_is_bounded_after_a_million_sessions_and_empty_in_time() {
        let start = Instant::now();
        let mut tombstones = Tombstones::new(Duration::from_secs(60), 1000);
        let mut most = 0;
        for i in 0..1_000_000 {
            tombstones.insert(
                key(i),
                Refusal::Gone,
                start + Duration::from_micros(i as u64),
            );
            most = most.max(tombstones.len());
        }
        assert_eq!(most, 1000);
        let last = start + Duration::from_micros(999_999);
        assert_eq!(tombstones.get(&key(999_000), last), Some(Refusal::Gone));
        assert_eq!(tombstones.get(&key(998_999), last), None);
        let end = last + Duration::from_secs(60);
        assert_eq!(
            tombstones.get(&key(999_999), end - Duration::from_micros(1)),
            Some(Refusal::Gone)
        );
        assert_eq!(tombstones.len(), 1);
        assert_eq!(tombstones.get(&key(999_999), end), None);
        assert_eq!((tombstones.len(), tombstones.reasons.len()), (0, 0));
    }

    #[test]
    fn the_first_reason_stays() {
        let now = Instant::now();
        let mut tombstones = Tombstones::new(Duration::from_secs(60), 10);
        tombstones.insert(key(1), Refusal::Failed, now);
        tombstones.insert(key(1), Refusal::Gone, now);
        assert_eq!(tombstones.get(&key(1), now), Some(Refusal::Failed));
        assert_eq!(tombstones.len(), 1);
    }
}
