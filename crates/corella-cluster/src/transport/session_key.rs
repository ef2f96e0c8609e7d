//! What names a session on both ends.

use std::fmt;

/// Chosen by the prefill node. Never the client's request id, which may come twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionKey {
    pub uuid: u128,
    /// Counts the decode nodes that were tried for one request.
    pub attempt: u32,
    /// Each start of a process is another incarnation of its node.
    pub prefill_incarnation: u64,
    pub decode_incarnation: u64,
}

impl fmt::Display for SessionKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}/{}", self.uuid, self.attempt)
    }
}
