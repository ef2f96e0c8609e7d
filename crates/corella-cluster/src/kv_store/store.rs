//! The state that the reader, the writer and callers share.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use corella_core::session::FetchPace;
use corella_core::{PageHash, PageId};
use corella_engine::{BlockExchange, Engine};
use corella_model::{KvGeometry, KvPages, PageForm};
use tokio::sync::watch;

use super::client::{CallError, Client};
use super::known_chunks::KnownChunks;
use super::link::{Link, Tenant};
use super::writer;
use crate::transport::checksum::Checksum;

/// The time between two checks of the server.
const CHECK_AFTER: Duration = Duration::from_secs(5);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvStoreConfig {
    /// The server's gRPC port on this host.
    pub port: u16,
    /// The server's HTTP port, which tells its version.
    pub status_port: u16,
    /// A digest of the model and of the arithmetic that computes its rows.
    pub identity: u128,
    /// The time between two checks of the server.
    pub check_after: Duration,
}

impl KvStoreConfig {
    pub fn new(port: u16, status_port: u16, identity: u128) -> Self {
        Self {
            port,
            status_port,
            identity,
            check_after: CHECK_AFTER,
        }
    }
}

/// The reason why a model or a server cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KvStoreError {
    #[error("{0}")]
    Unsuitable(String),
    #[error("starting a thread: {0}")]
    Thread(#[from] std::io::Error),
}

pub struct KvStore {
    pub(super) engine: Engine,
    pub(super) exchange: BlockExchange,
    pub(super) pages: Arc<dyn KvPages>,
    tenant: Arc<Tenant>,
    /// `None` while the server does not answer.
    link: watch::Sender<Option<Arc<Link>>>,
    /// Whether the log's last line about the server says that it is not used.
    is_said_off: AtomicBool,
    pace: Mutex<FetchPace>,
    known: Mutex<KnownChunks>,
    num_sessions: AtomicU64,
    pub(super) counts: Counts,
}

#[derive(Default)]
pub(super) struct Counts {
    pub num_stored: AtomicU64,
    pub bytes_written: AtomicU64,
    pub num_dropped: AtomicU64,
    pub num_hits: AtomicU64,
    pub bytes_read: AtomicU64,
    pub num_damaged: AtomicU64,
    pub num_errors: AtomicU64,
}

/// The present state, and counts since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvStoreStats {
    pub is_on: bool,
    /// Chunks that were copied to the server.
    pub num_stored: u64,
    pub bytes_written: u64,
    /// Copies that were begun and given up.
    pub num_dropped: u64,
    /// Blocks that were fetched for requests.
    pub num_hits: u64,
    pub bytes_read: u64,
    /// Chunks that proved torn or foreign when they were read.
    pub num_damaged: u64,
    pub num_errors: u64,
}

impl KvStore {
    /// Registers at the server, and begins to copy blocks to it. A server that does not answer is asked again later. Must
    /// be called within a tokio runtime.
    pub async fn start(engine: &Engine, config: KvStoreConfig) -> Result<Arc<Self>, KvStoreError> {
        let pages = engine.kv_pages().clone();
        check_model(&*pages)?;
        let store = Arc::new(Self {
            exchange: engine.block_exchange(),
            engine: engine.clone(),
            tenant: Arc::new(tenant(&config, pages.geometry())),
            pages,
            link: watch::Sender::new(None),
            is_said_off: AtomicBool::new(false),
            pace: Mutex::default(),
            known: Mutex::default(),
            num_sessions: AtomicU64::new(0),
            counts: Counts::default(),
        });
        match Link::open(&store.tenant).await {
            Ok(link) => store.set_link(link),
            Err(CallError::Unsuitable(why)) => return Err(KvStoreError::Unsuitable(why)),
            Err(error) => store.lose(&error),
        }
        writer::start(&store, engine.subscribe_copy_offers())?;
        tokio::spawn(keep_linked(Arc::downgrade(&store), config.check_after));
        Ok(store)
    }

    pub fn stats(&self) -> KvStoreStats {
        let get = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let counts = &self.counts;
        KvStoreStats {
            is_on: self.link.borrow().is_some(),
            num_stored: get(&counts.num_stored),
            bytes_written: get(&counts.bytes_written),
            num_dropped: get(&counts.num_dropped),
            num_hits: get(&counts.num_hits),
            bytes_read: get(&counts.bytes_read),
            num_damaged: get(&counts.num_damaged),
            num_errors: get(&counts.num_errors),
        }
    }

    pub(super) fn link(&self) -> Option<Arc<Link>> {
        self.link.borrow().clone()
    }

    pub(super) fn watch_link(&self) -> watch::Receiver<Option<Arc<Link>>> {
        self.link.subscribe()
    }

    /// Renews the registration, or registers again.
    async fn check(&self) {
        match Link::open(&self.tenant).await {
            Ok(link) => self.set_link(link),
            Err(error) => self.lose(&error),
        }
    }

    fn set_link(&self, link: Link) {
        let is_same = self.link().is_some_and(|now| now.is_same(&link));
        if is_same {
            return;
        }
        // A server that has restarted may have lost chunks.
        self.known().clear();
        let num_tokens = link.shape.num_tokens;
        self.link.send_replace(Some(Arc::new(link)));
        if self.is_said_off.swap(false, Ordering::Relaxed) {
            tracing::info!("LMCache's server answers again: --kv-store is on");
        } else {
            tracing::info!(num_tokens, "LMCache's server keeps chunks of this size");
        }
    }

    /// Ends the use of a link that has failed, until a check has registered again.
    pub(super) fn lose_link(&self, link: &Arc<Link>, error: &CallError) {
        if self.link().is_some_and(|now| Arc::ptr_eq(&now, link)) {
            self.lose(error);
        }
    }

    fn lose(&self, error: &CallError) {
        self.counts.num_errors.fetch_add(1, Ordering::Relaxed);
        self.link.send_replace(None);
        if !self.is_said_off.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "{error}; --kv-store is off until LMCache's server can be used, and prompts are computed as without it"
            );
        }
    }

    /// A name for one use of the server, which it needs to keep its locks apart.
    pub(super) fn new_session(&self) -> String {
        let number = self.num_sessions.fetch_add(1, Ordering::Relaxed);
        format!("corella-{:x}-{number}", self.tenant.instance)
    }

    pub(super) fn pace(&self) -> MutexGuard<'_, FetchPace> {
        self.pace.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn known(&self) -> MutexGuard<'_, KnownChunks> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records which of a sequence's chunks the server has: the first `num_found` ones.
    pub(super) fn note_found(&self, names: impl Iterator<Item = PageHash>, num_found: u32) {
        let mut known = self.known();
        for (at, name) in names.enumerate() {
            match at < num_found as usize {
                true => known.insert(name),
                false => known.remove(name),
            }
        }
    }

    /// Copies pages, one after the other, each with its layers in order.
    ///
    /// # Safety
    /// The scheduler holds the pages: they belong to published blocks, and nothing writes to them.
    pub(super) unsafe fn copy_pages(&self, pages: &[PageId], out: &mut [u8]) {
        let geometry = self.pages.geometry();
        let parts = out.chunks_mut(geometry.page_bytes());
        for (&page, part) in pages.iter().zip(parts) {
            let layers = part.chunks_mut(geometry.layer_bytes());
            for (layer, out) in (0..).zip(layers) {
                // SAFETY: by the caller's contract.
                unsafe { self.pages.read(layer, &[page], PageForm::Native, out) };
            }
        }
    }

    /// Fills a page with rows.
    ///
    /// # Safety
    /// The scheduler has reserved the page for this write, and keeps it from all others meanwhile.
    pub(super) unsafe fn fill_page(&self, page: PageId, rows: &[u8]) {
        let layers = rows.chunks(self.pages.geometry().layer_bytes());
        for (layer, rows) in (0..).zip(layers) {
            // SAFETY: by the caller's contract.
            unsafe { self.pages.write(layer, &[page], PageForm::Native, rows) };
        }
    }
}

async fn keep_linked(store: Weak<KvStore>, check_after: Duration) {
    loop {
        tokio::time::sleep(check_after).await;
        let Some(store) = store.upgrade() else {
            return;
        };
        store.check().await;
    }
}

/// Refuses models whose blocks are more than one page of rows.
fn check_model(pages: &dyn KvPages) -> Result<(), KvStoreError> {
    let groups = pages.geometry().layers.groups();
    let is_plain = groups.len() == 1 && groups.iter().all(|group| group.window.is_none());
    match is_plain && pages.states().is_none() {
        true => Ok(()),
        false => Err(KvStoreError::Unsuitable(
            "models with sliding windows or recurrent layers are not kept yet: use --kv-disk"
                .to_owned(),
        )),
    }
}

fn tenant(config: &KvStoreConfig, geometry: &KvGeometry) -> Tenant {
    // The digest covers everything that decides the meaning of a page's bytes, and not the number of pages in memory.
    let layout = KvGeometry {
        num_pages: 0,
        ..geometry.clone()
    };
    let mut digest = Checksum::new();
    digest.update(format!("{layout:?}").as_bytes());
    Tenant {
        client: Client::new(config.port, config.status_port),
        instance: new_instance(),
        name: format!("corella-{:032x}{:016x}", config.identity, digest.value()),
        page_size: geometry.page_size,
        page_bytes: geometry.page_bytes(),
    }
}

/// Microseconds since 1970, with a part of the process's number in the last digits.
fn new_instance() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now_us = now.unwrap_or_default().as_micros() as u64;
    let process = u64::from(std::process::id()) & 0xfff;
    ((now_us << 12 | process) & i64::MAX as u64) as i64
}
