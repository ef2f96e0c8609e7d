//! KV memory of an executor, as far as a transfer has to know it.

use std::ptr::NonNull;

use corella_core::PageId;
use corella_model::KvFormat;

/// How an executor keeps the elements of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ElementOrder {
    Plain,
    Tiles,
}

#[derive(Clone, Debug, PartialEq)]
pub struct KvGeometry {
    pub num_layers: u32,
    pub num_kv_heads: u32,
    pub head_dim: u32,
    /// Positions in a page.
    pub page_size: u32,
    pub num_pages: u32,
    pub format: KvFormat,
    pub order: ElementOrder,
}

impl KvGeometry {
    /// One page within one layer, in either form.
    pub fn layer_bytes(&self) -> usize {
        let row_bytes = self.format.row_bytes(self.head_dim as usize);
        2 * (self.num_kv_heads * self.page_size) as usize * row_bytes
    }

    /// Whether a page in this one's native form is one in the other's.
    pub fn is_native_to(&self, other: &Self) -> bool {
        let num_pages = other.num_pages;
        *other == Self { num_pages, ..*self }
    }
}

/// What the bytes of a page within a layer mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageForm {
    /// As they lie in memory, for executors whose geometry `is_native_to` the other's.
    Native,
    /// For all others: the same order for every executor, in the sender's KV format.
    Canonical,
}

/// The KV memory of an executor. It stays where it is while anybody has a reference to this.
pub trait KvPages: Send + Sync {
    fn geometry(&self) -> &KvGeometry;

    /// Where a page within a layer lies, in its native form: a first part and, perhaps empty, the
    /// rest of it.
    fn native_parts(&self, layer: u32, page: PageId) -> [NonNull<[u8]>; 2];

    /// Somebody has filled a page, so it will be used soon.
    fn note_written(&self, _page: PageId) {}

    /// Copies pages within one layer, one behind the other.
    ///
    /// # Safety
    /// Nobody writes to these pages within this layer meanwhile.
    unsafe fn read(&self, layer: u32, pages: &[PageId], form: PageForm, out: &mut [u8]);

    /// The reverse of `read`.
    ///
    /// # Safety
    /// Nobody else uses these pages meanwhile.
    unsafe fn write(&self, layer: u32, pages: &[PageId], form: PageForm, bytes: &[u8]);
}
