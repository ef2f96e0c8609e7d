//! A prefill node that brings the last turn of a conversation back from the decode node that has it.

use std::sync::Arc;

use corella_engine::{Generate, Submission, SubmitError, TokenStream};

use crate::entrance::BlockFetcher;
use crate::session::PrefillNode;

pub struct FetchedPrefill {
    node: PrefillNode,
    /// The same node as the fetcher submits to it.
    generator: Arc<dyn Generate>,
    fetcher: Arc<BlockFetcher>,
}

impl FetchedPrefill {
    pub fn new(node: PrefillNode, fetcher: Arc<BlockFetcher>) -> Self {
        Self {
            generator: Arc::new(node.clone()),
            node,
            fetcher,
        }
    }
}

impl Generate for FetchedPrefill {
    fn submit(&self, submission: Submission) -> Result<Vec<TokenStream>, SubmitError> {
        match self.node.block_site(&submission, self.fetcher.machine()) {
            Some(source) => self
                .fetcher
                .submit_from(submission, source, &self.generator),
            None => self.node.submit(submission),
        }
    }
}
