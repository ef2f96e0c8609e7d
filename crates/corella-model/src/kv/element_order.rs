//! The order of the keys and values of a page in an executor.

use crate::KvGeometry;

/// The layout of one KV head's part of a page in an executor's memory: its keys, then its values,
/// and, for `KvFormat::Int8`, its scales `[K, V][position]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ElementOrder {
    /// Keys `[head_dim][page_size]`, so that positions lie side by side for the scores, and values
    /// `[page_size][head_dim]`.
    Plain,
    /// The order of matrix tiles: keys `[head_dim / 2][page_size][2]`, values `[page_size /
    /// 2][head_dim][2]`.
    Tiles,
    /// Keys and values `[page_size][head_dim]`: the canonical form of pages, and the order of GPUs.
    Rows,
}

impl ElementOrder {
    /// The index of dimension `i` of a position's key among a head's keys in a page.
    pub fn key_index(self, page_size: usize, head_dim: usize, i: usize, position: usize) -> usize {
        match self {
            Self::Rows => position * head_dim + i,
            Self::Plain => i * page_size + position,
            Self::Tiles => (i / 2 * page_size + position) * 2 + i % 2,
        }
    }

    /// The index of dimension `i` of a position's value among a head's values in a page.
    pub fn value_index(self, head_dim: usize, i: usize, position: usize) -> usize {
        match self {
            Self::Plain | Self::Rows => position * head_dim + i,
            Self::Tiles => (position / 2 * head_dim + i) * 2 + position % 2,
        }
    }
}

/// Rewrites whole heads from the geometry's own order to the canonical form.
pub fn to_canonical(geometry: &KvGeometry, native: &[u8], canonical: &mut [u8]) {
    let head_bytes = geometry.head_bytes();
    let heads = native.chunks(head_bytes);
    for (native, canonical) in heads.zip(canonical.chunks_mut(head_bytes)) {
        match geometry.format.size() {
            1 => gather::<1>(geometry, native, canonical),
            2 => gather::<2>(geometry, native, canonical),
            _ => gather::<4>(geometry, native, canonical),
        }
    }
}

/// The inverse of `to_canonical`.
pub fn to_native(geometry: &KvGeometry, canonical: &[u8], native: &mut [u8]) {
    let head_bytes = geometry.head_bytes();
    let heads = canonical.chunks(head_bytes);
    for (canonical, native) in heads.zip(native.chunks_mut(head_bytes)) {
        match geometry.format.size() {
            1 => scatter::<1>(geometry, canonical, native),
            2 => scatter::<2>(geometry, canonical, native),
            _ => scatter::<4>(geometry, canonical, native),
        }
    }
}

/// One head, of elements of `N` bytes.
fn gather<const N: usize>(geometry: &KvGeometry, native: &[u8], canonical: &mut [u8]) {
    let num_bytes = geometry.element_bytes();
    let (from, from_scales) = native.split_at(num_bytes);
    let (to, to_scales) = canonical.split_at_mut(num_bytes);
    to_scales.copy_from_slice(from_scales);
    let (from, to) = (from.as_chunks::<N>().0, to.as_chunks_mut::<N>().0);
    for_each_element(geometry, |native, canonical| to[canonical] = from[native]);
}

/// The inverse of `gather`.
fn scatter<const N: usize>(geometry: &KvGeometry, canonical: &[u8], native: &mut [u8]) {
    let num_bytes = geometry.element_bytes();
    let (from, from_scales) = canonical.split_at(num_bytes);
    let (to, to_scales) = native.split_at_mut(num_bytes);
    to_scales.copy_from_slice(from_scales);
    let (from, to) = (from.as_chunks::<N>().0, to.as_chunks_mut::<N>().0);
    for_each_element(geometry, |native, canonical| to[native] = from[canonical]);
}

/// Calls `visit(index in the geometry's order, index in the canonical form)` for a head.
fn for_each_element(geometry: &KvGeometry, mut visit: impl FnMut(usize, usize)) {
    let page_size = geometry.page_size as usize;
    let head_dim = geometry.head_dim as usize;
    let half_len = page_size * head_dim;
    for position in 0..page_size {
        for i in 0..head_dim {
            let canonical = position * head_dim + i;
            let key = geometry.order.key_index(page_size, head_dim, i, position);
            visit(key, canonical);
            let value = geometry.order.value_index(head_dim, i, position);
            visit(half_len + value, half_len + canonical);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, KvFormat, KvLayers};

    /// Two heads of two positions of two dimensions. A key's element is `kPI`, position and
    /// dimension, a value's `vPI`, and the second head's are 100 more.
    fn geometry(order: ElementOrder, format: KvFormat) -> KvGeometry {
        KvGeometry {
            num_layers: 1,
            layers: KvLayers::one(1),
            num_kv_heads: 2,
            head_dim: 2,
            page_size: 2,
            num_pages: 1,
            format,
            order,
        }
    }

    #[test]
    fn integers_and_scales_stand_head_by_head() {
        // Scales 1, 2 (keys) and 3, 4 (values) of the first head, 5 to 8 of the second.
        let scales =
            |first: u8| (first..first + 4).flat_map(|scale| f32::from(scale).to_le_bytes());
        let page = |heads: [[u8; 8]; 2]| -> Vec<u8> {
            let [a, b] = heads;
            a.into_iter()
                .chain(scales(1))
                .chain(b)
                .chain(scales(5))
                .collect()
        };
        // k00 k01 k10 k11, v00 v01 v10 v11.
        let canonical = page([
            [0, 1, 10, 11, 50, 51, 60, 61],
            [100, 101, 110, 111, 150, 151, 160, 161],
        ]);
        // Keys by dimension, values by position.
        let plain = page([
            [0, 10, 1, 11, 50, 51, 60, 61],
            [100, 110, 101, 111, 150, 151, 160, 161],
        ]);
        // Keys in pairs of dimensions, values in pairs of positions.
        let tiles = page([
            [0, 1, 10, 11, 50, 60, 51, 61],
            [100, 101, 110, 111, 150, 160, 151, 161],
        ]);
        for (order, native) in [(ElementOrder::Plain, plain), (ElementOrder::Tiles, tiles)] {
            let geometry = geometry(order, KvFormat::Int8);
            assert_eq!(geometry.layer_bytes(), canonical.len());
            let mut out = vec![0; canonical.len()];
            to_canonical(&geometry, &native, &mut out);
            assert_eq!(out, canonical, "{order:?}");
            to_native(&geometry, &canonical, &mut out);
            assert_eq!(out, native, "{order:?}");
        }
    }

    #[test]
    fn elements_of_two_and_four_bytes_stay_whole() {
        for (dtype, size) in [(DType::Bf16, 2), (DType::F16, 2), (DType::F32, 4)] {
            let geometry = geometry(ElementOrder::Plain, KvFormat::Float(dtype));
            let bytes = |elements: [u8; 16]| -> Vec<u8> {
                let element = |e: u8| (0..size).map(move |byte| e * 4 + byte);
                elements.into_iter().flat_map(element).collect()
            };
            let native = bytes([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]);
            let canonical = bytes([0, 2, 1, 3, 4, 5, 6, 7, 8, 10, 9, 11, 12, 13, 14, 15]);
            let mut out = vec![0; native.len()];
            to_canonical(&geometry, &native, &mut out);
            assert_eq!(out, canonical, "{dtype:?}");
        }
    }
}
