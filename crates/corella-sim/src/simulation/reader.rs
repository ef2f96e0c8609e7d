//! Reads held blocks like another node's load, and checks the scheduler's promises about held pages.

use std::collections::BTreeMap;

use corella_core::{BlockList, HoldId, PageId, Scheduler};

use crate::executor::{CheckingExecutor, Row, in_group, root_row, rows_of};
use crate::random::Random;
use crate::simulation::totals::Totals;
use crate::workload::FetchPlan;

pub struct Reader {
    page_size: usize,
    random: Random,
    max_hold_us: u64,
    /// Whether computed rows may become undefined later.
    may_be_undefined: bool,
    readers: BTreeMap<HoldId, Reading>,
    num_begun: u64,
    num_ended: u64,
}

/// One load.
struct Reading {
    rows: Vec<Row>,
    /// The pages to read, each with its group and its block.
    pages: Vec<(usize, usize, PageId)>,
    until_us: u64,
    has_ended: bool,
}

impl Reader {
    pub fn new(scheduler: &Scheduler, max_hold_us: u64, may_be_undefined: bool, seed: u64) -> Self {
        Self {
            page_size: scheduler.config().page_size as usize,
            random: Random(seed ^ 0x4ead),
            max_hold_us,
            may_be_undefined,
            readers: BTreeMap::new(),
            num_begun: 0,
            num_ended: 0,
        }
    }

    pub fn count(&self, totals: &mut Totals) {
        totals.num_holds = self.num_begun;
        totals.num_ended_holds = self.num_ended;
    }

    /// Begins to read a sequence. Its last tokens may not match its last hashes. If the scheduler holds some of its
    /// blocks, returns the hold and the time until its reader acts.
    pub fn begin(
        &mut self,
        scheduler: &mut Scheduler,
        executor: &CheckingExecutor,
        plan: &FetchPlan,
        now_us: u64,
    ) -> Option<(HoldId, u64)> {
        let config = scheduler.config();
        let (hasher, page_size) = (config.block_hasher, config.page_size);
        let (namespace, tokens) = (plan.namespace.clone(), plan.tokens.clone());
        let mut list = BlockList::new(namespace, tokens, &hasher, page_size);
        if self.random.once_in(8)
            && let Some(token) = list.tokens.last_mut()
        {
            *token += 1;
        }
        let first_block = match self.random.once_in(2) {
            true => self.random.below(list.hashes.len() as u64 + 1) as u32,
            false => 0,
        };
        let num_lendable = scheduler.look_up_lendable(&list, first_block);
        let until_us = now_us + 1 + self.random.below(self.max_hold_us + 1);
        let num_lent = scheduler.stats().num_served_pages;
        let held = scheduler.hold_blocks(&list, first_block, until_us).ok()?;
        assert_eq!(held.num_blocks, num_lendable, "a lookup and a hold differ");
        let num_pages: usize = held.tables.iter().map(|table| table.pages.len()).sum();
        let num_lent_then = scheduler.stats().num_served_pages;
        assert_eq!(num_lent_then, num_lent + num_pages, "lent pages");
        let limit = scheduler.config().max_served_pages as usize;
        assert!(
            num_lent_then <= limit,
            "more pages are lent than the limit allows"
        );
        let mut pages = Vec::new();
        for (group, table) in held.tables.iter().enumerate() {
            assert_eq!(table.len(), held.num_blocks as usize);
            assert!(
                table.num_gone >= first_block as usize,
                "a lent block is already on the loading node"
            );
            let blocks = table.num_gone..table.len();
            let in_group = blocks.zip(&table.pages);
            pages.extend(in_group.map(|(block, &page)| (group, block, page)));
        }
        let reading = Reading {
            rows: rows_of(root_row(&list.namespace), &list.tokens),
            pages,
            until_us,
            has_ended: false,
        };
        self.check(&reading, executor);
        self.readers.insert(held.id, reading);
        self.num_begun += 1;
        Some((held.id, self.random.below(self.max_hold_us + 1)))
    }

    /// Tells readers to stop. They stop at a later event.
    pub fn take_ended(&mut self, scheduler: &mut Scheduler) {
        while let Some(id) = scheduler.poll_ended_hold() {
            let reading = self.readers.get_mut(&id).expect("the hold has a reader");
            assert!(!reading.has_ended, "hold {id} ends twice");
            reading.has_ended = true;
            self.num_ended += 1;
        }
    }

    /// Handles the end of a reader, which has read everything or was stopped.
    pub fn end(
        &mut self,
        id: HoldId,
        scheduler: &mut Scheduler,
        executor: &CheckingExecutor,
        now_us: u64,
    ) {
        let reading = self.readers.remove(&id).expect("the reader is active");
        self.check(&reading, executor);
        let has_lived = scheduler.release_blocks(id, now_us);
        let is_over = reading.has_ended || reading.until_us <= now_us;
        let is_in_time = has_lived == Some(true) && !is_over;
        assert!(
            is_in_time || has_lived == Some(false),
            "hold {id} is {has_lived:?} at its end"
        );
        assert_eq!(scheduler.release_blocks(id, now_us), None);
    }

    /// Reads and checks all pages, as a reader may at any time until it has stopped.
    fn check(&self, reading: &Reading, executor: &CheckingExecutor) {
        for &(group, block, page) in &reading.pages {
            for at in 0..self.page_size {
                let expected = in_group(reading.rows[block * self.page_size + at], group);
                let found = executor.read_row(page, at);
                let is_undefined = self.may_be_undefined && found.is_none();
                assert!(
                    found == expected || is_undefined,
                    "page {page} of a hold has other rows than block {block} in group {group}"
                );
            }
        }
    }
}
