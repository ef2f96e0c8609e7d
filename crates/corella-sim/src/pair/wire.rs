//! Connections between two nodes. Messages keep their order within a connection, but not across connections.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

use corella_core::session::{SessionKey, ToDecode, ToPrefill};
use corella_core::{Incarnation, NodeId};

use crate::executor::Row;

/// A session has one stream for messages and one connection for rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Wire {
    Control,
    Data,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ConnectionId {
    pub key: SessionKey,
    pub wire: Wire,
}

impl ConnectionId {
    pub fn control(key: SessionKey) -> Self {
        let wire = Wire::Control;
        Self { key, wire }
    }

    pub fn data(key: SessionKey) -> Self {
        let wire = Wire::Data;
        Self { key, wire }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Direction {
    ToDecode,
    ToPrefill,
}

#[derive(Clone, Debug)]
pub enum Packet {
    ToDecode(ToDecode),
    ToPrefill(ToPrefill),
    LoadRequest {
        first_row: u32,
        deadline_us: u64,
    },
    Rows {
        /// The KV group.
        group: usize,
        layer: u32,
        rows: Range<u32>,
        content: Vec<Row>,
    },
    /// The recurrent state after all rows.
    State(Row),
    /// The other end has closed, or its host does not know the connection.
    Closed,
}

#[derive(Debug, Default)]
pub struct Connection {
    pub prefill: NodeId,
    pub decode: NodeId,
    to_decode: Lane,
    to_prefill: Lane,
    /// Ends that have closed the connection, or know that it is closed.
    closed: BTreeSet<Direction>,
    pub is_broken: bool,
    /// The incarnation that accepted the connection, once a packet has arrived.
    accepted_by: Option<Incarnation>,
}

#[derive(Debug, Default)]
pub struct Lane {
    pub last_arrival_us: u64,
    pub stalled: VecDeque<Packet>,
}

impl Connection {
    pub fn new(prefill: NodeId, decode: NodeId) -> Self {
        Self {
            prefill,
            decode,
            ..Self::default()
        }
    }

    pub fn lane(&mut self, direction: Direction) -> &mut Lane {
        match direction {
            Direction::ToDecode => &mut self.to_decode,
            Direction::ToPrefill => &mut self.to_prefill,
        }
    }

    pub fn ends(&self, direction: Direction) -> (NodeId, NodeId) {
        match direction {
            Direction::ToDecode => (self.prefill, self.decode),
            Direction::ToPrefill => (self.decode, self.prefill),
        }
    }

    /// Closes one direction. Returns true the first time.
    pub fn close(&mut self, direction: Direction) -> bool {
        self.closed.insert(direction)
    }

    pub fn is_closed(&self, direction: Direction) -> bool {
        self.closed.contains(&direction)
    }
}

impl Direction {
    pub fn back(self) -> Self {
        match self {
            Self::ToDecode => Self::ToPrefill,
            Self::ToPrefill => Self::ToDecode,
        }
    }
}

#[derive(Debug, Default)]
pub struct Network {
    pub connections: BTreeMap<ConnectionId, Connection>,
    /// The time until which nothing arrives from one node at the other.
    pub blocked_until_us: BTreeMap<(NodeId, NodeId), u64>,
    pub incarnations: BTreeMap<NodeId, Incarnation>,
    pub down: BTreeSet<NodeId>,
}

impl Network {
    pub fn is_blocked(&self, from: NodeId, to: NodeId, now_us: u64) -> bool {
        let until_us = self.blocked_until_us.get(&(from, to));
        until_us.is_some_and(|&until_us| now_us < until_us)
    }

    /// Returns whether the process at the connection's end on `node` still runs. The first process that answers at an
    /// address accepts the connection. It may be a later incarnation than the opener expects.
    pub fn has_process(&mut self, id: ConnectionId, node: NodeId, direction: Direction) -> bool {
        if self.down.contains(&node) {
            return false;
        }
        let present = self.incarnations.get(&node).copied();
        let Some(connection) = self.connections.get_mut(&id) else {
            return false;
        };
        let opener = match id.wire {
            Wire::Control => Direction::ToPrefill,
            Wire::Data => Direction::ToDecode,
        };
        if direction != opener && connection.accepted_by.is_none() {
            connection.accepted_by = present;
        }
        let incarnation = match direction {
            _ if direction != opener => connection.accepted_by,
            Direction::ToDecode => Some(id.key.decode_incarnation),
            Direction::ToPrefill => Some(id.key.prefill_incarnation),
        };
        present == incarnation
    }
}
