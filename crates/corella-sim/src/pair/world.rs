//! The state that the simulated nodes share: time, the network, random numbers and watchers.

use std::collections::BTreeMap;

use corella_core::session::SessionKey;
use corella_core::{Incarnation, NodeId, StepId};

use crate::event_queue::EventQueue;
use crate::pair::blocks::block_net::{BlockEvent, BlockNet, Surroundings};
use crate::pair::client_watch::ClientWatch;
use crate::pair::fleet_plan::Answer;
use crate::pair::pair_totals::{PairTotals, PlacementTotals, SessionTotals};
use crate::pair::pair_workload::{LinkPlan, PairWorkload};
use crate::pair::session_watch::SessionWatch;
use crate::pair::wire::{Connection, ConnectionId, Direction, Network, Packet, Wire};
use crate::random::Random;
use crate::violation::Violation;

/// An event in virtual time.
pub enum Event {
    Call(usize),
    Cancel(usize),
    Fault(usize),
    /// A node's process starts again.
    Start(NodeId),
    /// The registry reports a start to all nodes.
    Registered(NodeId, Incarnation),
    EndDrain(NodeId),
    Arrive(ConnectionId, Direction, Box<Packet>),
    /// A blocked link works again.
    Unblock(NodeId, NodeId),
    /// The registry lists the decode nodes.
    List,
    /// A prefill node's probe arrives at a decode node.
    Probe {
        by: (NodeId, Incarnation),
        peer: NodeId,
        node: NodeId,
    },
    /// The answer to a probe arrives, or the probe times out.
    Probed {
        by: (NodeId, Incarnation),
        peer: NodeId,
        node: NodeId,
        answer: Option<Box<Answer>>,
    },
    /// A node begins the fetch of a prompt's blocks.
    FetchPrompt(usize),
    Block(Box<BlockEvent>),
    /// An event within one process.
    Local(NodeId, Incarnation, LocalEvent),
}

#[derive(Clone, Debug)]
pub enum LocalEvent {
    Wake,
    StepReturns,
    /// A copy to or from host memory ends.
    CopyEnds,
    /// A step ends a layer.
    LayerDone {
        step: StepId,
        layer: u32,
    },
    /// The sender of an attempt reads the next rows.
    Read(SessionKey),
    /// The sender of an attempt has stopped.
    Stopped(SessionKey),
    /// A load that was cancelled writes no more.
    LoadCancelled(SessionKey),
    /// The engine answers how much of a prompt it has cached.
    LookUp(SessionKey),
    /// The scheduler handles a reservation.
    Reserve(SessionKey),
}

pub struct World<'a> {
    pub workload: &'a PairWorkload,
    pub now_us: u64,
    pub random: Random,
    pub network: Network,
    /// The incarnations that the registry lists.
    pub registry: BTreeMap<NodeId, Incarnation>,
    events: EventQueue<Event>,
    pub clients: ClientWatch<'a>,
    pub sessions: SessionWatch,
    pub totals: SessionTotals,
    pub placement: PlacementTotals,
    net: BlockNet,
}

impl<'a> World<'a> {
    pub fn new(workload: &'a PairWorkload, seed: u64) -> Self {
        Self {
            workload,
            now_us: 0,
            random: Random(!seed),
            network: Network::default(),
            registry: BTreeMap::new(),
            events: EventQueue::new(),
            clients: ClientWatch::new(workload),
            sessions: SessionWatch::new(workload.sessions.clone()),
            totals: SessionTotals::default(),
            placement: PlacementTotals::default(),
            net: BlockNet::new(&workload.fleet.links, &workload.fleet.loads),
        }
    }

    pub fn into_totals(self) -> PairTotals {
        PairTotals {
            sessions: self.totals,
            placement: self.placement,
            loads: self.net.totals,
        }
    }

    pub fn push(&mut self, at_us: u64, event: Event) {
        self.events.push(at_us.max(self.now_us), event);
    }

    pub fn pop(&mut self) -> Option<Event> {
        let (at_us, event) = self.events.pop()?;
        self.now_us = at_us;
        Some(event)
    }

    pub fn links(&self) -> &'a LinkPlan {
        &self.workload.links
    }

    pub fn violation(&self, rule: &'static str, what: String) -> Violation {
        Violation {
            at_us: self.now_us,
            rule,
            what,
        }
    }

    pub fn latency_us(&mut self) -> u64 {
        let LinkPlan {
            min_latency_us,
            max_latency_us,
            ..
        } = *self.links();
        min_latency_us + self.random.below(max_latency_us - min_latency_us + 1)
    }

    pub fn stop_us(&mut self) -> u64 {
        let max_stop_us = self.links().max_stop_us;
        self.random.below(max_stop_us + 1)
    }

    pub fn open(&mut self, id: ConnectionId, prefill: NodeId, decode: NodeId) {
        self.network
            .connections
            .insert(id, Connection::new(prefill, decode));
    }

    pub fn send(&mut self, id: ConnectionId, direction: Direction, packet: Packet) {
        let latency_us = self.latency_us();
        let repeats_once_in = self.links().repeats_once_in;
        let repeats =
            id.wire == Wire::Control && repeats_once_in > 0 && self.random.once_in(repeats_once_in);
        let now_us = self.now_us;
        let Some(connection) = self.network.connections.get_mut(&id) else {
            return;
        };
        if connection.is_broken || connection.is_closed(direction) {
            return;
        }
        let lane = connection.lane(direction);
        lane.last_arrival_us = lane.last_arrival_us.max(now_us + latency_us);
        let at_us = lane.last_arrival_us;
        let packet = Box::new(packet);
        if repeats {
            self.totals.num_repeated += 1;
            self.push(at_us, Event::Arrive(id, direction, packet.clone()));
        }
        self.push(at_us, Event::Arrive(id, direction, packet));
    }

    /// Closes one end of a connection. Messages that were sent from this end still arrive.
    pub fn close(&mut self, id: ConnectionId, direction: Direction) {
        self.send(id, direction, Packet::Closed);
        if let Some(connection) = self.network.connections.get_mut(&id) {
            connection.close(direction);
        }
    }

    /// Breaks a connection. Messages in transit are lost.
    pub fn break_connection(&mut self, id: ConnectionId, told: &[Direction]) {
        let latency_us = self.latency_us();
        let Some(connection) = self.network.connections.get_mut(&id) else {
            return;
        };
        if std::mem::replace(&mut connection.is_broken, true) {
            return;
        }
        for &direction in told {
            let closed = Box::new(Packet::Closed);
            self.push(
                self.now_us + latency_us,
                Event::Arrive(id, direction, closed),
            );
        }
    }

    /// Returns an arriving packet, unless it is lost or has to wait.
    pub fn arrive(
        &mut self,
        id: ConnectionId,
        direction: Direction,
        packet: Packet,
    ) -> Option<Packet> {
        let now_us = self.now_us;
        let connection = self.network.connections.get(&id)?;
        let (from, to) = connection.ends(direction);
        let is_broken = connection.is_broken;
        if is_broken && !matches!(packet, Packet::Closed) {
            return None;
        }
        let is_blocked = self.network.is_blocked(from, to, now_us);
        let connection = self.network.connections.get_mut(&id)?;
        if is_blocked || !connection.lane(direction).stalled.is_empty() {
            // An unreachable host is silent, and packets to it wait.
            connection.lane(direction).stalled.push_back(packet);
            return None;
        }
        if !self.network.has_process(id, to, direction) {
            // The host does not know the connection any more.
            if !is_broken && !self.network.down.contains(&to) {
                self.break_connection(id, &[direction.back()]);
            }
            return None;
        }
        Some(packet)
    }

    /// Takes the packets that have waited for a blocked link. They are delivered before later packets.
    pub fn unblock(&mut self, from: NodeId, to: NodeId) -> Vec<(ConnectionId, Direction, Packet)> {
        let mut stalled = Vec::new();
        if self.network.is_blocked(from, to, self.now_us) {
            return stalled;
        }
        for (&id, connection) in &mut self.network.connections {
            for direction in [Direction::ToDecode, Direction::ToPrefill] {
                if connection.ends(direction) == (from, to) {
                    let packets = connection.lane(direction).stalled.drain(..);
                    stalled.extend(packets.map(|packet| (id, direction, packet)));
                }
            }
        }
        stalled
    }

    /// Returns the index of a connection's decode node.
    pub fn decode_index(&self, id: ConnectionId) -> usize {
        let connection = self.network.connections.get(&id);
        let node = connection.map_or(0, |connection| connection.decode.0 as usize);
        node.saturating_sub(self.workload.num_prefill_nodes)
    }

    pub fn num_events(&self) -> u64 {
        self.events.num_events()
    }
}

impl Surroundings for World<'_> {
    fn now_us(&self) -> u64 {
        self.now_us
    }

    fn random(&mut self) -> &mut Random {
        &mut self.random
    }

    fn net(&mut self) -> &mut BlockNet {
        &mut self.net
    }

    fn push_block_event(&mut self, at_us: u64, event: BlockEvent) {
        self.push(at_us, Event::Block(Box::new(event)));
    }
}
