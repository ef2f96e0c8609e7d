//! The opening of a session on a decode node: the greeting, the reservation, and the wait for another choice of the
//! prompt.

use alloc::boxed::Box;

use crate::NodeId;
use crate::session::decode_end::{DecodeAction, DecodeEnd};
use crate::session::decode_session::{DecodePhase, DecodeSession};
use crate::session::heartbeat::Heartbeat;
use crate::session::message::{AbortReason, Allocate, Allocated, FirstToken, Hello, Refusal};
use crate::session::{SessionKey, ToPrefill};

impl DecodeEnd {
    pub(super) fn handle_hello(&mut self, node: NodeId, key: SessionKey, hello: &Hello) {
        if self.sessions.contains_key(&key) {
            return;
        }
        let greeting = Box::new(self.hello.clone());
        self.send(key, ToPrefill::Hello(greeting));
        if let Err(refusal) = self.check_opening(node, key, hello) {
            self.send(key, ToPrefill::Refused(refusal));
            self.actions.push_back(DecodeAction::CloseStream { key });
            self.ended.insert(key, (), self.now_us);
            return;
        }
        self.end_of_node(node, |of| of < key.prefill_incarnation);
        let session = DecodeSession {
            node,
            arithmetic: { !hello.computes_like(&self.hello) }.then(|| hello.arithmetic()),
            phase: DecodePhase::Greeting,
            heartbeat: Heartbeat::new(self.now_us),
            deadline_us: None,
            num_rows: 0,
            num_earlier_tokens: 0,
            siblings: None,
        };
        self.by_node.insert((node, key.prefill_incarnation, key));
        self.sessions.insert(key, session);
        self.set_timer(key);
    }

    fn check_opening(&self, node: NodeId, key: SessionKey, hello: &Hello) -> Result<(), Refusal> {
        self.hello.check(hello).map_err(Refusal::Incompatible)?;
        let latest = self.sessions_of(node).map(|(_, of, _)| of).next_back();
        let is_stale = key.decode_incarnation != self.hello.incarnation
            || key.prefill_incarnation != hello.incarnation
            || latest.is_some_and(|latest| latest > key.prefill_incarnation);
        if is_stale {
            return Err(Refusal::StaleIncarnation);
        }
        if self.ended.contains(key) {
            return Err(Refusal::Ended);
        }
        if !self.takes_sessions {
            return Err(Refusal::Draining);
        }
        match self.sessions.len() < self.config.max_sessions as usize {
            true => Ok(()),
            false => Err(Refusal::Exhausted),
        }
    }

    pub(super) fn handle_allocate(&mut self, key: SessionKey, mut allocate: Box<Allocate>) {
        let now_us = self.now_us;
        let Some(session) = self.sessions.get_mut(&key) else {
            // An ended session gets no second answer, and a session begins with `Hello`.
            return;
        };
        if !matches!(session.phase, DecodePhase::Greeting) {
            return;
        }
        if allocate.prompt.len() > self.config.max_prompt_tokens as usize {
            self.set_phase(key, DecodePhase::Finished);
            self.send(key, ToPrefill::Refused(Refusal::Never));
            return self.end(key, None);
        }
        // If the prefill node's arithmetic differs, its rows have other bits and must not be mixed with this node's own
        // rows.
        allocate.namespace.arithmetic = session.arithmetic;
        session.num_rows = allocate.num_rows();
        session.num_earlier_tokens = allocate.output.len() as u32;
        session.deadline_us = allocate
            .remaining_us
            .map(|remaining_us| now_us.saturating_add(remaining_us));
        // Only whole pages are shared.
        let is_long = session.num_rows >= self.hello.page_size;
        session.siblings = allocate.siblings.filter(|_| is_long);
        let leads = session
            .siblings
            .is_none_or(|group| self.siblings.join(group, key));
        if leads {
            return self.reserve(key, allocate, None, false);
        }
        let by_us = now_us.saturating_add(self.config.first_token_timeout_us);
        let first_token = None;
        self.set_phase(
            key,
            DecodePhase::Waiting {
                allocate,
                by_us,
                first_token,
            },
        );
        let allocated = Allocated {
            num_cached_rows: 0,
            granted_as: None,
        };
        self.send(key, ToPrefill::Allocated(allocated));
    }

    fn reserve(
        &mut self,
        key: SessionKey,
        allocate: Box<Allocate>,
        first_token: Option<Box<FirstToken>>,
        has_waited: bool,
    ) {
        let load_us = self.config.load_timeout_us(allocate.num_rows());
        let deadline_us = self
            .now_us
            .saturating_add(self.config.first_token_timeout_us)
            .saturating_add(load_us)
            .saturating_add(self.config.lost_after_us);
        self.set_phase(
            key,
            DecodePhase::Reserving {
                has_ended: false,
                has_waited,
                first_token,
            },
        );
        self.actions.push_back(DecodeAction::Reserve {
            key,
            allocate,
            deadline_us,
        });
    }

    /// Handles the scheduler's answer to [`DecodeAction::Reserve`]: its reservation, or the reason of its refusal.
    pub fn handle_reserved(
        &mut self,
        key: SessionKey,
        answer: Result<Allocated, Refusal>,
        now_us: u64,
    ) {
        self.note_time(now_us);
        let Some(session) = self.sessions.get_mut(&key) else {
            return;
        };
        let (node, num_rows, end_us) = (session.node, session.num_rows, session.deadline_us);
        let DecodePhase::Reserving {
            has_ended,
            has_waited,
            first_token,
        } = &mut session.phase
        else {
            return;
        };
        let (has_ended, has_waited, first_token) = (*has_ended, *has_waited, first_token.take());
        match answer {
            Err(_) if has_ended => self.forget(key),
            Ok(_) if has_ended => {
                self.actions.push_back(DecodeAction::Release { key });
                self.forget(key);
            }
            Err(_) if has_waited => {
                self.set_phase(key, DecodePhase::Finished);
                self.end(key, Some(AbortReason::OutOfPages));
            }
            Err(refusal) => {
                self.set_phase(key, DecodePhase::Finished);
                self.send(key, ToPrefill::Refused(refusal));
                self.end(key, None);
            }
            Ok(allocated) => {
                let num_cached_rows = allocated.num_cached_rows;
                let time_us = match first_token {
                    Some(_) => self.config.load_timeout_us(num_rows),
                    None => self.config.first_token_timeout_us,
                };
                let by_us = now_us.saturating_add(time_us);
                let has_rows = num_cached_rows >= num_rows;
                self.set_phase(
                    key,
                    DecodePhase::Loading {
                        by_us,
                        has_rows,
                        first_token,
                    },
                );
                self.send(key, ToPrefill::Allocated(allocated));
                if has_rows {
                    self.send(key, ToPrefill::LoadDone);
                    return self.arrive(key);
                }
                self.actions.push_back(DecodeAction::Load {
                    key,
                    node,
                    first_row: num_cached_rows,
                    num_rows,
                    deadline_us: end_us.unwrap_or(by_us).min(by_us),
                });
            }
        }
    }

    /// Continues a session that waited for another choice of its prompt.
    pub(super) fn stop_waiting(&mut self, key: SessionKey) {
        let Some(session) = self.sessions.get_mut(&key) else {
            return;
        };
        match core::mem::replace(&mut session.phase, DecodePhase::Greeting) {
            DecodePhase::Waiting {
                allocate,
                first_token,
                ..
            } => self.reserve(key, allocate, first_token, true),
            other => session.phase = other,
        }
    }

    /// Lets another choice receive the rows, because this session leaves its siblings.
    pub(super) fn leave_siblings(&mut self, key: SessionKey) {
        let group = self.sessions.get(&key).and_then(|session| session.siblings);
        if let Some(next) = group.and_then(|group| self.siblings.leave(group, key)) {
            self.stop_waiting(next);
        }
    }
}
