//! What kernels ask of memory before they read it.

/// What a kernel asks of memory while it multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Requests {
    Nothing,
    /// As with `fetch_ahead` in [`super::Gemm`].
    Ahead,
    /// Half as many bytes as the panel has, of the panel to come, while this one is in a cache. Of some
    /// tiles of rows that take a panel one after the other, two ask for a half each. Kernels need not.
    Half(*const u8),
}

impl Requests {
    pub fn is_ahead(self) -> bool {
        self == Self::Ahead
    }

    /// While a kernel reads this tile, of which a block has two.
    pub fn of_tile(self, tile: usize) -> Self {
        match tile % 2 {
            0 => self,
            _ => self.only_ahead(),
        }
    }

    /// For what else a kernel reads beside the lines that it asks for halves with.
    pub fn only_ahead(self) -> Self {
        match self {
            Self::Half(_) => Self::Nothing,
            requests => requests,
        }
    }

    /// When a kernel reads `line`, the `index`th of half a panel.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub fn ask(self, line: *const u8, index: usize) {
        use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
        // SAFETY: prefetches may name any address.
        unsafe {
            match self {
                Self::Nothing => {}
                Self::Ahead => _mm_prefetch::<_MM_HINT_T0>(line_ahead(line).cast()),
                // The first cache is full of this panel.
                Self::Half(half) => {
                    _mm_prefetch::<_MM_HINT_T1>(half.wrapping_add(index * 64).cast());
                }
            }
        }
    }
}

/// `0..n` for a loop that compilers leave as it is. Unrolled, it would read the second half of a block
/// of weights before the first, and a Zen 4 core reads one and a half times as fast in order.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub fn in_steps(n: usize) -> std::ops::Range<usize> {
    0..std::hint::black_box(n)
}

/// The line to fetch when `line` is read: some 16 KiB ahead, four pages in turn. The hardware
/// runs ahead of each page it sees touched, but never out of it, so one page at a time would
/// leave most of a core's bandwidth unused.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub fn line_ahead(line: *const u8) -> *const u8 {
    const PAGE_LINES: usize = 4096 / 64;
    const PAGES: usize = 4;
    let index = line as usize / 64;
    let in_block = index % (PAGES * PAGE_LINES);
    let turned = in_block % PAGES * PAGE_LINES + in_block / PAGES;
    let ahead = PAGES * PAGE_LINES + turned - in_block;
    line.wrapping_add(ahead * 64)
}
