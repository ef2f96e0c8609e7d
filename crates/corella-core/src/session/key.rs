//! The keys of sessions. Clients choose no part of them.

use core::fmt;

use crate::{Incarnation, NodeId, SessionId};

/// Identifies an attempt of a prefill node and a decode node to serve a request. Messages, loads and exports with the
/// key of an earlier attempt are late and are ignored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionKey {
    pub session: SessionId,
    /// The number of the attempt, from 0 on. Each decode node that is asked is another attempt.
    pub attempt: u32,
    pub prefill_incarnation: Incarnation,
    pub decode_incarnation: Incarnation,
}

/// One start of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeIncarnation {
    pub node: NodeId,
    pub incarnation: Incarnation,
}

impl SessionKey {
    /// The bounds of all keys in their order.
    pub(super) const FIRST: Self = Self {
        session: SessionId(0),
        attempt: 0,
        prefill_incarnation: Incarnation(0),
        decode_incarnation: Incarnation(0),
    };
    pub(super) const LAST: Self = Self {
        session: SessionId(u128::MAX),
        attempt: u32::MAX,
        prefill_incarnation: Incarnation(u64::MAX),
        decode_incarnation: Incarnation(u64::MAX),
    };
}

impl fmt::Display for SessionKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            session, attempt, ..
        } = self;
        write!(f, "{:032x}.{attempt}", session.0)
    }
}
