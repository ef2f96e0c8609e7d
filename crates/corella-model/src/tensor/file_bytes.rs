//! The bytes of a file from which tensors compute their values.

use std::ops::Range;

/// All bytes of a file.
pub trait FileBytes: Send + Sync {
    fn bytes(&self) -> &[u8];

    /// Releases the memory of mapped bytes, which are read from the file again when needed.
    fn release(&self, range: Range<usize>);
}
