//! One run of a fleet: its nodes, and the events and faults in virtual time.

use std::collections::BTreeMap;

use corella_core::{FinishReason, Incarnation, NodeId, RequestId, RequestOutput, TokenId};

use crate::check::standstill::Standstill;
use crate::fleet::fleet_totals::FleetTotals;
use crate::fleet::fleet_workload::FleetWorkload;
use crate::fleet::node::Node;
use crate::fleet::world::{Event, World};
use crate::pair::blocks::block_net::{BlockEvent, LocalEvent as BlockLocal, Surroundings};
use crate::pair::blocks::exchange::first_incarnation;
use crate::violation::Violation;

/// Plays a workload to its end. Executors and the machines' own assertions panic.
pub fn simulate_fleet(workload: &FleetWorkload, seed: u64) -> Result<FleetTotals, Violation> {
    let mut run = Run::new(workload, seed);
    run.play()?;
    Ok(run.world.into_totals())
}

struct Run<'a> {
    world: World<'a>,
    nodes: Vec<Option<Box<Node>>>,
    incarnations: Vec<Incarnation>,
    /// The tokens that waiting clients have received.
    clients: BTreeMap<RequestId, Vec<TokenId>>,
}

impl<'a> Run<'a> {
    fn new(workload: &'a FleetWorkload, seed: u64) -> Self {
        let mut world = World::new(workload, seed);
        world.totals.num_runs = 1;
        for (index, call) in workload.calls.iter().enumerate() {
            world.push(call.at_us, Event::Call(index));
            if let Some(abort_us) = call.abort_us {
                world.push(abort_us, Event::Abort(index));
            }
        }
        for (index, plan) in workload.loads.iter().enumerate() {
            world.push(plan.at_us, Event::Load(index));
        }
        for (index, crash) in workload.crashes.iter().enumerate() {
            world.push(crash.at_us, Event::Crash(index));
        }
        let mut run = Self {
            nodes: workload.nodes.iter().map(|_| None).collect(),
            incarnations: Vec::new(),
            world,
            clients: BTreeMap::new(),
        };
        for index in 0..workload.nodes.len() {
            let id = NodeId(index as u32);
            let first = first_incarnation(id);
            run.incarnations.push(first);
            run.start(id, first);
            run.world.registry.insert(id, first);
        }
        run
    }

    fn play(&mut self) -> Result<(), Violation> {
        let mut standstill = Standstill::default();
        while let Some(event) = self.world.pop() {
            let verdict = standstill.check(self.world.now_us);
            verdict.map_err(|what| self.world.violation("time goes on", what))?;
            if let Some(node) = self.happen(event)? {
                self.settle(node)?;
            }
        }
        self.world.totals.num_events = self.world.num_events();
        if let Some(request) = self.clients.keys().next() {
            let what = format!("request {request} waits");
            return Err(self.world.violation("every request ends", what));
        }
        for node in self.nodes.iter_mut().flatten() {
            let leftovers = node.leftovers();
            if !leftovers.is_empty() {
                return Err(self.world.violation("nothing is left", leftovers));
            }
            self.world.net().totals.num_fetched_blocks += node.engine.stats().num_fetched_blocks;
        }
        Ok(())
    }

    /// Plays an event. Returns the node that has to act after it.
    fn happen(&mut self, event: Event) -> Result<Option<NodeId>, Violation> {
        let world = &mut self.world;
        let (workload, now_us) = (world.workload, world.now_us);
        match event {
            Event::Call(index) => {
                let call = &workload.calls[index];
                let Some(node) = &mut self.nodes[call.node.0 as usize] else {
                    world.totals.num_lost += 1;
                    return Ok(None);
                };
                let submitted = node.engine.submit(call.request.clone(), false);
                submitted.expect("queues are long enough");
                self.clients.insert(call.request.id, Vec::new());
                Ok(Some(call.node))
            }
            Event::Abort(index) => {
                let call = &workload.calls[index];
                if let Some(node) = &mut self.nodes[call.node.0 as usize] {
                    node.engine.scheduler().abort_request(call.request.id);
                }
                Ok(Some(call.node))
            }
            Event::Load(index) => {
                let plan = &workload.loads[index];
                if let Some(node) = &mut self.nodes[plan.node.0 as usize] {
                    node.start_load(plan, world);
                }
                Ok(Some(plan.node))
            }
            Event::Crash(index) => {
                self.crash(index);
                Ok(None)
            }
            Event::Start(node) => {
                let start = &mut self.incarnations[node.0 as usize];
                start.0 += 1;
                let start = *start;
                self.start(node, start);
                Ok(None)
            }
            Event::Registered(node, incarnation) => {
                let known = world.registry.entry(node).or_insert(incarnation);
                *known = incarnation.max(*known);
                for other in self.nodes.iter_mut().flatten() {
                    other.exchange.handle_restart(node, incarnation, now_us);
                }
                for index in 0..self.nodes.len() {
                    self.settle(NodeId(index as u32))?;
                }
                Ok(None)
            }
            Event::Block(event) => match *event {
                BlockEvent::Arrive {
                    from,
                    to,
                    key,
                    packet,
                } => {
                    if let Some(node) = &mut self.nodes[to.0 as usize] {
                        let engine = &mut node.engine;
                        node.exchange.arrive(from, key, packet, engine, world);
                    }
                    Ok(Some(to))
                }
                BlockEvent::Local(id, incarnation, event) => {
                    self.load(id, incarnation, event)?;
                    Ok(Some(id))
                }
            },
            Event::Local(id, incarnation, event) => {
                if let Some(node) = self.present(id, incarnation) {
                    node.local(event, now_us);
                }
                Ok(Some(id))
            }
        }
    }

    fn crash(&mut self, index: usize) {
        let workload = self.world.workload;
        let world = &mut self.world;
        let crash = &workload.crashes[index];
        if let Some(node) = self.nodes[crash.node.0 as usize].take() {
            world.totals.num_crashes += 1;
            world.net().totals.num_loaders_lost += node.exchange.num_open_loads();
            world.push(world.now_us + crash.down_us, Event::Start(crash.node));
            let num_before = self.clients.len();
            let is_elsewhere = |id: &RequestId, _: &mut Vec<TokenId>| {
                workload.calls[id.0 as usize].node != crash.node
            };
            self.clients.retain(is_elsewhere);
            world.totals.num_lost += (num_before - self.clients.len()) as u64;
        }
    }

    fn present(&mut self, id: NodeId, incarnation: Incarnation) -> Option<&mut Node> {
        let node = self.nodes[id.0 as usize].as_deref_mut();
        node.filter(|node| node.incarnation == incarnation)
    }

    /// Delivers an event to the load's source or loader.
    fn load(
        &mut self,
        id: NodeId,
        incarnation: Incarnation,
        event: BlockLocal,
    ) -> Result<(), Violation> {
        let source = event.source().and_then(|(from, of)| {
            let source = self.nodes[from.0 as usize].as_deref();
            // A read in the memory of a dead process fails.
            source.filter(|source| source.incarnation == of)
        });
        let read = source.and_then(|node| node.exchange.read_part(id, &event, &node.engine));
        let Some(node) = self.nodes[id.0 as usize].as_deref_mut() else {
            return Ok(());
        };
        if node.incarnation == incarnation {
            let (exchange, engine) = (&mut node.exchange, &mut node.engine);
            exchange.local(event, read, engine, &mut self.world)?;
        }
        Ok(())
    }

    fn start(&mut self, id: NodeId, incarnation: Incarnation) {
        let node = Node::new(id, incarnation, &mut self.world);
        self.nodes[id.0 as usize] = Some(Box::new(node));
        let known_us = self.world.now_us + self.world.workload.registry_delay_us;
        self.world
            .push(known_us, Event::Registered(id, incarnation));
    }

    fn settle(&mut self, id: NodeId) -> Result<(), Violation> {
        let Some(node) = &mut self.nodes[id.0 as usize] else {
            return Ok(());
        };
        for output in node.settle(&mut self.world)? {
            self.take(output)?;
        }
        Ok(())
    }

    /// Checks an output: clients receive the tokens of a lone run.
    fn take(&mut self, output: RequestOutput) -> Result<(), Violation> {
        let id = output.request;
        let call = &self.world.workload.calls[id.0 as usize];
        let Some(tokens) = self.clients.get_mut(&id) else {
            let what = format!("request {id} has ended");
            return Err(self.world.violation("a request ends once", what));
        };
        tokens.extend(output.sample.map(|sample| sample.token));
        let is_right = call.output.starts_with(tokens);
        let totals = &mut self.world.totals;
        let is_whole = match &output.finish {
            None => true,
            Some(FinishReason::Aborted) => {
                totals.num_aborted += 1;
                call.abort_us.is_some()
            }
            Some(FinishReason::Error(_)) => {
                totals.num_failed += 1;
                self.world.workload.steps_fail_once_in > 0
            }
            Some(finish) => {
                totals.num_completed += 1;
                *tokens == call.output && *finish == call.finish
            }
        };
        if !is_right || !is_whole {
            let what = format!(
                "request {id} has {tokens:?} of {:?}, {:?}",
                call.output, output.finish
            );
            return Err(self.world.violation("same request, same tokens", what));
        }
        if output.finish.is_some() {
            self.clients.remove(&id);
        }
        Ok(())
    }
}
