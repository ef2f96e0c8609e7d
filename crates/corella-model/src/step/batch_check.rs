//! Rules of batches for any executor: no write reaches rows that an unfinished step reads, and no two parts of a step
//! write the same rows. The mock executor and the simulator's executor check every batch.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use corella_core::{Batch, KvGroup, KvGroupId, PageId, SlotId, Span, StateSnapshot, StepId};

/// The claims of the batches so far, and the steps that have not returned.
pub struct BatchCheck {
    page_size: usize,
    groups: Vec<KvGroup>,
    num_starts: u64,
    slots: BTreeMap<SlotId, Tenancy>,
    unfinished: VecDeque<UnfinishedStep>,
}

/// A request's use of a slot, from the slot's start to its release.
struct Tenancy {
    /// The index of this start among all starts of slots.
    start: u64,
    /// The page table of each KV group. Entries that were never given are `None`.
    tables: BTreeMap<KvGroupId, Vec<Option<PageId>>>,
}

/// The pages that a step names until it returns.
struct UnfinishedStep {
    step: StepId,
    slots: BTreeSet<SlotId>,
    /// The pages that the step's spans read, each with the index of the slot's start.
    pages: BTreeSet<(PageId, u64)>,
    /// The pages from which the step copies rows.
    sources: BTreeSet<PageId>,
}

impl BatchCheck {
    pub fn new(page_size: u32, groups: &[KvGroup]) -> Self {
        Self {
            page_size: page_size as usize,
            groups: groups.to_vec(),
            num_starts: 0,
            slots: BTreeMap::new(),
            unfinished: VecDeque::new(),
        }
    }

    /// Records a batch and returns the first broken rule. Other impossible batches, such as one with a slot that was
    /// never started, are left to the executor.
    pub fn submit(&mut self, batch: &Batch) -> Result<(), String> {
        let released = self.check_released(batch);
        self.apply(batch);
        let result = released
            .and_then(|()| self.check_copies(batch))
            .and_then(|()| self.check_spans(batch))
            .and_then(|()| check_snapshots(batch));
        let read = batch.spans.iter().filter_map(|span| {
            let slot = self.slots.get(&span.slot)?;
            Some(self.pages_read(span, slot).map(|page| (page, slot.start)))
        });
        let step = UnfinishedStep {
            step: batch.step,
            slots: batch.spans.iter().map(|span| span.slot).collect(),
            pages: read.flatten().collect(),
            sources: batch.copies.iter().map(|copy| copy.from).collect(),
        };
        self.unfinished.push_back(step);
        result
    }

    /// Records that the oldest step has returned.
    pub fn end_step(&mut self) {
        self.unfinished.pop_front();
    }

    /// Checks that a page may be written outside of a step.
    pub fn check_write(&self, page: PageId) -> Result<(), String> {
        self.check_fence(page, None)
    }

    fn apply(&mut self, batch: &Batch) {
        for slot in &batch.released {
            self.slots.remove(slot);
        }
        for start in &batch.started {
            let tenancy = Tenancy {
                start: self.num_starts,
                tables: BTreeMap::new(),
            };
            self.num_starts += 1;
            self.slots.insert(start.slot, tenancy);
        }
        for delta in &batch.tables {
            let Some(slot) = self.slots.get_mut(&delta.slot) else {
                continue;
            };
            let table = slot.tables.entry(delta.group).or_default();
            for (entry, &page) in (delta.first as usize..).zip(batch.delta_pages(delta)) {
                if entry >= table.len() {
                    table.resize(entry + 1, None);
                }
                table[entry] = Some(page);
            }
        }
    }

    fn check_released(&self, batch: &Batch) -> Result<(), String> {
        for slot in &batch.released {
            if let Some(step) = self
                .unfinished
                .iter()
                .find(|step| step.slots.contains(slot))
            {
                let step = step.step;
                return Err(format!(
                    "slot {slot} is released while step {step} names it"
                ));
            }
        }
        Ok(())
    }

    fn check_copies(&self, batch: &Batch) -> Result<(), String> {
        let sources: BTreeSet<_> = batch.copies.iter().map(|copy| copy.from).collect();
        let mut targets = BTreeSet::new();
        for copy in &batch.copies {
            let page = copy.to;
            if !targets.insert(page) {
                return Err(format!("two copies go into page {page}"));
            }
            if sources.contains(&page) {
                return Err(format!("page {page} is both source and target of copies"));
            }
            self.check_fence(page, None)?;
        }
        Ok(())
    }

    fn check_spans(&self, batch: &Batch) -> Result<(), String> {
        let (mut slots, mut written) = (BTreeSet::new(), BTreeSet::new());
        for span in &batch.spans {
            if !slots.insert(span.slot) {
                return Err(format!("two spans are of slot {}", span.slot));
            }
            let Some(slot) = self.slots.get(&span.slot) else {
                continue;
            };
            for table in slot.tables.values() {
                let mut last_page = None;
                for position in positions(span) {
                    let entry = table.get(position / self.page_size);
                    let Some(page) = entry.copied().flatten() else {
                        continue;
                    };
                    let row = position % self.page_size;
                    if !written.insert((page, row)) {
                        return Err(format!("two spans write row {row} of page {page}"));
                    }
                    if last_page.replace(page) != Some(page) {
                        self.check_fence(page, Some(slot.start))?;
                    }
                }
            }
        }
        Ok(())
    }

    /// The pages that a span reads: in each group, the pages within its window.
    fn pages_read<'a>(
        &'a self,
        span: &Span,
        slot: &'a Tenancy,
    ) -> impl Iterator<Item = PageId> + 'a {
        let (start, page_size) = (span.start, self.page_size as u32);
        slot.tables.iter().flat_map(move |(group, table)| {
            let group = self.groups.get(group.0 as usize).copied();
            let first = group.unwrap_or_default().first_page_read(start, page_size);
            table.iter().skip(first as usize).copied().flatten()
        })
    }

    /// Checks that no unfinished step reads a page that is written, except for the spans of the writer itself.
    fn check_fence(&self, page: PageId, writer: Option<u64>) -> Result<(), String> {
        for step in &self.unfinished {
            let mut readers = step.pages.range((page, 0)..=(page, u64::MAX));
            if readers.any(|&(_, start)| Some(start) != writer) || step.sources.contains(&page) {
                let step = step.step;
                return Err(format!("page {page} is written while step {step} reads it"));
            }
        }
        Ok(())
    }
}

/// A step takes each snapshot once, after a span without drafts.
fn check_snapshots(batch: &Batch) -> Result<(), String> {
    let mut taken = BTreeSet::new();
    for &StateSnapshot { slot, to } in &batch.snapshots {
        if !taken.insert(to) {
            return Err(format!("two states go into snapshot {to}"));
        }
        let mut spans = batch.spans.iter();
        if !spans.any(|span| span.slot == slot && span.num_drafts == 0) {
            return Err(format!(
                "snapshot {to} is of slot {slot}, which has no span, or drafts in it"
            ));
        }
    }
    Ok(())
}

fn positions(span: &Span) -> impl Iterator<Item = usize> + use<> {
    let start = span.start as usize;
    start..start + span.tokens.len()
}

#[cfg(test)]
mod tests {
    use corella_core::SamplingParams;

    use super::*;
    use crate::BatchBuilder;

    const GREEDY: SamplingParams = SamplingParams::GREEDY;

    /// Two unfinished steps, each of one slot. The slots share page 0, and each has one other page.
    fn two_steps() -> (BatchCheck, BatchBuilder) {
        let mut check = BatchCheck::new(4, &[KvGroup::default()]);
        let mut batch = BatchBuilder::new(0);
        for slot in [0, 1] {
            batch
                .start_cached(slot, 6, &GREEDY, &[1, 2, 3, 4])
                .pages(slot, 0, &[0, 1 + slot])
                .span(slot, 4, &[5, 6], true);
            check.submit(&batch.build()).unwrap();
        }
        (check, batch)
    }

    #[test]
    fn what_unfinished_steps_read_is_not_written() {
        type Build = fn(&mut BatchBuilder) -> &mut BatchBuilder;
        let cases: [(Build, &str); 12] = [
            (|b| b.release(0), "slot 0 is released while step 0 names it"),
            (
                |b| {
                    b.start(2, 3, &GREEDY)
                        .pages(2, 0, &[1])
                        .span(2, 0, &[7], true)
                },
                "page 1 is written while step 0 reads it",
            ),
            (
                |b| {
                    b.start(2, 3, &GREEDY)
                        .pages(2, 0, &[2])
                        .span(2, 0, &[7], true)
                },
                "page 2 is written while step 1 reads it",
            ),
            (
                |b| b.copy(3, 0, 2),
                "page 0 is written while step 0 reads it",
            ),
            (
                |b| b.copy(3, 4, 1).copy(5, 4, 1),
                "two copies go into page 4",
            ),
            (
                |b| b.copy(3, 4, 1).copy(4, 5, 1),
                "page 4 is both source and target of copies",
            ),
            (
                |b| b.span(0, 6, &[7], true).span(0, 7, &[8], true),
                "two spans are of slot 0",
            ),
            (
                |b| {
                    b.start(2, 3, &GREEDY)
                        .pages(2, 0, &[3])
                        .span(2, 0, &[7, 8], true);
                    b.start(3, 3, &GREEDY)
                        .pages(3, 0, &[3])
                        .span(3, 1, &[7], true)
                },
                "two spans write row 1 of page 3",
            ),
            (
                |b| b.keep_state(0, 5),
                "snapshot 5 is of slot 0, which has no span, or drafts in it",
            ),
            (
                |b| b.span_with_drafts(0, 6, &[7], &[8]).keep_state(0, 5),
                "snapshot 5 is of slot 0, which has no span, or drafts in it",
            ),
            (
                |b| {
                    b.span(0, 6, &[7], true).span(1, 6, &[7], true);
                    b.keep_state(0, 5).keep_state(1, 5)
                },
                "two states go into snapshot 5",
            ),
            // Slot 0 writes to a page that is in the tables of both slots. Step 1 reads it for slot 1.
            (
                |b| b.pages(0, 1, &[2]).span(0, 6, &[7], true),
                "page 2 is written while step 1 reads it",
            ),
        ];
        for (build, reason) in cases {
            let (mut check, mut batch) = two_steps();
            let result = check.submit(&build(&mut batch).build());
            assert_eq!(result.unwrap_err(), reason);
        }
    }

    #[test]
    fn a_slot_goes_on_writing_and_others_may_once_the_step_has_returned() {
        let (mut check, mut batch) = two_steps();
        batch.span(0, 6, &[7], true).copy(1, 4, 2);
        check.submit(&batch.build()).unwrap();
        assert!(check.check_write(PageId(1)).is_err());
        assert!(check.check_write(PageId(4)).is_ok());
        // Slot 1 is in the second step only, and page 1 in the first and the third.
        check.end_step();
        check.end_step();
        assert!(check.check_write(PageId(2)).is_ok());
        assert!(check.check_write(PageId(1)).is_err());
        batch.release(1).start(1, 3, &GREEDY);
        batch.pages(1, 0, &[2]).span(1, 0, &[1], true);
        check.submit(&batch.build()).unwrap();
        check.end_step();
        assert!(check.check_write(PageId(1)).is_ok());
    }

    #[test]
    fn pages_behind_a_window_are_anybodys() {
        let groups = [KvGroup { window: Some(3) }];
        let mut check = BatchCheck::new(4, &groups);
        let mut batch = BatchBuilder::new(0);
        batch
            .start(0, 8, &GREEDY)
            .pages(0, 0, &[0, 1, 2])
            .span(0, 0, &[1; 9], true);
        check.submit(&batch.build()).unwrap();
        check.end_step();
        // The query at position 9 reads from position 7 on, and the one at 10 from 8 on.
        batch.span(0, 9, &[1], true);
        check.submit(&batch.build()).unwrap();
        assert!(check.check_write(PageId(0)).is_ok());
        assert!(check.check_write(PageId(1)).is_err());
        check.end_step();
        batch.span(0, 10, &[1], true);
        check.submit(&batch.build()).unwrap();
        assert!(check.check_write(PageId(1)).is_ok());
        assert!(check.check_write(PageId(2)).is_err());
    }
}
