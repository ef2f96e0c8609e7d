//! All sessions of a prefill node: the end that the client talks to.

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
    AdmissionError, ComputePlace, FinishReason, Incarnation, KvFact, Namespace, NodeId, Request,
    RequestError, RequestId, RequestOutput, Sample, SessionId, StepId, StoppingCriteria,
};

/// Accepts requests from clients and finishes each of them exactly once, with or without a decode
/// node.
///
/// * Commands: [`submit`](Self::submit), [`cancel`](Self::cancel)
/// * Facts: `handle_*`, each with the time
/// * Actions: [`poll_action`](Self::poll_action), after every call until it returns `None`
/// * Time: [`poll_timeout`](Self::poll_timeout) says when [`handle_timeout`](Self::handle_timeout)
///   must be called; earlier calls do no harm
///
/// A session looks for a decode node, computes the prompt here for it, and passes on the tokens
/// that the decode node sends. The decode node may compute a prompt that it has most of. A
/// decode node that refuses, or fails before it has reserved pages, is replaced by another within the
/// same search. If it fails later, the session searches once more: the next decode node gets the rows
/// of the prompt and of all tokens that the client has. Once that node has drawn a token, the session
/// may search again. Otherwise the request goes on here, unless `resumes_locally` is off.
#[derive(Clone, Debug)]
pub struct PrefillEnd {
    config: SessionConfig,
    hello: Hello,
    sessions: BTreeMap<SessionId, PrefillSession>,
    ended: Tombstones<SessionId>,
    /// Never later than a session's deadline. It may be earlier: what is heard puts deadlines off, and
    /// is not worth an update.
    timers: DeadlineQueue<SessionId>,
    exports: ExportBook,
    actions: VecDeque<PrefillAction>,
    fallbacks: BTreeMap<&'static str, u64>,
    /// The lengths of outputs, wherever they were decoded.
    lengths: OutputLengths,
    now_us: u64,
}

/// A request that may be served with a decode node.
#[derive(Clone, Debug)]
pub struct Submission {
    pub session: SessionId,
    /// Its id means nothing here: every run on this node gets one from the driver.
    pub request: Request,
    /// The most tokens that this node could generate for it, within the request's own limit.
    pub max_tokens: u32,
    pub deadline_us: Option<u64>,
    /// The session of the first choice, where several choices have this prompt.
    pub siblings: Option<SessionId>,
    /// The fingerprint of the adapter that it is computed with.
    pub adapter: Option<u128>,
    /// What the answer is held to, as decode nodes read it.
    pub constraint: Option<Arc<str>>,
    /// What logs call the request on both nodes.
    pub trace_id: Option<Arc<str>>,
    /// Whether the first decode node, once it has pages, may be left the prompt:
    /// [`PrefillAction::Decide`] then comes before this node computes anything.
    pub asks_first: bool,
}

/// What the driver is to do, in this order.
#[derive(Clone, Debug, PartialEq)]
pub enum PrefillAction {
    /// Asks placement for a decode node that is not in `tried`. The answer is
    /// [`PrefillEnd::handle_placement`].
    TryNext {
        session: SessionId,
        tried: Vec<NodeId>,
    },
    /// Opens the attempt's stream. What is sent before it is open waits for it.
    OpenStream {
        key: SessionKey,
        node: NodeId,
    },
    Send {
        key: SessionKey,
        message: ToDecode,
    },
    /// Closes the stream behind what has been sent on it. Nothing that comes from it matters.
    CloseStream {
        key: SessionKey,
    },
    /// The decode node has pages for the request, and this many of its leading rows. The answer is
    /// [`PrefillEnd::handle_decision`]. Without one within the time to look for a decode node, the prompt is computed
    /// here.
    Decide {
        key: SessionKey,
        node: NodeId,
        num_cached_rows: u32,
    },
    /// Submits a run to this node's engine. The answer, before the next action is taken, is
    /// [`PrefillEnd::handle_submitted`] or [`PrefillEnd::handle_local_refused`]; outputs come back by
    /// [`PrefillEnd::handle_local_output`]. A run whose rows are for a decode node says so in
    /// `exports_kv`, and draws one token. Limits of the queue do not apply to a session that was
    /// accepted before.
    SubmitLocally {
        session: SessionId,
        run: u32,
        is_accepted: bool,
        request: Box<Request>,
    },
    /// The outputs of a run no longer matter.
    AbortLocal {
        session: SessionId,
        request: RequestId,
    },
    /// Concerns rows that decode nodes read. [`PrefillEnd::handle_load_failed`] is told of an export that cannot be
    /// made, [`PrefillEnd::handle_deleted`] of one that is deleted.
    Export(ExportTask),
    Emit {
        session: SessionId,
        event: ClientEvent,
    },
    /// The node does not answer. It should be probed before it is asked again.
    MarkSuspect {
        node: NodeId,
    },
    /// The node has been started again, and says so itself.
    MarkRestarted {
        node: NodeId,
        incarnation: Incarnation,
    },
    /// The node is healthy, but cannot work with this one.
    MarkIncompatible {
        node: NodeId,
        mismatch: Mismatch,
    },
}

/// One event for the client. The last one, and only the last, has `finish` set.
#[derive(Clone, Debug, PartialEq)]
pub struct ClientEvent {
    /// Absent only in a last event that brings no token.
    pub sample: Option<Sample>,
    pub finish: Option<SessionFinish>,
    pub num_prompt_tokens: u32,
    /// Prompt tokens that the node that computed the prompt had in its prefix cache when the request first ran.
    pub num_cached_tokens: u32,
    /// Total so far, this event's included.
    pub num_output_tokens: u32,
    /// Arrival to first scheduling.
    pub queue_us: u64,
}

/// How a session ends for its client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SessionFinish {
    /// As any request ends, wherever it ran.
    Finished(FinishReason),
    /// This node's engine has no place for it; or no decode node has, and it must not be decoded
    /// here.
    Refused(AdmissionError),
    DeadlinePassed,
    /// Its decode node was lost, and it must not go on here.
    DecodeLost(AbortReason),
}

/// Why a submission is not taken. Nothing was kept of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SubmissionError {
    TooManySessions {
        limit: u32,
    },
    DuplicateSession,
    /// Its route leads nowhere.
    Refused(AdmissionError),
    /// It was cancelled before it came, or it has ended.
    Ended,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefillEndStats {
    pub num_sessions: usize,
    pub num_tombstones: usize,
    pub num_timers: usize,
    /// Runs whose pages are read for decode nodes.
    pub num_exports: usize,
}

impl PrefillEnd {
    /// `hello` is what this node says of itself.
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

    /// Begins a session with a decode node that placement has chosen, or without one.
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

    /// Ends a session for its client. If it has not been submitted yet, its submission will be
    /// refused. Returns false if no such session is open.
    pub fn cancel(&mut self, id: SessionId, now_us: u64) -> bool {
        self.note_time(now_us);
        let is_known = self.with(id, |session, context| {
            let finish = SessionFinish::Finished(FinishReason::Aborted);
            session.end(None, finish, AbortReason::Cancelled, context);
        });
        self.ended.insert(id, (), self.now_us);
        is_known
    }

    /// The answer to [`PrefillAction::TryNext`]; `None` when nobody is left to be asked.
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

    /// The answer to [`PrefillAction::Decide`].
    pub fn handle_decision(&mut self, key: SessionKey, place: ComputePlace, now_us: u64) {
        self.note_time(now_us);
        self.with(key.session, |session, context| {
            session.handle_decision(key, place, context);
        });
    }

    /// The attempt's stream has closed, or could not be opened.
    pub fn handle_stream_closed(&mut self, key: SessionKey, now_us: u64) {
        self.note_time(now_us);
        self.with(key.session, |session, context| {
            session.handle_stream_closed(key, context);
        });
    }

    /// All streams to the node have closed.
    pub fn handle_peer_lost(&mut self, node: NodeId, now_us: u64) {
        self.handle_lost_keys(now_us, |peer, _| peer == node);
    }

    /// The node has been started again: sessions with its earlier starts are over.
    fn handle_incarnation(&mut self, node: NodeId, incarnation: Incarnation, now_us: u64) {
        self.handle_lost_keys(now_us, |peer, key| {
            peer == node && key.decode_incarnation < incarnation
        });
    }

    /// Rows of the attempt have been sent to the decode node, or it has asked for them.
    pub fn handle_load_progress(&mut self, key: SessionKey, now_us: u64) {
        self.note_time(now_us);
        self.with(key.session, |session, context| {
            session.handle_load_progress(key, context);
        });
    }

    /// The decode node cannot load the rows of the attempt.
    pub fn handle_load_failed(&mut self, key: SessionKey, now_us: u64) {
        self.note_time(now_us);
        self.with(key.session, |session, context| {
            session.handle_load_failed(key, context);
        });
    }

    /// What this node's engine says of rows that it exports.
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

    /// A step is done with a layer, whose rows may be read. The layers of a step are done in order.
    pub fn handle_layer_done(&mut self, step: StepId, layer: u32) {
        self.exports.handle_layer_done(step, layer);
        self.take_export_tasks();
    }

    /// The export table has ended an export, and nothing reads rows for it any more.
    pub fn handle_deleted(&mut self, key: SessionKey, now_us: u64) {
        self.note_time(now_us);
        self.exports.handle_deleted(key);
        self.take_export_tasks();
    }

    /// This node's engine has taken a run, and knows it as `request`.
    pub fn handle_submitted(&mut self, id: SessionId, run: u32, request: RequestId, now_us: u64) {
        self.note_time(now_us);
        if !self.exports.handle_submitted(id, run, request) {
            let session = id;
            let action = PrefillAction::AbortLocal { session, request };
            self.actions.push_back(action);
        }
        self.take_export_tasks();
    }

    /// What this node's engine says of a run.
    pub fn handle_local_output(&mut self, output: RequestOutput, now_us: u64) {
        self.note_time(now_us);
        let Some((id, run)) = self.exports.run_of(output.request) else {
            // It was aborted.
            return;
        };
        if output.finish.is_some() {
            self.exports.handle_ended(id, run);
        }
        self.with(id, |session, context| {
            session.handle_local_output(run, output, context);
        });
    }

    /// This node's engine does not take a run.
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

    /// This node's engine has stopped, and takes no run any more.
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

    /// The number of tokens that the output of a request is expected to have, by the lengths of earlier outputs.
    pub fn expected_output(
        &self,
        id: SessionId,
        namespace: &Namespace,
        stopping: &StoppingCriteria,
    ) -> u32 {
        // An output that nothing ends fills what there is.
        let max_tokens = match stopping.is_length_known() {
            true => stopping.max_tokens.unwrap_or(0),
            false => stopping.max_tokens.unwrap_or(u32::MAX),
        };
        // Nodes number their sessions.
        let quantile = quantile_of(id.0 as u64);
        self.lengths
            .expected_within(namespace, stopping, 0, max_tokens, quantile)
    }

    /// The request of a session that has not ended.
    pub fn request(&self, id: SessionId) -> Option<&Request> {
        self.sessions.get(&id).map(|session| &session.request)
    }

    /// The decode node of a session's present attempt.
    pub(crate) fn node_of(&self, key: SessionKey) -> Option<NodeId> {
        let (node, present) = self.sessions.get(&key.session)?.peer()?;
        (present == key).then_some(node)
    }

    /// The latest time that it was told.
    pub(crate) fn now_us(&self) -> u64 {
        self.now_us
    }

    /// When [`handle_timeout`](Self::handle_timeout) is to be called next.
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

    /// Requests that went on here although a decode node was to take them, by why none did.
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
                "session {id} has a run that is not in the books"
            );
            assert!(
                !self.ended.contains(id),
                "session {id} is remembered as ended and lives"
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

    /// Applies `change` to a session, if it exists. Afterwards either sets the session's timer or,
    /// if the session has ended, replaces it with a tombstone. Returns whether the session existed.
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
                write!(f, "{limit} sessions are open already, and no more may be")
            }
            Self::DuplicateSession => f.write_str("a session with this id is open already"),
            Self::Refused(error) => error.fmt(f),
            Self::Ended => f.write_str("the session has ended, or was cancelled before it began"),
        }
    }
}

impl core::error::Error for SubmissionError {}
