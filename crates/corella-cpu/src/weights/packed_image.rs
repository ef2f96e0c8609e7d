//! Images of packed weights: files with quantised and repacked matrices in their memory layout, so that a later start
//! can read them instead of computing them again.
//!
//! An image is read into huge pages instead of being mapped: a mapped file has small pages, from which
//! decode was 10 to 25 % slower. The reader packs one panel of each matrix and compares it, so that
//! another layout, quantisation or model is noticed without version numbers.

use std::sync::Arc;

use crate::system::Region;

use super::panel::{Origin, PackedMatrix};

/// The bytes of all computed matrices, whose memory the image keeps alive.
pub struct PackedImage {
    /// Memory regions, each with the number of bytes in use.
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

    /// Whether all of these matrices were read from an image.
    pub fn is_read(&self) -> bool {
        self.is_read
    }

    /// The size in bytes; 0 if all matrices were merely copied, because reading an image would be no faster.
    pub fn num_bytes(&self) -> u64 {
        self.parts.iter().map(|(_, len)| *len as u64).sum()
    }

    /// The image's content in order, in pieces of at most `max_len` bytes.
    pub fn pieces(&self, max_len: usize) -> impl Iterator<Item = &[u8]> {
        let parts = self.parts.iter().map(|(region, len)| {
            // SAFETY: packed panels are no longer written.
            unsafe { std::slice::from_raw_parts(region.as_ptr(), *len) }
        });
        parts.flat_map(move |part| part.chunks(max_len))
    }
}
