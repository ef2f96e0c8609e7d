//! One session on its prefill node: the state of the decode node, of this node's engine, and of the client.

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, VecDeque};
use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::queue::output_length::OutputLengths;
use crate::session::export_book::ExportBook;
use crate::session::heartbeat::Heartbeat;
use crate::session::prefill_end::{ClientEvent, PrefillAction, SessionFinish, Submission};
use crate::session::{
    AbortReason, Finish, FirstToken, Hello, NodeIncarnation, SessionConfig, SessionKey, ToDecode,
    ToPrefill, Tokens,
};
use crate::{
    AdmissionError, CacheUse, ComputePlace, FinishReason, Incarnation, MissedObjective, NodeId,
    Request, Sample, SessionId, TokenId,
};

#[derive(Clone, Debug)]
pub(super) struct PrefillSession {
    pub(super) id: SessionId,
    pub(super) request: Request,
    pub(super) max_tokens: u32,
    pub(super) deadline_us: Option<u64>,
    pub(super) siblings: Option<SessionId>,
    pub(super) adapter: Option<u128>,
    pub(super) constraint: Option<Arc<str>>,
    pub(super) trace_id: Option<Arc<str>>,
    pub(super) asks_first: bool,
    pub(super) remote: Remote,
    pub(super) local: Local,
    pub(super) num_attempts: u32,
    pub(super) num_runs: u32,
    /// Nodes that are not asked again.
    pub(super) tried: Vec<NodeId>,
    /// The number of nodes asked in the current search, which ends at `allocate_by_us`.
    pub(super) num_asked: u32,
    pub(super) allocate_by_us: u64,
    /// Whether the prompt's rows can still be exported.
    pub(super) can_export: bool,
    /// The reason why the last decode node was lost, until another one draws a token.
    lost: Option<AbortReason>,
    /// Whether a decode node lacked the request's adapter, or could not apply its constraint. Then this node may serve
    /// the request, even without fallback.
    pub(super) was_unsuitable: bool,
    /// The objective that decode nodes would miss.
    pub(super) missed: Option<MissedObjective>,
    /// The tokens that the client has. `accounting` has the figures that are reported with them.
    pub(super) output: Vec<TokenId>,
    pub(super) accounting: Option<Accounting>,
    /// The token after the exported rows.
    pub(super) first_token: Option<Box<FirstToken>>,
    /// The number of tokens at the beginning of `output` whose rows are exported with the prompt's rows.
    pub(super) num_earlier_tokens: u32,
    has_ended: bool,
}

/// The decode node's part in the session.
#[derive(Clone, Debug)]
pub(super) enum Remote {
    Nothing,
    /// Placement chooses a decode node.
    Placing,
    Linked(Link),
}

/// The current attempt.
#[derive(Clone, Debug)]
pub(super) struct Link {
    pub(super) key: SessionKey,
    pub(super) node: NodeId,
    pub(super) heartbeat: Heartbeat,
    pub(super) has_answered: bool,
    pub(super) has_greeted: bool,
    /// The peer understands [`ToDecode::Compute`], and computes the same bits as this node.
    pub(super) may_compute: bool,
    /// The decode node has pages, and the computing node was chosen.
    pub(super) is_allocated: bool,
    pub(super) prompt_work: PromptWork,
    /// The decode node had not cached all rows when it reserved pages.
    pub(super) needs_rows: bool,
    /// The rows are exported.
    pub(super) is_exported: bool,
    pub(super) has_first_token: bool,
    pub(super) has_loaded: bool,
}

impl Link {
    /// The decode node may send tokens.
    fn is_decoding(&self) -> bool {
        self.has_first_token || self.prompt_work == PromptWork::There
    }

    pub(super) fn is_undecided(&self) -> bool {
        matches!(self.prompt_work, PromptWork::Undecided { .. })
    }
}

/// The node that computes the prompt of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PromptWork {
    Here,
    /// The driver decides.
    Undecided {
        num_cached_rows: u32,
    },
    There,
}

/// This engine's part in the session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Local {
    Nothing,
    /// Computes the prompt and one token.
    Prefilling {
        run: u32,
    },
    /// The prompt is computed, and its pages are held.
    Held {
        run: u32,
        until_us: u64,
    },
    /// Computes the rest of the request.
    Running {
        run: u32,
    },
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Accounting {
    pub cache_use: CacheUse,
    pub queue_us: u64,
}

/// The parts of the prefill node that a session uses.
pub(super) struct Context<'a> {
    pub config: &'a SessionConfig,
    pub hello: &'a Hello,
    pub exports: &'a mut ExportBook,
    pub actions: &'a mut VecDeque<PrefillAction>,
    pub fallbacks: &'a mut BTreeMap<&'static str, u64>,
    pub lengths: &'a mut OutputLengths,
    pub now_us: u64,
}

impl Context<'_> {
    pub fn act(&mut self, action: PrefillAction) {
        self.actions.push_back(action);
    }

    /// Changes the export book, and passes its tasks to the driver.
    pub fn export(&mut self, change: impl FnOnce(&mut ExportBook)) {
        change(self.exports);
        while let Some(task) = self.exports.poll_task() {
            self.act(PrefillAction::Export(task));
        }
    }

    pub fn submit_locally(
        &mut self,
        session: SessionId,
        run: u32,
        is_accepted: bool,
        request: Request,
    ) {
        let num_rows = (request.prompt.len() + request.output.len()) as u32;
        self.exports
            .begin(session, run, num_rows, request.exports_kv);
        self.act(PrefillAction::SubmitLocally {
            session,
            run,
            is_accepted,
            request: Box::new(request),
        });
    }

    pub fn abort_locally(&mut self, session: SessionId, run: u32) {
        let request = self.exports.abort(session, run);
        if let Some(request) = request {
            self.act(PrefillAction::AbortLocal { session, request });
        }
    }

    /// Releases the pages of a run. They become free when nothing reads them any more.
    pub fn release(&mut self, session: SessionId, run: u32) {
        self.export(|exports| exports.release(session, run));
    }
}

impl PrefillSession {
    pub fn new(submission: Submission) -> Self {
        Self {
            id: submission.session,
            request: submission.request,
            max_tokens: submission.max_tokens,
            deadline_us: submission.deadline_us,
            siblings: submission.siblings,
            adapter: submission.adapter,
            constraint: submission.constraint,
            trace_id: submission.trace_id,
            asks_first: submission.asks_first,
            remote: Remote::Nothing,
            local: Local::Nothing,
            num_attempts: 0,
            num_runs: 0,
            tried: Vec::new(),
            num_asked: 0,
            allocate_by_us: 0,
            can_export: true,
            lost: None,
            was_unsuitable: false,
            missed: None,
            output: Vec::new(),
            accounting: None,
            first_token: None,
            num_earlier_tokens: 0,
            has_ended: false,
        }
    }

    pub fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// Returns the session's run in this node's engine, if there is one.
    pub fn present_run(&self) -> Option<u32> {
        match self.local {
            Local::Nothing => None,
            Local::Prefilling { run } | Local::Held { run, .. } | Local::Running { run } => {
                Some(run)
            }
        }
    }

    /// Returns the decode node and the key of the current attempt.
    pub fn peer(&self) -> Option<(NodeId, SessionKey)> {
        self.link().map(|link| (link.node, link.key))
    }

    pub fn deadline_us(&self, config: &SessionConfig) -> Option<u64> {
        let link = self.link();
        let hold = match self.local {
            Local::Held { until_us, .. } => Some(until_us),
            _ => None,
        };
        let deadlines = [
            self.deadline_us,
            self.is_allocating().then_some(self.allocate_by_us),
            link.map(|link| link.heartbeat.due_us(config)),
            link.map(|link| link.heartbeat.lost_us(config)),
            hold,
        ];
        deadlines.into_iter().flatten().min()
    }

    pub fn begin(&mut self, peer: Option<NodeIncarnation>, context: &mut Context<'_>) {
        self.begin_search(context);
        match peer {
            Some(peer) => self.open(peer, context),
            None => self.run_locally(context),
        }
    }

    /// Handles a message. Returns the decode node if the message shows that it has restarted.
    pub fn handle_message(
        &mut self,
        key: SessionKey,
        message: ToPrefill,
        context: &mut Context<'_>,
    ) -> Option<(NodeId, Incarnation)> {
        // Messages of an ended attempt are ignored.
        let link = self.link_of(key)?;
        let node = link.node;
        link.heartbeat.heard_us = context.now_us;
        link.has_answered = true;
        match message {
            ToPrefill::Heartbeat => {}
            ToPrefill::Hello(hello) => return self.handle_hello(&hello, context),
            ToPrefill::Allocated(allocated) => self.handle_allocated(allocated, context),
            ToPrefill::Refused(refusal) => self.handle_refused(refusal, context),
            ToPrefill::LoadDone => self.handle_load_done(context),
            ToPrefill::Tokens(tokens) => self.handle_tokens(tokens, context),
            ToPrefill::Finish(finish) => self.handle_finish(finish, context),
            ToPrefill::Abort(reason) => {
                if reason == AbortReason::PeerLost {
                    context.act(PrefillAction::MarkSuspect { node });
                }
                self.lose(reason, None, context);
            }
        }
        None
    }

    pub fn handle_stream_closed(&mut self, key: SessionKey, context: &mut Context<'_>) {
        let Some(link) = self.link_of(key) else {
            return;
        };
        let node = link.node;
        context.act(PrefillAction::MarkSuspect { node });
        self.lose(AbortReason::PeerLost, None, context);
    }

    /// Handles the loss of the peer, which the driver or another session has noticed.
    pub fn handle_peer_lost(&mut self, key: SessionKey, context: &mut Context<'_>) {
        if self.link_of(key).is_some() {
            self.lose(AbortReason::PeerLost, None, context);
        }
    }

    pub fn handle_load_failed(&mut self, key: SessionKey, context: &mut Context<'_>) {
        let is_needed = self
            .link_of(key)
            .is_some_and(|link| link.is_exported && !link.has_loaded);
        if is_needed {
            let reason = AbortReason::LoadFailed;
            self.lose(reason.clone(), Some(reason), context);
        }
    }

    pub fn handle_timeout(&mut self, context: &mut Context<'_>) {
        let (config, now_us) = (context.config, context.now_us);
        let is_due = |deadline_us: u64| deadline_us <= now_us;
        if self.deadline_us.is_some_and(is_due) {
            let (finish, reason) = (SessionFinish::DeadlinePassed, AbortReason::DeadlinePassed);
            return self.end(None, finish, reason, context);
        }
        let is_search_over = self.is_allocating() && is_due(self.allocate_by_us);
        if let Local::Held { until_us, .. } = self.local
            && is_due(until_us)
        {
            return self.lose_hold(context);
        }
        match &mut self.remote {
            Remote::Nothing => {}
            Remote::Placing if is_search_over => {
                self.go_on_locally(AbortReason::AllocateTimedOut, context);
            }
            Remote::Placing => {}
            Remote::Linked(link) => {
                let node = link.node;
                let is_silent = is_due(link.heartbeat.lost_us(config));
                if is_silent || (is_search_over && !link.has_answered) {
                    context.act(PrefillAction::MarkSuspect { node });
                }
                if is_silent {
                    let reason = AbortReason::PeerLost;
                    self.lose(reason.clone(), Some(reason), context);
                } else if is_search_over && link.is_undecided() {
                    let key = link.key;
                    self.handle_decision(key, ComputePlace::Here, context);
                } else if is_search_over {
                    let reason = AbortReason::AllocateTimedOut;
                    self.lose(reason.clone(), Some(reason), context);
                } else if is_due(link.heartbeat.due_us(config)) {
                    self.send(ToDecode::Heartbeat, context);
                }
            }
        }
    }

    /// Ends the session: the client gets its last event, and both nodes free everything.
    pub fn end(
        &mut self,
        sample: Option<Sample>,
        finish: SessionFinish,
        reason: AbortReason,
        context: &mut Context<'_>,
    ) {
        self.emit(sample, Some(finish), context);
        self.unlink(Some(reason), context);
        let session = self.id;
        match core::mem::replace(&mut self.local, Local::Nothing) {
            Local::Nothing => {}
            Local::Prefilling { run } => {
                context.abort_locally(session, run);
                // The run may already have drawn its token, and then its pages are held.
                context.release(session, run);
            }
            Local::Held { run, .. } => {
                context.release(session, run);
            }
            Local::Running { run } => context.abort_locally(session, run),
        }
        self.has_ended = true;
    }

    /// # Panics
    /// When the bookkeeping contradicts itself.
    pub fn check_invariants(&self, config: &SessionConfig) {
        let id = self.id;
        assert!(!self.has_ended, "session {id} has ended and is kept");
        assert!(
            !matches!(self.remote, Remote::Nothing) || self.local != Local::Nothing,
            "no node works on session {id}"
        );
        assert!(
            !matches!(
                (&self.remote, self.local),
                (Remote::Nothing, Local::Held { .. })
            ),
            "session {id} holds pages for no node"
        );
        assert!(
            matches!(self.remote, Remote::Nothing) || !matches!(self.local, Local::Running { .. }),
            "session {id} runs on two nodes"
        );
        let is_left_to_peer = self
            .link()
            .is_some_and(|link| link.prompt_work != PromptWork::Here);
        assert!(
            !is_left_to_peer || self.local == Local::Nothing,
            "session {id} may have its prompt computed on two nodes"
        );
        assert!(
            self.tried.len() <= 2 * config.max_asked_peers as usize,
            "session {id} has asked too many nodes"
        );
    }

    pub(super) fn handle_load_done(&mut self, context: &mut Context<'_>) {
        let Remote::Linked(link) = &mut self.remote else {
            return;
        };
        // The decode node may report this before the engine reports the last rows, because the transport reads rows as
        // soon as they are computed.
        if link.is_undecided() {
            link.has_loaded = true;
            return;
        }
        if !link.is_allocated {
            let reason = AbortReason::ProtocolViolated;
            return self.lose(reason.clone(), Some(reason), context);
        }
        link.has_loaded = true;
        if core::mem::take(&mut link.is_exported) {
            let key = link.key;
            context.export(|exports| exports.delete(key));
        }
        self.release_loaded(context);
    }

    fn handle_tokens(&mut self, tokens: Tokens, context: &mut Context<'_>) {
        let num_known = self.output.len() as u32;
        let num_repeated = num_known.checked_sub(tokens.first_position);
        let num_tokens = tokens.samples.len() as u64;
        let has_room = u64::from(tokens.first_position) + num_tokens <= u64::from(self.max_tokens);
        let is_decoding = self.link().is_some_and(Link::is_decoding);
        let Some(num_repeated) = num_repeated.filter(|_| is_decoding && has_room) else {
            let reason = AbortReason::ProtocolViolated;
            return self.lose(reason.clone(), Some(reason), context);
        };
        for sample in tokens.samples.into_iter().skip(num_repeated as usize) {
            // The last token and the end are one event, so that the client does not take an end token for text. Later
            // messages of the decode node are ignored.
            if let Some(reason) = self.finish_reason(sample.token) {
                self.unlink(None, context);
                let finish = SessionFinish::Finished(reason);
                return self.end(Some(sample), finish, AbortReason::Finished, context);
            }
            self.lost = None;
            self.emit(Some(sample), None, context);
        }
    }

    /// Returns the reason if the request ends with this token.
    fn finish_reason(&self, newest: TokenId) -> Option<FinishReason> {
        let num_output_tokens = self.output.len() as u32 + 1;
        let stopping = &self.request.stopping;
        stopping.finish_reason(newest, num_output_tokens, self.max_tokens)
    }

    fn handle_finish(&mut self, finish: Finish, context: &mut Context<'_>) {
        let is_decoding = self.link().is_some_and(Link::is_decoding);
        if !is_decoding || finish.num_output_tokens as usize != self.output.len() {
            let reason = AbortReason::ProtocolViolated;
            return self.lose(reason.clone(), Some(reason), context);
        }
        // The decode node has freed everything, so it gets no message.
        self.unlink(None, context);
        let finish = SessionFinish::Finished(finish.reason);
        self.end(None, finish, AbortReason::Finished, context);
    }

    /// Sends the first token to the decode node once the prompt is computed. This commits the rows: the decode node may
    /// now use them.
    pub(super) fn tell_first_token(&mut self, context: &mut Context<'_>) {
        let Remote::Linked(link) = &mut self.remote else {
            return;
        };
        let is_ready = link.is_allocated && !link.has_first_token;
        if !is_ready || !matches!(self.local, Local::Held { .. }) {
            return;
        }
        // If this decode node is lost before it has the rows, the next one gets the first token again.
        if let Some(first_token) = self.first_token.clone() {
            link.has_first_token = true;
            self.send(ToDecode::FirstToken(first_token), context);
        }
    }

    /// Ends the attempt, and continues the request.
    pub(super) fn lose(
        &mut self,
        reason: AbortReason,
        told: Option<AbortReason>,
        context: &mut Context<'_>,
    ) {
        let was_allocated = self.link().is_some_and(|link| link.is_allocated);
        self.unlink(told, context);
        if self.output.is_empty() {
            // Another node will compute the prompt.
            self.accounting = None;
        }
        if !was_allocated {
            return self.ask_next(reason, context);
        }
        if self.lost.is_some() {
            return self.go_on_locally(reason, context);
        }
        self.lost = Some(reason.clone());
        if self.local == Local::Nothing {
            // The next decode node gets the rows of all tokens that the client has.
            self.num_earlier_tokens = self.output.len() as u32;
            self.first_token = None;
            self.can_export = true;
        }
        self.begin_search(context);
        self.ask_next(reason, context);
    }

    /// Returns the number of rows that decode nodes get.
    pub(super) fn num_rows(&self) -> u32 {
        self.request.prompt.len() as u32 + self.num_earlier_tokens
    }

    /// Ends the attempt. If `told` is a reason, sends it to the decode node.
    pub(super) fn unlink(&mut self, told: Option<AbortReason>, context: &mut Context<'_>) {
        let Remote::Linked(link) = core::mem::replace(&mut self.remote, Remote::Nothing) else {
            return;
        };
        let key = link.key;
        if let Some(reason) = told {
            let message = ToDecode::Abort(reason);
            context.act(PrefillAction::Send { key, message });
        }
        context.act(PrefillAction::CloseStream { key });
        if link.is_exported {
            context.export(|exports| exports.delete(key));
        }
    }

    /// Computes the rest of the request here, if the configuration allows it, because no decode node is left.
    pub(super) fn go_on_locally(&mut self, reason: AbortReason, context: &mut Context<'_>) {
        self.remote = Remote::Nothing;
        let reason = self.lost.take().unwrap_or(reason);
        let stays = context.config.falls_back || self.was_unsuitable;
        if self.output.is_empty() && !stays {
            let error = self.missed.map_or(
                AdmissionError::NoDecodeNode,
                AdmissionError::ObjectiveMissed,
            );
            let finish = SessionFinish::Refused(error);
            return self.end(None, finish, reason, context);
        }
        let is_prefilling = matches!(self.local, Local::Prefilling { .. });
        if !self.output.is_empty() && !context.config.resumes_locally {
            let finish = SessionFinish::DecodeLost(reason.clone());
            return self.end(None, finish, reason, context);
        }
        *context.fallbacks.entry(reason.label()).or_default() += 1;
        if !is_prefilling {
            self.run_locally(context);
        }
    }

    pub(super) fn emit(
        &mut self,
        sample: Option<Sample>,
        finish: Option<SessionFinish>,
        context: &mut Context<'_>,
    ) {
        let Request {
            namespace,
            stopping,
            ..
        } = &self.request;
        if let Some(sample) = &sample {
            self.output.push(sample.token);
            if !stopping.is_length_known() {
                let num_tokens = self.output.len() as u32;
                context.lengths.note_grown(namespace, num_tokens);
            }
        }
        if let Some(SessionFinish::Finished(reason)) = &finish {
            let num_tokens = self.output.len() as u32;
            let lengths = &mut context.lengths;
            lengths.note_finished(namespace, stopping, num_tokens, reason);
        }
        let accounting = self.accounting;
        let event = ClientEvent {
            sample,
            finish,
            num_prompt_tokens: self.request.prompt.len() as u32,
            cache_use: accounting.map_or_else(CacheUse::default, |known| known.cache_use),
            num_output_tokens: self.output.len() as u32,
            queue_us: accounting.map_or(0, |known| known.queue_us),
        };
        let session = self.id;
        context.act(PrefillAction::Emit { session, event });
    }

    pub(super) fn send(&mut self, message: ToDecode, context: &mut Context<'_>) {
        if let Remote::Linked(link) = &mut self.remote {
            link.heartbeat.sent_us = context.now_us;
            let key = link.key;
            context.act(PrefillAction::Send { key, message });
        }
    }

    pub(super) fn link(&self) -> Option<&Link> {
        match &self.remote {
            Remote::Linked(link) => Some(link),
            Remote::Nothing | Remote::Placing => None,
        }
    }

    pub(super) fn link_of(&mut self, key: SessionKey) -> Option<&mut Link> {
        match &mut self.remote {
            Remote::Linked(link) if link.key == key => Some(link),
            _ => None,
        }
    }
}
