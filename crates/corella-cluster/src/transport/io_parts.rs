//! Pieces of memory that one call sends from or receives into.

use std::ptr::NonNull;

use libc::iovec;

/// The limit of pieces in one call (`UIO_MAXIOV` of Linux).
pub const MAX_PARTS_PER_CALL: usize = 1024;

/// Pieces of memory for a socket. The list is kept between calls, so that a transfer allocates nothing. A caller that
/// passes the pieces to a socket promises that their memory may be used.
#[derive(Default)]
pub struct IoParts {
    parts: Vec<iovec>,
    /// The pieces before this one are done.
    first: usize,
    num_bytes: usize,
}

// SAFETY: addresses and lengths. Code that dereferences them gives its own reason.
unsafe impl Send for IoParts {}
// SAFETY: as above.
unsafe impl Sync for IoParts {}

impl IoParts {
    pub fn clear(&mut self) {
        self.parts.clear();
        self.first = 0;
        self.num_bytes = 0;
    }

    /// Merges pieces that are adjacent in memory.
    pub fn push(&mut self, part: NonNull<[u8]>) {
        let (start, len) = (part.cast::<u8>().as_ptr(), part.len());
        if len == 0 {
            return;
        }
        self.num_bytes += len;
        if let Some(last) = self.parts.last_mut()
            && last.iov_base.cast::<u8>().wrapping_add(last.iov_len) == start
        {
            last.iov_len += len;
            return;
        }
        self.parts.push(iovec {
            iov_base: start.cast(),
            iov_len: len,
        });
    }

    pub fn push_slice(&mut self, bytes: &[u8]) {
        self.push(NonNull::from(bytes));
    }

    /// Returns the number of bytes left.
    pub fn num_bytes(&self) -> usize {
        self.num_bytes
    }

    /// Returns the next pieces, up to the limit of one system call.
    pub fn for_call(&self) -> &[iovec] {
        let rest = &self.parts[self.first..];
        &rest[..rest.len().min(MAX_PARTS_PER_CALL)]
    }

    /// Marks `num_bytes` as done, and visits their pieces in order.
    pub fn advance(&mut self, mut num_bytes: usize, mut visit: impl FnMut(NonNull<[u8]>)) {
        self.num_bytes -= num_bytes;
        while num_bytes > 0 {
            let part = &mut self.parts[self.first];
            let len = part.iov_len.min(num_bytes);
            visit(slice_of(part.iov_base.cast(), len));
            part.iov_base = part.iov_base.wrapping_byte_add(len);
            part.iov_len -= len;
            num_bytes -= len;
            if part.iov_len == 0 {
                self.first += 1;
            }
        }
    }

    /// Copies to the pieces, and marks them as done.
    ///
    /// # Safety
    /// The pieces' memory has no other user during the call, and has at least these bytes.
    pub unsafe fn fill(&mut self, mut bytes: &[u8]) {
        self.advance(self.num_bytes, |mut part| {
            let (from, rest) = bytes.split_at(part.len());
            // SAFETY: promised by the caller.
            unsafe { part.as_mut() }.copy_from_slice(from);
            bytes = rest;
        });
    }

    /// Returns all remaining pieces.
    pub fn iter(&self) -> impl Iterator<Item = NonNull<[u8]>> + '_ {
        let rest = self.parts[self.first..].iter();
        rest.map(|part| slice_of(part.iov_base.cast(), part.iov_len))
    }
}

fn slice_of(start: *mut u8, len: usize) -> NonNull<[u8]> {
    let start = NonNull::new(start).expect("pieces come from references");
    NonNull::slice_from_raw_parts(start, len)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_one_piece_and_progress_may_stop_anywhere() {
        let bytes = [1, 2, 3, 4, 5, 6, 7, 8];
        let mut parts = IoParts::default();
        for range in [0..2, 2..4, 5..8] {
            parts.push_slice(&bytes[range]);
        }
        parts.push_slice(&[]);
        assert_eq!((parts.for_call().len(), parts.num_bytes()), (2, 7));
        let mut seen = Vec::new();
        for step in [1, 4, 2] {
            parts.advance(step, |part| {
                // SAFETY: a piece of `bytes`.
                seen.extend_from_slice(unsafe { part.as_ref() });
            });
        }
        assert_eq!(seen, [1, 2, 3, 4, 6, 7, 8]);
        assert_eq!((parts.for_call().len(), parts.num_bytes()), (0, 0));
    }

    #[test]
    fn a_call_takes_a_bounded_number_of_pieces() {
        let bytes = [0; 4096];
        let mut parts = IoParts::default();
        (0..2048).for_each(|i| parts.push_slice(&bytes[2 * i..2 * i + 1]));
        assert_eq!(parts.for_call().len(), 1024);
        parts.advance(1500, |_| {});
        assert_eq!((parts.for_call().len(), parts.num_bytes()), (548, 548));
    }
}
