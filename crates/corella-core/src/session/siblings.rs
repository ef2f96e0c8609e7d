//! Choices of one prompt on a decode node: one of them receives the rows, the others find them.

use alloc::collections::{BTreeMap, VecDeque};

use crate::SessionId;
use crate::session::SessionKey;

/// The sessions of each prompt, named by the session of its first choice. The first to come leads: it
/// is sent the rows. The others wait until its pages are in the prefix tree, or it is over.
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
    /// Takes a session in. False when it is to wait for its leader.
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

    /// A session is over, or waits no longer. Returns the one that leads instead, if it led.
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

    /// The session's pages are in the prefix tree. Returns those that waited for it.
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
