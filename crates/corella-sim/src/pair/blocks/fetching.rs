//! A node's own loads: the tasks for its engine and its transport, and the published blocks.

use corella_core::session::{BlockFetchEnd, FetcherAction, LoadBlocks, LoadKey, ToSource};
use corella_core::{FetchEnd, FetchGrant, FetchId};

use crate::pair::blocks::block_net::{LocalEvent, Packet, Surroundings};
use crate::pair::blocks::exchange::{Exchange, Fetched, page_rows};
use crate::pair::blocks::whole_load::WholeLoad;
use crate::pair::engine::Engine;
use crate::violation::Violation;

impl Exchange {
    pub(super) fn act_as_fetcher(
        &mut self,
        action: FetcherAction,
        engine: &mut Engine,
        world: &mut impl Surroundings,
    ) -> Result<(), Violation> {
        match action {
            FetcherAction::Send { node, key, message } => {
                if let ToSource::LoadBlocks(load) = &message {
                    self.check_asked(key, load, world)?;
                }
                let begins_rows = matches!(message, ToSource::LoadBlocks(_));
                if begins_rows && world.net().links.loads_whole && self.fetcher.begin_rows(key) {
                    let grant = self.grant_of(key).clone();
                    let load = WholeLoad::new(node, grant, &world.net().config.num_layers);
                    self.whole.insert(key, load);
                    self.end_whole(key, world.now_us());
                }
                world.send(self.id, node, key, Packet::ToSource(message));
            }
            FetcherAction::Choose { key, num_offered } => {
                let answers_us = world.answers_us();
                self.push(answers_us, LocalEvent::Choose(key, num_offered), world);
            }
            FetcherAction::BeginFetch { key, request } => {
                let answers_us = world.answers_us();
                self.push(answers_us, LocalEvent::BeginFetch(key, request), world);
            }
            FetcherAction::ShortenFetch {
                key,
                id: fetch,
                num_blocks,
            } => {
                let event = LocalEvent::ShortenFetch(key, fetch, num_blocks);
                let answers_us = world.answers_us();
                self.push(answers_us, event, world);
            }
            FetcherAction::Renamed { key, next } => self.rename(key, next),
            FetcherAction::Publish {
                id: fetch,
                num_blocks,
            } => {
                let end_block = self.fetches[&fetch].grant.num_found + num_blocks;
                self.check_rows(fetch, end_block, engine, world)?;
                self.tell_of_fetch(LocalEvent::Publish(fetch, num_blocks), world);
            }
            FetcherAction::StopRows { key } => {
                // All other loads end part by part.
                if let Some(load) = self.whole.get_mut(&key) {
                    load.stop();
                    self.end_whole(key, world.now_us());
                }
            }
            FetcherAction::EndFetch { id: fetch, end } => {
                if end == FetchEnd::Done {
                    self.check_rows(fetch, u32::MAX, engine, world)?;
                }
                self.tell_of_fetch(LocalEvent::EndFetch(fetch, end), world);
            }
            FetcherAction::Ended { key, end } => self.load_ended(key, end, world)?,
        }
        Ok(())
    }

    /// Checks that a node asks for exactly the blocks for which it has pages.
    fn check_asked(
        &self,
        key: LoadKey,
        load: &LoadBlocks,
        world: &impl Surroundings,
    ) -> Result<(), Violation> {
        let grant = self.grant_of(key);
        let asked = (load.first_block, load.list.hashes.len() as u32);
        if asked == (grant.num_found, grant.num_blocks) {
            return Ok(());
        }
        let what = format!("{key:?} asks for {asked:?} and has {grant:?}");
        Err(world.violation("a node asks for the blocks for which it has pages", what))
    }

    fn grant_of(&self, key: LoadKey) -> &FetchGrant {
        let mut fetches = self.fetches.values();
        let fetched = fetches.find(|fetched| fetched.key == key);
        &fetched.expect("a load has a grant").grant
    }

    fn rename(&mut self, key: LoadKey, next: LoadKey) {
        if let Some(load) = self.open.remove(&key) {
            self.open.insert(next, load);
        }
        let mut fetches = self.fetches.values_mut();
        if let Some(fetched) = fetches.find(|fetched| fetched.key == key) {
            fetched.key = next;
        }
    }

    fn load_ended(
        &mut self,
        key: LoadKey,
        end: BlockFetchEnd,
        world: &mut impl Surroundings,
    ) -> Result<(), Violation> {
        world.net().totals.count_end(end);
        let links = &world.net().links;
        let slack_us = 2 * (links.max_part_us + links.max_answer_us) + 2;
        match self.open.remove(&key) {
            Some((_, hard_us)) if world.now_us() <= hard_us + slack_us => Ok(()),
            Some((_, hard_us)) => {
                let what = format!("{key:?} was to end at {hard_us}");
                Err(world.violation("loads end in time", what))
            }
            None => {
                let what = format!("{key:?} ends twice: {end:?}");
                Err(world.violation("a load ends once", what))
            }
        }
    }

    /// Checks that a fetch publishes only rows of its own sequence.
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
            return Err(world.violation("rows are held while they are read", what));
        }
        for (group, table) in grant.tables.iter().enumerate() {
            for block in table.num_gone..end_block.min(table.len()) {
                let Some(page) = table.page(block) else {
                    continue;
                };
                let expected = &rows[block * page_size..(block + 1) * page_size];
                let expected = expected
                    .iter()
                    .map(|&row| engine.executor.made_here(row, group));
                if !page_rows(page, engine).into_iter().eq(expected) {
                    let what = format!("block {block} of fetch {fetch} in group {group}");
                    return Err(world.violation("published rows have landed", what));
                }
                let has_window = engine.groups()[group].window.is_some();
                world.net().totals.num_window_blocks += u64::from(has_window);
            }
        }
        Ok(())
    }
}
