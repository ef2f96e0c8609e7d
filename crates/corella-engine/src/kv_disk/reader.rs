//! The thread that reads blocks for fetches.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use corella_core::{FetchEnd, FetchId, SnapshotId};
use corella_model::{KvPages, PageForm};
use crossbeam_channel::Receiver;

use super::page_list::{DiskPath, PathPage};
use super::page_store::Found;
use super::report::{DeathReport, Report};
use super::slot::PageName;
use super::tier::Tier;
use crate::wake::doorbell::LoopSender;

/// Pages to read.
pub(super) struct ReadTask {
    /// `None` if only the time of the read matters.
    pub fetch: Option<FetchId>,
    /// The path up to the last block of the task.
    pub path: DiskPath,
    /// The number of blocks before the first block to read.
    pub first: u32,
    /// The pages to fill, in order of their blocks.
    pub pages: Vec<PathPage>,
    /// The snapshot to fill with the recurrent state after the path.
    pub state: Option<SnapshotId>,
    /// Set when the reader must write no further page.
    pub is_stopped: Arc<AtomicBool>,
}

impl ReadTask {
    fn num_blocks(&self) -> u32 {
        self.path.num_blocks() - self.first
    }
}

/// The number of blocks between two reports to the loop.
const BLOCKS_PER_REPORT: u32 = 32;

pub(super) fn start(
    tier: Arc<Tier>,
    pages: Arc<dyn KvPages>,
    tasks: Receiver<ReadTask>,
    report: LoopSender<Report>,
) -> io::Result<JoinHandle<()>> {
    let thread = thread::Builder::new().name("corella-kv-read".to_owned());
    thread.spawn(move || {
        let _death = DeathReport::new(&report, Report::ReaderDied);
        let mut slot = Vec::new();
        while let Ok(task) = tasks.recv() {
            let begun = Instant::now();
            let num_whole = read(&tier, &*pages, &task, &mut slot, &report);
            let elapsed_us = begun.elapsed().as_micros() as u64;
            let timed = Report::Timed {
                num_blocks: num_whole,
                elapsed_us,
            };
            let is_done = num_whole == task.num_blocks();
            let ended = task.fetch.map(|id| Report::FetchEnded {
                id,
                end: match is_done {
                    true => FetchEnd::Done,
                    false => FetchEnd::Lost,
                },
            });
            if !report.send(timed) || ended.is_some_and(|ended| !report.send(ended)) {
                return;
            }
        }
    })
}

/// Reads the pages of blocks in order. Returns the number of blocks before the first page that is missing.
fn read(
    tier: &Tier,
    pages: &dyn KvPages,
    task: &ReadTask,
    slot: &mut Vec<u8>,
    report: &LoopSender<Report>,
) -> u32 {
    let Some(store) = tier.store() else {
        return 0;
    };
    slot.resize(store.slot_bytes(), 0);
    store.begin_path(&task.path.hashes);
    let report_whole = |num_blocks| {
        if let Some(id) = task.fetch {
            report.send(Report::Fetched { id, num_blocks });
        }
    };
    let mut num_reported = 0;
    for wanted in &task.pages {
        let num_whole = wanted.block - task.first;
        if num_whole >= num_reported + BLOCKS_PER_REPORT {
            report_whole(num_whole);
            num_reported = num_whole;
        }
        if !read_page(tier, pages, task, wanted, slot) {
            report_whole(num_whole);
            return num_whole;
        }
    }
    let is_whole = match task.state {
        Some(state) => read_state(tier, pages, task, state, slot),
        None => true,
    };
    let num_whole = task.num_blocks() - u32::from(!is_whole);
    report_whole(num_whole);
    num_whole
}

/// Returns false if the page is missing.
fn read_page(
    tier: &Tier,
    pages: &dyn KvPages,
    task: &ReadTask,
    wanted: &PathPage,
    slot: &mut [u8],
) -> bool {
    let Some(rows) = read_rows(tier, task, &wanted.name(&task.path), slot) else {
        return false;
    };
    if task.fetch.is_some() {
        let layers = rows.chunks(pages.geometry().layer_bytes());
        for (layer, rows) in (0..).zip(layers) {
            // SAFETY: the scheduler has reserved the page for this fetch, and keeps it from all others until the page's
            // block or the end of the fetch is reported.
            unsafe { pages.write(layer, &[wanted.page], PageForm::Native, rows) };
        }
    }
    true
}

/// Reads the recurrent state after the path. Returns false if a part is missing.
fn read_state(
    tier: &Tier,
    pages: &dyn KvPages,
    task: &ReadTask,
    state: SnapshotId,
    slot: &mut [u8],
) -> bool {
    let (Some(store), Some(states)) = (tier.store(), pages.states()) else {
        return false;
    };
    let mut records = Vec::new();
    let path = &task.path;
    for name in path.state_names(store.state_groups(path.num_blocks())) {
        match read_rows(tier, task, &name, slot) {
            Some(rows) => records.extend_from_slice(rows),
            None => return false,
        }
    }
    let num_tokens = path.list.tokens.len() as u32;
    let mut records = &records[..];
    for layer in 0..states.num_layers() {
        let (record, rest) = records.split_at(states.num_bytes(layer, num_tokens));
        if let Err(error) = states.write(layer, state, num_tokens, record) {
            tracing::warn!(%error, "a recurrent state on the disk cannot be used");
            return false;
        }
        records = rest;
    }
    true
}

/// Reads the rows of a page. `None` if they are missing, or the task is stopped.
fn read_rows<'a>(
    tier: &Tier,
    task: &ReadTask,
    name: &PageName,
    slot: &'a mut [u8],
) -> Option<&'a [u8]> {
    if task.is_stopped.load(Ordering::Relaxed) {
        return None;
    }
    let (store, counts) = (tier.store()?, &tier.counts);
    match store.read(name, slot) {
        Ok(Found::Rows(rows)) => {
            let num_read = u64::from(task.fetch.is_some());
            counts.num_read.fetch_add(num_read, Ordering::Relaxed);
            let num_bytes = store.slot_bytes() as u64;
            counts.bytes_read.fetch_add(num_bytes, Ordering::Relaxed);
            Some(rows)
        }
        Ok(Found::Nothing) => None,
        Ok(Found::Damaged) => {
            counts.num_damaged.fetch_add(1, Ordering::Relaxed);
            None
        }
        Err(error) => {
            tier.switch_off("reading a page", &error);
            None
        }
    }
}
