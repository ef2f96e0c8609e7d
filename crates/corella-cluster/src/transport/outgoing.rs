//! A session's rows on the sending side.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use corella_core::session::SessionKey;
use corella_core::{KvGroup, PageId, PageTable, SnapshotId};
use corella_model::{KvPages, PageForm};
use tokio::sync::watch;

use super::TransferAccount;
use super::connection_queue::{ConnectionId, ConnectionQueue};
use super::frame::{Frame, LoadFrame, PageRun, Refusal, StateRun};
use super::gate::Gate;

/// The state of an exported session. `Over` means that the session's owner has ended it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendStatus {
    /// No receiver has asked for the rows.
    Exported,
    Sending,
    /// All rows went out.
    Sent,
    /// The receiver has all rows.
    Received,
    /// The receiver has cancelled, or its connection is lost. The receiver may ask again.
    Stopped,
    /// `delete` or `fail` was called.
    Over,
}

pub struct Outgoing {
    pub key: SessionKey,
    pub pages: Arc<dyn KvPages>,
    pub num_rows: u32,
    /// Closed when the session is over, after which its pages are not read.
    pub gate: Gate,
    state: Mutex<State>,
    status: watch::Sender<SendStatus>,
}

struct State {
    /// The known part of each KV group's table.
    tables: Vec<PageTable>,
    /// For each layer of a page, the number of readable rows from 0 on.
    num_readable: Box<[u32]>,
    is_finished: bool,
    /// The recurrent state after all rows.
    recurrent: Option<SnapshotId>,
    feed: Option<Feed>,
    account: TransferAccount,
}

/// A load in progress.
struct Feed {
    connection: Arc<ConnectionQueue>,
    load_id: u64,
    /// Bytes that may be sent.
    credit: u64,
    /// Bytes that were sent and not acknowledged.
    num_unacknowledged: u64,
    /// For each layer of the model, the first row still to be sent. Rows before it were sent, or the receiver has them
    /// already or never reads them.
    num_sent: Box<[u32]>,
    /// The number of recurrent layers, from the first on, whose states were sent.
    num_states_sent: u32,
    /// Whether the load is in the queue of the connection's writer.
    is_queued: bool,
    /// Whether some rows or states could be sent now.
    has_work: bool,
    is_complete: bool,
}

/// Returns the first row of a layer to send, if the receiver has the rows before `rows`. Pages are sent whole, so the
/// first page sent may begin with rows that the receiver has. In a group with a window, pages that no query after
/// `rows` reads are not sent.
pub fn first_row_sent(group: KvGroup, page_size: u32, rows: Range<u32>) -> u32 {
    if rows.is_empty() {
        return rows.end;
    }
    let first_page = group.first_page_exported(rows.end, page_size);
    first_page.max(rows.start / page_size) * page_size
}

/// The next task of a connection's writer for a session.
pub enum Next {
    /// The pages are in the caller's vector.
    Data(PageRun),
    /// A layer's state in a snapshot.
    State(StateRun, SnapshotId),
    Frame(Frame),
    /// Nothing until more rows or credit arrive. The load is no longer queued.
    Nothing,
}

impl Outgoing {
    pub fn new(key: SessionKey, pages: Arc<dyn KvPages>, num_rows: u32) -> Self {
        let num_layers = pages.geometry().num_layers as usize;
        let num_groups = pages.geometry().layers.groups().len();
        Self {
            key,
            pages,
            num_rows,
            gate: Gate::new(),
            state: Mutex::new(State {
                tables: vec![PageTable::default(); num_groups],
                num_readable: vec![0; num_layers].into(),
                is_finished: false,
                recurrent: None,
                feed: None,
                account: TransferAccount::default(),
            }),
            status: watch::Sender::new(SendStatus::Exported),
        }
    }

    /// Makes a session with all rows present. The table of a group with a window may begin at the window.
    pub fn whole(
        key: SessionKey,
        pages: Arc<dyn KvPages>,
        num_rows: u32,
        tables: Vec<PageTable>,
    ) -> Self {
        let outgoing = Self::new(key, pages, num_rows);
        let mut state = outgoing.state();
        state.tables = tables;
        state.num_readable.fill(num_rows);
        state.is_finished = true;
        drop(state);
        outgoing
    }

    pub fn status(&self) -> watch::Receiver<SendStatus> {
        self.status.subscribe()
    }

    pub fn account(&self) -> TransferAccount {
        self.state().account
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_status(&self, status: SendStatus) {
        self.status.send_if_modified(|now| {
            let changes = *now != status && *now != SendStatus::Over;
            if changes {
                *now = status;
            }
            changes
        });
    }

    /// Adds the next part of each group's table.
    pub fn add_pages(&self, parts: &[PageTable]) {
        let mut state = self.state();
        for (table, part) in state.tables.iter_mut().zip(parts) {
            table.append(part);
        }
        self.queue(&mut state);
    }

    /// Declares the rows from 0 to `num_rows` readable in these layers of a page.
    pub fn handle_rows_readable(&self, layers: Range<u32>, num_rows: u32) {
        let mut state = self.state();
        let num_rows = num_rows.min(self.num_rows);
        for num_readable in &mut state.num_readable[layers.start as usize..layers.end as usize] {
            *num_readable = num_rows.max(*num_readable);
        }
        if state.num_readable.iter().all(|&num| num == self.num_rows) {
            state.account.computed_at.get_or_insert_with(Instant::now);
        }
        self.queue(&mut state);
    }

    /// Declares that the recurrent state after all rows may be read from a snapshot.
    pub fn set_state(&self, snapshot: SnapshotId) {
        self.state().recurrent = Some(snapshot);
    }

    /// Declares the rows valid. Returns false if some were never declared readable.
    pub fn finish(&self) -> bool {
        let mut state = self.state();
        let is_whole = state.num_readable.iter().all(|&num| num == self.num_rows);
        state.is_finished = is_whole;
        self.queue(&mut state);
        is_whole
    }

    /// Takes the pages back: once this has returned, nothing reads them. Tells a connected receiver the reason.
    pub fn end(&self, reason: Refusal) {
        self.gate.close();
        let feed = self.state().feed.take();
        if let Some(mut feed) = feed {
            feed.stop();
            feed.refuse(reason);
        }
        self.set_status(SendStatus::Over);
    }

    /// Begins to serve a load. An older load of this session fails.
    pub fn serve(self: &Arc<Self>, connection: &Arc<ConnectionQueue>, load: &LoadFrame) {
        let page_size = self.pages.geometry().page_size;
        if load.num_rows != self.num_rows || load.first_row > load.num_rows {
            connection.send(&Frame::Failed {
                load_id: load.load_id,
                reason: Refusal::OtherRows,
            });
            return;
        }
        if !connection.add_load(load.load_id, self.key) {
            return;
        }
        let layers = &self.pages.geometry().layers;
        let mut state = self.state();
        let num_sent = (0..layers.num_layers())
            .map(|layer| {
                let rows = load.first_row..load.num_rows;
                let table = &state.tables[layers.place(layer).group];
                first_row_sent(layers.group_of(layer), page_size, rows)
                    .max(table.num_gone as u32 * page_size)
            })
            .collect();
        let older = state.feed.replace(Feed {
            connection: connection.clone(),
            load_id: load.load_id,
            credit: u64::from(load.credit_bytes),
            num_unacknowledged: 0,
            num_sent,
            num_states_sent: 0,
            is_queued: false,
            has_work: false,
            is_complete: false,
        });
        self.queue(&mut state);
        drop(state);
        if let Some(mut older) = older {
            older.stop();
            older.refuse(Refusal::Superseded);
        }
        self.set_status(SendStatus::Sending);
        // The session may have ended before it knew of the connection.
        if !self.gate.is_open() {
            self.end(Refusal::Gone);
        }
    }

    /// Stops a load that is over on the receiver's side, or whose connection is lost.
    pub fn stop_serving(&self, connection: ConnectionId, load_id: u64) {
        let mut state = self.state();
        if let Some(mut feed) = state.feed.take_if(|feed| feed.is(connection, load_id)) {
            drop(state);
            feed.stop();
            self.set_status(SendStatus::Stopped);
        }
    }

    pub fn handle_credit(
        &self,
        connection: ConnectionId,
        load_id: u64,
        num_bytes: u64,
        now: Instant,
    ) {
        let mut state = self.state();
        let feed = state.feed.as_mut();
        if let Some(feed) = feed.filter(|feed| feed.is(connection, load_id)) {
            feed.credit = feed.credit.saturating_add(num_bytes);
            feed.acknowledge(num_bytes, now);
            self.queue(&mut state);
        }
    }

    pub fn handle_received(&self, connection: ConnectionId, load_id: u64, now: Instant) {
        self.note_received(|feed| feed.is(connection, load_id), now);
    }

    /// Records that the receiver has reported, on another connection, that it has all rows.
    pub fn handle_loaded(&self, now: Instant) -> TransferAccount {
        self.note_received(|_| true, now);
        self.account()
    }

    /// Ends a load. The account is complete before the status shows the end.
    fn note_received(&self, is_it: impl Fn(&Feed) -> bool, now: Instant) {
        let mut state = self.state();
        let Some(mut feed) = state.feed.take_if(|feed| is_it(feed)) else {
            return;
        };
        state.account.received_at = Some(now);
        feed.acknowledge(u64::MAX, now);
        feed.stop();
        drop(state);
        self.set_status(match feed.is_complete {
            true => SendStatus::Received,
            false => SendStatus::Stopped,
        });
    }

    /// Returns the next rows to send: up to `max_bytes`, or one larger page.
    pub fn next(
        &self,
        connection: ConnectionId,
        load_id: u64,
        form: PageForm,
        max_bytes: usize,
        pages: &mut Vec<PageId>,
    ) -> Next {
        let geometry = self.pages.geometry();
        let (page_size, layer_bytes) = (geometry.page_size, geometry.layer_bytes());
        let mut state = self.state();
        let State {
            tables,
            num_readable,
            is_finished,
            recurrent,
            feed,
            account,
        } = &mut *state;
        let feed = feed.as_mut().filter(|feed| feed.is(connection, load_id));
        let Some(feed) = feed else {
            return Next::Nothing;
        };
        // A page is sent when no more rows will be written to it: when it is full, or when all rows are readable.
        let sendable =
            |layer: usize| match num_readable[geometry.layers.place(layer as u32).in_page] {
                num_rows if num_rows == self.num_rows => num_rows,
                num_rows => num_rows / page_size * page_size,
            };
        let layers = (0..feed.num_sent.len()).filter(|&l| feed.num_sent[l] < sendable(l));
        // The layer with the fewest sent rows goes first, because its rows were computed first.
        if let Some(layer) = layers.min_by_key(|&layer| feed.num_sent[layer]) {
            let first_row = feed.num_sent[layer];
            let first_page = (first_row / page_size) as usize;
            let end_page = sendable(layer).div_ceil(page_size) as usize;
            let table = &tables[geometry.layers.place(layer as u32).group];
            let credit = feed.credit / layer_bytes as u64;
            let num_pages = end_page
                .min(table.len())
                .saturating_sub(first_page)
                .min((max_bytes / layer_bytes).max(1))
                .min(usize::try_from(credit).unwrap_or(usize::MAX));
            let end_row = ((first_page + num_pages) as u32 * page_size).min(self.num_rows);
            pages.clear();
            pages.extend((first_page..first_page + num_pages).map_while(|at| table.page(at)));
            // Rows whose pages are missing in the table cannot be sent.
            if num_pages == 0 || pages.len() < num_pages {
                feed.is_queued = false;
                return Next::Nothing;
            }
            feed.num_sent[layer] = end_row;
            feed.spend((num_pages * layer_bytes) as u64, account);
            return Next::Data(PageRun {
                load_id,
                layer: layer as u32,
                first_row,
                num_rows: end_row - first_row,
                form,
                num_regions: 0,
            });
        }
        let is_through = feed.num_sent.iter().all(|&num| num == self.num_rows);
        if *is_finished
            && is_through
            && let Some(next) = self.next_state(feed, account, *recurrent)
        {
            return next;
        }
        if *is_finished && is_through && !feed.is_complete {
            feed.is_complete = true;
            let num_rows = self.num_rows;
            drop(state);
            self.set_status(SendStatus::Sent);
            return Next::Frame(Frame::Complete { load_id, num_rows });
        }
        feed.is_queued = false;
        feed.pause();
        Next::Nothing
    }

    /// Returns the state of the next recurrent layer, if one is left.
    fn next_state(
        &self,
        feed: &mut Feed,
        account: &mut TransferAccount,
        recurrent: Option<SnapshotId>,
    ) -> Option<Next> {
        let (states, snapshot) = (self.pages.states()?, recurrent?);
        let layer = states.next_layer(feed.num_states_sent, self.num_rows)?;
        let num_bytes = states.num_bytes(layer, self.num_rows);
        if feed.credit < num_bytes as u64 {
            feed.is_queued = false;
            return Some(Next::Nothing);
        }
        feed.num_states_sent = layer + 1;
        feed.spend(num_bytes as u64, account);
        let run = StateRun {
            load_id: feed.load_id,
            layer,
            num_rows: self.num_rows,
            num_bytes: num_bytes as u32,
        };
        Some(Next::State(run, snapshot))
    }

    pub fn note_sent(&self, num_bytes: usize, num_pages: usize) {
        self.state()
            .account
            .add(num_bytes, num_pages, Instant::now());
    }

    /// Queues this session for the connection's writer.
    fn queue(&self, state: &mut State) {
        if let Some(feed) = &mut state.feed
            && !feed.is_queued
        {
            feed.is_queued = true;
            feed.connection.queue(feed.load_id);
        }
    }
}

impl Feed {
    /// Accounts for bytes that are sent now.
    fn spend(&mut self, num_bytes: u64, account: &mut TransferAccount) {
        let now = Instant::now();
        self.credit -= num_bytes;
        self.handle_sent(num_bytes, now);
        account.first_byte_at.get_or_insert(now);
    }

    fn is(&self, connection: ConnectionId, load_id: u64) -> bool {
        self.connection.id == connection && self.load_id == load_id
    }

    fn acknowledge(&mut self, num_bytes: u64, now: Instant) {
        let num_bytes = num_bytes.min(self.num_unacknowledged);
        self.num_unacknowledged -= num_bytes;
        self.connection.meter().handle_acknowledged(num_bytes, now);
    }

    fn handle_sent(&mut self, num_bytes: u64, now: Instant) {
        self.num_unacknowledged += num_bytes;
        let mut meter = self.connection.meter();
        if !std::mem::replace(&mut self.has_work, true) {
            meter.handle_work();
        }
        meter.handle_sent(num_bytes, now);
    }

    fn pause(&mut self) {
        if std::mem::take(&mut self.has_work) {
            self.connection.meter().handle_pause();
        }
    }

    fn stop(&mut self) {
        self.pause();
        self.connection.meter().handle_lost(self.num_unacknowledged);
        self.connection.remove_load(self.load_id);
    }

    /// Refuses the load, unless the receiver has been told that the load is complete.
    fn refuse(&self, reason: Refusal) {
        if self.is_complete {
            return;
        }
        self.connection.send(&Frame::Failed {
            load_id: self.load_id,
            reason,
        });
    }
}
