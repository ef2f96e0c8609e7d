//! A prefill node: the core's machine, an engine, and the exports for decode nodes.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use corella_core::session::{
    AbortReason, ExportTable, ExportTableConfig, ExportTask, LoadKey, PrefillAction, SessionKey,
    ToDecode, ToPrefill,
};
use corella_core::{
    DirectoryConfig, Fetching, Incarnation, KvFact, NodeId, PrefillNode, Request, RequestId,
    SessionId, StepId,
};

use crate::pair::blocks::exchange::Exchange;
use crate::pair::engine::{Engine, PlannedStep};
use crate::pair::lease_watch::LeaseWatch;
use crate::pair::peers::SimulatedPeers;
use crate::pair::row_sender::{Export, Load, Sender};
use crate::pair::session_watch::PREFILL;
use crate::pair::wire::{ConnectionId, Direction, Packet, Wire};
use crate::pair::world::{Event, LocalEvent, World};
use crate::violation::Violation;

pub struct SimulatedPrefillNode {
    pub id: NodeId,
    pub incarnation: Incarnation,
    pub engine: Engine,
    pub machine: PrefillNode,
    pub(super) exports: ExportTable<Rc<RefCell<Export>>, Load>,
    pub(super) num_layers: u32,
    num_requests: u64,
    /// The session and the run number of each request, for checks, because the machine forgets ended runs.
    runs: BTreeMap<RequestId, (SessionId, u32)>,
    leases: LeaseWatch,
    pub(super) senders: BTreeMap<SessionKey, Sender>,
    wake_us: Option<u64>,
    pub exchange: Exchange,
    pub peers: SimulatedPeers,
    /// The decode node of each attempt.
    pub(super) asked: BTreeMap<SessionKey, NodeId>,
    /// The calls that continue when a load has begun or ended.
    pub(super) fetching_prompts: BTreeMap<LoadKey, Behind>,
    /// Sessions whose computing node is undecided, each with its attempt and the number of rows that the decode node
    /// has cached.
    pub(super) undecided: BTreeMap<SessionId, (SessionKey, u32)>,
    /// Sessions whose prompt was left to a decode node. The value is false once the session has left that node.
    left: BTreeMap<SessionId, bool>,
}

/// A call that waits for a load of blocks.
#[derive(Clone, Copy)]
pub enum Behind {
    Call(usize),
    /// A call whose request names the load's source.
    Hint(usize, Fetching),
    /// A session whose computing node is chosen after the load.
    Decision(SessionKey),
}

impl SimulatedPrefillNode {
    pub fn new(id: NodeId, incarnation: Incarnation, world: &mut World<'_>) -> Self {
        let workload = world.workload;
        let plan = &workload.nodes[id.0 as usize];
        let hello = workload.hello(id, incarnation);
        let sessions = workload.sessions.clone();
        let fleet = &workload.fleet;
        let directory = DirectoryConfig {
            peer_table: fleet.peer_table.clone(),
            placement: fleet.placement.clone(),
            falls_back: sessions.falls_back,
            page_size: plan.config.page_size,
            kv_bytes_per_token: fleet.kv_bytes_per_token,
            max_sent: fleet.max_sent,
            first_cursor: 0,
        };
        // Fewer than `max_sessions`, so that some exports are refused.
        let max_exported = (sessions.max_sessions as usize).div_ceil(2);
        Self {
            id,
            incarnation,
            engine: Engine::new(plan, workload.alphabet, workload.fails_once_in),
            exports: ExportTable::new(ExportTableConfig {
                incarnation,
                max_exports: max_exported,
                max_waiting_loads: max_exported,
                tombstone_us: sessions.tombstone_us,
                max_tombstones: sessions.max_tombstones as usize,
            }),
            machine: PrefillNode::new(sessions, directory, hello)
                .expect("workloads have valid times"),
            num_layers: workload.num_layers,
            num_requests: 0,
            runs: BTreeMap::new(),
            leases: LeaseWatch::default(),
            senders: BTreeMap::new(),
            wake_us: None,
            exchange: Exchange::new(id, incarnation, world),
            peers: SimulatedPeers::new(workload.lists_until_us()),
            asked: BTreeMap::new(),
            fetching_prompts: BTreeMap::new(),
            undecided: BTreeMap::new(),
            left: BTreeMap::new(),
        }
    }

    pub fn cancel(&mut self, index: usize, world: &mut World<'_>) -> Result<(), Violation> {
        let session = SessionId(index as u128);
        let is_waiting = world.clients.is_waiting(session);
        world.clients.cancelled(session);
        let is_cancelled = self.machine.cancel(session, world.now_us);
        let again = self.machine.cancel(session, world.now_us);
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
                self.note_transfer(key, &message, world);
                world.totals.num_refusals += u64::from(matches!(message, ToPrefill::Refused(_)));
                world.totals.num_aborts += u64::from(matches!(message, ToPrefill::Abort(_)));
                let may_end = matches!(message, ToPrefill::Tokens(_) | ToPrefill::Finish(_));
                let was_waiting = world.clients.is_waiting(key.session);
                self.machine.handle_message(key, message, now_us);
                self.settle(world)?;
                let has_ended = was_waiting && !world.clients.is_waiting(key.session);
                world.totals.num_completed_remotely += u64::from(may_end && has_ended);
            }
            Packet::LoadRequest {
                first_row,
                deadline_us,
            } => self.handle_load(id, first_row, deadline_us, world),
            Packet::Closed if id.wire == Wire::Control => {
                self.machine.sessions().handle_stream_closed(key, now_us);
            }
            Packet::Closed => self.handle_load_closed(key, world),
            Packet::ToDecode(_) | Packet::Rows { .. } | Packet::State(_) => {
                unreachable!("sent to a prefill node")
            }
        }
        self.settle(world)
    }

    pub fn local(&mut self, event: LocalEvent, world: &mut World<'_>) -> Result<(), Violation> {
        let now_us = world.now_us;
        match event {
            LocalEvent::Wake => {
                if self.wake_us != Some(now_us) {
                    // A timer for an earlier time has replaced this one.
                    return Ok(());
                }
                self.wake_us = None;
                self.machine.handle_timeout(now_us);
                self.time_out_loads(world)?;
                self.exchange.handle_timeout(now_us);
                self.probe(world);
            }
            LocalEvent::StepReturns => self.engine.return_step(),
            LocalEvent::LayerDone { step, layer } => {
                self.engine.progress.handle_layer_done(step);
                self.machine.sessions().handle_layer_done(step, layer);
            }
            LocalEvent::Read(key) => self.read(key, world)?,
            LocalEvent::Stopped(key) => self.handle_stopped(key, world),
            LocalEvent::LookUp(key) => self.look_up(key, world),
            LocalEvent::LoadCancelled(_) | LocalEvent::Reserve(_) | LocalEvent::CopyEnds => {
                unreachable!("a prefill node loads nothing")
            }
        }
        self.settle(world)
    }

    /// Carries out the actions of the machines until none is left.
    pub fn settle(&mut self, world: &mut World<'_>) -> Result<(), Violation> {
        loop {
            if let Some(action) = self.machine.poll_action() {
                self.act(action, world)?;
            } else if let Some(fact) = self.engine.scheduler.poll_kv_fact() {
                self.handle_fact(fact, world)?;
            } else if let Some(output) = self.engine.scheduler.poll_output() {
                if self.engine.has_failed(output.request) {
                    let (session, _) = self.runs[&output.request];
                    world.clients.failed(session);
                }
                self.machine
                    .sessions()
                    .handle_local_output(output, world.now_us);
            } else if let Some(step) = self.engine.try_step(world.now_us, &mut world.random) {
                let mut exports = None;
                while let Some(fact) = self.engine.scheduler.poll_kv_fact() {
                    if let KvFact::Exported { step, .. } = fact {
                        exports = Some(step);
                    }
                    self.handle_fact(fact, world)?;
                }
                if let Some(id) = exports {
                    self.plan_layers(id, &step, world);
                }
                self.push(step.returns_us, LocalEvent::StepReturns, world);
            } else if self.settle_loads(world)? {
                continue;
            } else if let Some(fact) = self.engine.scheduler.poll_kv_fact() {
                // A lease has ended, and there is no step.
                self.handle_fact(fact, world)?;
            } else {
                break;
            }
        }
        let verdict = self.leases.check(world.now_us);
        verdict.map_err(|what| world.violation("held pages have a lease", what))?;
        self.machine.check_invariants();
        self.exports.check_invariants();
        self.engine.scheduler.check_invariants();
        self.plan_wake(world);
        Ok(())
    }

    /// Describes state that should be gone at the end.
    pub fn leftovers(&mut self) -> String {
        // By `u64::MAX`, all tombstones have expired.
        let exports = self.exports.stats(u64::MAX);
        let (end, engine) = (self.machine.sessions().stats(), self.engine.stats());
        let is_clean = end == Default::default()
            && exports == Default::default()
            && engine.num_in_use_pages + engine.num_held_pages == 0
            && engine.num_running + engine.num_waiting == 0
            && engine.num_fetching_pages + engine.num_block_holds == 0
            && self.senders.is_empty()
            && self.fetching_prompts.is_empty();
        let blocks = self.exchange.leftovers();
        let placed = self.placed();
        match is_clean && blocks.is_empty() && placed.is_empty() {
            true => String::new(),
            false => format!("{end:?} {exports:?} {engine:?} {blocks} {placed}"),
        }
    }

    /// Describes reservations that outlive all sessions.
    fn placed(&mut self) -> String {
        let num_reservations = self.machine.directory().num_reservations();
        let nodes = self.machine.peers().decode_nodes(0);
        let num_pages: u32 = nodes.iter().map(|node| node.num_unreported_pages).sum();
        match num_pages == 0 && num_reservations == 0 {
            true => String::new(),
            false => format!("{num_pages} pages, {num_reservations} reservations"),
        }
    }

    fn act(&mut self, action: PrefillAction, world: &mut World<'_>) -> Result<(), Violation> {
        let now_us = world.now_us;
        let control = ConnectionId::control;
        match action {
            PrefillAction::OpenStream { key, node } => {
                world.totals.num_attempts += 1;
                world.totals.num_second_attempts += u64::from(key.attempt > 0);
                self.asked.insert(key, node);
                world.open(control(key), self.id, self.peers.place(node));
                world.sessions.opened(PREFILL, key, self.id, now_us);
            }
            PrefillAction::Send { key, message } => {
                if message == ToDecode::Abort(AbortReason::ProtocolViolated) {
                    let what = format!("{key} is given up by its prefill node");
                    return Err(world.violation("these nodes break no protocol", what));
                }
                Self::check_version(key, &message, world)?;
                if message == ToDecode::Compute {
                    self.note_compute(key, world);
                }
                let packet = Packet::ToDecode(message);
                world.send(control(key), Direction::ToDecode, packet);
            }
            PrefillAction::CloseStream { key } => {
                if key.attempt == 0 {
                    // Only the first decode node may compute the prompt.
                    self.left
                        .entry(key.session)
                        .and_modify(|left| *left = false);
                }
                world.close(control(key), Direction::ToDecode);
                world.sessions.closed(PREFILL, key);
            }
            PrefillAction::Decide {
                key,
                num_cached_rows,
                ..
            } => self.decide(key, num_cached_rows, world),
            PrefillAction::SubmitLocally {
                session,
                run,
                is_accepted,
                request,
            } => {
                if let Some((key, _)) = self.undecided.remove(&session) {
                    world.sessions.decided(key);
                }
                if self.left.get(&session) == Some(&true) {
                    let what = format!("session {session} is computed on its decode node, too");
                    return Err(world.violation("one node computes a prompt", what));
                }
                self.submit(session, run, is_accepted, *request, world);
            }
            PrefillAction::AbortLocal { request, .. } => {
                self.engine.scheduler.abort_request(request);
            }
            PrefillAction::Export(task) => self.carry_out(task, world)?,
            PrefillAction::Emit { session, event } => {
                let verdict = world.clients.told(session, &event, now_us);
                verdict.map_err(|what| {
                    world.violation("a client gets the lone run's tokens and one end", what)
                })?;
                if let Some(finish) = &event.finish {
                    world.totals.count_end(finish);
                }
            }
            PrefillAction::TryNext { .. } => {}
            PrefillAction::MarkSuspect { .. } => world.totals.num_suspects += 1,
            PrefillAction::MarkRestarted { .. } => world.totals.num_restarts_noticed += 1,
            PrefillAction::MarkIncompatible { node, .. } => {
                world.totals.num_incompatible += 1;
                let node = self.peers.place(node);
                if world.workload.nodes[node.0 as usize].is_compatible {
                    let what = format!("node {node} is said to be incompatible");
                    return Err(world.violation("nodes know which nodes are compatible", what));
                }
            }
        }
        Ok(())
    }

    /// Looks up how many rows of the prompt this node has cached, for a session whose computing node is undecided: at
    /// once, later or never.
    fn decide(&mut self, key: SessionKey, num_cached_rows: u32, world: &mut World<'_>) {
        world.totals.num_asked_first += 1;
        world.sessions.undecided(key);
        self.undecided.insert(key.session, (key, num_cached_rows));
        match world.random.below(10) {
            // The engine may never answer.
            0 => {}
            1..=3 => {
                let at_us = world.now_us + world.random.below(120_000);
                self.push(at_us, LocalEvent::LookUp(key), world);
            }
            _ => self.look_up(key, world),
        }
    }

    fn submit(
        &mut self,
        session: SessionId,
        run: u32,
        is_accepted: bool,
        mut request: Request,
        world: &mut World<'_>,
    ) {
        let goes_on = self.left.contains_key(&session) && !request.output.is_empty();
        world.totals.num_lost_after_compute += u64::from(goes_on);
        self.num_requests += 1;
        let id = RequestId(self.num_requests);
        request.id = id;
        request.arrival_us = world.now_us;
        let has_output = !request.output.is_empty();
        world.totals.num_resumed += u64::from(has_output);
        world.totals.num_moved += u64::from(has_output && request.exports_kv);
        match self.engine.submit(request, is_accepted) {
            Ok(()) => {
                self.runs.insert(id, (session, run));
                world.clients.accepted(session);
                self.machine
                    .sessions()
                    .handle_submitted(session, run, id, world.now_us);
            }
            Err(error) => {
                self.machine
                    .sessions()
                    .handle_local_refused(session, run, error, world.now_us)
            }
        }
    }

    fn carry_out(&mut self, task: ExportTask, world: &mut World<'_>) -> Result<(), Violation> {
        match task {
            ExportTask::Open {
                key, run, num_rows, ..
            } => self.export(key, run, num_rows, world),
            ExportTask::AddPages { key, tables } => {
                if let Some(export) = self.export_of(key) {
                    export.borrow_mut().add_pages(&tables);
                }
            }
            ExportTask::RowsReadable {
                key,
                layers,
                num_rows,
            } => {
                if let Some(export) = self.export_of(key) {
                    export.borrow_mut().fill(layers, num_rows);
                    self.wake_sender(key, world);
                }
            }
            ExportTask::Finish { key, state } => {
                if let Some(export) = self.export_of(key) {
                    if !export.borrow().is_readable()
                        || state.is_some() != self.engine.is_recurrent()
                    {
                        let what = format!("{key} is finished with state {state:?}");
                        let rule = "rows are readable before they are valid";
                        return Err(world.violation(rule, what));
                    }
                    export.borrow_mut().set_state(state);
                    self.wake_sender(key, world);
                }
            }
            ExportTask::Delete { key } => self.delete(key, world),
            ExportTask::RenewHold { request, until_us } => {
                if self.engine.scheduler.renew_hold(request, until_us) {
                    self.leases.renewed(request, until_us);
                }
            }
            ExportTask::ReleaseHold { request } => {
                let (session, run) = self.runs[&request];
                if let Some(key) = self.reader_of(session, run) {
                    let what = format!("{key} reads pages of run {run}, which are given back");
                    return Err(world.violation("pages are held while they are read", what));
                }
                self.engine.scheduler.release_hold(request);
                self.leases.released(request);
            }
        }
        Ok(())
    }

    fn handle_fact(&mut self, fact: KvFact, world: &mut World<'_>) -> Result<(), Violation> {
        match fact {
            KvFact::Exported { .. } => {}
            KvFact::Declined { .. } => world.totals.num_exports_declined += 1,
            KvFact::ExportEnded {
                request, num_rows, ..
            } => {
                let (session, _) = self.runs[&request];
                let prompt = &world.workload.calls[session.0 as usize].request.prompt;
                let is_whole = num_rows as usize >= prompt.len();
                world.totals.num_exports_cut_short += u64::from(!is_whole);
                self.leases.held(request, self.engine.hold_until_us());
            }
            KvFact::LeaseEnded { request } => {
                world.totals.num_leases_ended += 1;
                self.check_lease(request, world)?;
            }
        }
        self.machine.sessions().handle_kv_fact(&fact, world.now_us);
        Ok(())
    }

    /// Checks that a lease ends only for lack of reads. A read renews the lease, unless the lease was renewed less than
    /// an eighth of its time before. So a lease that runs its full time had no read in the last seven eighths of it.
    /// The check skips a lease that ends early because requests need its pages.
    fn check_lease(&mut self, request: RequestId, world: &World<'_>) -> Result<(), Violation> {
        let (session, run) = self.runs[&request];
        let by_us = world.now_us + world.links().max_stop_us;
        let until_us = self.leases.ended(request, by_us);
        let is_over = until_us.is_some_and(|until_us| until_us <= world.now_us);
        let Some(progress_us) = self.progress_us(session, run) else {
            return Ok(());
        };
        let lease_us = world.workload.sessions.hold_lease_us;
        let silent_us = world.now_us - progress_us;
        if !is_over || silent_us >= lease_us - lease_us / 8 {
            return Ok(());
        }
        let what = format!("session {session}, run {run}: rows were read {silent_us} us before");
        Err(world.violation("a lease is renewed while rows are read", what))
    }

    /// Notes that a decode node computes a session's prompt. From now on, this node must not compute the prompt.
    fn note_compute(&mut self, key: SessionKey, world: &mut World<'_>) {
        self.undecided.remove(&key.session);
        world.sessions.decided(key);
        self.left.insert(key.session, true);
    }

    /// Checks that the decode node understands a message.
    fn check_version(
        key: SessionKey,
        message: &ToDecode,
        world: &World<'_>,
    ) -> Result<(), Violation> {
        let minor = match message {
            ToDecode::Compute => 1,
            ToDecode::Allocate(allocate) if !allocate.output.is_empty() => 3,
            _ => 0,
        };
        let connections = &world.network.connections;
        let node = connections.get(&ConnectionId::control(key));
        let node = node.map(|connection| connection.decode.0 as usize);
        if node.is_some_and(|node| world.workload.nodes[node].protocol_minor < minor) {
            let what = format!("{key} is sent {message:?}");
            return Err(world.violation("nodes are sent what they understand", what));
        }
        Ok(())
    }

    /// Plans the ends of a step's layers, one after the other.
    fn plan_layers(&mut self, id: StepId, step: &PlannedStep, world: &mut World<'_>) {
        let step_us = step.returns_us - step.begins_us;
        for layer in 0..self.num_layers {
            let done = u64::from(layer + 1);
            let at_us = step.begins_us + step_us * done / u64::from(self.num_layers + 1);
            self.push(at_us, LocalEvent::LayerDone { step: id, layer }, world);
        }
    }

    pub(super) fn push(&self, at_us: u64, event: LocalEvent, world: &mut World<'_>) {
        world.push(at_us, Event::Local(self.id, self.incarnation, event));
    }

    fn plan_wake(&mut self, world: &mut World<'_>) {
        let deadlines = [
            self.machine.poll_timeout(),
            self.exports.poll_timeout(),
            self.exchange.poll_timeout(),
            self.peers.next_probe_us(&self.machine),
            // The scheduler handles passed deadlines when the running step ends.
            self.engine
                .scheduler
                .poll_deadline()
                .filter(|&deadline_us| deadline_us > world.now_us),
        ];
        let Some(at_us) = deadlines.into_iter().flatten().min() else {
            return;
        };
        let at_us = at_us.max(world.now_us);
        if self.wake_us.is_none_or(|wake_us| at_us < wake_us) {
            self.wake_us = Some(at_us);
            self.push(at_us, LocalEvent::Wake, world);
        }
    }
}
