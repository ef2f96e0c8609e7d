//! A node's sessions whose KV rows other nodes may load.

use std::io;
use std::net::TcpListener;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use corella_core::session::{ExportEnd, SessionKey};
use corella_core::{PageTable, SnapshotId};
use corella_engine::rare_line;
use corella_model::KvPages;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tracing::debug;

use super::block_server::BlockServer;
use super::frame::{Frame, Refusal};
use super::frame_reader::{FrameReader, violation};
use super::listener::{Accepted, Listener};
use super::meeting::propose;
use super::outgoing::{Outgoing, SendStatus};
use super::path::{PathSet, agreed};
use super::row_path::{Link, PathError};
use super::sender_config::SenderConfig;
use super::sender_connection::SenderConnection;
use super::sender_state::{SenderState, lock};
use super::socket::Socket;
use super::{Hello, PeerAddress, TransferAccount, TransferThreads};

/// The limit of the wait for the greeting on a new connection.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);

/// Why a session was not stored. The caller keeps the session's pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExportError {
    /// A load of the session was refused, or the session was given up, failed or deleted before.
    #[error("no node wants the session any more: {0}")]
    TooLate(Refusal),
    /// The session is already exported, or the sender is full.
    #[error("the session is already exported, or too many sessions are exported")]
    Full,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SenderStats {
    pub num_connections: usize,
    pub num_exported: usize,
    pub num_waiting_loads: usize,
    pub num_tombstones: usize,
    /// The number of connections that were refused or ended because of bytes from the peer, since the start.
    pub num_refused_connections: u64,
    pub num_bytes_sent: u64,
}

/// Listens for receivers and sends them their exported rows. All calls return at once.
pub struct KvSender {
    pub(super) state: Arc<SenderState>,
    pages: Arc<dyn KvPages>,
    threads: TransferThreads,
    stop: watch::Sender<bool>,
    /// Tasks that accept connections.
    accepting: Mutex<Vec<AbortHandle>>,
}

impl KvSender {
    /// Starts a sender. Fails with the error of a row path that cannot offer these pages.
    pub fn start(
        config: SenderConfig,
        pages: Arc<dyn KvPages>,
        threads: &TransferThreads,
    ) -> Result<Self, PathError> {
        let mut offers = Vec::new();
        for path in &config.paths {
            let offer = path.offer(&pages);
            let offer =
                offer.map_err(|PathError(why)| PathError(format!("{}: {why}", path.name())))?;
            if let Some(offer) = offer {
                offers.push((path.clone(), offer));
            }
        }
        let hello = Hello {
            paths: PathSet::of(offers.iter().map(|(path, _)| path)),
            ..Hello::new(
                config.incarnation,
                config.model_fingerprint,
                config.arithmetic,
                pages.geometry(),
            )
        };
        let state = Arc::new(SenderState::new(config, hello, offers));
        let (stop, stopped) = watch::channel(false);
        threads.spawn(until_stopped(stopped, watch_deadlines(state.clone())));
        Ok(Self {
            state,
            pages,
            threads: threads.clone(),
            stop,
            accepting: Mutex::default(),
        })
    }

    /// Accepts connections at an address. With port 0, the returned address has the actual port. May be called for
    /// several addresses.
    pub fn listen(&self, address: impl Into<PeerAddress>) -> io::Result<PeerAddress> {
        let address = address.into();
        let thread = self.threads.next();
        let listener = {
            let _guard = thread.enter();
            Listener::bind(&address)?
        };
        self.accept(listener, thread)
    }

    /// Accepts connections from a bound port.
    pub fn listen_on(&self, listener: TcpListener) -> io::Result<PeerAddress> {
        let thread = self.threads.next();
        let listener = {
            let _guard = thread.enter();
            Listener::of(listener)?
        };
        self.accept(listener, thread)
    }

    /// Serves loads of cached blocks from now on. Only the first server counts.
    pub fn serve_blocks(&self, server: Arc<dyn BlockServer>) {
        self.state.blocks.set(server).ok();
    }

    /// Accepts no further connections. Open connections stay.
    pub fn stop_listening(&self) {
        for task in lock(&self.accepting).drain(..) {
            task.abort();
        }
    }

    fn accept(&self, listener: Listener, thread: &Handle) -> io::Result<PeerAddress> {
        let address = listener.address()?;
        let (state, threads) = (self.state.clone(), self.threads.clone());
        let stopped = self.stop.subscribe();
        let task = thread.spawn(until_stopped(stopped.clone(), async move {
            loop {
                match listener.accept().await {
                    Ok(accepted) => state.serve(accepted, threads.next(), stopped.clone()),
                    Err(error) => {
                        // Usually no descriptor is left. Closed connections free some.
                        rare_line!(warn, "cannot accept a KV connection: {error}");
                        tokio::time::sleep(Duration::from_millis(100)).await;
                    }
                }
            }
        }));
        lock(&self.accepting).push(task.abort_handle());
        Ok(address)
    }

    /// Stores a session of `num_rows` rows and serves a waiting load. Returns the session's status.
    /// The session stays until `delete` or `fail`.
    ///
    /// # Safety
    /// Until `delete` or `fail` has returned, a row in an added page must not change in a layer in which it is declared
    /// readable. Once all rows are readable in a layer, the rest of the last page must not change there either.
    pub unsafe fn export(
        &self,
        key: SessionKey,
        num_rows: u32,
    ) -> Result<watch::Receiver<SendStatus>, ExportError> {
        let outgoing = Outgoing::new(key, self.pages.clone(), num_rows);
        self.insert(outgoing)
    }

    /// Stores a session whose rows are complete, in the pages of these tables. A table may begin at its group's window.
    ///
    /// # Safety
    /// Until `delete` or `fail` has returned, the pages must not change.
    pub unsafe fn export_whole(
        &self,
        key: SessionKey,
        num_rows: u32,
        tables: Vec<PageTable>,
    ) -> Result<watch::Receiver<SendStatus>, ExportError> {
        self.insert(Outgoing::whole(key, self.pages.clone(), num_rows, tables))
    }

    fn insert(&self, outgoing: Outgoing) -> Result<watch::Receiver<SendStatus>, ExportError> {
        let outgoing = Arc::new(outgoing);
        let status = outgoing.status();
        let exported = self.state.table().insert(outgoing, Instant::now());
        exported.map_err(|reason| match reason {
            Refusal::Busy => ExportError::Full,
            reason => ExportError::TooLate(reason),
        })?;
        Ok(status)
    }

    /// Adds the next part of the session's table for each KV group. Does nothing for a session that is over.
    pub fn add_pages(&self, key: &SessionKey, parts: &[PageTable]) {
        if let Some(outgoing) = self.state.exported(key) {
            outgoing.add_pages(parts);
        }
    }

    /// Declares the rows from 0 to `num_rows` readable in these layers of added pages.
    pub fn handle_rows_readable(&self, key: &SessionKey, layers: Range<u32>, num_rows: u32) {
        if let Some(outgoing) = self.state.exported(key) {
            outgoing.handle_rows_readable(layers, num_rows);
        }
    }

    /// Declares that the recurrent state after all rows may be read from a snapshot, until `delete` or `fail` has
    /// returned. Must be called before `finish`.
    pub fn set_state(&self, key: &SessionKey, snapshot: SnapshotId) {
        if let Some(outgoing) = self.state.exported(key) {
            outgoing.set_state(snapshot);
        }
    }

    /// Declares the rows valid, because the steps that computed them have returned. Returns false
    /// if some were never declared readable, or if the session is over.
    pub fn finish(&self, key: &SessionKey) -> bool {
        self.state
            .exported(key)
            .is_some_and(|outgoing| outgoing.finish())
    }

    /// Ends a session whose rows will not come. Nothing reads the pages once this has returned.
    pub fn fail(&self, key: &SessionKey) {
        self.end(key, ExportEnd::Failed);
    }

    /// Ends a session, whether it was loaded or not. Nothing reads the pages once this has returned.
    pub fn delete(&self, key: &SessionKey) {
        self.end(key, ExportEnd::Deleted);
    }

    fn end(&self, key: &SessionKey, how: ExportEnd) {
        let outgoing = self.state.table().remove(key, how, Instant::now());
        if let Some(outgoing) = outgoing {
            outgoing.end(how.into());
        }
    }

    /// Returns the account of an exported session's transfer so far.
    pub fn account(&self, key: &SessionKey) -> Option<TransferAccount> {
        self.state.exported(key).map(|outgoing| outgoing.account())
    }

    /// Records that the receiver has reported, on another connection, that it has all rows. The report may arrive
    /// before the receiver's frame here. Returns the account of the transfer.
    pub fn handle_loaded(&self, key: &SessionKey) -> Option<TransferAccount> {
        let outgoing = self.state.exported(key)?;
        Some(outgoing.handle_loaded(Instant::now()))
    }

    /// Returns the measured bandwidth at which this incarnation of a decode node takes rows, up to this node's limit. A
    /// burst may be faster than the limit, and says nothing about a whole prompt.
    pub fn bandwidth_bytes_per_s(&self, decode_incarnation: u64) -> Option<f64> {
        let meter = self.state.meters().get(&decode_incarnation)?.clone();
        let measured = lock(&meter).bytes_per_s()?;
        let limit = self.state.config.max_bandwidth;
        Some(limit.map_or(measured, |limit| measured.min(limit as f64)))
    }

    pub fn stats(&self) -> SenderStats {
        let state = &self.state;
        let num_free = state.connections.available_permits();
        let exported = state.table().stats(Instant::now());
        SenderStats {
            num_connections: state.config.max_connections - num_free,
            num_exported: exported.num_exports,
            num_waiting_loads: exported.num_waiting_loads,
            num_tombstones: exported.num_tombstones,
            num_refused_connections: state.num_refused_connections.load(Ordering::Relaxed),
            num_bytes_sent: state.num_bytes_sent.load(Ordering::Relaxed),
        }
    }
}

impl Drop for KvSender {
    /// Ends all sessions, so that their pages are not read any more.
    fn drop(&mut self) {
        let sessions = self.state.table().clear();
        for outgoing in sessions {
            outgoing.end(Refusal::Gone);
        }
        self.stop.send_replace(true);
    }
}

impl SenderState {
    fn serve(
        self: &Arc<Self>,
        accepted: Accepted,
        thread: &Handle,
        stopped: watch::Receiver<bool>,
    ) {
        let Ok(permit) = self.connections.clone().try_acquire_owned() else {
            self.num_refused_connections.fetch_add(1, Ordering::Relaxed);
            return;
        };
        let state = self.clone();
        thread.spawn(until_stopped(stopped, async move {
            let _permit = permit;
            let Ok((socket, peer)) = accepted.attach() else {
                // The peer has closed the connection already.
                return;
            };
            match state.serve_connection(socket).await {
                Ok(()) => debug!("KV connection from {peer} has ended"),
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                    state
                        .num_refused_connections
                        .fetch_add(1, Ordering::Relaxed);
                    rare_line!(info, "closed the KV connection from {peer}: {error}");
                }
                Err(error) => debug!("KV connection from {peer} is lost: {error}"),
            }
        }));
    }

    async fn serve_connection(self: &Arc<Self>, socket: Socket) -> io::Result<()> {
        let socket = socket.secured(self.config.tls.as_ref()).await?;
        let mut reader = FrameReader::new();
        let frame = tokio::time::timeout(HELLO_TIMEOUT, reader.next(&socket));
        let Frame::Hello(hello) = frame.await.map_err(|_| io::ErrorKind::TimedOut)?? else {
            return Err(violation("no greeting"));
        };
        // Incompatible peers also get the greeting, so that they learn the reason.
        socket
            .write_all(&Frame::Hello(self.hello.clone()).encode())
            .await?;
        let form = self
            .hello
            .page_form(&hello)
            .map_err(|reason| io::Error::new(io::ErrorKind::InvalidData, reason.to_string()))?;
        let is_local = socket.is_local();
        let paths = self.offers.iter().map(|(path, _)| path);
        let path = agreed(paths, hello.paths, Link { is_local, form });
        let sends_regions = match path.and_then(|path| self.offer(path.name())) {
            Some((path, offer)) => propose(&socket, &mut reader, &**path, offer).await?,
            None => false,
        };
        let connection = SenderConnection::new(
            self.new_queue(hello.incarnation),
            socket,
            form,
            sends_regions,
            hello.incarnation,
        );
        Arc::new(connection).run(self, reader).await
    }
}

async fn watch_deadlines(state: Arc<SenderState>) {
    loop {
        let next = state.table().expire(Instant::now());
        let changed = state.deadlines_changed.notified();
        match next {
            Some(next) => {
                tokio::time::timeout_at(next.into(), changed).await.ok();
            }
            None => changed.await,
        }
    }
}

async fn until_stopped(mut stopped: watch::Receiver<bool>, task: impl Future<Output = ()>) {
    tokio::select! {
        () = task => {}
        // The wait also ends when the sender is dropped.
        _ = stopped.wait_for(|&is_stopped| is_stopped) => {}
    }
}
