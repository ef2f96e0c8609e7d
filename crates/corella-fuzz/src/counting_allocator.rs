//! An allocator that counts the allocated memory, and ends the process before a parser takes all of it.

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::{self, Write};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The system's allocator with a count. A test binary with targets sets it as `#[global_allocator]`.
pub struct CountingAllocator;

static HELD: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(usize::MAX);

impl CountingAllocator {
    /// The allocated bytes.
    pub fn held() -> usize {
        HELD.load(Ordering::Relaxed)
    }

    /// The peak of allocated bytes since the last call.
    pub fn take_peak() -> usize {
        PEAK.swap(Self::held(), Ordering::Relaxed)
    }

    /// Limits the allocated bytes to `most`. An allocation beyond that fails, which ends the process.
    pub fn hold_at_most(most: usize) {
        MOST.store(most, Ordering::Relaxed);
    }

    fn may_add(added: usize) -> bool {
        let held = HELD
            .fetch_add(added, Ordering::Relaxed)
            .saturating_add(added);
        if held > MOST.load(Ordering::Relaxed) {
            HELD.fetch_sub(added, Ordering::Relaxed);
            // No allocation is allowed here.
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

// SAFETY: every call is passed unchanged to the system's allocator. A null pointer means out of memory, as in the
// trait's contract.
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
