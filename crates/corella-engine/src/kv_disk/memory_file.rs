//! A file of blocks in host memory.

use std::alloc::Layout;
use std::io;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::file_layer::FileLayer;

/// A file in chunks, so that it grows without a copy. The operating system gives memory to a chunk when its bytes are
/// first written.
#[derive(Default)]
pub(super) struct MemoryFile(RwLock<Chunks>);

#[derive(Default)]
struct Chunks {
    chunks: Vec<Box<[u8]>>,
    len: u64,
}

const CHUNK_BYTES: usize = 16 << 20;

impl MemoryFile {
    fn chunks(&self) -> RwLockReadGuard<'_, Chunks> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn chunks_mut(&self) -> RwLockWriteGuard<'_, Chunks> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Chunks {
    /// The parts of `len` bytes from `at` on: the number of the chunk, the place in it, and the length.
    fn parts(
        &self,
        len: usize,
        at: u64,
    ) -> io::Result<impl Iterator<Item = (usize, usize, usize)> + use<>> {
        if at.saturating_add(len as u64) > self.len {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let (mut at, mut left) = (at as usize, len);
        Ok(std::iter::from_fn(move || {
            let (chunk, first) = (at / CHUNK_BYTES, at % CHUNK_BYTES);
            let len = left.min(CHUNK_BYTES - first);
            (at, left) = (at + len, left - len);
            (len > 0).then_some((chunk, first, len))
        }))
    }
}

/// `None` if there is no memory. Without a write, the operating system gives none to the bytes.
fn zeroed_chunk() -> Option<Box<[u8]>> {
    const LAYOUT: Layout = Layout::new::<[u8; CHUNK_BYTES]>();
    // SAFETY: the layout has a size.
    let bytes = unsafe { std::alloc::alloc_zeroed(LAYOUT) };
    let bytes = std::ptr::slice_from_raw_parts_mut(bytes, CHUNK_BYTES);
    // SAFETY: the allocator of boxes gave these bytes, with the layout of the slice, and they are zero.
    (!bytes.is_null()).then(|| unsafe { Box::from_raw(bytes) })
}

impl FileLayer for MemoryFile {
    fn read_at(&self, mut bytes: &mut [u8], at: u64) -> io::Result<()> {
        let file = self.chunks();
        for (chunk, first, len) in file.parts(bytes.len(), at)? {
            let (part, rest) = bytes.split_at_mut(len);
            part.copy_from_slice(&file.chunks[chunk][first..first + len]);
            bytes = rest;
        }
        Ok(())
    }

    fn write_at(&self, mut bytes: &[u8], at: u64) -> io::Result<()> {
        let mut file = self.chunks_mut();
        for (chunk, first, len) in file.parts(bytes.len(), at)? {
            let (part, rest) = bytes.split_at(len);
            file.chunks[chunk][first..first + len].copy_from_slice(part);
            bytes = rest;
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn reserve(&self, len: u64) -> io::Result<u64> {
        let mut file = self.chunks_mut();
        let num_chunks = len.div_ceil(CHUNK_BYTES as u64) as usize;
        while file.chunks.len() < num_chunks {
            let chunk = zeroed_chunk().ok_or(io::ErrorKind::OutOfMemory)?;
            file.chunks.push(chunk);
        }
        file.len = file.len.max(len);
        Ok(file.len)
    }

    fn clear(&self) -> io::Result<()> {
        *self.chunks_mut() = Chunks::default();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_found_across_chunks_and_none_beyond_the_end() {
        let file = MemoryFile::default();
        let len = 2 * CHUNK_BYTES as u64 + 100;
        assert!(file.write_at(&[1], 0).is_err());
        assert_eq!(file.reserve(len).unwrap(), len);
        // Two ends of chunks lie in these bytes.
        let mut bytes = vec![7; CHUNK_BYTES + 20];
        for (value, at) in (1..).zip([
            0,
            9,
            10,
            CHUNK_BYTES + 9,
            CHUNK_BYTES + 10,
            CHUNK_BYTES + 19,
        ]) {
            bytes[at] = value;
        }
        let at = CHUNK_BYTES as u64 - 10;
        file.write_at(&bytes, at).unwrap();
        // A longer file keeps them.
        assert_eq!(file.reserve(len + 1).unwrap(), len + 1);
        assert_eq!(file.reserve(1).unwrap(), len + 1);
        let mut found = vec![7; bytes.len() + 2];
        file.read_at(&mut found, at - 1).unwrap();
        assert_eq!(found[1..=bytes.len()], bytes);
        assert_eq!((found[0], found[bytes.len() + 1]), (0, 0));
        assert!(file.read_at(&mut [0; 2], len - 1).is_ok());
        let beyond = file.read_at(&mut [0; 2], len).unwrap_err();
        assert_eq!(beyond.kind(), io::ErrorKind::UnexpectedEof);
        assert!(file.write_at(&[0; 2], len).is_err());

        file.clear().unwrap();
        assert!(file.read_at(&mut [0], 0).is_err());
        file.reserve(len).unwrap();
        file.read_at(&mut found, at - 1).unwrap();
        assert!(found.iter().all(|&byte| byte == 0));
    }
}
