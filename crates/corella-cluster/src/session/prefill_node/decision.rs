//! Looks up and fetches the blocks of a prompt that a decode node has in part.

use std::sync::Arc;

use corella_core::session::SessionKey;
use corella_core::{Fetching, NodeId};

use super::{Node, State};
use crate::driver::Driver;
use crate::entrance::Prefix;

impl Node {
    /// Asks the engine how much of a session's prompt it has cached. If the engine answers too late, the session
    /// continues without a decision.
    pub(super) fn look_up(self: &Arc<Self>, state: &mut State, key: SessionKey) {
        let hashes = state.node.hashes(key.session).cloned();
        let Some((hashes, request)) = hashes.zip(state.node.sessions().request(key.session)) else {
            return;
        };
        let blocks = self.engine.block_exchange();
        let list = blocks.list(&request.namespace, &request.prompt, &hashes);
        let this = self.clone();
        self.spawn(async move {
            let num_blocks = blocks.look_up(list).await.unwrap_or(0);
            let num_cached_here = num_blocks * blocks.page_size();
            let here = this.engine.stats().scheduler;
            let fetcher = this.fetcher.as_ref();
            let fetching = fetcher.map_or(Fetching::Never, |fetcher| {
                Fetching::IfQuicker(fetcher.loader().pace())
            });
            this.with(|node, now_us| {
                node.handle_looked_up(key, num_cached_here, fetching, &here, now_us);
            });
        });
    }

    /// Begins to fetch the blocks of a session's prompt.
    pub(super) fn fetch(self: &Arc<Self>, state: &mut State, key: SessionKey, node: NodeId) {
        let hashes = state.node.hashes(key.session).cloned();
        let request = state.node.sessions().request(key.session);
        let known = hashes.zip(request.map(|it| (it.namespace.clone(), it.prompt.clone())));
        let client = state.sessions.client(key.session);
        let trace_id = client.and_then(|client| client.trace_id.clone());
        let source = self.source(state, node);
        let source = source.map(|(fetcher, source)| (fetcher.clone(), source));
        let this = self.clone();
        self.spawn(async move {
            if let Some((fetcher, source)) = source
                && let Some((hashes, (namespace, prompt))) = known
            {
                let prefix = Prefix {
                    namespace: &namespace,
                    prompt: &prompt,
                    trace_id: trace_id.as_deref(),
                };
                fetcher.begin(prefix, &hashes, source).await;
            }
            this.with(|node, now_us| node.handle_fetch_begun(key, now_us));
        });
    }
}
