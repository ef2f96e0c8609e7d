//! The name of a block outside of the process.

use core::fmt;

use xxhash_rust::xxh3::Xxh3;

use crate::{Namespace, TokenId};

/// The name of a whole block: an XXH3-128 hash of its namespace and all tokens up to its end, chained
/// block by block and seeded with a salt. It is the same in all processes that share salt and page
/// size, so that one can ask for what another holds.
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
        Self(hasher.digest128())
    }

    pub fn next(self, salt: u64, tokens: &[TokenId]) -> Self {
        let mut hasher = Xxh3::with_seed(salt);
        hasher.update(&self.0.to_le_bytes());
        for token in tokens {
            hasher.update(&token.to_le_bytes());
        }
        Self(hasher.digest128())
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

    use super::*;

    /// A router that confused them would send requests to KV computed with other weights.
    #[test]
    fn an_adapter_and_a_salt_of_one_name_have_different_hashes() {
        let (name, none) = (Some("x"), None);
        let pairs = [(none, none), (name, none), (none, name), (name, name)];
        let root = |(lora, cache_salt): (Option<&str>, Option<&str>)| {
            let namespace = Namespace {
                lora: lora.map(Into::into),
                cache_salt: cache_salt.map(Into::into),
            };
            PageHash::root(7, &namespace)
        };
        let hashes: BTreeSet<_> = pairs.map(root).into_iter().collect();
        assert_eq!(hashes.len(), 4);
        assert_ne!(root((Some("xy"), Some("z"))), root((Some("x"), Some("yz"))));
        assert_ne!(root((Some(""), none)), root((none, none)));
    }
}
