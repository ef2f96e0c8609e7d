//! Host memory for the rows of spilled requests, with random delays and faults.

use std::collections::{BTreeMap, VecDeque};

use corella_core::{PageId, RequestId, Scheduler, SpillTask};

use crate::executor::{CheckingExecutor, Row};
use crate::random::Random;

/// Makes one copy after the other, as the engine does, and checks the scheduler's promises about pages that are being
/// copied.
#[derive(Default)]
pub struct HostMemory {
    page_size: usize,
    max_pages: usize,
    max_copy_us: u64,
    fails_once_in: u64,
    random: Random,
    stored: BTreeMap<RequestId, Vec<Vec<Row>>>,
    /// Copies to make. The first is running if `is_copying`.
    tasks: VecDeque<SpillTask>,
    is_copying: bool,
    /// The rows of the pages that are being stored, as they were when the copy began.
    source: Vec<Vec<Row>>,
    /// Requests whose rows were restored and that have no slot yet, with the filled pages.
    restored: BTreeMap<RequestId, Vec<PageId>>,
    num_failed: u64,
}

impl HostMemory {
    pub fn new(scheduler: &Scheduler, max_copy_us: u64, fails_once_in: u64, seed: u64) -> Self {
        let config = scheduler.config();
        Self {
            page_size: config.page_size as usize,
            max_pages: config.max_spilled_pages as usize,
            max_copy_us,
            fails_once_in,
            random: Random(seed ^ 0x0570),
            ..Self::default()
        }
    }

    pub fn num_failed(&self) -> u64 {
        self.num_failed
    }

    /// Returns whether a request that starts with these pages continues after restored rows. Returns false if the
    /// request lost those pages again before this start, and `None` if no page was filled, because the prefix cache had
    /// all of them.
    pub fn take_restored(&mut self, request: RequestId, table: &[PageId]) -> Option<bool> {
        let Some(pages) = self.restored.remove(&request) else {
            return Some(false);
        };
        (!pages.is_empty()).then(|| pages.iter().all(|page| table.contains(page)))
    }

    /// Returns whether no rows are stored and no copies are left.
    pub fn is_empty(&self) -> bool {
        self.stored.is_empty() && self.tasks.is_empty()
    }

    /// Takes the scheduler's new tasks. If a copy begins, returns how long it takes.
    pub fn begin_copy(
        &mut self,
        scheduler: &mut Scheduler,
        executor: &mut CheckingExecutor,
    ) -> Option<u64> {
        while let Some(task) = scheduler.poll_spill_task() {
            self.tasks.push_back(task);
        }
        while !self.is_copying
            && let Some(SpillTask::Discard { request }) = self.tasks.front()
        {
            self.stored.remove(request);
            self.tasks.pop_front();
        }
        if self.is_copying {
            return None;
        }
        match self.tasks.front()? {
            SpillTask::Store { pages, .. } => self.source = self.read(pages, executor),
            SpillTask::Restore { pages, .. } => {
                // A failed copy leaves wrong rows behind.
                for &(_, page) in pages {
                    for at in 0..self.page_size / 2 {
                        executor.write_row(page, at, None);
                    }
                }
            }
            SpillTask::Discard { .. } => {}
        }
        self.is_copying = true;
        Some(self.random.below(self.max_copy_us + 1))
    }

    pub fn end_copy(&mut self, scheduler: &mut Scheduler, executor: &mut CheckingExecutor) {
        self.is_copying = false;
        let task = self
            .tasks
            .pop_front()
            .expect("only a copy that has begun ends");
        let is_done = self.fails_once_in == 0 || !self.random.once_in(self.fails_once_in);
        self.num_failed += u64::from(!is_done);
        let is_known = match task {
            SpillTask::Store { request, pages } => {
                self.restored.remove(&request);
                let rows = self.read(&pages, executor);
                let before = self.source.iter().flatten();
                // Undefined rows are never restored.
                let is_same = |(now, before): (&Row, &Row)| now == before || now.is_none();
                assert!(
                    rows.iter().flatten().zip(before).all(is_same),
                    "pages of request {request} change while they are stored"
                );
                if is_done {
                    let earlier = self.stored.insert(request, rows);
                    assert!(earlier.is_none(), "request {request} is stored twice");
                }
                let num_pages: usize = self.stored.values().map(Vec::len).sum();
                assert!(
                    num_pages <= self.max_pages,
                    "{num_pages} pages are in host memory, which has room for {}",
                    self.max_pages
                );
                scheduler.handle_stored(request, is_done)
            }
            SpillTask::Restore { request, pages } => {
                let rows = self.stored.remove(&request);
                let rows = rows.expect("a restored request was stored before");
                for &(number, page) in &pages {
                    let rows = rows[number as usize].iter().enumerate();
                    for (at, &row) in rows.filter(|_| is_done) {
                        executor.write_row(page, at, row);
                    }
                }
                let num_restores = scheduler.stats().num_restores;
                let is_known = scheduler.handle_restored(request, is_done);
                // The request may have ended, or started over, meanwhile.
                if scheduler.stats().num_restores > num_restores {
                    let pages = pages.into_iter().map(|(_, page)| page);
                    self.restored.insert(request, pages.collect());
                }
                is_known
            }
            SpillTask::Discard { .. } => unreachable!("a discard is no copy"),
        };
        assert!(is_known, "the scheduler has forgotten a copy");
    }

    fn read(&self, pages: &[PageId], executor: &CheckingExecutor) -> Vec<Vec<Row>> {
        let page = |&page| {
            let rows = (0..self.page_size).map(|at| executor.read_row(page, at));
            rows.collect()
        };
        pages.iter().map(page).collect()
    }
}
