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

    /// Has the system give the memory of some bytes now rather than when they are written; what they
    /// are stays as it is. Whether it has.
    pub fn commit(&self, bytes: std::ops::Range<usize>) -> bool {
        const PAGE: usize = 4096;
        let first = bytes.start / PAGE * PAGE;
        assert!(first <= bytes.end && self.offset() + bytes.end <= self.map_len);
        #[cfg(target_os = "linux")]
        // SAFETY: pages of our own mapping, whose contents stay.
        unsafe {
            let start = self.start.as_ptr().add(first);
            libc::madvise(start.cast(), bytes.end - first, libc::MADV_POPULATE_WRITE) == 0
        }
        #[cfg(not(target_os = "linux"))]
        false
    }

    /// Of the first byte in the mapping.
    fn offset(&self) -> usize {
        self.start.as_ptr().addr() - self.map.as_ptr().addr()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    #[test]
    fn memory_is_given_where_it_is_asked_for_and_stays_as_it_is() {
        const PAGE: usize = 4096;
        let region = Region::new(4 * HUGE_PAGE).unwrap();
        let is_there = |at: usize| {
            let mut there = [0u8];
            // SAFETY: one page of the region, and a byte for it.
            let result = unsafe {
                let page = region.as_ptr().add(at);
                libc::mincore(page.cast(), PAGE, there.as_mut_ptr())
            };
            assert_eq!(result, 0);
            there[0] & 1 == 1
        };
        let last = 3 * HUGE_PAGE - PAGE;
        // SAFETY: inside the region, which nobody else has.
        unsafe { *region.as_ptr().add(HUGE_PAGE + 5) = 7 };
        assert!(!is_there(0) && !is_there(last));
        if !region.commit(HUGE_PAGE + 5..last + 1) {
            return; // Linux before 5.14.
        }
        assert!(is_there(HUGE_PAGE) && is_there(last));
        assert!(!is_there(0) && !is_there(3 * HUGE_PAGE));
        // SAFETY: as above.
        assert_eq!(unsafe { *region.as_ptr().add(HUGE_PAGE + 5) }, 7);
    }
}
