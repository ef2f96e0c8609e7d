//! Software prefetches that GEMM kernels issue.

/// The prefetches of a kernel while it multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prefetch {
    Nothing,
    /// The lines ahead of the current one, as with `fetch_ahead` in `Gemm`.
    Ahead,
    /// Half of the next panel, from this address on, while the current panel comes from a cache. If several tiles of
    /// rows take a panel one after the other, two of them prefetch a half each. Kernels may ignore this.
    Half(*const u8),
}

impl Prefetch {
    pub fn is_ahead(self) -> bool {
        self == Self::Ahead
    }

    /// Returns the prefetches of one of a block's two tiles: each line of a half is prefetched once.
    pub fn of_tile(self, tile: usize) -> Self {
        match tile % 2 {
            0 => self,
            _ => self.only_ahead(),
        }
    }

    /// The prefetches for the second of two lines that are read together. `Half` prefetches no more lines: one line of
    /// the half goes with the first of the two.
    pub fn only_ahead(self) -> Self {
        match self {
            Self::Half(_) => Self::Nothing,
            prefetch => prefetch,
        }
    }

    /// Issues the prefetch that goes with `line`, line `index` of half a panel.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    pub fn issue(self, line: *const u8, index: usize) {
        use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
        // SAFETY: prefetches may name any address.
        unsafe {
            match self {
                Self::Nothing => {}
                Self::Ahead => _mm_prefetch::<_MM_HINT_T0>(line_ahead(line).cast()),
                // The first-level cache is full of the current panel.
                Self::Half(half) => {
                    _mm_prefetch::<_MM_HINT_T1>(half.wrapping_add(index * 64).cast());
                }
            }
        }
    }
}

/// Fetches the line at any address into the first-level cache.
#[inline(always)]
pub fn fetch(line: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: prefetches may name any address.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(line.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = line;
}

/// `0..n` for a loop that the compiler must not unroll. An unrolled loop would read the second half of a block of
/// weights before the first, and a Zen 4 core reads 1.5 times as fast in order.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub fn in_steps(n: usize) -> std::ops::Range<usize> {
    0..std::hint::black_box(n)
}

/// The line to prefetch when `line` is read: about 16 KiB ahead, alternating among four pages.
/// Hardware prefetchers run ahead in each page they see touched, but never beyond it, so one page
/// at a time would leave most of a core's bandwidth unused.
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
