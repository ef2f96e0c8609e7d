//! Chooses the node that computes the rest of a prompt that a decode node has in part.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use corella_core::session::SessionKey;
use corella_core::{ComputeCost, ComputePlace, ComputeSite, NodeId};

use super::super::search::Holder;
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
        let num_prompt_tokens = request.prompt.len() as u32;
        let (namespace, prompt) = (request.namespace.clone(), request.prompt.clone());
        let client = state.sessions.client(key.session);
        let trace_id = client.and_then(|client| client.trace_id.clone());
        let blocks = self.engine.block_exchange();
        let this = self.clone();
        self.spawn(async move {
            let list = blocks.list(&namespace, &prompt);
            let num_blocks = blocks.look_up(list).await.unwrap_or(0);
            let num_cached_here = num_blocks * blocks.page_size();
            let here = ComputeSite::of(&this.engine.stats().scheduler, num_cached_here);
            let cost = this.cost(node, num_prompt_tokens, num_cached_rows, here);
            let place = this.place(&cost);
            tracing::debug!(%key, %node, ?place, ?cost, "it is decided which node computes a prompt");
            this.decisions.count(place).fetch_add(1, Ordering::Relaxed);
            // Less than a block is not fetched.
            let has_more = num_cached_here + blocks.page_size() <= num_cached_rows;
            if place == ComputePlace::Here && has_more {
                let prefix = Prefix {
                    namespace: &namespace,
                    prompt: &prompt,
                    trace_id: trace_id.as_deref(),
                };
                this.fetch_from(node, prefix).await;
            }
            this.with(|end, now_us| end.handle_decision(key, place, now_us));
        });
    }

    /// Begins to fetch a prompt's blocks from the decode node, before the prompt is computed here.
    async fn fetch_from(&self, node: NodeId, prefix: Prefix<'_>) {
        let Some(fetcher) = &self.fetcher else {
            return;
        };
        let source = self.peers.kv_address(node);
        if let Some(source) = source.and_then(|source| source.reach(fetcher.machine())) {
            fetcher.begin(prefix, source).await;
        }
    }

    /// Predicts the decision before the decode node is asked. The prompt rows that this node has sent there are most
    /// likely still cached here.
    pub(super) fn predict(&self, holder: Holder, num_prompt_tokens: u32) -> ComputePlace {
        let here = ComputeSite::of(&self.engine.stats().scheduler, holder.num_rows);
        let cost = self.cost(holder.node, num_prompt_tokens, holder.num_rows, here);
        self.place(&cost)
    }

    /// The operator may have fixed the place.
    fn place(&self, cost: &ComputeCost) -> ComputePlace {
        (self.peers.compute_place()).unwrap_or_else(|| cost.place())
    }

    fn cost(
        &self,
        node: NodeId,
        num_prompt_tokens: u32,
        num_cached_rows: u32,
        here: ComputeSite,
    ) -> ComputeCost {
        let facts = self.peers.facts(node);
        let report = facts.and_then(|facts| facts.report).unwrap_or_default();
        // The lengths of the waiting requests are unknown: each counts as a prompt of this length.
        let num_queued_tokens = u64::from(report.num_waiting) * u64::from(num_prompt_tokens);
        let num_missing = num_cached_rows.saturating_sub(here.num_cached_rows);
        let fetcher = self.fetcher.as_ref();
        ComputeCost {
            num_prompt_tokens,
            here,
            there: ComputeSite {
                num_cached_rows,
                num_queued_tokens,
                prefill_us: report.prefill_us,
            },
            fetch_us: fetcher.map(|fetcher| fetcher.loader().predict_us(num_missing)),
            num_running_there: report.num_running,
            kv_bytes_per_token: self.kv_bytes_per_token,
            bandwidth: facts.and_then(|facts| facts.bandwidth),
        }
    }
}
