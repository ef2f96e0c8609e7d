//! Remembers which prompts each caller has sent, to tell why a prompt is not cached.
//!
//! The memory has a hash of each page of earlier prompts and answers, chained like the hashes of blocks and seeded with
//! the caller. So a caller learns only about their own prompts: prompts of other callers, and evictions of their pages,
//! change no answer of the memory. The memory is bounded, and forgets the oldest pages first.

use std::collections::hash_map::RandomState;
use std::collections::{HashSet, VecDeque};
use std::hash::{BuildHasher, BuildHasherDefault, Hasher};
use std::sync::{Mutex, MutexGuard, PoisonError};

use corella_core::{BlockHasher, Namespace, PageHash, TokenId};
use corella_engine::Engine;

use crate::wire::cache_explanation::MissCause;

/// The memory takes at most about 8 MB.
const MAX_PAGES: usize = 1 << 18;

pub struct PromptMemory {
    page_size: u32,
    is_on: bool,
    is_recurrent: bool,
    /// Makes hashes that no caller can foresee.
    seeds: RandomState,
    seen: Mutex<Seen>,
}

#[derive(Default)]
struct Seen {
    pages: HashSet<u64, BuildHasherDefault<HashOfHash>>,
    /// The same pages, the oldest first.
    by_age: VecDeque<u64>,
    /// The seeds of callers with earlier prompts, at most one for each API key.
    callers: HashSet<u64>,
}

/// Takes a page's hash as it is. Its seed is secret, so that no caller can choose pages of one bucket.
#[derive(Default)]
struct HashOfHash(u64);

impl Hasher for HashOfHash {
    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("pages are numbers of 64 bits");
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// The pages of a prompt, compared with the memory when the prompt arrived.
pub struct RecalledPrompt {
    caller: u64,
    num_tokens: u32,
    /// The number of the prompt's first pages that an earlier prompt or answer had.
    num_seen_pages: u32,
    /// The cause if no page was seen.
    cause_if_new: MissCause,
    /// Hashes of the pages to remember.
    pages: Vec<u64>,
    /// The chain of hashes up to the last of these pages.
    chain: PageHash,
}

impl RecalledPrompt {
    /// Adds a page of the answer to the pages to remember.
    pub fn add_page(&mut self, tokens: &[TokenId]) {
        self.chain = self.chain.next(self.caller, tokens);
        self.pages.push(short(self.chain));
    }
}

impl PromptMemory {
    pub fn new(engine: &Engine) -> Self {
        let limits = engine.limits();
        Self {
            page_size: limits.page_size,
            is_on: limits.enable_prefix_caching,
            is_recurrent: limits.recurrent_state.is_some(),
            seeds: RandomState::new(),
            seen: Mutex::default(),
        }
    }

    pub fn page_size(&self) -> usize {
        self.page_size as usize
    }

    /// Looks a prompt up. `key` is the name of the caller's API key; all callers without one count as one caller.
    pub fn recall(
        &self,
        key: Option<&str>,
        namespace: &Namespace,
        tokens: &[TokenId],
    ) -> RecalledPrompt {
        let caller = self.seeds.hash_one(key);
        let chain: Vec<_> = BlockHasher::new(caller)
            .hashes(namespace, tokens, self.page_size)
            .collect();
        let mut pages: Vec<_> = chain.iter().map(|&page| short(page)).collect();
        let seen = self.seen();
        let num_seen_pages = pages.iter().rposition(|page| seen.pages.contains(page));
        let first_page = &tokens[..self.page_size().min(tokens.len())];
        let mut cause_if_new = match seen.callers.contains(&caller) {
            true => MissCause::First,
            false => MissCause::Restart,
        };
        for (cause, mark) in self.marks(caller, namespace, first_page) {
            if seen.pages.contains(&mark) && (cause != MissCause::Salt || key.is_some()) {
                cause_if_new = cause;
            }
            pages.push(mark);
        }
        RecalledPrompt {
            caller,
            num_tokens: tokens.len() as u32,
            num_seen_pages: num_seen_pages.map_or(0, |last| last as u32 + 1),
            cause_if_new,
            pages,
            chain: chain
                .last()
                .copied()
                .unwrap_or_else(|| PageHash::root(caller, namespace)),
        }
    }

    /// Two hashes of a prompt's first page: one without its salt, and one without its adapter. Each hash comes with the
    /// cause of the miss if the memory has an equal hash.
    fn marks(
        &self,
        caller: u64,
        namespace: &Namespace,
        first_page: &[TokenId],
    ) -> impl Iterator<Item = (MissCause, u64)> {
        let (mut without_salt, mut without_adapter) = (namespace.clone(), namespace.clone());
        without_salt.cache_salt = None;
        without_adapter.lora = None;
        let kinds = [
            (MissCause::Salt, without_salt, caller.wrapping_add(1)),
            (MissCause::Adapter, without_adapter, caller.wrapping_add(2)),
        ];
        let page_size = self.page_size;
        kinds
            .into_iter()
            .filter_map(move |(cause, namespace, seed)| {
                let hasher = BlockHasher::new(seed);
                let page = hasher.hashes(&namespace, first_page, page_size).next()?;
                Some((cause, short(page)))
            })
    }

    /// Remembers pages whose rows are computed, and empties the list.
    pub fn remember(&self, prompt: &mut RecalledPrompt) {
        let mut seen = self.seen();
        seen.callers.insert(prompt.caller);
        for page in prompt.pages.drain(..) {
            if !seen.pages.insert(page) {
                continue;
            }
            seen.by_age.push_back(page);
            if seen.by_age.len() > MAX_PAGES
                && let Some(oldest) = seen.by_age.pop_front()
            {
                seen.pages.remove(&oldest);
            }
        }
    }

    /// The cause for which a prompt's tokens after the first `num_cached` were computed.
    pub fn cause(&self, prompt: &RecalledPrompt, num_cached: u32, takes_hits: bool) -> MissCause {
        let num_cached_pages = num_cached / self.page_size;
        if !self.is_on || !takes_hits {
            MissCause::Off
        } else if num_cached_pages >= prompt.num_tokens.saturating_sub(1) / self.page_size {
            MissCause::PartialPage
        } else if prompt.num_seen_pages > num_cached_pages {
            match self.is_recurrent {
                true => MissCause::State,
                false => MissCause::Eviction,
            }
        } else if prompt.num_seen_pages > 0 {
            MissCause::Client
        } else {
            prompt.cause_if_new
        }
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// 64 bits of a hash are enough: a chance equality only gives another cause.
fn short(page: PageHash) -> u64 {
    page.0 as u64
}
