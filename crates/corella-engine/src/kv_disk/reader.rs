//! The threads that read blocks for fetches, one for each disk.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle};
use std::time::Instant;

use corella_model::KvPages;
use crossbeam_channel::Receiver;

use super::page_list::PathPage;
use super::page_store::Found;
use super::read_task::{ReadShare, ReadTask};
use super::report::Report;
use super::slot::PageName;
use super::tier::Tier;
use crate::wake::doorbell::LoopSender;

pub(super) fn start(
    disk: usize,
    tier: Arc<Tier>,
    pages: Arc<dyn KvPages>,
    shares: Receiver<ReadShare>,
    report: LoopSender<Report>,
) -> io::Result<JoinHandle<()>> {
    let thread = thread::Builder::new().name(format!("corella-kv-read-{disk}"));
    thread.spawn(move || {
        let mut slot = Vec::new();
        while let Ok(share) = shares.recv() {
            let begun = Instant::now();
            let mut num_pages = 0;
            // Each share ends, because the pages of a fetch are in use until all its shares have ended.
            let is_whole = guarded(&tier, || {
                read(&tier, &*pages, &share, &mut slot, &report, &mut num_pages)
            });
            let elapsed_us = begun.elapsed().as_micros() as u64;
            let timed = Report::Timed {
                disk,
                num_pages,
                elapsed_us,
            };
            let task = share.task.clone();
            let write_state =
                |records: &[u8]| guarded(&tier, || write_state(&*pages, &task, records));
            if !report.send(timed) || !share.end(is_whole, &report, write_state) {
                return;
            }
        }
    })
}

/// Returns false if the work panics. The tier is then off.
fn guarded(tier: &Tier, work: impl FnOnce() -> bool) -> bool {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| {
        tier.give_up();
        false
    })
}

/// The number of pages that a disk reads while the thread checks and copies the page before them.
const PAGES_AHEAD: usize = 2;

/// Reads the pages of a share in order. Returns false if one of them is missing.
fn read(
    tier: &Tier,
    pages: &dyn KvPages,
    share: &ReadShare,
    slot: &mut Vec<u8>,
    report: &LoopSender<Report>,
    num_pages: &mut u32,
) -> bool {
    let Some(store) = tier.store() else {
        return false;
    };
    slot.resize(store.slot_bytes(), 0);
    if share.is_first() {
        store.begin_path(&share.task.path.hashes);
    }
    let mut ahead = share.pages.iter().skip(1);
    for wanted in &share.pages {
        if !share.go_on_to(wanted.block, report) {
            return false;
        }
        let num_ahead = if *num_pages == 0 { PAGES_AHEAD } else { 1 };
        for next in ahead.by_ref().take(num_ahead) {
            store.read_ahead(next.name(&share.task.path).key);
        }
        if !read_page(tier, pages, share, wanted, slot) {
            return false;
        }
        *num_pages += 1;
    }
    true
}

/// Returns false if the page is missing.
fn read_page(
    tier: &Tier,
    pages: &dyn KvPages,
    share: &ReadShare,
    wanted: &PathPage,
    slot: &mut [u8],
) -> bool {
    let task = &share.task;
    let Some(rows) = read_rows(tier, task, &wanted.name(&task.path), slot) else {
        return false;
    };
    if task.fetch.is_none() {
        return true;
    }
    let num_groups = pages.geometry().layers.groups().len();
    if let Some(part) = (wanted.group as usize).checked_sub(num_groups) {
        share.keep_state_part(part, rows);
        return true;
    }
    // SAFETY: the scheduler has reserved the page for this fetch, and keeps it from all others until the page's block
    // or the end of the fetch is reported. The end is reported after this share has ended.
    unsafe { pages.write_whole(&[wanted.page], rows) };
    true
}

/// Fills the snapshot of a task. Returns false if the state cannot be used.
fn write_state(pages: &dyn KvPages, task: &ReadTask, mut records: &[u8]) -> bool {
    let (Some(state), Some(states)) = (task.state, pages.states()) else {
        return false;
    };
    let num_tokens = task.path.list.tokens.len() as u32;
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

/// Reads the rows of a page. `None` if they are missing.
fn read_rows<'a>(
    tier: &Tier,
    task: &ReadTask,
    name: &PageName,
    slot: &'a mut [u8],
) -> Option<&'a [u8]> {
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
        Err(failed) => {
            tier.switch_off("reading a page", failed);
            None
        }
    }
}
