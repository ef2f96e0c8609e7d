//! A prefill node that fetches the last turn of a conversation from its decode node, unless the decode node computes
//! the next turn itself.

use std::sync::Arc;

use corella_engine::{Generate, Submission, SubmitError, TokenStream};

use crate::entrance::BlockFetcher;
use crate::session::PrefillNode;

pub struct FetchedPrefill {
    node: PrefillNode,
    /// Computes prompts here.
    local: Arc<dyn Generate>,
    fetcher: Arc<BlockFetcher>,
    /// Rows are fetched even if computing them is faster.
    is_forced: bool,
}

impl FetchedPrefill {
    pub fn new(node: PrefillNode, fetcher: Arc<BlockFetcher>, is_forced: bool) -> Self {
        Self {
            local: Arc::new(Local(node.clone())),
            node,
            fetcher,
            is_forced,
        }
    }
}

impl Generate for FetchedPrefill {
    fn submit(&self, submission: Submission) -> Result<Vec<TokenStream>, SubmitError> {
        let host = self.fetcher.machine();
        match self.node.block_source(&submission, host, self.is_forced) {
            Some(source) => self.fetcher.submit_from(submission, source, &self.local),
            None if self.is_forced => self.node.submit_here(submission),
            None => self.node.submit(submission),
        }
    }
}

struct Local(PrefillNode);

impl Generate for Local {
    fn submit(&self, submission: Submission) -> Result<Vec<TokenStream>, SubmitError> {
        self.0.submit_here(submission)
    }
}
