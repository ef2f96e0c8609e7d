//! The name of a block outside of the process.

use core::fmt;

use xxhash_rust::xxh3::{Xxh3, xxh3_128_with_seed};

use crate::{Arithmetic, Namespace, TokenId};

/// Pages of up to this many tokens are hashed in one call, which takes a tenth of the instructions of a hasher that is fed
/// token by token.
const ONE_SHOT_TOKENS: usize = 64;

/// The name of a whole block: an XXH3-128 hash of its namespace and all tokens up to its end, chained block by block
/// and seeded with a salt. It is the same in all processes that share salt and page size, so that a process can ask
/// another for a block.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageHash(pub u128);

impl PageHash {
    /// The hash that precedes the first page of a namespace.
    pub fn root(salt: u64, namespace: &Namespace) -> Self {
        let mut hasher = Xxh3::with_seed(salt);
        for name in [&namespace.lora, &namespace.cache_salt] {
            let length = name.as_ref().map_or(u64::MAX, |name| name.len() as u64);
            hasher.update(&length.to_le_bytes());
            hasher.update(name.as_deref().unwrap_or_default().as_bytes());
        }
        if let Some(Arithmetic(digest)) = namespace.arithmetic {
            hasher.update(&digest.to_le_bytes());
        }
        Self(hasher.digest128())
    }

    /// Hashes the bytes of this hash and of the tokens, low byte first.
    pub fn next(self, salt: u64, tokens: &[TokenId]) -> Self {
        let mut bytes = [0; 16 + 4 * ONE_SHOT_TOKENS];
        if let Some((bytes, _)) = bytes.split_at_mut_checked(16 + 4 * tokens.len()) {
            let (hash, words) = bytes.split_at_mut(16);
            hash.copy_from_slice(&self.0.to_le_bytes());
            for (word, token) in words.chunks_exact_mut(4).zip(tokens) {
                word.copy_from_slice(&token.to_le_bytes());
            }
            return Self(xxh3_128_with_seed(bytes, salt));
        }
        let mut hasher = Xxh3::with_seed(salt);
        hasher.update(&self.0.to_le_bytes());
        for token in tokens {
            hasher.update(&token.to_le_bytes());
        }
        Self(hasher.digest128())
    }
}

/// The block hash function of a fleet. Nodes have the same salt if they compute the same KV for the same tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockHasher {
    salt: u64,
    mask: u128,
}

impl BlockHasher {
    pub fn new(salt: u64) -> Self {
        let mask = u128::MAX;
        Self { salt, mask }
    }

    /// Keeps only the low `num_bits` bits of each hash, so that tests see different blocks with equal hashes.
    pub fn truncated(salt: u64, num_bits: u32) -> Self {
        let mask = 1_u128
            .checked_shl(num_bits)
            .map_or(u128::MAX, |end| end - 1);
        Self { salt, mask }
    }

    /// The hashes of a sequence's whole blocks.
    pub fn hashes<'a>(
        &self,
        namespace: &Namespace,
        tokens: &'a [TokenId],
        page_size: u32,
    ) -> impl Iterator<Item = PageHash> + use<'a> {
        let Self { salt, mask } = *self;
        let mut hash = PageHash(PageHash::root(salt, namespace).0 & mask);
        tokens.chunks_exact(page_size as usize).map(move |block| {
            hash = PageHash(hash.next(salt, block).0 & mask);
            hash
        })
    }
}

impl Default for BlockHasher {
    fn default() -> Self {
        Self::new(0)
    }
}

impl fmt::Debug for PageHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use alloc::collections::BTreeSet;
    use alloc::vec::Vec;

    use super::*;

    /// Each truncated hash continues the chain, and all bits make the hashes of KV events.
    #[test]
    fn a_sequence_has_a_hash_for_each_whole_block() {
        let namespace = Namespace::default();
        let tokens = [1, 2, 3, 4, 5];
        let whole: Vec<_> = BlockHasher::new(7).hashes(&namespace, &tokens, 2).collect();
        let first = PageHash::root(7, &namespace).next(7, &[1, 2]);
        assert_eq!(whole, [first, first.next(7, &[3, 4])]);
        let cut = BlockHasher::truncated(7, 8);
        let cut: Vec<_> = cut.hashes(&namespace, &tokens, 2).collect();
        let root = PageHash(PageHash::root(7, &namespace).0 % 256);
        let first = PageHash(root.next(7, &[1, 2]).0 % 256);
        assert_eq!(cut, [first, PageHash(first.next(7, &[3, 4]).0 % 256)]);
    }

    /// Long pages are hashed in pieces.
    #[test]
    fn a_hash_is_that_of_all_bytes_at_each_length() {
        let tokens: Vec<TokenId> = (0..300).map(|at| at * 40_503 % 151_936).collect();
        let before = PageHash(0x1234_5678_9abc_def0_0fed_cba9_8765_4321);
        for length in [0, 1, 16, 63, 64, 65, 256, 300] {
            let mut bytes = before.0.to_le_bytes().to_vec();
            bytes.extend(
                tokens[..length]
                    .iter()
                    .flat_map(|token| token.to_le_bytes()),
            );
            let whole = xxhash_rust::xxh3::xxh3_128_with_seed(&bytes, 7);
            assert_eq!(
                before.next(7, &tokens[..length]),
                PageHash(whole),
                "{length}"
            );
        }
    }

    /// With equal hashes, a router would send requests to KV computed with other weights.
    #[test]
    fn an_adapter_and_a_salt_of_one_name_have_different_hashes() {
        let (name, none) = (Some("x"), None);
        let pairs = [(none, none), (name, none), (none, name), (name, name)];
        let root = |(lora, cache_salt): (Option<&str>, Option<&str>)| {
            let namespace = Namespace {
                lora: lora.map(Into::into),
                cache_salt: cache_salt.map(Into::into),
                arithmetic: None,
            };
            PageHash::root(7, &namespace)
        };
        let hashes: BTreeSet<_> = pairs.map(root).into_iter().collect();
        assert_eq!(hashes.len(), 4);
        assert_ne!(root((Some("xy"), Some("z"))), root((Some("x"), Some("yz"))));
        assert_ne!(root((Some(""), none)), root((none, none)));
        let foreign = Namespace {
            arithmetic: Some(Arithmetic(0)),
            ..Namespace::default()
        };
        assert_ne!(PageHash::root(7, &foreign), root((none, none)));
    }
}
