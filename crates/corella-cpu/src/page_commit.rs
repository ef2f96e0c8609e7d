//! Which memory of KV pages to ask the system for before a sequence needs it.
//!
//! The system clears memory when it is first written: milliseconds for a huge page, and a step may
//! touch one in every layer. An executor without work has some of it cleared ahead.

use std::ops::Range;

/// Of pages that no sequence has used yet, so much is ready.
const AHEAD_BYTES: usize = 512 << 20;
/// What is asked for at once.
const CHUNK_BYTES: usize = 2 << 20;

/// Pages are used from the first on, and each has a part in every layer.
pub struct PageCommit {
    num_layers: usize,
    num_pages: usize,
    /// Of a page, in one layer.
    part_bytes: usize,
    /// Pages up to the highest that was used.
    num_used: usize,
    /// Ready in all layers.
    num_ready: usize,
    /// Layers in which the chunk behind is ready too.
    num_ready_layers: usize,
}

impl PageCommit {
    pub fn new(num_layers: usize, num_pages: usize, part_bytes: usize) -> Self {
        Self {
            num_layers,
            num_pages,
            part_bytes,
            num_used: 0,
            num_ready: 0,
            num_ready_layers: 0,
        }
    }

    pub fn note_used(&mut self, page: usize) {
        self.num_used = self.num_used.max(page + 1);
        if self.num_ready < self.num_used {
            (self.num_ready, self.num_ready_layers) = (self.num_used, 0);
        }
    }

    /// The bytes to ask for next, counted from the first layer's first page.
    pub fn next(&self) -> Option<Range<usize>> {
        let num_ahead = AHEAD_BYTES / (self.part_bytes * self.num_layers);
        let wanted = self.num_pages.min(self.num_used + num_ahead);
        let end = wanted.min(self.num_ready + self.chunk_pages());
        if self.num_ready >= end {
            return None;
        }
        let first = self.num_ready_layers * self.num_pages;
        Some((first + self.num_ready) * self.part_bytes..(first + end) * self.part_bytes)
    }

    /// Whether it worked, what `next` has named is done.
    pub fn finish_next(&mut self, is_ready: bool) {
        if !is_ready {
            self.num_ready = self.num_pages;
        } else if self.num_ready_layers + 1 < self.num_layers {
            self.num_ready_layers += 1;
        } else {
            let end = self.num_ready + self.chunk_pages();
            (self.num_ready, self.num_ready_layers) = (end.min(self.num_pages), 0);
        }
    }

    fn chunk_pages(&self) -> usize {
        (CHUNK_BYTES / self.part_bytes).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    #[test]
    fn pages_are_readied_in_the_order_in_which_they_will_be_used() {
        // Chunks of 2 pages, of which there are 5, in 3 layers.
        let mut commit = PageCommit::new(3, 5, MIB);
        let mut asked = Vec::new();
        while let Some(bytes) = commit.next() {
            asked.push(bytes.start / MIB..bytes.end / MIB);
            commit.finish_next(true);
        }
        let pages = [0..2, 5..7, 10..12, 2..4, 7..9, 12..14, 4..5, 9..10, 14..15];
        assert_eq!(asked, pages);
    }

    #[test]
    fn so_much_is_ready_ahead_and_no_more() {
        let part_bytes = 4 * MIB;
        let mut commit = PageCommit::new(2, 1000, part_bytes);
        let mut ready = 0;
        let mut finish = |commit: &mut PageCommit| {
            while let Some(bytes) = commit.next() {
                ready += bytes.len();
                commit.finish_next(true);
            }
            ready
        };
        assert_eq!(finish(&mut commit), AHEAD_BYTES);
        commit.note_used(9);
        commit.note_used(3);
        assert_eq!(finish(&mut commit), AHEAD_BYTES + 10 * 2 * part_bytes);
        // A sequence got ahead of it: what it has used is not asked for.
        commit.note_used(499);
        assert_eq!(commit.next(), Some(500 * part_bytes..501 * part_bytes));
    }

    #[test]
    fn a_system_that_refuses_is_not_asked_again() {
        let mut commit = PageCommit::new(2, 1000, MIB);
        assert!(commit.next().is_some());
        commit.finish_next(false);
        commit.note_used(17);
        assert_eq!(commit.next(), None);
    }
}
