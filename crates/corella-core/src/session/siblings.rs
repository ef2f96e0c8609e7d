//! The choices of a prompt on a decode node: one receives the rows, and the others find them cached.

use alloc::collections::{BTreeMap, VecDeque};

use crate::SessionId;
use crate::session::SessionKey;

/// The sessions of each prompt, by the session of its first choice. The first to arrive leads and receives the rows.
/// The others wait until the leader's pages are in the prefix tree, or the leader has ended.
#[derive(Debug, Default)]
pub(super) struct Siblings {
    groups: BTreeMap<SessionId, Group>,
}

#[derive(Debug)]
struct Group {
    leader: SessionKey,
    waiting: VecDeque<SessionKey>,
}

impl Siblings {
    /// Adds a session. Returns false if it has to wait for its leader.
    pub fn join(&mut self, group: SessionId, key: SessionKey) -> bool {
        let Some(group) = self.groups.get_mut(&group) else {
            let waiting = VecDeque::new();
            let leader = key;
            self.groups.insert(group, Group { leader, waiting });
            return true;
        };
        group.waiting.push_back(key);
        false
    }

    /// Removes a session. If the session was the leader, returns the new leader, if any.
    pub fn leave(&mut self, group: SessionId, key: SessionKey) -> Option<SessionKey> {
        let present = self.groups.get_mut(&group)?;
        if present.leader != key {
            present.waiting.retain(|&other| other != key);
            return None;
        }
        match present.waiting.pop_front() {
            Some(next) => {
                present.leader = next;
                Some(next)
            }
            None => {
                self.groups.remove(&group);
                None
            }
        }
    }

    /// Handles that a leader's pages are in the prefix tree. Returns the sessions that waited for it.
    pub fn publish(&mut self, group: SessionId, key: SessionKey) -> VecDeque<SessionKey> {
        match self.groups.get(&group) {
            Some(present) if present.leader == key => {
                let group = self.groups.remove(&group);
                group.map_or_else(VecDeque::new, |group| group.waiting)
            }
            _ => VecDeque::new(),
        }
    }

    pub fn leaders(&self) -> impl Iterator<Item = SessionKey> {
        self.groups.values().map(|group| group.leader)
    }

    pub fn waiting(&self) -> impl Iterator<Item = SessionKey> {
        self.groups
            .values()
            .flat_map(|group| group.waiting.iter().copied())
    }
}
