//! The thread that opens and scans the file, and then stores blocks. After an error it tries the disk again.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use corella_core::{BlockList, PageId};
use corella_model::{KvPages, PageForm};
use crossbeam_channel::{Receiver, RecvTimeoutError, bounded};

use super::report::Report;
use super::slot::BlockName;
use super::tier::Tier;
use crate::wake::doorbell::LoopSender;

/// Blocks that the loop holds until they are copied.
pub(super) struct WriteTask {
    /// The path up to the last block of the task.
    pub list: BlockList,
    /// The number of blocks before the first to store.
    pub first: u32,
    pub pages: Vec<PageId>,
    pub time: u64,
    pub epoch: u64,
}

/// After an error, the disk is tried again this much later.
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
        tier.open();
        // Blocks may have been offered meanwhile.
        report.doorbell().ring();
        let mut rows = Vec::new();
        let mut retry_after = RETRY_AFTER;
        loop {
            let task = match tasks.recv_timeout(retry_after) {
                Ok(task) => task,
                Err(RecvTimeoutError::Timeout) => {
                    if tier.try_again() {
                        // A disk that fails again and again is tried less often.
                        retry_after = LONGEST_RETRY.min(2 * retry_after);
                        report.doorbell().ring();
                    }
                    continue;
                }
                Err(RecvTimeoutError::Disconnected) => return,
            };
            copy(&*pages, &task.pages, &mut rows);
            let (is_valid, validity) = bounded(1);
            if !report.send(Report::Copied { is_valid }) {
                return;
            }
            let is_done = match validity.recv() {
                Ok(true) => write(&tier, &task, &rows),
                Ok(false) => false,
                Err(_) => return,
            };
            if !report.send(Report::Written { is_done }) {
                return;
            }
        }
    })
}

/// Copies pages, one after the other, each with its layers in order.
fn copy(pages: &dyn KvPages, held: &[PageId], rows: &mut Vec<u8>) {
    let geometry = pages.geometry();
    rows.resize(held.len() * geometry.page_bytes(), 0);
    let parts = rows.chunks_mut(geometry.page_bytes());
    for (&page, rows) in held.iter().zip(parts) {
        let layers = rows.chunks_mut(geometry.layer_bytes());
        for (layer, out) in (0..).zip(layers) {
            // SAFETY: the scheduler holds the pages until the copy is reported: they belong to published blocks that
            // returned steps have filled, and nothing writes to them.
            unsafe { pages.read(layer, &[page], PageForm::Native, out) };
        }
    }
}

pub(super) fn write(tier: &Tier, task: &WriteTask, rows: &[u8]) -> bool {
    let Some(store) = tier.store_to_write() else {
        return false;
    };
    let blocks: Vec<_> = names(&task.list).skip(task.first as usize).collect();
    match store.store(&blocks, rows, task.time, task.epoch) {
        Ok(num_stored) => {
            let num_bytes = u64::from(num_stored) * store.slot_bytes() as u64;
            let counts = &tier.counts;
            counts
                .num_stored
                .fetch_add(num_stored.into(), Ordering::Relaxed);
            counts.bytes_written.fetch_add(num_bytes, Ordering::Relaxed);
            num_stored > 0
        }
        Err(error) => {
            tier.switch_off("writing a block", &error);
            false
        }
    }
}

/// The names of the blocks of a list.
pub(super) fn names(list: &BlockList) -> impl Iterator<Item = BlockName<'_>> {
    let page_size = list.tokens.len() / list.hashes.len().max(1);
    let blocks = list.hashes.iter().zip(list.tokens.chunks(page_size.max(1)));
    let mut parent = None;
    (0..)
        .zip(blocks)
        .map(move |(depth, (&hash, tokens))| BlockName {
            hash,
            parent: parent.replace(hash),
            depth,
            tokens,
        })
}
