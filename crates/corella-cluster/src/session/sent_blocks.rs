//! The decode node that has the beginning of a conversation: it decoded the last turn.

use std::sync::{Mutex, MutexGuard, PoisonError};

use corella_core::session::Peer;
use corella_core::{BlockHasher, BlockSourceMap, Namespace, PageHash, TokenId};

use super::search::Holder;

/// About 10 MB. A conversation has one entry for each of its turns.
const MAX_ENTRIES: usize = 1 << 16;

pub struct SentBlocks {
    hasher: BlockHasher,
    page_size: u32,
    map: Mutex<BlockSourceMap>,
}

impl SentBlocks {
    pub fn new(hasher: BlockHasher, page_size: u32) -> Self {
        Self {
            hasher,
            page_size,
            map: Mutex::new(BlockSourceMap::new(MAX_ENTRIES)),
        }
    }

    /// Records that a node has, or will soon have, the rows of a prompt.
    pub fn note(&self, namespace: &Namespace, prompt: &[TokenId], peer: Peer) {
        if let Some(last) = self.hashes(namespace, prompt).last() {
            self.lock().note(last, peer.node, peer.incarnation);
        }
    }

    /// Returns the node that is known to have the most of a prompt.
    pub fn find(&self, namespace: &Namespace, prompt: &[TokenId]) -> Option<Holder> {
        if self.lock().is_empty() {
            return None;
        }
        let hashes: Vec<_> = self.hashes(namespace, prompt).collect();
        let site = self.lock().find(&hashes)?;
        Some(Holder {
            node: site.node,
            num_rows: site.num_blocks * self.page_size,
        })
    }

    fn hashes<'a>(
        &self,
        namespace: &Namespace,
        prompt: &'a [TokenId],
    ) -> impl Iterator<Item = PageHash> + use<'a> {
        self.hasher.hashes(namespace, prompt, self.page_size)
    }

    fn lock(&self) -> MutexGuard<'_, BlockSourceMap> {
        self.map.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
