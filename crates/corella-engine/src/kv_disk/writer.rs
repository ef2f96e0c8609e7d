//! The thread that opens and scans the file, and then stores blocks. After an error it tries the disk again.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use corella_core::BlockList;
use corella_model::{KvPages, PageForm};
use crossbeam_channel::{Receiver, RecvTimeoutError, bounded};

use super::page_list::PathPage;
use super::report::Report;
use super::slot::PageName;
use super::tier::Tier;
use crate::wake::doorbell::LoopSender;

/// Pages that the loop holds until they are copied.
pub(super) struct WriteTask {
    /// The path up to the last held block.
    pub list: BlockList,
    pub pages: Vec<PathPage>,
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
        tier.open();
        // Blocks may have been offered during the scan.
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
fn copy(pages: &dyn KvPages, held: &[PathPage], rows: &mut Vec<u8>) {
    let geometry = pages.geometry();
    rows.resize(held.len() * geometry.page_bytes(), 0);
    let parts = rows.chunks_mut(geometry.page_bytes());
    for (held, rows) in held.iter().zip(parts) {
        let layers = rows.chunks_mut(geometry.layer_bytes());
        for (layer, out) in (0..).zip(layers) {
            // SAFETY: the scheduler holds the pages until the copy is reported: they belong to published blocks that
            // returned steps have filled, and nothing writes to them.
            unsafe { pages.read(layer, &[held.page], PageForm::Native, out) };
        }
    }
}

pub(super) fn write(tier: &Tier, task: &WriteTask, rows: &[u8]) -> bool {
    let Some(store) = tier.store_to_write() else {
        return false;
    };
    let names: Vec<PageName> = task
        .pages
        .iter()
        .map(|page| page.name(&task.list))
        .collect();
    match store.store(&names, rows, task.time, task.epoch) {
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
            tier.switch_off("writing a page", &error);
            false
        }
    }
}
