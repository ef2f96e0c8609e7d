//! A node's loads of KV rows from other nodes.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use corella_core::session::{LoadKey, ToSource};
use corella_core::{Arithmetic, Incarnation, KvGroup, PageTable};
use corella_model::KvPages;
use tokio::sync::watch;

use super::block_client::BlockClient;
use super::block_message::{self, BlockMessage};
use super::incoming::{Incoming, LoadFailure, LoadStatus};
use super::load_request::LoadRequest;
use super::path::PathSet;
use super::path_name::PathName;
use super::receiver_config::ReceiverConfig;
use super::receiver_connection::ReceiverConnection;
use super::receiver_state::ReceiverState;
use super::sender_table::SenderTable;
use super::{Hello, PeerAddress, TransferAccount, TransferThreads};

/// Why a load was not begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoadRejection {
    /// `max_loads` loads are running already.
    #[error("too many loads run")]
    Full,
    /// Loads from `max_peers` peers are running already.
    #[error("loads of too many peers run")]
    TooManyPeers,
    /// The table has fewer pages than the rows need, a page does not exist, or the first row is not the first of a
    /// page.
    #[error("the rows and the pages of a load do not fit each other")]
    Rows,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReceiverStats {
    pub num_loads: usize,
    pub num_peers: usize,
    /// The number of frames, since the start, whose loads were over.
    pub num_unknown_frames: u64,
    pub num_corrupt_frames: u64,
}

/// Loads rows from the senders of other nodes. All calls return at once.
pub struct KvReceiver {
    state: Arc<ReceiverState>,
    senders: SenderTable,
    pages: Arc<dyn KvPages>,
    threads: TransferThreads,
}

/// A load, running or over. Dropping the handle cancels the load.
pub struct LoadHandle {
    load: Arc<Incoming>,
    status: watch::Receiver<LoadStatus>,
}

impl KvReceiver {
    pub fn new(config: ReceiverConfig, pages: Arc<dyn KvPages>, threads: &TransferThreads) -> Self {
        let hello = Hello {
            paths: PathSet::of(&config.paths),
            ..Hello::new(
                config.incarnation,
                config.model_fingerprint,
                config.arithmetic,
                pages.geometry(),
            )
        };
        Self {
            senders: SenderTable::new(config.max_peers, config.connections_per_peer),
            state: Arc::new(ReceiverState::new(config, hello)),
            pages,
            threads: threads.clone(),
        }
    }

    /// Connects to a sender before its first load, so that loads need not wait for the connection. Repeated calls are
    /// cheap and restore lost connections.
    pub fn expect_loads(&self, address: &PeerAddress) {
        let Some(peer) = self.senders.get(address) else {
            return;
        };
        for slot in peer.slots() {
            // Loads over the connection run on the same thread.
            let thread = self.threads.get(slot.index());
            let state = self.state.clone();
            thread.spawn(async move { slot.connect_ahead(&state).await });
        }
    }

    /// Sets the client for loads of cached blocks.
    pub fn load_blocks_for(&self, client: Box<dyn BlockClient>) {
        self.state.block_client.set(client).ok();
    }

    /// Returns this node's own arithmetic.
    pub fn arithmetic(&self) -> Arithmetic {
        self.state.config.arithmetic
    }

    /// Connects to a node whose rows have the same bits as this node's. Returns the incarnation in the node's greeting.
    pub async fn incarnation_of(&self, address: &PeerAddress) -> Result<Incarnation, LoadFailure> {
        let Some(peer) = self.senders.get(address) else {
            let reason = LoadRejection::TooManyPeers.to_string();
            return Err(LoadFailure::Unreachable(reason));
        };
        let slot = peer.message_slot();
        let own = self.arithmetic();
        let incarnation_of = move |connection: &ReceiverConnection| {
            connection.check_arithmetic(own)?;
            Ok(connection.hello.incarnation)
        };
        if let Some(connection) = slot.ready_connection() {
            return incarnation_of(&connection).map(Incarnation);
        }
        let state = self.state.clone();
        let thread = self.threads.get(slot.index());
        // The connection lives on its own thread, not on the caller's.
        let connecting = thread.spawn(async move {
            let connection = slot.connection(&state).await?;
            incarnation_of(&connection)
        });
        let incarnation = connecting.await;
        incarnation
            .unwrap_or_else(|error| Err(LoadFailure::Unreachable(error.to_string())))
            .map(Incarnation)
    }

    /// Sends a message to a source of cached blocks. Messages to one node keep their order. If the connection is lost,
    /// so are the messages, and [`BlockClient`] is told. Returns false for a message that cannot be sent.
    pub fn send_blocks(&self, address: &PeerAddress, key: LoadKey, message: ToSource) -> bool {
        let bytes = block_message::encode(key, &BlockMessage::ToSource(message));
        let (Some(bytes), Some(peer)) = (bytes, self.senders.get(address)) else {
            return false;
        };
        let slot = peer.message_slot();
        // The address may belong to another incarnation of the node by now, which would not know the load.
        let is_source =
            move |connection: &ReceiverConnection| connection.hello.incarnation == key.source.0;
        if let Some(connection) = slot.ready_connection() {
            let is_source = is_source(&connection);
            if is_source {
                connection.send_blocks(&bytes);
            }
            return is_source;
        }
        let state = self.state.clone();
        self.threads.get(slot.index()).spawn(async move {
            match slot.connection(&state).await {
                Ok(connection) if is_source(&connection) => connection.send_blocks(&bytes),
                Ok(_) | Err(_) => {
                    if let Some(client) = state.block_client.get() {
                        client.handle_unsent(key);
                    }
                }
            }
        });
        true
    }

    /// Begins to load.
    ///
    /// # Safety
    /// The pages from `first_row` on are reserved for the load: no other code reads or writes them before it is over,
    /// that is, until `LoadHandle::status` shows it or `LoadHandle::cancel` has returned.
    pub unsafe fn load(&self, request: LoadRequest) -> Result<LoadHandle, LoadRejection> {
        let geometry = self.pages.geometry();
        let page_size = geometry.page_size;
        let num_pages = request.num_rows.div_ceil(page_size) as usize;
        let groups = geometry.layers.groups();
        let fits = |(group, table): (&KvGroup, &PageTable)| {
            let first_read = group.first_page_read(request.num_rows, page_size);
            let first = first_read.max(request.first_row / page_size);
            let mut pages = table.pages.iter();
            table.num_gone <= first as usize
                && table.len() >= num_pages
                && pages.all(|page| page.0 < geometry.num_pages)
        };
        if request.first_row > request.num_rows
            || !request.first_row.is_multiple_of(page_size) && request.first_row < request.num_rows
            || request.tables.len() != groups.len()
            || !groups.iter().zip(&request.tables).all(fits)
        {
            return Err(LoadRejection::Rows);
        }
        let mut loads = self.state.loads();
        if loads.len() >= self.state.config.max_loads {
            return Err(LoadRejection::Full);
        }
        let peer = self.senders.get(&request.peer);
        let slot = peer.ok_or(LoadRejection::TooManyPeers)?.choose_slot();
        let load_id = self.state.next_load_id.fetch_add(1, Ordering::Relaxed);
        let load = Incoming::new(load_id, request, self.pages.clone(), &self.state.loads);
        let load = Arc::new(load);
        loads.insert(load_id, load.clone());
        drop(loads);
        let status = load.status();
        let (task, state) = (load.clone(), self.state.clone());
        // The connection runs on the same thread.
        self.threads.get(slot.index()).spawn(async move {
            let deadline = task.request.deadline;
            let mut status = task.status();
            tokio::select! {
                () = slot.run(&task, &state) => {}
                _ = status.wait_for(LoadStatus::is_over) => {}
                () = tokio::time::sleep_until(deadline.into()) => {
                    task.fail(LoadFailure::DeadlinePassed);
                }
            }
        });
        Ok(LoadHandle { load, status })
    }

    pub fn stats(&self) -> ReceiverStats {
        ReceiverStats {
            num_loads: self.state.loads().len(),
            num_peers: self.senders.num_peers(),
            num_unknown_frames: self.state.num_unknown_frames.load(Ordering::Relaxed),
            num_corrupt_frames: self.state.num_corrupt_frames.load(Ordering::Relaxed),
        }
    }

    /// Returns the bytes of pages read from senders' memory by this path since the start.
    pub fn num_bytes_by(&self, path: PathName) -> u64 {
        self.state.num_bytes_by(path)
    }
}

impl Drop for KvReceiver {
    /// Ends all loads, so that nothing writes to their pages.
    fn drop(&mut self) {
        let loads: Vec<_> = self.state.loads().values().cloned().collect();
        for load in loads {
            load.fail(LoadFailure::Cancelled);
        }
        self.state.stopped.send_replace(true);
    }
}

impl LoadHandle {
    pub fn status(&self) -> LoadStatus {
        self.status.borrow().clone()
    }

    /// Returns a receiver of the status, which works even while another task cancels the load.
    pub fn watch(&self) -> watch::Receiver<LoadStatus> {
        self.status.clone()
    }

    /// Waits until the load is over.
    pub async fn wait(&mut self) -> LoadStatus {
        match self.status.wait_for(LoadStatus::is_over).await {
            Ok(status) => status.clone(),
            Err(_) => unreachable!("the load, which tells its status, is owned here"),
        }
    }

    /// Waits until the status has changed.
    pub async fn changed(&mut self) -> LoadStatus {
        // The load owns the sender of its status, so `changed` cannot fail.
        self.status.changed().await.ok();
        self.status.borrow_and_update().clone()
    }

    /// Waits until the load is over, and returns whether all rows have arrived.
    pub async fn wait_done(&self) -> bool {
        let mut status = self.status.clone();
        let over = status.wait_for(LoadStatus::is_over).await;
        over.is_ok_and(|status| matches!(*status, LoadStatus::Done { .. }))
    }

    /// Ends the load. Nothing is written to its pages once this has returned.
    pub fn cancel(&self) {
        self.load.fail(LoadFailure::Cancelled);
    }

    pub fn account(&self) -> TransferAccount {
        self.load.account()
    }
}

impl Drop for LoadHandle {
    fn drop(&mut self) {
        self.cancel();
    }
}
