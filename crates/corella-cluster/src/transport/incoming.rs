//! A session's rows on the receiving side.

use std::collections::HashMap;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use corella_core::{PageId, PageTable, SnapshotId};
use corella_model::{KvPages, PageConversion, PageForm, StateRecords};
use tokio::sync::{Notify, watch};

use super::connection_queue::ConnectionQueue;
use super::frame::{Frame, LoadFrame, PageRun, Refusal, StateRun};
use super::gate::Gate;
use super::load_request::LoadRequest;
use super::outgoing::first_row_sent;
use super::{Hello, Incompatibility, TransferAccount};

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LoadStatus {
    /// Nothing has arrived.
    Opening,
    Receiving {
        num_bytes: u64,
    },
    /// All rows are in their pages.
    Done {
        num_rows: u32,
    },
    /// Nothing more will be written to the pages, and their rows are invalid.
    Failed(LoadFailure),
}

impl LoadStatus {
    pub fn is_over(&self) -> bool {
        matches!(self, Self::Done { .. } | Self::Failed(_))
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoadFailure {
    #[error("the sender refused: {0}")]
    Refused(Refusal),
    /// No connection could be made. Holds the error of the last attempt.
    #[error("the sender cannot be reached: {0}")]
    Unreachable(String),
    #[error("the connection to the sender was lost")]
    ConnectionLost,
    #[error("the rows did not come in time")]
    DeadlinePassed,
    #[error("the sender is incompatible: {0}")]
    Incompatible(Incompatibility),
    /// Another process listens at the address now.
    #[error("the sender was restarted meanwhile")]
    OtherIncarnation,
    /// Bytes were damaged on the way, or a sender whose memory is read has taken its pages back during the read.
    #[error("the rows were damaged on their way")]
    Corrupt,
    /// The peer has violated the protocol; the text says how.
    #[error("the sender broke the protocol: {0}")]
    Violation(&'static str),
    #[error("the load was cancelled")]
    Cancelled,
}

/// The running loads by id. A load that ends leaves the table.
pub type LoadTable = Mutex<HashMap<u64, Arc<Incoming>>>;

pub struct Incoming {
    pub load_id: u64,
    pub request: LoadRequest,
    pub pages: Arc<dyn KvPages>,
    /// Closed when the load is over, after which its pages are not written.
    pub gate: Gate,
    /// Notified when the connection ends before the load.
    pub lost: Notify,
    table: Weak<LoadTable>,
    state: Mutex<State>,
    status: watch::Sender<LoadStatus>,
}

struct State {
    connection: Option<Arc<ConnectionQueue>>,
    /// For each layer of the model, the first row that is still missing. Rows before it are present or never read.
    num_received: Vec<u32>,
    /// The number of recurrent layers, from the first on, whose states are present.
    num_states_received: u32,
    /// Bytes that the sender may still send.
    credit: u64,
    account: TransferAccount,
}

impl State {
    fn new(num_received: Vec<u32>, window: u64) -> Self {
        Self {
            connection: None,
            num_received,
            num_states_received: 0,
            credit: window,
            account: TransferAccount::default(),
        }
    }
}

impl Incoming {
    pub fn new(
        load_id: u64,
        request: LoadRequest,
        pages: Arc<dyn KvPages>,
        table: &Arc<LoadTable>,
    ) -> Self {
        Self {
            load_id,
            request,
            pages,
            gate: Gate::new(),
            lost: Notify::new(),
            table: Arc::downgrade(table),
            state: Mutex::new(State::new(Vec::new(), 0)),
            status: watch::Sender::new(LoadStatus::Opening),
        }
    }

    pub fn status(&self) -> watch::Receiver<LoadStatus> {
        self.status.subscribe()
    }

    pub fn account(&self) -> TransferAccount {
        self.state().account
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks for the rows over this connection.
    pub fn open(&self, connection: &Arc<ConnectionQueue>, sender: &Hello, window_bytes: u32) {
        let request = &self.request;
        if request.key.prefill_incarnation.0 != sender.incarnation {
            return self.fail(LoadFailure::OtherIncarnation);
        }
        let geometry = &sender.geometry;
        let layer_bytes = u32::try_from(geometry.layer_bytes()).unwrap_or(u32::MAX);
        let credit_bytes = window_bytes.max(layer_bytes).max(self.credit_for_states());
        let layers = &self.pages.geometry().layers;
        let own_page_size = self.pages.geometry().page_size;
        let first_row = |layer| {
            let rows = request.first_row..request.num_rows;
            // In groups with windows, the table of cached blocks lacks pages that only the last row would read.
            first_row_sent(layers.group_of(layer), geometry.page_size, rows)
                .max(self.table(layer).num_gone as u32 * own_page_size)
        };
        let num_received = (0..layers.num_layers()).map(first_row).collect();
        *self.state() = State {
            connection: Some(connection.clone()),
            ..State::new(num_received, credit_bytes.into())
        };
        if !connection.add_load(self.load_id, request.key) {
            return self.handle_lost();
        }
        let wait = request.deadline.saturating_duration_since(Instant::now());
        connection.send(&Frame::Load(LoadFrame {
            load_id: self.load_id,
            key: request.key,
            first_row: request.first_row,
            num_rows: request.num_rows,
            credit_bytes,
            wait_ms: u32::try_from(wait.as_millis()).unwrap_or(u32::MAX),
        }));
        // The load may have been cancelled before the connection was stored.
        if !self.gate.is_open() {
            connection.remove_load(self.load_id);
            connection.send(&Frame::Cancel {
                load_id: self.load_id,
            });
        }
    }

    /// Returns the states that come with the rows, and their destination.
    fn states(&self) -> Option<(&dyn StateRecords, SnapshotId)> {
        Some((self.pages.states()?, self.request.state?))
    }

    /// Returns the credit for two states, so that one state can be sent while the credit for the previous state comes
    /// back.
    fn credit_for_states(&self) -> u32 {
        let states = self.states();
        let most = states.map_or(0, |(states, _)| states.max_bytes(self.request.num_rows));
        u32::try_from(2 * most).unwrap_or(u32::MAX)
    }

    /// Checks that a state is the next one, and takes its bytes from the credit. The error names the violation.
    pub fn check_state(&self, run: &StateRun) -> Result<(), &'static str> {
        let Some((states, _)) = self.states() else {
            return Err("a recurrent state that was not asked for");
        };
        let num_rows = self.request.num_rows;
        let mut state = self.state();
        if states.next_layer(state.num_states_received, num_rows) != Some(run.layer) {
            return Err("recurrent states out of their order");
        }
        let num_bytes = states.num_bytes(run.layer, num_rows);
        if run.num_rows != num_rows || run.num_bytes as usize != num_bytes {
            return Err("a recurrent state behind other rows");
        }
        match state.credit.checked_sub(num_bytes as u64) {
            Some(credit) => state.credit = credit,
            None => return Err("more bytes than it has credit for"),
        }
        state.account.first_byte_at.get_or_insert_with(Instant::now);
        Ok(())
    }

    /// Writes a complete state, unless the load is over.
    pub fn handle_state(&self, run: &StateRun, bytes: &[u8]) {
        let Some((states, snapshot)) = self.states() else {
            return;
        };
        let write = || states.write(run.layer, snapshot, run.num_rows, bytes);
        match self.gate.enter(write) {
            None => {}
            Some(Err(error)) => {
                tracing::warn!(%error, "a recurrent state cannot be kept");
                self.fail(LoadFailure::Corrupt);
            }
            Some(Ok(())) => {
                self.state().num_states_received = run.layer + 1;
                self.note_bytes(bytes.len(), 0);
            }
        }
    }

    /// Checks that a run is the next one of its layer, and takes its bytes from the credit. The error names the
    /// violation.
    pub fn check(&self, run: &PageRun, num_bytes: usize) -> Result<(), &'static str> {
        let mut state = self.state();
        let Some(&num_received) = state.num_received.get(run.layer as usize) else {
            return Err("a layer that the model does not have");
        };
        if run.first_row != num_received {
            return Err("rows out of their order");
        }
        let end = run.first_row.checked_add(run.num_rows);
        if run.num_rows == 0 || end.is_none_or(|end| end > self.request.num_rows) {
            return Err("rows that were not asked for");
        }
        match state.credit.checked_sub(num_bytes as u64) {
            Some(credit) => state.credit = credit,
            None => return Err("more bytes than it has credit for"),
        }
        state.account.first_byte_at.get_or_insert_with(Instant::now);
        Ok(())
    }

    /// Returns this node's pages for a run in native form, whose pages have the same size on both nodes.
    fn pages_of(&self, run: &PageRun) -> &[PageId] {
        self.pages_with(run.layer, run.first_row..run.first_row + run.num_rows)
    }

    /// Returns the pages of `rows`, which must not begin before the layer's table.
    fn pages_with(&self, layer: u32, rows: Range<u32>) -> &[PageId] {
        let page_size = self.pages.geometry().page_size;
        let table = self.table(layer);
        let (first, end) = (rows.start / page_size, rows.end.div_ceil(page_size));
        &table.pages[first as usize - table.num_gone..end as usize - table.num_gone]
    }

    fn table(&self, layer: u32) -> &PageTable {
        &self.request.tables[self.pages.geometry().layers.place(layer).group]
    }

    /// Returns the destination of a run in native form.
    pub fn native_parts_of(&self, run: &PageRun) -> impl Iterator<Item = NonNull<[u8]>> {
        let layer = self.layer_in_page(run.layer);
        let of_page = move |&page: &PageId| self.pages.native_parts(layer, page);
        self.pages_of(run).iter().flat_map(of_page)
    }

    fn layer_in_page(&self, layer: u32) -> u32 {
        self.pages.geometry().layers.place(layer).in_page as u32
    }

    /// Tells the KV memory that a run was received straight into its pages, which will be used soon.
    pub fn note_written(&self, run: &PageRun) {
        if self.layer_in_page(run.layer) == 0 {
            let note = |&page: &PageId| self.pages.note_written(page);
            self.gate.enter(|| self.pages_of(run).iter().for_each(note));
        }
    }

    /// Converts a run from canonical form to this node's form, and writes it to the pages. `own` is a reused buffer.
    /// Returns false when the load is over.
    pub fn write_rows(
        &self,
        run: &PageRun,
        conversion: &PageConversion,
        canonical: &[u8],
        own: &mut Vec<u8>,
    ) -> bool {
        // A page of the sender may begin with rows that this node already has.
        let rows = run.first_row.max(self.request.first_row)..run.first_row + run.num_rows;
        let layer = self.layer_in_page(run.layer);
        let pages = self.pages_with(run.layer, rows.clone());
        let form = PageForm::Canonical;
        own.resize(pages.len() * self.pages.geometry().layer_bytes(), 0);
        let write = || {
            // SAFETY: pages that are reserved for the load, whose gate is open.
            unsafe { self.pages.read(layer, pages, form, own) };
            conversion.convert(rows.start as usize..rows.end as usize, canonical, own);
            // SAFETY: as above.
            unsafe { self.pages.write(layer, pages, form, own) };
        };
        self.gate.enter(write).is_some()
    }

    /// Accounts for a run that is in its pages, and returns its credit to the sender.
    pub fn handle_run(&self, run: &PageRun, num_bytes: usize, num_pages: usize) {
        self.state().num_received[run.layer as usize] += run.num_rows;
        self.note_bytes(num_bytes, num_pages);
    }

    fn note_bytes(&self, num_bytes: usize, num_pages: usize) {
        let now = Instant::now();
        let mut state = self.state();
        state.account.add(num_bytes, num_pages, now);
        // Credit is sent at once, because the sender measures the link by it and may have nothing more to send for a
        // while.
        if let Some(connection) = &state.connection {
            connection.send(&Frame::Credit {
                load_id: self.load_id,
                num_bytes: u32::try_from(num_bytes).unwrap_or(u32::MAX),
            });
            state.credit += num_bytes as u64;
        }
        let num_bytes = state.account.num_bytes;
        drop(state);
        self.status.send_if_modified(|status| {
            let runs = !status.is_over();
            if runs {
                *status = LoadStatus::Receiving { num_bytes };
            }
            runs
        });
    }

    pub fn handle_complete(&self, num_rows: u32) -> Result<(), &'static str> {
        let is_whole = {
            let state = self.state();
            let mut rows = state.num_received.iter();
            let is_left = |(states, _): (&dyn StateRecords, _)| {
                states
                    .next_layer(state.num_states_received, num_rows)
                    .is_some()
            };
            num_rows == self.request.num_rows
                && rows.all(|&num| num == num_rows)
                && !self.states().is_some_and(is_left)
        };
        if !is_whole {
            return Err("an end before all rows have come");
        }
        self.end(LoadStatus::Done { num_rows });
        Ok(())
    }

    /// Tries another connection after a loss.
    pub fn handle_lost(&self) {
        let mut state = self.state();
        state.connection = None;
        let is_untouched = state.account.first_byte_at.is_none();
        drop(state);
        match is_untouched {
            true => self.lost.notify_one(),
            false => self.fail(LoadFailure::ConnectionLost),
        }
    }

    pub fn fail(&self, failure: LoadFailure) {
        self.end(LoadStatus::Failed(failure));
    }

    /// Ends the load. Only the first call counts. Once the status shows the end, nothing writes to the pages any more.
    fn end(&self, end: LoadStatus) {
        if !self.gate.close() {
            return;
        }
        let connection = self.state().connection.take();
        if let Some(connection) = connection {
            connection.remove_load(self.load_id);
            let load_id = self.load_id;
            match end {
                LoadStatus::Done { .. } => connection.send(&Frame::Received { load_id }),
                // The sender itself has refused the load.
                LoadStatus::Failed(LoadFailure::Refused(_)) => {}
                _ => connection.send(&Frame::Cancel { load_id }),
            }
        }
        if let Some(table) = self.table.upgrade() {
            let mut loads = table.lock().unwrap_or_else(PoisonError::into_inner);
            loads.remove(&self.load_id);
        }
        self.status.send_replace(end);
    }
}
