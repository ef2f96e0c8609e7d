//! A decode node: engine, session end, and loads that write pages.

use std::collections::BTreeMap;

use corella_core::session::{
    AbortReason, Allocate, Allocated, DecodeAction, DecodeEnd, Refusal, SessionConfig, SessionKey,
    ToDecode, ToPrefill,
};
use corella_core::{
    FinishReason, Incarnation, LoadReport, LostKv, NodeId, PageTable, RequestError, RequestId,
    SnapshotId,
};

use crate::executor::Row;
use crate::pair::blocks::exchange::Exchange;
use crate::pair::engine::Engine;
use crate::pair::fleet_plan::Answer;
use crate::pair::session_watch::DECODE;
use crate::pair::told_tokens::ToldTokens;
use crate::pair::wire::{ConnectionId, Direction, Packet, Wire};
use crate::pair::world::{Event, LocalEvent, World};
use crate::violation::Violation;

/// A row that has not landed: the hash of no sequence.
const NOT_LANDED: u64 = u64::MAX;

pub struct SimulatedDecodeNode {
    pub id: NodeId,
    pub incarnation: Incarnation,
    pub engine: Engine,
    pub end: DecodeEnd,
    is_draining: bool,
    num_layers: u32,
    num_requests: u64,
    requests: BTreeMap<SessionKey, Receipt>,
    keys: BTreeMap<RequestId, SessionKey>,
    /// Reservations that the scheduler has not answered yet.
    asked: BTreeMap<SessionKey, (Box<Allocate>, u64)>,
    loads: BTreeMap<SessionKey, Load>,
    told: ToldTokens,
    pub exchange: Exchange,
    wake_us: Option<u64>,
}

struct Receipt {
    request: RequestId,
    /// The page tables, one for each KV group.
    tables: Vec<PageTable>,
    state: Option<SnapshotId>,
}

/// A load that may still write rows.
struct Load {
    groups: Vec<GroupLoad>,
    num_left: usize,
    needs_state: bool,
    is_cancelled: bool,
}

/// The rows of one KV group that a load writes.
struct GroupLoad {
    first_row: u32,
    /// By row, the landed layers as bits, and the content that these layers share.
    rows: Vec<(u32, Row)>,
}

impl SimulatedDecodeNode {
    pub fn new(id: NodeId, incarnation: Incarnation, world: &mut World<'_>) -> Self {
        let workload = world.workload;
        let plan = &workload.nodes[id.0 as usize];
        let hello = workload.hello(id, incarnation);
        let sessions = SessionConfig {
            max_prompt_tokens: plan.max_prompt_tokens.unwrap_or(u32::MAX),
            ..workload.sessions.clone()
        };
        Self {
            id,
            incarnation,
            engine: Engine::new(plan, workload.alphabet, workload.fails_once_in),
            end: DecodeEnd::new(sessions, hello).expect("workloads have valid times"),
            is_draining: false,
            num_layers: workload.num_layers,
            num_requests: 0,
            requests: BTreeMap::new(),
            keys: BTreeMap::new(),
            asked: BTreeMap::new(),
            loads: BTreeMap::new(),
            told: ToldTokens::default(),
            exchange: Exchange::new(id, incarnation, world),
            wake_us: None,
        }
    }

    pub fn arrive(
        &mut self,
        from: NodeId,
        id: ConnectionId,
        packet: Packet,
        world: &mut World<'_>,
    ) -> Result<(), Violation> {
        let (key, now_us) = (id.key, world.now_us);
        match packet {
            Packet::ToDecode(message) => {
                if matches!(message, ToDecode::Hello(_)) {
                    world.sessions.opened(DECODE, key, self.id, now_us);
                }
                world.sessions.heard(DECODE, key, now_us);
                match &message {
                    ToDecode::Allocate(allocate) => {
                        let num_rows = allocate.num_rows();
                        world.sessions.asked(key, num_rows);
                    }
                    ToDecode::FirstToken(_) => world.sessions.first_token(key, now_us),
                    _ => {}
                }
                let is_abort = matches!(message, ToDecode::Abort(_));
                self.end.handle_message(from, key, message, now_us);
                self.settle(world)?;
                if is_abort && world.sessions.is_open(DECODE, key) {
                    let what = format!("{key} goes on");
                    return Err(world.violation("an abort ends a session at once", what));
                }
                return Ok(());
            }
            Packet::Closed if id.wire == Wire::Control => {
                self.end.handle_stream_closed(key, now_us);
            }
            Packet::Closed => {
                let load = self.loads.get(&key);
                if load.is_some_and(|load| !load.is_cancelled) {
                    world.totals.num_loads_failed += 1;
                    self.loads.remove(&key);
                    self.end.handle_load_failed(key, now_us);
                }
            }
            Packet::Rows {
                group,
                layer,
                rows,
                content,
            } => self.write(key, (group, layer), rows.zip(content), world)?,
            Packet::State(state) => self.write_state(key, state, world)?,
            Packet::ToPrefill(_) | Packet::LoadRequest { .. } => {
                unreachable!("sent to a decode node")
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
                self.end.handle_timeout(now_us);
                self.exchange.handle_timeout(now_us);
            }
            LocalEvent::StepReturns => self.engine.return_step(),
            LocalEvent::CopyEnds => {
                let before = self.engine.stats();
                self.engine.end_copy();
                let after = self.engine.stats();
                world.totals.num_spills += after.num_spills - before.num_spills;
                world.totals.num_restores += after.num_restores - before.num_restores;
            }
            LocalEvent::LoadCancelled(key) => {
                if self.loads.remove(&key).is_some() {
                    world.totals.num_loads_cancelled += 1;
                    self.end.handle_load_cancelled(key, now_us);
                }
            }
            LocalEvent::Reserve(key) => self.reserve(key, world),
            LocalEvent::LayerDone { .. }
            | LocalEvent::Read(_)
            | LocalEvent::Stopped(_)
            | LocalEvent::LookUp(_) => {
                unreachable!("a decode node sends no rows")
            }
        }
        self.settle(world)
    }

    /// Carries out the actions of the machines until none is left.
    pub fn settle(&mut self, world: &mut World<'_>) -> Result<(), Violation> {
        let now_us = world.now_us;
        loop {
            if let Some(action) = self.end.poll_action() {
                self.act(action, world)?;
            } else if let Some(fact) = self.engine.scheduler.poll_kv_fact() {
                let what = format!("{fact:?}");
                return Err(world.violation("a decode node exports nothing", what));
            } else if let Some(output) = self.engine.scheduler.poll_output() {
                let key = self.keys[&output.request];
                if output.finish.is_some() && !self.loads.contains_key(&key) {
                    self.keys.remove(&output.request);
                }
                if output.sample.is_some() && !world.sessions.is_open(DECODE, key) {
                    let what = format!("{key} gets a token");
                    let rule = "nothing is computed for a session that is over";
                    return Err(world.violation(rule, what));
                }
                let error = match &output.finish {
                    Some(FinishReason::Error(error)) => Some(error),
                    _ => None,
                };
                let is_back = matches!(error, Some(RequestError::KvNotKept(_)));
                world.totals.num_handed_back += u64::from(is_back);
                if output.finish.is_some() && world.sessions.is_open(DECODE, key) {
                    self.told.finish(key);
                }
                self.end.handle_local_output(key, output, now_us);
            } else if let Some(step) = self.engine.try_step(now_us, &mut world.random) {
                self.push(step.returns_us, LocalEvent::StepReturns, world);
            } else if let Some(copy_us) = self.engine.begin_copy() {
                self.push(now_us + copy_us, LocalEvent::CopyEnds, world);
            } else if self.exchange.settle(&mut self.engine, world)? {
                continue;
            } else {
                break;
            }
        }
        self.end.check_invariants();
        self.engine.scheduler.check_invariants();
        self.plan_wake(world);
        Ok(())
    }

    /// Describes state that should be gone at the end.
    pub fn leftovers(&self) -> String {
        let (end, engine) = (self.end.stats(), self.engine.stats());
        let is_clean = end == Default::default()
            && engine.num_in_use_pages + engine.num_held_pages == 0
            && engine.num_running + engine.num_waiting == 0
            && engine.num_receiving + engine.num_arrived == 0
            && self.engine.has_empty_host()
            && engine.num_fetching_pages + engine.num_block_holds == 0
            && self.loads.is_empty();
        let blocks = self.exchange.leftovers();
        match is_clean && blocks.is_empty() {
            true => String::new(),
            false => format!("{end:?} {engine:?} {blocks}"),
        }
    }

    fn act(&mut self, action: DecodeAction, world: &mut World<'_>) -> Result<(), Violation> {
        let now_us = world.now_us;
        match action {
            DecodeAction::Send { key, message } => self.send(key, message, world)?,
            DecodeAction::CloseStream { key } => {
                let verdict = self.told.close(key);
                verdict.map_err(|what| world.violation("the end of a request is told", what))?;
                world.close(ConnectionId::control(key), Direction::ToPrefill);
                world.sessions.closed(DECODE, key);
            }
            DecodeAction::Reserve {
                key,
                allocate,
                deadline_us,
            } => self.plan_reservation(key, allocate, deadline_us, world)?,
            DecodeAction::Load {
                key,
                node,
                first_row,
                num_rows,
                deadline_us,
            } => {
                self.begin_load(key, first_row, num_rows);
                world.totals.num_loads += 1;
                let id = ConnectionId::data(key);
                world.open(id, node, self.id);
                let packet = Packet::LoadRequest {
                    first_row,
                    deadline_us,
                };
                world.send(id, Direction::ToPrefill, packet);
            }
            DecodeAction::Compute { key } => {
                if self.loads.contains_key(&key) {
                    let what = format!("{key} is computed while its pages may be written to");
                    return Err(world.violation("pages are kept while they are written", what));
                }
                world.sessions.arrived(key);
                world.totals.num_computed_there += 1;
                let request = self.requests[&key].request;
                self.engine
                    .scheduler
                    .handle_kv_lost(request, LostKv::Recompute);
            }
            DecodeAction::CancelLoad { key } => {
                world.sessions.arrived(key);
                if let Some(load) = self.loads.get_mut(&key) {
                    load.is_cancelled = true;
                }
                world.close(ConnectionId::data(key), Direction::ToPrefill);
                let at_us = now_us + world.stop_us();
                self.push(at_us, LocalEvent::LoadCancelled(key), world);
            }
            DecodeAction::Arrived { key, first_token } => {
                world.sessions.arrived(key);
                let request = self.requests[&key].request;
                let scheduler = &mut self.engine.scheduler;
                if !scheduler.handle_kv_arrived(request, first_token.sample.token) {
                    scheduler.handle_kv_lost(request, LostKv::End("late".into()));
                }
            }
            DecodeAction::AbortLocal { key } => {
                let request = self.requests[&key].request;
                self.engine.scheduler.abort_request(request);
            }
            DecodeAction::Release { key } => {
                if self.loads.contains_key(&key) {
                    let what = format!("{key} gives back pages that may still be written to");
                    return Err(world.violation("pages are kept while they are written", what));
                }
                let request = self.requests[&key].request;
                let how = LostKv::End("the session has ended".into());
                self.engine.scheduler.handle_kv_lost(request, how);
            }
            DecodeAction::MarkSuspect { .. } => world.totals.num_suspects += 1,
        }
        Ok(())
    }

    fn send(
        &mut self,
        key: SessionKey,
        message: ToPrefill,
        world: &mut World<'_>,
    ) -> Result<(), Violation> {
        if message == ToPrefill::Abort(AbortReason::ProtocolViolated) {
            let what = format!("{key} is given up by its decode node");
            return Err(world.violation("these nodes break no protocol", what));
        }
        let verdict = self.told.send(key, &message);
        verdict.map_err(|what| world.violation("each token is told once", what))?;
        if let ToPrefill::Allocated(allocated) = &message {
            world.sessions.allocated(DECODE, key, world.now_us);
            let waits = allocated.granted_as.is_none();
            world.totals.num_waiting_choices += u64::from(waits);
        }
        let packet = Packet::ToPrefill(message);
        world.send(ConnectionId::control(key), Direction::ToPrefill, packet);
        Ok(())
    }

    /// Has the scheduler reserve pages, at once or later.
    fn plan_reservation(
        &mut self,
        key: SessionKey,
        allocate: Box<Allocate>,
        deadline_us: u64,
        world: &mut World<'_>,
    ) -> Result<(), Violation> {
        if self.requests.contains_key(&key) || self.asked.contains_key(&key) {
            let what = format!("{key} is reserved again");
            return Err(world.violation("an allocation is made once", what));
        }
        let limit = world.workload.nodes[self.id.0 as usize].max_prompt_tokens;
        if limit.is_some_and(|limit| allocate.prompt.len() > limit as usize) {
            let what = format!("{key} has {} tokens", allocate.prompt.len());
            return Err(world.violation("a decode node gets no prompt above its limit", what));
        }
        world.sessions.reserving(key);
        self.asked.insert(key, (allocate, deadline_us));
        if world.random.once_in(4) {
            let at_us = world.now_us + world.random.below(120_000);
            self.push(at_us, LocalEvent::Reserve(key), world);
        } else {
            self.reserve(key, world);
        }
        Ok(())
    }

    fn reserve(&mut self, key: SessionKey, world: &mut World<'_>) {
        let Some((allocate, deadline_us)) = self.asked.remove(&key) else {
            return;
        };
        if !world.sessions.is_open(DECODE, key) {
            world.totals.num_unanswered_reservations += 1;
        }
        self.num_requests += 1;
        let id = RequestId(self.num_requests);
        self.told.begin(key, allocate.output.len() as u32);
        let request = allocate.into_request(id, world.now_us);
        let nodes = &world.workload.nodes;
        let prefill_node = world.workload.calls[key.session.0 as usize].node;
        let arithmetic = nodes[prefill_node.0 as usize].arithmetic;
        let is_mixed = arithmetic != nodes[self.id.0 as usize].arithmetic;
        let answer = self.engine.reserve(request, arithmetic, deadline_us);
        let answer = answer.map(|reservation| {
            let receipt = Receipt {
                request: id,
                tables: reservation.tables,
                state: reservation.state,
            };
            if let Some(state) = receipt.state {
                // If a slot starts before the state has landed, the executor sees the state of another sequence, and
                // panics.
                self.engine.executor.write_state(state, Some(NOT_LANDED));
            }
            self.requests.insert(key, receipt);
            self.keys.insert(id, key);
            let num_cached_rows = u64::from(reservation.num_cached_rows);
            world.totals.num_cached_rows += num_cached_rows;
            if is_mixed {
                world.totals.num_mixed_cached_rows += num_cached_rows;
            }
            Allocated {
                num_cached_rows: reservation.num_cached_rows,
                granted_as: Some(reservation.granted_as),
            }
        });
        let answer = answer.map_err(|error| Refusal::from(&error));
        self.end.handle_reserved(key, answer, world.now_us);
    }

    fn begin_load(&mut self, key: SessionKey, first_row: u32, num_rows: u32) {
        let page_size = self.engine.page_size();
        let groups = self.engine.groups().iter().map(|group| {
            let first_page = group.first_page_exported(num_rows, page_size);
            let first_row = (first_page * page_size).max(first_row);
            let rows = vec![(0, None); (num_rows - first_row) as usize];
            GroupLoad { first_row, rows }
        });
        let groups: Vec<_> = groups.collect();
        self.loads.insert(
            key,
            Load {
                needs_state: self.engine.is_recurrent(),
                num_left: groups.iter().map(|group| group.rows.len()).sum(),
                groups,
                is_cancelled: false,
            },
        );
    }

    /// Writes arrived rows of one layer. A row is complete when all of its layers are.
    fn write(
        &mut self,
        key: SessionKey,
        (group, layer): (usize, u32),
        rows: impl Iterator<Item = (u32, Row)>,
        world: &mut World<'_>,
    ) -> Result<(), Violation> {
        let Some(load) = self.loads.get_mut(&key) else {
            return Ok(());
        };
        let receipt = &self.requests[&key];
        let page_size = self.engine.page_size();
        for (row, content) in rows {
            let of_group = &mut load.groups[group];
            let (layers, known) = &mut of_group.rows[(row - of_group.first_row) as usize];
            if *layers & 1 << layer != 0 {
                let what = format!("{key} gets row {row} of layer {layer} twice");
                return Err(world.violation("a row is sent once", what));
            }
            *known = match *layers {
                0 => content,
                _ => known.filter(|_| content == *known),
            };
            *layers |= 1 << layer;
            let is_whole = layers.count_ones() == self.num_layers;
            load.num_left -= usize::from(is_whole);
            world.totals.num_late_rows += u64::from(load.is_cancelled);
            let Some(page) = receipt.tables[group].page((row / page_size) as usize) else {
                let what = format!("{key} has no page for row {row} of group {group}");
                return Err(world.violation("a reservation has all pages", what));
            };
            let value = if is_whole { *known } else { None };
            self.engine
                .executor
                .write_row(page, (row % page_size) as usize, value);
        }
        self.end_whole_load(key, world);
        Ok(())
    }

    /// Writes the arrived state after all rows.
    fn write_state(
        &mut self,
        key: SessionKey,
        state: Row,
        world: &mut World<'_>,
    ) -> Result<(), Violation> {
        let Some(load) = self.loads.get_mut(&key) else {
            return Ok(());
        };
        let to = self.requests[&key].state;
        let Some(to) = to.filter(|_| std::mem::take(&mut load.needs_state)) else {
            let what = format!("{key} gets a state that it does not wait for");
            return Err(world.violation("a state is sent once", what));
        };
        self.engine.executor.write_state(to, state);
        self.end_whole_load(key, world);
        Ok(())
    }

    /// Ends a load when all rows and the state have arrived.
    fn end_whole_load(&mut self, key: SessionKey, world: &mut World<'_>) {
        let load = self.loads.get(&key);
        let is_whole = |load: &Load| load.num_left == 0 && !load.needs_state && !load.is_cancelled;
        if load.is_some_and(is_whole) {
            world.totals.num_loads_done += 1;
            self.loads.remove(&key);
            world.close(ConnectionId::data(key), Direction::ToPrefill);
            self.end.handle_load_done(key, world.now_us);
        }
    }

    /// Returns the node's answer to a probe.
    pub fn answer(&self, world: &World<'_>) -> Answer {
        let stats = self.engine.stats();
        Answer {
            incarnation: self.incarnation.0,
            page_size: self.engine.page_size(),
            is_compatible: world.workload.nodes[self.id.0 as usize].is_compatible,
            report: LoadReport::of(
                &stats,
                self.is_draining,
                world.workload.nodes[self.id.0 as usize].max_prompt_tokens,
            ),
        }
    }

    pub fn set_draining(&mut self, is_draining: bool) {
        self.is_draining = is_draining;
        self.end.set_draining(is_draining);
    }

    fn push(&self, at_us: u64, event: LocalEvent, world: &mut World<'_>) {
        world.push(at_us, Event::Local(self.id, self.incarnation, event));
    }

    fn plan_wake(&mut self, world: &mut World<'_>) {
        let deadlines = [
            self.end.poll_timeout(),
            self.exchange.poll_timeout(),
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
