//! Follows the rows that this node's engine computes for other nodes, step by step and layer by layer.

use std::sync::{Arc, Weak};
use std::time::Duration;

use corella_core::{KvFact, StepId};
use corella_engine::FeedReader;
use corella_model::{KvPages, LayerProgress};

use super::prefill_node::Node;
use crate::driver::Driver;
use crate::kv_connector::KeptPrompts;

/// The limit of the wait for a layer. After it, the thread checks that the node still exists.
const LAYER_TIMEOUT: Duration = Duration::from_secs(1);

/// The engine's facts, except facts about prompts that are kept without a session.
struct SessionFacts {
    facts: FeedReader<KvFact>,
    kept: Option<Arc<KeptPrompts>>,
}

impl SessionFacts {
    fn next_blocking(&self) -> Option<KvFact> {
        std::iter::from_fn(|| self.facts.next_blocking()).find(|fact| !self.is_kept(fact))
    }

    fn try_next(&self) -> Option<KvFact> {
        std::iter::from_fn(|| self.facts.try_next()).find(|fact| !self.is_kept(fact))
    }

    fn is_kept(&self, fact: &KvFact) -> bool {
        self.kept
            .as_ref()
            .is_some_and(|kept| kept.handle_fact(fact))
    }
}

/// Passes the engine's facts to the node until the engine or the node ends.
pub(super) fn start_thread(
    node: &Arc<Node>,
    facts: FeedReader<KvFact>,
    kept: Option<Arc<KeptPrompts>>,
) {
    let facts = SessionFacts { facts, kept };
    let pages = node.pages.clone();
    let node = Arc::downgrade(node);
    let follow = move || {
        let mut next = facts.next_blocking();
        while let Some(fact) = next {
            let Some(present) = node.upgrade() else {
                return;
            };
            present.with(|node, now_us| node.sessions().handle_kv_fact(&fact, now_us));
            drop(present);
            next = facts.try_next();
            // All requests of one step are handled together, because the layers of a step finish one after the other.
            let step = exporting_step(&fact);
            if let Some(step) = step
                && next.as_ref().and_then(exporting_step) != Some(step)
            {
                follow_layers(step, &*pages, &node);
            }
            next = next.or_else(|| facts.next_blocking());
        }
    };
    let thread = std::thread::Builder::new().name("corella-export".to_owned());
    if let Err(error) = thread.spawn(follow) {
        tracing::error!(%error, "no thread to export KV rows; everything is decoded here");
    }
}

fn exporting_step(fact: &KvFact) -> Option<StepId> {
    match fact {
        KvFact::Exported { step, .. } => Some(*step),
        KvFact::Declined { .. } | KvFact::ExportEnded { .. } | KvFact::LeaseEnded { .. } => None,
    }
}

fn follow_layers(step: StepId, pages: &dyn KvPages, node: &Weak<Node>) {
    for layer in 0..pages.geometry().num_layers {
        while pages.wait_layer(step, layer, LAYER_TIMEOUT) == LayerProgress::TimedOut {
            if node.strong_count() == 0 {
                return;
            }
        }
        let Some(node) = node.upgrade() else {
            return;
        };
        node.with(|node, _| node.sessions().handle_layer_done(step, layer));
    }
}
