//! The page map: the use of each KV page, for people who observe the engine.

use alloc::vec::Vec;

use crate::PageId;

/// The use of a page. A page with two uses has the state that is listed last here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PageState {
    Free,
    /// The prefix tree keeps the page, and no request holds it.
    Cached,
    /// A request holds the page, or it is pinned.
    InUse,
    /// The page belongs to a fetch, or to a request whose KV another node or host memory brings or has brought.
    Received,
    /// The page's request has given it up, and another node may still read or write it.
    Held,
}

/// The pages of the pool in the order of their numbers. Each cell stands for `num_pages_per_cell` successive pages, the
/// last cell perhaps for fewer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageMap {
    pub num_pages_per_cell: u32,
    /// The most frequent state among the pages of a cell that are not free; in a tie, the state that [`PageState`]
    /// lists last. A cell is free when all of its examined pages are.
    pub cells: Vec<PageState>,
    /// The number of pages in [`PageState::Received`].
    pub num_received: usize,
}

const NUM_STATES: usize = 5;

/// The most pages examined per cell, evenly spread, so that the time for a map does not grow with the pool.
const MAX_SAMPLES_PER_CELL: u32 = 32;

impl PageMap {
    /// Maps `num_pages` pages to at most `max_cells` cells, at least one. `num_received` of them are in
    /// [`PageState::Received`].
    pub(crate) fn new(
        num_pages: u32,
        max_cells: u32,
        num_received: usize,
        state: impl Fn(PageId) -> PageState,
    ) -> Self {
        let num_pages_per_cell = num_pages.div_ceil(max_cells.max(1)).max(1);
        let stride = num_pages_per_cell.div_ceil(MAX_SAMPLES_PER_CELL) as usize;
        let cell = |first: u32| {
            let end = first.saturating_add(num_pages_per_cell).min(num_pages);
            let mut counts = [(0, PageState::Free); NUM_STATES];
            for page in (first..end).step_by(stride) {
                let state = state(PageId(page));
                let count = &mut counts[state as usize];
                *count = (count.0 + 1, state);
            }
            let used = &counts[PageState::Cached as usize..];
            let most = used.iter().max().filter(|(count, _)| *count > 0);
            most.map_or(PageState::Free, |&(_, state)| state)
        };
        let firsts = (0..num_pages).step_by(num_pages_per_cell as usize);
        Self {
            num_pages_per_cell,
            cells: firsts.map(cell).collect(),
            num_received,
        }
    }
}
