//! Memory mapped from the system: zeroed, in huge pages if it is large, and not resident until used.

use std::io;
use std::ptr::NonNull;

const HUGE_PAGE: usize = 2 << 20;

/// Bytes that threads share. The owner decides which thread may access them, and when.
pub struct Region {
    start: NonNull<u8>,
    map: NonNull<libc::c_void>,
    map_len: usize,
}

// SAFETY: a region is plain memory. Every access to it is unsafe and has its own justification.
unsafe impl Send for Region {}
// SAFETY: the same as for `Send`.
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
        // SAFETY: this makes an anonymous private mapping at an address of the system's choice.
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
            // SAFETY: the mapping is `HUGE_PAGE` longer than the region, which leaves room for the alignment.
            start = unsafe { start.add(skip) };
            #[cfg(target_os = "linux")]
            // SAFETY: this is advice on our own mapping, and harmless if it is not followed.
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

    /// Makes the system provide the memory of a range now, not at its first write. The contents
    /// stay unchanged. Returns whether the system did so.
    pub fn commit(&self, bytes: std::ops::Range<usize>) -> bool {
        const PAGE: usize = 4096;
        let first = bytes.start / PAGE * PAGE;
        assert!(first <= bytes.end && self.offset() + bytes.end <= self.map_len);
        #[cfg(target_os = "linux")]
        // SAFETY: the pages belong to our own mapping, and keep their contents.
        unsafe {
            let start = self.start.as_ptr().add(first);
            libc::madvise(start.cast(), bytes.end - first, libc::MADV_POPULATE_WRITE) == 0
        }
        #[cfg(not(target_os = "linux"))]
        false
    }

    /// The distance from the start of the mapping to the first byte, in bytes.
    fn offset(&self) -> usize {
        self.start.as_ptr().addr() - self.map.as_ptr().addr()
    }

    /// The first byte, aligned to a memory page at least.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// The first byte, aligned to a memory page at least.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: this is our own mapping, which is no longer used.
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
            // SAFETY: `mincore` reads one page of the region and writes one byte.
            let result = unsafe {
                let page = region.as_ptr().add(at);
                libc::mincore(page.cast(), PAGE, there.as_mut_ptr())
            };
            assert_eq!(result, 0);
            there[0] & 1 == 1
        };
        let last = 3 * HUGE_PAGE - PAGE;
        // SAFETY: the address is inside the region, which has no other user.
        unsafe { *region.as_ptr().add(HUGE_PAGE + 5) = 7 };
        assert!(!is_there(0) && !is_there(last));
        if !region.commit(HUGE_PAGE + 5..last + 1) {
            return; // Linux before 5.14 cannot commit memory.
        }
        assert!(is_there(HUGE_PAGE) && is_there(last));
        assert!(!is_there(0) && !is_there(3 * HUGE_PAGE));
        // SAFETY: the same as above.
        assert_eq!(unsafe { *region.as_ptr().add(HUGE_PAGE + 5) }, 7);
    }
}
