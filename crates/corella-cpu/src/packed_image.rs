//! Packed weights outside the process that packed them: what rounding and repacking gave, matrix by
//! matrix as it lies in memory, so that a later start reads it instead.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use crate::region::Region;
use crate::weight_panel::{Origin, PackedMatrix};

/// The bytes of matrices that were not just copied. Holds on to their memory.
pub struct PackedImage {
    /// With the bytes in use.
    parts: Vec<(Arc<Region>, usize)>,
    is_read: bool,
}

impl PackedImage {
    pub(crate) fn new<'a>(matrices: impl Iterator<Item = &'a PackedMatrix>) -> Self {
        let matrices: Vec<_> = matrices
            .filter(|matrix| matrix.origin != Origin::Copied)
            .collect();
        let parts = matrices.iter().flat_map(|matrix| matrix.image_parts());
        Self {
            parts: parts.collect(),
            is_read: !matrices.is_empty()
                && matrices.iter().all(|matrix| matrix.origin == Origin::Image),
        }
    }

    /// Whether all of it came from an image.
    pub fn is_read(&self) -> bool {
        self.is_read
    }

    /// 0 if all matrices were copied: they would be read from an image no faster.
    pub fn num_bytes(&self) -> u64 {
        self.parts.iter().map(|(_, len)| *len as u64).sum()
    }

    /// What is to be written, one after the other, at most `max_len` bytes a piece.
    pub fn pieces(&self, max_len: usize) -> impl Iterator<Item = &[u8]> {
        let parts = self.parts.iter().map(|(region, len)| {
            // SAFETY: panels are not written once they are packed.
            unsafe { std::slice::from_raw_parts(region.as_ptr(), *len) }
        });
        parts.flat_map(move |part| part.chunks(max_len))
    }
}

/// An image, read in the order in which it was written.
pub struct ImageReader {
    file: File,
    at: u64,
}

/// The part of an image that is a matrix.
pub struct ImagePart<'a> {
    file: &'a File,
    start: u64,
    len: usize,
}

impl ImageReader {
    pub fn new(file: File) -> Self {
        Self { file, at: 0 }
    }

    pub fn take(&mut self, len: usize) -> ImagePart<'_> {
        let start = self.at;
        self.at += len as u64;
        ImagePart {
            file: &self.file,
            start,
            len,
        }
    }
}

impl ImagePart<'_> {
    pub fn read(&self, at: usize, out: &mut [u8]) -> io::Result<()> {
        assert!(at + out.len() <= self.len);
        self.file.read_exact_at(out, self.start + at as u64)
    }
}
