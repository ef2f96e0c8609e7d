//! Memory straight from the system: zero, huge pages where it is large, untouched until used.

use std::io;
use std::ptr::NonNull;

const HUGE_PAGE: usize = 2 << 20;

/// Bytes that threads share. Who may touch what, and when, is up to the owner.
pub struct Region {
    start: NonNull<u8>,
    map: NonNull<libc::c_void>,
    map_len: usize,
}

// SAFETY: a region is plain memory; every access to it is unsafe and argued for where it is.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    pub fn new(len: usize) -> io::Result<Self> {
        let is_large = len >= HUGE_PAGE / 8;
        let len = if is_large {
            len.next_multiple_of(HUGE_PAGE)
        } else {
            len
        };
        let map_len = len.max(1) + if is_large { HUGE_PAGE } else { 0 };
        // SAFETY: an anonymous private mapping at an address of the system's choice.
        let map = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                map_len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if map == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let map = NonNull::new(map).ok_or(io::ErrorKind::OutOfMemory)?;
        let mut start = map.cast::<u8>();
        if is_large {
            let skip = start.as_ptr().align_offset(HUGE_PAGE);
            // SAFETY: the mapping has room for the alignment.
            start = unsafe { start.add(skip) };
            #[cfg(target_os = "linux")]
            // SAFETY: advice on our own mapping; failing to follow it is harmless.
            unsafe {
                libc::madvise(start.as_ptr().cast(), len, libc::MADV_HUGEPAGE);
            }
        }
        Ok(Self {
            start,
            map,
            map_len,
        })
    }

    /// Aligned to a page, at least.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: our own mapping, not used again.
        unsafe {
            libc::munmap(self.map.as_ptr(), self.map_len);
        }
    }
}
