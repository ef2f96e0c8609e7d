//! One run of prefill and decode nodes: the events and faults in virtual time.

use corella_core::{Incarnation, NodeId};

use crate::check::standstill::Standstill;
use crate::pair::blocks::block_net::Surroundings;
use crate::pair::blocks::exchange::{Exchange, first_incarnation};
use crate::pair::decode_node::SimulatedDecodeNode;
use crate::pair::engine::Engine;
use crate::pair::pair_totals::PairTotals;
use crate::pair::pair_workload::{FaultKind, PairWorkload};
use crate::pair::prefill_node::SimulatedPrefillNode;
use crate::pair::wire::{ConnectionId, Direction, Packet, Wire};
use crate::pair::world::{Event, LocalEvent, World};
use crate::violation::Violation;

/// Plays a workload to its end. Failed assertions of the executors and of the state machines panic.
pub fn simulate_pair(workload: &PairWorkload, seed: u64) -> Result<PairTotals, Violation> {
    let mut fleet = Fleet::new(workload, seed);
    fleet.run()?;
    Ok(fleet.world.into_totals())
}

pub(super) struct Fleet<'a> {
    pub(super) world: World<'a>,
    pub(super) nodes: Vec<Option<Node>>,
}

pub(super) enum Node {
    Prefill(Box<SimulatedPrefillNode>),
    Decode(Box<SimulatedDecodeNode>),
}

impl Node {
    pub(super) fn incarnation(&self) -> Incarnation {
        match self {
            Self::Prefill(node) => node.incarnation,
            Self::Decode(node) => node.incarnation,
        }
    }

    fn local(&mut self, event: LocalEvent, world: &mut World<'_>) -> Result<(), Violation> {
        match self {
            Self::Prefill(node) => node.local(event, world),
            Self::Decode(node) => node.local(event, world),
        }
    }

    pub(super) fn settle(&mut self, world: &mut World<'_>) -> Result<(), Violation> {
        match self {
            Self::Prefill(node) => node.settle(world),
            Self::Decode(node) => node.settle(world),
        }
    }

    /// Returns the node's block exchange and its engine.
    pub(super) fn exchange(&mut self) -> (&mut Exchange, &mut Engine) {
        match self {
            Self::Prefill(node) => (&mut node.exchange, &mut node.engine),
            Self::Decode(node) => (&mut node.exchange, &mut node.engine),
        }
    }
}

impl<'a> Fleet<'a> {
    fn new(workload: &'a PairWorkload, seed: u64) -> Self {
        let mut world = World::new(workload, seed);
        world.totals.num_runs = 1;
        for (index, call) in workload.calls.iter().enumerate() {
            // A cancel may precede its request.
            if let Some(cancel_us) = call.cancel_us {
                world.push(cancel_us, Event::Cancel(index));
            }
            world.push(call.at_us, Event::Call(index));
        }
        for (index, fault) in workload.faults.iter().enumerate() {
            world.push(fault.at_us, Event::Fault(index));
        }
        let mut fleet = Self {
            nodes: workload.nodes.iter().map(|_| None).collect(),
            world,
        };
        for (index, fetch) in workload.fleet.prompt_fetches.iter().enumerate() {
            fleet.world.push(fetch.at_us, Event::FetchPrompt(index));
        }
        fleet.world.push(0, Event::List);
        for index in 0..workload.nodes.len() {
            let id = NodeId(index as u32);
            let first = first_incarnation(id);
            fleet.start(id, first);
            fleet.world.registry.insert(id, first);
        }
        fleet
    }

    fn run(&mut self) -> Result<(), Violation> {
        let mut standstill = Standstill::default();
        while let Some(event) = self.world.pop() {
            self.happen(event)?;
            let now_us = self.world.now_us;
            let verdict = standstill.check(now_us);
            verdict.map_err(|what| self.world.violation("time goes on", what))?;
            let verdict = self.world.sessions.check(now_us);
            verdict.map_err(|what| self.world.violation("sessions keep their deadlines", what))?;
            let verdict = self.world.clients.check_silence(now_us);
            verdict.map_err(|what| self.world.violation("no client waits in silence", what))?;
        }
        self.world.totals.num_events = self.world.num_events();
        let verdict = self.world.clients.check_ended();
        verdict.map_err(|what| self.world.violation("every request ends", what))?;
        for node in self.nodes.iter_mut().flatten() {
            let (leftovers, stats) = match node {
                Node::Prefill(node) => (node.leftovers(), node.engine.stats()),
                Node::Decode(node) => (node.leftovers(), node.engine.stats()),
            };
            self.world.net().totals.num_fetched_blocks += stats.num_fetched_blocks;
            if !leftovers.is_empty() {
                return Err(self
                    .world
                    .violation("nothing is left at the end", leftovers));
            }
        }
        Ok(())
    }

    fn happen(&mut self, event: Event) -> Result<(), Violation> {
        let world = &mut self.world;
        match event {
            Event::Call(index) => {
                let node = world.workload.calls[index].node;
                if let Some(Node::Prefill(node)) = &mut self.nodes[node.0 as usize] {
                    node.call(index, world)?;
                    node.settle(world)?;
                }
            }
            Event::Cancel(index) => {
                let node = world.workload.calls[index].node;
                if let Some(Node::Prefill(node)) = &mut self.nodes[node.0 as usize] {
                    node.cancel(index, world)?;
                    node.settle(world)?;
                }
            }
            Event::Fault(index) => {
                let kind = world.workload.faults[index].kind;
                self.fail(kind)?;
            }
            Event::Start(node) => {
                let incarnation = Incarnation(self.world.network.incarnations[&node].0 + 1);
                self.start(node, incarnation);
            }
            Event::Registered(node, incarnation) => {
                let known = world.registry.entry(node).or_insert(incarnation);
                *known = incarnation.max(*known);
                for other in self.nodes.iter_mut().flatten() {
                    let (exchange, _) = other.exchange();
                    exchange.handle_restart(node, incarnation, world.now_us);
                    other.settle(world)?;
                }
            }
            Event::EndDrain(node) => {
                if let Some(Node::Decode(node)) = &mut self.nodes[node.0 as usize] {
                    node.set_draining(false);
                }
            }
            Event::Arrive(id, direction, packet) => {
                if let Some(packet) = world.arrive(id, direction, *packet) {
                    self.deliver(id, direction, packet)?;
                }
            }
            Event::Unblock(from, to) => {
                for (id, direction, packet) in world.unblock(from, to) {
                    if let Some(packet) = self.world.arrive(id, direction, packet) {
                        self.deliver(id, direction, packet)?;
                    }
                }
            }
            Event::List => self.list()?,
            Event::Probe { by, peer, node } => self.probe(by, peer, node),
            Event::Probed {
                by,
                peer,
                node,
                answer,
            } => self.probed(by, peer, node, answer)?,
            Event::FetchPrompt(index) => self.fetch_prompt(index)?,
            Event::Block(event) => self.load(*event)?,
            Event::Local(id, incarnation, event) => {
                if let Some(node) = &mut self.nodes[id.0 as usize]
                    && node.incarnation() == incarnation
                {
                    node.local(event, world)?;
                }
            }
        }
        Ok(())
    }

    fn deliver(
        &mut self,
        id: ConnectionId,
        direction: Direction,
        packet: Packet,
    ) -> Result<(), Violation> {
        let world = &mut self.world;
        let Some(connection) = world.network.connections.get(&id) else {
            return Ok(());
        };
        let (from, to) = connection.ends(direction);
        match &mut self.nodes[to.0 as usize] {
            Some(Node::Prefill(node)) => node.arrive(id, packet, world),
            Some(Node::Decode(node)) => node.arrive(from, id, packet, world),
            None => Ok(()),
        }
    }

    fn start(&mut self, id: NodeId, incarnation: Incarnation) {
        let world = &mut self.world;
        world.network.down.remove(&id);
        world.network.incarnations.insert(id, incarnation);
        let is_prefill = (id.0 as usize) < world.workload.num_prefill_nodes;
        let node = match is_prefill {
            true => Node::Prefill(Box::new(SimulatedPrefillNode::new(id, incarnation, world))),
            false => Node::Decode(Box::new(SimulatedDecodeNode::new(id, incarnation, world))),
        };
        self.nodes[id.0 as usize] = Some(node);
        if let Some(delay_us) = world.workload.registry_delay_us {
            let at_us = world.now_us + delay_us;
            world.push(at_us, Event::Registered(id, incarnation));
        }
    }

    fn fail(&mut self, kind: FaultKind) -> Result<(), Violation> {
        let world = &mut self.world;
        let now_us = world.now_us;
        match kind {
            FaultKind::Crash {
                node,
                down_us,
                is_told,
            } => {
                let Some(mut lost) = self.nodes[node.0 as usize].take() else {
                    return Ok(());
                };
                world.net().totals.num_fetchers_lost += lost.exchange().0.num_open_loads();
                world.totals.num_crashes += 1;
                world.totals.num_clients_lost += world.clients.node_lost(node);
                world.sessions.node_lost(node);
                world.network.down.insert(node);
                let connections = world.network.connections.iter();
                let broken: Vec<_> = connections
                    .filter_map(|(&id, connection)| match node {
                        _ if connection.prefill == node => Some((id, Direction::ToDecode)),
                        _ if connection.decode == node => Some((id, Direction::ToPrefill)),
                        _ => None,
                    })
                    .collect();
                // The host of a dead process closes its connections.
                for (id, other) in broken.into_iter().filter(|_| is_told) {
                    world.break_connection(id, &[other]);
                }
                world.push(now_us + down_us, Event::Start(node));
            }
            FaultKind::Block { from, to, for_us } => {
                world.totals.num_blocks += 1;
                let until_us = now_us + for_us;
                let blocked = world.network.blocked_until_us.entry((from, to));
                let blocked = blocked.or_default();
                *blocked = until_us.max(*blocked);
                world.push(until_us, Event::Unblock(from, to));
            }
            FaultKind::Cut {
                prefill,
                decode,
                control,
                data,
                is_told,
            } => {
                let connections = world.network.connections.iter();
                let cut: Vec<_> = connections
                    .filter(|(id, connection)| {
                        let is_meant = match id.wire {
                            Wire::Control => control,
                            Wire::Data => data,
                        };
                        let is_between =
                            connection.prefill == prefill && connection.decode == decode;
                        is_meant && is_between && !connection.is_broken
                    })
                    .map(|(&id, _)| id)
                    .collect();
                let both = [Direction::ToDecode, Direction::ToPrefill];
                for id in cut {
                    world.totals.num_cut_connections += 1;
                    world.break_connection(id, if is_told { &both } else { &[] });
                }
            }
            FaultKind::Drain { node, for_us } => {
                if let Some(Node::Decode(node)) = &mut self.nodes[node.0 as usize] {
                    node.set_draining(true);
                }
                world.push(now_us + for_us, Event::EndDrain(node));
            }
        }
        Ok(())
    }
}
