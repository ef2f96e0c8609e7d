//! The checks of sessions' timeouts, from outside the machines.

use std::collections::BTreeMap;

use corella_core::NodeId;
use corella_core::session::{SessionConfig, SessionKey};

use crate::check::verdict::{Verdict, ensure};
use crate::pair::wire::Direction;

/// One end of a session whose stream is open there.
#[derive(Debug)]
struct End {
    node: NodeId,
    opened_us: u64,
    heard_us: u64,
    is_allocated: bool,
    num_rows: u32,
    /// The latest time at which a decode node must have the first token and, after it, the rows.
    load_by_us: Option<u64>,
    has_first_token: bool,
}

pub struct SessionWatch {
    config: SessionConfig,
    ends: BTreeMap<(Direction, SessionKey), End>,
    /// Loads without an export, and their deadlines.
    subscriptions: BTreeMap<SessionKey, (NodeId, u64)>,
}

/// An end is named by the direction of the messages that it receives.
pub const PREFILL: Direction = Direction::ToPrefill;
pub const DECODE: Direction = Direction::ToDecode;

impl SessionWatch {
    pub fn new(config: SessionConfig) -> Self {
        Self {
            config,
            ends: BTreeMap::new(),
            subscriptions: BTreeMap::new(),
        }
    }

    pub fn opened(&mut self, side: Direction, key: SessionKey, node: NodeId, now_us: u64) {
        let end = End {
            node,
            opened_us: now_us,
            heard_us: now_us,
            is_allocated: false,
            num_rows: 0,
            load_by_us: None,
            has_first_token: false,
        };
        self.ends.entry((side, key)).or_insert(end);
    }

    pub fn heard(&mut self, side: Direction, key: SessionKey, now_us: u64) {
        if let Some(end) = self.ends.get_mut(&(side, key)) {
            end.heard_us = now_us;
        }
    }

    pub fn asked(&mut self, key: SessionKey, num_rows: u32) {
        if let Some(end) = self.ends.get_mut(&(DECODE, key)) {
            end.num_rows = num_rows;
        }
    }

    /// Notes that the scheduler was asked for pages. The scheduler's answer has no deadline.
    pub fn reserving(&mut self, key: SessionKey) {
        if let Some(end) = self.ends.get_mut(&(DECODE, key)) {
            end.load_by_us = None;
        }
    }

    /// Notes that the decode node has reserved pages or waits for a sibling, or that the prefill node has the message
    /// about it.
    pub fn allocated(&mut self, side: Direction, key: SessionKey, now_us: u64) {
        let Some(end) = self.ends.get_mut(&(side, key)) else {
            return;
        };
        end.is_allocated = true;
        let time_us = match end.has_first_token {
            true => self.config.load_timeout_us(end.num_rows),
            false => self.config.first_token_timeout_us,
        };
        end.load_by_us = (side == DECODE).then_some(now_us + time_us);
    }

    /// Notes that the computing node is undecided. The decision must come within the search time.
    pub fn undecided(&mut self, key: SessionKey) {
        if let Some(end) = self.ends.get_mut(&(PREFILL, key)) {
            end.is_allocated = false;
        }
    }

    pub fn decided(&mut self, key: SessionKey) {
        if let Some(end) = self.ends.get_mut(&(PREFILL, key)) {
            end.is_allocated = true;
        }
    }

    pub fn first_token(&mut self, key: SessionKey, now_us: u64) {
        if let Some(end) = self.ends.get_mut(&(DECODE, key))
            && end.is_allocated
            && !end.has_first_token
        {
            end.has_first_token = true;
            let by_us = now_us + self.config.load_timeout_us(end.num_rows);
            end.load_by_us = end.load_by_us.map(|_| by_us);
        }
    }

    /// Notes the end of a load.
    pub fn arrived(&mut self, key: SessionKey) {
        if let Some(end) = self.ends.get_mut(&(DECODE, key)) {
            end.load_by_us = None;
        }
    }

    pub fn closed(&mut self, side: Direction, key: SessionKey) {
        self.ends.remove(&(side, key));
    }

    pub fn is_open(&self, side: Direction, key: SessionKey) -> bool {
        self.ends.contains_key(&(side, key))
    }

    pub fn subscribed(&mut self, key: SessionKey, node: NodeId, deadline_us: u64) {
        self.subscriptions.insert(key, (node, deadline_us));
    }

    /// Removes a load's deadline, and returns it.
    pub fn unsubscribed(&mut self, key: SessionKey) -> Option<u64> {
        let (_, deadline_us) = self.subscriptions.remove(&key)?;
        Some(deadline_us)
    }

    pub fn node_lost(&mut self, node: NodeId) {
        self.ends.retain(|_, end| end.node != node);
        self.subscriptions.retain(|_, (other, _)| *other != node);
    }

    /// Checks the bounds of rules 38, 39, 41 and 47, which are exact in virtual time.
    pub fn check(&self, now_us: u64) -> Verdict {
        let config = &self.config;
        for ((side, key), end) in &self.ends {
            let silent_us = now_us - end.heard_us;
            ensure(silent_us <= config.lost_after_us, || {
                format!("{side:?} of {key} is kept, {silent_us} us after it was last heard of")
            })?;
            let is_allocating = *side == PREFILL && !end.is_allocated;
            let open_us = now_us - end.opened_us;
            ensure(
                !is_allocating || open_us <= config.allocate_budget_us,
                || format!("{key} is not allocated after {open_us} us"),
            )?;
            let is_late = end.load_by_us.is_some_and(|by_us| now_us > by_us);
            ensure(!is_late, || {
                format!("{key} waits for its load until {:?}", end.load_by_us)
            })?;
        }
        let mut subscriptions = self.subscriptions.iter();
        let late = subscriptions.find(|&(_, &(_, deadline_us))| now_us > deadline_us);
        ensure(late.is_none(), || {
            format!("a subscription is late: {late:?}")
        })
    }
}
