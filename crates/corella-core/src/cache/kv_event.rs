//! KV events: they tell subscribers, such as a router or another cache tier, what the prefix cache
//! holds.

use alloc::boxed::Box;
use alloc::collections::{BTreeSet, VecDeque};
use alloc::vec::Vec;
use core::fmt;

use xxhash_rust::xxh3::Xxh3;

use crate::{Namespace, PageId, Parent, StepId, TokenId};

/// The name of a full page: an XXH3-128 hash of its namespace and all tokens up to its end, chained
/// page by page and seeded with a salt. It is the same in all processes that share salt and page
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

/// A change of what the prefix cache holds. Only full pages whose rows are computed are announced,
/// each after the page before it on its path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvEvent {
    /// Forget all earlier events. A subscription starts with this, and what the cache holds
    /// follows.
    Cleared,
    Stored {
        page: PageHash,
        /// The page before it, or `None` for the first page of a namespace.
        parent: Option<PageHash>,
        tokens: Box<[TokenId]>,
    },
    Removed {
        page: PageHash,
    },
}

/// The state of one subscription. Events are made only when they are asked for, so pages that come
/// and go in between are never mentioned. A slow reader therefore leaves no more behind than a
/// `Removed` for each page that it knows and a `Stored` for each page in the tree.
#[derive(Debug)]
pub(crate) struct KvWatch {
    pub salt: u64,
    has_begun: bool,
    /// Full pages that are in the tree, indexed by page.
    pages: Vec<Option<WatchedPage>>,
    /// Pages that were announced and have left the tree since, in the order in which they left.
    removed: VecDeque<PageHash>,
    /// Pages that have not been announced yet, sorted by when they can be.
    untold: BTreeSet<(StepId, u64, PageId)>,
    /// The number of publications so far. A page's number sorts it after the page that it follows.
    num_published: u64,
}

#[derive(Clone, Copy, Debug)]
struct WatchedPage {
    hash: PageHash,
    /// The step whose return makes the page and all before it ready.
    ready_by: StepId,
    number: u64,
    is_told: bool,
}

impl KvWatch {
    pub fn new(salt: u64, num_pages: usize) -> Self {
        Self {
            salt,
            has_begun: false,
            pages: alloc::vec![None; num_pages],
            removed: VecDeque::new(),
            untold: BTreeSet::new(),
            num_published: 0,
        }
    }

    /// Records that a full page was published. Its parent must have been recorded before it.
    pub fn note_published(
        &mut self,
        parent: Parent,
        tokens: &[TokenId],
        page: PageId,
        filled_by: StepId,
    ) {
        let ready_by = match parent {
            Parent::Root(_) => filled_by,
            Parent::Page(parent) => self.watched(parent).ready_by.max(filled_by),
        };
        let watched = WatchedPage {
            hash: self.hash_after(parent, tokens),
            ready_by,
            number: self.num_published,
            is_told: false,
        };
        self.num_published += 1;
        self.untold.insert((ready_by, watched.number, page));
        self.pages[page.0 as usize] = Some(watched);
    }

    /// Records that a page left the tree. Partly filled pages are not watched.
    pub fn note_removed(&mut self, page: PageId) {
        match self.pages[page.0 as usize].take() {
            Some(watched) if watched.is_told => self.removed.push_back(watched.hash),
            Some(watched) => {
                self.untold
                    .remove(&(watched.ready_by, watched.number, page));
            }
            None => {}
        }
    }

    /// The next event that needs no step to have returned: the beginning of the subscription, then
    /// pages that have left the tree.
    pub fn pop_gone(&mut self) -> Option<KvEvent> {
        if !core::mem::replace(&mut self.has_begun, true) {
            return Some(KvEvent::Cleared);
        }
        let page = self.removed.pop_front()?;
        Some(KvEvent::Removed { page })
    }

    /// The next page to announce. `last_returned` is the newest step whose rows are computed.
    pub fn pop_ready(&mut self, last_returned: Option<StepId>) -> Option<PageId> {
        let &(ready_by, _, page) = self.untold.first()?;
        if Some(ready_by) > last_returned {
            return None;
        }
        self.untold.pop_first();
        if let Some(watched) = &mut self.pages[page.0 as usize] {
            watched.is_told = true;
        }
        Some(page)
    }

    pub fn hash(&self, page: PageId) -> Option<PageHash> {
        self.pages[page.0 as usize].map(|watched| watched.hash)
    }

    pub fn is_told(&self, page: PageId) -> bool {
        self.pages[page.0 as usize].is_some_and(|watched| watched.is_told)
    }

    /// The hash of a page with `tokens` that follows `parent`.
    pub fn hash_after(&self, parent: Parent, tokens: &[TokenId]) -> PageHash {
        let parent = match parent {
            Parent::Root(namespace) => PageHash::root(self.salt, namespace),
            Parent::Page(page) => self.watched(page).hash,
        };
        parent.next(self.salt, tokens)
    }

    fn watched(&self, page: PageId) -> WatchedPage {
        self.pages[page.0 as usize].expect("the page is not a full page of the tree")
    }
}

impl fmt::Debug for PageHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

#[cfg(test)]
mod tests {
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
