//! The events of a fleet besides its sessions: lists of the registry, probes, and loads of blocks.

use corella_core::session::NodeIncarnation;
use corella_core::{Incarnation, NodeId, PeerRecord};

use crate::pair::blocks::block_net::{BlockEvent, Surroundings};
use crate::pair::blocks::exchange::Wanted;
use crate::pair::fleet::{Fleet, Node};
use crate::pair::fleet_plan::Answer;
use crate::pair::peers::SimulatedPeers;
use crate::pair::world::Event;
use crate::violation::Violation;

/// The time within which a probe must be answered.
const PROBE_TIMEOUT_US: u64 = 1_000_000;

impl Fleet<'_> {
    /// Gives prefill nodes a list of the registry, or the registry's failure, and plans the next list.
    pub(super) fn list(&mut self) -> Result<(), Violation> {
        let world = &mut self.world;
        let plan = &world.workload.fleet;
        let now_us = world.now_us;
        let next_us = now_us + plan.list_interval_us;
        if next_us < world.workload.lists_until_us() {
            world.push(next_us, Event::List);
        }
        let knows_starts = world.workload.registry_delay_us.is_some();
        let records = world.workload.decode_nodes().map(|node| PeerRecord {
            instance_id: SimulatedPeers::instance(node),
            incarnation: knows_starts.then(|| world.registry[&node].0),
            // A registry that knows only addresses does not know the longest prompt.
            max_prompt_tokens: { world.workload.nodes[node.0 as usize].max_prompt_tokens }
                .filter(|_| knows_starts)
                .unwrap_or(u32::MAX),
            is_draining: false,
        });
        let records: Vec<_> = records.collect();
        world.placement.num_lists += 1;
        for index in 0..world.workload.num_prefill_nodes {
            let is_out = world.happens(plan.lists_fail_once_in);
            let is_empty = !is_out && world.happens(plan.lists_fail_once_in);
            world.placement.num_outages += u64::from(is_out);
            world.placement.num_empty_lists += u64::from(is_empty);
            let listed: &[PeerRecord] = match is_empty {
                true => &[],
                false => &records[..],
            };
            let listed = (!is_out).then_some(listed);
            if let Some(Node::Prefill(node)) = &mut self.nodes[index] {
                node.peers.handle_list(&mut node.machine, listed, now_us);
                node.settle(world)?;
            }
        }
        if now_us == 0 && !plan.fetches {
            self.meet();
        }
        Ok(())
    }

    /// Makes all nodes known to each other before the first call.
    fn meet(&mut self) {
        let world = &mut self.world;
        let (prefill, decode) = self.nodes.split_at_mut(world.workload.num_prefill_nodes);
        for node in prefill {
            let Some(Node::Prefill(node)) = node else {
                continue;
            };
            while let Some((peer, place)) = node.peers.poll_probe(&mut node.machine, 0) {
                let there = &decode[place.0 as usize - world.workload.num_prefill_nodes];
                if let Some(Node::Decode(there)) = there {
                    let answer = Answer {
                        // The node's sessions reveal an incompatibility.
                        is_compatible: true,
                        ..there.answer(world)
                    };
                    node.peers
                        .handle_answer(&mut node.machine, peer, Some(answer), 0);
                }
            }
        }
    }

    /// Delivers a probe to a decode node, which answers if it runs.
    pub(super) fn probe(&mut self, by: (NodeId, Incarnation), peer: NodeId, node: NodeId) {
        let world = &mut self.world;
        let is_blocked = world.network.is_blocked(by.0, node, world.now_us);
        let answer = match &self.nodes[node.0 as usize] {
            Some(Node::Decode(there)) if !is_blocked => Some(Box::new(there.answer(world))),
            _ => None,
        };
        let answers_us = match answer {
            Some(_) => world.now_us + world.latency_us(),
            None => world.now_us + PROBE_TIMEOUT_US,
        };
        let event = Event::Probed {
            by,
            peer,
            node,
            answer,
        };
        world.push(answers_us, event);
    }

    /// Delivers the answer to a probe, unless the link is blocked.
    pub(super) fn probed(
        &mut self,
        by: (NodeId, Incarnation),
        peer: NodeId,
        node: NodeId,
        answer: Option<Box<Answer>>,
    ) -> Result<(), Violation> {
        let world = &mut self.world;
        if answer.is_some() && world.network.is_blocked(node, by.0, world.now_us) {
            let event = Event::Probed {
                by,
                peer,
                node,
                answer: None,
            };
            world.push(world.now_us + PROBE_TIMEOUT_US, event);
            return Ok(());
        }
        if let Some(Node::Prefill(prefill)) = &mut self.nodes[by.0.0 as usize]
            && prefill.incarnation == by.1
        {
            world.placement.num_silent_probes += u64::from(answer.is_none());
            let (answer, now_us) = (answer.map(|answer| *answer), world.now_us);
            prefill
                .peers
                .handle_answer(&mut prefill.machine, peer, answer, now_us);
            prefill.settle(world)?;
        }
        Ok(())
    }

    /// Has a node fetch the blocks of a prompt from the node in the plan.
    pub(super) fn fetch_prompt(&mut self, index: usize) -> Result<(), Violation> {
        let world = &mut self.world;
        let fetch = &world.workload.fleet.prompt_fetches[index];
        let request = &world.workload.calls[fetch.call].request;
        let wanted = Wanted {
            source: NodeIncarnation {
                node: fetch.from,
                incarnation: world.registry[&fetch.from],
            },
            namespace: request.namespace.clone(),
            tokens: request.prompt.clone(),
            soft_us: world.now_us + fetch.soft_us,
            hard_us: world.now_us + fetch.hard_us,
        };
        let Some(node) = &mut self.nodes[fetch.node.0 as usize] else {
            return Ok(());
        };
        let (exchange, engine) = node.exchange();
        world.placement.num_other_pulls += 1;
        exchange.start_load(wanted, engine, world);
        node.settle(world)
    }

    /// Delivers an event to a load's source or fetcher.
    pub(super) fn load(&mut self, event: BlockEvent) -> Result<(), Violation> {
        let (id, incarnation) = match &event {
            BlockEvent::Arrive { to, .. } => (*to, None),
            BlockEvent::Local(id, incarnation, _) => (*id, Some(*incarnation)),
        };
        let source = match &event {
            BlockEvent::Local(_, _, event) => event.source(),
            BlockEvent::Arrive { from, to, .. } => {
                if self.world.network.is_blocked(*from, *to, self.world.now_us) {
                    return Ok(());
                }
                None
            }
        };
        let source = source.and_then(|(from, of)| {
            let source = self.nodes[from.0 as usize].as_mut();
            // A read in the memory of a dead process fails.
            source.filter(|source| source.incarnation() == of)
        });
        let read = match (source.map(Node::exchange), &event) {
            (Some((exchange, engine)), BlockEvent::Local(_, _, event)) => {
                exchange.read_part(id, event, engine)
            }
            _ => None,
        };
        let Some(node) = &mut self.nodes[id.0 as usize] else {
            return Ok(());
        };
        if incarnation.is_some_and(|incarnation| incarnation != node.incarnation()) {
            return Ok(());
        }
        let world = &mut self.world;
        let (exchange, engine) = node.exchange();
        match event {
            BlockEvent::Arrive {
                from, key, packet, ..
            } => exchange.arrive(from, key, packet, engine, world),
            BlockEvent::Local(_, _, event) => exchange.local(event, read, engine, world)?,
        }
        node.settle(world)
    }
}
