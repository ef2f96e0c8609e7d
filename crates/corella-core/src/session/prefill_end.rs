//! All sessions of a prefill node, which the client talks to.

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, VecDeque};
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;

use crate::queue::output_length::OutputLengths;
use crate::request_state::quantile_of;
use crate::session::deadline_queue::DeadlineQueue;
use crate::session::export_book::{ExportBook, ExportFault, ExportTask};
use crate::session::message::Mismatch;
use crate::session::prefill_session::{Context, PrefillSession};
use crate::session::tombstone::Tombstones;
use crate::session::{
    AbortReason, Hello, NodeIncarnation, SessionConfig, SessionConfigError, SessionKey, ToDecode,
    ToPrefill,
};
use crate::{
    AdmissionError, CacheUse, ComputePlace, FinishReason, Incarnation, KvFact, Namespace, NodeId,
    Request, RequestError, RequestId, RequestOutput, Sample, SessionId, StepId, StoppingCriteria,
};

/// Accepts requests of clients, and finishes each exactly once, with or without a decode node.
///
/// * Commands: [`submit`](Self::submit), [`cancel`](Self::cancel)
/// * Facts: `handle_*`, each with the time
/// * Actions: [`poll_action`](Self::poll_action), after every call until it returns `None`
/// * Time: [`poll_timeout`](Self::poll_timeout) says when [`handle_timeout`](Self::handle_timeout)
///   must be called; earlier calls do no harm
///
/// A session finds a decode node, computes the prompt for it, and passes its tokens to the client. A decode node that
/// has most of the prompt may compute the rest. If a decode node refuses, or fails before it has reserved pages, the
/// same search goes on with another node. If the decode node fails later, the session searches once more: the next
/// decode node gets the rows of the prompt and of all tokens that the client has. Once that node has drawn a token, the
/// session may search again. Otherwise the request continues here, unless `resumes_locally` is off.
#[derive(Clone, Debug)]
pub struct PrefillEnd {
    config: SessionConfig,
    hello: Hello,
    sessions: BTreeMap<SessionId, PrefillSession>,
    ended: Tombstones<SessionId>,
    /// Timers, each at or before its session's deadline. Every message postpones the deadline, and a timer is moved
    /// only when it expires.
    timers: DeadlineQueue<SessionId>,
    exports: ExportBook,
    actions: VecDeque<PrefillAction>,
    fallbacks: BTreeMap<&'static str, u64>,
    /// The lengths of all outputs, decoded here or elsewhere.
    lengths: OutputLengths,
    now_us: u64,
}

/// A request that may be served with a decode node.
#[derive(Clone, Debug)]
pub struct Submission {
    pub session: SessionId,
    /// The request. Its id is unused, because the driver gives each run an id.
    pub request: Request,
    /// The largest number of output tokens that the request's own limit and this node allow.
    pub max_tokens: u32,
    pub deadline_us: Option<u64>,
    /// The session of the first choice, if the prompt has several choices.
    pub siblings: Option<SessionId>,
    /// The fingerprint of the request's adapter.
    pub adapter: Option<u128>,
    /// The source of the answer's constraint.
    pub constraint: Option<Arc<str>>,
    /// The request's name in the logs of both nodes.
    pub trace_id: Option<Arc<str>>,
    /// Whether the first decode node may compute the prompt. If so, [`PrefillAction::Decide`] comes before this node
    /// computes anything.
    pub asks_first: bool,
}

/// A task for the driver. Tasks are carried out in order.
#[derive(Clone, Debug, PartialEq)]
pub enum PrefillAction {
    /// Asks placement for a decode node that is not in `tried`. The driver answers by [`PrefillEnd::handle_placement`].
    TryNext {
        session: SessionId,
        tried: Vec<NodeId>,
    },
    /// Opens the attempt's stream. Messages wait until the stream is open.
    OpenStream {
        key: SessionKey,
        node: NodeId,
    },
    Send {
        key: SessionKey,
        message: ToDecode,
    },
    /// Closes the stream once all messages have been sent. Messages that still arrive on it are ignored.
    CloseStream {
        key: SessionKey,
    },
    /// Asks which node computes the prompt. The decode node has pages for the prompt, and has cached its first
    /// `num_cached_rows` rows. The driver answers by [`PrefillEnd::handle_decision`]. Without an answer within the
    /// search time, the prompt is computed here.
    Decide {
        key: SessionKey,
        node: NodeId,
        num_cached_rows: u32,
    },
    /// Submits a run to this node's engine. Before the next action, the driver answers by
    /// [`PrefillEnd::handle_submitted`] or [`PrefillEnd::handle_local_refused`]; outputs come by
    /// [`PrefillEnd::handle_local_output`]. A run for a decode node has `exports_kv` set, and draws one token. Limits
    /// of the queue do not apply to a session that was accepted before.
    SubmitLocally {
        session: SessionId,
        run: u32,
        is_accepted: bool,
        request: Box<Request>,
    },
    /// Aborts a run, whose outputs are ignored from now on.
    AbortLocal {
        session: SessionId,
        request: RequestId,
    },
    /// Changes an export. The driver calls [`PrefillEnd::handle_load_failed`] if an export cannot be made, and
    /// [`PrefillEnd::handle_deleted`] when an export was deleted.
    Export(ExportTask),
    Emit {
        session: SessionId,
        event: ClientEvent,
    },
    /// Asks for a probe of a node that does not answer, before any session asks the node again.
    MarkSuspect {
        node: NodeId,
    },
    /// The node has restarted, as its own message shows.
    MarkRestarted {
        node: NodeId,
        incarnation: Incarnation,
    },
    /// The node is healthy, but cannot work with this node.
    MarkIncompatible {
        node: NodeId,
        mismatch: Mismatch,
    },
}

/// One event for the client. Only the last event has `finish` set.
#[derive(Clone, Debug, PartialEq)]
pub struct ClientEvent {
    /// `None` only in a last event without a token.
    pub sample: Option<Sample>,
    pub finish: Option<SessionFinish>,
    pub num_prompt_tokens: u32,
    /// On the computing node.
    pub cache_use: CacheUse,
    /// The number of tokens so far, including this event's.
    pub num_output_tokens: u32,
    /// The time from arrival to the first step.
    pub queue_us: u64,
}

/// The end of a session for its client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SessionFinish {
    /// The request has finished, on either node.
    Finished(FinishReason),
    /// This node's engine has no room for the request, or no decode node has room and this node does not fall back.
    Refused(AdmissionError),
    DeadlinePassed,
    /// The decode node was lost, and the request must not continue here.
    DecodeLost(AbortReason),
}

/// The reason why a submission was refused. Refusals leave no trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SubmissionError {
    TooManySessions {
        limit: u32,
    },
    DuplicateSession,
    /// No node serves the request.
    Refused(AdmissionError),
    /// The session was cancelled before its submission, or has ended.
    Ended,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefillEndStats {
    pub num_sessions: usize,
    pub num_tombstones: usize,
    pub num_timers: usize,
    /// Runs with exported pages.
    pub num_exports: usize,
}

impl PrefillEnd {
    /// `hello` describes this node to others.
    pub fn new(config: SessionConfig, hello: Hello) -> Result<Self, SessionConfigError> {
        config.validate()?;
        Ok(Self {
            sessions: BTreeMap::new(),
            ended: Tombstones::new(config.tombstone_us, config.max_tombstones as usize),
            timers: DeadlineQueue::new(),
            exports: ExportBook::new(hello.page_size, hello.kv_shape.num_layers),
            actions: VecDeque::new(),
            fallbacks: BTreeMap::new(),
            lengths: OutputLengths::new(),
            now_us: 0,
            config,
            hello,
        })
    }

    /// Begins a session, with the decode node that placement has chosen or without one.
    pub fn submit(
        &mut self,
        submission: Submission,
        peer: Option<NodeIncarnation>,
        now_us: u64,
    ) -> Result<(), SubmissionError> {
        self.note_time(now_us);
        let id = submission.session;
        if self.ended.contains(id) {
            return Err(SubmissionError::Ended);
        }
        if self.sessions.contains_key(&id) {
            return Err(SubmissionError::DuplicateSession);
        }
        let limit = self.config.max_sessions;
        let num_exports = self.exports.num_exports();
        if self.sessions.len().max(num_exports) >= limit as usize {
            return Err(SubmissionError::TooManySessions { limit });
        }
        self.sessions.insert(id, PrefillSession::new(submission));
        self.with(id, |session, context| session.begin(peer, context));
        Ok(())
    }

    /// Ends a session for its client. A later submission of the session will be refused. Returns false if no such
    /// session is open.
    pub fn cancel(&mut self, id: SessionId, now_us: u64) -> bool {
        self.note_time(now_us);
        let is_known = self.with(id, |session, context| {
            let finish = SessionFinish::Finished(FinishReason::Aborted);
            session.end(None, finish, AbortReason::Cancelled, context);
        });
        self.ended.insert(id, (), self.now_us);
        is_known
    }

    /// Handles the answer to [`PrefillAction::TryNext`]: `None` if no decode node is left.
    pub fn handle_placement(&mut self, id: SessionId, peer: Option<NodeIncarnation>, now_us: u64) {
        self.note_time(now_us);
        self.with(id, |session, context| {
            session.handle_placement(peer, context);
        });
    }

    pub fn handle_message(&mut self, key: SessionKey, message: ToPrefill, now_us: u64) {
        self.note_time(now_us);
        let mut restarted = None;
        self.with(key.session, |session, context| {
            restarted = session.handle_message(key, message, context);
        });
        if let Some((node, incarnation)) = restarted {
            self.actions
                .push_back(PrefillAction::MarkRestarted { node, incarnation });
            self.handle_incarnation(node, incarnation, now_us);
        }
    }

    /// Handles the answer to [`PrefillAction::Decide`].
    pub fn handle_decision(&mut self, key: SessionKey, place: ComputePlace, now_us: u64) {
        self.note_time(now_us);
        self.with(key.session, |session, context| {
            session.handle_decision(key, place, context);
        });
    }

    /// Handles that the attempt's stream has closed or could not be opened.
    pub fn handle_stream_closed(&mut self, key: SessionKey, now_us: u64) {
        self.note_time(now_us);
        self.with(key.session, |session, context| {
            session.handle_stream_closed(key, context);
        });
    }

    /// Handles that all streams to a node have closed.
    pub fn handle_peer_lost(&mut self, node: NodeId, now_us: u64) {
        self.handle_lost_keys(now_us, |peer, _| peer == node);
    }

    /// Ends the sessions with earlier incarnations of a node that has restarted.
    fn handle_incarnation(&mut self, node: NodeId, incarnation: Incarnation, now_us: u64) {
        self.handle_lost_keys(now_us, |peer, key| {
            peer == node && key.decode_incarnation < incarnation
        });
    }

    /// Handles that the decode node has asked for the attempt's rows, or has got some of them.
    pub fn handle_load_progress(&mut self, key: SessionKey, now_us: u64) {
        self.note_time(now_us);
        self.with(key.session, |session, context| {
            session.handle_load_progress(key, context);
        });
    }

    /// Handles that the decode node cannot load the attempt's rows.
    pub fn handle_load_failed(&mut self, key: SessionKey, now_us: u64) {
        self.note_time(now_us);
        self.with(key.session, |session, context| {
            session.handle_load_failed(key, context);
        });
    }

    /// Handles a fact about rows that this node's engine exports.
    pub fn handle_kv_fact(&mut self, fact: &KvFact, now_us: u64) {
        self.note_time(now_us);
        let fault = self.exports.handle_fact(fact);
        self.take_export_tasks();
        if let Some((id, run, fault)) = fault {
            self.with(id, |session, context| match fault {
                ExportFault::Failed => session.handle_export_failed(run, context),
                ExportFault::LeaseEnded => session.handle_lease_ended(run, context),
            });
        }
    }

    /// Handles the end of a layer in a step, whose rows may be read now. The layers of a step end in order.
    pub fn handle_layer_done(&mut self, step: StepId, layer: u32) {
        self.exports.handle_layer_done(step, layer);
        self.take_export_tasks();
    }

    /// Handles that an export has ended and nothing reads its rows any more.
    pub fn handle_deleted(&mut self, key: SessionKey, now_us: u64) {
        self.note_time(now_us);
        self.exports.handle_deleted(key);
        self.take_export_tasks();
    }

    /// Handles that this node's engine has accepted a run as `request`.
    pub fn handle_submitted(&mut self, id: SessionId, run: u32, request: RequestId, now_us: u64) {
        self.note_time(now_us);
        if !self.exports.handle_submitted(id, run, request) {
            let session = id;
            let action = PrefillAction::AbortLocal { session, request };
            self.actions.push_back(action);
        }
        self.take_export_tasks();
    }

    pub fn handle_local_output(&mut self, output: RequestOutput, now_us: u64) {
        self.note_time(now_us);
        let Some((id, run)) = self.exports.run_of(output.request) else {
            // The run was aborted.
            return;
        };
        if output.finish.is_some() {
            self.exports.handle_ended(id, run);
        }
        self.with(id, |session, context| {
            session.handle_local_output(run, output, context);
        });
    }

    /// Handles that this node's engine has refused a run.
    pub fn handle_local_refused(
        &mut self,
        id: SessionId,
        run: u32,
        error: AdmissionError,
        now_us: u64,
    ) {
        let finish = SessionFinish::Refused(error);
        self.handle_not_run(id, run, finish, AbortReason::Cancelled, now_us);
    }

    /// Handles that this node's engine has stopped.
    pub fn handle_engine_lost(&mut self, id: SessionId, run: u32, reason: Box<str>, now_us: u64) {
        let reason = FinishReason::Error(RequestError::EngineLost(reason));
        let finish = SessionFinish::Finished(reason);
        self.handle_not_run(id, run, finish, AbortReason::Finished, now_us);
    }

    fn handle_not_run(
        &mut self,
        id: SessionId,
        run: u32,
        finish: SessionFinish,
        told: AbortReason,
        now_us: u64,
    ) {
        self.note_time(now_us);
        self.exports.handle_refused(id, run);
        self.take_export_tasks();
        self.with(id, |session, context| {
            session.handle_not_run(run, finish, told, context);
        });
    }

    /// Returns the expected number of output tokens of a request, by the lengths of earlier outputs.
    pub fn expected_output(
        &self,
        id: SessionId,
        namespace: &Namespace,
        stopping: &StoppingCriteria,
    ) -> u32 {
        // An output that no token can end has the largest length.
        let max_tokens = match stopping.is_length_known() {
            true => stopping.max_tokens.unwrap_or(0),
            false => stopping.max_tokens.unwrap_or(u32::MAX),
        };
        // The low half of an id counts the sessions, so consecutive sessions get evenly spread quantiles.
        let quantile = quantile_of(id.0 as u64);
        self.lengths
            .expected_within(namespace, stopping, 0, max_tokens, quantile)
    }

    /// Returns the request of a session that has not ended.
    pub fn request(&self, id: SessionId) -> Option<&Request> {
        self.sessions.get(&id).map(|session| &session.request)
    }

    /// Returns the decode node of a session's current attempt.
    pub(crate) fn node_of(&self, key: SessionKey) -> Option<NodeId> {
        let (node, present) = self.sessions.get(&key.session)?.peer()?;
        (present == key).then_some(node)
    }

    /// Returns the latest time that a caller has passed in.
    pub(crate) fn now_us(&self) -> u64 {
        self.now_us
    }

    /// Returns the time of the next call of [`handle_timeout`](Self::handle_timeout).
    pub fn poll_timeout(&self) -> Option<u64> {
        let deadlines = [self.timers.first_us(), self.ended.first_us()];
        deadlines.into_iter().flatten().min()
    }

    pub fn handle_timeout(&mut self, now_us: u64) {
        self.note_time(now_us);
        self.ended.expire(self.now_us);
        while let Some(id) = self.timers.due(self.now_us) {
            self.timers.set(id, None);
            self.with(id, |session, context| session.handle_timeout(context));
        }
    }

    pub fn poll_action(&mut self) -> Option<PrefillAction> {
        self.actions.pop_front()
    }

    pub fn stats(&self) -> PrefillEndStats {
        PrefillEndStats {
            num_sessions: self.sessions.len(),
            num_tombstones: self.ended.len(),
            num_timers: self.timers.len(),
            num_exports: self.exports.num_exports(),
        }
    }

    /// Returns the number of requests that fell back to this node, by the reason.
    pub fn fallbacks(&self) -> &BTreeMap<&'static str, u64> {
        &self.fallbacks
    }

    /// # Panics
    /// When the bookkeeping contradicts itself.
    pub fn check_invariants(&self) {
        assert!(
            self.sessions.len() <= self.config.max_sessions as usize,
            "more sessions than there may be"
        );
        self.exports.check_invariants();
        assert!(
            self.exports.num_exports() <= 2 * self.config.max_sessions as usize,
            "more runs are read than there may be exports"
        );
        self.ended.check_invariants();
        let mut num_timed = 0;
        for (&id, session) in &self.sessions {
            session.check_invariants(&self.config);
            assert!(
                session
                    .present_run()
                    .is_none_or(|run| self.exports.has_run(id, run)),
                "session {id} has a run that is not in the export book"
            );
            assert!(
                !self.ended.contains(id),
                "session {id} is remembered as ended, but is open"
            );
            let (timer, deadline) = (self.timers.get(id), session.deadline_us(&self.config));
            num_timed += usize::from(timer.is_some());
            assert!(
                deadline.is_none_or(|deadline_us| timer.is_some_and(|timer| timer <= deadline_us)),
                "session {id} has deadline {deadline:?} and a timer at {timer:?}"
            );
        }
        assert_eq!(
            num_timed,
            self.timers.len(),
            "a session that has ended has a timer"
        );
    }

    fn handle_lost_keys(&mut self, now_us: u64, is_lost: impl Fn(NodeId, SessionKey) -> bool) {
        self.note_time(now_us);
        let keys: Vec<SessionKey> = self
            .sessions
            .values()
            .filter_map(PrefillSession::peer)
            .filter(|&(node, key)| is_lost(node, key))
            .map(|(_, key)| key)
            .collect();
        for key in keys {
            self.with(key.session, |session, context| {
                session.handle_peer_lost(key, context);
            });
        }
    }

    fn take_export_tasks(&mut self) {
        while let Some(task) = self.exports.poll_task() {
            self.actions.push_back(PrefillAction::Export(task));
        }
    }

    fn note_time(&mut self, now_us: u64) {
        self.now_us = self.now_us.max(now_us);
    }

    /// Applies `change` to a session, if it exists. Then it sets the session's timer, or replaces an ended session with
    /// a tombstone. Returns whether the session existed.
    fn with(
        &mut self,
        id: SessionId,
        change: impl FnOnce(&mut PrefillSession, &mut Context<'_>),
    ) -> bool {
        let Some(session) = self.sessions.get_mut(&id) else {
            return false;
        };
        let mut context = Context {
            config: &self.config,
            hello: &self.hello,
            exports: &mut self.exports,
            actions: &mut self.actions,
            fallbacks: &mut self.fallbacks,
            lengths: &mut self.lengths,
            now_us: self.now_us,
        };
        change(session, &mut context);
        if session.has_ended() {
            self.sessions.remove(&id);
            self.timers.set(id, None);
            self.ended.insert(id, (), self.now_us);
        } else if let Some(deadline_us) = session.deadline_us(&self.config)
            && self.timers.get(id).is_none_or(|timer| deadline_us < timer)
        {
            self.timers.set(id, Some(deadline_us));
        }
        true
    }
}

impl fmt::Display for SubmissionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooManySessions { limit } => {
                write!(f, "{limit} sessions are open already, which is the limit")
            }
            Self::DuplicateSession => f.write_str("a session with this id is open already"),
            Self::Refused(error) => error.fmt(f),
            Self::Ended => f.write_str("the session has ended, or was cancelled before it began"),
        }
    }
}

impl core::error::Error for SubmissionError {}
