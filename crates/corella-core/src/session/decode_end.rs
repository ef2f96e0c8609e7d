//! All sessions of a decode node: it reserves pages, loads KV and sends tokens back.

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;

use crate::session::deadline_queue::DeadlineQueue;
use crate::session::decode_session::{DecodePhase, DecodeSession, given_back};
use crate::session::message::{AbortReason, Finish, FirstToken, Tokens};
use crate::session::siblings::Siblings;
use crate::session::tombstone::Tombstones;
use crate::session::{
    Allocate, Hello, SessionConfig, SessionConfigError, SessionKey, ToDecode, ToPrefill,
};
use crate::{Incarnation, NodeId, RequestOutput};

/// Accepts sessions from prefill nodes, and frees everything that a session holds, in whatever way the session ends.
///
/// * Facts: `handle_*`, each with the time
/// * Actions: [`poll_action`](Self::poll_action), after every call until it returns `None`
/// * Time: [`poll_timeout`](Self::poll_timeout) says when [`handle_timeout`](Self::handle_timeout)
///   must be called; earlier calls do no harm
///
/// Pages of an ended session stay reserved until the transport reports the end of the load, which may still write to
/// them. A load ends exactly once: done, failed, or cancelled.
#[derive(Debug)]
pub struct DecodeEnd {
    pub(super) config: SessionConfig,
    pub(super) hello: Hello,
    pub(super) sessions: BTreeMap<SessionKey, DecodeSession>,
    /// Sessions with an open stream, by node and incarnation.
    pub(super) by_node: BTreeSet<(NodeId, Incarnation, SessionKey)>,
    pub(super) siblings: Siblings,
    pub(super) ended: Tombstones<SessionKey>,
    /// Timers, each at or before its session's deadline. Every message postpones the deadline, and a timer is moved
    /// only when it expires.
    timers: DeadlineQueue<SessionKey>,
    pub(super) actions: VecDeque<DecodeAction>,
    pub(super) takes_sessions: bool,
    pub(super) now_us: u64,
}

/// A task for the driver. Tasks are carried out in order.
#[derive(Clone, Debug, PartialEq)]
pub enum DecodeAction {
    /// Sends a message on the session's stream.
    Send { key: SessionKey, message: ToPrefill },
    /// Closes the stream once all messages have been sent. Messages that still arrive on it are ignored.
    CloseStream { key: SessionKey },
    /// Asks the scheduler for pages. The driver passes on the answer by [`DecodeEnd::handle_reserved`].
    Reserve {
        key: SessionKey,
        allocate: Box<Allocate>,
        /// At this time the scheduler ends the request in any case. The deadline is later than the timeouts of rows and
        /// first token.
        deadline_us: u64,
    },
    /// Loads the session's rows from `first_row` on, from its prefill node.
    Load {
        key: SessionKey,
        node: NodeId,
        first_row: u32,
        num_rows: u32,
        /// Until this time, the prefill node keeps the load waiting for the rows' export.
        deadline_us: u64,
    },
    /// Cancels a load. The driver reports the end of all writes by [`DecodeEnd::handle_load_cancelled`].
    CancelLoad { key: SessionKey },
    /// Has the scheduler compute the request from its cached prefix. No rows come, and nothing writes to the pages.
    Compute { key: SessionKey },
    /// Gives the scheduler the first token, when all rows have arrived. If the scheduler has ended the request
    /// meanwhile, the driver releases the request's pages.
    Arrived {
        key: SessionKey,
        first_token: Box<FirstToken>,
    },
    /// Ends the request in the scheduler. If it is still receiving KV, its pages stay reserved until `Release`.
    AbortLocal { key: SessionKey },
    /// Releases the pages of an ended request. Nothing writes to them any more.
    Release { key: SessionKey },
    /// Asks for a probe of a node that does not answer.
    MarkSuspect { node: NodeId },
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DecodeEndStats {
    pub num_sessions: usize,
    /// Ended sessions whose load may still write.
    pub num_quarantined: usize,
    pub num_tombstones: usize,
    pub num_timers: usize,
}

impl DecodeEnd {
    /// `hello` describes this node to others.
    pub fn new(config: SessionConfig, hello: Hello) -> Result<Self, SessionConfigError> {
        config.validate()?;
        Ok(Self {
            sessions: BTreeMap::new(),
            by_node: BTreeSet::new(),
            siblings: Siblings::default(),
            ended: Tombstones::new(config.tombstone_us, config.max_tombstones as usize),
            timers: DeadlineQueue::new(),
            actions: VecDeque::new(),
            takes_sessions: true,
            now_us: 0,
            config,
            hello,
        })
    }

    /// Refuses new sessions from now on, or accepts them again.
    pub fn set_draining(&mut self, is_draining: bool) {
        self.takes_sessions = !is_draining;
    }

    /// Handles a message of the prefill node `node`.
    pub fn handle_message(
        &mut self,
        node: NodeId,
        key: SessionKey,
        message: ToDecode,
        now_us: u64,
    ) {
        self.note_time(now_us);
        if let Some(session) = self.open_session(key) {
            session.heartbeat.heard_us = now_us;
        }
        match message {
            ToDecode::Heartbeat => {}
            ToDecode::Hello(hello) => self.handle_hello(node, key, &hello),
            ToDecode::Allocate(allocate) => self.handle_allocate(key, allocate),
            ToDecode::FirstToken(first_token) => self.handle_first_token(key, first_token),
            ToDecode::Compute => self.handle_compute(key),
            ToDecode::Abort(reason) => {
                if reason == AbortReason::PeerLost && self.open_session(key).is_some() {
                    self.actions.push_back(DecodeAction::MarkSuspect { node });
                }
                self.end(key, None);
                // A stream may be cancelled before its first message is read.
                self.ended.insert(key, (), self.now_us);
            }
        }
    }

    /// Handles the end of a load: all rows have arrived.
    pub fn handle_load_done(&mut self, key: SessionKey, now_us: u64) {
        self.handle_load_end(key, true, now_us);
    }

    /// Handles the failure of a load, which writes no more.
    pub fn handle_load_failed(&mut self, key: SessionKey, now_us: u64) {
        self.handle_load_end(key, false, now_us);
    }

    fn handle_load_end(&mut self, key: SessionKey, is_done: bool, now_us: u64) {
        self.note_time(now_us);
        let Some(session) = self.sessions.get_mut(&key) else {
            return;
        };
        match &mut session.phase {
            DecodePhase::Loading { has_rows, .. } if !*has_rows => {
                // The load has ended, so it must not be cancelled.
                *has_rows = true;
                if is_done {
                    self.send(key, ToPrefill::LoadDone);
                    self.arrive(key);
                } else {
                    self.end(key, Some(AbortReason::LoadFailed));
                }
            }
            DecodePhase::StoppingLoad => self.compute(key),
            DecodePhase::Quarantined => self.release(key),
            _ => {}
        }
    }

    /// Handles that a cancelled load writes no more.
    pub fn handle_load_cancelled(&mut self, key: SessionKey, now_us: u64) {
        self.note_time(now_us);
        match self.sessions.get(&key).map(|session| &session.phase) {
            Some(DecodePhase::StoppingLoad) => self.compute(key),
            Some(DecodePhase::Quarantined) => self.release(key),
            _ => {}
        }
    }

    /// Handles an output of the session's request.
    pub fn handle_local_output(&mut self, key: SessionKey, output: RequestOutput, now_us: u64) {
        self.note_time(now_us);
        let Some(session) = self.open_session(key) else {
            return;
        };
        let DecodePhase::Decoding {
            num_output_tokens, ..
        } = &mut session.phase
        else {
            // The scheduler has ended the request before its KV arrived.
            if output.finish.is_some() {
                self.end(key, Some(AbortReason::LoadTimedOut));
            }
            return;
        };
        let first_position = *num_output_tokens;
        *num_output_tokens += u32::from(output.sample.is_some());
        let num_output_tokens = *num_output_tokens;
        let siblings = session.siblings;
        if let Some(sample) = output.sample {
            if let Some(group) = siblings {
                // After its first output, the request's prompt is in the prefix tree.
                for waiting in self.siblings.publish(group, key) {
                    self.stop_waiting(waiting);
                }
            }
            let samples = Vec::from([sample]);
            self.send(
                key,
                ToPrefill::Tokens(Tokens {
                    first_position,
                    samples,
                }),
            );
        }
        let Some(reason) = output.finish else {
            return;
        };
        self.set_phase(key, DecodePhase::Finished);
        match given_back(&reason) {
            Some(reason) => self.end(key, Some(reason)),
            None => {
                let finish = Finish {
                    reason,
                    num_output_tokens,
                };
                self.send(key, ToPrefill::Finish(finish));
                self.end(key, None);
            }
        }
    }

    /// Handles the end of the session's stream.
    pub fn handle_stream_closed(&mut self, key: SessionKey, now_us: u64) {
        self.note_time(now_us);
        if let Some(session) = self.open_session(key) {
            let node = session.node;
            self.actions.push_back(DecodeAction::MarkSuspect { node });
            self.end(key, None);
        }
    }

    /// Returns the time of the next call of [`handle_timeout`](Self::handle_timeout).
    pub fn poll_timeout(&self) -> Option<u64> {
        let deadlines = [self.timers.first_us(), self.ended.first_us()];
        deadlines.into_iter().flatten().min()
    }

    pub fn handle_timeout(&mut self, now_us: u64) {
        self.note_time(now_us);
        self.ended.expire(self.now_us);
        while let Some(key) = self.timers.due(self.now_us) {
            self.timers.set(key, None);
            self.handle_due(key);
            self.set_timer(key);
        }
    }

    pub fn poll_action(&mut self) -> Option<DecodeAction> {
        self.actions.pop_front()
    }

    pub fn stats(&self) -> DecodeEndStats {
        let sessions = self.sessions.values();
        let quarantined =
            sessions.filter(|session| matches!(session.phase, DecodePhase::Quarantined));
        DecodeEndStats {
            num_sessions: self.sessions.len(),
            num_quarantined: quarantined.count(),
            num_tombstones: self.ended.len(),
            num_timers: self.timers.len(),
        }
    }

    /// # Panics
    /// When the bookkeeping contradicts itself.
    pub fn check_invariants(&self) {
        assert!(
            self.sessions.len() <= self.config.max_sessions as usize,
            "more sessions than there may be"
        );
        self.ended.check_invariants();
        let (mut num_open, mut num_timed) = (0, 0);
        for (&key, session) in &self.sessions {
            let is_open = session.is_open();
            num_open += usize::from(is_open);
            assert_eq!(
                is_open,
                self.by_node
                    .contains(&(session.node, key.prefill_incarnation, key)),
                "session {key} and its node's list disagree"
            );
            let (timer, deadline) = (self.timers.get(key), session.deadline_us(&self.config));
            num_timed += usize::from(timer.is_some());
            assert_eq!(
                is_open,
                timer.is_some(),
                "session {key} and its timer disagree"
            );
            assert!(
                deadline.is_none_or(|deadline_us| timer.is_some_and(|timer| timer <= deadline_us)),
                "session {key} has deadline {deadline:?} and a timer at {timer:?}"
            );
        }
        assert_eq!(num_open, self.by_node.len(), "sessions by node");
        for key in self.siblings.leaders() {
            let leader = self.sessions.get(&key);
            assert!(
                leader.is_some_and(DecodeSession::is_open),
                "session {key} is over, and others wait for it"
            );
        }
        let waits = |session: &&DecodeSession| matches!(session.phase, DecodePhase::Waiting { .. });
        assert!(
            self.siblings
                .waiting()
                .all(|key| self.sessions.get(&key).as_ref().is_some_and(waits)),
            "a session is listed as waiting, but does not wait"
        );
        assert_eq!(
            self.siblings.waiting().count(),
            self.sessions.values().filter(waits).count(),
            "sessions that wait for another choice"
        );
        assert_eq!(
            num_timed,
            self.timers.len(),
            "a session that has ended has a timer"
        );
    }

    fn handle_first_token(&mut self, key: SessionKey, told: Box<FirstToken>) {
        let now_us = self.now_us;
        let Some(session) = self.sessions.get_mut(&key) else {
            return;
        };
        let load_us = self.config.load_timeout_us(session.num_rows);
        match &mut session.phase {
            DecodePhase::Loading {
                by_us, first_token, ..
            } => {
                if first_token.is_some() {
                    return;
                }
                *first_token = Some(told);
                // All rows are computed, so only their transfer takes time now.
                *by_us = now_us.saturating_add(load_us);
                self.arrive(key);
            }
            DecodePhase::Waiting {
                by_us, first_token, ..
            } => {
                if first_token.is_none() {
                    *first_token = Some(told);
                    *by_us = now_us.saturating_add(load_us);
                }
            }
            DecodePhase::Reserving {
                has_waited: true,
                first_token,
                ..
            } => {
                first_token.get_or_insert(told);
            }
            DecodePhase::Decoding {
                draws_first: false, ..
            }
            | DecodePhase::Finished
            | DecodePhase::Quarantined => {}
            DecodePhase::Greeting
            | DecodePhase::Reserving { .. }
            | DecodePhase::StoppingLoad
            | DecodePhase::Decoding {
                draws_first: true, ..
            } => {
                self.end(key, Some(AbortReason::ProtocolViolated));
            }
        }
        self.set_timer(key);
    }

    /// Gives the request to the scheduler once the rows and the first token have arrived.
    pub(super) fn arrive(&mut self, key: SessionKey) {
        let Some(session) = self.sessions.get_mut(&key) else {
            return;
        };
        if let DecodePhase::Loading {
            has_rows: true,
            first_token,
            ..
        } = &mut session.phase
            && let Some(first_token) = first_token.take()
        {
            session.phase = DecodePhase::Decoding {
                num_output_tokens: session.num_earlier_tokens + 1,
                draws_first: false,
            };
            self.actions
                .push_back(DecodeAction::Arrived { key, first_token });
        }
    }

    fn handle_due(&mut self, key: SessionKey) {
        let now_us = self.now_us;
        let Some(session) = self.sessions.get(&key) else {
            return;
        };
        let is_due = |deadline_us: u64| deadline_us <= now_us;
        let has_waited = matches!(
            &session.phase,
            DecodePhase::Waiting { by_us, first_token: Some(_), .. } if is_due(*by_us)
        );
        let load = match &session.phase {
            DecodePhase::Waiting {
                by_us,
                first_token: None,
                ..
            } => is_due(*by_us).then_some(AbortReason::FirstTokenTimedOut),
            DecodePhase::Loading {
                by_us, first_token, ..
            } => is_due(*by_us).then_some(match first_token {
                Some(_) => AbortReason::LoadTimedOut,
                None => AbortReason::FirstTokenTimedOut,
            }),
            _ => None,
        };
        if session.deadline_us.is_some_and(is_due) {
            self.end(key, Some(AbortReason::DeadlinePassed));
        } else if is_due(session.heartbeat.lost_us(&self.config)) {
            let node = session.node;
            self.actions.push_back(DecodeAction::MarkSuspect { node });
            self.end(key, Some(AbortReason::PeerLost));
        } else if let Some(reason) = load {
            self.end(key, Some(reason));
        } else if has_waited {
            // The other choice may still be waiting, so this session stops waiting for it and loads rows itself.
            self.leave_siblings(key);
            self.stop_waiting(key);
        } else if is_due(session.heartbeat.due_us(&self.config)) {
            self.send(key, ToPrefill::Heartbeat);
        }
    }

    pub(super) fn end_of_node(&mut self, node: NodeId, is_over: impl Fn(Incarnation) -> bool) {
        let sessions = self.sessions_of(node);
        let keys: Vec<SessionKey> = sessions
            .filter(|&(_, of, _)| is_over(of))
            .map(|(_, _, key)| key)
            .collect();
        for key in keys {
            self.end(key, None);
        }
    }

    /// Ends a session whose stream is open. `told` is the reason to send to the prefill node, or `None` if the prefill
    /// node knows of the end.
    pub(super) fn end(&mut self, key: SessionKey, told: Option<AbortReason>) {
        if self.open_session(key).is_none() {
            return;
        }
        if let Some(reason) = told {
            self.send(key, ToPrefill::Abort(reason));
        }
        self.actions.push_back(DecodeAction::CloseStream { key });
        self.ended.insert(key, (), self.now_us);
        self.timers.set(key, None);
        self.leave_siblings(key);
        let Some(session) = self.sessions.get_mut(&key) else {
            return;
        };
        self.by_node
            .remove(&(session.node, key.prefill_incarnation, key));
        match &mut session.phase {
            DecodePhase::Greeting | DecodePhase::Waiting { .. } | DecodePhase::Finished => {
                self.forget(key)
            }
            DecodePhase::Reserving { has_ended, .. } => *has_ended = true,
            DecodePhase::Loading { has_rows: true, .. } => self.release(key),
            DecodePhase::Loading { .. } => {
                session.phase = DecodePhase::Quarantined;
                self.actions.push_back(DecodeAction::AbortLocal { key });
                self.actions.push_back(DecodeAction::CancelLoad { key });
            }
            DecodePhase::StoppingLoad => {
                session.phase = DecodePhase::Quarantined;
                self.actions.push_back(DecodeAction::AbortLocal { key });
            }
            DecodePhase::Decoding { .. } => {
                self.actions.push_back(DecodeAction::AbortLocal { key });
                self.forget(key);
            }
            DecodePhase::Quarantined => {}
        }
    }

    fn release(&mut self, key: SessionKey) {
        self.actions.push_back(DecodeAction::Release { key });
        self.forget(key);
    }

    pub(super) fn forget(&mut self, key: SessionKey) {
        self.sessions.remove(&key);
    }

    pub(super) fn set_phase(&mut self, key: SessionKey, phase: DecodePhase) {
        if let Some(session) = self.sessions.get_mut(&key) {
            session.phase = phase;
        }
        self.set_timer(key);
    }

    pub(super) fn set_timer(&mut self, key: SessionKey) {
        let session = self.sessions.get(&key);
        if let Some(deadline_us) = session.and_then(|session| session.deadline_us(&self.config))
            && self.timers.get(key).is_none_or(|timer| deadline_us < timer)
        {
            self.timers.set(key, Some(deadline_us));
        }
    }

    pub(super) fn send(&mut self, key: SessionKey, message: ToPrefill) {
        if let Some(session) = self.sessions.get_mut(&key) {
            session.heartbeat.sent_us = self.now_us;
        }
        self.actions.push_back(DecodeAction::Send { key, message });
    }

    fn open_session(&mut self, key: SessionKey) -> Option<&mut DecodeSession> {
        let session = self.sessions.get_mut(&key)?;
        session.is_open().then_some(session)
    }

    pub(super) fn sessions_of(
        &self,
        node: NodeId,
    ) -> impl DoubleEndedIterator<Item = (NodeId, Incarnation, SessionKey)> {
        let first = (node, Incarnation(0), SessionKey::FIRST);
        let last = (node, Incarnation(u64::MAX), SessionKey::LAST);
        self.by_node.range(first..=last).copied()
    }

    pub(super) fn note_time(&mut self, now_us: u64) {
        self.now_us = self.now_us.max(now_us);
    }
}
