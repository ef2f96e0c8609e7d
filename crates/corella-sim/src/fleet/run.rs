//! One run of a fleet: events in virtual time, nodes between them, faults among them.

use std::collections::BTreeMap;

use corella_core::{FinishReason, Incarnation, NodeId, RequestId, RequestOutput, TokenId};

use crate::fleet::fleet_load::FleetLoad;
use crate::fleet::fleet_totals::FleetTotals;
use crate::fleet::node::Node;
use crate::fleet::world::{Event, LocalEvent, PartRows, World};
use crate::violation::Violation;

/// Plays a load to its end. Executors and the machines' own assertions panic.
pub fn simulate_fleet(load: &FleetLoad, seed: u64) -> Result<FleetTotals, Violation> {
    let mut run = Run::new(load, seed);
    run.play()?;
    Ok(run.world.totals)
}

struct Run<'a> {
    world: World<'a>,
    nodes: Vec<Option<Box<Node>>>,
    incarnations: Vec<Incarnation>,
    /// What clients have got, and that they wait for more.
    clients: BTreeMap<RequestId, Vec<TokenId>>,
}

impl<'a> Run<'a> {
    fn new(load: &'a FleetLoad, seed: u64) -> Self {
        let mut world = World::new(load, seed);
        world.totals.num_runs = 1;
        for (index, call) in load.calls.iter().enumerate() {
            world.push(call.at_us, Event::Call(index));
            if let Some(abort_us) = call.abort_us {
                world.push(abort_us, Event::Abort(index));
            }
        }
        for (index, plan) in load.loads.iter().enumerate() {
            world.push(plan.at_us, Event::Load(index));
        }
        for (index, crash) in load.crashes.iter().enumerate() {
            world.push(crash.at_us, Event::Crash(index));
        }
        let mut run = Self {
            nodes: load.nodes.iter().map(|_| None).collect(),
            incarnations: vec![Incarnation(0); load.nodes.len()],
            world,
            clients: BTreeMap::new(),
        };
        for index in 0..load.nodes.len() {
            run.start(NodeId(index as u32));
            let id = NodeId(index as u32);
            run.world.registry.insert(id, Incarnation(1));
        }
        run
    }

    fn play(&mut self) -> Result<(), Violation> {
        while let Some(event) = self.world.pop() {
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
            self.world.totals.num_fetched_blocks += node.engine.stats().num_fetched_blocks;
        }
        Ok(())
    }

    /// Returns the node that has something to do because of it.
    fn happen(&mut self, event: Event) -> Result<Option<NodeId>, Violation> {
        let world = &mut self.world;
        let load = world.load;
        match event {
            Event::Call(index) => {
                let call = &load.calls[index];
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
                let call = &load.calls[index];
                if let Some(node) = &mut self.nodes[call.node.0 as usize] {
                    node.engine.scheduler().abort_request(call.request.id);
                }
                Ok(Some(call.node))
            }
            Event::Load(index) => {
                let plan = &load.loads[index];
                if let Some(node) = &mut self.nodes[plan.node.0 as usize] {
                    node.start_load(plan, world);
                }
                Ok(Some(plan.node))
            }
            Event::Crash(index) => {
                let crash = &load.crashes[index];
                if let Some(node) = self.nodes[crash.node.0 as usize].take() {
                    world.totals.num_crashes += 1;
                    world.totals.num_loaders_lost += node.num_open_loads();
                    world.push(world.now_us + crash.down_us, Event::Start(crash.node));
                    let num_before = self.clients.len();
                    let is_elsewhere = |id: &RequestId, _: &mut Vec<TokenId>| {
                        load.calls[id.0 as usize].node != crash.node
                    };
                    self.clients.retain(is_elsewhere);
                    world.totals.num_lost += (num_before - self.clients.len()) as u64;
                }
                Ok(None)
            }
            Event::Start(node) => {
                self.start(node);
                Ok(None)
            }
            Event::Registered(node, incarnation) => {
                let known = world.registry.entry(node).or_insert(incarnation);
                *known = incarnation.max(*known);
                let now_us = world.now_us;
                for other in self.nodes.iter_mut().flatten() {
                    other.handle_incarnation(node, incarnation, now_us);
                }
                for index in 0..self.nodes.len() {
                    self.settle(NodeId(index as u32))?;
                }
                Ok(None)
            }
            Event::Arrive {
                from,
                to,
                key,
                packet,
            } => {
                if let Some(node) = &mut self.nodes[to.0 as usize] {
                    node.arrive(from, key, packet, world);
                }
                Ok(Some(to))
            }
            Event::Local(node, incarnation, event) => {
                self.local(node, incarnation, event);
                Ok(Some(node))
            }
        }
    }

    fn local(&mut self, id: NodeId, incarnation: Incarnation, event: LocalEvent) {
        let is_alive = |node: &Option<Box<Node>>| {
            node.as_ref()
                .is_some_and(|node| node.incarnation == incarnation)
        };
        if !is_alive(&self.nodes[id.0 as usize]) {
            return;
        }
        let LocalEvent::PartLanded {
            from,
            key,
            part,
            page,
            rows,
        } = event
        else {
            if let Some(node) = &mut self.nodes[id.0 as usize] {
                node.local(event, &mut self.world);
            }
            return;
        };
        let tears_once_in = self.world.load.links.tears_once_in;
        let is_torn = tears_once_in > 0 && self.world.random.once_in(tears_once_in);
        self.world.totals.num_torn_parts += u64::from(is_torn);
        let mut is_late = false;
        let rows = match rows {
            PartRows::Sent(rows) => Some(rows),
            // A read of a process that is gone fails.
            PartRows::InMemory(page) => { self.nodes[from.0 as usize].as_ref() }
                .filter(|node| node.incarnation == key.source)
                .map(|node| {
                    is_late = node.has_released((id, key));
                    node.page_rows(page)
                }),
        };
        let rows = rows.filter(|_| !is_torn);
        if let Some(node) = &mut self.nodes[id.0 as usize] {
            if is_late {
                self.world.totals.num_read_late += 1;
                node.note_read_late(key, part);
            }
            node.land(key, part, page, rows, &mut self.world);
        }
    }

    fn start(&mut self, id: NodeId) {
        let incarnation = &mut self.incarnations[id.0 as usize];
        incarnation.0 += 1;
        let incarnation = *incarnation;
        let node = Node::new(id, incarnation, &self.world);
        self.nodes[id.0 as usize] = Some(Box::new(node));
        let known_us = self.world.now_us + self.world.load.registry_delay_us;
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

    /// A client gets what it would get of a node that has nothing else to do.
    fn take(&mut self, output: RequestOutput) -> Result<(), Violation> {
        let id = output.request;
        let call = &self.world.load.calls[id.0 as usize];
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
                self.world.load.steps_fail_once_in > 0
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
