//! KV memory that others read and write while the executor runs.

use std::iter;
use std::ptr::NonNull;
use std::time::Duration;

use corella_core::{PageId, StepId};

use crate::element_order::{to_canonical, to_native};
use crate::{DecoderSpec, ElementOrder, KvFormat, KvGroups, KvLayers, StateRecords};

/// What two executors have to know of each other's pages. Whether they run the same model is
/// another question.
#[derive(Clone, Debug, PartialEq)]
pub struct KvGeometry {
    /// Layers that a page has room for: with several KV groups, those of the group that the page belongs to.
    pub num_layers: u32,
    /// Where the model's layers are in pages.
    pub layers: KvLayers,
    pub num_kv_heads: u32,
    pub head_dim: u32,
    /// Positions in a page.
    pub page_size: u32,
    pub num_pages: u32,
    pub format: KvFormat,
    /// The executor's own.
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

    /// One page within one layer, in either form.
    pub fn layer_bytes(&self) -> usize {
        self.num_kv_heads as usize * self.head_bytes()
    }

    /// One page, all its layers.
    pub fn page_bytes(&self) -> usize {
        self.num_layers as usize * self.layer_bytes()
    }

    /// One KV head's part of a page within one layer.
    pub fn head_bytes(&self) -> usize {
        2 * self.page_size as usize * self.format.row_bytes(self.head_dim as usize)
    }

    /// A head's part without its scales.
    pub fn element_bytes(&self) -> usize {
        2 * (self.page_size * self.head_dim) as usize * self.format.size()
    }

    /// Whether a layer's part of a page in this one's native form is one in the other's.
    pub fn is_native_to(&self, other: &Self) -> bool {
        let part = |of: &Self| {
            let shape = (of.num_kv_heads, of.head_dim, of.page_size);
            (shape, of.format, of.order)
        };
        part(self) == part(other)
    }
}

/// What the bytes of a page within a layer mean. Both forms have `KvGeometry::layer_bytes` bytes, and
/// in both they are the parts of all KV heads, in the order of the heads. What they hold of positions
/// without a token means nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageForm {
    /// A head's part is as `KvGeometry::order` says. For executors whose geometry `is_native_to` the
    /// other's.
    Native,
    /// For all others. A head's part is `[K, V][position][head_dim]` in the KV format of whoever sends
    /// it, followed, for `KvFormat::Int8`, by the head's scales, `[K, V][position]` in f32. Numbers
    /// are little-endian. `PageConversion` makes of it what another KV format or page size wants.
    Canonical,
}

/// What has come of a layer of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerProgress {
    /// The keys and values of all the step's tokens are in the pages.
    Ready,
    TimedOut,
    /// The executor is through with the step: the layer is ready, or the step has failed.
    /// `Executor::wait` will tell, or has told.
    StepOver,
}

/// The KV memory of an executor. It stays where it is while anybody has a reference to this, even
/// when the executor is gone.
///
/// A page is named by its id and a layer. Layers are numbered within pages, of all pipeline stages
/// (`KvGeometry::layers` says which layers of the model those are), and one is done when those of all
/// KV groups are. A layer, a page or
/// a number of bytes that does not exist is a mistake in the caller's code, and panics.
///
/// # Safety
/// `native_parts` returns `KvGeometry::layer_bytes` bytes of memory in all, which only the owner of
/// the page writes, and which no other page or layer shares. All of it lies in one of the `regions`.
pub unsafe trait KvPages: Send + Sync {
    fn geometry(&self) -> &KvGeometry;

    /// The memory that all pages lie in, in as few pieces as there are. For transports that must make
    /// memory known before they use it.
    fn regions(&self) -> Vec<NonNull<[u8]>>;

    /// Where a page within a layer lies, in its native form: a first part and, perhaps empty, the
    /// rest of it, each whole heads. For transports that send from where it is and receive to where
    /// it belongs; what is promised for `read` and `write` is promised by whoever uses it.
    fn native_parts(&self, layer: u32, page: PageId) -> [NonNull<[u8]>; 2];

    /// Somebody has filled a page, so it will be used soon. `write` says so itself.
    fn note_written(&self, _page: PageId) {}

    /// The recurrent states behind the rows. `None` for models without recurrent layers.
    fn states(&self) -> Option<&dyn StateRecords> {
        None
    }

    /// How many layers, counted from the first, have all keys and values of the step. All of them
    /// count when the executor has finished with the step, even if it has failed. From then on
    /// these layers of the step's pages do not change until it returns, and longer if the core
    /// keeps the pages.
    fn num_layers_done(&self, step: StepId) -> u32;

    /// Until a layer has all keys and values of the step. Steps that were not submitted yet can be
    /// waited for.
    fn wait_layer(&self, step: StepId, layer: u32, timeout: Duration) -> LayerProgress;

    /// Copies pages within one layer, one after the other. Any thread may call this while steps
    /// run. The bytes of a step that has not returned may still turn out to be invalid.
    ///
    /// # Safety
    /// The steps that write to these pages have the layer done (`wait_layer`) or have returned.
    /// Until the copy is complete, the core keeps the pages from other requests, and no further
    /// step, copy of rows or `write` changes them: they are held, and are full or belong to a
    /// request that computes no more rows.
    unsafe fn read(&self, layer: u32, pages: &[PageId], form: PageForm, out: &mut [u8]) {
        let geometry = self.geometry();
        let layer_bytes = geometry.layer_bytes();
        assert_eq!(out.len(), pages.len() * layer_bytes);
        for (&page, mut out) in pages.iter().zip(out.chunks_mut(layer_bytes)) {
            for part in self.native_parts(layer, page) {
                // SAFETY: memory of the pages, which nobody writes by the caller's promise.
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

    /// The reverse of `read`, while steps run.
    ///
    /// # Safety
    /// The core has reserved the pages for what is written here: nobody else reads or writes them,
    /// they are in no slot's page table and in no batch before the call has returned.
    unsafe fn write(&self, layer: u32, pages: &[PageId], form: PageForm, bytes: &[u8]) {
        let geometry = self.geometry();
        let layer_bytes = geometry.layer_bytes();
        assert_eq!(bytes.len(), pages.len() * layer_bytes);
        for (&page, mut bytes) in pages.iter().zip(bytes.chunks(layer_bytes)) {
            for mut part in self.native_parts(layer, page) {
                // SAFETY: memory of the pages, which are the caller's alone by its promise.
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
}
