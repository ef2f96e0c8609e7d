//! A caller's API key: its permissions, and its limits per minute.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

/// A caller's key and its permissions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiKey {
    /// The name in logs and metrics, which never contain the key itself.
    pub name: String,
    pub secret: KeyDigest,
    /// `None` means no limit.
    pub requests_per_minute: Option<u32>,
    /// Limits tokens of prompts and answers; `None` means no limit.
    pub tokens_per_minute: Option<u32>,
    /// Names of the models and adapters that the key may use; `None` means all.
    pub models: Option<Vec<String>>,
    /// The priority of the key's requests, which overrides the requests' field.
    pub priority: Option<i32>,
    /// Whether the key may change the server: load adapters, empty the prefix cache, unload models, change the role.
    pub is_admin: bool,
}

impl ApiKey {
    /// Makes a key without limits and with all permissions.
    pub fn unlimited(name: impl Into<String>, key: &str) -> Self {
        Self {
            name: name.into(),
            secret: KeyDigest::of(key.as_bytes()),
            requests_per_minute: None,
            tokens_per_minute: None,
            models: None,
            priority: None,
            is_admin: true,
        }
    }
}

/// The SHA-256 digest of a key. The server does not keep the key itself.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct KeyDigest([u8; 32]);

impl KeyDigest {
    pub fn of(key: &[u8]) -> Self {
        Self(Sha256::digest(key).into())
    }

    /// Reads 64 hexadecimal digits, as `sha256sum` writes them.
    pub fn from_hex(hex: &str) -> Option<Self> {
        let is_hex = hex.len() == 64 && hex.bytes().all(|byte| byte.is_ascii_hexdigit());
        let mut digest = [0; 32];
        for (byte, at) in digest.iter_mut().zip((0..64).step_by(2)) {
            *byte = u8::from_str_radix(hex.get(at..at + 2)?, 16).ok()?;
        }
        is_hex.then_some(Self(digest))
    }

    /// Compares in constant time, so that the time does not reveal a matching prefix.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        let pairs = self.0.iter().zip(&other.0);
        pairs.fold(0, |differences, (a, b)| differences | (a ^ b)) == 0
    }
}

impl fmt::Debug for KeyDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeyDigest(…)")
    }
}

/// The clock of rate limits. Tests use clocks of their own.
#[derive(Clone)]
pub struct Clock(Arc<dyn Fn() -> Duration + Send + Sync>);

impl Clock {
    /// `now` is the time since any fixed moment, and never decreases.
    pub fn new(now: impl Fn() -> Duration + Send + Sync + 'static) -> Self {
        Self(Arc::new(now))
    }

    pub(crate) fn now_us(&self) -> u64 {
        u64::try_from((self.0)().as_micros()).unwrap_or(u64::MAX)
    }
}

impl Default for Clock {
    fn default() -> Self {
        let start = Instant::now();
        Self::new(move || start.elapsed())
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Clock")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_is_read_as_it_is_written() {
        // The digest of "abc" from FIPS 180-2.
        let hex = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        let digest = KeyDigest::from_hex(hex).expect("it is one");
        assert!(digest.is_same(&KeyDigest::of(b"abc")));
        assert!(!digest.is_same(&KeyDigest::of(b"abd")));
        assert!(KeyDigest::from_hex(&hex.to_uppercase()).is_some());
        for wrong in [
            "",
            &hex[1..],
            &format!("{hex}0"),
            &format!("+{}", &hex[1..]),
        ] {
            assert!(KeyDigest::from_hex(wrong).is_none(), "{wrong}");
        }
        assert!(KeyDigest::from_hex(&"é".repeat(32)).is_none());
    }

    #[test]
    fn a_key_is_in_no_debug_output() {
        let key = ApiKey::unlimited("web", "sk-very-secret");
        let shown = format!("{key:?}");
        assert!(shown.contains("KeyDigest(…)"), "{shown}");
        assert!(!shown.contains("sk-very-secret"), "{shown}");
    }
}
