//! How much of a prompt came from the prefix cache, and why the rest did not.

use corella_core::CacheUse;
use serde::Serialize;
use strum::{IntoStaticStr, VariantArray};

/// Cached tokens by the medium from which their rows came.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CachedTokens {
    pub memory: u64,
    /// Host memory beside the memory of a GPU.
    pub host: u64,
    pub disk: u64,
    pub peer: u64,
    /// A store of another program.
    pub store: u64,
}

impl CachedTokens {
    /// Divides the cached tokens of a request, some of which fetches have brought.
    pub fn new(cache_use: CacheUse) -> Self {
        let fetched = cache_use.fetched_tokens;
        Self {
            memory: cache_use
                .num_cached_tokens
                .saturating_sub(fetched.total())
                .into(),
            host: fetched.num_from_host.into(),
            disk: fetched.num_from_disk.into(),
            peer: fetched.num_from_peers.into(),
            store: fetched.num_from_store.into(),
        }
    }

    pub fn are_in_memory(&self) -> bool {
        self.host + self.disk + self.peer + self.store == 0
    }

    pub fn add(&mut self, other: Self) {
        self.memory += other.memory;
        self.host += other.host;
        self.disk += other.disk;
        self.peer += other.peer;
        self.store += other.store;
    }
}

/// The reason why the tokens after the cached ones had to be computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum MissCause {
    /// All whole pages were cached. The last token is always computed.
    PartialPage,
    /// An earlier prompt of the caller begins like this one and then differs.
    Client,
    /// The caller has sent more of this prompt before, and the cache no longer has it.
    Eviction,
    /// The caller has sent more of this prompt before, and no recurrent state was kept where this one could continue.
    State,
    /// The caller has sent the beginning of this prompt to another adapter, or to the model itself.
    Adapter,
    /// The caller has sent the beginning of this prompt with another salt.
    Salt,
    /// The caller's first prompt since the start.
    Restart,
    /// No prompt of the caller since the start begins like this one.
    First,
    /// The request or the server does not use the cache.
    Off,
}

impl MissCause {
    pub const ALL: &'static [Self] = Self::VARIANTS;

    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// The explanation that a caller may ask for. It has no text but the caller's own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CacheExplanation {
    pub prompt_tokens: u32,
    pub cached_tokens: u32,
    pub cached_tokens_by_medium: CachedTokens,
    pub cause: &'static str,
    pub computed_from: PromptPlace,
}

/// A place in the caller's prompt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PromptPlace {
    /// The number of tokens before the place.
    pub position: u32,
    /// The end of the text before the place, and the beginning of the text after it.
    pub before: String,
    pub after: String,
}

#[cfg(test)]
mod tests {
    use corella_core::FetchedTokens;

    use super::*;

    #[test]
    fn cached_tokens_come_from_memory_unless_a_fetch_has_brought_them() {
        let cache_use = CacheUse {
            num_cached_tokens: 100,
            fetched_tokens: FetchedTokens {
                num_from_host: 4,
                num_from_disk: 32,
                num_from_peers: 16,
                num_from_store: 8,
            },
            num_retained_tokens: 0,
        };
        let by_medium = CachedTokens {
            memory: 40,
            host: 4,
            disk: 32,
            peer: 16,
            store: 8,
        };
        assert_eq!(CachedTokens::new(cache_use), by_medium);
        assert!(!by_medium.are_in_memory());
    }
}
