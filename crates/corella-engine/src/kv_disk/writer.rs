//! The thread that opens and scans the files, and then stores blocks. After an error it tries the disk again.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use corella_core::SnapshotId;
use corella_model::{KvPages, StateError};
use crossbeam_channel::{Receiver, RecvTimeoutError};

use super::page_list::{DiskPath, PathPage};
use super::report::{DeathReport, Report};
use super::slot::PageName;
use super::tier::Tier;
use crate::wake::doorbell::LoopSender;

/// Pages that the loop holds until they are copied.
pub(super) struct WriteTask {
    /// The path up to the last held block.
    pub path: DiskPath,
    pub pages: Vec<PathPage>,
    /// The snapshot after the path, if it is stored now.
    pub state: Option<SnapshotId>,
    /// The loop's answer to the report of the copy: whether the pages stayed unchanged meanwhile.
    pub validity: Receiver<bool>,
    pub time: u64,
    pub epoch: u64,
}

/// The time after an error until the disk is tried again.
const RETRY_AFTER: Duration = Duration::from_secs(30);
const LONGEST_RETRY: Duration = Duration::from_secs(3600);

pub(super) fn start(
    tier: Arc<Tier>,
    pages: Arc<dyn KvPages>,
    tasks: Receiver<WriteTask>,
    report: LoopSender<Report>,
) -> io::Result<JoinHandle<()>> {
    let thread = thread::Builder::new().name("corella-kv-write".to_owned());
    thread.spawn(move || {
        let _death = DeathReport::new(&report, Report::WriterDied);
        tier.open();
        // Blocks may have been offered during the scan.
        report.doorbell().ring();
        Writer::new(tier, pages, tasks, report).run();
    })
}

pub(super) struct Writer {
    tier: Arc<Tier>,
    pages: Arc<dyn KvPages>,
    tasks: Receiver<WriteTask>,
    report: LoopSender<Report>,
    /// The rows of the last task.
    rows: Vec<u8>,
    retry_after: Duration,
}

/// The loop has ended.
#[derive(Debug)]
pub(super) struct LoopEnded;

impl Writer {
    pub fn new(
        tier: Arc<Tier>,
        pages: Arc<dyn KvPages>,
        tasks: Receiver<WriteTask>,
        report: LoopSender<Report>,
    ) -> Self {
        Self {
            tier,
            pages,
            tasks,
            report,
            rows: Vec::new(),
            retry_after: RETRY_AFTER,
        }
    }

    /// Stores blocks until the loop ends.
    fn run(mut self) {
        let mut retry_at = Instant::now() + self.retry_after;
        loop {
            let served = match self.tasks.recv_deadline(retry_at) {
                Ok(task) => self.serve(&task),
                Err(RecvTimeoutError::Timeout) => {
                    let tried = self.try_again();
                    retry_at = Instant::now() + self.retry_after;
                    tried
                }
                Err(RecvTimeoutError::Disconnected) => return,
            };
            if served.is_err() {
                return;
            }
        }
    }

    fn serve(&mut self, task: &WriteTask) -> Result<(), LoopEnded> {
        let send = |report| match self.report.send(report) {
            true => Ok(()),
            false => Err(LoopEnded),
        };
        let copied = copy(&*self.pages, task, &mut self.rows);
        if let Err(error) = &copied {
            tracing::warn!(%error, "a recurrent state cannot be stored");
        }
        send(Report::Copied)?;
        let is_done = match task.validity.recv() {
            Ok(true) if copied.is_ok() => write(&self.tier, task, &self.rows),
            Ok(_) => false,
            Err(_) => return Err(LoopEnded),
        };
        send(Report::Written { is_done })
    }

    /// Tries the disks that are off again.
    pub fn try_again(&mut self) -> Result<(), LoopEnded> {
        if !self.tier.begin_to_try() {
            return Ok(());
        }
        // A copy that was sent just before holds its blocks, and a bad disk may take minutes.
        if let Ok(task) = self.tasks.try_recv() {
            self.serve(&task)?;
        }
        if self.tier.try_again() {
            // A disk that fails again and again is tried less often.
            self.retry_after = LONGEST_RETRY.min(2 * self.retry_after);
        }
        // Blocks may have been offered meanwhile.
        self.report.doorbell().ring();
        Ok(())
    }
}

/// Copies pages, one after the other, each with its layers in order, and then the recurrent state.
fn copy(pages: &dyn KvPages, task: &WriteTask, rows: &mut Vec<u8>) -> Result<(), StateError> {
    let geometry = pages.geometry();
    rows.resize(task.pages.len() * geometry.page_bytes(), 0);
    let held: Vec<_> = task.pages.iter().map(|held| held.page).collect();
    // SAFETY: the scheduler holds the pages until the copy is reported: they belong to published blocks that returned
    // steps have filled, and nothing writes to them.
    unsafe { pages.read_whole(&held, rows) };
    let (Some(states), Some(state)) = (pages.states(), task.state) else {
        return Ok(());
    };
    let num_tokens = task.path.list.tokens.len() as u32;
    for layer in 0..states.num_layers() {
        let first = rows.len();
        rows.resize(first + states.num_bytes(layer, num_tokens), 0);
        states.read(layer, state, num_tokens, &mut rows[first..])?;
    }
    rows.resize(rows.len().next_multiple_of(geometry.page_bytes()), 0);
    Ok(())
}

/// Stores copied pages, also those that were sent just before disks are tried.
pub(super) fn write(tier: &Tier, task: &WriteTask, rows: &[u8]) -> bool {
    let Some(store) = tier.store() else {
        return false;
    };
    let path = &task.path;
    let pages = task.pages.iter().map(|page| page.name(path));
    let state = task.state.map(|_| {
        let groups = store.state_groups(path.num_blocks());
        path.state_names(groups)
    });
    let names: Vec<PageName> = pages.chain(state.into_iter().flatten()).collect();
    let stored = store.store(&names, rows, task.time, task.epoch);
    for failed in stored.failed {
        tier.switch_off("writing a page", failed);
    }
    let num_bytes = u64::from(stored.num_pages) * store.slot_bytes() as u64;
    let counts = &tier.counts;
    counts
        .num_stored
        .fetch_add(stored.num_pages.into(), Ordering::Relaxed);
    counts.bytes_written.fetch_add(num_bytes, Ordering::Relaxed);
    stored.num_pages > 0
}
