//! The thread that reads blocks for fetches.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use corella_core::{BlockList, FetchEnd, FetchId, PageId};
use corella_model::{KvPages, PageForm};
use crossbeam_channel::Receiver;

use super::block_store::Found;
use super::report::Report;
use super::tier::Tier;
use super::writer::names;
use crate::wake::doorbell::LoopSender;

/// Blocks to read.
pub(super) struct ReadTask {
    /// `None` if only the time of the read matters.
    pub fetch: Option<FetchId>,
    /// The path up to the last block of the task.
    pub list: BlockList,
    /// The number of blocks before the first to read.
    pub first: u32,
    /// The pages to fill, one for each block of a fetch.
    pub pages: Vec<PageId>,
    /// Set when no further page may be written.
    pub is_stopped: Arc<AtomicBool>,
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
            let num_read = read(&tier, &*pages, &task, &mut slot, &report);
            let elapsed_us = begun.elapsed().as_micros() as u64;
            let timed = Report::Timed {
                num_blocks: num_read,
                elapsed_us,
            };
            let ended = task.fetch.map(|id| {
                let end = match num_read as usize == task.pages.len() {
                    true => FetchEnd::Done,
                    false => FetchEnd::Lost,
                };
                Report::FetchEnded { id, end }
            });
            if !report.send(timed) || ended.is_some_and(|ended| !report.send(ended)) {
                return;
            }
        }
    })
}

/// Reads blocks in order, and fills their pages. Returns the number of blocks up to the first that is missing.
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
    let layer_bytes = pages.geometry().layer_bytes();
    let num_wanted = task.pages.len().max(1);
    let blocks = names(&task.list).skip(task.first as usize);
    let mut num_read = 0;
    for (at, block) in blocks.take(num_wanted).enumerate() {
        if task.is_stopped.load(Ordering::Relaxed) {
            break;
        }
        let rows = match store.read(&block, slot) {
            Ok(Found::Rows(rows)) => rows,
            Ok(Found::Nothing) => break,
            Ok(Found::Damaged) => {
                tier.counts.num_damaged.fetch_add(1, Ordering::Relaxed);
                break;
            }
            Err(error) => {
                tier.switch_off("reading a block", &error);
                break;
            }
        };
        if let Some(&page) = task.pages.get(at) {
            for (layer, rows) in (0..).zip(rows.chunks(layer_bytes)) {
                // SAFETY: the scheduler has reserved the page for this fetch, and keeps it from all others until the
                // end of the fetch is reported, or its block is.
                unsafe { pages.write(layer, &[page], PageForm::Native, rows) };
            }
        }
        num_read += 1;
        let num_bytes = slot.len() as u64;
        tier.counts
            .num_read
            .fetch_add(u64::from(task.fetch.is_some()), Ordering::Relaxed);
        tier.counts
            .bytes_read
            .fetch_add(num_bytes, Ordering::Relaxed);
        if let Some(id) = task.fetch
            && num_read % BLOCKS_PER_REPORT == 0
        {
            report.send(Report::Fetched {
                id,
                num_blocks: num_read,
            });
        }
    }
    // The blocks that were read before the loss are whole.
    if let Some(id) = task.fetch {
        report.send(Report::Fetched {
            id,
            num_blocks: num_read,
        });
    }
    num_read
}
