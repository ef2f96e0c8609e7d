//! The chunks that the server is known to have, so that they are not copied again.

use std::collections::{HashSet, VecDeque};

use corella_core::PageHash;

/// The limit of chunks. The oldest ones are forgotten, and copied again when they are offered again.
const MAX_CHUNKS: usize = 1 << 16;

/// Chunks by the hashes of their last blocks.
#[derive(Default)]
pub struct KnownChunks {
    names: HashSet<PageHash>,
    /// May have names that were removed since.
    by_age: VecDeque<PageHash>,
}

impl KnownChunks {
    pub fn has(&self, name: PageHash) -> bool {
        self.names.contains(&name)
    }

    pub fn insert(&mut self, name: PageHash) {
        if !self.names.insert(name) {
            return;
        }
        self.by_age.push_back(name);
        if self.by_age.len() > MAX_CHUNKS
            && let Some(oldest) = self.by_age.pop_front()
        {
            self.names.remove(&oldest);
        }
    }

    /// Records that the server no longer has a chunk.
    pub fn remove(&mut self, name: PageHash) {
        self.names.remove(&name);
    }

    pub fn clear(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_chunks_are_forgotten() {
        let mut known = KnownChunks::default();
        let all = 0..MAX_CHUNKS as u128 + 1;
        all.for_each(|name| known.insert(PageHash(name)));
        assert!(!known.has(PageHash(0)));
        assert!(known.has(PageHash(1)) && known.has(PageHash(MAX_CHUNKS as u128)));
        known.remove(PageHash(1));
        assert!(!known.has(PageHash(1)));
    }
}
