//! An allocator that knows how much memory is held, and ends the process before a parser takes all of it.

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::{self, Write};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The system's allocator, which counts. A test binary that has targets sets it as `#[global_allocator]`.
pub struct CountingAllocator;

static HELD: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(usize::MAX);

impl CountingAllocator {
    /// The bytes that are held now.
    pub fn held() -> usize {
        HELD.load(Ordering::Relaxed)
    }

    /// The most bytes that were held since the last call.
    pub fn take_peak() -> usize {
        PEAK.swap(Self::held(), Ordering::Relaxed)
    }

    /// From now on an allocation that would let more than `most` bytes be held fails, which ends the
    /// process.
    pub fn hold_at_most(most: usize) {
        MOST.store(most, Ordering::Relaxed);
    }

    fn may_add(added: usize) -> bool {
        let held = HELD
            .fetch_add(added, Ordering::Relaxed)
            .saturating_add(added);
        if held > MOST.load(Ordering::Relaxed) {
            HELD.fetch_sub(added, Ordering::Relaxed);
            // Nothing that allocates is done here.
            let _ = writeln!(
                io::stderr(),
                "corella-fuzz: {added} bytes more would be {held} in all"
            );
            return false;
        }
        PEAK.fetch_max(held, Ordering::Relaxed);
        true
    }
}

// SAFETY: every call is passed on to the system's allocator as it is; a null pointer says that there is no
// memory, as the trait has it.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if !Self::may_add(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller keeps the contract of this same method.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if !Self::may_add(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller keeps the contract of this same method.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of this same method, and the pointer came from `System`.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        if !Self::may_add(new_size) {
            return std::ptr::null_mut();
        }
        HELD.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of this same method, and the pointer came from `System`.
        unsafe { System.realloc(pointer, layout, new_size) }
    }
}
