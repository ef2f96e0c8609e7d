//! The pages that hold keys and values.
//!
//! One region: layer by layer, KV head by KV head, page by page, so that what a head reads
//! lies close together. A head's part of a page is its keys `[head_dim][page_size]`, so that
//! positions lie side by side for the scores, and its values `[page_size][head_dim]`.

use std::io;

use corella_model::{DType, DecoderSpec};
use half::{bf16, f16};

use crate::kernels::{ATTENTION_LANES, KeyGroup, ValueRun};
use crate::region::Region;

/// Memory of one page: K and V of all layers.
pub fn kv_page_bytes(spec: &DecoderSpec, page_size: u32, kv_dtype: DType) -> usize {
    let attention = &spec.attention;
    let elements = attention.num_kv_heads * attention.head_dim * page_size as usize;
    2 * spec.num_layers * elements * kv_dtype.size()
}

pub struct KvMemory {
    region: Region,
    pub dtype: DType,
    num_layers: usize,
    num_pages: usize,
    num_kv_heads: usize,
    page_size: usize,
    head_dim: usize,
}

impl KvMemory {
    pub fn new(
        spec: &DecoderSpec,
        num_pages: usize,
        page_size: u32,
        dtype: DType,
    ) -> io::Result<Self> {
        let bytes = kv_page_bytes(spec, page_size, dtype)
            .checked_mul(num_pages)
            .ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self {
            region: Region::new(bytes + ATTENTION_LANES * dtype.size())?,
            dtype,
            num_layers: spec.num_layers,
            num_pages,
            num_kv_heads: spec.attention.num_kv_heads,
            page_size: page_size as usize,
            head_dim: spec.attention.head_dim,
        })
    }

    pub fn page_size(&self) -> usize {
        self.page_size
    }

    pub fn num_pages(&self) -> usize {
        self.num_pages
    }

    pub fn page_bytes(&self) -> usize {
        2 * self.num_layers * self.num_kv_heads * self.half_len() * self.dtype.size()
    }

    /// Bytes from one dimension of a key to the next.
    pub fn key_stride(&self) -> usize {
        self.page_size * self.dtype.size()
    }

    /// The keys of positions `offset..offset + num_positions` of a page.
    pub fn keys(&self, at: HeadPage, offset: usize, num_positions: usize) -> KeyGroup {
        assert!(offset + num_positions <= self.page_size);
        KeyGroup {
            keys: self.element(at, offset),
            num_positions,
            offset: 0,
        }
    }

    /// The values of the same positions.
    pub fn values(&self, at: HeadPage, offset: usize, num_positions: usize) -> ValueRun {
        assert!(offset + num_positions <= self.page_size);
        ValueRun {
            values: self.element(at, self.half_len() + offset * self.head_dim),
            num_positions,
        }
    }

    /// Rounds one position's key to the page.
    ///
    /// # Safety
    /// Nobody else uses this position of the head meanwhile.
    pub unsafe fn write_key(&self, at: HeadPage, offset: usize, key: &[f32]) {
        assert!(offset < self.page_size && key.len() == self.head_dim);
        // SAFETY: element (i, offset) of the head's keys; exclusive by the caller's promise.
        unsafe { self.write(self.element(at, offset), self.page_size, key) }
    }

    /// # Safety
    /// Nobody else uses this position of the head meanwhile.
    pub unsafe fn write_value(&self, at: HeadPage, offset: usize, value: &[f32]) {
        assert!(offset < self.page_size && value.len() == self.head_dim);
        let start = self.half_len() + offset * self.head_dim;
        // SAFETY: element (offset, i) of the head's values; exclusive by the caller's promise.
        unsafe { self.write(self.element(at, start), 1, value) }
    }

    /// # Safety
    /// `values.len()` elements, `stride` apart, are the caller's.
    unsafe fn write(&self, start: *mut u8, stride: usize, values: &[f32]) {
        for (i, &value) in values.iter().enumerate() {
            // SAFETY: the caller's promise; pages are aligned to their elements.
            unsafe {
                match self.dtype {
                    DType::F32 => *start.cast::<f32>().add(i * stride) = value,
                    DType::Bf16 => *start.cast::<bf16>().add(i * stride) = bf16::from_f32(value),
                    DType::F16 => *start.cast::<f16>().add(i * stride) = f16::from_f32(value),
                }
            }
        }
    }

    /// Copies the first `num_rows` positions of a page, all layers.
    pub fn copy_rows(&mut self, from: usize, to: usize, num_rows: usize) {
        assert!(num_rows <= self.page_size);
        let size = self.dtype.size();
        for (layer, head) in self.layers_and_heads() {
            let [from, to] = [from, to].map(|page| HeadPage { layer, page, head });
            for i in 0..self.head_dim {
                let at = i * self.page_size;
                // SAFETY: rows of keys of this head; `&mut self` keeps everyone else out.
                unsafe {
                    std::ptr::copy(
                        self.element(from, at),
                        self.element(to, at),
                        num_rows * size,
                    );
                }
            }
            let at = self.half_len();
            // SAFETY: the first rows of values of this head; exclusive as above.
            unsafe {
                let len = num_rows * self.head_dim * size;
                std::ptr::copy(self.element(from, at), self.element(to, at), len);
            }
        }
    }

    /// A page in a form that does not depend on this layout's cut: by layer, all heads' keys
    /// and then all heads' values, each `[head][position][head_dim]`.
    pub fn read_page(&self, page: usize, out: &mut [u8]) {
        assert_eq!(out.len(), self.page_bytes());
        self.for_each_element(page, |at, element| {
            // SAFETY: elements lie inside the region; no step is running.
            let bytes = unsafe { std::slice::from_raw_parts(element, self.dtype.size()) };
            out[at..at + bytes.len()].copy_from_slice(bytes);
        });
    }

    /// The reverse of `read_page`.
    pub fn write_page(&mut self, page: usize, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.page_bytes());
        let size = self.dtype.size();
        self.for_each_element(page, |at, element| {
            // SAFETY: elements lie inside the region; `&mut self` keeps everyone else out.
            let out = unsafe { std::slice::from_raw_parts_mut(element, size) };
            out.copy_from_slice(&bytes[at..at + size]);
        });
    }

    /// Calls `visit(offset in the outside form, element)`.
    fn for_each_element(&self, page: usize, mut visit: impl FnMut(usize, *mut u8)) {
        let size = self.dtype.size();
        let half = self.half_len();
        for (layer, head) in self.layers_and_heads() {
            let at = HeadPage { layer, page, head };
            let keys = (layer * 2 * self.num_kv_heads + head) * half;
            let values = keys + self.num_kv_heads * half;
            for position in 0..self.page_size {
                for i in 0..self.head_dim {
                    let outside = position * self.head_dim + i;
                    let key = self.element(at, i * self.page_size + position);
                    visit((keys + outside) * size, key);
                    visit((values + outside) * size, self.element(at, half + outside));
                }
            }
        }
    }

    fn layers_and_heads(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let num_heads = self.num_kv_heads;
        (0..self.num_layers).flat_map(move |layer| (0..num_heads).map(move |head| (layer, head)))
    }

    /// Elements of the keys, or the values, of a head in a page.
    fn half_len(&self) -> usize {
        self.page_size * self.head_dim
    }

    fn element(&self, at: HeadPage, index: usize) -> *mut u8 {
        assert!(at.layer < self.num_layers && at.page < self.num_pages);
        assert!(at.head < self.num_kv_heads && index < 2 * self.half_len());
        let head = at.layer * self.num_kv_heads + at.head;
        let start = (head * self.num_pages + at.page) * 2 * self.half_len();
        // SAFETY: all indices were just checked.
        unsafe {
            self.region
                .as_ptr()
                .add((start + index) * self.dtype.size())
        }
    }
}

/// One KV head's part of a page.
#[derive(Clone, Copy, Debug)]
pub struct HeadPage {
    pub layer: usize,
    pub page: usize,
    pub head: usize,
}
