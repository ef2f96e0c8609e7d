//! The routes of calls, as a prefill node carries them out.

use std::sync::Arc;

use corella_core::session::{
    LoadKey, NodeIncarnation, SessionKey, Submission, SubmissionError, ToPrefill,
};
use corella_core::{
    BlockList, CachedRows, Call, ComputePlace, Fetching, NodeId, PageHash, Request, Route,
    SessionId, StayReason,
};

use crate::pair::blocks::exchange::Wanted;
use crate::pair::pair_workload::PairCall;
use crate::pair::prefill_node::{Behind, SimulatedPrefillNode};
use crate::pair::wire::{ConnectionId, Wire};
use crate::pair::world::{Event, World};
use crate::violation::Violation;

fn submission(session: SessionId, call: &PairCall) -> Submission {
    Submission {
        session,
        request: call.request.clone(),
        max_tokens: call.max_tokens,
        deadline_us: call.deadline_us,
        siblings: call.siblings,
        adapter: None,
        constraint: None,
        trace_id: None,
        asks_first: false,
    }
}

impl SimulatedPrefillNode {
    pub fn call(&mut self, index: usize, world: &mut World<'_>) -> Result<(), Violation> {
        let (call, fleet) = (&world.workload.calls[index], &world.workload.fleet);
        world.totals.num_requests += 1;
        let fetching = match call.deadline_us {
            // A call with a deadline is submitted at once, so that the checks time it from its arrival.
            Some(_) => Fetching::Never,
            None if fleet.pulls_always => Fetching::Always,
            None => self.fetching(world),
        };
        if let Some(node) = call.hint.filter(|_| call.deadline_us.is_none()) {
            let incarnation = world.registry[&node];
            let source = NodeIncarnation { node, incarnation };
            if let Some(load) = self.fetch_prompt(source, &call.request, world) {
                world.placement.num_hinted += 1;
                self.fetching_prompts
                    .insert(load, Behind::Hint(index, fetching));
                return Ok(());
            }
        }
        self.route_call(index, Some(fetching), world)
    }

    fn fetching(&self, world: &World<'_>) -> Fetching {
        match world.workload.fleet.fetches {
            true => Fetching::IfQuicker(self.exchange.fetcher.pace()),
            false => Fetching::Never,
        }
    }

    /// Submits a call by its route. `fetching` is `None` after a fetch.
    fn route_call(
        &mut self,
        index: usize,
        fetching: Option<Fetching>,
        world: &mut World<'_>,
    ) -> Result<(), Violation> {
        let planned = &world.workload.calls[index];
        let session = SessionId(index as u128);
        let Request {
            namespace,
            prompt,
            stopping,
            objectives,
            ..
        } = &planned.request;
        let hasher = self.engine.block_hasher();
        let hashes = hasher.hashes(namespace, prompt, self.engine.page_size());
        let hashes: Arc<[PageHash]> = hashes.collect();
        let call = Call {
            session,
            namespace,
            num_prompt_tokens: prompt.len() as u32,
            stopping,
            max_tpot_us: objectives.tpot_us,
            hashes: &hashes,
            // In the simulation, each choice is a call.
            num_choices: 1,
            sibling: planned.siblings.filter(|&first| first != session),
            stays: (!planned.goes_remote).then_some(StayReason::PromptOutputs),
            fetching: fetching.filter(|_| planned.siblings.is_none()),
        };
        let route = self
            .machine
            .route(&call, &self.engine.stats(), world.now_us);
        match route {
            Route::Fetch(holder) => {
                let source = self.place_of(holder.peer);
                return match self.fetch_prompt(source, &planned.request, world) {
                    Some(load) => {
                        world.placement.num_prompt_fetches += 1;
                        self.fetching_prompts.insert(load, Behind::Call(index));
                        Ok(())
                    }
                    None => self.route_call(index, Some(Fetching::Never), world),
                };
            }
            Route::Session { asks_first, .. } => {
                world.placement.num_near += u64::from(asks_first);
                world.placement.num_elsewhere += u64::from(!asks_first);
            }
            Route::Here(_) => world.placement.num_here += 1,
            Route::Refused | Route::TooSlow(_) => world.placement.num_untaken += 1,
        }
        let submission = submission(session, planned);
        let was_cancelled = planned.cancel_us.is_some_and(|at_us| at_us <= world.now_us);
        match self.machine.submit(submission, hashes, route, world.now_us) {
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
            Err(SubmissionError::Refused(_)) if !world.workload.sessions.falls_back => Ok(()),
            Err(error) => Err(world.violation("a call is taken", error.to_string())),
        }
    }

    /// Returns a peer under its node number in the simulated network.
    fn place_of(&self, peer: NodeIncarnation) -> NodeIncarnation {
        let node = self.peers.place(peer.node);
        NodeIncarnation { node, ..peer }
    }

    /// Begins the fetch of a prompt's blocks.
    fn fetch_prompt(
        &mut self,
        source: NodeIncarnation,
        request: &Request,
        world: &mut World<'_>,
    ) -> Option<LoadKey> {
        let soft_us = world.now_us + world.random.pick(&[0, 1_000, 20_000, 200_000]);
        let wanted = Wanted {
            source,
            namespace: request.namespace.clone(),
            tokens: request.prompt.clone(),
            soft_us,
            hard_us: soft_us + world.random.pick(&[1, 20_000, 1_000_000]),
        };
        self.exchange.start_load(wanted, &mut self.engine, world)
    }

    /// Measures the link to a decode node that has loaded a prompt.
    pub(super) fn note_transfer(
        &mut self,
        key: SessionKey,
        message: &ToPrefill,
        world: &mut World<'_>,
    ) {
        if !matches!(message, ToPrefill::LoadDone) {
            return;
        }
        let Some((&node, place)) = self.asked.get(&key).zip(place_of(key, world)) else {
            return;
        };
        let request = &world.workload.calls[key.session.0 as usize].request;
        let num_rows = request.prompt.len() as u64;
        let decode_index = place.0 as usize - world.workload.num_prefill_nodes;
        let elapsed_ns = num_rows * world.links().row_us[decode_index] * 1000;
        let num_bytes = num_rows * world.workload.fleet.kv_bytes_per_token;
        self.machine
            .handle_transfer(node, num_bytes, elapsed_ns, world.now_us);
        world.placement.num_transfers += 1;
    }

    /// Asks the engine how much of a prompt it has cached.
    pub(super) fn look_up(&mut self, key: SessionKey, world: &mut World<'_>) {
        let Some(&(_, num_there)) = self.undecided.get(&key.session) else {
            return;
        };
        let request = &world.workload.calls[key.session.0 as usize].request;
        let (namespace, prompt) = (request.namespace.clone(), request.prompt.clone());
        let (page_size, stats) = (self.engine.page_size(), self.engine.stats());
        let list = BlockList::new(namespace, prompt, self.engine.block_hasher(), page_size);
        let num_here = self.engine.scheduler.look_up_blocks(&list) * page_size;
        let cached = CachedRows {
            num_here,
            num_there,
        };
        let fetching = self.fetching(world);
        let before = self.num_decisions();
        let source = self
            .machine
            .handle_looked_up(key, cached, fetching, &stats, world.now_us);
        let after = self.num_decisions();
        world.placement.num_decided_here += after[0] - before[0];
        world.placement.num_decided_there += after[1] - before[1];
        let Some(source) = source else {
            return;
        };
        match self.fetch_prompt(self.place_of(source), request, world) {
            Some(load) => {
                world.placement.num_prompt_fetches += 1;
                self.fetching_prompts.insert(load, Behind::Decision(key));
            }
            None => self.machine.handle_fetch_begun(key, world.now_us),
        }
    }

    fn num_decisions(&self) -> [u64; 2] {
        [ComputePlace::Here, ComputePlace::There].map(|place| self.machine.num_decisions(place))
    }

    /// Carries out the actions of loads, and continues the calls whose load has begun or ended. Returns false if there
    /// was nothing to do.
    pub(super) fn settle_loads(&mut self, world: &mut World<'_>) -> Result<bool, Violation> {
        let exchange = &mut self.exchange;
        if exchange.settle(&mut self.engine, world)? {
            return Ok(true);
        }
        let mut fetching_prompts = self.fetching_prompts.iter();
        let known = fetching_prompts.find(|&(&load, _)| !exchange.is_undecided(load));
        let Some((&load, &behind)) = known else {
            return Ok(false);
        };
        self.fetching_prompts.remove(&load);
        match behind {
            Behind::Call(index) => self.route_call(index, None, world)?,
            Behind::Hint(index, fetching) => self.route_call(index, Some(fetching), world)?,
            Behind::Decision(key) => self.machine.handle_fetch_begun(key, world.now_us),
        }
        Ok(true)
    }

    pub(super) fn probe(&mut self, world: &mut World<'_>) {
        let now_us = world.now_us;
        while let Some((peer, node)) = self.peers.poll_probe(&mut self.machine, now_us) {
            world.placement.num_probes += 1;
            let by = (self.id, self.incarnation);
            let at_us = now_us + world.latency_us();
            world.push(at_us, Event::Probe { by, peer, node });
        }
    }
}

fn place_of(key: SessionKey, world: &World<'_>) -> Option<NodeId> {
    let wire = Wire::Control;
    let connection = world.network.connections.get(&ConnectionId { key, wire });
    connection.map(|connection| connection.decode)
}
