//! A sender and a receiver of KV rows in this process, over a real socket.

use std::future::poll_fn;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::{Duration, Instant};

use corella_cluster::transport::{
    KvReceiver, KvSender, LoadRequest, LoadStatus, PathKind, PathName, PeerAddress, ReceiverConfig,
    SenderConfig, TransferThreads,
};
use corella_core::session::SessionKey;
use corella_core::{Arithmetic, Incarnation, PageTable, SessionId};
use tokio::runtime::{Builder, Runtime};

use super::TransferBenchOptions;
use super::layout::{Layout, PAGE_SIZE, Table};

const PREFILL: u64 = 1;
const DECODE: u64 = 2;
const MODEL: u128 = 3;
const ARITHMETIC: Arithmetic = Arithmetic(4);
/// A session that takes longer has failed.
const DEADLINE: Duration = Duration::from_secs(60);

pub struct Pair {
    sender: KvSender,
    receiver: KvReceiver,
    address: PeerAddress,
    runtime: Runtime,
    next_session: AtomicU64,
}

impl Pair {
    pub fn over_tcp(layout: &Layout, options: &TransferBenchOptions) -> io::Result<Self> {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        Self::new(layout, options, address, None)
    }

    pub fn by_path(
        layout: &Layout,
        options: &TransferBenchOptions,
        kind: &PathKind,
    ) -> io::Result<Self> {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        Self::new(layout, options, address, Some(kind))
    }

    pub fn inside_host(layout: &Layout, options: &TransferBenchOptions) -> io::Result<Self> {
        // The listener of an earlier pair may still be closing.
        static NUM_PAIRS: AtomicU64 = AtomicU64::new(0);
        let (process, pair) = (
            std::process::id(),
            NUM_PAIRS.fetch_add(1, Ordering::Relaxed),
        );
        let name = format!("corella-bench-transfer-{process}-{pair}");
        Self::new(layout, options, PeerAddress::Unix(name), None)
    }

    fn new(
        layout: &Layout,
        options: &TransferBenchOptions,
        address: impl Into<PeerAddress>,
        kind: Option<&PathKind>,
    ) -> io::Result<Self> {
        let threads = |_| TransferThreads::start(options.num_connections);
        let [sending, receiving] = [threads(0)?, threads(1)?];
        let path = |incarnation| {
            let path = kind.map(|kind| (kind.start)(incarnation));
            path.transpose().map_err(io::Error::other)
        };
        let mut config = SenderConfig::new(PREFILL, MODEL, ARITHMETIC);
        config.chunk_bytes = options.chunk_bytes;
        config.paths.extend(path(PREFILL)?);
        let sender = KvSender::start(config, layout.from.clone(), &sending);
        let sender = sender.map_err(io::Error::other)?;
        let address = sender.listen(address)?;
        let mut config = ReceiverConfig::new(DECODE, MODEL, ARITHMETIC);
        config.connections_per_peer = options.num_connections;
        config.paths.extend(path(DECODE)?);
        let receiver = KvReceiver::new(config, layout.to.clone(), &receiving);
        Ok(Self {
            sender,
            receiver,
            address,
            runtime: Builder::new_current_thread().enable_all().build()?,
            next_session: AtomicU64::new(0),
        })
    }

    pub fn has_read_by_nixl(&self) -> bool {
        self.receiver.num_bytes_by(PathName::new("NIXL")) > 0
    }

    /// Transfers all messages, each in its own session. Each table has one session at a time.
    pub fn copy(&self, layout: &Layout) -> io::Result<()> {
        let num_rounds = layout.num_messages / layout.tables.len();
        let rounds = |table| async move {
            for _ in 0..num_rounds {
                self.copy_message(table).await?;
            }
            Ok(())
        };
        let mut running: Vec<_> = layout
            .tables
            .iter()
            .map(|table| Box::pin(rounds(table)))
            .collect();
        // There are few loads, so all of them are polled when any is woken.
        self.runtime.block_on(poll_fn(|context| {
            let mut result = Ok(());
            running.retain_mut(|session| match session.as_mut().poll(context) {
                Poll::Pending => true,
                Poll::Ready(end) => {
                    result = std::mem::replace(&mut result, Ok(())).and(end);
                    false
                }
            });
            match (&result, running.is_empty()) {
                (Ok(()), false) => Poll::Pending,
                _ => Poll::Ready(result),
            }
        }))
    }

    async fn copy_message(&self, table: &Table) -> io::Result<()> {
        let key = SessionKey {
            session: SessionId(self.next_session.fetch_add(1, Ordering::Relaxed).into()),
            attempt: 0,
            prefill_incarnation: Incarnation(PREFILL),
            decode_incarnation: Incarnation(DECODE),
        };
        let num_rows = table.from.len() as u32 * PAGE_SIZE;
        // SAFETY: the pages of the sending side are not written to.
        unsafe { self.sender.export(key, num_rows) }.map_err(io::Error::other)?;
        self.sender
            .add_pages(&key, &[PageTable::whole(table.from.clone())]);
        self.sender.handle_rows_readable(&key, 0..1, num_rows);
        self.sender.finish(&key);
        let request = LoadRequest {
            key,
            peer: self.address.clone(),
            arithmetic: ARITHMETIC,
            first_row: 0,
            num_rows,
            tables: vec![PageTable::whole(table.to.clone())],
            state: None,
            deadline: Instant::now() + DEADLINE,
        };
        // SAFETY: a table's pages are in no other table, and its sessions follow each other.
        let mut load = unsafe { self.receiver.load(request) }.map_err(io::Error::other)?;
        let status = load.wait().await;
        self.sender.delete(&key);
        match status {
            LoadStatus::Done { .. } => Ok(()),
            LoadStatus::Failed(failure) => Err(io::Error::other(failure.to_string())),
            status => Err(io::Error::other(format!("{status:?}"))),
        }
    }
}
