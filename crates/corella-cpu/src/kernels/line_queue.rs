//! What kernels ask of memory between their other instructions.

use super::wants_requests;

/// Cache lines to be asked for some time before they are read: of some streams, which may be anywhere,
/// one after the other, or a line of each in turn, where the hardware runs ahead of each page that it
/// sees touched.
pub struct LineQueue {
    /// Of each stream, its next line and the bytes to the one after.
    streams: [(*const u8, usize); Self::NUM_STREAMS],
    num_streams: usize,
    is_in_turn: bool,
    /// Where it is not in turn: the stream that lines are asked for of, and how often still.
    current: usize,
    num_left_of_current: usize,
    num_lines: usize,
    /// Of each stream.
    num_left: usize,
    /// It takes so many calls of `ask_some` to ask for a line of each.
    period: usize,
    num_calls: usize,
}

impl LineQueue {
    pub const NUM_STREAMS: usize = 4;
    /// Without streams.
    pub fn new(period: usize) -> Self {
        Self {
            streams: [(std::ptr::null(), 0); Self::NUM_STREAMS],
            num_streams: 0,
            is_in_turn: wants_requests(),
            current: 0,
            num_left_of_current: 0,
            num_lines: 0,
            num_left: 0,
            period,
            num_calls: 0,
        }
    }

    /// Another stream, as long as those that are there, of which nothing has been asked for: a multiple
    /// of four lines.
    pub fn add(&mut self, first: *const u8, stride: usize, num_lines: usize) {
        // Those that are missing are some other one again.
        self.streams[self.num_streams..].fill((first, stride));
        self.num_streams += 1;
        debug_assert!(num_lines.is_multiple_of(Self::NUM_STREAMS));
        self.num_left_of_current = num_lines / Self::NUM_STREAMS;
        (self.num_lines, self.num_left) = (num_lines, num_lines);
    }

    pub fn is_empty(&self) -> bool {
        self.num_left == 0
    }

    pub fn ask_all(&mut self) {
        while !self.is_empty() {
            self.ask();
        }
    }

    /// Now and then asks for as many lines as there may be streams.
    #[inline(always)]
    pub fn ask_some(&mut self) {
        self.num_calls += 1;
        if self.num_calls >= self.period && !self.is_empty() {
            self.num_calls = 0;
            self.ask();
        }
    }

    #[inline(always)]
    fn ask(&mut self) {
        self.num_left -= 1;
        if self.is_in_turn {
            return self.streams.iter_mut().for_each(ask_next);
        }
        for _ in 0..Self::NUM_STREAMS {
            ask_next(&mut self.streams[self.current]);
        }
        self.num_left_of_current -= 1;
        if self.num_left_of_current == 0 {
            self.current = (self.current + 1) % Self::NUM_STREAMS;
            self.num_left_of_current = self.num_lines / Self::NUM_STREAMS;
        }
    }
}

#[inline(always)]
fn ask_next((line, stride): &mut (*const u8, usize)) {
    fetch_line(*line);
    *line = line.wrapping_add(*stride);
}

/// Asks for a line, wherever it is, into the second cache: the first one is full of what is being
/// worked on.
#[inline(always)]
pub fn fetch_line(line: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch may name any address.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(line.cast());
    }
}
