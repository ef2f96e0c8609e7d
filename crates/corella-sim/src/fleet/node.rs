//! One node of a fleet: an engine, and both ends of loads.

use corella_core::session::NodeIncarnation;
use corella_core::{Incarnation, NodeId, RequestOutput};

use crate::fleet::fleet_workload::LoadPlan;
use crate::fleet::world::{Event, LocalEvent, World};
use crate::pair::blocks::exchange::{Exchange, Wanted};
use crate::pair::engine::Engine;
use crate::violation::Violation;

pub struct Node {
    id: NodeId,
    pub incarnation: Incarnation,
    pub engine: Engine,
    pub exchange: Exchange,
    wakes_us: Option<u64>,
}

impl Node {
    pub fn new(id: NodeId, incarnation: Incarnation, world: &mut World<'_>) -> Self {
        let workload = world.workload;
        let plan = &workload.nodes[id.0 as usize];
        Self {
            id,
            incarnation,
            engine: Engine::new(plan, workload.alphabet, workload.steps_fail_once_in),
            exchange: Exchange::new(id, incarnation, world),
            wakes_us: None,
        }
    }

    pub fn start_load(&mut self, plan: &LoadPlan, world: &mut World<'_>) {
        let wanted = Wanted {
            source: NodeIncarnation {
                node: plan.from,
                incarnation: world.registry[&plan.from],
            },
            namespace: plan.namespace.clone(),
            tokens: plan.tokens.clone(),
            soft_us: world.now_us + plan.soft_us,
            hard_us: world.now_us + plan.hard_us,
        };
        self.exchange.start_load(wanted, &mut self.engine, world);
    }

    pub fn local(&mut self, event: LocalEvent, now_us: u64) {
        match event {
            LocalEvent::Wake => {
                self.wakes_us = None;
                self.exchange.handle_timeout(now_us);
            }
            LocalEvent::StepReturns => self.engine.return_step(),
        }
    }

    /// Runs the engine and the tasks of both ends of loads, until none is left.
    pub fn settle(&mut self, world: &mut World<'_>) -> Result<Vec<RequestOutput>, Violation> {
        let mut outputs = Vec::new();
        loop {
            while let Some(step) = self.engine.try_step(world.now_us, &mut world.random) {
                self.push(step.returns_us, LocalEvent::StepReturns, world);
            }
            while let Some(output) = self.engine.poll_output() {
                outputs.push(output);
            }
            if !self.exchange.settle(&mut self.engine, world)? {
                break;
            }
        }
        self.engine.scheduler().check_invariants();
        let deadlines = [
            self.engine.scheduler().poll_deadline(),
            self.exchange.poll_timeout(),
        ];
        let next_us = deadlines.into_iter().flatten().min();
        if let Some(next_us) = next_us
            && self.wakes_us.is_none_or(|wakes_us| next_us < wakes_us)
        {
            self.wakes_us = Some(next_us);
            self.push(next_us, LocalEvent::Wake, world);
        }
        Ok(outputs)
    }

    /// Describes loads, holds and fetches that should have ended.
    pub fn leftovers(&mut self) -> String {
        let stats = self.engine.stats();
        let loads = self.exchange.leftovers();
        let num_held = stats.num_fetching_pages + stats.num_block_holds;
        match loads.is_empty() && num_held == 0 && !self.engine.scheduler().has_unfinished() {
            true => String::new(),
            false => format!("node {}: {loads}, {stats:?}", self.id),
        }
    }

    fn push(&self, at_us: u64, event: LocalEvent, world: &mut World<'_>) {
        world.push(at_us, Event::Local(self.id, self.incarnation, event));
    }
}
