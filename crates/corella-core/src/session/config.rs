//! The times and limits of sessions.

use core::fmt;

/// Both nodes of a pair should have the same times.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionConfig {
    /// A node that has sent nothing on a stream for this time sends a heartbeat.
    pub heartbeat_us: u64,
    /// A node that has received nothing on a stream for this time ends the session.
    pub lost_after_us: u64,
    /// The time in which a prefill node must find a decode node for a request.
    pub allocate_budget_us: u64,
    /// The limit of decode nodes that a prefill node asks for one request.
    pub max_asked_peers: u32,
    /// The time for which the pages of a computed prompt are held while the decode node loads nothing.
    pub hold_lease_us: u64,
    /// The time for which a decode node keeps pages without receiving the first token.
    pub first_token_timeout_us: u64,
    /// After the first token, a load may take this long plus the time that its bytes need at
    /// `min_bandwidth_bytes_per_s`.
    pub load_base_us: u64,
    pub min_bandwidth_bytes_per_s: u64,
    /// The bytes of one token's keys and values in all layers.
    pub row_bytes: u64,
    /// The time for which ended sessions are remembered, so that late messages are recognised.
    pub tombstone_us: u64,
    pub max_sessions: u32,
    /// The longest prompt that a decode node takes.
    pub max_prompt_tokens: u32,
    /// The limit of remembered sessions. Beyond it, the oldest are forgotten early.
    pub max_tombstones: u32,
    /// Whether a prefill node decodes a request that every decode node refuses. If not, it refuses the request.
    pub falls_back: bool,
    /// Whether a prefill node continues a request whose decode node was lost after the client had tokens, if no other
    /// decode node does. If not, the request ends with an error.
    pub resumes_locally: bool,
}

impl SessionConfig {
    pub fn new(row_bytes: u64) -> Self {
        Self {
            heartbeat_us: 1_000_000,
            lost_after_us: 3_000_000,
            allocate_budget_us: 100_000,
            max_asked_peers: 3,
            hold_lease_us: 30_000_000,
            first_token_timeout_us: 60_000_000,
            load_base_us: 1_000_000,
            min_bandwidth_bytes_per_s: 1_000_000,
            row_bytes,
            tombstone_us: 60_000_000,
            max_sessions: 4096,
            max_prompt_tokens: u32::MAX,
            max_tombstones: 65_536,
            falls_back: true,
            resumes_locally: true,
        }
    }

    /// Returns the time within which `num_rows` rows must arrive after all of them are computed.
    pub fn load_timeout_us(&self, num_rows: u32) -> u64 {
        let num_bytes = u64::from(num_rows).saturating_mul(self.row_bytes);
        let transfer_us = num_bytes.saturating_mul(1_000_000) / self.min_bandwidth_bytes_per_s;
        self.load_base_us.saturating_add(transfer_us)
    }

    pub(super) fn validate(&self) -> Result<(), SessionConfigError> {
        let checks = [
            (self.heartbeat_us > 0, "the heartbeat must be above 0"),
            (
                self.lost_after_us >= 2 * self.heartbeat_us,
                "a peer must not be given up before two heartbeats",
            ),
            (
                self.allocate_budget_us > 0 && self.max_asked_peers > 0,
                "at least one decode node must be asked, and be given time to answer",
            ),
            (
                self.hold_lease_us > self.lost_after_us,
                "pages must be held for longer than it takes to notice that a peer is lost",
            ),
            (
                self.min_bandwidth_bytes_per_s > 0,
                "the smallest bandwidth must be above 0",
            ),
            (
                self.tombstone_us >= self.lost_after_us,
                "ended sessions must be remembered until their peer has given them up, too",
            ),
            (
                self.max_sessions > 0 && self.max_tombstones >= self.max_sessions,
                "there must be room for the end of every session",
            ),
        ];
        match checks.iter().find(|(holds, _)| !holds) {
            Some(&(_, reason)) => Err(SessionConfigError { reason }),
            None => Ok(()),
        }
    }
}

/// Reports times or limits that contradict each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionConfigError {
    pub reason: &'static str,
}

impl fmt::Display for SessionConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.reason)
    }
}

impl core::error::Error for SessionConfigError {}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns whether the configuration is valid with this change.
    fn is_accepted(change: impl FnOnce(&mut SessionConfig)) -> bool {
        let mut config = SessionConfig::new(1000);
        change(&mut config);
        config.validate().is_ok()
    }

    #[test]
    fn times_that_would_break_off_healthy_sessions_are_refused() {
        assert!(is_accepted(|_| {}));
        assert!(!is_accepted(|config| config.heartbeat_us = 0));
        let with_heartbeat = |heartbeat_us| {
            is_accepted(|config| {
                config.heartbeat_us = heartbeat_us;
                config.lost_after_us = 2000;
            })
        };
        assert!(with_heartbeat(1000));
        assert!(!with_heartbeat(1001));
        let with_lease =
            |lease_us| is_accepted(|config| config.hold_lease_us = config.lost_after_us + lease_us);
        assert!(with_lease(1));
        assert!(!with_lease(0));
        let with_tombstone =
            |early_us| is_accepted(|config| config.tombstone_us = config.lost_after_us - early_us);
        assert!(with_tombstone(0));
        assert!(!with_tombstone(1));
    }

    #[test]
    fn limits_under_which_nothing_could_be_sent_are_refused() {
        assert!(!is_accepted(|config| config.allocate_budget_us = 0));
        assert!(!is_accepted(|config| config.max_asked_peers = 0));
        assert!(!is_accepted(|config| config.min_bandwidth_bytes_per_s = 0));
        assert!(is_accepted(|config| config.allocate_budget_us = 1));
        assert!(is_accepted(|config| config.max_asked_peers = 1));
        assert!(is_accepted(|config| config.min_bandwidth_bytes_per_s = 1));
    }

    #[test]
    fn every_session_has_room_to_be_remembered() {
        let with_room = |max_sessions, max_tombstones| {
            is_accepted(|config| {
                config.max_sessions = max_sessions;
                config.max_tombstones = max_tombstones;
            })
        };
        assert!(with_room(8, 8));
        assert!(!with_room(8, 7));
        assert!(!with_room(0, 8));
    }
}
