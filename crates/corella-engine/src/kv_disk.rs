//! The disk tier: blocks of the prefix cache that outlive memory and restarts.
//!
//! For executors whose pool is not host memory, the tier can also keep files in host memory (`memory_file.rs`), which
//! count as disks, and are empty at each start.
//!
//! * One file for each disk, model and layout (`kv_disk/folder.rs`), locked by its process, with a label (`label.rs`)
//!   and a slot for each page (`slot.rs`). Disk space is reserved before it is used (`slot_file.rs`). Files of models
//!   that no process serves make room for others. A torn, damaged or foreign slot is an absent page (`page_store.rs`).
//! * All disks have one index. The pages of a path are spread over them, by room. A thread for each disk reads, and the
//!   threads share the pages of a fetch (`read_task.rs`).
//! * A further thread opens and scans the files while requests are served, and then stores.
//! * Blocks are stored if a request used them again, or if they are next to be evicted
//!   ([`poll_copy_offer`](Scheduler::poll_copy_offer)), and all of them when their model is unloaded. The core holds
//!   them while they are copied to memory, as it holds blocks for other nodes: the hold is given up when requests need
//!   the pages, and the copy is then void. The disk is written after the hold.
//! * If the prefix of a request continues on the disk, a fetch begins before the request is queued, unless computing
//!   is as quick (by the formula for loads from other nodes, with the measured speeds of the disks). The request then
//!   waits for the fetch like a follower, for as long as computing the blocks would take.
//! * In groups with a window, only the pages that a query after the path reads are stored and read.
//! * For a model with recurrent layers, states are stored in slots of their own: the state after the last block of a
//!   path, and earlier states if the rows since the state before take at least as many bytes as the state. A prefix can
//!   be used up to its last state.
//! * Blocks of an adapter are stored by its content, and erased when it is removed. Blocks with a salt are only stored
//!   on demand.
//! * An error switches a disk off until it works again, and a panic of a thread switches the tier off until the next
//!   start. Fetches under way lose the missing pages, so that their requests compute them; nothing else changes.

mod disk_events;
mod disk_pace;
mod fetch_wait;
mod file_layer;
mod folder;
mod inspection;
mod label;
mod memory_file;
mod page_index;
mod page_list;
mod page_store;
mod page_watch;
mod read_task;
mod reader;
mod report;
mod slot;
mod slot_file;
mod stats;
mod store_all;
mod tier;
mod writer;

pub use disk_events::DiskEvents;
pub use inspection::{KvFileContent, KvFilePages, KvFileReport, inspect_kv_disk};
pub use label::KvDiskLabel;
pub use stats::KvDiskStats;
pub(crate) use tier::Tier;
pub use tier::{KvDiskConfig, KvDiskFolder, KvPlaces};

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Receiver;
use std::thread::JoinHandle;
use std::time::Duration;

use corella_core::session::BlockOffer;
use corella_core::{
    BlockList, FetchEnd, FetchGrant, FetchId, FetchRefusal, FetchRequest, HoldId, HoldRefusal,
    Namespace, PageId, Request, Scheduler, TokenId,
};
use corella_model::KvPages;
use crossbeam_channel::{Sender, bounded};

use crate::wake::answer::Reply;
use crate::wake::doorbell::{Doorbell, loop_channel};
use disk_pace::DiskPaces;
use fetch_wait::FetchWait;
use page_list::{DiskPath, PathPage, checked_blocks, known_blocks, path_pages};
use read_task::{ReadShare, ReadTask};
use report::Report;
use store_all::StoreAll;
use tier::Store;
use writer::WriteTask;

/// The loop's side of the tier.
pub(crate) struct KvDisk {
    tier: Arc<Tier>,
    pages: Arc<dyn KvPages>,
    /// The path that is being stored.
    path: Option<StoredPath>,
    /// The blocks that are being copied.
    hold: Option<CopyHold>,
    /// No path is stored before this time, because requests need the pages.
    pause_until_us: u64,
    /// A caller waits until all blocks are stored.
    store_all: Option<StoreAll>,
    /// The fetches under way, with a flag that stops their reads.
    fetches: HashMap<FetchId, Arc<AtomicBool>>,
    /// Fetches for other nodes, with the replies that wait for the end of each fetch.
    waiting: Vec<(FetchId, Reply<()>)>,
    paces: DiskPaces,
    /// The time at which a read was last begun. Every read measures paces.
    paced_us: u64,
    writes: Option<Sender<WriteTask>>,
    /// A queue for each disk.
    reads: Vec<Sender<ReadShare>>,
    /// `None` while the threads end.
    reports: Option<Receiver<Report>>,
    threads: Vec<JoinHandle<()>>,
}

struct CopyHold {
    id: HoldId,
    /// Tells the writer whether the blocks stayed unchanged until the copy was reported. Dropped without an answer, it
    /// ends the writer, which waits for nothing else.
    is_valid: Sender<bool>,
}

struct StoredPath {
    blocks: DiskPath,
    /// The lengths, in blocks, of the prefixes after which a request will be able to continue, smallest first. The last
    /// one is the whole path. The others end at recurrent states.
    ends: Vec<u32>,
    /// Whether a part of the path is being copied or written.
    is_busy: bool,
    /// The time of the path's use in the store, and the store's epoch when the path was begun.
    time: u64,
    epoch: u64,
}

/// The limit of bytes for one copy to the disk.
const MAX_COPY_BYTES: usize = 16 << 20;
/// The lease of a hold for a copy. The copy in memory takes milliseconds.
const HOLD_US: u64 = 10_000_000;
/// The pause in storing after a hold was refused.
const PAUSE_US: u64 = 100_000;
/// The limit of reports that wait for the loop.
const MAX_REPORTS: usize = 64;
/// The limit of reads that wait for a disk.
const MAX_READS: usize = 16;
/// When fetches do not pay, a disk is measured at most once in this time.
const MEASURE_AFTER_US: u64 = 10_000_000;

impl KvDisk {
    pub(crate) fn start(
        config: &KvDiskConfig,
        pages: Arc<dyn KvPages>,
        scheduler: &mut Scheduler,
        doorbell: Doorbell,
    ) -> io::Result<Self> {
        let tier = Tier::new(config, pages.clone());
        Self::start_with(tier, pages, scheduler, doorbell)
    }

    fn start_with(
        tier: Tier,
        pages: Arc<dyn KvPages>,
        scheduler: &mut Scheduler,
        doorbell: Doorbell,
    ) -> io::Result<Self> {
        scheduler.offer_copies();
        let tier = Arc::new(tier);
        let (report, reports) = loop_channel(MAX_REPORTS, doorbell);
        let (writes, write_tasks) = bounded(1);
        let writer = writer::start(tier.clone(), pages.clone(), write_tasks, report.clone())?;
        let num_disks = tier.num_disks();
        let (mut reads, mut threads) = (Vec::new(), vec![writer]);
        for disk in 0..num_disks {
            let (read, shares) = bounded(MAX_READS);
            let (tier, pages, report) = (tier.clone(), pages.clone(), report.clone());
            threads.push(reader::start(disk, tier, pages, shares, report)?);
            reads.push(read);
        }
        Ok(Self {
            tier,
            pages,
            path: None,
            hold: None,
            pause_until_us: 0,
            store_all: None,
            fetches: HashMap::new(),
            waiting: Vec::new(),
            paces: DiskPaces::new(num_disks),
            paced_us: 0,
            writes: Some(writes),
            reads,
            reports: Some(reports),
            threads,
        })
    }

    pub(crate) fn tier(&self) -> &Arc<Tier> {
        &self.tier
    }

    /// Begins to fetch the blocks of a new request that are on the disk, if that pays.
    pub(crate) fn begin_fetch(
        &mut self,
        request: &Request,
        scheduler: &mut Scheduler,
        now_us: u64,
    ) {
        let limits = scheduler.config();
        if self.has_pages() && !request.sampling.wants_prompt_outputs() {
            let list = known_blocks(request, &limits.block_hasher, limits.page_size);
            self.fetch(list, scheduler, now_us);
        }
    }

    /// Brings the blocks of a list to memory for another node, if that pays. The reply is dropped when no more blocks
    /// come.
    pub(crate) fn bring(
        &mut self,
        list: BlockList,
        reply: Reply<()>,
        scheduler: &mut Scheduler,
        now_us: u64,
    ) {
        let limits = scheduler.config();
        let list = checked_blocks(&list, &limits.block_hasher, limits.page_size);
        if self.has_pages()
            && let Some(id) = self.fetch(list, scheduler, now_us)
        {
            self.waiting.push((id, reply));
        }
    }

    fn has_pages(&self) -> bool {
        let store = self.tier.store();
        store.is_some_and(|store| store.num_pages() > 0)
    }

    /// Begins to fetch the blocks of a list, if that pays. Returns the fetch that brings them.
    fn fetch(
        &mut self,
        list: BlockList,
        scheduler: &mut Scheduler,
        now_us: u64,
    ) -> Option<FetchId> {
        let store = self.tier.store()?;
        let page_size = scheduler.config().page_size;
        let mut path = self.disk_path(list, scheduler)?;
        let num_blocks = path.num_blocks();
        let num_here = scheduler.look_up_blocks(&path.list);
        let num_offered = store.num_usable(&path.hashes, num_here);
        if num_offered <= num_here {
            return None;
        }
        let offer = BlockOffer {
            num_blocks,
            num_here,
            num_offered,
        };
        let stats = scheduler.stats();
        let hashes = &path.hashes[..num_offered as usize];
        let counts = store.count_by_disk(hashes, num_here);
        let (pace, slowest) = self.paces.pace_of(&counts, offer);
        let num_worth = match self.tier.reads_always {
            true => num_offered,
            false => pace.num_worth(offer, &stats, page_size),
        };
        let hashes = &path.hashes[..num_worth.max(num_here) as usize];
        let num_worth = store.num_usable(hashes, num_here);
        if num_worth <= num_here {
            path.truncate(num_offered, page_size);
            self.measure(slowest, path, now_us);
            return None;
        }
        path.truncate(num_worth, page_size);
        let wait = match self.tier.reads_always {
            true => FetchWait::ENDLESS,
            false => FetchWait::new(&stats, num_worth - num_here, page_size),
        };
        let granted = scheduler.begin_fetch(FetchRequest {
            medium: self.tier.medium(),
            namespace: path.list.namespace.clone(),
            tokens: path.list.tokens.clone(),
            soft_us: now_us + wait.soft_us,
            hard_us: now_us + wait.hard_us,
        });
        let grant = match granted {
            Ok(grant) => grant,
            Err(FetchRefusal::UnderWay(id)) => return Some(id),
            Err(refusal) => {
                tracing::debug!(?refusal, "no blocks come from the disk");
                return None;
            }
        };
        let id = grant.id;
        let Some(grant) = shorten_to_usable(grant, &path, store, scheduler) else {
            scheduler.handle_fetch_ended(id, FetchEnd::Lost);
            return None;
        };
        path.truncate(grant.num_blocks, page_size);
        if !self.begin_read(&grant, path) {
            scheduler.handle_fetch_ended(id, FetchEnd::Lost);
            return None;
        }
        self.paced_us = now_us;
        Some(id)
    }

    /// Begins to read the path of a grant. Returns false if too many reads wait.
    fn begin_read(&mut self, grant: &FetchGrant, path: DiskPath) -> bool {
        let Some(store) = self.tier.store() else {
            return false;
        };
        let state_groups = store.state_groups(path.num_blocks());
        let (task, pages) = ReadTask::of_grant(grant, path, state_groups);
        let is_stopped = task.is_stopped.clone();
        let disks = store.disks_of(pages.iter().map(|page| page.name(&task.path).key));
        let is_begun = self.try_read(task, &pages, &disks);
        if is_begun {
            self.fetches.insert(grant.id, is_stopped);
        }
        is_begun
    }

    /// Reads the last page of a path that a disk has, only to time the read. Without such reads, a disk that was slow
    /// once would never be used again.
    fn measure(&mut self, disk: usize, mut path: DiskPath, now_us: u64) {
        let Some(store) = self.tier.store() else {
            return;
        };
        if now_us.saturating_sub(self.paced_us) < MEASURE_AFTER_US {
            return;
        }
        let Some((block, group)) = store.last_on_disk(&path.hashes, disk) else {
            return;
        };
        self.paced_us = now_us;
        let page_size = self.pages.geometry().page_size;
        path.truncate(block + 1, page_size);
        // The rows of a measurement go nowhere.
        let page = PageId(0);
        let task = ReadTask {
            fetch: None,
            state: None,
            first: block,
            path,
            is_stopped: Arc::default(),
        };
        // If the disk is busy, its fetches are timed anyway.
        self.try_read(task, &[PathPage { block, group, page }], &[disk]);
    }

    /// Returns false if too many reads wait for one of the disks.
    fn try_read(&self, task: ReadTask, pages: &[PathPage], disks: &[usize]) -> bool {
        let shares = task.split(pages, disks);
        if shares.iter().any(|(disk, _)| self.reads[*disk].is_full()) {
            return false;
        }
        for (disk, share) in shares {
            // Only this thread sends, so that there is room.
            let _ = self.reads[disk].try_send(share);
        }
        true
    }

    /// Stops the reads of a cancelled fetch. Returns false if the fetch belongs to another driver.
    pub(crate) fn handle_fetch_cancelled(&self, id: FetchId) -> bool {
        let fetch = self.fetches.get(&id);
        if let Some(is_stopped) = fetch {
            is_stopped.store(true, Ordering::Relaxed);
        }
        fetch.is_some()
    }

    /// Returns whether a hold belongs to the disk. Its copy ends within milliseconds, and releases it.
    pub(crate) fn has_hold(&self, id: HoldId) -> bool {
        self.hold.as_ref().is_some_and(|hold| hold.id == id)
    }

    /// Passes the threads' reports to the scheduler.
    pub(crate) fn take_reports(&mut self, scheduler: &mut Scheduler, now_us: u64) {
        while let Some(Ok(report)) = self.reports.as_ref().map(Receiver::try_recv) {
            self.handle(report, scheduler, now_us);
        }
        let fetches = &self.fetches;
        let brings_more = |id: &FetchId| {
            let is_stopped = fetches.get(id);
            is_stopped.is_some_and(|is_stopped| !is_stopped.load(Ordering::Relaxed))
        };
        self.waiting.retain(|(id, _)| brings_more(id));
    }

    /// Waits until no copy holds blocks. Copies in memory take milliseconds.
    pub(crate) fn end_copy(&mut self, scheduler: &mut Scheduler, now_us: u64) {
        let longest = Duration::from_micros(HOLD_US);
        while self.hold.is_some()
            && let Some(reports) = &self.reports
            && let Ok(report) = reports.recv_timeout(longest)
        {
            self.handle(report, scheduler, now_us);
        }
    }

    fn handle(&mut self, report: Report, scheduler: &mut Scheduler, now_us: u64) {
        match report {
            Report::Copied => {
                if let Some(hold) = self.hold.take() {
                    let released = scheduler.release_blocks(hold.id, now_us);
                    let _ = hold.is_valid.send(released == Some(true));
                }
            }
            Report::Written { is_done } => {
                if let Some(path) = &mut self.path {
                    path.is_busy = false;
                }
                if !is_done {
                    self.give_up_path(scheduler, now_us);
                }
            }
            Report::Fetched { id, num_blocks } => {
                scheduler.handle_fetched(id, num_blocks);
            }
            Report::FetchEnded { id, end } => {
                self.fetches.remove(&id);
                scheduler.handle_fetch_ended(id, end);
            }
            Report::Timed {
                disk,
                num_pages,
                elapsed_us,
            } => self.paces.note(disk, num_pages, elapsed_us),
            Report::WriterDied => {
                self.tier.give_up();
                self.writes = None;
                if let Some(hold) = self.hold.take() {
                    scheduler.release_blocks(hold.id, now_us);
                }
                self.give_up_path(scheduler, now_us);
            }
        }
    }

    /// Stores all cached blocks as soon as no request is left. The reply is dropped when a block cannot be stored.
    pub(crate) fn store_all(&mut self, reply: Sender<()>) {
        self.store_all = Some(StoreAll::new(reply));
    }

    fn give_up_path(&mut self, scheduler: &mut Scheduler, now_us: u64) {
        let Some(path) = self.path.take() else {
            return;
        };
        let num_dropped = &self.tier.counts.num_dropped;
        num_dropped.fetch_add(1, Ordering::Relaxed);
        let list = &path.blocks.list;
        scheduler.retract_copy_offer(&list.namespace, &list.tokens);
        // A path that was begun before is offered again with all others.
        self.store_all.take_if(|all| all.time() == Some(path.time));
        if self.time_of_all().is_none() {
            self.pause_until_us = now_us + PAUSE_US;
        }
    }

    fn time_of_all(&self) -> Option<u64> {
        self.store_all.as_ref()?.time()
    }

    /// Begins to store the next blocks that are worth a copy.
    pub(crate) fn store_next(&mut self, scheduler: &mut Scheduler, now_us: u64) {
        let tier = self.tier.clone();
        let Some(store) = tier.store_to_write() else {
            if !tier.is_scanning() {
                self.store_all = None;
            }
            return;
        };
        if let Some(all) = &mut self.store_all
            && all.begin(store, scheduler)
        {
            self.pause_until_us = 0;
        }
        while now_us >= self.pause_until_us {
            if self.path.is_none() {
                let Some((namespace, tokens)) = scheduler.poll_copy_offer() else {
                    if let Some(all) = self.store_all.take_if(|all| all.time().is_some()) {
                        all.end();
                    }
                    return;
                };
                self.path = self.new_path(namespace, tokens, scheduler);
            }
            let Some(path) = &mut self.path else {
                continue;
            };
            if path.is_busy {
                return;
            }
            let first = store.num_before_missing(&path.blocks.hashes, &path.ends);
            if first == path.blocks.num_blocks() || store.epoch() != path.epoch {
                self.path = None;
                continue;
            }
            if !self.hold_next(first, scheduler, now_us) {
                self.give_up_path(scheduler, now_us);
            }
        }
    }

    /// Returns the names of a list's blocks in the file. `None` if such blocks are not kept.
    fn disk_path(&self, list: BlockList, scheduler: &Scheduler) -> Option<DiskPath> {
        let limits = scheduler.config();
        let namespace = self.tier.slot_namespace(&list.namespace)?;
        let (hasher, page_size) = (&limits.block_hasher, limits.page_size);
        Some(DiskPath::new(list, namespace, hasher, page_size))
    }

    fn new_path(
        &self,
        namespace: Namespace,
        tokens: Vec<TokenId>,
        scheduler: &Scheduler,
    ) -> Option<StoredPath> {
        let store = self.tier.store()?;
        // An adapter that is removed from now on has a later epoch.
        let epoch = store.epoch();
        let limits = scheduler.config();
        let (page_size, hasher) = (limits.page_size, limits.block_hasher);
        let list = BlockList::new(namespace, tokens, &hasher, page_size);
        let mut path = self.disk_path(list, scheduler)?;
        // If a path is longer than the file, only the beginning of the path is stored.
        path.truncate(store.room(), page_size);
        let mut ends = vec![path.num_blocks()];
        if self.pages.states().is_some() {
            ends = store.choose_states(&path.hashes, &scheduler.look_up_states(&path.list));
            while !store.has_room_for(&path.hashes, &ends) {
                ends.pop();
            }
            path.truncate(*ends.last()?, page_size);
        }
        let time = self.time_of_all();
        let time = time.unwrap_or_else(|| store.begin_path(&[]));
        store.touch_path(&path.hashes, time);
        Some(StoredPath {
            time,
            epoch,
            blocks: path,
            ends,
            is_busy: false,
        })
    }

    /// Holds the next blocks of the path for a copy. Returns false if requests need the pages. If the blocks are no
    /// longer here, the path ends.
    fn hold_next(&mut self, first: u32, scheduler: &mut Scheduler, now_us: u64) -> bool {
        let (Some(path), Some(store)) = (&mut self.path, self.tier.store()) else {
            return false;
        };
        let page_size = scheduler.config().page_size;
        let geometry = self.pages.geometry();
        let is_recurrent = self.pages.states().is_some();
        let max_pages = (MAX_COPY_BYTES / geometry.page_bytes()).max(1);
        let mut held_path = path.blocks.clone();
        let end = path.ends.iter().find(|&&end| end > first);
        held_path.truncate(*end.unwrap_or(&first), page_size);
        // Groups with a window have pages only just before this end, and the recurrent state is the one after it. So
        // the list must not be cut further with windows or states.
        let mut groups = geometry.layers.groups().iter();
        if groups.all(|group| group.window.is_none()) && !is_recurrent {
            held_path.truncate(first + max_pages as u32, page_size);
        }
        scheduler.note_time(now_us);
        let held = match scheduler.hold_blocks(&held_path.list, first, now_us + HOLD_US) {
            Ok(held) => held,
            // The rest of the path cannot be stored. If it were offered again, no other path would get its turn.
            Err(HoldRefusal::NothingHere) => {
                self.path = None;
                return true;
            }
            Err(refusal) => {
                tracing::debug!(?refusal, "blocks are not stored on the disk now");
                return false;
            }
        };
        held_path.truncate(held.num_blocks, page_size);
        let mut pages = path_pages(&held.tables);
        pages.retain(|page| !store.has(page.name(&held_path).key));
        // The state comes with the last pages.
        let state = held.state.filter(|_| pages.len() <= max_pages);
        pages.truncate(max_pages);
        let (is_valid, validity) = bounded(1);
        let task = WriteTask {
            path: held_path,
            pages,
            state,
            validity,
            time: path.time,
            epoch: path.epoch,
        };
        let writes = self.writes.as_ref();
        let send = || writes.is_some_and(|writes| writes.try_send(task).is_ok());
        let is_sent = self.tier.send_copy(send);
        match is_sent {
            true => {
                let id = held.id;
                self.hold = Some(CopyHold { id, is_valid });
                path.is_busy = true;
            }
            false => {
                scheduler.release_blocks(held.id, now_us);
            }
        }
        is_sent
    }
}

/// Shortens a grant to the blocks that the disk has. A grant may be shorter than the requested path, and then needs
/// other pages in groups with windows.
fn shorten_to_usable(
    grant: FetchGrant,
    path: &DiskPath,
    store: &Store,
    scheduler: &mut Scheduler,
) -> Option<FetchGrant> {
    let granted = &path.hashes[..grant.num_blocks as usize];
    let num_usable = store.num_usable(granted, grant.num_found);
    match num_usable == grant.num_blocks {
        true => Some(grant),
        false => scheduler.shorten_fetch(grant.id, num_usable),
    }
}

impl Drop for KvDisk {
    fn drop(&mut self) {
        self.tier.stop();
        for is_stopped in self.fetches.values() {
            is_stopped.store(true, Ordering::Relaxed);
        }
        // The threads must wait neither for tasks and an answer to a report, nor for room for their reports.
        (self.writes, self.hold) = (None, None);
        self.reads.clear();
        self.reports = None;
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests;
