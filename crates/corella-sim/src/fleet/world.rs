//! The state that the nodes of a fleet share: time, random numbers and the network.

use std::collections::BTreeMap;

use corella_core::{Incarnation, NodeId};

use crate::event_queue::EventQueue;
use crate::fleet::fleet_totals::{CallTotals, FleetTotals};
use crate::fleet::fleet_workload::FleetWorkload;
use crate::pair::blocks::block_net::{BlockEvent, BlockNet, Surroundings};
use crate::random::Random;

pub enum Event {
    Call(usize),
    Abort(usize),
    Load(usize),
    Crash(usize),
    Start(NodeId),
    /// All nodes learn of a start.
    Registered(NodeId, Incarnation),
    Block(Box<BlockEvent>),
    /// An event within one process.
    Local(NodeId, Incarnation, LocalEvent),
}

pub enum LocalEvent {
    Wake,
    StepReturns,
}

pub struct World<'a> {
    pub workload: &'a FleetWorkload,
    pub now_us: u64,
    pub random: Random,
    pub registry: BTreeMap<NodeId, Incarnation>,
    events: EventQueue<Event>,
    net: BlockNet,
    pub totals: CallTotals,
}

impl<'a> World<'a> {
    pub fn new(workload: &'a FleetWorkload, seed: u64) -> Self {
        Self {
            workload,
            now_us: 0,
            random: Random(!seed),
            registry: BTreeMap::new(),
            events: EventQueue::new(),
            net: BlockNet::new(&workload.links, &workload.config),
            totals: CallTotals::default(),
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

    pub fn num_events(&self) -> u64 {
        self.events.num_events()
    }

    /// Returns the outcome of the run.
    pub fn into_totals(self) -> FleetTotals {
        FleetTotals {
            calls: self.totals,
            loads: self.net.totals,
        }
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
