//! Both ends of the loads of one node, and what they have their engine and their transport do.

use std::collections::{BTreeMap, BTreeSet};

use corella_core::session::{
    BlockLoader, BlockPart, BlockSource, LoadConfig, LoadEnd, LoadId, LoadKey, LoadRequest,
    LoaderAction, Peer, RowPart, ToSource,
};
use corella_core::{
    BlockHasher, BlockList, FetchEnd, FetchGrant, FetchId, HoldId, Incarnation, Namespace, NodeId,
    PageId, TokenId,
};

use crate::blocks::block_net::{BlockEvent, LocalEvent, Packet, PartRows, Surroundings};
use crate::blocks::part_reader::PartReader;
use crate::blocks::part_store::PartStore;
use crate::blocks::whole_load::WholeLoad;
use crate::executor::{Row, in_group, root_row, rows_of};
use crate::pair::engine::Engine;
use crate::violation::Violation;

pub struct Exchange {
    pub(super) id: NodeId,
    incarnation: Incarnation,
    pub(super) source: BlockSource,
    loader: BlockLoader,
    /// What is being read for others.
    pub(super) readers: BTreeMap<LoadId, PartReader>,
    parts: PartStore,
    /// Loads whose transport names no parts to the machine.
    whole: BTreeMap<LoadKey, WholeLoad>,
    /// Fetches under way.
    fetches: BTreeMap<FetchId, Fetched>,
    /// Loads that have not ended, each with the time by which they must.
    open: BTreeMap<LoadKey, u64>,
    /// Loads of others whose pages may belong to somebody else by now.
    pub(super) released: BTreeSet<LoadId>,
    /// Holds of others' loads, and the loads whose hold has ended too early.
    holds: BTreeMap<HoldId, LoadId>,
    pub(super) not_held: BTreeSet<LoadId>,
    /// Blocks of which a part was read in another node's memory after that node had released them.
    read_late: BTreeSet<(LoadKey, u32)>,
}

/// Blocks that a node is to load.
pub struct Wanted {
    pub source: Peer,
    pub namespace: Namespace,
    /// A part of a block at the end is left out.
    pub tokens: Vec<TokenId>,
    pub soft_us: u64,
    pub hard_us: u64,
}

/// A part that was read in the memory of its source.
pub struct ReadPart {
    rows: Vec<Row>,
    /// Its pages may have belonged to somebody else by then.
    is_late: bool,
}

/// A fetch, with the load that it is for and the rows of its sequence.
struct Fetched {
    key: LoadKey,
    grant: FetchGrant,
    rows: Vec<Row>,
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
            loader: BlockLoader::new(config, incarnation),
            readers: BTreeMap::new(),
            parts: PartStore::default(),
            whole: BTreeMap::new(),
            fetches: BTreeMap::new(),
            open: BTreeMap::new(),
            released: BTreeSet::new(),
            holds: BTreeMap::new(),
            not_held: BTreeSet::new(),
            read_late: BTreeSet::new(),
        }
    }

    /// A load has neither pages yet nor ended.
    pub fn is_undecided(&self, load: LoadKey) -> bool {
        let mut fetches = self.fetches.values();
        self.open.contains_key(&load) && fetches.all(|fetched| fetched.key != load)
    }

    pub fn num_open_loads(&self) -> u64 {
        self.open.len() as u64
    }

    /// Returns the load that has begun, unless there are too many.
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
        let request = LoadRequest {
            source,
            num_here: engine.scheduler().look_up_blocks(&list),
            list,
            rows: RowPart {
                layers: 0..num_layers.copied().unwrap_or(0),
                heads: 0..1,
            },
            soft_us,
            hard_us,
        };
        let key = self.loader.start(request, world.now_us());
        match key {
            Some(key) => {
                self.open.insert(key, hard_us);
            }
            None => world.net().totals.num_refused_loads += 1,
        }
        key
    }

    pub fn handle_incarnation(&mut self, node: NodeId, incarnation: Incarnation, now_us: u64) {
        self.loader.handle_incarnation(node, incarnation);
        self.source.handle_incarnation(node, incarnation, now_us);
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
            Packet::ToLoader(message) => {
                self.loader
                    .handle_message(from, key, message, world.now_us());
            }
            Packet::Rows(part, rows) => {
                let page = match world.net().links.loads_whole {
                    true => self.whole.get_mut(&key).and_then(|load| load.begin(part)),
                    false => self.loader.begin_part(from, key, part),
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

    /// `read` is there for a part that was read in its source's memory.
    pub fn local(
        &mut self,
        event: LocalEvent,
        read: Option<ReadPart>,
        engine: &mut Engine,
        world: &mut impl Surroundings,
    ) -> Result<(), Violation> {
        let now_us = world.now_us();
        let (hasher, page_size) = (*engine.block_hasher(), engine.page_size());
        let scheduler = engine.scheduler();
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
                let num_blocks = { answer.as_ref() }.map_or(0, |held| held.num_blocks);
                check_hashes(&list, num_blocks, &hasher, page_size);
                self.holds
                    .extend({ answer.iter() }.map(|held| (held.id, load)));
                let num_lent = scheduler.stats().num_served_pages;
                let limit = scheduler.config().max_served_pages;
                if num_lent > limit as usize {
                    let what = format!("{num_lent} pages are lent, and {limit} may be");
                    return Err(world.violation("no more is lent than may be", what));
                }
                self.source.handle_held(load, answer, now_us);
            }
            LocalEvent::Release(load, hold, is_asked) => {
                let has_lived = scheduler.release_blocks(hold, now_us);
                let has_lived = has_lived.expect("a hold is released once");
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
                self.loader.handle_chosen(key, num_blocks);
            }
            LocalEvent::BeginFetch(key, request) => {
                let rows = rows_of(root_row(&request.namespace), &request.tokens);
                let answer = scheduler.begin_fetch(request);
                if let Ok(grant) = &answer {
                    self.note_grant(key, grant, rows, engine, world);
                }
                self.loader.handle_fetch_begun(key, answer, now_us);
            }
            LocalEvent::ShortenFetch(key, fetch, num_blocks) => {
                let answer = scheduler.shorten_fetch(fetch, num_blocks);
                if let Some(grant) = &answer {
                    let mut rows = self.fetches.remove(&fetch).expect("it is under way").rows;
                    rows.truncate((num_blocks * engine.page_size()) as usize);
                    self.note_grant(key, grant, rows, engine, world);
                    world.net().totals.num_shortened += 1;
                }
                self.loader.handle_fetch_shortened(key, answer, now_us);
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

    /// What `reader` gets of a part that it reads in this node's memory.
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

    /// A part is written, with these rows. It may have been torn.
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
                engine.write_row(page, at, row);
            }
        }
        if let Some(load) = self.whole.get_mut(&key) {
            load.end(part, is_whole);
            self.loader.handle_progress(key, world.now_us());
            self.end_whole(key, world.now_us());
        } else {
            self.loader.end_part(key, part, is_whole, world.now_us());
        }
    }

    /// Tells the loader the end of a load whose rows land all together, once nothing more is written.
    fn end_whole(&mut self, key: LoadKey, now_us: u64) {
        let outcome = self.whole.get(&key).and_then(WholeLoad::outcome);
        if let Some(is_whole) = outcome {
            self.whole.remove(&key);
            self.loader.end_rows(key, is_whole, now_us);
        }
    }

    /// When [`handle_timeout`](Self::handle_timeout) is due.
    pub fn poll_timeout(&self) -> Option<u64> {
        let deadlines = [self.source.poll_timeout(), self.loader.poll_timeout()];
        deadlines.into_iter().flatten().min()
    }

    pub fn handle_timeout(&mut self, now_us: u64) {
        self.source.handle_timeout(now_us);
        self.loader.handle_timeout(now_us);
    }

    /// Takes what the engine says of fetches and holds, and does what both ends want. Returns whether that was anything.
    pub fn settle(
        &mut self,
        engine: &mut Engine,
        world: &mut impl Surroundings,
    ) -> Result<bool, Violation> {
        while let Some(fetch) = engine.scheduler().poll_fetch_cancel() {
            self.loader.handle_fetch_cancelled(fetch);
        }
        while let Some(hold) = engine.scheduler().poll_ended_hold() {
            self.not_held.extend(self.holds.get(&hold));
            self.source.handle_hold_ended(hold, world.now_us());
        }
        self.act(engine, world)
    }

    /// Does what both ends want. Returns whether that was anything.
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
        while let Some(action) = self.loader.poll_action() {
            self.act_as_loader(action, engine, world)?;
            has_acted = true;
        }
        Ok(has_acted)
    }

    fn act_as_loader(
        &mut self,
        action: LoaderAction,
        engine: &mut Engine,
        world: &mut impl Surroundings,
    ) -> Result<(), Violation> {
        match action {
            LoaderAction::Send { node, key, message } => {
                let begins_rows = matches!(message, ToSource::LoadBlocks(_));
                if begins_rows && world.net().links.loads_whole && self.loader.begin_rows(key) {
                    let mut fetches = self.fetches.values();
                    let fetched = fetches.find(|fetched| fetched.key == key);
                    let grant = fetched.expect("a load has a grant").grant.clone();
                    let load = WholeLoad::new(grant, &world.net().config.num_layers);
                    self.whole.insert(key, load);
                    self.end_whole(key, world.now_us());
                }
                world.send(self.id, node, key, Packet::ToSource(message));
            }
            LoaderAction::Choose { key, num_offered } => {
                let answers_us = world.answers_us();
                self.push(answers_us, LocalEvent::Choose(key, num_offered), world);
            }
            LoaderAction::BeginFetch { key, request } => {
                let answers_us = world.answers_us();
                self.push(answers_us, LocalEvent::BeginFetch(key, request), world);
            }
            LoaderAction::ShortenFetch {
                key,
                fetch,
                num_blocks,
            } => {
                let event = LocalEvent::ShortenFetch(key, fetch, num_blocks);
                let answers_us = world.answers_us();
                self.push(answers_us, event, world);
            }
            LoaderAction::Renamed { key, next } => self.rename(key, next),
            LoaderAction::Publish { fetch, num_blocks } => {
                let end_block = self.fetches[&fetch].grant.num_found + num_blocks;
                self.check_rows(fetch, end_block, engine, world)?;
                if engine.scheduler().handle_fetched(fetch, num_blocks) {
                    world.net().totals.num_early_blocks += u64::from(num_blocks);
                }
            }
            LoaderAction::StopRows { key } => {
                // Named parts on their way end by themselves.
                if let Some(load) = self.whole.get_mut(&key) {
                    load.stop();
                    self.end_whole(key, world.now_us());
                }
            }
            LoaderAction::EndFetch { fetch, end } => {
                if end == FetchEnd::Done {
                    self.check_rows(fetch, u32::MAX, engine, world)?;
                }
                self.fetches.remove(&fetch);
                if !engine.scheduler().handle_fetch_ended(fetch, end) {
                    let what = format!("fetch {fetch} had ended");
                    return Err(world.violation("a fetch ends once", what));
                }
            }
            LoaderAction::Ended { key, end } => self.load_ended(key, end, world)?,
        }
        Ok(())
    }

    fn rename(&mut self, key: LoadKey, next: LoadKey) {
        if let Some(hard_us) = self.open.remove(&key) {
            self.open.insert(next, hard_us);
        }
        let mut fetches = self.fetches.values_mut();
        if let Some(fetched) = fetches.find(|fetched| fetched.key == key) {
            fetched.key = next;
        }
    }

    fn load_ended(
        &mut self,
        key: LoadKey,
        end: LoadEnd,
        world: &mut impl Surroundings,
    ) -> Result<(), Violation> {
        world.net().totals.count_end(end);
        let links = &world.net().links;
        let slack_us = 2 * (links.max_part_us + links.max_answer_us) + 2;
        match self.open.remove(&key) {
            Some(hard_us) if world.now_us() <= hard_us + slack_us => Ok(()),
            Some(hard_us) => {
                let what = format!("{key:?} was to end at {hard_us}");
                Err(world.violation("loads end in time", what))
            }
            None => {
                let what = format!("{key:?} ends twice: {end:?}");
                Err(world.violation("a load ends once", what))
            }
        }
    }

    /// What is published of a fetch are the rows of its sequence.
    fn check_rows(
        &self,
        fetch: FetchId,
        end_block: u32,
        engine: &Engine,
        world: &mut impl Surroundings,
    ) -> Result<(), Violation> {
        let Fetched { key, grant, rows } = &self.fetches[&fetch];
        let page_size = engine.page_size() as usize;
        let end_block = (end_block as usize).min(rows.len() / page_size);
        let late = self.read_late.range((*key, 0)..(*key, end_block as u32));
        if let Some((_, block)) = late.into_iter().next() {
            let what = format!("block {block} of fetch {fetch}");
            return Err(world.violation("rows count that were held while they were read", what));
        }
        for (group, table) in grant.tables.iter().enumerate() {
            for block in table.num_gone..end_block.min(table.len()) {
                let Some(page) = table.page(block) else {
                    continue;
                };
                let expected = &rows[block * page_size..(block + 1) * page_size];
                let expected = expected.iter().map(|&row| in_group(row, group));
                if !page_rows(page, engine).into_iter().eq(expected) {
                    let what = format!("block {block} of fetch {fetch} in group {group}");
                    return Err(world.violation("what is published has landed", what));
                }
                let has_window = engine.groups()[group].window.is_some();
                world.net().totals.num_window_blocks += u64::from(has_window);
            }
        }
        Ok(())
    }

    /// Loads, holds and fetches that were left behind.
    pub fn leftovers(&self) -> String {
        let num_left = self.open.len()
            + self.loader.num_loads()
            + self.source.num_loads()
            + self.readers.len()
            + self.fetches.len()
            + self.whole.len();
        match num_left {
            0 => String::new(),
            _ => format!(
                "{:?} open, {} loads, {} served, {} readers, {} fetches, {} whole",
                self.open,
                self.loader.num_loads(),
                self.source.num_loads(),
                self.readers.len(),
                self.fetches.len(),
                self.whole.len()
            ),
        }
    }

    pub(super) fn push(&self, at_us: u64, event: LocalEvent, world: &mut impl Surroundings) {
        let event = BlockEvent::Local(self.id, self.incarnation, event);
        world.push_block_event(at_us, event);
    }
}

/// Nodes whose models differ have other hashes for the same tokens, and lend each other nothing.
fn check_hashes(list: &BlockList, num_blocks: u32, hasher: &BlockHasher, page_size: u32) {
    let own = hasher.hashes(&list.namespace, &list.tokens, page_size);
    let lent = own.zip(&list.hashes).take(num_blocks as usize);
    let is_same = { lent }.all(|(ours, theirs)| ours == *theirs);
    assert!(is_same, "blocks of another model are lent");
}

fn clear(page: PageId, engine: &mut Engine) {
    for at in 0..engine.page_size() as usize {
        engine.write_row(page, at, None);
    }
}

pub(super) fn page_rows(page: PageId, engine: &Engine) -> Vec<Row> {
    let positions = 0..engine.page_size() as usize;
    positions.map(|at| engine.read_row(page, at)).collect()
}
