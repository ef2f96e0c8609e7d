//! Chooses the node that computes the rest of a prompt that a decode node has in part.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use corella_core::session::SessionKey;
use corella_core::{ComputePlace, ComputeQuery, ComputeSite, Fetching, NodeId};

use super::{Node, State};
use crate::driver::Driver;
use crate::entrance::Prefix;

/// Decisions since the start, by the node that computes the prompt.
#[derive(Debug, Default)]
pub(super) struct DecisionCounts {
    num_here: AtomicU64,
    num_there: AtomicU64,
}

impl DecisionCounts {
    fn count(&self, place: ComputePlace) -> &AtomicU64 {
        match place {
            ComputePlace::Here => &self.num_here,
            ComputePlace::There => &self.num_there,
        }
    }

    pub fn get(&self, place: ComputePlace) -> u64 {
        self.count(place).load(Ordering::Relaxed)
    }
}

impl Node {
    /// Asks the engine how much of the prompt it has cached, and decides. If the engine answers too late, the session
    /// continues without a decision.
    pub(super) fn decide(
        self: &Arc<Self>,
        state: &mut State,
        key: SessionKey,
        node: NodeId,
        num_cached_rows: u32,
    ) {
        let Some(request) = state.end.request(key.session) else {
            return;
        };
        let (namespace, prompt) = (request.namespace.clone(), request.prompt.clone());
        let Some(client) = state.sessions.client(key.session) else {
            return;
        };
        let (trace_id, hashes) = (client.trace_id.clone(), client.facts.hashes.clone());
        let blocks = self.engine.block_exchange();
        let this = self.clone();
        self.spawn(async move {
            let list = blocks.list(&namespace, &prompt, &hashes);
            let num_blocks = blocks.look_up(list).await.unwrap_or(0);
            let num_cached_here = num_blocks * blocks.page_size();
            let fetcher = this.fetcher.as_ref();
            let query = ComputeQuery {
                node,
                num_prompt_tokens: prompt.len() as u32,
                num_cached_rows,
                here: ComputeSite::of(&this.engine.stats().scheduler, num_cached_here),
                fetching: fetcher.map_or(Fetching::Never, |fetcher| {
                    Fetching::IfQuicker(fetcher.loader().pace())
                }),
            };
            let decision = this.peers.decide(&query);
            tracing::debug!(%key, ?decision, ?query, "it is decided which node computes a prompt");
            this.decisions
                .count(decision.place)
                .fetch_add(1, Ordering::Relaxed);
            if decision.fetches
                && let Some((fetcher, source)) = this.source(node)
            {
                let prefix = Prefix {
                    namespace: &namespace,
                    prompt: &prompt,
                    trace_id: trace_id.as_deref(),
                };
                fetcher.begin(prefix, &hashes, source).await;
            }
            this.with(|end, now_us| end.handle_decision(key, decision.place, now_us));
        });
    }
}
