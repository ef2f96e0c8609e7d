//! Reads an image of packed weights in the order in which it was written.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// An image file, from which the matrices take their parts in order.
pub struct ImageReader {
    file: File,
    at: u64,
}

/// The part of an image that belongs to one matrix.
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
