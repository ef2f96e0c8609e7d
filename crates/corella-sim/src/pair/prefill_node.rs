//! A prefill node: engine, session end, and what the node does for its decode nodes.

use std::collections::BTreeMap;

use corella_core::session::{
    AbortReason, CacheStore, CacheStoreConfig, PrefillAction, PrefillEnd, SessionKey, Submission,
    SubmissionError, ToDecode, ToPrefill,
};
use corella_core::{Incarnation, KvFact, NodeId, PageId, RequestId, SessionId, TokenId};

use crate::executor::{Row, root_row, rows_of};
use crate::pair::engine::Engine;
use crate::pair::row_sender::{Load, Offer, Sender};
use crate::pair::session_watch::PREFILL;
use crate::pair::wire::{ConnectionId, Direction, Packet, Wire};
use crate::pair::world::{Event, LocalEvent, World};
use crate::violation::Violation;

pub struct PrefillNode {
    pub id: NodeId,
    pub incarnation: Incarnation,
    pub engine: Engine,
    pub end: PrefillEnd,
    pub(super) store: CacheStore<Offer, Load>,
    pub(super) num_layers: u32,
    num_requests: u64,
    pub(super) requests: BTreeMap<(SessionId, u32), RequestId>,
    pub(super) runs: BTreeMap<RequestId, Run>,
    pub(super) senders: BTreeMap<SessionKey, Sender>,
    wake_us: Option<u64>,
}

/// What is known of a request of this node's engine.
pub(super) struct Run {
    session: SessionId,
    number: u32,
    prompt: Vec<TokenId>,
    /// Its rows, as they must be wherever they are read.
    pub rows: Vec<Row>,
    /// The pages that it exports.
    pub pages: Vec<PageId>,
    pub num_filled: Vec<u32>,
    /// The attempts that its rows are on offer for.
    pub readers: Vec<SessionKey>,
    pub is_released: bool,
}

impl PrefillNode {
    pub fn new(id: NodeId, incarnation: Incarnation, world: &World<'_>) -> Self {
        let load = world.load;
        let plan = &load.nodes[id.0 as usize];
        let hello = load.hello(id, incarnation);
        let sessions = load.sessions.clone();
        // Fewer than there may be sessions, so that some are refused.
        let max_stored = (sessions.max_sessions as usize).div_ceil(2);
        Self {
            id,
            incarnation,
            engine: Engine::new(plan, load.alphabet, load.fails_once_in),
            store: CacheStore::new(CacheStoreConfig {
                incarnation,
                max_offers: max_stored,
                max_waiting_loads: max_stored,
                tombstone_us: sessions.tombstone_us,
                max_tombstones: sessions.max_tombstones as usize,
            }),
            end: PrefillEnd::new(sessions, hello).expect("loads have valid times"),
            num_layers: load.num_layers,
            num_requests: 0,
            requests: BTreeMap::new(),
            runs: BTreeMap::new(),
            senders: BTreeMap::new(),
            wake_us: None,
        }
    }

    pub fn call(&mut self, index: usize, world: &mut World<'_>) -> Result<(), Violation> {
        let call = &world.load.calls[index];
        let session = SessionId(index as u128);
        let peer = match call.goes_remote {
            true => world.place(self.id, &[]),
            false => None,
        };
        let submission = Submission {
            session,
            request: call.request.clone(),
            max_tokens: call.max_tokens,
            deadline_us: call.deadline_us,
            siblings: call.siblings,
            trace_id: None,
        };
        let was_cancelled = call
            .cancel_us
            .is_some_and(|cancel_us| cancel_us < call.at_us);
        world.totals.num_requests += 1;
        match self.end.submit(submission, peer, world.now_us) {
            Ok(()) => {
                world.clients.submitted(session, index, world.now_us);
                Ok(())
            }
            Err(SubmissionError::TooManySessions { .. }) => {
                world.totals.num_too_many_sessions += 1;
                Ok(())
            }
            Err(SubmissionError::Ended) if was_cancelled => {
                world.totals.num_cancelled_before += 1;
                Ok(())
            }
            Err(error) => Err(world.violation("a call is taken", error.to_string())),
        }
    }

    pub fn cancel(&mut self, index: usize, world: &mut World<'_>) -> Result<(), Violation> {
        let session = SessionId(index as u128);
        let is_waiting = world.clients.is_waiting(session);
        world.clients.cancelled(session);
        let is_cancelled = self.end.cancel(session, world.now_us);
        let again = self.end.cancel(session, world.now_us);
        if is_cancelled == is_waiting && !again {
            return Ok(());
        }
        let what = format!("session {session}: {is_waiting} {is_cancelled}, again: {again}");
        Err(world.violation("a cancel takes effect once", what))
    }

    pub fn arrive(
        &mut self,
        id: ConnectionId,
        packet: Packet,
        world: &mut World<'_>,
    ) -> Result<(), Violation> {
        let (key, now_us) = (id.key, world.now_us);
        match packet {
            Packet::ToPrefill(message) => {
                world.sessions.heard(PREFILL, key, now_us);
                if matches!(message, ToPrefill::Allocated(_)) {
                    world.sessions.allocated(PREFILL, key, now_us);
                }
                world.totals.num_refusals += u64::from(matches!(message, ToPrefill::Refused(_)));
                world.totals.num_aborts += u64::from(matches!(message, ToPrefill::Abort(_)));
                let may_end = matches!(message, ToPrefill::Tokens(_) | ToPrefill::Finish(_));
                let was_waiting = world.clients.is_waiting(key.session);
                self.end.handle_message(key, message, now_us);
                self.settle(world)?;
                let has_ended = was_waiting && !world.clients.is_waiting(key.session);
                world.totals.num_completed_remotely += u64::from(may_end && has_ended);
            }
            Packet::LoadRequest {
                first_row,
                deadline_us,
            } => self.handle_load(id, first_row, deadline_us, world),
            Packet::Closed if id.wire == Wire::Control => {
                self.end.handle_stream_closed(key, now_us);
            }
            Packet::Closed => self.handle_load_closed(key, world),
            Packet::ToDecode(_) | Packet::Rows { .. } => unreachable!("sent to a prefill node"),
        }
        self.settle(world)
    }

    pub fn local(&mut self, event: LocalEvent, world: &mut World<'_>) -> Result<(), Violation> {
        let now_us = world.now_us;
        match event {
            LocalEvent::Wake => {
                self.wake_us = None;
                self.end.handle_timeout(now_us);
                self.time_out_loads(world)?;
            }
            LocalEvent::StepReturns => self.engine.return_step(),
            LocalEvent::LayerFilled {
                request,
                layer,
                end_row,
            } => self.fill(request, layer, end_row, world),
            LocalEvent::Read(key) => self.read(key, world)?,
            LocalEvent::Stopped(key) => self.handle_stopped(key, world),
            LocalEvent::LoadCancelled(_) | LocalEvent::Reserve(_) | LocalEvent::CopyEnds => {
                unreachable!("a prefill node loads nothing")
            }
        }
        self.settle(world)
    }

    pub fn place(
        &mut self,
        session: SessionId,
        tried: &[NodeId],
        world: &mut World<'_>,
    ) -> Result<(), Violation> {
        let peer = world.place(self.id, tried);
        self.end.handle_placement(session, peer, world.now_us);
        self.settle(world)
    }

    /// Carries out the actions of the machines until none is left.
    pub fn settle(&mut self, world: &mut World<'_>) -> Result<(), Violation> {
        loop {
            if let Some(action) = self.end.poll_action() {
                self.act(action, world)?;
            } else if let Some(fact) = self.engine.poll_kv_fact() {
                self.handle_fact(fact, world);
            } else if let Some(output) = self.engine.poll_output() {
                let run = &self.runs[&output.request];
                let (session, number) = (run.session, run.number);
                if self.engine.has_failed(output.request) {
                    world.clients.failed(session);
                }
                let now_us = world.now_us;
                self.end
                    .handle_local_output(session, number, output, now_us);
            } else if let Some(step) = self.engine.try_step(world.now_us, &mut world.random) {
                while let Some(fact) = self.engine.poll_kv_fact() {
                    if let KvFact::Exported {
                        request, end_row, ..
                    } = fact
                    {
                        let step_us = step.returns_us - step.begins_us;
                        for layer in 0..self.num_layers {
                            let done = u64::from(layer + 1);
                            let at_us =
                                step.begins_us + step_us * done / u64::from(self.num_layers + 1);
                            let filled = LocalEvent::LayerFilled {
                                request,
                                layer,
                                end_row,
                            };
                            self.push(at_us, filled, world);
                        }
                    }
                    self.handle_fact(fact, world);
                }
                self.push(step.returns_us, LocalEvent::StepReturns, world);
            } else {
                break;
            }
        }
        self.end.check_invariants();
        self.store.check_invariants();
        self.engine.scheduler().check_invariants();
        self.plan_wake(world);
        Ok(())
    }

    /// What must be there no longer when everything has ended.
    pub fn leftovers(&mut self) -> String {
        // Tombstones go by themselves.
        let store = self.store.stats(u64::MAX);
        let (end, engine) = (self.end.stats(), self.engine.stats());
        let is_clean = end == Default::default()
            && store == Default::default()
            && engine.num_in_use_pages + engine.num_held_pages == 0
            && engine.num_running + engine.num_waiting == 0
            && self.senders.is_empty();
        match is_clean {
            true => String::new(),
            false => format!("{end:?} {store:?} {engine:?}"),
        }
    }

    fn act(&mut self, action: PrefillAction, world: &mut World<'_>) -> Result<(), Violation> {
        let now_us = world.now_us;
        let control = |key| ConnectionId {
            key,
            wire: Wire::Control,
        };
        match action {
            PrefillAction::TryNext { session, tried } => match world.random.below(20) {
                // Placement may never answer.
                0 => {}
                1 | 2 => {
                    let at_us = now_us + world.random.below(60_000);
                    let event = Event::Place(self.id, self.incarnation, session, tried);
                    world.push(at_us, event);
                }
                _ => {
                    let peer = world.place(self.id, &tried);
                    self.end.handle_placement(session, peer, now_us);
                }
            },
            PrefillAction::OpenStream { key, node } => {
                world.totals.num_attempts += 1;
                world.totals.num_second_attempts += u64::from(key.attempt > 0);
                world.open(control(key), self.id, node);
                world.sessions.opened(PREFILL, key, self.id, now_us);
            }
            PrefillAction::Send { key, message } => {
                if message == ToDecode::Abort(AbortReason::ProtocolViolated) {
                    let what = format!("{key} is given up by its prefill node");
                    return Err(world.violation("these nodes break no protocol", what));
                }
                let packet = Packet::ToDecode(message);
                world.send(control(key), Direction::ToDecode, packet);
            }
            PrefillAction::CloseStream { key } => {
                world.close(control(key), Direction::ToDecode);
                world.sessions.closed(PREFILL, key);
            }
            PrefillAction::SubmitLocally {
                session,
                run,
                is_accepted,
                mut request,
            } => {
                self.num_requests += 1;
                request.id = RequestId(self.num_requests);
                request.arrival_us = now_us;
                world.totals.num_resumed += u64::from(!request.output.is_empty());
                self.requests.insert((session, run), request.id);
                self.runs.insert(
                    request.id,
                    Run {
                        session,
                        number: run,
                        rows: rows_of(root_row(&request.namespace), &request.prompt),
                        prompt: request.prompt.clone(),
                        pages: Vec::new(),
                        num_filled: vec![0; self.num_layers as usize],
                        readers: Vec::new(),
                        is_released: false,
                    },
                );
                match self.engine.submit(*request, is_accepted) {
                    Ok(()) => world.clients.accepted(session),
                    Err(error) => self.end.handle_local_refused(session, run, error, now_us),
                }
            }
            PrefillAction::AbortLocal { session, run } => {
                let request = self.requests[&(session, run)];
                self.engine.scheduler().abort_request(request);
            }
            PrefillAction::RenewHold {
                session,
                run,
                until_us,
            } => {
                let request = self.requests[&(session, run)];
                self.engine.scheduler().renew_hold(request, until_us);
            }
            PrefillAction::ReleaseHold { session, run } => {
                let request = self.requests[&(session, run)];
                if let Some(key) = self.reader_of(request) {
                    let what = format!("{key} reads pages of run {run}, which are let go");
                    return Err(world.violation("pages are held while they are read", what));
                }
                self.engine.scheduler().release_hold(request);
                if let Some(run) = self.runs.get_mut(&request) {
                    run.is_released = true;
                }
            }
            PrefillAction::Store {
                key, run, num_rows, ..
            } => self.offer(key, run, num_rows, world),
            PrefillAction::Delete { key } => self.delete(key, world),
            PrefillAction::Emit { session, event } => {
                let verdict = world.clients.told(session, &event, now_us);
                verdict.map_err(|what| {
                    world.violation("a client gets the lone run's tokens and one end", what)
                })?;
                if let Some(finish) = &event.finish {
                    world.totals.count_end(finish);
                }
            }
            PrefillAction::MarkSuspect { node } => {
                world.totals.num_suspects += 1;
                world.suspect(self.id, node);
            }
            PrefillAction::MarkRestarted { node, incarnation } => {
                world.totals.num_restarts_noticed += 1;
                world.note_incarnation(node, incarnation);
            }
            PrefillAction::MarkIncompatible { node, .. } => {
                world.totals.num_incompatible += 1;
                if world.load.nodes[node.0 as usize].is_compatible {
                    let what = format!("node {node} is said to be incompatible");
                    return Err(world.violation("nodes know who they can work with", what));
                }
            }
        }
        Ok(())
    }

    fn handle_fact(&mut self, fact: KvFact, world: &mut World<'_>) {
        let now_us = world.now_us;
        match fact {
            KvFact::Exported {
                request,
                first_row,
                pages,
                ..
            } => {
                let first_page = (first_row / self.engine.page_size()) as usize;
                let run = self.runs.get_mut(&request).expect("a known run");
                run.pages.truncate(first_page);
                run.pages.extend(pages);
            }
            KvFact::Declined { request } => {
                world.totals.num_exports_declined += 1;
                let run = &self.runs[&request];
                self.end
                    .handle_export_failed(run.session, run.number, now_us);
            }
            KvFact::ExportEnded { request, num_rows } => {
                let run = &self.runs[&request];
                if (num_rows as usize) < run.prompt.len() {
                    world.totals.num_exports_cut_short += 1;
                    self.end
                        .handle_export_failed(run.session, run.number, now_us);
                }
            }
            KvFact::LeaseEnded { request } => {
                world.totals.num_leases_ended += 1;
                let run = &self.runs[&request];
                self.end.handle_lease_ended(run.session, run.number, now_us);
            }
        }
    }

    pub(super) fn push(&self, at_us: u64, event: LocalEvent, world: &mut World<'_>) {
        world.push(at_us, Event::Local(self.id, self.incarnation, event));
    }

    fn plan_wake(&mut self, world: &mut World<'_>) {
        let deadlines = [
            self.end.poll_timeout(),
            self.store.poll_timeout(),
            // Past deadlines wait for the step that holds the scheduler up.
            self.engine
                .scheduler()
                .poll_deadline()
                .filter(|&deadline_us| deadline_us > world.now_us),
        ];
        let Some(at_us) = deadlines.into_iter().flatten().min() else {
            return;
        };
        if self.wake_us.is_none_or(|wake_us| at_us < wake_us) {
            self.wake_us = Some(at_us);
            self.push(at_us, LocalEvent::Wake, world);
        }
    }
}
