//! Both ends of one node's loads, and their tasks for engine and transport.

use std::collections::{BTreeMap, BTreeSet};

use corella_core::session::{
    BlockFetcher, BlockPart, BlockSource, LoadConfig, LoadId, LoadKey, NodeIncarnation, RowPart,
    WantedBlocks,
};
use corella_core::{
    BlockHasher, BlockList, FetchGrant, FetchId, HoldId, Incarnation, Namespace, NodeId, PageId,
    TokenId,
};

use crate::executor::{Row, root_row, rows_of};
use crate::pair::blocks::block_net::{BlockEvent, LocalEvent, Packet, PartRows, Surroundings};
use crate::pair::blocks::part_reader::PartReader;
use crate::pair::blocks::part_store::PartStore;
use crate::pair::blocks::whole_load::WholeLoad;
use crate::pair::engine::Engine;
use crate::violation::Violation;

pub struct Exchange {
    pub(super) id: NodeId,
    pub(super) incarnation: Incarnation,
    pub(super) source: BlockSource,
    pub(crate) fetcher: BlockFetcher,
    /// The readers of this node's blocks, for loads of other nodes.
    pub(super) readers: BTreeMap<LoadId, PartReader>,
    parts: PartStore,
    /// Loads of a transport that reports all rows of a load at once, and not its parts.
    pub(super) whole: BTreeMap<LoadKey, WholeLoad>,
    pub(super) fetches: BTreeMap<FetchId, Fetched>,
    /// The time at which the engine handles the last message about fetches.
    told_us: u64,
    /// Loads that have not ended, each with its source and the latest time of its end.
    pub(super) open: BTreeMap<LoadKey, (NodeIncarnation, u64)>,
    /// Loads of other nodes whose hold was released: their pages may belong to other owners.
    pub(super) released: BTreeSet<LoadId>,
    /// The holds for loads of other nodes, and the loads whose hold has ended early.
    holds: BTreeMap<HoldId, LoadId>,
    pub(super) not_held: BTreeSet<LoadId>,
    /// For each load of another node, the block at which its held blocks end, and the time at which the hold ends.
    pub(super) held: BTreeMap<LoadId, Held>,
    /// Blocks with a part that this node read in the source's memory after the source had released the block.
    pub(super) read_late: BTreeSet<(LoadKey, u32)>,
}

/// Incarnations are unique among all nodes.
pub fn first_incarnation(node: NodeId) -> Incarnation {
    Incarnation(1000 * (1 + u64::from(node.0)))
}

/// Blocks that a node loads.
pub struct Wanted {
    pub source: NodeIncarnation,
    pub namespace: Namespace,
    /// The tokens of the blocks. An incomplete last block is not loaded.
    pub tokens: Vec<TokenId>,
    pub soft_us: u64,
    pub hard_us: u64,
}

/// Blocks that are held for another node.
#[derive(Clone, Copy)]
pub(super) struct Held {
    pub end_block: u32,
    pub until_us: u64,
}

/// A part that was read in its source's memory.
pub struct ReadPart {
    rows: Vec<Row>,
    /// Whether the source had released the page before the read.
    is_late: bool,
}

/// A fetch, with the key of its load and the rows of its sequence.
pub(super) struct Fetched {
    pub key: LoadKey,
    pub grant: FetchGrant,
    pub rows: Vec<Row>,
}

impl Exchange {
    pub fn new(id: NodeId, incarnation: Incarnation, world: &mut impl Surroundings) -> Self {
        let net = world.net();
        let config = net.config.clone();
        let source_config = match net.links.loads_whole {
            true => LoadConfig {
                stall_us: config.lease_us,
                ..config.clone()
            },
            false => config.clone(),
        };
        Self {
            id,
            incarnation,
            source: BlockSource::new(source_config, incarnation),
            fetcher: BlockFetcher::new(config, incarnation),
            readers: BTreeMap::new(),
            parts: PartStore::default(),
            whole: BTreeMap::new(),
            fetches: BTreeMap::new(),
            told_us: 0,
            open: BTreeMap::new(),
            released: BTreeSet::new(),
            holds: BTreeMap::new(),
            not_held: BTreeSet::new(),
            held: BTreeMap::new(),
            read_late: BTreeSet::new(),
        }
    }

    /// Returns whether a load has not ended and has no pages yet.
    pub fn is_undecided(&self, load: LoadKey) -> bool {
        let mut fetches = self.fetches.values();
        self.open.contains_key(&load) && fetches.all(|fetched| fetched.key != load)
    }

    pub fn num_open_loads(&self) -> u64 {
        self.open.len() as u64
    }

    /// Begins a load and returns its key, unless too many are running.
    pub fn start_load(
        &mut self,
        wanted: Wanted,
        engine: &mut Engine,
        world: &mut impl Surroundings,
    ) -> Option<LoadKey> {
        let Wanted {
            source,
            namespace,
            mut tokens,
            soft_us,
            hard_us,
        } = wanted;
        let page_size = engine.page_size();
        tokens.truncate(tokens.len() - tokens.len() % page_size as usize);
        let num_layers = world.net().config.num_layers.iter().max();
        let list = BlockList::new(namespace, tokens, engine.block_hasher(), page_size);
        let request = WantedBlocks {
            source,
            num_here: engine.scheduler.look_up_blocks(&list),
            list,
            rows: RowPart {
                layers: 0..num_layers.copied().unwrap_or(0),
                heads: 0..1,
            },
            soft_us,
            hard_us,
        };
        let key = self.fetcher.start(request, world.now_us());
        match key {
            Some(key) => {
                self.open.insert(key, (source, hard_us));
            }
            None => world.net().totals.num_refused_loads += 1,
        }
        key
    }

    /// Handles a restart of a node as `new`: the connections to its earlier incarnations are lost.
    pub fn handle_restart(&mut self, node: NodeId, new: Incarnation, now_us: u64) {
        let is_lost = |source: NodeIncarnation| source.node == node && source.incarnation < new;
        let lost = self.open.iter().filter(|(_, (source, _))| is_lost(*source));
        for key in lost.map(|(&key, _)| key).collect::<Vec<_>>() {
            self.fetcher.handle_source_lost(key);
        }
        for start in first_incarnation(node).0..new.0 {
            self.source.handle_fetcher_lost(Incarnation(start), now_us);
        }
    }

    pub fn arrive(
        &mut self,
        from: NodeId,
        key: LoadKey,
        packet: Packet,
        engine: &mut Engine,
        world: &mut impl Surroundings,
    ) {
        match packet {
            Packet::ToSource(message) => {
                self.source
                    .handle_message(from, key, message, world.now_us());
            }
            Packet::ToFetcher(message) => {
                self.fetcher
                    .handle_message(from, key, message, world.now_us());
            }
            Packet::Rows(part, rows) => {
                let page = match world.net().links.loads_whole {
                    true => {
                        let load = self.whole.get_mut(&key);
                        load.and_then(|load| load.begin(from, part))
                    }
                    false => self.fetcher.begin_part(from, key, part),
                };
                let Some(page) = page else {
                    return;
                };
                self.parts.tear(page, part.layer);
                clear(page, engine);
                let at_us = world.now_us() + world.part_us();
                let event = LocalEvent::PartLanded {
                    from,
                    key,
                    part,
                    page,
                    rows,
                };
                self.push(at_us, event, world);
            }
        }
    }

    /// Handles an event of this process. `read` is a part that this node has read in the source's memory.
    // Long: one arm for each event, most of them a few lines.
    pub fn local(
        &mut self,
        event: LocalEvent,
        read: Option<ReadPart>,
        engine: &mut Engine,
        world: &mut impl Surroundings,
    ) -> Result<(), Violation> {
        let now_us = world.now_us();
        let (hasher, page_size) = (*engine.block_hasher(), engine.page_size());
        let scheduler = &mut engine.scheduler;
        match event {
            LocalEvent::LookUp(load, list, first_block) => {
                let num_blocks = scheduler.look_up_lendable(&list, first_block);
                check_hashes(&list, num_blocks, &hasher, page_size);
                let num_settled = scheduler.look_up_blocks(&list);
                world.net().totals.num_part_offers += u64::from(num_blocks < num_settled);
                self.source.handle_looked_up(load, num_blocks, now_us);
            }
            LocalEvent::Hold(load, list, first_block, until_us) => {
                let answer = scheduler.hold_blocks(&list, first_block, until_us);
                let num_blocks = answer.as_ref().map_or(0, |held| held.num_blocks);
                check_hashes(&list, num_blocks, &hasher, page_size);
                self.holds.extend(answer.iter().map(|held| (held.id, load)));
                let until_us = until_us.min(engine.hold_until_us());
                let held = answer.as_ref().map(|held| Held {
                    end_block: held.num_blocks,
                    until_us,
                });
                if let Ok(held) = held {
                    // A key may come again when its tombstone is gone. Its new hold has not ended.
                    self.released.remove(&load);
                    self.not_held.remove(&load);
                    self.held.insert(load, held);
                }
                let scheduler = &mut engine.scheduler;
                let num_lent = scheduler.stats().num_served_pages;
                let limit = scheduler.config().max_served_pages;
                if num_lent > limit as usize {
                    let what = format!("{num_lent} pages are lent, and the limit is {limit}");
                    return Err(world.violation("no more is lent than may be", what));
                }
                self.source.handle_held(load, answer, now_us);
            }
            LocalEvent::Release(load, hold, is_asked) => {
                let has_lived = scheduler.release_blocks(hold, now_us);
                let has_lived = has_lived.expect("a hold is released once");
                self.check_end(load, has_lived, world)?;
                self.released.insert(load);
                self.holds.remove(&hold);
                if !has_lived {
                    self.not_held.insert(load);
                }
                if is_asked {
                    self.source.handle_released(load, has_lived, now_us);
                }
            }
            LocalEvent::Choose(key, num_offered) => {
                let num_blocks = match world.random().once_in(8) {
                    true => world.random().below(u64::from(num_offered) + 1) as u32,
                    false => num_offered,
                };
                self.fetcher.handle_chosen(key, num_blocks);
            }
            LocalEvent::BeginFetch(key, request) => {
                let mut rows = rows_of(root_row(&request.namespace), &request.tokens);
                let answer = scheduler.begin_fetch(request);
                if let Ok(grant) = &answer {
                    let num_rows = (grant.num_blocks * page_size) as usize;
                    world.net().totals.num_part_grants += u64::from(num_rows < rows.len());
                    rows.truncate(num_rows);
                    self.note_grant(key, grant, rows, engine, world);
                }
                self.fetcher.handle_fetch_begun(key, answer, now_us);
            }
            LocalEvent::ShortenFetch(key, fetch, num_blocks) => {
                let answer = scheduler.shorten_fetch(fetch, num_blocks);
                if let Some(grant) = &answer {
                    let mut rows = self.fetches.remove(&fetch).expect("it is under way").rows;
                    rows.truncate((num_blocks * engine.page_size()) as usize);
                    self.note_grant(key, grant, rows, engine, world);
                    world.net().totals.num_shortened += 1;
                }
                self.fetcher.handle_fetch_shortened(key, answer, now_us);
            }
            LocalEvent::Publish(fetch, num_blocks) => {
                if scheduler.handle_fetched(fetch, num_blocks) {
                    world.net().totals.num_early_blocks += u64::from(num_blocks);
                }
            }
            LocalEvent::EndFetch(fetch, end) => {
                self.fetches.remove(&fetch);
                if !scheduler.handle_fetch_ended(fetch, end) {
                    let what = format!("fetch {fetch} had ended");
                    return Err(world.violation("a fetch ends once", what));
                }
            }
            LocalEvent::PartRead(load) => self.part_read(load, engine, world),
            LocalEvent::PartLanded {
                key,
                part,
                page,
                rows,
                ..
            } => {
                let tears_once_in = world.net().links.tears_once_in;
                let is_torn = world.happens(tears_once_in);
                world.net().totals.num_torn_parts += u64::from(is_torn);
                let is_late = read.as_ref().is_some_and(|read| read.is_late);
                if is_late {
                    world.net().totals.num_read_late += 1;
                    self.read_late.insert((key, part.block));
                }
                let rows = match rows {
                    PartRows::Sent(rows) => Some(rows),
                    PartRows::InMemory(_) => read.map(|read| read.rows),
                };
                let rows = rows.filter(|_| !is_torn);
                self.land(key, part, page, rows, engine, world);
            }
        }
        Ok(())
    }

    fn note_grant(
        &mut self,
        key: LoadKey,
        grant: &FetchGrant,
        rows: Vec<Row>,
        engine: &mut Engine,
        world: &mut impl Surroundings,
    ) {
        for (table, &num_layers) in grant.tables.iter().zip(&world.net().config.num_layers) {
            for &page in &table.pages {
                self.parts.begin(page, num_layers);
                clear(page, engine);
            }
        }
        let grant = grant.clone();
        self.fetches.insert(grant.id, Fetched { key, grant, rows });
    }

    /// Returns the part that `reader` reads in this node's memory.
    pub fn read_part(
        &self,
        reader: NodeId,
        event: &LocalEvent,
        engine: &Engine,
    ) -> Option<ReadPart> {
        match event {
            LocalEvent::PartLanded {
                key,
                rows: PartRows::InMemory(page),
                ..
            } => Some(ReadPart {
                rows: page_rows(*page, engine),
                is_late: self.released.contains(&(reader, *key)),
            }),
            _ => None,
        }
    }

    /// Writes a part with these rows. The part may have been torn.
    fn land(
        &mut self,
        key: LoadKey,
        part: BlockPart,
        page: PageId,
        rows: Option<Vec<Row>>,
        engine: &mut Engine,
        world: &mut impl Surroundings,
    ) {
        let is_whole = rows.is_some();
        if let Some(rows) = rows {
            let rows = self.parts.land(page, part.layer, rows);
            for (at, row) in rows.into_iter().enumerate() {
                engine.executor.write_row(page, at, row);
            }
        }
        if let Some(load) = self.whole.get_mut(&key) {
            load.end(part, is_whole);
            self.fetcher.handle_progress(key, world.now_us());
            self.end_whole(key, world.now_us());
        } else {
            self.fetcher.end_part(key, part, is_whole, world.now_us());
        }
    }

    /// Tells the fetcher that a load of all rows together has ended, once none of its parts is being written.
    pub(super) fn end_whole(&mut self, key: LoadKey, now_us: u64) {
        let outcome = self.whole.get(&key).and_then(WholeLoad::outcome);
        if let Some(is_whole) = outcome {
            self.whole.remove(&key);
            self.fetcher.end_rows(key, is_whole, now_us);
        }
    }

    /// Returns the time of the next call of [`handle_timeout`](Self::handle_timeout).
    pub fn poll_timeout(&self) -> Option<u64> {
        let deadlines = [self.source.poll_timeout(), self.fetcher.poll_timeout()];
        deadlines.into_iter().flatten().min()
    }

    pub fn handle_timeout(&mut self, now_us: u64) {
        self.source.handle_timeout(now_us);
        self.fetcher.handle_timeout(now_us);
    }

    /// Takes the engine's facts about fetches and holds, and carries out the tasks of both ends. Returns whether there
    /// were any facts or tasks.
    pub fn settle(
        &mut self,
        engine: &mut Engine,
        world: &mut impl Surroundings,
    ) -> Result<bool, Violation> {
        while let Some(fetch) = engine.scheduler.poll_fetch_cancel() {
            self.fetcher.handle_fetch_cancelled(fetch);
        }
        while let Some(hold) = engine.scheduler.poll_ended_hold() {
            self.not_held.extend(self.holds.get(&hold));
            self.source.handle_hold_ended(hold, world.now_us());
        }
        self.act(engine, world)
    }

    /// Carries out the tasks of both ends. Returns whether there were tasks.
    fn act(
        &mut self,
        engine: &mut Engine,
        world: &mut impl Surroundings,
    ) -> Result<bool, Violation> {
        let mut has_acted = false;
        while let Some(action) = self.source.poll_action() {
            self.act_as_source(action, world)?;
            has_acted = true;
        }
        while let Some(action) = self.fetcher.poll_action() {
            self.act_as_fetcher(action, engine, world)?;
            has_acted = true;
        }
        Ok(has_acted)
    }

    /// Describes loads, holds and fetches that should have ended.
    pub fn leftovers(&self) -> String {
        let num_left = self.open.len()
            + self.fetcher.num_fetches()
            + self.source.num_loads()
            + self.readers.len()
            + self.fetches.len()
            + self.whole.len();
        match num_left {
            0 => String::new(),
            _ => format!(
                "{:?} open, {} loads, {} served, {} readers, {} fetches, {} whole",
                self.open,
                self.fetcher.num_fetches(),
                self.source.num_loads(),
                self.readers.len(),
                self.fetches.len(),
                self.whole.len()
            ),
        }
    }

    /// Tells the engine about a fetch. The engine handles such messages in order.
    pub(super) fn tell_of_fetch(&mut self, event: LocalEvent, world: &mut impl Surroundings) {
        self.told_us = self.told_us.max(world.answers_us());
        self.push(self.told_us, event, world);
    }

    pub(super) fn push(&self, at_us: u64, event: LocalEvent, world: &mut impl Surroundings) {
        let event = BlockEvent::Local(self.id, self.incarnation, event);
        world.push_block_event(at_us, event);
    }
}

/// Nodes with different models have different hashes for the same tokens, and hold no blocks for each other.
fn check_hashes(list: &BlockList, num_blocks: u32, hasher: &BlockHasher, page_size: u32) {
    let own = hasher.hashes(&list.namespace, &list.tokens, page_size);
    let mut lent = own.zip(&list.hashes).take(num_blocks as usize);
    let is_same = lent.all(|(ours, theirs)| ours == *theirs);
    assert!(is_same, "blocks of another model are lent");
}

fn clear(page: PageId, engine: &mut Engine) {
    for at in 0..engine.page_size() as usize {
        engine.executor.write_row(page, at, None);
    }
}

pub(super) fn page_rows(page: PageId, engine: &Engine) -> Vec<Row> {
    let positions = 0..engine.page_size() as usize;
    positions
        .map(|at| engine.executor.read_row(page, at))
        .collect()
}
