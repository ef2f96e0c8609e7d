//! What the prefix cache holds, told to whoever wants to know: a router, another tier.

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::fmt;

use xxhash_rust::xxh3::Xxh3;

use crate::{Namespace, PageId, TokenId};

/// Names a whole page by its namespace and all tokens up to its end: XXH3-128, chained page by
/// page and seeded with a salt. Equal in all processes that share salt and page size, so that
/// one can ask for what another holds.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageHash(pub u128);

impl PageHash {
    /// What the first page of a namespace follows.
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

/// Only whole pages whose rows are computed are told of, each after the one before it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvEvent {
    /// Nothing said before holds. What is held follows; a subscription starts with this, and one
    /// that fell too far behind starts again.
    Cleared,
    Stored {
        page: PageHash,
        /// `None` for the first page of a namespace.
        parent: Option<PageHash>,
        tokens: Box<[TokenId]>,
    },
    Removed {
        page: PageHash,
    },
}

/// The bookkeeping of one subscription.
#[derive(Debug)]
pub(crate) struct KvWatch {
    pub salt: u64,
    /// By page: its hash, from its publication until it leaves the tree.
    hashes: Vec<Option<PageHash>>,
    is_told: Vec<bool>,
    /// Published pages that are not told of yet. A page comes after the one before it.
    untold: Vec<PageId>,
    events: VecDeque<KvEvent>,
    /// The queue has become longer than telling everything anew would be.
    pub is_behind: bool,
}

impl KvWatch {
    pub fn new(salt: u64, num_pages: usize) -> Self {
        Self {
            salt,
            hashes: alloc::vec![None; num_pages],
            is_told: alloc::vec![false; num_pages],
            untold: Vec::new(),
            events: VecDeque::new(),
            is_behind: true,
        }
    }

    /// `parent` is the hash that the page's own goes on from.
    pub fn note_published(&mut self, parent: PageHash, tokens: &[TokenId], page: PageId) {
        self.hashes[page.0 as usize] = Some(parent.next(self.salt, tokens));
        if self.untold.len() < self.hashes.len() {
            self.untold.push(page);
        } else {
            self.is_behind = true;
        }
    }

    /// A partly filled page has no hash, and nothing to note.
    pub fn note_removed(&mut self, page: PageId) {
        let hash = self.hashes[page.0 as usize].take();
        if core::mem::take(&mut self.is_told[page.0 as usize])
            && let Some(page) = hash
        {
            self.push(KvEvent::Removed { page });
        }
    }

    pub fn hash(&self, page: PageId) -> Option<PageHash> {
        self.hashes[page.0 as usize]
    }

    pub fn is_told(&self, page: PageId) -> bool {
        self.is_told[page.0 as usize]
    }

    pub fn take_untold(&mut self) -> Vec<PageId> {
        core::mem::take(&mut self.untold)
    }

    pub fn keep_untold(&mut self, page: PageId) {
        self.untold.push(page);
    }

    pub fn tell_stored(&mut self, page: PageId, parent: Option<PageHash>, tokens: &[TokenId]) {
        self.is_told[page.0 as usize] = true;
        if let Some(page) = self.hash(page) {
            let tokens = tokens.into();
            self.push(KvEvent::Stored {
                page,
                parent,
                tokens,
            });
        }
    }

    /// Begins anew with `pages`, all whole pages of the tree.
    pub fn start_over(&mut self, pages: Vec<PageId>) {
        self.is_told.fill(false);
        self.untold = pages;
        self.events.clear();
        self.events.push_back(KvEvent::Cleared);
        self.is_behind = false;
    }

    pub fn pop(&mut self) -> Option<KvEvent> {
        self.events.pop_front()
    }

    fn push(&mut self, event: KvEvent) {
        if self.events.len() > 2 * self.hashes.len() {
            self.is_behind = true;
        }
        if self.is_behind {
            self.events.clear();
        } else {
            self.events.push_back(event);
        }
    }
}

impl fmt::Debug for PageHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}
