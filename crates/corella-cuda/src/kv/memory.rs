//! The KV memory: one region of the device, and copies of pages from and to it by other threads.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use corella_core::{PageId, StepId};
use corella_model::{
    DeviceError, ElementOrder, KvGeometry, KvPages, LayerCounter, LayerProgress, PageForm,
};

use crate::device::{DeviceBuffer, DevicePointer, PinnedBuffer, SharedDevice, Stream};
use crate::kernels::page::{PageKernels, PageMove};

/// The time between two checks of the device's progress by a thread that waits for a layer. It is shorter than the time
/// of a layer in a large model.
const LOOK_INTERVAL: Duration = Duration::from_micros(50);

/// The largest size, in bytes, of a copy through pinned memory, unless a page has more.
const STAGING_BYTES: usize = 4 << 20;

/// The number of copies that may be under way at once: one to a tier, one from it, and one for another node or for a
/// preempted request.
const NUM_STAGINGS: usize = 3;

/// Pages `[page][layer][head][K, V][position][dim]`, and for 8-bit pages the scales of a head after its elements. The
/// region is a plain allocation, because memory of a stream-ordered pool cannot be registered for RDMA.
pub struct KvMemory {
    device: SharedDevice,
    geometry: KvGeometry,
    region: DeviceBuffer,
    kernels: PageKernels,
    stagings: [Mutex<Staging>; NUM_STAGINGS],
    /// The progress that the device counts: the step in the upper bits, as in `LayerCounter`, and below them the number
    /// of the step's finished layers.
    progress: Progress,
    /// The reason for the first failed move of pages.
    failure: OnceLock<DeviceError>,
    /// The progress that the host counts: finished steps, and the end of all steps.
    pub counter: LayerCounter,
}

/// Pinned memory for moving pages.
struct Staging {
    bytes: PinnedBuffer<u8>,
    pages: PinnedBuffer<u32>,
}

impl Staging {
    /// # Safety
    /// The device does not write the bytes meanwhile.
    unsafe fn take(&self, out: &mut [u8]) {
        // SAFETY: the caller's promise.
        let staged = unsafe { self.bytes.as_slice() };
        out.copy_from_slice(&staged[..out.len()]);
    }

    /// # Safety
    /// The device does not use the bytes meanwhile.
    unsafe fn put(&mut self, bytes: &[u8]) {
        // SAFETY: the caller's promise.
        let staged = unsafe { self.bytes.as_mut_slice() };
        staged[..bytes.len()].copy_from_slice(bytes);
    }
}

/// A number in pinned memory that kernels set, and that any thread may read.
struct Progress(PinnedBuffer<u64>);

// SAFETY: the number is only read by atomic loads.
unsafe impl Sync for Progress {}

/// The number of bits below the step's id.
const COUNT_BITS: u32 = 16;

impl Progress {
    fn load(&self) -> u64 {
        let number = self.0.pointer().0 as *mut u64;
        // SAFETY: the number lives as long as the buffer, is aligned, and is written in one piece.
        unsafe { AtomicU64::from_ptr(number) }.load(Ordering::Acquire)
    }

    /// The number of the step's layers that the device has finished; `None` when the device counts for another step.
    fn num_done(&self, step: StepId) -> Option<usize> {
        let state = self.load();
        match step.0.cmp(&(state >> COUNT_BITS)) {
            std::cmp::Ordering::Less => None,
            std::cmp::Ordering::Equal => Some((state & ((1 << COUNT_BITS) - 1)) as usize),
            std::cmp::Ordering::Greater => Some(0),
        }
    }
}

impl KvMemory {
    /// Memory for all pages of `geometry`, and one more that only warm-up uses.
    pub fn new(device: &SharedDevice, geometry: KvGeometry) -> Result<Self, DeviceError> {
        assert_eq!(
            geometry.order,
            ElementOrder::Rows,
            "kernels read this order"
        );
        let num_pages = geometry.num_pages as usize + 1;
        let num_bytes = num_pages * geometry.page_bytes();
        let region = DeviceBuffer::new(device, num_bytes).map_err(|error| {
            DeviceError(format!(
                "no memory for {num_pages} KV pages of {} bytes: {error}",
                geometry.page_bytes()
            ))
        })?;
        let staging = || -> Result<_, DeviceError> {
            Ok(Mutex::new(Staging {
                bytes: PinnedBuffer::new(device, STAGING_BYTES.max(geometry.page_bytes()))?,
                pages: PinnedBuffer::new(device, pages_at_once(geometry.layer_bytes()))?,
            }))
        };
        let stagings = [staging()?, staging()?, staging()?];
        Ok(Self {
            device: SharedDevice::clone(device),
            region,
            kernels: PageKernels::load(device, &geometry)?,
            stagings,
            progress: Progress(PinnedBuffer::new(device, 1)?),
            failure: OnceLock::new(),
            counter: LayerCounter::default(),
            geometry,
        })
    }

    pub fn pointer(&self) -> DevicePointer {
        self.region.pointer()
    }

    /// The address at which kernels record a step's progress, by `progress_value`.
    pub fn progress(&self) -> DevicePointer {
        self.progress.0.pointer()
    }

    /// The number for the first `num_layers` finished layers of a step.
    pub fn progress_value(step: StepId, num_layers: usize) -> u64 {
        step.0 << COUNT_BITS | num_layers as u64
    }

    /// Whether all pages have valid contents: after a failed move, the moved pages are unknown.
    pub fn check(&self) -> Result<(), DeviceError> {
        self.failure.get().cloned().map_or(Ok(()), Err)
    }

    fn check_page(&self, layer: u32, page: PageId) {
        let KvGeometry {
            num_layers,
            num_pages,
            ..
        } = self.geometry;
        assert!(layer < num_layers, "layer {layer} of {num_layers}");
        assert!(page.0 < num_pages, "page {page} of {num_pages}");
    }

    /// A page within a layer.
    fn layer_page(&self, layer: u32, page: PageId) -> DevicePointer {
        self.check_page(layer, page);
        let offset = page.0 as usize * self.geometry.page_bytes()
            + layer as usize * self.geometry.layer_bytes();
        self.region.pointer().add(offset)
    }

    /// Pinned memory that no other copy uses, or else the first that becomes free.
    fn staging(&self) -> MutexGuard<'_, Staging> {
        let mut stagings = self.stagings.iter();
        let unused = stagings.find_map(|staging| match staging.try_lock() {
            Ok(staging) => Some(staging),
            Err(TryLockError::Poisoned(staging)) => Some(staging.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        });
        unused.unwrap_or_else(|| {
            let staging = self.stagings[0].lock();
            staging.unwrap_or_else(PoisonError::into_inner)
        })
    }

    /// Calls `visit` for each part of `pages` that fits into pinned memory. `visit` gets that memory, and the part's byte
    /// range if pages of `page_bytes` bytes lie one after the other.
    fn in_parts(
        &self,
        pages: &[PageId],
        page_bytes: usize,
        mut visit: impl FnMut(&[PageId], Range<usize>, &mut Staging),
    ) {
        let mut staging = self.staging();
        let mut first = 0;
        for pages in pages.chunks(pages_at_once(page_bytes)) {
            let end = first + pages.len() * page_bytes;
            visit(pages, first..end, &mut staging);
            first = end;
        }
    }

    /// Moves pages within a layer between the region and pinned memory, and waits for that. If the move fails, the
    /// moved bytes are useless, and the next step reports the failure and is the last one.
    ///
    /// # Safety
    /// As `KvPages::read` or `write`.
    unsafe fn move_pages(
        &self,
        way: PageMove,
        layer: u32,
        pages: &[PageId],
        staging: &mut Staging,
    ) {
        // SAFETY: the previous move is done.
        let ids = unsafe { staging.pages.as_mut_slice() };
        for (id, &page) in ids.iter_mut().zip(pages) {
            self.check_page(layer, page);
            *id = page.0;
        }
        let of_layer = layer as usize * self.geometry.layer_bytes();
        let region = self.region.pointer().add(of_layer);
        let ids = (staging.pages.pointer(), pages.len());
        let bytes = staging.bytes.pointer();
        let device = &self.device;
        // SAFETY: pages that belong to the caller by its promise, and locked memory.
        let launched = unsafe {
            self.kernels
                .move_pages(device, Stream::Pages, way, region, ids, bytes)
        };
        self.finish_move(launched);
    }

    /// Waits for a move that was begun.
    fn finish_move(&self, begun: Result<(), DeviceError>) {
        let moved = begun
            .and_then(|()| self.device.record(Stream::Pages))
            .and_then(|event| self.device.synchronize(event));
        if let Err(error) = moved {
            // One error suffices if two threads come here at once.
            let _ = self.failure.set(error);
        }
    }

    /// Moves whole pages, as `move_pages`. They lie in one piece, so that no kernel is needed.
    ///
    /// # Safety
    /// As `KvPages::read_whole` or `write_whole`.
    unsafe fn move_whole_pages(&self, way: PageMove, pages: &[PageId], staging: &Staging) {
        let num_bytes = self.geometry.page_bytes();
        let mut staged = staging.bytes.pointer();
        let copies = pages.iter().try_for_each(|&page| {
            let page = self.layer_page(0, page);
            let (to, from) = match way {
                PageMove::Gather => (staged, page),
                PageMove::Spread => (page, staged),
            };
            staged = staged.add(num_bytes);
            // SAFETY: pages that belong to the caller by its promise, and locked memory with room for them.
            unsafe { self.device.copy(Stream::Pages, to, from, num_bytes) }
        });
        self.finish_move(copies);
    }
}

// SAFETY: each page of a layer has memory of its own, which kernels use for batches that name the page,
// and for attention to them.
unsafe impl KvPages for KvMemory {
    fn geometry(&self) -> &KvGeometry {
        &self.geometry
    }

    /// Memory of the device, which transports may register but the host must not read.
    fn regions(&self) -> Vec<NonNull<[u8]>> {
        vec![as_bytes(self.region.pointer(), self.region.num_bytes())]
    }

    fn native_parts(&self, layer: u32, page: PageId) -> [NonNull<[u8]>; 2] {
        let page = self.layer_page(layer, page);
        let layer_bytes = self.geometry.layer_bytes();
        [
            as_bytes(page, layer_bytes),
            as_bytes(page.add(layer_bytes), 0),
        ]
    }

    fn num_layers_done(&self, step: StepId) -> u32 {
        let all = self.geometry.num_layers;
        match (self.counter.num_done(step), self.progress.num_done(step)) {
            (Some(_), Some(num_done)) => all.min(num_done as u32),
            _ => all,
        }
    }

    fn wait_layer(&self, step: StepId, layer: u32, timeout: Duration) -> LayerProgress {
        let asked_at = Instant::now();
        loop {
            match (self.counter.num_done(step), self.progress.num_done(step)) {
                (None, _) => return LayerProgress::StepOver,
                (_, None) => return LayerProgress::Ready,
                (_, Some(num_done)) if num_done > layer as usize => return LayerProgress::Ready,
                _ => {}
            }
            let left = timeout.saturating_sub(asked_at.elapsed());
            if left.is_zero() {
                return LayerProgress::TimedOut;
            }
            std::thread::sleep(left.min(LOOK_INTERVAL));
        }
    }

    // The canonical form is the native one.
    unsafe fn read(&self, layer: u32, pages: &[PageId], _: PageForm, out: &mut [u8]) {
        let num_bytes = self.geometry.layer_bytes();
        assert_eq!(out.len(), pages.len() * num_bytes);
        self.in_parts(pages, num_bytes, |pages, range, staging| {
            // SAFETY: by the caller's promise the pages are not written.
            unsafe { self.move_pages(PageMove::Gather, layer, pages, staging) };
            // SAFETY: the copy is done.
            unsafe { staging.take(&mut out[range]) };
        });
    }

    unsafe fn write(&self, layer: u32, pages: &[PageId], _: PageForm, bytes: &[u8]) {
        let num_bytes = self.geometry.layer_bytes();
        assert_eq!(bytes.len(), pages.len() * num_bytes);
        self.in_parts(pages, num_bytes, |pages, range, staging| {
            // SAFETY: the previous copy is done.
            unsafe { staging.put(&bytes[range]) };
            // SAFETY: by the caller's promise only the caller uses the pages.
            unsafe { self.move_pages(PageMove::Spread, layer, pages, staging) };
        });
    }

    unsafe fn read_whole(&self, pages: &[PageId], out: &mut [u8]) {
        let num_bytes = self.geometry.page_bytes();
        assert_eq!(out.len(), pages.len() * num_bytes);
        self.in_parts(pages, num_bytes, |pages, range, staging| {
            // SAFETY: by the caller's promise the pages are not written.
            unsafe { self.move_whole_pages(PageMove::Gather, pages, staging) };
            // SAFETY: the copy is done.
            unsafe { staging.take(&mut out[range]) };
        });
    }

    unsafe fn write_whole(&self, pages: &[PageId], bytes: &[u8]) {
        let num_bytes = self.geometry.page_bytes();
        assert_eq!(bytes.len(), pages.len() * num_bytes);
        self.in_parts(pages, num_bytes, |pages, range, staging| {
            // SAFETY: the previous copy is done.
            unsafe { staging.put(&bytes[range]) };
            // SAFETY: by the caller's promise only the caller uses the pages.
            unsafe { self.move_whole_pages(PageMove::Spread, pages, staging) };
        });
    }
}

/// The number of pages of this size that fit into pinned memory.
fn pages_at_once(num_bytes: usize) -> usize {
    (STAGING_BYTES / num_bytes).max(1)
}

fn as_bytes(pointer: DevicePointer, len: usize) -> NonNull<[u8]> {
    let first = NonNull::new(pointer.0 as *mut u8).unwrap_or(NonNull::dangling());
    NonNull::slice_from_raw_parts(first, len)
}
