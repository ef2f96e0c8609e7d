//! KV memory that other threads read and write while the executor runs.
//!
//! Equal layouts exchange native bytes. Executors with other layouts exchange a canonical form, which the receiver
//! converts.

use std::iter;
use std::ptr::NonNull;
use std::slice;
use std::time::Duration;

use corella_core::{PageId, StepId};

use crate::kv::element_order::{to_canonical, to_native};
use crate::{DecoderSpec, ElementOrder, KvFormat, KvGroups, KvLayers, StateRecords};

/// The facts about pages that two executors exchange. Whether they run the same model is checked elsewhere.
#[derive(Clone, Debug, PartialEq)]
pub struct KvGeometry {
    /// The number of layers in a page: with several KV groups, layers of the page's group.
    pub num_layers: u32,
    /// The places of the model's layers in pages.
    pub layers: KvLayers,
    pub num_kv_heads: u32,
    pub head_dim: u32,
    /// The number of positions in a page.
    pub page_size: u32,
    pub num_pages: u32,
    pub format: KvFormat,
    /// The order of elements in the executor's memory.
    pub order: ElementOrder,
}

impl KvGeometry {
    /// Pages that hold the rows of every layer of a KV group one after the other.
    pub fn of_rows(
        spec: &DecoderSpec,
        kv_groups: &KvGroups,
        num_pages: u32,
        page_size: u32,
        format: KvFormat,
    ) -> Self {
        let attention = &spec.layers[0].attention;
        Self {
            num_layers: kv_groups.num_page_layers(0..spec.layers.len()) as u32,
            layers: KvLayers::new(kv_groups, iter::once(0..spec.layers.len())),
            num_kv_heads: attention.num_kv_heads as u32,
            head_dim: attention.head_dim as u32,
            page_size,
            num_pages,
            format,
            order: ElementOrder::Rows,
        }
    }

    /// The size of one page within one layer, in either form.
    pub fn layer_bytes(&self) -> usize {
        self.num_kv_heads as usize * self.head_bytes()
    }

    /// The size of one page with all its layers.
    pub fn page_bytes(&self) -> usize {
        self.num_layers as usize * self.layer_bytes()
    }

    /// The size of one KV head's part of a page within one layer.
    pub fn head_bytes(&self) -> usize {
        2 * self.page_size as usize * self.format.row_bytes(self.head_dim as usize)
    }

    /// The size of a head's part without its scales.
    pub fn element_bytes(&self) -> usize {
        2 * (self.page_size * self.head_dim) as usize * self.format.size()
    }

    /// Whether both executors lay out a layer's part of a page in the same way.
    pub fn is_native_to(&self, other: &Self) -> bool {
        let part = |of: &Self| {
            let shape = (of.num_kv_heads, of.head_dim, of.page_size);
            (shape, of.format, of.order)
        };
        part(self) == part(other)
    }
}

/// The layout of a page's bytes within a layer. Both forms have `KvGeometry::layer_bytes` bytes, and both consist of
/// the parts of all KV heads, in the order of the heads. Bytes of positions without a token are void.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageForm {
    /// A head's part in the order of `KvGeometry::order`. For two executors with the same layout
    /// (`KvGeometry::is_native_to`).
    Native,
    /// For all other executors. A head's part is `[K, V][position][head_dim]` in the KV format of the sender, followed,
    /// for `KvFormat::Int8`, by the head's scales, `[K, V][position]` in f32. Numbers are little-endian.
    /// `PageConversion` converts the part to another KV format or page size.
    Canonical,
}

/// The progress of a layer in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerProgress {
    /// The keys and values of all the step's tokens are in the pages.
    Ready,
    TimedOut,
    /// The executor has finished the step: the layer is ready, or the step has failed. `Executor::wait` reports which,
    /// or has reported it.
    StepOver,
}

/// The KV memory of an executor. The memory keeps its address while a reference to this object exists, even after the
/// executor is dropped.
///
/// A page is named by its id and a layer. Layers are numbered within pages, over all pipeline stages
/// (`KvGeometry::layers` maps them to the model's layers). A layer of pages is done when it is done in all KV groups. A
/// layer, a page or a number of bytes that does not exist is an error of the caller, and panics.
///
/// # Safety
/// `native_parts` returns `KvGeometry::layer_bytes` bytes of memory in total, which only the owner of the page writes,
/// and which no other page or layer shares. All of it lies in one of the `regions`.
pub unsafe trait KvPages: Send + Sync {
    fn geometry(&self) -> &KvGeometry;

    /// The memory of all pages, in as few pieces as possible. For transports that must announce memory before they use
    /// it.
    fn regions(&self) -> Vec<NonNull<[u8]>>;

    /// The place of a page within a layer, in its native form, as two parts of whole heads; the second part may be
    /// empty. For transports that send and receive in place. They must keep the contract of `read` and `write`.
    fn native_parts(&self, layer: u32, page: PageId) -> [NonNull<[u8]>; 2];

    /// Records that a page has been filled, so it will be used soon. `write` records it by itself.
    fn note_written(&self, _page: PageId) {}

    /// The recurrent states after the rows. `None` for models without recurrent layers.
    fn states(&self) -> Option<&dyn StateRecords> {
        None
    }

    /// The number of layers, counted from the first, that have all keys and values of the step. When the executor has
    /// finished with the step, even if the step has failed, all layers count. Counted layers of the step's pages do not
    /// change until the step returns, and longer if the core keeps the pages.
    fn num_layers_done(&self, step: StepId) -> u32;

    /// Waits until a layer has all keys and values of the step. The step may still be unsubmitted.
    fn wait_layer(&self, step: StepId, layer: u32, timeout: Duration) -> LayerProgress;

    /// Copies pages within one layer, one after the other. Any thread may call this while steps run. The bytes of a
    /// step that has not returned may still prove invalid.
    ///
    /// # Safety
    /// Every step that writes to these pages has finished the layer (`wait_layer`) or has returned. Until the copy is
    /// complete, the core keeps the pages from other requests, and no further step, copy of rows or `write` changes
    /// them: they are held, and are full or belong to a request that computes no more rows.
    unsafe fn read(&self, layer: u32, pages: &[PageId], form: PageForm, out: &mut [u8]) {
        let geometry = self.geometry();
        let layer_bytes = geometry.layer_bytes();
        assert_eq!(out.len(), pages.len() * layer_bytes);
        for (&page, mut out) in pages.iter().zip(out.chunks_mut(layer_bytes)) {
            for part in self.native_parts(layer, page) {
                // SAFETY: memory of the pages, which by the caller's contract is not written.
                let part = unsafe { part.as_ref() };
                let (to, rest) = out.split_at_mut(part.len());
                match form {
                    PageForm::Native => to.copy_from_slice(part),
                    PageForm::Canonical => to_canonical(geometry, part, to),
                }
                out = rest;
            }
        }
    }

    /// The inverse of `read`, while steps run.
    ///
    /// # Safety
    /// The core has reserved the pages for this write: no other thread reads or writes them, and they are in no slot's
    /// page table and in no batch before the call has returned.
    unsafe fn write(&self, layer: u32, pages: &[PageId], form: PageForm, bytes: &[u8]) {
        let geometry = self.geometry();
        let layer_bytes = geometry.layer_bytes();
        assert_eq!(bytes.len(), pages.len() * layer_bytes);
        for (&page, mut bytes) in pages.iter().zip(bytes.chunks(layer_bytes)) {
            for mut part in self.native_parts(layer, page) {
                // SAFETY: memory of the pages, which by the caller's contract no other thread uses.
                let part = unsafe { part.as_mut() };
                let (from, rest) = bytes.split_at(part.len());
                match form {
                    PageForm::Native => part.copy_from_slice(from),
                    PageForm::Canonical => to_native(geometry, from, part),
                }
                bytes = rest;
            }
            self.note_written(page);
        }
    }

    /// Copies whole pages in the native form: all layers of a page, and then the next page.
    ///
    /// # Safety
    /// As for `read`, for all layers.
    unsafe fn read_whole(&self, pages: &[PageId], out: &mut [u8]) {
        let geometry = self.geometry();
        assert_eq!(out.len(), pages.len() * geometry.page_bytes());
        for (page, out) in pages.iter().zip(out.chunks_mut(geometry.page_bytes())) {
            for (layer, out) in (0..).zip(out.chunks_mut(geometry.layer_bytes())) {
                // SAFETY: the caller's promise.
                unsafe { self.read(layer, slice::from_ref(page), PageForm::Native, out) };
            }
        }
    }

    /// The inverse of `read_whole`.
    ///
    /// # Safety
    /// As for `write`.
    unsafe fn write_whole(&self, pages: &[PageId], bytes: &[u8]) {
        let geometry = self.geometry();
        assert_eq!(bytes.len(), pages.len() * geometry.page_bytes());
        for (page, bytes) in pages.iter().zip(bytes.chunks(geometry.page_bytes())) {
            for (layer, bytes) in (0..).zip(bytes.chunks(geometry.layer_bytes())) {
                // SAFETY: the caller's promise.
                unsafe { self.write(layer, slice::from_ref(page), PageForm::Native, bytes) };
            }
        }
    }
}
