//! A queue of cache lines that kernels prefetch between their other instructions.

use super::wants_prefetch;

/// Cache lines that will be read soon, as up to four streams. They are prefetched one stream after the other, or one
/// line of each stream in turn. Turns suit processors whose hardware prefetches ahead in every page in use.
pub struct LineQueue {
    /// The next line of each stream, and the distance between the stream's lines in bytes.
    streams: [(*const u8, usize); Self::NUM_STREAMS],
    num_streams: usize,
    /// Whether lines are prefetched from all streams in turn.
    is_in_turn: bool,
    /// Used if lines are not prefetched in turn: the stream that is being prefetched, and the number of
    /// `prefetch_lines` calls until its last line.
    current: usize,
    num_left_of_current: usize,
    /// The number of lines in each stream.
    num_lines: usize,
    /// The number of `prefetch_lines` calls until the last line of all streams.
    num_left: usize,
    /// Every `period`-th call of `prefetch_some` prefetches.
    period: usize,
    num_calls: usize,
}

impl LineQueue {
    pub const NUM_STREAMS: usize = 4;
    /// Makes a queue without streams.
    pub fn new(period: usize) -> Self {
        Self {
            streams: [(std::ptr::null(), 0); Self::NUM_STREAMS],
            num_streams: 0,
            is_in_turn: wants_prefetch(),
            current: 0,
            num_left_of_current: 0,
            num_lines: 0,
            num_left: 0,
            period,
            num_calls: 0,
        }
    }

    /// Adds a stream. All streams have the same number of lines, a multiple of four, and must be
    /// added before the first prefetch.
    pub fn add(&mut self, first: *const u8, stride: usize, num_lines: usize) {
        // Missing streams repeat this one.
        self.streams[self.num_streams..].fill((first, stride));
        self.num_streams += 1;
        debug_assert!(num_lines.is_multiple_of(Self::NUM_STREAMS));
        self.num_left_of_current = num_lines / Self::NUM_STREAMS;
        (self.num_lines, self.num_left) = (num_lines, num_lines);
    }

    pub fn is_empty(&self) -> bool {
        self.num_left == 0
    }

    pub fn prefetch_all(&mut self) {
        while !self.is_empty() {
            self.prefetch_lines();
        }
    }

    /// Prefetches `NUM_STREAMS` lines in every `period`-th call.
    #[inline(always)]
    pub fn prefetch_some(&mut self) {
        self.num_calls += 1;
        if self.num_calls >= self.period && !self.is_empty() {
            self.num_calls = 0;
            self.prefetch_lines();
        }
    }

    #[inline(always)]
    fn prefetch_lines(&mut self) {
        self.num_left -= 1;
        if self.is_in_turn {
            return self.streams.iter_mut().for_each(advance_stream);
        }
        for _ in 0..Self::NUM_STREAMS {
            advance_stream(&mut self.streams[self.current]);
        }
        self.num_left_of_current -= 1;
        if self.num_left_of_current == 0 {
            self.current = (self.current + 1) % Self::NUM_STREAMS;
            self.num_left_of_current = self.num_lines / Self::NUM_STREAMS;
        }
    }
}

#[inline(always)]
fn advance_stream((line, stride): &mut (*const u8, usize)) {
    fetch_line(*line);
    *line = line.wrapping_add(*stride);
}

/// Prefetches a line into the second-level cache, because the first-level cache is full of the current operands.
#[inline(always)]
pub fn fetch_line(line: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch may name any address.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(line.cast());
    }
}
