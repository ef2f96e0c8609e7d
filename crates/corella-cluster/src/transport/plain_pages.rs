//! KV memory without an executor, for tests and benchmarks of transfers.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::ptr::NonNull;
use std::time::Duration;

use corella_core::{PageId, StepId};
use corella_model::{KvGeometry, KvPages, LayerProgress};

/// KV memory in which the pages of a layer are contiguous, and one layer follows another.
pub struct PlainPages {
    geometry: KvGeometry,
    memory: NonNull<[u8]>,
}

// SAFETY: memory that this owns. Callers of the unsafe functions promise that no write meets another access.
unsafe impl Send for PlainPages {}
// SAFETY: as above.
unsafe impl Sync for PlainPages {}

impl PlainPages {
    /// Allocates pages whose bytes are 0 and have been written to.
    pub fn new(geometry: KvGeometry) -> Self {
        let num_pages = geometry.num_layers as usize * geometry.num_pages as usize;
        let layout = layout(num_pages * geometry.layer_bytes());
        // SAFETY: the layout has bytes, because geometries have pages.
        let Some(start) = NonNull::new(unsafe { alloc(layout) }) else {
            handle_alloc_error(layout);
        };
        // Executors do the same. Without huge pages, nothing is lost. SAFETY: memory that has no other owner.
        unsafe { libc::madvise(start.as_ptr().cast(), layout.size(), libc::MADV_HUGEPAGE) };
        // SAFETY: as above.
        unsafe { start.write_bytes(0, layout.size()) };
        let memory = NonNull::slice_from_raw_parts(start, layout.size());
        Self { geometry, memory }
    }

    fn part(&self, layer: u32, page: PageId) -> NonNull<[u8]> {
        let geometry = &self.geometry;
        assert!(layer < geometry.num_layers && page.0 < geometry.num_pages);
        let layer_bytes = geometry.layer_bytes();
        let index = layer as usize * geometry.num_pages as usize + page.0 as usize;
        // SAFETY: inside the memory, which has this many pages.
        let start = unsafe { self.memory.cast::<u8>().add(index * layer_bytes) };
        NonNull::slice_from_raw_parts(start, layer_bytes)
    }

    /// # Safety
    /// The page is not written to within this layer during the call.
    pub unsafe fn bytes(&self, layer: u32, page: PageId) -> Vec<u8> {
        // SAFETY: promised by the caller.
        unsafe { self.part(layer, page).as_ref() }.to_vec()
    }

    /// # Safety
    /// The page has no other user within this layer during the call.
    pub unsafe fn fill(&self, layer: u32, page: PageId, mut byte: impl FnMut(usize) -> u8) {
        // SAFETY: promised by the caller.
        let bytes = unsafe { self.part(layer, page).as_mut() };
        for (i, out) in bytes.iter_mut().enumerate() {
            *out = byte(i);
        }
    }
}

/// The layout of whole huge pages for this many bytes.
fn layout(num_bytes: usize) -> Layout {
    const HUGE_PAGE: usize = 2 << 20;
    assert!(num_bytes > 0);
    Layout::from_size_align(num_bytes, HUGE_PAGE).expect("a pool fits into memory")
}

impl Drop for PlainPages {
    fn drop(&mut self) {
        // SAFETY: `new` has allocated it, and no reference to this is left.
        unsafe { dealloc(self.memory.cast().as_ptr(), layout(self.memory.len())) };
    }
}

// SAFETY: a part for each layer and page, beside each other in memory that this owns.
unsafe impl KvPages for PlainPages {
    fn geometry(&self) -> &KvGeometry {
        &self.geometry
    }

    fn regions(&self) -> Vec<NonNull<[u8]>> {
        vec![self.memory]
    }

    fn native_parts(&self, layer: u32, page: PageId) -> [NonNull<[u8]>; 2] {
        let part = self.part(layer, page);
        let end = NonNull::slice_from_raw_parts(part.cast(), 0);
        [part, end]
    }

    fn num_layers_done(&self, _step: StepId) -> u32 {
        self.geometry.num_layers
    }

    fn wait_layer(&self, _step: StepId, _layer: u32, _timeout: Duration) -> LayerProgress {
        LayerProgress::StepOver
    }
}
