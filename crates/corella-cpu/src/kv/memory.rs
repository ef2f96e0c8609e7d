//! The pages that hold keys and values.
//!
//! One region: layer by layer, page by page, KV head by KV head, so that a sequence begins to use
//! as little memory as it needs. With several KV groups, a page holds the layers of the group that it
//! belongs to, and a layer here is one of those. A head's part of a page is its keys, and then its
//! values; it moves on by one place from page to page, because parts that are a power of two apart
//! would meet in a few sets of the caches.

use std::io;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

use corella_model::{AttentionSpec, DType, ElementOrder, KvFormat, LayerCounter, int8_scale};
use half::{bf16, f16};

use crate::kernels::{
    ATTENTION_LANES, KEY_TILE, Kernels, KeyGroup, TileAttention, ValueRun, fetch_line,
};
use crate::system::{Region, has_near_memory};

use super::page_commit::PageCommit;

/// Memory of one page: K and V of the layers of a KV group.
pub fn page_bytes(
    num_layers: usize,
    attention: &AttentionSpec,
    page_size: u32,
    format: KvFormat,
) -> usize {
    let num_rows = 2 * num_layers * attention.num_kv_heads * page_size as usize;
    num_rows * format.row_bytes(attention.head_dim)
}

/// What a page holds of each position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Keys,
    Values,
}

impl Side {
    pub const BOTH: [Self; 2] = [Self::Keys, Self::Values];
}

pub struct KvMemory {
    region: Region,
    pub order: ElementOrder,
    pub format: KvFormat,
    /// Layers of a page.
    num_layers: usize,
    num_pages: usize,
    num_kv_heads: usize,
    page_size: usize,
    head_dim: usize,
    /// Pages up to the highest that was used.
    num_used: AtomicUsize,
    /// Layers of a step's pages that every worker has written its keys and values of, in all KV
    /// groups.
    pub counter: LayerCounter,
}

impl KvMemory {
    /// Memory in the order that attention by these kernels reads. The order decides how attention is
    /// computed: see `tile_attention`.
    pub fn for_kernels(
        kernels: &Kernels,
        num_layers: usize,
        attention: &AttentionSpec,
        num_pages: usize,
        page_size: u32,
        format: KvFormat,
    ) -> io::Result<Self> {
        let head_dim = attention.head_dim;
        let order = match kernels.attends_through_tiles(head_dim, format, page_size as usize) {
            true => ElementOrder::Tiles,
            false => ElementOrder::Plain,
        };
        Self::new(num_layers, attention, num_pages, page_size, format, order)
    }

    pub fn new(
        num_layers: usize,
        attention: &AttentionSpec,
        num_pages: usize,
        page_size: u32,
        format: KvFormat,
        order: ElementOrder,
    ) -> io::Result<Self> {
        let bytes = page_bytes(num_layers, attention, page_size, format)
            .checked_mul(num_pages)
            .ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self {
            region: Region::new(bytes + ATTENTION_LANES * format.size())?,
            order,
            format,
            num_layers,
            num_pages,
            num_kv_heads: attention.num_kv_heads,
            page_size: page_size as usize,
            head_dim: attention.head_dim,
            num_used: AtomicUsize::new(0),
            counter: LayerCounter::default(),
        })
    }

    pub fn note_used(&self, page: usize) {
        if self.num_used.load(Ordering::Relaxed) <= page {
            self.num_used.fetch_max(page + 1, Ordering::Relaxed);
        }
    }

    pub fn num_used(&self) -> usize {
        self.num_used.load(Ordering::Relaxed)
    }

    /// `None` where memory should be near to the worker that writes it first.
    pub fn page_commit(&self) -> Option<PageCommit> {
        let part_bytes = self.num_kv_heads * self.part_bytes();
        let has_pages = part_bytes > 0 && self.num_layers > 0;
        (has_pages && !has_near_memory())
            .then(|| PageCommit::new(self.num_layers, self.num_pages, part_bytes))
    }

    /// Has the system give memory for some pages. What others write there meanwhile stays.
    pub fn commit(&self, bytes: Range<usize>) -> bool {
        self.region.commit(bytes)
    }

    pub fn page_size(&self) -> usize {
        self.page_size
    }

    pub fn num_layers(&self) -> usize {
        self.num_layers
    }

    pub fn num_pages(&self) -> usize {
        self.num_pages
    }

    /// Bytes from one dimension of a key, or one pair of them, to the next.
    pub fn key_stride(&self) -> usize {
        match self.order {
            ElementOrder::Plain => self.page_size * self.format.size(),
            ElementOrder::Tiles => 2 * self.page_size * self.format.size(),
            ElementOrder::Rows => self.format.size(),
        }
    }

    /// The keys of positions `offset..offset + num_positions` of a page.
    pub fn keys(&self, at: HeadPage, offset: usize, num_positions: usize) -> KeyGroup {
        assert!(offset + num_positions <= self.page_size);
        KeyGroup {
            keys: self.element(at, self.key_index(0, offset)),
            num_positions,
            offset: 0,
        }
    }

    /// The values of the same positions.
    pub fn values(&self, at: HeadPage, offset: usize, num_positions: usize) -> ValueRun {
        assert!(offset + num_positions <= self.page_size);
        ValueRun {
            values: self.element(at, self.value_index(0, offset)),
            num_positions,
        }
    }

    /// In `ElementOrder::Tiles`: dimension 0 of the positions of a tile, from `offset` on.
    pub fn tile(&self, side: Side, at: HeadPage, offset: usize) -> *const u8 {
        debug_assert!(self.order == ElementOrder::Tiles && offset.is_multiple_of(KEY_TILE));
        self.element(
            at,
            match side {
                Side::Keys => self.key_index(0, offset),
                Side::Values => self.value_index(0, offset),
            },
        )
    }

    /// Multiplies positions of a page, as far as their elements are integers.
    fn scales(&self, at: HeadPage, side: Side, offset: usize) -> *mut f32 {
        assert!(self.format == KvFormat::Int8 && offset < self.page_size);
        let index = side as usize * self.page_size + offset;
        let part = self.part(at).as_ptr();
        // SAFETY: behind the elements of the head's part of the page.
        unsafe { part.add(2 * self.half_len()).cast::<f32>().add(index) }
    }

    /// Asks memory for those of a tile.
    pub fn fetch_scales(&self, at: HeadPage, offset: usize) {
        for side in Side::BOTH {
            fetch_line(self.scales(at, side, offset).cast());
        }
    }

    pub fn copy_scales(&self, at: HeadPage, side: Side, offset: usize, out: &mut [f32]) {
        assert!(offset + out.len() <= self.page_size);
        let from = self.scales(at, side, offset).cast::<u8>();
        let bytes = size_of_val(out);
        // SAFETY: inside the page, which no one writes during attention; perhaps not aligned.
        unsafe { std::ptr::copy_nonoverlapping(from, out.as_mut_ptr().cast(), bytes) };
    }

    /// Rounds keys, or values, of positions from `offset` on to the page; rows are `stride` elements
    /// apart.
    ///
    /// # Safety
    /// `rows` has `rows.len` rows of `head_dim` elements, and nothing else uses these positions of the
    /// head meanwhile.
    pub unsafe fn write(
        &self,
        kernels: &Kernels,
        side: Side,
        at: HeadPage,
        offset: usize,
        rows: Rows,
    ) {
        assert!(offset + rows.len <= self.page_size);
        let is_bf16 = self.format == KvFormat::Float(DType::Bf16);
        if let Some(tiles) = self.tile_attention(kernels).filter(|_| is_bf16) {
            for (rows, positions) in rows.by_tile(offset) {
                let tile = self.tile(side, at, positions.start / KEY_TILE * KEY_TILE);
                let (store, stride) = match side {
                    Side::Keys => (tiles.store_keys, self.key_stride()),
                    Side::Values => (tiles.store_values, self.head_dim * 4),
                };
                let first = positions.start % KEY_TILE;
                let positions = first..first + rows.len;
                let (from, head_dim) = (rows.first, self.head_dim);
                // SAFETY: positions of the tile; exclusive by the caller's promise.
                unsafe {
                    store(
                        from,
                        rows.stride,
                        positions,
                        head_dim,
                        tile.cast_mut(),
                        stride,
                    )
                };
            }
            return;
        }
        for row in 0..rows.len {
            // SAFETY: the caller's promise.
            let values = unsafe { rows.row(row, self.head_dim) };
            // SAFETY: elements of the position; exclusive by the caller's promise.
            unsafe { self.write_position(kernels, side, at, offset + row, values) };
        }
    }

    /// The kernels of attention through tiles, if these pages hold tiles. Otherwise attention goes
    /// row by row.
    pub fn tile_attention<'a>(&self, kernels: &'a Kernels) -> Option<&'a TileAttention> {
        let tiles = kernels.tile_attention.as_ref();
        tiles.filter(|_| self.order == ElementOrder::Tiles)
    }

    /// Element by element.
    ///
    /// # Safety
    /// Nobody else uses the elements meanwhile.
    unsafe fn write_position(
        &self,
        kernels: &Kernels,
        side: Side,
        at: HeadPage,
        offset: usize,
        values: &[f32],
    ) {
        let index = |i: usize| match side {
            Side::Keys => self.key_index(i, offset),
            Side::Values => self.value_index(i, offset),
        };
        // Indices ascend.
        let (part, size) = (self.element(at, 0), self.format.size());
        assert!(values.len() <= self.head_dim && index(self.head_dim - 1) < 2 * self.half_len());
        // SAFETY: just checked.
        let element = |i: usize| unsafe { part.add(index(i) * size) };
        if self.format == KvFormat::Int8 {
            // SAFETY: elements of the page; exclusive by the caller's promise.
            let scale = for_each_quantised(kernels, values, |i, value| unsafe {
                *element(i).cast() = value;
            });
            // SAFETY: as above; perhaps not aligned.
            return unsafe { self.scales(at, side, offset).write_unaligned(scale) };
        }
        for (i, &value) in values.iter().enumerate() {
            let to = element(i);
            // SAFETY: as above; pages are aligned to their elements.
            unsafe {
                match self.format {
                    KvFormat::Float(DType::F32) => *to.cast::<f32>() = value,
                    KvFormat::Float(DType::Bf16) => *to.cast::<bf16>() = bf16::from_f32(value),
                    KvFormat::Float(DType::F16) => *to.cast::<f16>() = f16::from_f32(value),
                    KvFormat::Int8 => unreachable!("integers need a scale"),
                }
            }
        }
    }

    /// Copies the first `num_rows` positions of a page, all layers.
    ///
    /// # Safety
    /// Nobody writes the one page meanwhile, and nobody uses the other.
    pub unsafe fn copy_rows(&self, from: usize, to: usize, num_rows: usize) {
        assert!(num_rows <= self.page_size);
        let size = self.format.size();
        let num_values = match self.order {
            ElementOrder::Plain | ElementOrder::Rows => num_rows * self.head_dim,
            ElementOrder::Tiles => num_rows.next_multiple_of(2) * self.head_dim,
        };
        for (layer, head) in self.layers_and_heads() {
            let [from, to] = [from, to].map(|page| HeadPage { layer, page, head });
            // SAFETY: the first positions of this head; nobody else's by the caller's promise.
            let copy = |at: usize, len: usize| unsafe {
                std::ptr::copy(self.element(from, at), self.element(to, at), len * size);
            };
            match self.order {
                ElementOrder::Plain => {
                    (0..self.head_dim).for_each(|i| copy(self.key_index(i, 0), num_rows));
                }
                ElementOrder::Tiles => (0..self.head_dim)
                    .step_by(2)
                    .for_each(|i| copy(self.key_index(i, 0), 2 * num_rows)),
                ElementOrder::Rows => copy(0, num_rows * self.head_dim),
            }
            copy(self.value_index(0, 0), num_values);
            if self.format == KvFormat::Int8 && num_rows > 0 {
                for side in Side::BOTH {
                    let [from, to] = [from, to].map(|at| self.scales(at, side, 0).cast::<u8>());
                    // SAFETY: as above.
                    unsafe { std::ptr::copy(from, to, num_rows * size_of::<f32>()) };
                }
            }
        }
    }

    /// All pages of all layers.
    pub fn bytes(&self) -> NonNull<[u8]> {
        let num_parts = self.num_layers * self.num_pages * self.num_kv_heads;
        NonNull::slice_from_raw_parts(self.region.start(), num_parts * self.part_bytes())
    }

    /// Where a page within a layer lies: heads in their order, which begin somewhere in the middle.
    pub fn native_parts(&self, layer: usize, page: usize) -> [NonNull<[u8]>; 2] {
        let first = self.place(HeadPage {
            layer,
            page,
            head: 0,
        });
        let parts = [
            (0, self.num_kv_heads - first),
            (self.num_kv_heads - first, first),
        ];
        parts.map(|(head, num_heads)| {
            // An empty part is nowhere in particular.
            let head = head % self.num_kv_heads;
            let part = self.part(HeadPage { layer, page, head });
            let len = num_heads * self.part_bytes();
            NonNull::slice_from_raw_parts(part, len)
        })
    }

    fn layers_and_heads(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let num_heads = self.num_kv_heads;
        (0..self.num_layers).flat_map(move |layer| (0..num_heads).map(move |head| (layer, head)))
    }

    /// Elements of the keys, or the values, of a head in a page.
    fn half_len(&self) -> usize {
        self.page_size * self.head_dim
    }

    /// Where dimension i of a position's key stands in a head's part of a page.
    fn key_index(&self, i: usize, position: usize) -> usize {
        self.order
            .key_index(self.page_size, self.head_dim, i, position)
    }

    fn value_index(&self, i: usize, position: usize) -> usize {
        self.half_len() + self.order.value_index(self.head_dim, i, position)
    }

    fn element(&self, at: HeadPage, index: usize) -> *mut u8 {
        assert!(index < 2 * self.half_len());
        // SAFETY: just checked.
        unsafe { self.part(at).as_ptr().add(index * self.format.size()) }
    }

    /// A head's part of a page.
    fn part(&self, at: HeadPage) -> NonNull<u8> {
        let page = at.layer * self.num_pages + at.page;
        let start = (page * self.num_kv_heads + self.place(at)) * self.part_bytes();
        // SAFETY: `place` has checked all indices.
        unsafe { self.region.start().add(start) }
    }

    /// Which of a page's parts is the head's.
    fn place(&self, at: HeadPage) -> usize {
        assert!(at.layer < self.num_layers && at.page < self.num_pages);
        assert!(at.head < self.num_kv_heads);
        (at.head + at.page) % self.num_kv_heads
    }

    fn part_bytes(&self) -> usize {
        2 * self.page_size * self.format.row_bytes(self.head_dim)
    }
}

/// Rows of a head, of consecutive positions.
#[derive(Clone, Copy)]
pub struct Rows {
    pub first: *const f32,
    /// Elements from row to row.
    pub stride: usize,
    pub len: usize,
}

impl Rows {
    /// # Safety
    /// The row has `head_dim` elements, which nobody writes meanwhile.
    unsafe fn row<'a>(&self, row: usize, head_dim: usize) -> &'a [f32] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts(self.first.add(row * self.stride), head_dim) }
    }

    /// Those of each tile of positions, and where they are in the page.
    fn by_tile(self, offset: usize) -> impl Iterator<Item = (Self, Range<usize>)> {
        let end = offset + self.len;
        let mut next = offset;
        std::iter::from_fn(move || {
            let positions = next..end.min((next / KEY_TILE + 1) * KEY_TILE);
            next = positions.end;
            let rows = Self {
                first: self
                    .first
                    .wrapping_add((positions.start - offset) * self.stride),
                len: positions.len(),
                ..self
            };
            (!positions.is_empty()).then_some((rows, positions))
        })
    }
}

/// One KV head's part of a page.
#[derive(Clone, Copy, Debug)]
pub struct HeadPage {
    /// The number of the layer in the page.
    pub layer: usize,
    pub page: usize,
    pub head: usize,
}

/// Calls `visit` with each index and value, quantised to ±127 times the largest magnitude; returns
/// what they are to be multiplied by.
fn for_each_quantised(kernels: &Kernels, values: &[f32], mut visit: impl FnMut(usize, i8)) -> f32 {
    const AT_ONCE: usize = 128;
    // SAFETY: exactly the values.
    let most = unsafe { (kernels.largest_bits)(values.as_ptr(), values.len()) };
    let (scale, inverse) = int8_scale(most);
    let mut quantised = [0; AT_ONCE];
    for (part, values) in values.chunks(AT_ONCE).enumerate() {
        // SAFETY: as many elements as there is room for.
        unsafe {
            (kernels.quantise)(
                values.as_ptr(),
                values.len(),
                inverse,
                quantised.as_mut_ptr(),
            )
        };
        for (i, value) in quantised[..values.len()].iter().enumerate() {
            visit(part * AT_ONCE + i, *value);
        }
    }
    scale
}
