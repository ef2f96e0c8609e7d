//! The settled prefix, which other nodes may read: complete, and computed by steps that have returned.

use alloc::vec::Vec;

use crate::cache::kv_cache::KvCache;
use crate::cache::prefix_tree::KnownPath;
use crate::{BlockId, Namespace, StepId, TokenId};

impl KvCache {
    /// The longest settled path of a sequence: steps up to `last_returned` have filled all of its pages, and every
    /// group has the rows that a query after its end reads. With recurrent layers, the path ends at a snapshot.
    pub(crate) fn settled_path(
        &self,
        namespace: &Namespace,
        tokens: &[TokenId],
        last_returned: Option<StepId>,
    ) -> Vec<BlockId> {
        let known = &mut KnownPath::default();
        let next = last_returned.map_or(StepId(0), |last| StepId(last.0 + 1));
        let mut path = self.find_prefix(namespace, tokens, next, known).path;
        let is_ready = |block: &&BlockId| self.block_filled_by(**block) <= last_returned;
        let num_ready = path.iter().take_while(is_ready).count();
        path.truncate(num_ready);
        // In groups with windows, a shorter path may lack pages that the longer path does not need.
        path.truncate(self.num_usable(&path, next));
        path
    }
}
