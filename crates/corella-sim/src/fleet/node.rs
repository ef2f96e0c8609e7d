//! One node of a fleet: an engine, and both ends of loads.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use corella_core::session::{
    BlockLoader, BlockPart, BlockSource, LoadConfig, LoadEnd, LoadId, LoadKey, LoadRequest,
    LoaderAction, Peer, RowPart, SourceAction, ToSource,
};
use corella_core::{
    BlockList, FetchEnd, FetchGrant, FetchId, Incarnation, NodeId, PageId, RequestOutput,
};

use crate::executor::{Row, in_group, root_row, rows_of};
use crate::fleet::fleet_load::LoadPlan;
use crate::fleet::part_store::PartStore;
use crate::fleet::whole_load::WholeLoad;
use crate::fleet::world::{Event, LocalEvent, Packet, PartRows, World};
use crate::pair::engine::Engine;
use crate::violation::Violation;

pub struct Node {
    pub id: NodeId,
    pub incarnation: Incarnation,
    pub engine: Engine,
    source: BlockSource,
    loader: BlockLoader,
    /// What is being read for others.
    readers: BTreeMap<LoadId, Reader>,
    parts: PartStore,
    /// Loads whose transport names no parts to the machine.
    whole: BTreeMap<LoadKey, WholeLoad>,
    /// Fetches under way.
    fetches: BTreeMap<FetchId, Fetched>,
    /// Loads that have not ended, each with the time by which they must.
    open: BTreeMap<LoadKey, u64>,
    wakes_us: Option<u64>,
    /// Loads of others whose pages may belong to somebody else by now.
    released: BTreeSet<LoadId>,
    /// Blocks of which a part was read in another node's memory after that node had released them.
    read_late: BTreeSet<(LoadKey, u32)>,
}

/// A fetch, with the load that it is for and the rows of its sequence.
struct Fetched {
    key: LoadKey,
    grant: FetchGrant,
    rows: Vec<Row>,
}

/// Reads the pages of one load, one part after the other.
#[derive(Default)]
struct Reader {
    left: VecDeque<(BlockPart, PageId)>,
    is_reading: bool,
    has_to_stop: bool,
}

impl Node {
    pub fn new(id: NodeId, incarnation: Incarnation, world: &World<'_>) -> Self {
        let load = world.load;
        let plan = &load.nodes[id.0 as usize];
        let source_config = match load.links.loads_whole {
            true => LoadConfig {
                stall_us: load.config.lease_us,
                ..load.config.clone()
            },
            false => load.config.clone(),
        };
        Self {
            id,
            incarnation,
            engine: Engine::new(plan, load.alphabet, load.steps_fail_once_in),
            source: BlockSource::new(source_config, incarnation),
            loader: BlockLoader::new(load.config.clone(), incarnation),
            readers: BTreeMap::new(),
            parts: PartStore::default(),
            whole: BTreeMap::new(),
            fetches: BTreeMap::new(),
            open: BTreeMap::new(),
            wakes_us: None,
            released: BTreeSet::new(),
            read_late: BTreeSet::new(),
        }
    }

    pub fn num_open_loads(&self) -> u64 {
        self.open.len() as u64
    }

    pub fn start_load(&mut self, plan: &LoadPlan, world: &mut World<'_>) {
        let config = &world.load.nodes[self.id.0 as usize].config;
        let (namespace, tokens) = (plan.namespace.clone(), plan.tokens.clone());
        let page_size = config.page_size as usize;
        let num_tokens = tokens.len() - tokens.len() % page_size;
        let tokens = tokens[..num_tokens].to_vec();
        let request = LoadRequest {
            source: Peer {
                node: plan.from,
                incarnation: world.registry[&plan.from],
            },
            list: BlockList::new(namespace, tokens, &config.block_hasher, config.page_size),
            rows: RowPart {
                layers: 0..world
                    .load
                    .config
                    .num_layers
                    .iter()
                    .copied()
                    .max()
                    .unwrap_or(0),
                heads: 0..1,
            },
            soft_us: world.now_us + plan.soft_us,
            hard_us: world.now_us + plan.hard_us,
        };
        let hard_us = request.hard_us;
        match self.loader.start(request, world.now_us) {
            Some(key) => {
                self.open.insert(key, hard_us);
            }
            None => world.totals.num_refused_loads += 1,
        }
    }

    pub fn handle_incarnation(&mut self, node: NodeId, incarnation: Incarnation, now_us: u64) {
        self.loader.handle_incarnation(node, incarnation);
        self.source.handle_incarnation(node, incarnation, now_us);
    }

    pub fn arrive(&mut self, from: NodeId, key: LoadKey, packet: Packet, world: &mut World<'_>) {
        match packet {
            Packet::ToSource(message) => {
                self.source.handle_message(from, key, message, world.now_us);
            }
            Packet::ToLoader(message) => {
                self.loader.handle_message(from, key, message, world.now_us);
            }
            Packet::Rows(part, rows) => {
                let page = match world.load.links.loads_whole {
                    true => self.whole.get_mut(&key).and_then(|load| load.begin(part)),
                    false => self.loader.begin_part(from, key, part),
                };
                let Some(page) = page else {
                    return;
                };
                self.parts.tear(page, part.layer);
                self.clear(page);
                let at_us = world.now_us + world.part_us();
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

    pub fn local(&mut self, event: LocalEvent, world: &mut World<'_>) {
        let now_us = world.now_us;
        let scheduler = self.engine.scheduler();
        match event {
            LocalEvent::Wake => {
                self.wakes_us = None;
                self.source.handle_timeout(now_us);
                self.loader.handle_timeout(now_us);
            }
            LocalEvent::StepReturns => self.engine.return_step(),
            LocalEvent::LookUp(load, list) => {
                let num_blocks = scheduler.look_up_blocks(&list);
                self.source.handle_looked_up(load, num_blocks, now_us);
            }
            LocalEvent::Hold(load, list, until_us) => {
                let answer = scheduler.hold_blocks(&list, until_us);
                self.source.handle_held(load, answer, now_us);
            }
            LocalEvent::Release(load, hold, is_asked) => {
                let has_lived = scheduler.release_blocks(hold, now_us);
                let has_lived = has_lived.expect("a hold is released once");
                self.released.insert(load);
                if is_asked {
                    self.source.handle_released(load, has_lived, now_us);
                }
            }
            LocalEvent::Choose(key, num_offered) => {
                let num_blocks = match world.random.once_in(8) {
                    true => world.random.below(u64::from(num_offered) + 1) as u32,
                    false => num_offered,
                };
                self.loader.handle_chosen(key, num_blocks);
            }
            LocalEvent::BeginFetch(key, request) => {
                let rows = rows_of(root_row(&request.namespace), &request.tokens);
                let answer = scheduler.begin_fetch(request);
                if let Ok(grant) = &answer {
                    self.note_grant(key, grant, rows, world);
                }
                self.loader.handle_fetch_begun(key, answer, now_us);
            }
            LocalEvent::PartRead(load) => self.part_read(load, world),
            LocalEvent::PartLanded { .. } => unreachable!("the run reads the source's memory"),
        }
    }

    fn note_grant(&mut self, key: LoadKey, grant: &FetchGrant, rows: Vec<Row>, world: &World<'_>) {
        for (table, &num_layers) in grant.tables.iter().zip(&world.load.config.num_layers) {
            for &page in &table.pages {
                self.parts.begin(page, num_layers);
                self.clear(page);
            }
        }
        let grant = grant.clone();
        self.fetches.insert(grant.id, Fetched { key, grant, rows });
    }

    pub fn has_released(&self, load: LoadId) -> bool {
        self.released.contains(&load)
    }

    /// A part was read that its source had released.
    pub fn note_read_late(&mut self, key: LoadKey, part: BlockPart) {
        self.read_late.insert((key, part.block));
    }

    /// A part is written, with these rows. It may have been torn.
    pub fn land(
        &mut self,
        key: LoadKey,
        part: BlockPart,
        page: PageId,
        rows: Option<Vec<Row>>,
        world: &mut World<'_>,
    ) {
        let is_whole = rows.is_some();
        if let Some(rows) = rows {
            let rows = self.parts.land(page, part.layer, rows);
            for (at, row) in rows.into_iter().enumerate() {
                self.engine.write_row(page, at, row);
            }
        }
        if let Some(load) = self.whole.get_mut(&key) {
            load.end(part, is_whole);
            self.loader.handle_progress(key, world.now_us);
            self.end_whole(key, world);
        } else {
            self.loader.end_part(key, part, is_whole, world.now_us);
        }
    }

    /// Tells the loader the end of a load whose rows land all together, once nothing more is written.
    fn end_whole(&mut self, key: LoadKey, world: &World<'_>) {
        let outcome = self.whole.get(&key).and_then(WholeLoad::outcome);
        if let Some(is_whole) = outcome {
            self.whole.remove(&key);
            self.loader.end_rows(key, is_whole, world.now_us);
        }
    }

    fn clear(&mut self, page: PageId) {
        for at in 0..self.engine.page_size() as usize {
            self.engine.write_row(page, at, None);
        }
    }

    pub fn page_rows(&self, page: PageId) -> Vec<Row> {
        let positions = 0..self.engine.page_size() as usize;
        positions.map(|at| self.engine.read_row(page, at)).collect()
    }

    /// Runs the engine, and does what both ends want, until nothing is left to do.
    pub fn settle(&mut self, world: &mut World<'_>) -> Result<Vec<RequestOutput>, Violation> {
        let mut outputs = Vec::new();
        loop {
            while let Some(step) = self.engine.try_step(world.now_us, &mut world.random) {
                self.push(step.returns_us, LocalEvent::StepReturns, world);
            }
            while let Some(output) = self.engine.poll_output() {
                outputs.push(output);
            }
            while let Some(fetch) = self.engine.scheduler().poll_fetch_cancel() {
                self.loader.handle_fetch_cancelled(fetch);
            }
            while let Some(hold) = self.engine.scheduler().poll_ended_hold() {
                self.source.handle_hold_ended(hold, world.now_us);
            }
            if !self.act(world)? {
                break;
            }
        }
        self.engine.scheduler().check_invariants();
        let deadlines = [
            self.engine.scheduler().poll_deadline(),
            self.source.poll_timeout(),
            self.loader.poll_timeout(),
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

    /// Does what both ends want. Returns whether that was anything.
    fn act(&mut self, world: &mut World<'_>) -> Result<bool, Violation> {
        let mut has_acted = false;
        while let Some(action) = self.source.poll_action() {
            self.act_as_source(action, world);
            has_acted = true;
        }
        while let Some(action) = self.loader.poll_action() {
            self.act_as_loader(action, world)?;
            has_acted = true;
        }
        Ok(has_acted)
    }

    fn act_as_source(&mut self, action: SourceAction, world: &mut World<'_>) {
        let answers_us = world.now_us + world.answer_us();
        match action {
            SourceAction::Send { load, message } => {
                let (node, key) = load;
                world.send(self.id, node, key, Packet::ToLoader(message));
            }
            SourceAction::LookUp { load, list } => {
                self.push(answers_us, LocalEvent::LookUp(load, list), world);
            }
            SourceAction::Hold {
                load,
                list,
                until_us,
            } => self.push(answers_us, LocalEvent::Hold(load, list, until_us), world),
            SourceAction::Release {
                load,
                hold,
                is_asked,
            } => self.push(answers_us, LocalEvent::Release(load, hold, is_asked), world),
            SourceAction::Read {
                load,
                tables,
                blocks,
                rows,
            } => {
                let num_layers = &world.load.config.num_layers;
                let reader = self.readers.entry(load).or_default();
                for block in blocks {
                    for (group, table) in tables.iter().enumerate() {
                        let Some(page) = table.page(block as usize) else {
                            continue;
                        };
                        for layer in rows.layers.start..rows.layers.end.min(num_layers[group]) {
                            let part = BlockPart {
                                block,
                                group: group as u8,
                                layer,
                            };
                            reader.left.push_back((part, page));
                        }
                    }
                }
                self.read_next(load, world);
            }
            SourceAction::Stop { load } => {
                let reader = self.readers.entry(load).or_default();
                reader.has_to_stop = true;
                if !reader.is_reading {
                    self.readers.remove(&load);
                    self.source.handle_stopped(load, world.now_us);
                }
            }
        }
    }

    fn read_next(&mut self, load: LoadId, world: &mut World<'_>) {
        let Some(reader) = self.readers.get_mut(&load) else {
            return;
        };
        if reader.is_reading || reader.left.is_empty() {
            return;
        }
        reader.is_reading = true;
        let at_us = world.now_us
            + match world.load.links.reads_memory {
                true => 0,
                false => world.part_us(),
            };
        self.push(at_us, LocalEvent::PartRead(load), world);
    }

    /// A part has been read: its rows, or where they are, go to the node that loads them.
    fn part_read(&mut self, load: LoadId, world: &mut World<'_>) {
        let Some(reader) = self.readers.get_mut(&load) else {
            return;
        };
        reader.is_reading = false;
        let has_to_stop = reader.has_to_stop;
        let next = reader.left.pop_front();
        if let Some((part, page)) = next {
            let reads_memory = world.load.links.reads_memory;
            assert!(
                reads_memory || !self.released.contains(&load),
                "page {page} is read and may belong to somebody else"
            );
            let rows = match reads_memory {
                true => PartRows::InMemory(page),
                false => PartRows::Sent(self.page_rows(page)),
            };
            let (node, key) = load;
            world.send(self.id, node, key, Packet::Rows(part, rows));
        }
        if has_to_stop {
            self.readers.remove(&load);
            self.source.handle_stopped(load, world.now_us);
        } else {
            self.read_next(load, world);
        }
    }

    fn act_as_loader(
        &mut self,
        action: LoaderAction,
        world: &mut World<'_>,
    ) -> Result<(), Violation> {
        match action {
            LoaderAction::Send { node, key, message } => {
                let begins_rows = matches!(message, ToSource::LoadBlocks(_));
                if begins_rows && world.load.links.loads_whole && self.loader.begin_rows(key) {
                    let mut fetches = self.fetches.values();
                    let fetched = fetches.find(|fetched| fetched.key == key);
                    let grant = fetched.expect("a load has a grant").grant.clone();
                    let load = WholeLoad::new(grant, &world.load.config.num_layers);
                    self.whole.insert(key, load);
                    self.end_whole(key, world);
                }
                world.send(self.id, node, key, Packet::ToSource(message));
            }
            LoaderAction::Choose { key, num_offered } => {
                let answers_us = world.now_us + world.answer_us();
                self.push(answers_us, LocalEvent::Choose(key, num_offered), world);
            }
            LoaderAction::BeginFetch { key, request } => {
                let answers_us = world.now_us + world.answer_us();
                self.push(answers_us, LocalEvent::BeginFetch(key, request), world);
            }
            LoaderAction::Publish { fetch, num_blocks } => {
                let end_block = self.fetches[&fetch].grant.num_found + num_blocks;
                self.check_rows(fetch, end_block, world)?;
                if self.engine.scheduler().handle_fetched(fetch, num_blocks) {
                    world.totals.num_early_blocks += u64::from(num_blocks);
                }
            }
            LoaderAction::StopRows { key } => {
                // Named parts on their way end by themselves.
                if let Some(load) = self.whole.get_mut(&key) {
                    load.stop();
                    self.end_whole(key, world);
                }
            }
            LoaderAction::EndFetch { fetch, end } => {
                if end == FetchEnd::Done {
                    self.check_rows(fetch, u32::MAX, world)?;
                }
                self.fetches.remove(&fetch);
                if !self.engine.scheduler().handle_fetch_ended(fetch, end) {
                    let what = format!("fetch {fetch} had ended");
                    return Err(world.violation("a fetch ends once", what));
                }
            }
            LoaderAction::Ended { key, end } => self.load_ended(key, end, world)?,
        }
        Ok(())
    }

    fn load_ended(
        &mut self,
        key: LoadKey,
        end: LoadEnd,
        world: &mut World<'_>,
    ) -> Result<(), Violation> {
        world.totals.count_end(end);
        let links = &world.load.links;
        let slack_us = 2 * (links.max_part_us + links.max_answer_us) + 2;
        match self.open.remove(&key) {
            Some(hard_us) if world.now_us <= hard_us + slack_us => Ok(()),
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
        world: &mut World<'_>,
    ) -> Result<(), Violation> {
        let Fetched { key, grant, rows } = &self.fetches[&fetch];
        let page_size = self.engine.page_size() as usize;
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
                if !self.page_rows(page).into_iter().eq(expected) {
                    let what = format!("block {block} of fetch {fetch} in group {group}");
                    return Err(world.violation("what is published has landed", what));
                }
                let has_window = self.engine.groups()[group].window.is_some();
                world.totals.num_window_blocks += u64::from(has_window);
            }
        }
        Ok(())
    }

    /// What must not be there when nothing happens any more.
    pub fn leftovers(&mut self) -> String {
        let stats = self.engine.stats();
        let num_left = self.open.len()
            + self.loader.num_loads()
            + self.source.num_loads()
            + self.readers.len()
            + self.fetches.len()
            + self.whole.len()
            + stats.num_fetching_pages
            + stats.num_served_pages;
        match num_left == 0 && !self.engine.scheduler().has_unfinished() {
            true => String::new(),
            false => format!(
                "node {}: {:?} open, {} loads, {} served, {stats:?}",
                self.id,
                self.open,
                self.loader.num_loads(),
                self.source.num_loads()
            ),
        }
    }

    fn push(&self, at_us: u64, event: LocalEvent, world: &mut World<'_>) {
        world.push(at_us, Event::Local(self.id, self.incarnation, event));
    }
}
