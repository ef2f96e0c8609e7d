//! What the nodes of a fleet share: time, chance, and the network.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::collections::BinaryHeap;

use corella_core::session::{BlockPart, LoadId, LoadKey, ToLoader, ToSource};
use corella_core::{BlockList, FetchRequest, HoldId, Incarnation, NodeId, PageId};

use crate::executor::Row;
use crate::fleet::fleet_load::FleetLoad;
use crate::fleet::fleet_totals::FleetTotals;
use crate::random::Random;
use crate::violation::Violation;

pub enum Event {
    Call(usize),
    Abort(usize),
    Load(usize),
    Crash(usize),
    Start(NodeId),
    /// All nodes know of a start.
    Registered(NodeId, Incarnation),
    Arrive {
        from: NodeId,
        to: NodeId,
        key: LoadKey,
        packet: Packet,
    },
    /// A matter of one process.
    Local(NodeId, Incarnation, LocalEvent),
}

#[derive(Clone, Debug)]
pub enum Packet {
    ToSource(ToSource),
    ToLoader(ToLoader),
    /// Rows of one layer, or where they are in the source's memory.
    Rows(BlockPart, PartRows),
}

#[derive(Clone, Debug)]
pub enum PartRows {
    Sent(Vec<Row>),
    InMemory(PageId),
}

pub enum LocalEvent {
    Wake,
    StepReturns,
    /// The engine comes to what it was asked for.
    LookUp(LoadId, BlockList),
    Hold(LoadId, BlockList, u64),
    Release(LoadId, HoldId, bool),
    Choose(LoadKey, u32),
    BeginFetch(LoadKey, FetchRequest),
    /// A reader of a source has read a part.
    PartRead(LoadId),
    /// A part has been written.
    PartLanded {
        from: NodeId,
        key: LoadKey,
        part: BlockPart,
        page: PageId,
        rows: PartRows,
    },
}

pub struct World<'a> {
    pub load: &'a FleetLoad,
    pub now_us: u64,
    pub random: Random,
    pub registry: BTreeMap<NodeId, Incarnation>,
    events: BinaryHeap<Reverse<(u64, u64)>>,
    queued: BTreeMap<u64, Event>,
    num_events: u64,
    pub totals: FleetTotals,
}

impl<'a> World<'a> {
    pub fn new(load: &'a FleetLoad, seed: u64) -> Self {
        Self {
            load,
            now_us: 0,
            random: Random(!seed),
            registry: BTreeMap::new(),
            events: BinaryHeap::new(),
            queued: BTreeMap::new(),
            num_events: 0,
            totals: FleetTotals::default(),
        }
    }

    pub fn push(&mut self, at_us: u64, event: Event) {
        let number = self.num_events;
        self.num_events += 1;
        self.events.push(Reverse((at_us.max(self.now_us), number)));
        self.queued.insert(number, event);
    }

    pub fn pop(&mut self) -> Option<Event> {
        let Reverse((at_us, number)) = self.events.pop()?;
        self.now_us = at_us;
        self.queued.remove(&number)
    }

    pub fn num_events(&self) -> u64 {
        self.num_events
    }

    /// A message goes out. It may be lost or repeated, and may overtake others.
    pub fn send(&mut self, from: NodeId, to: NodeId, key: LoadKey, packet: Packet) {
        let links = &self.load.links;
        let happens = |random: &mut Random, once_in: u64| once_in > 0 && random.once_in(once_in);
        if happens(&mut self.random, links.loses_once_in) {
            self.totals.num_messages_lost += 1;
            return;
        }
        let mut copies = vec![packet];
        if happens(&mut self.random, links.repeats_once_in) {
            self.totals.num_messages_repeated += 1;
            copies.push(copies[0].clone());
        }
        for packet in copies {
            let at_us = self.now_us + 1 + self.random.below(links.max_latency_us);
            let event = Event::Arrive {
                from,
                to,
                key,
                packet,
            };
            self.push(at_us, event);
        }
    }

    pub fn part_us(&mut self) -> u64 {
        1 + self.random.below(self.load.links.max_part_us)
    }

    pub fn answer_us(&mut self) -> u64 {
        self.random.below(self.load.links.max_answer_us + 1)
    }

    pub fn violation(&self, rule: &'static str, what: String) -> Violation {
        Violation {
            at_us: self.now_us,
            rule,
            what,
        }
    }
}
