//! Commits the memory of KV pages ahead of use.
//!
//! The operating system clears memory at its first write, which takes milliseconds for a huge page, and a step may
//! touch a new huge page in every layer. An idle executor has memory cleared in advance.
//!
//! A stage without commands for 20 ms commits 2 MiB at a time, and looks for commands in between. It commits nothing on
//! machines with several NUMA nodes, where memory should be near the worker that writes it first.

use std::ops::Range;

/// The committed memory beyond the pages in use, in bytes.
const AHEAD_BYTES: usize = 512 << 20;
/// The memory committed per call, in bytes.
const CHUNK_BYTES: usize = 2 << 20;

/// Decides which bytes of KV memory to commit next. Pages are used in ascending order, and each has
/// a part in every layer.
pub struct PageCommit {
    num_layers: usize,
    num_pages: usize,
    /// Bytes of a page in one layer.
    part_bytes: usize,
    /// One more than the highest used page.
    num_used: usize,
    /// The number of pages committed in all layers.
    num_ready: usize,
    /// The number of layers in which the next chunk of pages is committed, too.
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

    /// Records that sequences use the first `num_pages` pages. The memory of these pages needs no commit. Other threads
    /// may already have filled later pages; a commit keeps their content.
    pub fn note_used(&mut self, num_pages: usize) {
        self.num_used = num_pages;
        if self.num_ready < self.num_used {
            (self.num_ready, self.num_ready_layers) = (self.num_used, 0);
        }
    }

    /// The bytes to commit next, counted from the first layer's first page; `None` if enough are committed.
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

    /// Records that the bytes from `next` were committed, or that the system refused.
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
        // 3 layers of 5 pages, and chunks of 2 pages.
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
        commit.note_used(10);
        assert_eq!(finish(&mut commit), AHEAD_BYTES + 10 * 2 * part_bytes);
        // Sequences have used more pages than were committed. The used pages need no commit.
        commit.note_used(500);
        assert_eq!(commit.next(), Some(500 * part_bytes..501 * part_bytes));
    }

    #[test]
    fn a_system_that_refuses_is_not_asked_again() {
        let mut commit = PageCommit::new(2, 1000, MIB);
        assert!(commit.next().is_some());
        commit.finish_next(false);
        commit.note_used(18);
        assert_eq!(commit.next(), None);
    }
}
