//! The bytes of a chunk: a header, and then the pages of its blocks, each with all its layers in their native form.
//!
//! A header has a mark, the hash of the chunk's last block and a checksum over this hash and the pages. The hash depends
//! on the model, the arithmetic and all tokens up to the chunk's end. So a reader notices a chunk that is torn, that was
//! never filled, or that took the place of another.

use corella_core::PageHash;

use crate::transport::checksum::Checksum;

/// Changes with the form of a chunk.
const MARK: [u8; 8] = *b"corella1";
const HEADER_BYTES: usize = 64;

/// The size of chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkShape {
    pub num_tokens: u32,
    pub num_blocks: u32,
    pub page_bytes: usize,
}

impl ChunkShape {
    /// Returns `None` if chunks of `num_tokens` tokens do not consist of whole pages.
    pub fn new(num_tokens: i64, page_size: u32, page_bytes: usize) -> Option<Self> {
        let num_tokens = u32::try_from(num_tokens).ok()?;
        let is_whole = num_tokens > 0 && num_tokens.is_multiple_of(page_size);
        is_whole.then_some(Self {
            num_tokens,
            num_blocks: num_tokens / page_size,
            page_bytes,
        })
    }

    pub fn num_bytes(&self) -> usize {
        HEADER_BYTES + self.num_blocks as usize * self.page_bytes
    }

    /// The memory of a chunk, without content.
    pub fn new_chunk(&self) -> Vec<u8> {
        vec![0; self.num_bytes()]
    }

    /// The hashes of the last blocks of the whole chunks.
    pub fn names<'a>(&self, blocks: &'a [PageHash]) -> impl Iterator<Item = PageHash> + 'a {
        let chunks = blocks.chunks_exact(self.num_blocks as usize);
        chunks.filter_map(|blocks| blocks.last().copied())
    }
}

/// The pages of a chunk, one after the other.
pub fn pages_mut(chunk: &mut [u8]) -> &mut [u8] {
    &mut chunk[HEADER_BYTES..]
}

/// Writes the header of a chunk whose pages are filled.
pub fn seal(chunk: &mut [u8], name: PageHash) {
    let checksum = checksum(&chunk[HEADER_BYTES..], name);
    chunk[..8].copy_from_slice(&MARK);
    chunk[8..24].copy_from_slice(&name.0.to_le_bytes());
    chunk[24..32].copy_from_slice(&checksum.to_le_bytes());
}

/// Returns the pages of a chunk. `None` if the chunk is not the named one, or is damaged.
pub fn open(chunk: &[u8], name: PageHash) -> Option<&[u8]> {
    let (header, pages) = chunk.split_at_checked(HEADER_BYTES)?;
    let is_named = header[..8] == MARK && header[8..24] == name.0.to_le_bytes();
    let is_whole = is_named && header[24..32] == checksum(pages, name).to_le_bytes();
    is_whole.then_some(pages)
}

fn checksum(pages: &[u8], name: PageHash) -> u64 {
    let mut checksum = Checksum::new();
    checksum.update(&name.0.to_le_bytes());
    checksum.update(pages);
    checksum.value()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_opens_by_its_name_only_while_it_is_whole() {
        let shape = ChunkShape::new(4, 2, 100).unwrap();
        let mut chunk = shape.new_chunk();
        let name = PageHash(7);
        assert_eq!(open(&chunk, name), None);
        pages_mut(&mut chunk).fill(3);
        seal(&mut chunk, name);
        assert_eq!(open(&chunk, name), Some(&[3; 200][..]));
        assert_eq!(open(&chunk, PageHash(8)), None);
        assert_eq!(open(&chunk[..100], name), None);
        for at in (0..32).chain([HEADER_BYTES, chunk.len() - 1]) {
            let mut damaged = chunk.clone();
            damaged[at] ^= 1;
            assert_eq!(open(&damaged, name), None, "{at}");
        }
    }

    #[test]
    fn chunks_consist_of_whole_pages() {
        assert_eq!(ChunkShape::new(256, 16, 1).unwrap().num_blocks, 16);
        for num_tokens in [0, -256, 250, i64::MAX] {
            assert_eq!(ChunkShape::new(num_tokens, 16, 1), None);
        }
        let shape = ChunkShape::new(4, 2, 1).unwrap();
        let blocks = [1, 2, 3, 4, 5].map(PageHash);
        let names: Vec<_> = shape.names(&blocks).collect();
        assert_eq!(names, [PageHash(2), PageHash(4)]);
    }
}
