//! The tokens of short words, which texts repeat often.
//!
//! The package `tokenizers` has a cache of its own in each thread: 10,000 words of up to 255 bytes, with 32 bytes of
//! memory for each byte of a word. A client can make each of these caches grow to some 80 MB, and unloading the model
//! does not free this memory. The cache here has a bound in bytes, is shared by all threads, and is dropped with its
//! tokenizer.

use std::sync::Arc;

use tokenizers::models::ModelWrapper;
use tokenizers::{AddedToken, Result, Trainer};

use crate::recent_cache::RecentCache;

/// The longest cached word. Longer words rarely repeat.
const MAX_WORD_BYTES: usize = 32;
/// The overhead of an entry in bytes: two boxes, a weight, and the table's free room.
const ENTRY_BYTES: usize = 128;
const NUM_SHARDS: usize = 16;
/// Room for some 16,000 words, in two generations.
const SHARD_BYTES: usize = (2 << 20) / NUM_SHARDS;

/// Concurrent threads mostly look into different shards.
pub(crate) struct WordCache([RecentCache<Box<str>, Arc<[u32]>>; NUM_SHARDS]);

impl WordCache {
    pub(crate) fn new() -> Self {
        Self([(); NUM_SHARDS].map(|()| RecentCache::new(SHARD_BYTES)))
    }

    pub(crate) fn find(&self, word: &str) -> Option<Arc<[u32]>> {
        self.shard(word)?.find(word)
    }

    pub(crate) fn keep(&self, word: &str, ids: &[u32]) {
        if let Some(shard) = self.shard(word) {
            let weight = ENTRY_BYTES + word.len() + size_of_val(ids);
            shard.keep(word.into(), ids.into(), weight);
        }
    }

    /// `None` for words that are not kept.
    fn shard(&self, word: &str) -> Option<&RecentCache<Box<str>, Arc<[u32]>>> {
        let (&[first, ..], &[.., last]) = (word.as_bytes(), word.as_bytes()) else {
            return None;
        };
        let sum = usize::from(first) + 5 * usize::from(last) + 3 * word.len();
        (word.len() <= MAX_WORD_BYTES).then(|| &self.0[sum % NUM_SHARDS])
    }
}

/// Bounds the number of words that the package's own cache has in each thread.
pub(crate) fn resize_package_cache(
    model: &mut tokenizers::Tokenizer,
    num_words: usize,
) -> Result<()> {
    let no_texts = std::iter::empty::<&str>();
    model.train(&mut CacheResizer(num_words), no_texts)?;
    Ok(())
}

/// A trainer that only resizes the cache. The package lets only trainers change a model in place, and copying a large
/// vocabulary takes a tenth of a second.
struct CacheResizer(usize);

impl Trainer for CacheResizer {
    type Model = ModelWrapper;

    fn should_show_progress(&self) -> bool {
        false
    }

    fn train(&self, model: &mut ModelWrapper) -> Result<Vec<AddedToken>> {
        model.resize_cache(self.0);
        Ok(Vec::new())
    }

    fn feed<I, S, F>(&mut self, _texts: I, _split: F) -> Result<()>
    where
        I: Iterator<Item = S> + Send,
        S: AsRef<str> + Send,
        F: Fn(&str) -> Result<Vec<String>> + Sync,
    {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_words_are_found_again() {
        let cache = WordCache::new();
        let words = ["a", " the", "<|end|>", "é"];
        for (id, word) in words.iter().enumerate() {
            assert_eq!(cache.find(word), None);
            cache.keep(word, &[id as u32, 7]);
        }
        for (id, word) in words.iter().enumerate() {
            assert_eq!(cache.find(word).as_deref(), Some(&[id as u32, 7][..]));
        }
    }

    #[test]
    fn neither_long_words_nor_no_word_is_kept() {
        let cache = WordCache::new();
        for word in ["", &"a".repeat(MAX_WORD_BYTES + 1)] {
            cache.keep(word, &[1]);
            assert_eq!(cache.find(word), None);
        }
    }

    #[test]
    fn words_are_spread_over_all_shards() {
        let cache = WordCache::new();
        let words: Vec<String> = (0..1000).map(|number| format!(" word{number}")).collect();
        let of_word = |word: &String| std::ptr::from_ref(cache.shard(word).expect("it is short"));
        let shards: std::collections::HashSet<_> = words.iter().map(of_word).collect();
        assert_eq!(shards.len(), NUM_SHARDS);
    }
}
