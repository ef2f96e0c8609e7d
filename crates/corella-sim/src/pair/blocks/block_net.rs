//! The network over which blocks are loaded, and the surroundings of both ends of a load.

use corella_core::session::{BlockPart, LoadConfig, LoadId, LoadKey, ToFetcher, ToSource};
use corella_core::{
    BlockList, FetchEnd, FetchId, FetchRequest, HoldId, Incarnation, NodeId, PageId,
};

use crate::executor::Row;
use crate::pair::blocks::fetch_totals::FetchTotals;
use crate::pair::blocks::liar;
use crate::random::Random;
use crate::violation::Violation;

#[derive(Clone, Debug)]
pub struct Links {
    pub max_latency_us: u64,
    /// One message in this many is lost; 0 means none.
    pub loses_once_in: u64,
    pub repeats_once_in: u64,
    /// Whether loading nodes read the source's memory.
    pub reads_memory: bool,
    /// Whether the transport orders and limits the rows itself, and reports only the end of a whole load.
    pub loads_whole: bool,
    /// The longest duration of reading or writing one part.
    pub max_part_us: u64,
    /// One in this many parts is torn; 0 means never.
    pub tears_once_in: u64,
    /// The longest time that an engine takes to answer.
    pub max_answer_us: u64,
    /// A node that lies about loads.
    pub liar: Option<NodeId>,
}

impl Links {
    pub fn drawn(random: &mut Random) -> Self {
        Self {
            max_latency_us: random.pick(&[10, 100, 2_000]),
            loses_once_in: random.pick(&[0, 0, 100, 20]),
            repeats_once_in: random.pick(&[0, 20, 3]),
            reads_memory: random.once_in(2),
            loads_whole: random.once_in(2),
            max_part_us: random.pick(&[1, 20, 100, 1_000]),
            tears_once_in: random.pick(&[0, 0, 100]),
            max_answer_us: random.pick(&[0, 50, 1_000]),
            liar: None,
        }
    }

    /// Makes one node a liar, in one of three fleets.
    pub fn draw_liar(&mut self, num_nodes: u64, random: &mut Random) {
        let is_there = random.once_in(3);
        self.liar = is_there.then(|| NodeId(random.below(num_nodes) as u32));
    }
}

/// Draws the times and limits of block loads.
pub fn load_config(page_size: u32, num_layers: Vec<u32>, random: &mut Random) -> LoadConfig {
    LoadConfig {
        max_loads: random.pick(&[2, 8, 64]),
        lookup_us: random.pick(&[5_000, 50_000]),
        stall_us: random.pick(&[3_000, 50_000]),
        lease_us: random.pick(&[2_000, 20_000, 1_000_000]),
        credit_blocks: random.pick(&[1, 2, 8]),
        tombstone_us: 50_000,
        ..LoadConfig::new(page_size, num_layers)
    }
}

pub struct BlockNet {
    pub links: Links,
    pub config: LoadConfig,
    pub totals: FetchTotals,
}

impl BlockNet {
    pub fn new(links: &Links, config: &LoadConfig) -> Self {
        let mut config = config.clone();
        if links.loads_whole {
            // As in production, the source hears only that all has landed.
            config.credit_blocks = u32::MAX;
        }
        Self {
            links: links.clone(),
            config,
            totals: FetchTotals::default(),
        }
    }
}

pub enum BlockEvent {
    Arrive {
        from: NodeId,
        to: NodeId,
        key: LoadKey,
        packet: Packet,
    },
    /// An event within one process.
    Local(NodeId, Incarnation, LocalEvent),
}

#[derive(Clone, Debug)]
pub enum Packet {
    ToSource(ToSource),
    ToFetcher(ToFetcher),
    /// Rows of one layer, or their location in the source's memory.
    Rows(BlockPart, PartRows),
}

#[derive(Clone, Debug)]
pub enum PartRows {
    Sent(Vec<Row>),
    InMemory(PageId),
}

pub enum LocalEvent {
    /// The engine answers a question about blocks.
    LookUp(LoadId, BlockList, u32),
    Hold(LoadId, BlockList, u32, u64),
    Release(LoadId, HoldId, bool),
    Choose(LoadKey, u32),
    BeginFetch(LoadKey, FetchRequest),
    ShortenFetch(LoadKey, FetchId, u32),
    Publish(FetchId, u32),
    EndFetch(FetchId, FetchEnd),
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

impl LocalEvent {
    /// Returns the incarnation of the node whose rows are written.
    pub fn source(&self) -> Option<(NodeId, Incarnation)> {
        match self {
            Self::PartLanded { from, key, .. } => Some((*from, key.source)),
            _ => None,
        }
    }
}

/// The surroundings of both ends of a load.
pub trait Surroundings {
    fn now_us(&self) -> u64;

    fn random(&mut self) -> &mut Random;

    fn net(&mut self) -> &mut BlockNet;

    fn push_block_event(&mut self, at_us: u64, event: BlockEvent);

    /// Sends a message. It may be lost, repeated or reordered. A liar hears it, too.
    fn send(&mut self, from: NodeId, to: NodeId, key: LoadKey, packet: Packet) {
        if let Some(liar) = self.net().links.liar {
            liar::hear(self, liar, (from, to, key), &packet);
        }
        let Links {
            max_latency_us,
            loses_once_in,
            repeats_once_in,
            ..
        } = self.net().links;
        if self.happens(loses_once_in) {
            self.net().totals.num_messages_lost += 1;
            return;
        }
        let mut copies = vec![packet];
        if self.happens(repeats_once_in) {
            self.net().totals.num_messages_repeated += 1;
            copies.push(copies[0].clone());
        }
        for packet in copies {
            let at_us = self.now_us() + 1 + self.random().below(max_latency_us);
            self.push_packet(at_us, (from, to, key), packet);
        }
    }

    fn push_packet(
        &mut self,
        at_us: u64,
        (from, to, key): (NodeId, NodeId, LoadKey),
        packet: Packet,
    ) {
        let event = BlockEvent::Arrive {
            from,
            to,
            key,
            packet,
        };
        self.push_block_event(at_us, event);
    }

    /// Returns true once in `once_in` calls on average; with 0, never.
    fn happens(&mut self, once_in: u64) -> bool {
        once_in > 0 && self.random().once_in(once_in)
    }

    fn part_us(&mut self) -> u64 {
        let max_part_us = self.net().links.max_part_us;
        1 + self.random().below(max_part_us)
    }

    fn answers_us(&mut self) -> u64 {
        let max_answer_us = self.net().links.max_answer_us;
        self.now_us() + self.random().below(max_answer_us + 1)
    }

    fn violation(&self, rule: &'static str, what: String) -> Violation {
        Violation {
            at_us: self.now_us(),
            rule,
            what,
        }
    }
}
