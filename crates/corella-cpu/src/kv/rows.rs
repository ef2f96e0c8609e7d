//! The rows of keys and values in pages, in the view of layers with heads of one shape.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use corella_model::{AttentionSpec, DType, ElementOrder, KvFormat, KvLayer, int8_scale};
use half::{bf16, f16};

use crate::kernels::{KEY_TILE, Kernels, KeyGroup, TileAttention, ValueRun, fetch_line};
use crate::system::Region;

use super::row_shape::RowShape;

/// The two parts of each position in a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Keys,
    Values,
}

impl Side {
    pub const BOTH: [Self; 2] = [Self::Keys, Self::Values];
}

/// The pages in the view of layers with heads of one shape.
pub struct KvRows {
    region: Arc<Region>,
    pub order: ElementOrder,
    pub format: KvFormat,
    shape: RowShape,
    /// Whether the order of the heads' parts rotates from page to page. It stays the same if layers have different
    /// shapes, because pages are then copied without knowledge of their layers.
    moves_on: bool,
    num_layers: usize,
    place_bytes: usize,
    num_pages: usize,
    num_kv_heads: usize,
    page_size: usize,
    head_dim: usize,
}

/// The size of a place in a page, and the number of places.
#[derive(Clone, Copy)]
pub struct PlaceSize {
    pub num_bytes: usize,
    pub num_places: usize,
    pub num_pages: usize,
    pub page_size: usize,
}

impl KvRows {
    /// See the field `moves_on`.
    pub fn new(
        region: &Arc<Region>,
        shape: RowShape,
        moves_on: bool,
        place: PlaceSize,
        (format, order): (KvFormat, ElementOrder),
    ) -> Self {
        Self {
            region: Arc::clone(region),
            order,
            format,
            shape,
            moves_on,
            num_layers: place.num_places * shape.num_in_place,
            place_bytes: place.num_bytes,
            num_pages: place.num_pages,
            num_kv_heads: shape.num_kv_heads,
            page_size: place.page_size,
            head_dim: shape.head_dim,
        }
    }

    /// Whether a layer with this attention has these rows.
    pub fn are_of(&self, attention: &AttentionSpec) -> bool {
        self.heads() == (attention.num_kv_heads, attention.head_dim)
    }

    /// The number of heads, and the number of elements of each.
    pub fn heads(&self) -> (usize, usize) {
        (self.num_kv_heads, self.head_dim)
    }

    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    pub fn page_size(&self) -> usize {
        self.page_size
    }

    /// The index of a layer in this view.
    pub fn layer(&self, layer: KvLayer) -> usize {
        layer.in_page * self.shape.num_in_place + layer.in_place
    }

    /// The distance in bytes from one dimension of a key, or one pair of dimensions, to the next.
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

    /// The values of positions `offset..offset + num_positions` of a page.
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

    /// The scales of positions of a page, if their elements are integers.
    fn scales(&self, at: HeadPage, side: Side, offset: usize) -> *mut f32 {
        assert!(self.format == KvFormat::Int8 && offset < self.page_size);
        let index = side as usize * self.page_size + offset;
        let part = self.part(at).as_ptr();
        // SAFETY: the scales follow the elements in the head's part of the page.
        unsafe { part.add(2 * self.half_len()).cast::<f32>().add(index) }
    }

    /// Prefetches the scales of a tile.
    pub fn fetch_scales(&self, at: HeadPage, offset: usize) {
        for side in Side::BOTH {
            fetch_line(self.scales(at, side, offset).cast());
        }
    }

    pub fn copy_scales(&self, at: HeadPage, side: Side, offset: usize, out: &mut [f32]) {
        assert!(offset + out.len() <= self.page_size);
        let from = self.scales(at, side, offset).cast::<u8>();
        let bytes = size_of_val(out);
        // SAFETY: inside the page, which is not written during attention; perhaps not aligned.
        unsafe { std::ptr::copy_nonoverlapping(from, out.as_mut_ptr().cast(), bytes) };
    }

    /// Rounds keys, or values, of positions from `offset` on to the page; rows are `stride` elements apart.
    ///
    /// # Safety
    /// `rows` has `rows.len` rows of `head_dim` elements, and no other thread uses these positions of the head
    /// meanwhile.
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

    /// The kernels of attention through tiles, if these pages hold tiles. `None` means row by row.
    pub fn tile_attention<'a>(&self, kernels: &'a Kernels) -> Option<&'a TileAttention> {
        let tiles = kernels.tile_attention.as_ref();
        tiles.filter(|_| self.order == ElementOrder::Tiles)
    }

    /// Writes one position, element by element.
    ///
    /// # Safety
    /// No other thread uses the elements meanwhile.
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
        // Indices ascend with `i`, so checking the last one suffices.
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
        if let (KvFormat::Float(DType::F32), Some(step)) = (self.format, self.element_step(side)) {
            // The loop below looks up order and format for each element.
            let first = element(0).cast::<f32>();
            for (i, &value) in values.iter().enumerate() {
                // SAFETY: as above; pages are aligned to their elements.
                unsafe { *first.add(i * step) = value };
            }
            return;
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
    /// Meanwhile, the source page is not written, and the target page is not used.
    pub unsafe fn copy_rows(&self, from: usize, to: usize, num_rows: usize) {
        assert!(num_rows <= self.page_size);
        let size = self.format.size();
        let num_values = match self.order {
            ElementOrder::Plain | ElementOrder::Rows => num_rows * self.head_dim,
            ElementOrder::Tiles => num_rows.next_multiple_of(2) * self.head_dim,
        };
        for (layer, head) in self.layers_and_heads() {
            let [from, to] = [from, to].map(|page| HeadPage { layer, page, head });
            // SAFETY: the first positions of this head, which by the caller's promise no other thread uses.
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

    /// A page's memory in a layer, as two parts. One after the other, they hold the heads in order: the first head may
    /// lie in the middle of the memory.
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
            // The address of an empty part is arbitrary.
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

    /// The number of elements of a head's keys, or of its values, in a page.
    fn half_len(&self) -> usize {
        self.page_size * self.head_dim
    }

    /// The index of dimension `i` of a position's key in a head's part of a page.
    fn key_index(&self, i: usize, position: usize) -> usize {
        self.order
            .key_index(self.page_size, self.head_dim, i, position)
    }

    fn value_index(&self, i: usize, position: usize) -> usize {
        self.half_len() + self.order.value_index(self.head_dim, i, position)
    }

    /// The distance between the elements of a position, if constant.
    fn element_step(&self, side: Side) -> Option<usize> {
        match (self.order, side) {
            (ElementOrder::Tiles, _) => None,
            (ElementOrder::Plain, Side::Keys) => Some(self.page_size),
            (ElementOrder::Plain, Side::Values) | (ElementOrder::Rows, _) => Some(1),
        }
    }

    fn element(&self, at: HeadPage, index: usize) -> *mut u8 {
        assert!(index < 2 * self.half_len());
        // SAFETY: just checked.
        unsafe { self.part(at).as_ptr().add(index * self.format.size()) }
    }

    /// A head's part of a page.
    fn part(&self, at: HeadPage) -> NonNull<u8> {
        let (num_in_place, part_bytes) = (self.shape.num_in_place, self.part_bytes());
        let place = at.layer / num_in_place * self.num_pages + at.page;
        let part = at.layer % num_in_place * self.num_kv_heads + self.place(at);
        let start = place * self.place_bytes + part * part_bytes;
        // SAFETY: `place` has checked all indices.
        unsafe { self.region.start().add(start) }
    }

    /// The index of the head's part among the parts of its layer in the page.
    fn place(&self, at: HeadPage) -> usize {
        assert!(at.layer < self.num_layers && at.page < self.num_pages);
        assert!(at.head < self.num_kv_heads);
        match self.moves_on {
            true => (at.head + at.page) % self.num_kv_heads,
            false => at.head,
        }
    }

    fn part_bytes(&self) -> usize {
        self.shape.head_bytes(self.page_size, self.format)
    }
}

/// Rows of a head, of consecutive positions.
#[derive(Clone, Copy)]
pub struct Rows {
    pub first: *const f32,
    /// The distance between rows, in elements.
    pub stride: usize,
    pub len: usize,
}

impl Rows {
    /// # Safety
    /// The row has `head_dim` elements, which are not written meanwhile.
    unsafe fn row<'a>(&self, row: usize, head_dim: usize) -> &'a [f32] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts(self.first.add(row * self.stride), head_dim) }
    }

    /// The rows of each tile of positions, and their place in the page.
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
    /// The index of the layer in the page.
    pub layer: usize,
    pub page: usize,
    pub head: usize,
}

/// Calls `visit` with each index and the value's integer: the largest magnitude becomes ±127. Returns the factor for
/// decoding.
fn for_each_quantised(kernels: &Kernels, values: &[f32], mut visit: impl FnMut(usize, i8)) -> f32 {
    const AT_ONCE: usize = 128;
    // SAFETY: exactly the values.
    let most = unsafe { (kernels.largest_bits)(values.as_ptr(), values.len()) };
    let (scale, inverse) = int8_scale(most);
    let mut quantised = [0; AT_ONCE];
    for (part, values) in values.chunks(AT_ONCE).enumerate() {
        // SAFETY: exactly as many elements as fit.
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
