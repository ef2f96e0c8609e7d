//! Limits log lines about a peer to one a minute for each peer.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

const INTERVAL: Duration = Duration::from_secs(60);
/// The number of peers remembered. Lines about further peers within a minute are dropped.
const MAX_PEERS: usize = 1024;

#[derive(Default)]
pub struct PeerLog {
    told_at: Mutex<HashMap<Box<str>, Instant>>,
}

impl PeerLog {
    /// Returns whether a line about this peer is due. The next one is due a minute later.
    pub fn is_due(&self, peer: &str, now: Instant) -> bool {
        let mut told_at = self.told_at.lock().unwrap_or_else(PoisonError::into_inner);
        let is_recent = |at: Instant| now.saturating_duration_since(at) < INTERVAL;
        if told_at.get(peer).is_some_and(|&at| is_recent(at)) {
            return false;
        }
        if told_at.len() >= MAX_PEERS {
            told_at.retain(|_, at| is_recent(*at));
            if told_at.len() >= MAX_PEERS {
                return false;
            }
        }
        told_at.insert(peer.into(), now);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_peer_is_told_of_once_a_minute() {
        let log = PeerLog::default();
        let start = Instant::now();
        assert!(log.is_due("a:1", start));
        assert!(log.is_due("b:1", start));
        assert!(!log.is_due("a:1", start + Duration::from_secs(59)));
        assert!(log.is_due("a:1", start + INTERVAL));
        assert!(!log.is_due("a:1", start + INTERVAL));
    }

    #[test]
    fn a_flood_of_peers_is_bounded_and_passes() {
        let log = PeerLog::default();
        let start = Instant::now();
        let num_told = (0..5000)
            .filter(|i| log.is_due(&i.to_string(), start))
            .count();
        assert_eq!(num_told, 1024);
        assert!(log.is_due("another", start + INTERVAL));
    }
}
