//! Products of matrix tiles, a few instructions at a time between those of something else: the tiles
//! multiply while the vector units work, which a processor does not find by itself when either takes
//! more instructions than it looks ahead.

use std::arch::asm;

use super::TileProduct;
use super::amx::apart;

/// Sums are in tiles 0–3, rows in 4 and 5, columns in 6 and 7.
pub struct Products<'a> {
    /// Not yet begun.
    waiting: std::slice::Iter<'a, TileProduct>,
    current: Option<Progress<'a>>,
    /// What tiles 0–3 are to be stored to: later than they are complete, so that nothing waits.
    finished: Option<&'a TileProduct>,
}

struct Progress<'a> {
    product: &'a TileProduct,
    a: *const u8,
    b: [*const u8; 2],
    num_blocks: usize,
    /// Whether the first half of a block has been done.
    is_half: bool,
}

impl<'a> Products<'a> {
    pub fn new(products: &'a [TileProduct]) -> Self {
        Self {
            waiting: products.iter(),
            current: None,
            finished: None,
        }
    }

    /// How often `step` has something to do.
    pub fn num_steps(products: &[TileProduct]) -> usize {
        products.iter().map(|product| 2 * product.num_blocks).sum()
    }

    /// Half a block.
    ///
    /// # Safety
    /// See [`TileProduct`]. From the first step to `finish`, nothing else uses the thread's tiles.
    #[inline(always)]
    pub unsafe fn step(&mut self) {
        // SAFETY: the caller's promise; nothing else touches tiles between two steps.
        unsafe {
            let Some(progress) = &mut self.current else {
                return self.begin();
            };
            if progress.is_half {
                progress.second_half();
            } else {
                progress.first_half();
            }
            if progress.num_blocks == 0 {
                self.finished = Some(progress.product);
                self.current = None;
            }
        }
    }

    /// Stores what is finished, and begins with the next product, if there is one.
    ///
    /// # Safety
    /// As for `step`.
    #[inline(always)]
    unsafe fn begin(&mut self) {
        // SAFETY: the caller's promise.
        unsafe {
            if let Some(finished) = self.finished.take() {
                store(finished);
            }
            let Some(product) = self.waiting.next() else {
                return;
            };
            load(product);
            let mut progress = Progress {
                product,
                a: product.a,
                b: product.b,
                num_blocks: product.num_blocks,
                is_half: false,
            };
            progress.first_half();
            self.current = Some(progress);
        }
    }

    /// What is left.
    ///
    /// # Safety
    /// As for `step`.
    pub unsafe fn finish(&mut self) {
        // SAFETY: the caller's promise.
        unsafe {
            while self.current.is_some() || self.finished.is_some() || self.waiting.len() > 0 {
                self.step();
            }
        }
    }
}

impl Progress<'_> {
    /// # Safety
    /// See [`Products::step`].
    #[inline(always)]
    unsafe fn first_half(&mut self) {
        // SAFETY: reads a tile of 16 columns and two of rows.
        unsafe {
            asm!(
                apart!("tileloadd tmm4, [{a} + {a_stride}]"),
                apart!("tileloaddt1 tmm6, [{b} + {b_stride}]"),
                apart!("tdpbf16ps tmm0, tmm4, tmm6"),
                apart!("tileloadd tmm5, [{below} + {a_stride}]"),
                "tdpbf16ps tmm2, tmm5, tmm6",
                a = in(reg) self.a, a_stride = in(reg) self.product.a_stride,
                below = in(reg) self.a.wrapping_add(16 * self.product.a_stride),
                b = in(reg) self.b[0], b_stride = in(reg) self.product.b_stride,
                out("tmm0") _, out("tmm2") _, out("tmm4") _, out("tmm5") _, out("tmm6") _,
                options(nostack, readonly),
            );
        }
        self.is_half = true;
    }

    /// # Safety
    /// See [`Products::step`].
    #[inline(always)]
    unsafe fn second_half(&mut self) {
        // SAFETY: reads a tile of 16 columns; the rows are in tiles 4 and 5.
        unsafe {
            asm!(
                apart!("tileloaddt1 tmm7, [{b} + {b_stride}]"),
                apart!("tdpbf16ps tmm1, tmm4, tmm7"),
                "tdpbf16ps tmm3, tmm5, tmm7",
                b = in(reg) self.b[1], b_stride = in(reg) self.product.b_stride,
                out("tmm1") _, out("tmm3") _, out("tmm7") _,
                options(nostack, readonly),
            );
        }
        self.is_half = false;
        self.num_blocks -= 1;
        self.a = self.a.wrapping_add(self.product.a_step);
        self.b = self.b.map(|b| b.wrapping_add(self.product.b_step));
    }
}

/// Where tiles 0–3 of a product's sums are: rows 0–15 and 16–31, of each the left columns first.
fn places(product: &TileProduct) -> [*mut f32; 4] {
    let TileProduct { right, below, .. } = *product;
    [0, right, below, right + below].map(|at| product.out.wrapping_byte_add(at))
}

/// # Safety
/// See [`Products::step`].
#[inline(always)]
unsafe fn load(product: &TileProduct) {
    let places = places(product);
    // SAFETY: sums of the product.
    unsafe {
        if product.adds {
            asm!(
                "tileloadd tmm0, [{p0} + {stride}]",
                "tileloadd tmm1, [{p1} + {stride}]",
                "tileloadd tmm2, [{p2} + {stride}]",
                "tileloadd tmm3, [{p3} + {stride}]",
                p0 = in(reg) places[0], p1 = in(reg) places[1], p2 = in(reg) places[2],
                p3 = in(reg) places[3], stride = in(reg) product.out_stride,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                options(nostack, readonly),
            );
        } else {
            asm!(
                "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                options(nostack, nomem),
            );
        }
    }
}

/// # Safety
/// See [`Products::step`].
#[inline(always)]
unsafe fn store(product: &TileProduct) {
    let places = places(product);
    // SAFETY: room for the sums of the product.
    unsafe {
        asm!(
            "tilestored [{p0} + {stride}], tmm0",
            "tilestored [{p1} + {stride}], tmm1",
            "tilestored [{p2} + {stride}], tmm2",
            "tilestored [{p3} + {stride}], tmm3",
            p0 = in(reg) places[0], p1 = in(reg) places[1], p2 = in(reg) places[2],
            p3 = in(reg) places[3], stride = in(reg) product.out_stride,
            options(nostack),
        );
    }
}
