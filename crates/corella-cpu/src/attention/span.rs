//! The spans of a step: consecutive rows of one sequence each, and the pages of that sequence.

use std::ops::{Deref, Range};

use corella_core::PageId;
use corella_model::PageTable;

/// Consecutive rows of one sequence.
#[derive(Clone, Debug)]
pub struct StepSpan {
    pub first_row: usize,
    pub num_rows: usize,
    /// The first row's position in its sequence.
    pub start: usize,
    /// The index of the span's page table in the first KV group. The tables of the other groups follow.
    first_table: usize,
}

/// A page table, as a range of the step's pages.
#[derive(Debug)]
struct StepTable {
    first: usize,
    pages: Range<usize>,
}

/// All spans of a step with their page tables. Reused from step to step.
#[derive(Debug, Default)]
pub struct Spans {
    spans: Vec<StepSpan>,
    tables: Vec<StepTable>,
    pages: Vec<PageId>,
    num_rows: usize,
}

impl Spans {
    pub fn clear(&mut self) {
        self.spans.clear();
        self.tables.clear();
        self.pages.clear();
        self.num_rows = 0;
    }

    /// Adds the step's next `num_rows` rows, the first at position `start` of its sequence.
    /// `tables` are the sequence's page tables of all KV groups.
    pub fn add<'a>(
        &mut self,
        num_rows: usize,
        start: usize,
        tables: impl IntoIterator<Item = PageTable<'a>>,
    ) {
        self.spans.push(StepSpan {
            first_row: self.num_rows,
            num_rows,
            start,
            first_table: self.tables.len(),
        });
        for table in tables {
            let first_page = self.pages.len();
            self.pages.extend_from_slice(table.pages());
            self.tables.push(StepTable {
                first: table.first(),
                pages: first_page..self.pages.len(),
            });
        }
        self.num_rows += num_rows;
    }

    /// The page table of a span's sequence in a KV group.
    pub fn table(&self, span: &StepSpan, group: usize) -> PageTable<'_> {
        let table = &self.tables[span.first_table + group];
        PageTable::new(table.first, &self.pages[table.pages.clone()])
    }

    /// The last page of each page table.
    pub fn last_pages(&self) -> impl Iterator<Item = PageId> {
        let tables = self.tables.iter();
        tables.filter_map(|table| self.pages[table.pages.clone()].last().copied())
    }

    /// Whether any span has more than one row.
    pub fn have_prefill(&self) -> bool {
        self.num_rows > self.spans.len()
    }
}

impl Deref for Spans {
    type Target = [StepSpan];

    fn deref(&self) -> &[StepSpan] {
        &self.spans
    }
}
