//! The search for a decode node: a session asks one node after another, within a limit of nodes and of time.

use alloc::boxed::Box;

use crate::session::heartbeat::Heartbeat;
use crate::session::message::Mismatch;
use crate::session::prefill_end::PrefillAction;
use crate::session::prefill_session::{Context, Link, PrefillSession, PromptWork, Remote};
use crate::session::{
    AbortReason, Allocate, Allocated, Hello, NodeIncarnation, Refusal, SessionKey, ToDecode,
};
use crate::{Incarnation, Namespace, NodeId};

impl PrefillSession {
    pub(super) fn begin_search(&mut self, context: &Context<'_>) {
        self.num_asked = 0;
        let budget_us = context.config.allocate_budget_us;
        self.allocate_by_us = context.now_us.saturating_add(budget_us);
    }

    pub(super) fn open(&mut self, peer: NodeIncarnation, context: &mut Context<'_>) {
        let key = SessionKey {
            session: self.id,
            attempt: self.num_attempts,
            prefill_incarnation: context.hello.incarnation,
            decode_incarnation: peer.incarnation,
        };
        self.num_attempts += 1;
        self.num_asked += 1;
        self.tried.push(peer.node);
        self.remote = Remote::Linked(Link {
            key,
            node: peer.node,
            heartbeat: Heartbeat::new(context.now_us),
            has_answered: false,
            has_greeted: false,
            may_compute: false,
            is_allocated: false,
            prompt_work: PromptWork::Here,
            needs_rows: true,
            is_exported: false,
            has_first_token: false,
            has_loaded: false,
        });
        let node = peer.node;
        context.act(PrefillAction::OpenStream { key, node });
        let hello = Box::new(context.hello.clone());
        self.send(ToDecode::Hello(hello), context);
        // Nodes of earlier versions would take the rows of output tokens for rows of the prompt.
        if self.num_earlier_tokens == 0 {
            self.allocate(context);
        }
    }

    /// Asks the current decode node for pages.
    fn allocate(&mut self, context: &mut Context<'_>) {
        let num_earlier_tokens = self.num_earlier_tokens as usize;
        let remaining_us = self
            .deadline_us
            .map(|deadline_us| deadline_us.saturating_sub(context.now_us));
        let allocate = Allocate {
            prompt: self.request.prompt.clone(),
            output: self.output[..num_earlier_tokens].to_vec(),
            sampling: self.request.sampling.clone(),
            stopping: self.stopping(),
            priority: self.request.priority,
            // Each node has names of its own for adapters.
            namespace: Namespace {
                lora: None,
                ..self.request.namespace.clone()
            },
            remaining_us,
            max_tpot_us: self.request.objectives.tpot_us,
            // With earlier tokens, the choices differ in their rows after the prompt.
            siblings: self.siblings.filter(|_| num_earlier_tokens == 0),
            adapter: self.adapter,
            constraint: self.constraint.clone(),
            trace_id: self.trace_id.clone(),
        };
        self.send(ToDecode::Allocate(Box::new(allocate)), context);
    }

    pub(super) fn handle_placement(
        &mut self,
        peer: Option<NodeIncarnation>,
        context: &mut Context<'_>,
    ) {
        if !matches!(self.remote, Remote::Placing) {
            return;
        }
        match peer {
            Some(peer) => self.open(peer, context),
            None => self.go_on_locally(AbortReason::AllocateTimedOut, context),
        }
    }

    pub(super) fn handle_hello(
        &mut self,
        hello: &Hello,
        context: &mut Context<'_>,
    ) -> Option<(NodeId, Incarnation)> {
        let Remote::Linked(link) = &mut self.remote else {
            return None;
        };
        let node = link.node;
        if hello.incarnation != link.key.decode_incarnation {
            // Another incarnation of the node has answered. A later one means that the node has restarted: the driver's
            // table is out of date, and all sessions with the earlier incarnation are lost.
            if hello.incarnation < link.key.decode_incarnation {
                self.be_refused(Some(AbortReason::ProtocolViolated), context);
                return None;
            }
            return Some((node, hello.incarnation));
        }
        match context.hello.check(hello) {
            Ok(()) if core::mem::replace(&mut link.has_greeted, true) => {}
            Ok(()) => {
                link.may_compute = hello.knows_compute() && hello.computes_like(context.hello);
                match (self.num_earlier_tokens, hello.knows_output()) {
                    (0, _) => {}
                    (_, true) => self.allocate(context),
                    (_, false) => self.be_refused(Some(AbortReason::Cancelled), context),
                }
            }
            Err(mismatch) => self.be_refused_as_incompatible(node, mismatch, context),
        }
        None
    }

    pub(super) fn handle_allocated(&mut self, allocated: Allocated, context: &mut Context<'_>) {
        let num_rows = self.num_rows();
        let Remote::Linked(link) = &mut self.remote else {
            return;
        };
        if link.is_allocated || link.is_undecided() {
            return;
        }
        if !link.has_greeted || allocated.num_cached_rows > num_rows {
            let reason = AbortReason::ProtocolViolated;
            return self.lose(reason.clone(), Some(reason), context);
        }
        let num_cached_rows = allocated.num_cached_rows;
        let asks = self.asks_first
            && link.key.attempt == 0
            && link.may_compute
            // A choice that waits for its sibling's rows has no pages yet.
            && allocated.granted_as.is_some();
        match asks {
            true => self.ask(num_cached_rows, context),
            false => self.compute_here(num_cached_rows, context),
        }
    }

    pub(super) fn handle_refused(&mut self, refusal: Refusal, context: &mut Context<'_>) {
        let Remote::Linked(link) = &self.remote else {
            return;
        };
        if link.is_allocated || link.is_undecided() {
            let reason = AbortReason::ProtocolViolated;
            return self.lose(reason.clone(), Some(reason), context);
        }
        let node = link.node;
        match refusal {
            Refusal::Incompatible(mismatch) => {
                self.be_refused_as_incompatible(node, mismatch.seen_from_other(), context);
            }
            Refusal::Unsuitable => {
                self.was_unsuitable = true;
                self.be_refused(None, context);
            }
            Refusal::TooSlow(missed) => {
                self.missed = Some(missed);
                self.be_refused(None, context);
            }
            Refusal::Exhausted
            | Refusal::Never
            | Refusal::StaleIncarnation
            | Refusal::Ended
            | Refusal::Draining => self.be_refused(None, context),
        }
    }

    fn be_refused_as_incompatible(
        &mut self,
        node: NodeId,
        mismatch: Mismatch,
        context: &mut Context<'_>,
    ) {
        context.act(PrefillAction::MarkIncompatible { node, mismatch });
        self.be_refused(Some(AbortReason::Cancelled), context);
    }

    /// Handles a refusal. Another decode node may take the request.
    fn be_refused(&mut self, told: Option<AbortReason>, context: &mut Context<'_>) {
        self.unlink(told, context);
        self.ask_next(AbortReason::AllocateTimedOut, context);
    }

    pub(super) fn ask_next(&mut self, reason: AbortReason, context: &mut Context<'_>) {
        let has_budget = context.now_us < self.allocate_by_us
            && self.tried.len() < 2 * context.config.max_asked_peers as usize;
        if !has_budget || !self.can_export || self.num_asked >= context.config.max_asked_peers {
            return self.go_on_locally(reason, context);
        }
        self.remote = Remote::Placing;
        context.act(PrefillAction::TryNext {
            session: self.id,
            tried: self.tried.clone(),
        });
    }

    pub(super) fn is_allocating(&self) -> bool {
        match &self.remote {
            Remote::Nothing => false,
            Remote::Placing => true,
            Remote::Linked(link) => !link.is_allocated,
        }
    }
}
