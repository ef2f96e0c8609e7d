//! What kernels ask of memory between their other instructions.

/// Cache lines to be asked for some time before they are read, a line of each of some streams in
/// turn: the hardware runs ahead of each page that it sees touched. They may be anywhere.
pub struct LineQueue {
    /// Of each stream, its next line and the bytes to the one after.
    streams: [(*const u8, usize); Self::NUM_STREAMS],
    num_streams: usize,
    /// Of each stream.
    num_left: usize,
    /// It takes so many calls of `ask_some` to ask for a line of each.
    period: usize,
    num_calls: usize,
}

impl LineQueue {
    pub const NUM_STREAMS: usize = 4;
    /// Without streams.
    pub const fn new(period: usize) -> Self {
        Self {
            streams: [(std::ptr::null(), 0); Self::NUM_STREAMS],
            num_streams: 0,
            num_left: 0,
            period,
            num_calls: 0,
        }
    }

    /// Another stream, as long as those that are there, of which nothing has been asked for.
    pub fn add(&mut self, first: *const u8, stride: usize, num_lines: usize) {
        // Those that are missing are some other one again.
        self.streams[self.num_streams..].fill((first, stride));
        self.num_streams += 1;
        self.num_left = num_lines;
    }

    pub fn is_empty(&self) -> bool {
        self.num_left == 0
    }

    pub fn ask_all(&mut self) {
        while !self.is_empty() {
            self.ask();
        }
    }

    /// Now and then asks for the next line of each stream.
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
        for (line, stride) in &mut self.streams {
            // Into the second cache: the first one is full of what is being worked on.
            #[cfg(target_arch = "x86_64")]
            // SAFETY: a prefetch may name any address.
            unsafe {
                use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
                _mm_prefetch::<_MM_HINT_T1>(line.cast());
            }
            *line = line.wrapping_add(*stride);
        }
    }
}
