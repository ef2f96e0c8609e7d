//! The part of the disk tier that the engine's loop, the disk's threads and callers share.

use std::collections::HashMap;
use std::io;
use std::mem;
use std::path::{self, Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use corella_core::{BlockList, FetchMedium, KvEvent, KvGroup, Namespace, SchedulerConfig};
use corella_model::{KvGeometry, KvPages, StateRecords};
use crossbeam_channel::Sender;
use sha2::{Digest, Sha256};
use xxhash_rust::xxh3::xxh3_128;

use super::file_layer::FileLayer;
use super::folder::KvFile;
use super::label::{KvDiskLabel, LABEL_BYTES};
use super::memory_file::MemoryFile;
use super::page_list::{DiskPath, checked_blocks};
use super::page_store::{DiskError, PageStore, StateParts};
use super::slot::{SlotNamespace, SlotShape};
use super::stats::KvDiskStats;

/// A folder on a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvDiskFolder {
    pub path: PathBuf,
    /// The size of all files in the folder.
    pub max_bytes: u64,
    /// The size of this model's file. Models of one server have a share each, so that none takes the room of others.
    pub max_file_bytes: u64,
}

impl KvDiskFolder {
    /// A folder in which one file may have all the room.
    pub fn new(path: impl Into<PathBuf>, max_bytes: u64) -> Self {
        Self {
            path: path.into(),
            max_bytes,
            max_file_bytes: max_bytes,
        }
    }
}

/// The places of the tier's files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvPlaces {
    /// A folder for each disk. There is at least one.
    Folders(Vec<KvDiskFolder>),
    /// Host memory of this size.
    Memory(u64),
}

/// The number of files in host memory. Each has a thread that reads, so that so many pages come back at once.
const NUM_MEMORY_FILES: u64 = 2;

impl KvPlaces {
    /// The least size of host memory whose files have room for a page each. `page_bytes` is the size of a page's rows.
    pub fn least_memory_bytes(page_size: u32, page_bytes: u64) -> u64 {
        let shape = SlotShape {
            layout: 0,
            page_size,
            row_bytes: page_bytes as usize,
        };
        NUM_MEMORY_FILES * (LABEL_BYTES + shape.slot_bytes()) as u64
    }
}

/// The locations and the limits of blocks on disks, or in host memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvDiskConfig {
    pub places: KvPlaces,
    pub label: KvDiskLabel,
    /// A digest of the model and of the arithmetic that computes its rows.
    pub identity: u128,
    /// Whether prompts with a salt are kept, too.
    pub keeps_salted: bool,
    /// Whether blocks are read even if computing them is as quick, and requests wait for as long as reads take. Tests
    /// need it, because their machine may be slow.
    pub reads_always: bool,
}

/// The pages on the disks, or in a test's files.
pub(super) type Store = PageStore<Box<dyn FileLayer>>;

pub(crate) struct Tier {
    disks: Vec<Disk>,
    store: Store,
    keeps_salted: bool,
    pub(super) reads_always: bool,
    /// The fingerprints of the served adapters, by name.
    adapters: Mutex<HashMap<Arc<str>, u128>>,
    layout: u128,
    groups: Vec<KvGroup>,
    pages: Arc<dyn KvPages>,
    /// Set while disks are opened and scanned.
    is_scanning: AtomicBool,
    /// Locked while a copy is sent to the writer, and while the writer begins to try disks, so that no copy waits for a
    /// disk that is tried.
    sending: Mutex<()>,
    /// Set when a thread of the tier has panicked.
    is_dead: AtomicBool,
    /// Locked while pages are erased, and while a disk is switched on, so that no erasure is missed.
    erasing: Mutex<()>,
    is_stopping: AtomicBool,
    /// Set when the first attempt to open the files has ended.
    is_opened: Mutex<bool>,
    opened: Condvar,
    /// Wakes the subscriber to KV events.
    bell: OnceLock<Sender<()>>,
    pub(super) counts: Counts,
}

struct Disk {
    /// `None` for host memory.
    folder: Option<KvDiskFolder>,
    max_file_bytes: u64,
    /// Set after an error. Locked while the disk is switched on or off, so that a closed disk does not stay off
    /// unnoticed.
    is_off: Mutex<bool>,
    /// Set when pages had to be erased while the file could not be changed. All its pages are erased before the file
    /// is used again.
    must_erase: AtomicBool,
}

impl Disk {
    fn new(folder: Option<KvDiskFolder>, max_file_bytes: u64) -> Self {
        Self {
            folder,
            max_file_bytes,
            is_off: Mutex::new(false),
            must_erase: AtomicBool::new(false),
        }
    }

    fn place(&self) -> path::Display<'_> {
        let folder = self.folder.as_ref();
        folder
            .map_or(Path::new("host memory"), |folder| &folder.path)
            .display()
    }

    fn is_off(&self) -> MutexGuard<'_, bool> {
        self.is_off.lock().unwrap_or_else(PoisonError::into_inner)
    }
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

impl Tier {
    pub(super) fn new(config: &KvDiskConfig, pages: Arc<dyn KvPages>) -> Self {
        // The digest covers everything that decides the meaning of a page's bytes, and not the number of pages in
        // memory.
        let geometry = KvGeometry {
            num_pages: 0,
            ..pages.geometry().clone()
        };
        let layout = format!("{:032x} {geometry:?}", config.identity);
        let shape = SlotShape {
            layout: xxh3_128(layout.as_bytes()),
            page_size: geometry.page_size,
            row_bytes: geometry.page_bytes(),
        };
        let groups = geometry.layers.groups().to_vec();
        let disks: Vec<_> = match &config.places {
            KvPlaces::Folders(folders) => folders
                .iter()
                .map(|folder| Disk::new(Some(folder.clone()), folder.max_file_bytes))
                .collect(),
            KvPlaces::Memory(num_bytes) => (0..NUM_MEMORY_FILES)
                .map(|_| Disk::new(None, *num_bytes / NUM_MEMORY_FILES))
                .collect(),
        };
        let max_bytes: Vec<_> = disks.iter().map(|disk| disk.max_file_bytes).collect();
        let state_parts = state_parts(&pages, shape);
        Self {
            disks,
            store: PageStore::new(
                shape,
                groups.clone(),
                state_parts,
                &config.label,
                &max_bytes,
            ),
            keeps_salted: config.keeps_salted,
            reads_always: config.reads_always,
            adapters: Mutex::default(),
            layout: shape.layout,
            groups,
            pages,
            is_scanning: AtomicBool::new(true),
            sending: Mutex::default(),
            is_dead: AtomicBool::new(false),
            erasing: Mutex::default(),
            is_stopping: AtomicBool::new(false),
            is_opened: Mutex::default(),
            opened: Condvar::new(),
            bell: OnceLock::new(),
            counts: Counts::default(),
        }
    }

    /// Opens the files, and then finds the blocks in them, so that no file waits for the scan of another disk.
    pub(super) fn open(&self) {
        let mut disks: Vec<usize> = (0..self.disks.len()).collect();
        for step in [Self::try_open, Self::scan] {
            disks.retain(|&disk| match step(self, disk) {
                Ok(()) => true,
                Err(error) => {
                    self.switch_off("opening its file", DiskError { disk, error });
                    false
                }
            });
        }
        self.is_scanning.store(false, Ordering::Release);
        self.ring();
        self.set_opened();
    }

    /// The medium from which fetches bring the blocks.
    pub(super) fn medium(&self) -> FetchMedium {
        match self.disks.iter().all(|disk| disk.folder.is_some()) {
            true => FetchMedium::Disk,
            false => FetchMedium::Host,
        }
    }

    /// The option that asks for the tier.
    fn option(&self) -> &'static str {
        match self.medium() {
            FetchMedium::Host => "--kv-host-memory",
            _ => "--kv-disk",
        }
    }

    pub(super) fn num_disks(&self) -> usize {
        self.disks.len()
    }

    /// Returns false if the files are not open after `limit`.
    pub(crate) fn wait_opened(&self, limit: Duration) -> bool {
        let is_opened = self.lock_opened();
        let is_waiting = |is_opened: &mut bool| !*is_opened;
        let waited = self.opened.wait_timeout_while(is_opened, limit, is_waiting);
        let (is_opened, _) = waited.unwrap_or_else(PoisonError::into_inner);
        *is_opened
    }

    fn set_opened(&self) {
        *self.lock_opened() = true;
        self.opened.notify_all();
    }

    fn lock_opened(&self) -> MutexGuard<'_, bool> {
        { self.is_opened.lock() }.unwrap_or_else(PoisonError::into_inner)
    }

    /// Tries the disks that are off again, once the files [were opened](Self::open). Returns whether one of them works.
    pub(super) fn try_again(&self) -> bool {
        self.begin_to_try();
        let is_off =
            |&disk: &usize| *self.disks[disk].is_off() && !self.is_dead.load(Ordering::Relaxed);
        let off = (0..self.disks.len()).filter(is_off);
        let num_on = off.filter(|&disk| self.try_disk(disk)).count();
        self.is_scanning.store(false, Ordering::Release);
        // A subscriber to KV events may have come meanwhile.
        self.ring();
        num_on > 0
    }

    /// Stops copies to the writer until the disks that are off [have been tried](Self::try_again). Returns false if
    /// none is off.
    pub(super) fn begin_to_try(&self) -> bool {
        let has_off = self.disks.iter().any(|disk| *disk.is_off());
        if !has_off || self.is_dead.load(Ordering::Relaxed) {
            return false;
        }
        let _sending = self.lock_sending();
        self.is_scanning.store(true, Ordering::Release);
        true
    }

    /// Sends a copy to the writer by `send`, unless the writer tries disks.
    pub(super) fn send_copy(&self, send: impl FnOnce() -> bool) -> bool {
        let _sending = self.lock_sending();
        self.store_to_write().is_some() && send()
    }

    fn lock_sending(&self) -> MutexGuard<'_, ()> {
        self.sending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn try_disk(&self, disk: usize) -> bool {
        let tried = self.try_open(disk).and_then(|()| self.scan(disk));
        let mut is_off = self.disks[disk].is_off();
        if let Err(error) = tried {
            *is_off = true;
            self.store.close_disk(disk);
            tracing::debug!(%error, "{} stays off", self.option());
            return false;
        }
        // A read may have failed during the scan.
        if *is_off || !self.store.is_open(disk) {
            return false;
        }
        let folder = self.disks[disk].place();
        tracing::info!(%folder, "the disk works again: {} is on", self.option());
        true
    }

    /// Begins to use a disk.
    fn try_open(&self, disk: usize) -> io::Result<()> {
        match self.store.file(disk).is_set() {
            true => self.store.try_to_write(disk)?,
            false => self.open_file(disk)?,
        }
        self.switch_on(disk)
    }

    fn scan(&self, disk: usize) -> io::Result<()> {
        self.store.scan(disk, &self.is_stopping)?;
        tracing::info!(
            folder = %self.disks[disk].place(),
            num_pages = self.store.num_pages(),
            max_pages = self.store.max_pages(),
            "{} has KV pages",
            self.option()
        );
        Ok(())
    }

    fn open_file(&self, disk: usize) -> io::Result<()> {
        let folder = &self.disks[disk].folder;
        let file = self.store.file(disk);
        if file.slots().is_empty() {
            let slot_bytes = self.store.slot_bytes();
            let reason = format!("a page takes {slot_bytes} bytes: give it a larger SIZE");
            return Err(io::Error::other(reason));
        }
        let opened: Box<dyn FileLayer> = match folder {
            Some(folder) => Box::new(KvFile::open(folder, self.layout)?),
            None => Box::new(MemoryFile::default()),
        };
        file.prepare(&opened)?;
        if file.reserved().is_empty() {
            return Err(io::Error::other(
                "files in use in this folder leave no room in SIZE for this model's file",
            ));
        }
        file.set(opened);
        Ok(())
    }

    /// Begins to use a disk. Pages that had to be erased meanwhile are erased first.
    fn switch_on(&self, disk: usize) -> io::Result<()> {
        let _erasing = self.lock_erasing();
        let must_erase = &self.disks[disk].must_erase;
        if must_erase.load(Ordering::SeqCst) {
            if let Some(failed) = self.store.erase(&[disk]).pop() {
                return Err(failed.error);
            }
            must_erase.store(false, Ordering::SeqCst);
        }
        // Reads use the disk from here on, and may switch it off during the scan.
        let mut is_off = self.disks[disk].is_off();
        *is_off = false;
        self.store.open_disk(disk);
        Ok(())
    }

    /// Takes a test's file in place of the one in a folder.
    #[cfg(test)]
    pub(super) fn use_file(&self, disk: usize, file: Box<dyn FileLayer>) {
        let slot_file = self.store.file(disk);
        slot_file.prepare(&file).ok();
        slot_file.set(file);
    }

    /// `None` before the first file is open, and while all disks are off.
    pub(super) fn store(&self) -> Option<&Store> {
        let is_on = self.store.num_open() > 0 && !self.is_dead.load(Ordering::Relaxed);
        is_on.then_some(&self.store)
    }

    /// Whether disks are being opened and scanned.
    pub(super) fn is_scanning(&self) -> bool {
        self.is_scanning.load(Ordering::Acquire)
    }

    /// `None` also while disks are opened and scanned.
    pub(super) fn store_to_write(&self) -> Option<&Store> {
        let store = self.store();
        store.filter(|_| !self.is_scanning())
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

    /// Switches a disk off until it works again. The others stay on.
    pub(super) fn switch_off(&self, what: &str, failed: DiskError) {
        let DiskError { disk, error } = failed;
        self.counts.num_errors.fetch_add(1, Ordering::Relaxed);
        let mut is_off = self.disks[disk].is_off();
        let was_off = mem::replace(&mut *is_off, true);
        // The disk may have come back since the store closed it.
        self.store.close_disk(disk);
        drop(is_off);
        if was_off {
            return;
        }
        self.ring();
        let others = match self.disks.len() {
            1 => "prompts are computed as without it",
            _ => "blocks on other disks are used as before",
        };
        tracing::warn!(
            folder = %self.disks[disk].place(),
            "{what} has failed: {error}; {} is off until the disk works again, and {others}",
            self.option()
        );
    }

    /// Switches the tier off until the next start, because one of its threads has panicked.
    pub(super) fn give_up(&self) {
        self.counts.num_errors.fetch_add(1, Ordering::Relaxed);
        let was_dead = self.is_dead.swap(true, Ordering::Relaxed);
        for disk in 0..self.disks.len() {
            self.store.close_disk(disk);
        }
        if !was_dead {
            tracing::error!(
                "a thread of the disk has panicked, which is a defect of Corella; {} is off until the next start, and \
                 prompts are computed as without it",
                self.option()
            );
        }
        // The thread may have opened the files when it panicked, and callers may wait for that.
        self.set_opened();
        self.ring();
    }

    /// Ends a scan under way, and the subscription to KV events.
    pub(super) fn stop(&self) {
        self.is_stopping.store(true, Ordering::Relaxed);
        // The loop no longer hears of a thread that panics while it opens the file.
        self.set_opened();
        self.ring();
    }

    pub(super) fn is_stopping(&self) -> bool {
        self.is_stopping.load(Ordering::Relaxed)
    }

    /// Whether a request can continue after each block that the files have with all blocks before it. Only such blocks
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

    /// Begins to watch the files' blocks for the subscriber. Returns false before the files are open.
    pub(super) fn watch_pages(&self) -> bool {
        let (Some(bell), Some(store)) = (self.bell.get(), self.store_to_write()) else {
            return false;
        };
        store.watch(bell.clone());
        true
    }

    /// The next KV event of the files' blocks.
    pub(super) fn next_event(&self, salt: u64) -> Option<KvEvent> {
        loop {
            match self.store.next_event(salt) {
                Ok(event) => return event,
                Err(failed) => self.switch_off("reading a page", failed),
            }
        }
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
        let digest = Sha256::new().chain_update(self.layout.to_le_bytes());
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
            self.erase_by("erasing blocks of an adapter", |disks| {
                self.store.erase_adapter(fingerprint, disks)
            });
        }
    }

    fn adapters(&self) -> MutexGuard<'_, HashMap<Arc<str>, u128>> {
        self.adapters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn erase(&self) {
        self.erase_by("erasing its file", |disks| self.store.erase(disks));
    }

    /// Erases pages of the disks in use now. From a file that cannot be changed now, all pages are erased before it is
    /// used again.
    fn erase_by(&self, what: &str, erase: impl FnOnce(&[usize]) -> Vec<DiskError>) {
        let _erasing = self.lock_erasing();
        for disk in &self.disks {
            disk.must_erase.store(true, Ordering::SeqCst);
        }
        let open = self.store.open_disks();
        let failed = erase(&open);
        for disk in open {
            let has_failed = failed.iter().any(|failed| failed.disk == disk);
            let must_erase = &self.disks[disk].must_erase;
            must_erase.store(has_failed, Ordering::SeqCst);
        }
        for failed in failed {
            self.switch_off(what, failed);
        }
    }

    fn lock_erasing(&self) -> MutexGuard<'_, ()> {
        self.erasing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn stats(&self) -> KvDiskStats {
        let count = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let counts = &self.counts;
        let num_on = self.store().map_or(0, PageStore::num_open);
        KvDiskStats {
            is_in_memory: self.medium() == FetchMedium::Host,
            num_on: num_on as u32,
            num_off: (self.disks.len() - num_on) as u32,
            num_pages: self.store.num_pages(),
            max_pages: self.store.max_pages(),
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

fn state_parts(pages: &Arc<dyn KvPages>, shape: SlotShape) -> StateParts {
    pages.states()?;
    let pages = pages.clone();
    Some(Box::new(move |num_blocks| {
        let num_bytes =
            |states: &dyn StateRecords| states.total_bytes(num_blocks * shape.page_size);
        let num_bytes = pages.states().map_or(0, num_bytes);
        num_bytes.div_ceil(shape.row_bytes) as u32
    }))
}

#[cfg(test)]
mod tests;
