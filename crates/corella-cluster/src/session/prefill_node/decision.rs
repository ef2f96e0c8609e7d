//! The choice of the node that computes the rest of a prompt, if a decode node has cached a part of it.

use std::sync::Arc;

use corella_core::session::SessionKey;
use corella_core::{CachedRows, Fetching};

use super::{Node, State};
use crate::driver::Driver;
use crate::kv_connector::Prefix;

impl Node {
    /// Asks the engine how much of a session's prompt it has cached, and fetches more if the machine says so. If the
    /// engine answers too late, the session continues without a decision.
    pub(super) fn decide(self: &Arc<Self>, state: &mut State, key: SessionKey, num_there: u32) {
        let hashes = state.node.hashes(key.session).cloned();
        let Some((hashes, request)) = hashes.zip(state.node.sessions().request(key.session)) else {
            return;
        };
        let (namespace, prompt) = (request.namespace.clone(), request.prompt.clone());
        let client = state.sessions.client(key.session);
        let trace_id = client.and_then(|client| client.trace_id.clone());
        let blocks = self.engine.block_exchange();
        let this = self.clone();
        self.spawn(async move {
            let list = blocks.list(&namespace, &prompt, &hashes);
            let num_blocks = blocks.look_up(list).await.unwrap_or(0);
            let num_here = num_blocks * blocks.page_size();
            let cached = CachedRows {
                num_here,
                num_there,
            };
            let here = this.engine.stats().scheduler;
            let fetcher = this.fetcher.as_ref();
            let fetching = fetcher.map_or(Fetching::Never, |fetcher| {
                Fetching::IfQuicker(fetcher.node().pace())
            });
            let source = this
                .with(|node, now_us| node.handle_looked_up(key, cached, fetching, &here, now_us));
            let Some(source) = source else {
                return;
            };
            let source = this.source(&this.lock(), source.node);
            if let Some((fetcher, source)) = source {
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
