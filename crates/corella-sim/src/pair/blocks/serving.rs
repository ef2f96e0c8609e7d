//! A node as the source of other nodes' loads: it reads its blocks, and answers.

use corella_core::session::{LoadId, SourceAction, ToFetcher};

use crate::pair::blocks::block_net::{LocalEvent, Packet, PartRows, Surroundings};
use crate::pair::blocks::exchange::{Exchange, page_rows};
use crate::pair::engine::Engine;
use crate::violation::Violation;

impl Exchange {
    pub(super) fn act_as_source(
        &mut self,
        action: SourceAction,
        world: &mut impl Surroundings,
    ) -> Result<(), Violation> {
        let answers_us = world.answers_us();
        if let SourceAction::Hold { load, .. } = action
            && load.1.source != self.incarnation
        {
            let what = format!("{load:?} in incarnation {:?}", self.incarnation);
            return Err(world.violation("a source serves loads of its own incarnation", what));
        }
        match action {
            SourceAction::Send { load, message } => {
                if let ToFetcher::Complete { num_blocks } = message {
                    self.check_held(load, num_blocks, world)?;
                }
                if matches!(message, ToFetcher::Complete { .. }) && self.not_held.contains(&load) {
                    let what = format!("{load:?}: {message:?}");
                    let rule = "a source confirms only blocks that were held throughout";
                    return Err(world.violation(rule, what));
                }
                let (node, key) = load;
                world.send(self.id, node, key, Packet::ToFetcher(message));
            }
            SourceAction::LookUp {
                load,
                list,
                first_block,
            } => {
                let event = LocalEvent::LookUp(load, list, first_block);
                self.push(answers_us, event, world);
            }
            SourceAction::Hold {
                load,
                list,
                first_block,
                until_us,
            } => {
                let event = LocalEvent::Hold(load, list, first_block, until_us);
                self.push(answers_us, event, world);
            }
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
                self.check_held(load, blocks.end, world)?;
                let reader = self.readers.entry(load).or_default();
                reader.add(&tables, blocks, rows.layers, &world.net().config.num_layers);
                self.read_next(load, world);
            }
            SourceAction::Stop { load } => {
                let reader = self.readers.entry(load).or_default();
                reader.has_to_stop = true;
                if !reader.is_reading {
                    self.readers.remove(&load);
                    self.source.handle_stopped(load, world.now_us());
                }
            }
        }
        Ok(())
    }

    /// Checks that a source sends and confirms only blocks that it holds for the load.
    fn check_held(
        &self,
        load: LoadId,
        end_block: u32,
        world: &impl Surroundings,
    ) -> Result<(), Violation> {
        let num_held = self.held.get(&load).map_or(0, |held| held.end_block);
        if end_block <= num_held {
            return Ok(());
        }
        let what = format!("{load:?}: {end_block} blocks, and {num_held} are held");
        Err(world.violation("a source lends only blocks that it holds", what))
    }

    /// Checks that a hold ends only at its deadline, or with a report of its earlier end.
    pub(super) fn check_end(
        &self,
        load: LoadId,
        has_lived: bool,
        world: &impl Surroundings,
    ) -> Result<(), Violation> {
        let is_over = world.now_us() >= self.held[&load].until_us;
        if has_lived || is_over || self.not_held.contains(&load) {
            return Ok(());
        }
        let what = format!("{load:?}");
        Err(world.violation("a hold that ends is told to end", what))
    }

    fn read_next(&mut self, load: LoadId, world: &mut impl Surroundings) {
        let Some(reader) = self.readers.get_mut(&load) else {
            return;
        };
        if reader.is_reading || reader.left.is_empty() {
            return;
        }
        reader.is_reading = true;
        let at_us = world.now_us()
            + match world.net().links.reads_memory {
                true => 0,
                false => world.part_us(),
            };
        self.push(at_us, LocalEvent::PartRead(load), world);
    }

    /// Handles the end of reading a part: sends its rows, or their location, to the loading node.
    pub(super) fn part_read(
        &mut self,
        load: LoadId,
        engine: &Engine,
        world: &mut impl Surroundings,
    ) {
        let Some(reader) = self.readers.get_mut(&load) else {
            return;
        };
        reader.is_reading = false;
        let has_to_stop = reader.has_to_stop;
        let next = reader.left.pop_front();
        if let Some((part, page)) = next {
            let reads_memory = world.net().links.reads_memory;
            assert!(
                reads_memory || !self.released.contains(&load),
                "page {page} is read and may belong to another request"
            );
            let rows = match reads_memory {
                true => PartRows::InMemory(page),
                false => PartRows::Sent(page_rows(page, engine)),
            };
            let (node, key) = load;
            world.send(self.id, node, key, Packet::Rows(part, rows));
        }
        if has_to_stop {
            self.readers.remove(&load);
            self.source.handle_stopped(load, world.now_us());
        } else {
            self.read_next(load, world);
        }
    }
}
