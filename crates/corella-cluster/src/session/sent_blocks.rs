//! Which decode node has the beginning of a conversation: the one that its last turn went to.

use std::sync::{Mutex, MutexGuard, PoisonError};

use corella_core::session::Peer;
use corella_core::{BlockSite, BlockSourceMap, Namespace, TokenId};
use corella_engine::BlockExchange;

/// About 10 MB. A conversation has one entry for each of its turns.
const MAX_ENTRIES: usize = 1 << 16;

pub struct SentBlocks {
    exchange: BlockExchange,
    map: Mutex<BlockSourceMap>,
}

impl SentBlocks {
    pub fn new(exchange: BlockExchange) -> Self {
        Self {
            exchange,
            map: Mutex::new(BlockSourceMap::new(MAX_ENTRIES)),
        }
    }

    /// A node has, or is about to have, the rows of a prompt.
    pub fn note(&self, namespace: &Namespace, prompt: &[TokenId], peer: Peer) {
        let list = self.exchange.list(namespace, prompt);
        if let Some(&last) = list.hashes.last() {
            self.lock().note(last, peer.node, peer.incarnation);
        }
    }

    /// The node that has the most of a prompt, as far as is known.
    pub fn find(&self, namespace: &Namespace, prompt: &[TokenId]) -> Option<BlockSite> {
        if self.lock().is_empty() {
            return None;
        }
        let list = self.exchange.list(namespace, prompt);
        self.lock().find(&list.hashes)
    }

    fn lock(&self) -> MutexGuard<'_, BlockSourceMap> {
        self.map.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
