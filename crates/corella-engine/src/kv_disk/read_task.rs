//! A read of a path's pages. The thread of each disk reads its share at the same time.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use corella_core::{FetchEnd, FetchGrant, FetchId, SnapshotId};

use super::page_list::{DiskPath, PathPage, path_pages};
use super::report::Report;
use crate::wake::doorbell::LoopSender;

/// Pages to read.
pub(super) struct ReadTask {
    /// `None` if only the time of the read matters.
    pub fetch: Option<FetchId>,
    /// The path up to the last block of the task.
    pub path: DiskPath,
    /// The number of blocks before the first block to read.
    pub first: u32,
    /// The snapshot to fill with the recurrent state after the path.
    pub state: Option<SnapshotId>,
    /// Set when no further page must be written.
    pub is_stopped: Arc<AtomicBool>,
}

/// The pages of a task that lie on one disk.
pub(super) struct ReadShare {
    pub task: Arc<ReadTask>,
    pub pages: Vec<PathPage>,
    number: usize,
    progress: Arc<Mutex<Progress>>,
}

/// The progress of all shares of a task.
struct Progress {
    /// The block of each share's next page.
    next: Vec<u32>,
    /// The number of blocks, from the first of the path on, before the first page that is missing.
    end: u32,
    num_reported: u32,
    /// The number of shares that have not ended.
    num_left: usize,
    /// The pages of the recurrent state.
    records: Vec<u8>,
}

/// The number of blocks between two reports to the loop.
const BLOCKS_PER_REPORT: u32 = 32;

impl ReadTask {
    /// The task of a grant for the blocks of a path, and the pages to fill, in order of their blocks. The parts of a
    /// recurrent state come last.
    pub fn of_grant(
        grant: &FetchGrant,
        path: DiskPath,
        state_groups: Range<u32>,
    ) -> (Self, Vec<PathPage>) {
        let mut pages = path_pages(&grant.tables);
        if grant.state.is_some() {
            pages.extend(path.state_pages(state_groups));
        }
        let task = Self {
            fetch: Some(grant.id),
            path,
            first: grant.num_found,
            state: grant.state,
            is_stopped: Arc::default(),
        };
        (task, pages)
    }

    /// Divides a task, one share for each disk with pages of it. `pages` has the pages to fill, in order of their
    /// blocks, and `disks` the disk of each. Returns the disk of each share.
    pub fn split(self, pages: &[PathPage], disks: &[usize]) -> Vec<(usize, ReadShare)> {
        let mut shares: Vec<(usize, Vec<PathPage>)> = Vec::new();
        for (&page, &disk) in pages.iter().zip(disks) {
            match shares.iter_mut().find(|(other, _)| *other == disk) {
                Some((_, pages)) => pages.push(page),
                None => shares.push((disk, vec![page])),
            }
        }
        // The task has an end, even without pages.
        if shares.is_empty() {
            shares.push((0, Vec::new()));
        }
        let num_blocks = self.path.num_blocks();
        let first_block = |pages: &[PathPage]| pages.first().map_or(num_blocks, |page| page.block);
        let progress = Progress {
            next: shares.iter().map(|(_, pages)| first_block(pages)).collect(),
            end: num_blocks,
            num_reported: 0,
            num_left: shares.len(),
            records: Vec::new(),
        };
        let (task, progress) = (Arc::new(self), Arc::new(Mutex::new(progress)));
        let shares = shares.into_iter().enumerate();
        let share = |(number, (disk, pages))| {
            let (task, progress) = (task.clone(), progress.clone());
            let share = ReadShare {
                task,
                pages,
                number,
                progress,
            };
            (disk, share)
        };
        shares.map(share).collect()
    }
}

impl ReadShare {
    /// Whether this is the first share of its task.
    pub fn is_first(&self) -> bool {
        self.number == 0
    }

    /// Goes on to a page of a block, and reports the blocks before it that all shares have read. Returns false if the
    /// page is no longer needed, because the task is stopped or an earlier page is missing.
    pub fn go_on_to(&self, block: u32, report: &LoopSender<Report>) -> bool {
        let mut progress = self.progress();
        progress.next[self.number] = block;
        self.report(&mut progress, BLOCKS_PER_REPORT, report);
        block < progress.end && !self.task.is_stopped.load(Ordering::Relaxed)
    }

    /// Keeps a part of the recurrent state. Parts have the same length.
    pub fn keep_state_part(&self, part: usize, rows: &[u8]) {
        let mut progress = self.progress();
        let at = part * rows.len();
        let len = progress.records.len().max(at + rows.len());
        progress.records.resize(len, 0);
        progress.records[at..at + rows.len()].copy_from_slice(rows);
    }

    /// Ends the share. If it is not whole, the block of its next page and all later blocks count as missing. The last
    /// share ends the task: it fills the snapshot by `write_state`, which returns whether the state can be used, and
    /// reports the end. Returns false when the loop has ended.
    pub fn end(
        self,
        is_whole: bool,
        report: &LoopSender<Report>,
        write_state: impl FnOnce(&[u8]) -> bool,
    ) -> bool {
        let mut progress = self.progress();
        if !is_whole {
            progress.end = progress.end.min(progress.next[self.number]);
        }
        let num_blocks = self.task.path.num_blocks();
        progress.next[self.number] = num_blocks;
        progress.num_left -= 1;
        if progress.num_left > 0 {
            return true;
        }
        if progress.end == num_blocks && self.task.state.is_some() {
            let records = std::mem::take(&mut progress.records);
            if !write_state(&records) {
                progress.end = num_blocks - 1;
            }
        }
        self.report(&mut progress, 0, report);
        let end = match progress.end == num_blocks {
            true => FetchEnd::Done,
            false => FetchEnd::Lost,
        };
        let ended = self.task.fetch.map(|id| Report::FetchEnded { id, end });
        ended.is_none_or(|ended| report.send(ended))
    }

    /// Reports the blocks that are read, if they are at least so many more than those reported. Reports are sent under
    /// the lock, so that they come in order.
    fn report(&self, progress: &mut Progress, least: u32, report: &LoopSender<Report>) {
        let next = progress.next.iter().copied().min();
        let next = next.unwrap_or(progress.end).min(progress.end);
        let num_blocks = next.saturating_sub(self.task.first);
        if let Some(id) = self.task.fetch
            && num_blocks >= progress.num_reported + least
        {
            progress.num_reported = num_blocks;
            report.send(Report::Fetched { id, num_blocks });
        }
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
