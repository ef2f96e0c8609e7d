//! The pages of keys and values.
//!
//! The pages lie in one region: layer by layer, then page by page, then KV head by KV head. The system provides memory
//! when a page is first written. With several KV groups, a page holds the layers of its group. If heads differ between
//! layers, a page has places for layers of the widest rows, and several layers of narrower rows share a place. A head's
//! part of a page is its keys, and then its values. The order of the heads' parts rotates by one from page to page.
//! Otherwise the parts of one head could be a power of two apart, and would share a few sets of the caches.

use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use corella_model::{AttentionSpec, ElementOrder, KvFormat, LayerCounter};

use crate::kernels::{ATTENTION_LANES, Kernels, TileAttention};
use crate::system::{Region, has_near_memory};

use super::page_commit::PageCommit;
use super::row_shape::{RowShape, place_bytes};
use super::rows::{KvRows, PlaceSize};

pub struct KvMemory {
    region: Arc<Region>,
    pub order: ElementOrder,
    pub format: KvFormat,
    /// The number of places in a page. A layer of the widest rows takes one.
    num_places: usize,
    place_bytes: usize,
    num_pages: usize,
    page_size: usize,
    /// The rows of each shape that layers have.
    rows: Vec<KvRows>,
    /// The number of pages up to the highest used page.
    num_used: AtomicUsize,
    /// Counts the layers of a step's pages that are complete: every worker has written its keys and values, in all KV
    /// groups.
    pub counter: LayerCounter,
}

impl KvMemory {
    /// Allocates memory with the order of elements that the attention of these kernels reads. The order decides how
    /// attention is computed: see `tile_attention`.
    pub fn for_kernels(
        kernels: &Kernels,
        num_places: usize,
        shapes: &[RowShape],
        num_pages: usize,
        page_size: u32,
        format: KvFormat,
    ) -> io::Result<Self> {
        let through_tiles = |shape: &RowShape| {
            kernels.attends_through_tiles(shape.head_dim, format, page_size as usize)
        };
        // Pages have one order for all layers.
        let order = match !shapes.is_empty() && shapes.iter().all(through_tiles) {
            true => ElementOrder::Tiles,
            false => ElementOrder::Plain,
        };
        Self::new(num_places, shapes, num_pages, page_size, format, order)
    }

    pub fn new(
        num_places: usize,
        shapes: &[RowShape],
        num_pages: usize,
        page_size: u32,
        format: KvFormat,
        order: ElementOrder,
    ) -> io::Result<Self> {
        let place_bytes = place_bytes(shapes, page_size, format);
        let bytes = place_bytes
            .checked_mul(num_places)
            .and_then(|bytes| bytes.checked_mul(num_pages))
            .ok_or(io::ErrorKind::OutOfMemory)?;
        let region = Arc::new(Region::new(bytes + ATTENTION_LANES * format.size())?);
        let page_size = page_size as usize;
        let rows = shapes.iter().map(|&shape| {
            let place = PlaceSize {
                num_bytes: place_bytes,
                num_places,
                num_pages,
                page_size,
            };
            KvRows::new(&region, shape, shapes.len() == 1, place, (format, order))
        });
        let rows = rows.collect();
        Ok(Self {
            region,
            order,
            format,
            num_places,
            place_bytes,
            num_pages,
            page_size,
            rows,
            num_used: AtomicUsize::new(0),
            counter: LayerCounter::default(),
        })
    }

    /// The pages in the view of a layer with such heads.
    pub fn rows_of(&self, attention: &AttentionSpec) -> &KvRows {
        let rows = self.rows.iter().find(|rows| rows.are_of(attention));
        rows.expect("the memory was made for the heads of all layers")
    }

    /// The pages in the view of all layers, if their heads have one shape.
    #[cfg(test)]
    pub fn only_rows(&self) -> &KvRows {
        &self.rows[0]
    }

    /// The length of the longest head.
    pub fn longest_head(&self) -> usize {
        self.rows.iter().map(KvRows::head_dim).max().unwrap_or(0)
    }

    /// The kernels of attention through matrix tiles. `None` means row by row.
    pub fn tile_attention<'a>(&self, kernels: &'a Kernels) -> Option<&'a TileAttention> {
        let tiles = kernels.tile_attention.as_ref();
        tiles.filter(|_| self.order == ElementOrder::Tiles)
    }

    pub fn note_used(&self, page: usize) {
        if self.num_used.load(Ordering::Relaxed) <= page {
            self.num_used.fetch_max(page + 1, Ordering::Relaxed);
        }
    }

    pub fn num_used(&self) -> usize {
        self.num_used.load(Ordering::Relaxed)
    }

    /// Plans the commit of memory ahead of use. `None` if memory should be near the worker that writes it first.
    pub fn page_commit(&self) -> Option<PageCommit> {
        let has_pages = self.place_bytes > 0 && self.num_places > 0;
        (has_pages && !has_near_memory())
            .then(|| PageCommit::new(self.num_places, self.num_pages, self.place_bytes))
    }

    /// Makes the system provide memory for some pages. Concurrent writes there are kept.
    pub fn commit(&self, bytes: Range<usize>) -> bool {
        self.region.commit(bytes)
    }

    pub fn page_size(&self) -> usize {
        self.page_size
    }

    /// The number of places in a page.
    pub fn num_places(&self) -> usize {
        self.num_places
    }

    pub fn num_pages(&self) -> usize {
        self.num_pages
    }

    /// Copies the first `num_rows` positions of a page, all layers.
    ///
    /// # Safety
    /// Meanwhile, the source page is not written, and the target page is not used.
    pub unsafe fn copy_rows(&self, from: usize, to: usize, num_rows: usize) {
        assert!(num_rows <= self.page_size);
        if let [rows] = &self.rows[..] {
            // SAFETY: the caller's promise.
            return unsafe { rows.copy_rows(from, to, num_rows) };
        }
        // The page's layers are unknown here. Positions after the rows may have any content.
        for place in 0..self.num_places {
            let [from, to] = [from, to].map(|page| self.place(place, page).as_ptr());
            // SAFETY: whole places of two pages, by the caller's promise; perhaps the same page.
            unsafe { std::ptr::copy(from, to, self.place_bytes) };
        }
    }

    /// All pages of all layers.
    pub fn bytes(&self) -> NonNull<[u8]> {
        let num_bytes = self.num_places * self.num_pages * self.place_bytes;
        NonNull::slice_from_raw_parts(self.region.start(), num_bytes)
    }

    /// A page's memory in a place, as two parts: see `KvRows::native_parts`. If layers have heads of different
    /// shapes, the first part is the whole memory, and the second is empty.
    pub fn native_parts(&self, place: usize, page: usize) -> [NonNull<[u8]>; 2] {
        match &self.rows[..] {
            [rows] => rows.native_parts(place, page),
            _ => [self.place_bytes, 0]
                .map(|len| NonNull::slice_from_raw_parts(self.place(place, page), len)),
        }
    }

    /// The heads of a place as visible outside. Layers of different shapes count as one head, whose bytes have no
    /// meaning to other executors.
    pub fn visible_heads(&self) -> (usize, usize) {
        match &self.rows[..] {
            [rows] => rows.heads(),
            _ => {
                let row_bytes = self.place_bytes / (2 * self.page_size).max(1);
                let scale_bytes = self.format.row_bytes(0);
                let head_dim = row_bytes.saturating_sub(scale_bytes) / self.format.size();
                (1, head_dim)
            }
        }
    }

    fn place(&self, place: usize, page: usize) -> NonNull<u8> {
        assert!(place < self.num_places && page < self.num_pages);
        let start = (place * self.num_pages + page) * self.place_bytes;
        // SAFETY: the indices were just checked.
        unsafe { self.region.start().add(start) }
    }
}

#[cfg(test)]
mod tests {
    use corella_model::DType;

    use super::*;
    use crate::kernels::{Isa, kernels};

    /// Tiles have pairs of 16 dimensions, and 16 positions of one page.
    #[test]
    fn pages_hold_tiles_if_the_heads_of_all_layers_fit() {
        let shape = |head_dim| RowShape {
            num_kv_heads: 64 / head_dim,
            head_dim,
            num_in_place: 1,
        };
        for kernels in Isa::ALL.into_iter().filter_map(kernels) {
            let order = |head_dims: &[usize], page_size, format| {
                let shapes: Vec<_> = head_dims.iter().map(|&dim| shape(dim)).collect();
                let kv = KvMemory::for_kernels(kernels, 1, &shapes, 2, page_size, format);
                kv.unwrap().order
            };
            let tiles = match kernels.tile_attention {
                Some(_) => ElementOrder::Tiles,
                None => ElementOrder::Plain,
            };
            for format in [KvFormat::Float(DType::Bf16), KvFormat::Int8] {
                for fitting in [&[32][..], &[32, 64], &[64, 32]] {
                    assert_eq!(order(fitting, 16, format), tiles);
                    assert_eq!(order(fitting, 24, format), ElementOrder::Plain);
                }
                for other in [&[16][..], &[32, 16], &[16, 64], &[]] {
                    assert_eq!(order(other, 16, format), ElementOrder::Plain);
                }
            }
            let exact = KvFormat::Float(DType::F32);
            assert_eq!(order(&[32, 64], 16, exact), ElementOrder::Plain);
        }
    }
}
