//! A slot of the file: a header that names a page, and the page's rows. A page has the rows of one block in one KV
//! group.
//!
//! | bytes | field |
//! |---|---|
//! | 0 | magic number with the version of this layout |
//! | 8 | digest of everything that decides the bits of a block |
//! | 24 | hash of the block, chained from the beginning of its sequence |
//! | 40 | hash of the block before it; 0 for the first |
//! | 56 | generation: later paths have larger ones |
//! | 64 | number of blocks before it |
//! | 68 | number of tokens |
//! | 72 | checksum of the rows |
//! | 88 | fingerprint of the adapter; 0 without one |
//! | 104 | digest of the salt; 0 without one |
//! | 120 | KV group |
//! | 128 | checksum of the other bytes of the header up to the last token |
//! | 136 | tokens |
//!
//! Numbers are little-endian. The header is padded to a multiple of 512 bytes.

use corella_core::{Namespace, PageHash, TokenId};
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

const MAGIC: u64 = u64::from_le_bytes(*b"CORKV\0\0\x03");
const TOKENS_AT: usize = 136;
const CHECKSUM_AT: usize = 128;
const SECTOR: usize = 512;

/// The layout that all slots of a file share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SlotShape {
    /// A digest of everything that decides the bits of a block: model, arithmetic, KV format, page size and order of
    /// elements.
    pub layout: u128,
    pub page_size: u32,
    pub row_bytes: usize,
}

/// The name of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PageName<'a> {
    pub key: PageKey,
    pub namespace: SlotNamespace,
    /// `None` for the first block of a sequence.
    pub parent: Option<PageHash>,
    /// The number of blocks before the page's block.
    pub depth: u32,
    pub tokens: &'a [TokenId],
}

/// The key of a page within a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct PageKey {
    pub hash: PageHash,
    pub group: u32,
}

/// The namespace of blocks in the file. It names an adapter by its content, and has no salt in plain text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SlotNamespace {
    /// The fingerprint of the adapter; 0 without one.
    pub adapter: u128,
    /// The digest of the salt; 0 without one.
    pub salt: u128,
}

impl SlotNamespace {
    /// The namespace from which the blocks' hashes are chained.
    pub fn of_hashes(self) -> Namespace {
        let name = |digest: u128| (digest != 0).then(|| format!("{digest:032x}").into());
        Namespace {
            lora: name(self.adapter),
            cache_salt: name(self.salt),
            arithmetic: None,
        }
    }
}

/// The facts in a header that a scan needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub key: PageKey,
    pub adapter: u128,
    pub depth: u32,
    pub generation: u64,
}

/// The content of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SlotContent {
    Empty,
    /// The page is damaged or torn.
    Damaged,
    Page(SlotNamespace),
}

/// A block without adapter and salt, as a header names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PlainBlock {
    pub key: PageKey,
    /// `None` for the first block of a sequence.
    pub parent: Option<PageHash>,
    /// The number of blocks before it.
    pub depth: u32,
    pub tokens: Box<[TokenId]>,
}

impl SlotShape {
    pub fn header_bytes(&self) -> usize {
        (TOKENS_AT + 4 * self.page_size as usize).next_multiple_of(SECTOR)
    }

    pub fn slot_bytes(&self) -> usize {
        (self.header_bytes() + self.row_bytes).next_multiple_of(SECTOR)
    }

    pub fn header(&self, page: &PageName, generation: u64, rows: &[u8]) -> Vec<u8> {
        let mut header = vec![0; self.header_bytes()];
        let mut at = 0;
        let mut put = |bytes: &[u8]| {
            header[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
        };
        put(&MAGIC.to_le_bytes());
        put(&self.layout.to_le_bytes());
        put(&page.key.hash.0.to_le_bytes());
        put(&page.parent.map_or(0, |parent| parent.0).to_le_bytes());
        put(&generation.to_le_bytes());
        put(&page.depth.to_le_bytes());
        put(&(page.tokens.len() as u32).to_le_bytes());
        put(&xxh3_128(rows).to_le_bytes());
        put(&page.namespace.adapter.to_le_bytes());
        put(&page.namespace.salt.to_le_bytes());
        put(&page.key.group.to_le_bytes());
        put(&[0; 12]);
        for token in page.tokens {
            put(&token.to_le_bytes());
        }
        let checksum = self.checksum(&header);
        header[CHECKSUM_AT..TOKENS_AT].copy_from_slice(&checksum.to_le_bytes());
        header
    }

    fn checksum(&self, header: &[u8]) -> u64 {
        let mut hasher = Xxh3::new();
        hasher.update(&header[..CHECKSUM_AT]);
        hasher.update(&header[TOKENS_AT..TOKENS_AT + 4 * self.page_size as usize]);
        hasher.digest()
    }

    /// `None` for a slot that is empty, torn, damaged or of another file.
    pub fn read_header(&self, header: &[u8]) -> Option<Header> {
        let is_whole = number(header, 0, 8) == u128::from(MAGIC)
            && number(header, 8, 16) == self.layout
            && number(header, 68, 4) == u128::from(self.page_size)
            && number(header, CHECKSUM_AT, 8) == u128::from(self.checksum(header));
        is_whole.then(|| Header {
            key: PageKey {
                hash: PageHash(number(header, 24, 16)),
                group: number(header, 120, 4) as u32,
            },
            adapter: number(header, 88, 16),
            depth: number(header, 64, 4) as u32,
            generation: number(header, 56, 8) as u64,
        })
    }

    /// The content of a slot, for any page.
    pub fn content(&self, slot: &[u8]) -> SlotContent {
        let (header, rows) = slot.split_at(self.header_bytes());
        if number(header, 0, 8) != u128::from(MAGIC) {
            return SlotContent::Empty;
        }
        let is_whole = self.read_header(header).is_some()
            && number(header, 72, 16) == xxh3_128(&rows[..self.row_bytes]);
        match is_whole {
            true => SlotContent::Page(SlotNamespace {
                adapter: number(header, 88, 16),
                salt: number(header, 104, 16),
            }),
            false => SlotContent::Damaged,
        }
    }

    /// The block of a header, if it has neither an adapter nor a salt.
    pub fn plain_block(&self, header: &[u8]) -> Option<PlainBlock> {
        let found = self.read_header(header)?;
        let is_plain = found.adapter == 0 && number(header, 104, 16) == 0;
        let tokens = &header[TOKENS_AT..TOKENS_AT + 4 * self.page_size as usize];
        is_plain.then(|| PlainBlock {
            key: found.key,
            parent: (found.depth > 0).then(|| PageHash(number(header, 40, 16))),
            depth: found.depth,
            tokens: tokens
                .chunks_exact(4)
                .map(|token| number(token, 0, 4) as TokenId)
                .collect(),
        })
    }

    /// The rows of a slot, if the slot holds `page`. Equal hashes alone do not prove equal tokens.
    pub fn rows<'a>(&self, slot: &'a [u8], page: &PageName) -> Option<&'a [u8]> {
        let (header, rows) = slot.split_at(self.header_bytes());
        let rows = &rows[..self.row_bytes];
        let is_it = self.read_header(header)?.key == page.key
            && number(header, 88, 16) == page.namespace.adapter
            && number(header, 104, 16) == page.namespace.salt
            && number(header, 40, 16) == page.parent.map_or(0, |parent| parent.0);
        let tokens = header[TOKENS_AT..].chunks_exact(4);
        let tokens = tokens.take(page.tokens.len());
        let has_tokens = tokens.eq(page.tokens.iter().map(|token| token.to_le_bytes()));
        let is_whole = || number(header, 72, 16) == xxh3_128(rows);
        (is_it && has_tokens && is_whole()).then_some(rows)
    }
}

/// A number of `len` bytes at `at`, little-endian.
pub(super) fn number(bytes: &[u8], at: usize, len: usize) -> u128 {
    let mut number = [0; 16];
    number[..len].copy_from_slice(&bytes[at..at + len]);
    u128::from_le_bytes(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: SlotShape = SlotShape {
        layout: 7,
        page_size: 4,
        row_bytes: 100,
    };
    const PAGE: PageName = PageName {
        key: PageKey {
            hash: PageHash(5 << 100),
            group: 1,
        },
        namespace: SlotNamespace {
            adapter: 11 << 100,
            salt: 12 << 100,
        },
        parent: Some(PageHash(3)),
        depth: 2,
        tokens: &[1, 2, 3, u32::MAX],
    };

    fn slot() -> Vec<u8> {
        let rows: Vec<u8> = (0..100).collect();
        let mut slot = SHAPE.header(&PAGE, 9, &rows);
        slot.extend(&rows);
        slot.resize(SHAPE.slot_bytes(), 0);
        slot
    }

    #[test]
    fn a_slot_says_which_page_it_has() {
        let slot = slot();
        assert_eq!(slot.len(), 1024);
        let header = Header {
            key: PAGE.key,
            adapter: 11 << 100,
            depth: 2,
            generation: 9,
        };
        assert_eq!(SHAPE.read_header(&slot), Some(header));
        assert_eq!(SHAPE.rows(&slot, &PAGE), Some(&slot[512..612]));
        let others = [
            PageName {
                key: PageKey {
                    hash: PageHash(5),
                    ..PAGE.key
                },
                ..PAGE
            },
            PageName {
                key: PageKey {
                    group: 0,
                    ..PAGE.key
                },
                ..PAGE
            },
            PageName {
                parent: None,
                ..PAGE
            },
            PageName {
                namespace: SlotNamespace {
                    adapter: 0,
                    ..PAGE.namespace
                },
                ..PAGE
            },
            PageName {
                namespace: SlotNamespace {
                    salt: 0,
                    ..PAGE.namespace
                },
                ..PAGE
            },
            PageName {
                tokens: &[1, 2, 4, u32::MAX],
                ..PAGE
            },
        ];
        for other in others {
            assert_eq!(SHAPE.rows(&slot, &other), None, "{other:?}");
        }
        assert_eq!(SHAPE.plain_block(&slot), None);
        let foreign = SlotShape { layout: 8, ..SHAPE };
        assert_eq!(foreign.read_header(&slot), None);
        let empty = vec![0; SHAPE.slot_bytes()];
        assert_eq!(SHAPE.read_header(&empty), None);
    }

    #[test]
    fn the_header_of_a_plain_block_has_its_tokens() {
        let plain = |parent, depth, namespace| {
            let page = PageName {
                namespace,
                parent,
                depth,
                ..PAGE
            };
            SHAPE.plain_block(&SHAPE.header(&page, 9, &[0; 100]))
        };
        let block = |parent, depth| PlainBlock {
            key: PAGE.key,
            parent,
            depth,
            tokens: [1, 2, 3, u32::MAX].into(),
        };
        let none = SlotNamespace::default();
        let parent = Some(PageHash(3));
        assert_eq!(plain(parent, 2, none), Some(block(parent, 2)));
        assert_eq!(plain(None, 0, none), Some(block(None, 0)));
        let salted = SlotNamespace { salt: 1, ..none };
        let adapted = SlotNamespace { adapter: 1, ..none };
        assert_eq!(plain(parent, 2, salted), None);
        assert_eq!(plain(parent, 2, adapted), None);
    }

    #[test]
    fn each_changed_bit_makes_a_page_absent() {
        let slot = slot();
        // Only bytes of the header's fields, the tokens and the rows count. The other bytes are padding.
        for at in (0..136 + 16).chain(512..612) {
            let mut damaged = slot.clone();
            damaged[at] ^= 1 << (at % 8);
            assert_eq!(SHAPE.rows(&damaged, &PAGE), None, "byte {at}");
        }
    }
}
