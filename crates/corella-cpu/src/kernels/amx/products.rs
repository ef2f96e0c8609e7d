//! Tile products in small steps, to be interleaved with vector code: the tile unit multiplies while the vector units
//! work. A processor overlaps the two only if neither takes more instructions than the processor looks ahead.

use std::arch::asm;

use crate::kernels::TileProduct;

use super::tile::apart;

/// A queue of products. Sums are in tiles 0–3, rows in tiles 4 and 5, columns in tiles 6 and 7.
pub struct Products<'a> {
    /// Products that have not been started.
    waiting: std::slice::Iter<'a, TileProduct>,
    current: Option<Progress<'a>>,
    /// The product whose sums are still in tiles 0–3. They are stored one step later, when they are
    /// complete, so that nothing waits for them.
    finished: Option<&'a TileProduct>,
}

/// The progress of the current product.
struct Progress<'a> {
    product: &'a TileProduct,
    a: *const u8,
    b: [*const u8; 2],
    num_blocks: usize,
    /// Whether the first half of the current block is done.
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

    /// The number of `step` calls that the products need.
    pub fn num_steps(products: &[TileProduct]) -> usize {
        products.iter().map(|product| 2 * product.num_blocks).sum()
    }

    /// Computes half a block of the current product, or starts the next one.
    ///
    /// # Safety
    /// See [`TileProduct`]. From the first step to `finish`, nothing else may use the thread's tiles.
    #[inline(always)]
    pub unsafe fn step(&mut self) {
        // SAFETY: the caller upholds the contract, and nothing else uses tiles between two steps.
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

    /// Stores the sums of the finished product, and starts the next one if there is one.
    ///
    /// # Safety
    /// See `step`.
    #[inline(always)]
    unsafe fn begin(&mut self) {
        // SAFETY: the caller upholds the contract.
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

    /// Computes all products that are left and stores their sums.
    ///
    /// # Safety
    /// See `step`.
    pub unsafe fn finish(&mut self) {
        // SAFETY: the caller upholds the contract.
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
        // SAFETY: this reads one tile of 16 columns and two tiles of rows.
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
        // SAFETY: this reads one tile of 16 columns; the rows are in tiles 4 and 5.
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

/// Returns the destinations of tiles 0–3: rows 0–15 and 16–31, each with the left 16 columns first.
fn places(product: &TileProduct) -> [*mut f32; 4] {
    let TileProduct { right, below, .. } = *product;
    [0, right, below, right + below].map(|at| product.out.wrapping_byte_add(at))
}

/// # Safety
/// See [`Products::step`].
#[inline(always)]
unsafe fn load(product: &TileProduct) {
    let places = places(product);
    // SAFETY: these are the sums of the product.
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
    // SAFETY: `out` has room for the sums of the product.
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
