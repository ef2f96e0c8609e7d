//! Fetches blocks with random delays and faults.

use std::collections::BTreeMap;

use corella_core::{FetchEnd, FetchId, FetchMedium, FetchRequest, PageId, Scheduler};

use crate::executor::{CheckingExecutor, Row, in_group, root_row, rows_of};
use crate::random::Random;
use crate::simulation::totals::Totals;
use crate::workload::FetchPlan;

/// Writes the pages of fetches one by one, in any order, and checks the scheduler's promises about them: the executor
/// panics if a step reads or writes a page that is being written.
#[derive(Default)]
pub struct Fetcher {
    page_size: usize,
    random: Random,
    max_page_us: u64,
    writers: BTreeMap<FetchId, Writer>,
    num_begun: u64,
    num_cancelled: u64,
    num_part_grants: u64,
}

/// The writer of one fetch's pages.
struct Writer {
    /// The rows of the whole sequence.
    rows: Vec<Row>,
    first_block: u32,
    /// The incomplete pages, each with its group and block.
    left: Vec<(usize, u32, PageId)>,
    num_blocks: u32,
    is_cancelled: bool,
    /// Whether the writer writes nothing more, and waits to be stopped.
    is_stalled: bool,
}

impl Writer {
    /// Returns the number of whole blocks before the first incomplete one.
    fn num_whole(&self) -> u32 {
        let first_left = self.left.iter().map(|&(_, block, _)| block).min();
        first_left.unwrap_or(self.num_blocks) - self.first_block
    }
}

impl Fetcher {
    pub fn new(scheduler: &Scheduler, max_page_us: u64, seed: u64) -> Self {
        Self {
            page_size: scheduler.config().page_size as usize,
            random: Random(seed ^ 0xfe7c),
            max_page_us,
            ..Self::default()
        }
    }

    pub fn count(&self, totals: &mut Totals) {
        totals.num_fetches = self.num_begun;
        totals.num_cancelled_fetches = self.num_cancelled;
        totals.num_part_fetches = self.num_part_grants;
    }

    /// Asks the scheduler for pages. If it grants some, returns the fetch and the time until its writer acts.
    pub fn begin(
        &mut self,
        scheduler: &mut Scheduler,
        executor: &mut CheckingExecutor,
        plan: &FetchPlan,
        now_us: u64,
    ) -> Option<(FetchId, u64)> {
        let request = FetchRequest {
            medium: FetchMedium::Peer,
            namespace: plan.namespace.clone(),
            tokens: plan.tokens.clone(),
            soft_us: now_us + plan.soft_us,
            hard_us: now_us + plan.soft_us + plan.late_us,
        };
        let grant = scheduler.begin_fetch(request).ok()?;
        self.num_begun += 1;
        let num_blocks = grant.num_blocks;
        let num_asked = (plan.tokens.len() / self.page_size) as u32;
        self.num_part_grants += u64::from(num_blocks < num_asked);
        let mut left = Vec::new();
        for (group, table) in grant.tables.iter().enumerate() {
            for (&page, block) in table.pages.iter().zip(table.num_gone as u32..num_blocks) {
                left.push((group, block, page));
            }
        }
        for &(_, _, page) in &left {
            for at in 0..self.page_size {
                executor.write_row(page, at, None);
            }
        }
        let writer = Writer {
            rows: rows_of(root_row(&plan.namespace), &plan.tokens),
            first_block: grant.num_found,
            left,
            num_blocks,
            is_cancelled: false,
            is_stalled: false,
        };
        self.writers.insert(grant.id, writer);
        Some((grant.id, self.random.below(self.max_page_us + 1)))
    }

    /// Tells writers to stop. They stop at a later event.
    pub fn take_cancels(&mut self, scheduler: &mut Scheduler) {
        while let Some(id) = scheduler.poll_fetch_cancel() {
            let writer = self.writers.get_mut(&id);
            writer.expect("a cancelled fetch is under way").is_cancelled = true;
            self.num_cancelled += 1;
        }
    }

    /// Has one writer fill a page, stop or stall. Returns the time until it acts again, or `None` at its end.
    pub fn act(
        &mut self,
        id: FetchId,
        scheduler: &mut Scheduler,
        executor: &mut CheckingExecutor,
    ) -> Option<u64> {
        let random = &mut self.random;
        let writer = self.writers.get_mut(&id).expect("the writer is active");
        let stops = random.once_in(if writer.is_cancelled { 2 } else { 40 });
        if stops {
            return self.end(id, FetchEnd::Lost, scheduler);
        }
        writer.is_stalled |= random.once_in(40);
        if !writer.is_stalled && !writer.left.is_empty() {
            let near = writer.left.len().min(4) as u64;
            let at = random.below(near) as usize;
            let (group, block, page) = writer.left.remove(at);
            let first_row = block as usize * self.page_size;
            for at in 0..self.page_size {
                executor.write_row(page, at, in_group(writer.rows[first_row + at], group));
            }
        }
        if writer.left.is_empty() && random.once_in(2) {
            return self.end(id, FetchEnd::Done, scheduler);
        }
        if random.once_in(2) {
            let is_wanted = scheduler.handle_fetched(id, writer.num_whole());
            assert!(
                is_wanted || writer.is_cancelled || scheduler.poll_fetch_cancel() == Some(id),
                "fetch {id} is not wanted, and its writer was never told to stop"
            );
            if !is_wanted && !writer.is_cancelled {
                writer.is_cancelled = true;
                self.num_cancelled += 1;
            }
        }
        Some(1 + self.random.below(self.max_page_us + 1))
    }

    fn end(&mut self, id: FetchId, end: FetchEnd, scheduler: &mut Scheduler) -> Option<u64> {
        self.writers.remove(&id);
        let is_known = scheduler.handle_fetch_ended(id, end);
        assert!(is_known, "the scheduler has forgotten fetch {id}");
        None
    }
}
