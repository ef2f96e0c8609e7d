//! The exported rows of a run: their pages, and the number of readable rows in each layer.

use alloc::collections::VecDeque;
use alloc::vec;
use alloc::vec::Vec;

use super::ExportTask;
use crate::session::SessionKey;
use crate::{PageTable, SnapshotId};

#[derive(Clone, Debug, Default)]
pub(super) struct RowTable {
    /// The pages of each KV group, up to the last row of a planned step.
    tables: Vec<PageTable>,
    num_announced: u32,
    /// By layer, the number of rows that may be read, from the first on.
    num_readable: Vec<u32>,
    /// The steps that computed the rows have returned.
    is_complete: bool,
    /// The recurrent state after all rows, once they are complete.
    state: Option<SnapshotId>,
}

impl RowTable {
    pub fn new(num_layers: u32) -> Self {
        Self {
            num_readable: vec![0; num_layers as usize],
            ..Self::default()
        }
    }

    /// Adds the rows of a planned step, up to `end_row`, in the pages of `parts`. Returns the new pages, without the
    /// first page of a part if earlier rows are in it.
    pub fn announce(&mut self, end_row: u32, parts: &[PageTable]) -> Vec<PageTable> {
        self.num_announced = end_row;
        self.tables.resize_with(parts.len(), PageTable::default);
        let tables = self.tables.iter_mut().zip(parts);
        tables.map(|(table, part)| table.append(part)).collect()
    }

    pub fn handle_layer_done(&mut self, layer: u32, end_row: u32) {
        let num_readable = &mut self.num_readable[layer as usize];
        *num_readable = end_row.max(*num_readable);
    }

    /// Notes that the steps of all rows have returned.
    pub fn finish(&mut self, state: Option<SnapshotId>) {
        self.is_complete = true;
        self.state = state;
    }

    /// Makes all rows readable. A prompt that is exported as a whole is not tracked by layer.
    pub fn make_readable(&mut self) {
        self.num_readable.fill(self.num_announced);
    }

    /// Tells a new reader the present state of the rows.
    pub fn tell_all(&self, key: SessionKey, tasks: &mut VecDeque<ExportTask>) {
        if self.num_announced > 0 {
            let tables = self.tables.clone();
            tasks.push_back(ExportTask::AddPages { key, tables });
        }
        let mut end = 0;
        for alike in self.num_readable.chunk_by(|a, b| a == b) {
            let first = end;
            end += alike.len() as u32;
            if alike[0] > 0 {
                tasks.push_back(ExportTask::RowsReadable {
                    key,
                    layers: first..end,
                    num_rows: alike[0],
                });
            }
        }
        if self.is_complete {
            tasks.push_back(ExportTask::Finish {
                key,
                state: self.state,
            });
        }
    }

    /// # Panics
    /// When the bookkeeping contradicts itself.
    pub fn check_invariants(&self, page_size: u32, num_rows: u32) {
        assert!(
            self.num_announced <= num_rows,
            "more rows are announced than there are"
        );
        let num_pages = self.num_announced.div_ceil(page_size) as usize;
        let mut tables = self.tables.iter().filter(|table| !table.pages.is_empty());
        assert!(
            tables.all(|table| table.len() == num_pages),
            "the pages of the rows that are announced"
        );
        let mut readable = self.num_readable.iter();
        assert!(
            readable.all(|&num_readable| num_readable <= self.num_announced),
            "rows are readable that no step computes"
        );
        assert!(
            self.num_readable
                .is_sorted_by(|before, after| before >= after),
            "a layer is done before the one below it"
        );
        let mut readable = self.num_readable.iter();
        assert!(
            !self.is_complete || readable.all(|&num_readable| num_readable == num_rows),
            "rows are valid that are not readable"
        );
    }
}
