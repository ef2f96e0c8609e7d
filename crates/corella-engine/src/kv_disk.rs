//! The disk tier: blocks of the prefix cache that outlive memory and restarts.
//!
//! * One file for each model and layout (`kv_disk/folder.rs`), locked by its process, with a label (`label.rs`) and a
//!   slot for each page (`slot.rs`). Disk space is reserved before it is used. Files of models that no process serves
//!   make room for others. A torn, damaged or foreign slot is an absent page (`page_store.rs`).
//! * A thread opens and scans the file while requests are served, and then stores. Another thread reads.
//! * Blocks are stored if a request used them again, or if they are next to be evicted
//!   ([`poll_copy_offer`](Scheduler::poll_copy_offer)). The core holds them while they are copied to memory, as it
//!   holds blocks for other nodes: the hold is given up when requests need the pages, and the copy is then void. The
//!   disk is written after the hold.
//! * If the prefix of a request continues on the disk, a fetch begins before the request is queued, unless computing
//!   is as quick (by the formula for loads from other nodes, with the measured speed of the disk). The request then
//!   waits for the fetch like a follower, for as long as computing the blocks would take.
//! * In groups with a window, only the pages that a query after the path reads are stored and read.
//! * For a model with recurrent layers, states are stored in slots of their own: the state after the last block of a
//!   path, and earlier states if the rows since the state before take at least as many bytes as the state. A prefix can
//!   be used up to its last state.
//! * Blocks of an adapter are stored by its content, and erased when it is removed. Blocks with a salt are only stored
//!   on demand.
//! * An error of the disk switches the tier off until the disk works again, and a panic of a thread until the next
//!   start. Fetches under way are lost, so that their requests compute; nothing else changes.

mod disk_events;
mod file_layer;
mod folder;
mod inspection;
mod label;
mod page_index;
mod page_list;
mod page_store;
mod page_watch;
mod reader;
mod report;
mod slot;
mod tier;
mod writer;

pub use disk_events::DiskEvents;
pub use inspection::{KvFileContent, KvFilePages, KvFileReport, inspect_kv_disk};
pub use label::KvDiskLabel;
pub(crate) use tier::Tier;
pub use tier::{KvDiskConfig, KvDiskStats};

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use corella_core::session::{BlockOffer, FetchPace};
use corella_core::{
    BlockHasher, BlockList, FetchEnd, FetchGrant, FetchId, FetchMedium, FetchRefusal, FetchRequest,
    HoldId, HoldRefusal, Namespace, PageId, Request, Scheduler, SchedulerStats, TokenId,
};
use corella_model::KvPages;
use crossbeam_channel::{Receiver, Sender, bounded};

use crate::wake::answer::Reply;
use crate::wake::doorbell::{Doorbell, LoopSender};
use page_list::{DiskPath, PathPage, checked_blocks, path_pages};
use reader::ReadTask;
use report::Report;
use tier::Store;
use writer::WriteTask;

/// The loop's side of the tier.
pub(crate) struct KvDisk {
    tier: Arc<Tier>,
    pages: Arc<dyn KvPages>,
    /// The path that is being stored.
    path: Option<StoredPath>,
    /// The hold whose blocks are being copied.
    hold: Option<HoldId>,
    /// No path is stored before this time, because requests need the pages.
    pause_until_us: u64,
    /// The fetches under way, with a flag that stops their reads.
    fetches: HashMap<FetchId, Arc<AtomicBool>>,
    /// Fetches for other nodes, with the replies that wait for the end of each fetch.
    waiting: Vec<(FetchId, Reply<()>)>,
    pace: FetchPace,
    /// The time at which a read was last begun. Every read measures the pace.
    paced_us: u64,
    writes: Option<Sender<WriteTask>>,
    reads: Option<Sender<ReadTask>>,
    reports: Receiver<Report>,
    threads: Vec<JoinHandle<()>>,
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
/// The limit of fetches that wait for the reader.
const MAX_READS: usize = 16;
/// Requests wait for blocks as long as computing them would take, and at least this long.
const LEAST_WAIT_US: u64 = 200_000;
/// The longest wait. It also applies while the speed of computing is unknown.
const LONGEST_WAIT_US: u64 = 30_000_000;
/// When fetches do not pay, the disk is measured at most once in this time.
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
        let (report, reports) = bounded(MAX_REPORTS);
        let report = LoopSender::new(report, doorbell);
        let (writes, write_tasks) = bounded(1);
        let (reads, read_tasks) = bounded(MAX_READS);
        let writer = writer::start(tier.clone(), pages.clone(), write_tasks, report.clone())?;
        let reader = reader::start(tier.clone(), pages.clone(), read_tasks, report)?;
        Ok(Self {
            tier,
            pages,
            path: None,
            hold: None,
            pause_until_us: 0,
            fetches: HashMap::new(),
            waiting: Vec::new(),
            pace: FetchPace::default(),
            paced_us: 0,
            writes: Some(writes),
            reads: Some(reads),
            reports,
            threads: vec![writer, reader],
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
        let num_worth = self.pace.num_worth(offer, &stats, page_size);
        let hashes = &path.hashes[..num_worth.max(num_here) as usize];
        let num_worth = store.num_usable(hashes, num_here);
        if num_worth <= num_here {
            path.truncate(num_offered, page_size);
            self.measure(path, now_us);
            return None;
        }
        path.truncate(num_worth, page_size);
        let wait_us = match stats.prefill_us {
            0 => LONGEST_WAIT_US,
            _ => compute_us(&stats, num_worth - num_here, page_size),
        };
        let wait_us = wait_us.clamp(LEAST_WAIT_US, LONGEST_WAIT_US);
        let granted = scheduler.begin_fetch(FetchRequest {
            medium: FetchMedium::Disk,
            namespace: path.list.namespace.clone(),
            tokens: path.list.tokens.clone(),
            soft_us: now_us + wait_us,
            hard_us: now_us + LONGEST_WAIT_US,
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
        let is_stopped = Arc::new(AtomicBool::new(false));
        let task = ReadTask {
            fetch: Some(id),
            pages: path_pages(&grant.tables),
            state: grant.state,
            first: grant.num_found,
            path,
            is_stopped: is_stopped.clone(),
        };
        match self.try_read(task) {
            true => {
                self.paced_us = now_us;
                self.fetches.insert(id, is_stopped);
                Some(id)
            }
            false => {
                scheduler.handle_fetch_ended(id, FetchEnd::Lost);
                None
            }
        }
    }

    /// Reads the last block of a path only to time the read. Without such reads, a disk that was slow once would never
    /// be used again.
    fn measure(&mut self, path: DiskPath, now_us: u64) {
        if now_us.saturating_sub(self.paced_us) < MEASURE_AFTER_US {
            return;
        }
        self.paced_us = now_us;
        let block = path.num_blocks() - 1;
        // Every group reads the last block. The rows of a measurement go nowhere.
        let groups = 0..self.pages.geometry().layers.groups().len() as u32;
        let page = PageId(0);
        let pages = groups.map(|group| PathPage { block, group, page });
        let task = ReadTask {
            fetch: None,
            pages: pages.collect(),
            state: None,
            first: block,
            path,
            is_stopped: Arc::default(),
        };
        // If the reader is busy, its fetches are timed anyway.
        self.try_read(task);
    }

    /// Returns false if too many reads wait.
    fn try_read(&self, task: ReadTask) -> bool {
        self.reads
            .as_ref()
            .is_some_and(|reads| reads.try_send(task).is_ok())
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
        self.hold == Some(id)
    }

    /// Passes the threads' reports to the scheduler.
    pub(crate) fn take_reports(&mut self, scheduler: &mut Scheduler, now_us: u64) {
        while let Ok(report) = self.reports.try_recv() {
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
        while self.hold.is_some()
            && let Ok(report) = self.reports.recv_timeout(Duration::from_micros(HOLD_US))
        {
            self.handle(report, scheduler, now_us);
        }
    }

    fn handle(&mut self, report: Report, scheduler: &mut Scheduler, now_us: u64) {
        match report {
            Report::Copied { is_valid } => {
                let released = self
                    .hold
                    .take()
                    .and_then(|id| scheduler.release_blocks(id, now_us));
                let _ = is_valid.send(released == Some(true));
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
                num_blocks,
                elapsed_us,
            } => self.pace.note_load(num_blocks, elapsed_us),
            Report::ReaderDied => {
                self.tier.give_up();
                self.reads = None;
                for (id, _) in self.fetches.drain() {
                    scheduler.handle_fetch_ended(id, FetchEnd::Lost);
                }
            }
            Report::WriterDied => {
                self.tier.give_up();
                self.writes = None;
                if let Some(id) = self.hold.take() {
                    scheduler.release_blocks(id, now_us);
                }
                self.give_up_path(scheduler, now_us);
            }
        }
    }

    fn give_up_path(&mut self, scheduler: &mut Scheduler, now_us: u64) {
        if let Some(path) = self.path.take() {
            let num_dropped = &self.tier.counts.num_dropped;
            num_dropped.fetch_add(1, Ordering::Relaxed);
            let list = &path.blocks.list;
            scheduler.retract_copy_offer(&list.namespace, &list.tokens);
            self.pause_until_us = now_us + PAUSE_US;
        }
    }

    /// Begins to store the next blocks that are worth a copy.
    pub(crate) fn store_next(&mut self, scheduler: &mut Scheduler, now_us: u64) {
        let tier = self.tier.clone();
        let Some(store) = tier.store_to_write() else {
            return;
        };
        while now_us >= self.pause_until_us {
            if self.path.is_none() {
                let Some((namespace, tokens)) = scheduler.poll_copy_offer() else {
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
                return self.give_up_path(scheduler, now_us);
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
        Some(StoredPath {
            time: store.begin_path(&path.hashes),
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
        let task = WriteTask {
            path: held_path,
            pages,
            state,
            time: path.time,
            epoch: path.epoch,
        };
        let is_sent = self
            .writes
            .as_ref()
            .is_some_and(|writes| writes.try_send(task).is_ok());
        match is_sent {
            true => {
                self.hold = Some(held.id);
                path.is_busy = true;
            }
            false => {
                scheduler.release_blocks(held.id, now_us);
            }
        }
        is_sent
    }
}

/// The whole blocks of a request's tokens, without its last token, which is always computed for its logits.
fn known_blocks(request: &Request, hasher: &BlockHasher, page_size: u32) -> BlockList {
    let tokens = request.prompt.iter().chain(&request.output);
    let mut tokens: Vec<_> = tokens.copied().collect();
    let num_blocks = tokens.len().saturating_sub(1) / page_size as usize;
    tokens.truncate(num_blocks * page_size as usize);
    BlockList::new(request.namespace.clone(), tokens, hasher, page_size)
}

/// The time that computing `num_blocks` blocks would take.
fn compute_us(stats: &SchedulerStats, num_blocks: u32, page_size: u32) -> u64 {
    let num_tokens = u64::from(num_blocks) * u64::from(page_size);
    stats.prefill_us.saturating_mul(num_tokens) / 1024
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
        (self.writes, self.reads) = (None, None);
        // The threads must not wait for room for their reports.
        self.reports = crossbeam_channel::never();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests;
