//! The thread that reads blocks for fetches.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use corella_core::{BlockList, FetchEnd, FetchId};
use corella_model::{KvPages, PageForm};
use crossbeam_channel::Receiver;

use super::page_list::PathPage;
use super::page_store::Found;
use super::report::Report;
use super::tier::Tier;
use crate::wake::doorbell::LoopSender;

/// Pages to read.
pub(super) struct ReadTask {
    /// `None` if only the time of the read matters.
    pub fetch: Option<FetchId>,
    /// The path up to the last block of the task.
    pub list: BlockList,
    /// The number of blocks before the first block to read.
    pub first: u32,
    /// The pages to fill, in order of their blocks.
    pub pages: Vec<PathPage>,
    /// Set when the reader must write no further page.
    pub is_stopped: Arc<AtomicBool>,
}

impl ReadTask {
    fn num_blocks(&self) -> u32 {
        self.list.hashes.len() as u32 - self.first
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
    store.begin_path(&task.list.hashes);
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
        let is_stopped = task.is_stopped.load(Ordering::Relaxed);
        if is_stopped || !read_page(tier, pages, task, wanted, slot) {
            report_whole(num_whole);
            return num_whole;
        }
    }
    report_whole(task.num_blocks());
    task.num_blocks()
}

/// Returns false if the page is missing.
fn read_page(
    tier: &Tier,
    pages: &dyn KvPages,
    task: &ReadTask,
    wanted: &PathPage,
    slot: &mut [u8],
) -> bool {
    let Some(store) = tier.store() else {
        return false;
    };
    let rows = match store.read(&wanted.name(&task.list), slot) {
        Ok(Found::Rows(rows)) => rows,
        Ok(Found::Nothing) => return false,
        Ok(Found::Damaged) => {
            tier.counts.num_damaged.fetch_add(1, Ordering::Relaxed);
            return false;
        }
        Err(error) => {
            tier.switch_off("reading a page", &error);
            return false;
        }
    };
    if task.fetch.is_some() {
        let layers = rows.chunks(pages.geometry().layer_bytes());
        for (layer, rows) in (0..).zip(layers) {
            // SAFETY: the scheduler has reserved the page for this fetch, and keeps it from all others until the end
            // of the fetch is reported, or its block is.
            unsafe { pages.write(layer, &[wanted.page], PageForm::Native, rows) };
        }
        tier.counts.num_read.fetch_add(1, Ordering::Relaxed);
    }
    let num_bytes = store.slot_bytes() as u64;
    tier.counts
        .bytes_read
        .fetch_add(num_bytes, Ordering::Relaxed);
    true
}
