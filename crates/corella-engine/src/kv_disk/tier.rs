//! The part of the disk tier that the engine's loop, the disk's threads and callers share.

use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use corella_core::{BlockList, KvEvent, KvGroup, Metric, Namespace, SchedulerConfig};
use corella_model::{KvGeometry, KvPages, StateRecords};
use crossbeam_channel::Sender;
use sha2::{Digest, Sha256};
use xxhash_rust::xxh3::xxh3_128;

use super::file_layer::FileLayer;
use super::folder::KvFile;
use super::label::KvDiskLabel;
use super::page_list::{DiskPath, checked_blocks};
use super::page_store::{PageStore, StateParts};
use super::slot::{SlotNamespace, SlotShape};

/// The location and the limits of blocks on a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvDiskConfig {
    pub folder: PathBuf,
    /// The size of all files in the folder.
    pub max_bytes: u64,
    pub label: KvDiskLabel,
    /// A digest of the model and of the arithmetic that computes its rows.
    pub identity: u128,
    /// Whether prompts with a salt are kept, too.
    pub keeps_salted: bool,
}

/// The pages on the disk, or in a test's file.
pub(super) type Store = PageStore<Box<dyn FileLayer>>;

pub(crate) struct Tier {
    folder: PathBuf,
    max_bytes: u64,
    label: KvDiskLabel,
    keeps_salted: bool,
    /// The fingerprints of the served adapters, by name.
    adapters: Mutex<HashMap<Arc<str>, u128>>,
    shape: SlotShape,
    groups: Vec<KvGroup>,
    pages: Arc<dyn KvPages>,
    store: OnceLock<Store>,
    is_scanned: AtomicBool,
    is_off: AtomicBool,
    /// Set when a thread of the tier has panicked.
    is_dead: AtomicBool,
    /// Set when pages had to be erased while the file could not be changed. All pages are erased before the file is
    /// used again.
    must_erase: AtomicBool,
    /// Locked while pages are erased, and while the tier is switched on again, so that no erasure is missed.
    erasing: Mutex<()>,
    is_stopping: AtomicBool,
    /// Set when the first attempt to open the file has ended.
    opened: OnceLock<()>,
    /// Wakes the subscriber to KV events.
    bell: OnceLock<Sender<()>>,
    pub(super) counts: Counts,
}

#[derive(Default)]
pub(super) struct Counts {
    pub num_stored: AtomicU64,
    pub num_dropped: AtomicU64,
    pub bytes_written: AtomicU64,
    pub num_read: AtomicU64,
    pub bytes_read: AtomicU64,
    pub num_damaged: AtomicU64,
    pub num_errors: AtomicU64,
}

/// The present state of the disk tier, and its counts since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvDiskStats {
    /// Whether the file has been opened and no error has switched the tier off.
    pub is_on: bool,
    pub num_pages: usize,
    /// The number of pages for which the file has room.
    pub max_pages: u32,
    pub num_stored: u64,
    /// Copies that were begun and given up.
    pub num_dropped: u64,
    pub bytes_written: u64,
    /// Pages that were read for requests.
    pub num_read: u64,
    pub bytes_read: u64,
    /// Pages of the file that proved torn or damaged when they were read.
    pub num_damaged: u64,
    pub num_errors: u64,
}

type Row = Metric<KvDiskStats>;

impl KvDiskStats {
    pub const METRICS: &[Metric<Self>] = &[
        Row::gauge("kv_disk_on", |disk| disk.is_on.into()).help(
            "1 while blocks are kept on the disk, 0 before the file is open and after an error",
        ),
        Row::gauge("kv_disk_blocks", |disk| disk.num_pages as u64).help("KV blocks on the disk"),
        Row::gauge("kv_disk_max_blocks", |disk| disk.max_pages.into())
            .help("KV blocks for which the file on the disk has room"),
        Row::counter("kv_disk_blocks_stored", |disk| disk.num_stored)
            .help("KV blocks that were written to the disk"),
        Row::counter("kv_disk_copies_dropped", |disk| disk.num_dropped).help(
            "Copies to the disk that were given up: requests needed the pages, or the disk failed",
        ),
        Row::counter("kv_disk_hits", |disk| disk.num_read)
            .help("KV blocks that were read from the disk for requests"),
        Row::counter("kv_disk_written_bytes", |disk| disk.bytes_written)
            .help("Bytes that were written to the disk"),
        Row::counter("kv_disk_read_bytes", |disk| disk.bytes_read)
            .help("Bytes of blocks that were read from the disk"),
        Row::counter("kv_disk_damaged_blocks", |disk| disk.num_damaged)
            .help("KV blocks on the disk that proved torn or damaged"),
        Row::counter("kv_disk_errors", |disk| disk.num_errors).help("Errors of the disk"),
    ];
}

impl Tier {
    pub(super) fn new(config: &KvDiskConfig, pages: Arc<dyn KvPages>) -> Self {
        // The digest covers everything that decides the meaning of a page's bytes, and not the number of pages in
        // memory.
        let geometry = KvGeometry {
            num_pages: 0,
            ..pages.geometry().clone()
        };
        let layout = format!("{:032x} {geometry:?}", config.identity);
        Self {
            folder: config.folder.clone(),
            max_bytes: config.max_bytes,
            label: config.label.clone(),
            keeps_salted: config.keeps_salted,
            adapters: Mutex::default(),
            shape: SlotShape {
                layout: xxh3_128(layout.as_bytes()),
                page_size: geometry.page_size,
                row_bytes: geometry.page_bytes(),
            },
            groups: geometry.layers.groups().to_vec(),
            pages,
            store: OnceLock::new(),
            is_scanned: AtomicBool::new(false),
            is_off: AtomicBool::new(false),
            is_dead: AtomicBool::new(false),
            must_erase: AtomicBool::new(false),
            erasing: Mutex::default(),
            is_stopping: AtomicBool::new(false),
            opened: OnceLock::new(),
            bell: OnceLock::new(),
            counts: Counts::default(),
        }
    }

    /// Opens the file, and finds the blocks in it.
    pub(super) fn open(&self) {
        match self.try_open() {
            Ok(()) => {
                self.is_scanned.store(true, Ordering::Release);
                self.ring();
            }
            Err(error) => self.switch_off("opening its file", &error),
        }
        let _ = self.opened.set(());
    }

    pub(crate) fn wait_opened(&self) {
        self.opened.wait();
    }

    /// Tries the disk again after an error. Returns whether it works.
    pub(super) fn try_again(&self) -> bool {
        if !self.is_off.load(Ordering::Relaxed) || self.is_dead.load(Ordering::Relaxed) {
            return false;
        }
        let tried = match self.store.get() {
            Some(store) if self.is_scanned.load(Ordering::Relaxed) => store
                .try_to_write()
                .and_then(|()| self.erase_if_asked(store)),
            _ => self.try_open(),
        };
        if let Err(error) = tried.and_then(|()| self.switch_on()) {
            tracing::debug!(%error, "--kv-disk stays off");
            return false;
        }
        self.ring();
        tracing::info!(folder = %self.folder.display(), "the disk works again: --kv-disk is on");
        true
    }

    /// Switches the tier on. Pages that had to be erased meanwhile are erased first.
    fn switch_on(&self) -> io::Result<()> {
        let _erasing = self.lock_erasing();
        if let Some(store) = self.store.get() {
            self.erase_now_if_asked(store)?;
        }
        self.is_scanned.store(true, Ordering::Release);
        self.is_off.store(false, Ordering::Relaxed);
        Ok(())
    }

    fn try_open(&self) -> io::Result<()> {
        if let Some(store) = self.store.get() {
            self.erase_if_asked(store)?;
            return store.scan(&self.is_stopping);
        }
        let file = KvFile::open(&self.folder, self.shape.layout, self.max_bytes)?;
        let store = self.new_store(Box::new(file));
        let slot_bytes = self.shape.slot_bytes();
        if store.num_slots() == 0 {
            let reason = format!("a page takes {slot_bytes} bytes: give it a larger SIZE");
            return Err(io::Error::other(reason));
        }
        store.prepare()?;
        if store.num_reserved() == 0 {
            return Err(io::Error::other(
                "the files of other processes in this folder leave no room in SIZE for this model's file",
            ));
        }
        let store = self.store.get_or_init(|| store);
        self.erase_if_asked(store)?;
        store.scan(&self.is_stopping)?;
        tracing::info!(
            folder = %self.folder.display(),
            num_pages = store.num_pages(),
            max_pages = store.max_pages(),
            "the disk has KV pages"
        );
        Ok(())
    }

    fn new_store(&self, file: Box<dyn FileLayer>) -> Store {
        let (groups, max_bytes) = (self.groups.clone(), self.max_bytes);
        let num_state_parts = self.num_state_parts();
        PageStore::new(
            file,
            self.shape,
            groups,
            num_state_parts,
            &self.label,
            max_bytes,
        )
    }

    fn num_state_parts(&self) -> StateParts {
        self.pages.states()?;
        let (pages, shape) = (self.pages.clone(), self.shape);
        Some(Box::new(move |num_blocks| {
            let num_bytes =
                |states: &dyn StateRecords| states.total_bytes(num_blocks * shape.page_size);
            let num_bytes = pages.states().map_or(0, num_bytes);
            num_bytes.div_ceil(shape.row_bytes) as u32
        }))
    }

    /// Takes a test's file in place of the one in the folder.
    #[cfg(test)]
    pub(super) fn use_file(&self, file: Box<dyn FileLayer>) -> &Store {
        let store = self.store.get_or_init(|| self.new_store(file));
        store.prepare().ok();
        store
    }

    /// `None` before the file is open, and after an error.
    pub(super) fn store(&self) -> Option<&Store> {
        let store = self.store.get();
        let is_off = self.is_off.load(Ordering::Relaxed) || self.is_dead.load(Ordering::Relaxed);
        store.filter(|_| !is_off)
    }

    /// `None` also while the file is scanned.
    pub(super) fn store_to_write(&self) -> Option<&Store> {
        let store = self.store();
        store.filter(|_| self.is_scanned.load(Ordering::Acquire))
    }

    /// The number of blocks of a list, from the first on, that a request can take from memory and disk, if memory has
    /// the first `num_here` blocks.
    pub(crate) fn num_usable(
        &self,
        list: &BlockList,
        num_here: u32,
        limits: &SchedulerConfig,
    ) -> u32 {
        let namespace = self.slot_namespace(&list.namespace);
        let (Some(store), Some(namespace)) = (self.store(), namespace) else {
            return 0;
        };
        let (hasher, page_size) = (&limits.block_hasher, limits.page_size);
        let list = checked_blocks(list, hasher, page_size);
        let path = DiskPath::new(list, namespace, hasher, page_size);
        store.num_usable(&path.hashes, num_here)
    }

    pub(super) fn switch_off(&self, what: &str, error: &io::Error) {
        self.counts.num_errors.fetch_add(1, Ordering::Relaxed);
        if !self.is_off.swap(true, Ordering::Relaxed) {
            self.ring();
            tracing::warn!(
                folder = %self.folder.display(),
                "{what} has failed: {error}; --kv-disk is off until the disk works again, and prompts are computed as \
                 without it"
            );
        }
    }

    /// Switches the tier off until the next start, because one of its threads has panicked.
    pub(super) fn give_up(&self) {
        self.counts.num_errors.fetch_add(1, Ordering::Relaxed);
        self.is_off.store(true, Ordering::Relaxed);
        if !self.is_dead.swap(true, Ordering::Relaxed) {
            tracing::error!(
                folder = %self.folder.display(),
                "a thread of the disk has panicked, which is a defect of Corella; --kv-disk is off until the next \
                 start, and prompts are computed as without it"
            );
        }
        // The thread may have opened the file when it panicked, and callers may wait for that.
        let _ = self.opened.set(());
        self.ring();
    }

    /// Ends a scan under way, and the subscription to KV events.
    pub(super) fn stop(&self) {
        self.is_stopping.store(true, Ordering::Relaxed);
        // The loop no longer hears of a thread that panics while it opens the file.
        let _ = self.opened.set(());
        self.ring();
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.is_stopping.load(Ordering::Relaxed)
    }

    /// Whether a request can continue after each block that the file has with all blocks before it. Only such blocks
    /// make KV events.
    pub(super) fn has_plain_blocks(&self) -> bool {
        let is_whole = |group: &KvGroup| group.window.is_none();
        self.groups.len() == 1 && self.groups.iter().all(is_whole) && self.pages.states().is_none()
    }

    /// Returns false if there is a bell already.
    pub(super) fn set_bell(&self, bell: Sender<()>) -> bool {
        self.bell.set(bell).is_ok()
    }

    fn ring(&self) {
        if let Some(bell) = self.bell.get() {
            // A full channel wakes the subscriber as well.
            let _ = bell.try_send(());
        }
    }

    /// Begins to watch the file's blocks for the subscriber. Returns false before the file is open.
    pub(super) fn watch_pages(&self) -> bool {
        let (Some(bell), Some(store)) = (self.bell.get(), self.store_to_write()) else {
            return false;
        };
        store.watch(bell.clone());
        true
    }

    /// The next KV event of the file's blocks.
    pub(super) fn next_event(&self, salt: u64) -> Option<KvEvent> {
        if let Some(store) = self.store_to_write() {
            match store.next_event(salt) {
                Ok(event) => return event,
                Err(error) => self.switch_off("reading a page", &error),
            }
        }
        self.store.get()?.next_retraction()
    }

    /// The namespace of blocks in the file. `None` if they are not kept.
    pub(super) fn slot_namespace(&self, namespace: &Namespace) -> Option<SlotNamespace> {
        let is_kept = namespace.cache_salt.is_none() || self.keeps_salted;
        if !is_kept || namespace.arithmetic.is_some() {
            return None;
        }
        let adapter = match &namespace.lora {
            Some(name) => *self.adapters().get(name)?,
            None => 0,
        };
        let salt = namespace.cache_salt.as_ref();
        Some(SlotNamespace {
            adapter,
            salt: salt.map_or(0, |salt| self.salt_digest(salt)),
        })
    }

    /// The first half of a digest that does not lead back to the salt.
    fn salt_digest(&self, salt: &str) -> u128 {
        let digest = Sha256::new().chain_update(self.shape.layout.to_le_bytes());
        let digest = digest.chain_update(salt).finalize();
        let first = digest.iter().take(size_of::<u128>());
        first.fold(0, |sum, &byte| sum << 8 | u128::from(byte))
    }

    /// Begins to keep the blocks of an adapter.
    pub(crate) fn add_adapter(&self, name: Arc<str>, fingerprint: u128) {
        self.adapters().insert(name, fingerprint);
    }

    /// Erases the blocks of an adapter, unless another adapter has the same content.
    pub(crate) fn remove_adapter(&self, name: &str) {
        let mut adapters = self.adapters();
        let Some(fingerprint) = adapters.remove(name) else {
            return;
        };
        let is_left = adapters.values().any(|&other| other == fingerprint);
        drop(adapters);
        if !is_left {
            self.erase_by("erasing blocks of an adapter", |store| {
                store.erase_adapter(fingerprint)
            });
        }
    }

    fn adapters(&self) -> MutexGuard<'_, HashMap<Arc<str>, u128>> {
        self.adapters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn erase(&self) {
        self.erase_by("erasing its file", PageStore::erase);
    }

    /// Erases pages now. If the file cannot be changed now, all pages are erased before the file is used again.
    fn erase_by(&self, what: &str, erase: impl FnOnce(&Store) -> io::Result<()>) {
        let _erasing = self.lock_erasing();
        let must_erase = self.must_erase.swap(true, Ordering::SeqCst);
        let Some(store) = self.store() else {
            return;
        };
        match erase(store) {
            Ok(()) => self.must_erase.store(must_erase, Ordering::SeqCst),
            Err(error) => self.switch_off(what, &error),
        }
    }

    fn erase_if_asked(&self, store: &Store) -> io::Result<()> {
        let _erasing = self.lock_erasing();
        self.erase_now_if_asked(store)
    }

    fn lock_erasing(&self) -> MutexGuard<'_, ()> {
        self.erasing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The caller has locked `erasing`.
    fn erase_now_if_asked(&self, store: &Store) -> io::Result<()> {
        if self.must_erase.load(Ordering::SeqCst) {
            store.erase()?;
            self.must_erase.store(false, Ordering::SeqCst);
        }
        Ok(())
    }

    pub(crate) fn stats(&self) -> KvDiskStats {
        let count = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let counts = &self.counts;
        let store = self.store();
        KvDiskStats {
            is_on: store.is_some(),
            num_pages: store.map_or(0, PageStore::num_pages),
            max_pages: store.map_or(0, PageStore::max_pages),
            num_stored: count(&counts.num_stored),
            num_dropped: count(&counts.num_dropped),
            bytes_written: count(&counts.bytes_written),
            num_read: count(&counts.num_read),
            bytes_read: count(&counts.bytes_read),
            num_damaged: count(&counts.num_damaged),
            num_errors: count(&counts.num_errors),
        }
    }
}

#[cfg(test)]
mod tests;
