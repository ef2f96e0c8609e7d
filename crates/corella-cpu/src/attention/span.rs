//! The spans of a step: consecutive rows of one sequence each, and the pages of that sequence.

use std::ops::{Deref, Range};

use corella_core::PageId;

/// Consecutive rows of one sequence.
#[derive(Clone, Debug)]
pub struct StepSpan {
    pub first_row: usize,
    pub num_rows: usize,
    /// The first row's position in its sequence.
    pub start: usize,
    /// The span's page table, as a range of the step's pages.
    pages: Range<usize>,
}

/// All spans of a step with their page tables. It is reused from step to step.
#[derive(Debug, Default)]
pub struct Spans {
    spans: Vec<StepSpan>,
    pages: Vec<PageId>,
    num_rows: usize,
}

impl Spans {
    pub fn clear(&mut self) {
        self.spans.clear();
        self.pages.clear();
        self.num_rows = 0;
    }

    /// Adds the step's next `num_rows` rows, of which the first is at position `start` of its
    /// sequence.
    pub fn add(&mut self, num_rows: usize, start: usize, pages: &[PageId]) {
        let first_page = self.pages.len();
        self.pages.extend_from_slice(pages);
        self.spans.push(StepSpan {
            first_row: self.num_rows,
            num_rows,
            start,
            pages: first_page..self.pages.len(),
        });
        self.num_rows += num_rows;
    }

    /// The page table of a span's sequence.
    pub fn pages_of(&self, span: &StepSpan) -> &[PageId] {
        &self.pages[span.pages.clone()]
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
