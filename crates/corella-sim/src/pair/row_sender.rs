//! A prefill node's sender, which exports rows, reads them, and sends them to decode nodes.

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;

use corella_core::session::{ExportEnd, Loaded, SessionKey};
use corella_core::{PageTable, SessionId, SnapshotId};

use crate::executor::{Row, root_row, rows_of};
use crate::pair::prefill_node::SimulatedPrefillNode;
use crate::pair::wire::{ConnectionId, Direction, Packet};
use crate::pair::world::{LocalEvent, World};
use crate::violation::Violation;

/// The rows that an attempt may read, according to the export book's tasks.
pub struct Export {
    run: u32,
    /// The expected rows.
    rows: Vec<Row>,
    /// The page tables, one for each KV group.
    tables: Vec<PageTable>,
    /// By layer, the rows from 0 on that may be read.
    num_readable: Vec<u32>,
    /// The recurrent state after all rows, once it may be read.
    state: Option<SnapshotId>,
}

impl Export {
    pub fn add_pages(&mut self, parts: &[PageTable]) {
        for (table, part) in self.tables.iter_mut().zip(parts) {
            table.append(part);
        }
    }

    pub fn fill(&mut self, layers: Range<u32>, num_rows: u32) {
        for layer in layers {
            let num_readable = &mut self.num_readable[layer as usize];
            *num_readable = num_rows.max(*num_readable);
        }
    }

    pub fn set_state(&mut self, state: Option<SnapshotId>) {
        self.state = state;
    }

    /// Returns whether all rows may be read.
    pub fn is_readable(&self) -> bool {
        let num_rows = self.rows.len() as u32;
        self.num_readable.iter().all(|&num| num == num_rows)
    }
}

/// The rows that a decode node asks for.
#[derive(Clone, Copy)]
pub struct Load {
    first_row: u32,
    decode_index: usize,
}

/// A load that is being served.
pub struct Sender {
    export: Rc<RefCell<Export>>,
    decode_index: usize,
    /// By KV group and layer, the next row to send.
    next: Vec<u32>,
    /// Whether the recurrent state still has to be sent.
    owes_state: bool,
    /// The time at which rows were last read.
    progress_us: Option<u64>,
    is_reading: bool,
    /// Whether the export was deleted while rows were being read.
    is_stopping: bool,
}

impl Sender {
    fn has_sent_all(&self) -> bool {
        let num_rows = self.export.borrow().rows.len() as u32;
        !self.owes_state && self.next.iter().all(|&row| row >= num_rows)
    }
}

impl SimulatedPrefillNode {
    pub fn export(&mut self, key: SessionKey, run: u32, num_rows: u32, world: &mut World<'_>) {
        let now_us = world.now_us;
        let call = &world.workload.calls[key.session.0 as usize];
        let request = &call.request;
        let mut tokens = request.prompt.clone();
        tokens.extend(&call.output[..num_rows as usize - tokens.len()]);
        let export = Rc::new(RefCell::new(Export {
            run,
            rows: rows_of(root_row(&request.namespace), &tokens),
            tables: vec![PageTable::default(); self.engine.groups().len()],
            num_readable: vec![0; self.num_layers as usize],
            state: None,
        }));
        let exported = self.exports.export(key, export.clone(), now_us);
        world.sessions.unsubscribed(key);
        let Ok(waiting) = exported else {
            return self.machine.sessions().handle_load_failed(key, now_us);
        };
        if let Some(load) = waiting {
            self.serve(key, export, load, world);
        }
    }

    /// Returns the export of a key, from the table or from a running sender.
    pub fn export_of(&self, key: SessionKey) -> Option<Rc<RefCell<Export>>> {
        let sender = self.senders.get(&key).map(|sender| &sender.export);
        self.exports.get(key).or(sender).cloned()
    }

    fn serve(
        &mut self,
        key: SessionKey,
        export: Rc<RefCell<Export>>,
        load: Load,
        world: &mut World<'_>,
    ) {
        let num_rows = export.borrow().rows.len() as u32;
        let groups = self.engine.groups().iter();
        let page_size = self.engine.page_size();
        let first_rows = groups.map(|group| {
            let first_page = group.first_page_exported(num_rows, page_size);
            (first_page * page_size).max(load.first_row)
        });
        let next = first_rows.flat_map(|row| std::iter::repeat_n(row, self.num_layers as usize));
        let sender = Sender {
            decode_index: load.decode_index,
            next: next.collect(),
            owes_state: self.engine.is_recurrent(),
            progress_us: None,
            export,
            is_reading: false,
            is_stopping: false,
        };
        self.senders.insert(key, sender);
        self.wake_sender(key, world);
    }

    pub fn wake_sender(&mut self, key: SessionKey, world: &mut World<'_>) {
        if let Some(sender) = self.senders.get_mut(&key)
            && !sender.is_stopping
            && !std::mem::replace(&mut sender.is_reading, true)
        {
            self.push(world.now_us + 1, LocalEvent::Read(key), world);
        }
    }

    /// Reads the next rows for an attempt, and sends them. The layer with the fewest sent rows comes first.
    pub fn read(&mut self, key: SessionKey, world: &mut World<'_>) -> Result<(), Violation> {
        let Some(sender) = self.senders.get_mut(&key) else {
            return Ok(());
        };
        let export = sender.export.clone();
        let export = export.borrow();
        let readable = export.num_readable.iter().cycle();
        let unsent = sender.next.iter().zip(readable).enumerate();
        let unsent = unsent.filter(|(_, (first_row, end_row))| first_row < end_row);
        let Some((at, rows)) = unsent
            .min_by_key(|&(_, (&first_row, _))| first_row)
            .map(|(at, (&first_row, &end_row))| (at, first_row..end_row))
        else {
            sender.is_reading = false;
            return self.read_state(key, world);
        };
        sender.next[at] = rows.end;
        sender.progress_us = Some(world.now_us);
        let num_layers = self.num_layers as usize;
        let (group, layer) = (at / num_layers, at % num_layers);
        let row_us = world.links().row_us[sender.decode_index];
        let page_size = self.engine.page_size();
        let mut content = Vec::new();
        for row in rows.clone() {
            let Some(page) = export.tables[group].page((row / page_size) as usize) else {
                let what = format!("{key} has no page of row {row} in group {group}");
                return Err(world.violation("what is read is what was exported", what));
            };
            let place = (row % page_size) as usize;
            if !self.engine.progress.is_computed(page, place, layer as u32) {
                let what = format!("{key} reads row {row} in layer {layer}");
                return Err(world.violation("a row is read when its layer is done", what));
            }
            let found = self.engine.executor.read_row(page, place);
            let should = self
                .engine
                .executor
                .made_here(export.rows[row as usize], group);
            // The failed step may have named another request that shares the pages.
            let has_failed = self.engine.has_failed_steps();
            world.totals.num_reads_of_failed_steps += u64::from(found.is_none() && has_failed);
            if found != should && !(found.is_none() && has_failed) {
                let what = format!("{key} reads {found:?} instead of {should:?}, row {row}");
                return Err(world.violation("what is read is what was exported", what));
            }
            content.push(found);
        }
        let num_rows = u64::from(rows.end - rows.start);
        let transfer_us = 1 + num_rows * row_us / sender.next.len() as u64;
        world.send(
            ConnectionId::data(key),
            Direction::ToDecode,
            Packet::Rows {
                group,
                layer: layer as u32,
                rows,
                content,
            },
        );
        self.push(world.now_us + transfer_us, LocalEvent::Read(key), world);
        self.machine
            .sessions()
            .handle_load_progress(key, world.now_us);
        Ok(())
    }

    /// Sends the state after all rows, if it is computed and was not sent yet.
    fn read_state(&mut self, key: SessionKey, world: &mut World<'_>) -> Result<(), Violation> {
        let Some(sender) = self.senders.get_mut(&key) else {
            return Ok(());
        };
        let export = sender.export.borrow();
        let Some(state) = export.state.filter(|_| sender.owes_state) else {
            return Ok(());
        };
        let found = self.engine.executor.read_state(state);
        let should = export.rows.last().copied().flatten();
        let has_failed = self.engine.has_failed_steps();
        if found != should && !(found.is_none() && has_failed) {
            let what = format!("{key} reads state {found:?} instead of {should:?}");
            return Err(world.violation("what is read is what was exported", what));
        }
        drop(export);
        sender.owes_state = false;
        sender.progress_us = Some(world.now_us);
        world.totals.num_states_sent += 1;
        let id = ConnectionId::data(key);
        world.send(id, Direction::ToDecode, Packet::State(found));
        self.machine
            .sessions()
            .handle_load_progress(key, world.now_us);
        Ok(())
    }

    /// Returns a load that may still read pages of a run.
    pub fn reader_of(&self, session: SessionId, run: u32) -> Option<SessionKey> {
        let mut senders = self.senders.iter();
        let reader = senders
            .find(|(key, sender)| key.session == session && sender.export.borrow().run == run);
        reader.map(|(&key, _)| key)
    }

    /// Returns the time at which a running load last read rows of a run.
    pub fn progress_us(&self, session: SessionId, run: u32) -> Option<u64> {
        let sender = &self.senders[&self.reader_of(session, run)?];
        sender.progress_us.filter(|_| !sender.is_stopping)
    }

    pub fn handle_load(
        &mut self,
        id: ConnectionId,
        first_row: u32,
        deadline_us: u64,
        world: &mut World<'_>,
    ) {
        let (key, now_us) = (id.key, world.now_us);
        let load = Load {
            first_row,
            decode_index: world.decode_index(id),
        };
        match self.exports.load(key, deadline_us, now_us, || load) {
            Ok(Loaded::Exported(export)) => {
                let export = export.clone();
                self.serve(key, export, load, world);
            }
            Ok(Loaded::Waits { .. }) => {
                let deadline_us = deadline_us.max(now_us);
                world.sessions.subscribed(key, self.id, deadline_us);
            }
            Err(_) => world.close(id, Direction::ToDecode),
        }
    }

    pub fn handle_load_closed(&mut self, key: SessionKey, world: &mut World<'_>) {
        world.sessions.unsubscribed(key);
        self.exports.cancel(key, |_| true);
        match self.senders.remove(&key) {
            Some(sender) if sender.is_stopping => {
                self.machine.sessions().handle_deleted(key, world.now_us)
            }
            Some(sender) if !sender.has_sent_all() => {
                self.machine
                    .sessions()
                    .handle_load_failed(key, world.now_us);
            }
            _ => {}
        }
    }

    pub fn delete(&mut self, key: SessionKey, world: &mut World<'_>) {
        world.sessions.unsubscribed(key);
        let (_, waiting) = self.exports.end(key, ExportEnd::Deleted, world.now_us);
        if waiting.is_some() {
            world.close(ConnectionId::data(key), Direction::ToDecode);
        }
        match self.senders.get_mut(&key) {
            Some(sender) => {
                sender.is_stopping = true;
                let at_us = world.now_us + world.stop_us();
                self.push(at_us, LocalEvent::Stopped(key), world);
            }
            None => self.machine.sessions().handle_deleted(key, world.now_us),
        }
    }

    pub fn time_out_loads(&mut self, world: &mut World<'_>) -> Result<(), Violation> {
        let now_us = world.now_us;
        while let Some((key, _)) = self.exports.poll_late_load(now_us) {
            world.totals.num_load_timeouts += 1;
            world.close(ConnectionId::data(key), Direction::ToDecode);
            let deadline_us = world.sessions.unsubscribed(key);
            if deadline_us != Some(now_us) {
                let what = format!("{key} had until {deadline_us:?}");
                return Err(world.violation("a load times out at its deadline", what));
            }
        }
        Ok(())
    }

    /// Handles the end of reading for a load whose export was deleted.
    pub fn handle_stopped(&mut self, key: SessionKey, world: &mut World<'_>) {
        if self.senders.remove(&key).is_some() {
            world.close(ConnectionId::data(key), Direction::ToDecode);
            self.machine.sessions().handle_deleted(key, world.now_us);
        }
    }
}
