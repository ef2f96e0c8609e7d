//! Rows that a run of this node's engine makes for decode nodes, from the engine to the sender.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use corella_core::session::SessionKey;
use corella_core::{KvFact, PageId, RequestId, StepId};
use corella_engine::KvFacts;
use corella_model::{KvPages, LayerProgress};

use super::prefill_node::Node;
use crate::entrance::KeptPrompts;
use crate::transport::KvSender;

/// How long the thread waits for a layer before it looks whether the node is still there.
const LAYER_TIMEOUT: Duration = Duration::from_secs(1);

/// What is known of a run's rows, for readers that come later.
pub(super) struct Export {
    page_size: u32,
    pages: Vec<PageId>,
    /// For each layer, the rows from 0 on that may be read.
    num_readable: Vec<u32>,
    num_announced: u32,
    is_complete: bool,
    readers: Vec<SessionKey>,
}

impl Export {
    pub fn new(num_layers: usize, page_size: u32) -> Self {
        Self {
            page_size,
            pages: Vec::new(),
            num_readable: vec![0; num_layers],
            num_announced: 0,
            is_complete: false,
            readers: Vec::new(),
        }
    }

    /// Gives a new reader what is there.
    pub fn add_reader(&mut self, key: SessionKey, sender: &KvSender) {
        self.readers.push(key);
        sender.add_pages(&key, &self.pages);
        for (layer, &num_rows) in self.num_readable.iter().enumerate() {
            let layer = layer as u32;
            if num_rows > 0 {
                sender.handle_rows_readable(&key, layer..layer + 1, num_rows);
            }
        }
        if self.is_complete {
            sender.finish(&key);
        }
    }

    pub fn remove_reader(&mut self, key: SessionKey) {
        self.readers.retain(|&reader| reader != key);
    }

    fn announce(&mut self, first_row: u32, end_row: u32, pages: &[PageId], sender: &KvSender) {
        self.num_announced = end_row;
        // The first of them may be there already, with some of its rows.
        let num_known = self.pages.len() - (first_row / self.page_size) as usize;
        let new = &pages[num_known..];
        self.pages.extend(new);
        for key in &self.readers {
            sender.add_pages(key, new);
        }
    }

    fn handle_layer_done(&mut self, layer: u32, num_rows: u32, sender: &KvSender) {
        self.num_readable[layer as usize] = num_rows;
        for key in &self.readers {
            sender.handle_rows_readable(key, layer..layer + 1, num_rows);
        }
    }

    /// Handles the return of the steps that made the rows. Returns false if some of the rows that
    /// were announced are missing.
    pub fn end(&mut self, num_rows: u32, sender: &KvSender) -> bool {
        self.is_complete = num_rows > 0 && num_rows == self.num_announced;
        if self.is_complete {
            for key in &self.readers {
                sender.finish(key);
            }
        }
        self.is_complete
    }
}

/// The rows that one step exports. For each request, they end before the row given here.
#[derive(Default)]
struct StepExports {
    step: StepId,
    end_rows: BTreeMap<RequestId, u32>,
}

/// The engine's facts, except those about prompts that are kept without a session.
struct SessionFacts {
    facts: KvFacts,
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
        { self.kept.as_ref() }.is_some_and(|kept| kept.handle_fact(fact))
    }
}

/// Follows the engine's facts until the engine or the node ends.
pub(super) fn start_thread(node: &Arc<Node>, facts: KvFacts, kept: Option<Arc<KeptPrompts>>) {
    let facts = SessionFacts { facts, kept };
    let pages = node.pages.clone();
    let node = Arc::downgrade(node);
    let follow = move || {
        let mut next = facts.next_blocking();
        while let Some(fact) = next {
            let Some(present) = node.upgrade() else {
                return;
            };
            match fact {
                KvFact::Exported { step, .. } => {
                    // All of one step together: its layers are done one after the other.
                    let mut exports = StepExports {
                        step,
                        end_rows: BTreeMap::new(),
                    };
                    let mut fact = Some(fact);
                    while let Some(KvFact::Exported {
                        request,
                        step: of_step,
                        first_row,
                        end_row,
                        pages,
                    }) = &fact
                        && *of_step == step
                    {
                        present.with_export(*request, |export, sender| {
                            export.announce(*first_row, *end_row, pages, sender);
                        });
                        exports.end_rows.insert(*request, *end_row);
                        fact = facts.try_next();
                    }
                    drop(present);
                    follow_layers(&exports, &*pages, &node);
                    if let Some(fact) = fact {
                        next = Some(fact);
                        continue;
                    }
                }
                KvFact::Declined { request } => present.handle_declined(request),
                KvFact::ExportEnded { request, num_rows } => {
                    present.handle_export_ended(request, num_rows);
                }
                KvFact::LeaseEnded { request } => present.handle_lease_ended(request),
            }
            next = facts.next_blocking();
        }
    };
    let thread = std::thread::Builder::new().name("corella-export".to_owned());
    if let Err(error) = thread.spawn(follow) {
        tracing::error!(%error, "no thread to export KV rows; everything is decoded here");
    }
}

fn follow_layers(exports: &StepExports, pages: &dyn KvPages, node: &Weak<Node>) {
    for layer in 0..pages.geometry().num_layers {
        while pages.wait_layer(exports.step, layer, LAYER_TIMEOUT) == LayerProgress::TimedOut {
            if node.strong_count() == 0 {
                return;
            }
        }
        let Some(node) = node.upgrade() else {
            return;
        };
        for (&request, &end_row) in &exports.end_rows {
            node.with_export(request, |export, sender| {
                export.handle_layer_done(layer, end_row, sender);
            });
        }
    }
}
