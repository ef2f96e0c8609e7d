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
        let next = step_after(last_returned);
        let mut path = self.find_prefix(namespace, tokens, next, known).path;
        let is_ready = |block: &&BlockId| self.block_filled_by(**block) <= last_returned;
        let num_ready = path.iter().take_while(is_ready).count();
        path.truncate(num_ready);
        path.truncate(self.num_settled(&path, last_returned));
        path
    }

    /// The length, in blocks, of the longest beginning of a settled path after which a request can continue. In groups
    /// with windows, a beginning may lack pages that the whole path does not need. With recurrent layers, a step in
    /// flight may be taking a snapshot within the path.
    pub(crate) fn num_settled(&self, path: &[BlockId], last_returned: Option<StepId>) -> usize {
        self.num_usable(path, step_after(last_returned))
    }

    /// The lengths, in blocks, of the beginnings of a settled path after which a request can continue from a snapshot,
    /// shortest first.
    pub(crate) fn settled_states(
        &self,
        path: &[BlockId],
        last_returned: Option<StepId>,
    ) -> Vec<usize> {
        let has_state = |num_blocks: &usize| {
            self.has_snapshot(path[num_blocks - 1])
                && self.num_settled(&path[..*num_blocks], last_returned) == *num_blocks
        };
        (1..=path.len()).filter(has_state).collect()
    }

    /// Whether steps up to `last_returned` have filled a block's pages and its snapshot, if any.
    pub(super) fn is_settled(&self, block: BlockId, last_returned: Option<StepId>) -> bool {
        self.block_filled_by(block)
            .max(self.snapshot_filled_by(block))
            <= last_returned
    }
}

fn step_after(last_returned: Option<StepId>) -> StepId {
    last_returned.map_or(StepId(0), |last| StepId(last.0 + 1))
}
