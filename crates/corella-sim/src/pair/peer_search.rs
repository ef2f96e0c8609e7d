//! How a prefill node of a fleet carries out the routes of its calls.

use corella_core::session::{LoadKey, Peer, SessionKey, ToPrefill};
use corella_core::{
    BlockList, ComputePlace, ComputeQuery, ComputeSite, Fetching, Incarnation, NodeId, PageHash,
    Request, Route, RouteQuery, SessionId,
};

use crate::blocks::exchange::{Exchange, Wanted};
use crate::pair::peers::Peers;
use crate::pair::prefill_node::{Behind, PrefillNode};
use crate::pair::wire::{ConnectionId, Wire};
use crate::pair::world::{Event, World};
use crate::violation::Violation;

impl PrefillNode {
    pub(super) fn call_in_fleet(
        &mut self,
        index: usize,
        world: &mut World<'_>,
    ) -> Result<(), Violation> {
        let call = &world.load.calls[index];
        let pulls_always = { world.load.fleet.as_ref() }.is_some_and(|fleet| fleet.pulls_always);
        let fetching = match call.deadline_us {
            // A call with a deadline is watched from its beginning.
            Some(_) => Fetching::Never,
            None if pulls_always => Fetching::Always,
            None => self.fetching(),
        };
        self.route_call(index, Some(fetching), world)
    }

    fn fetching(&self) -> Fetching {
        let exchange = self.exchange.as_ref();
        exchange.map_or(Fetching::Never, |exchange| {
            Fetching::IfQuicker(exchange.loader.pace())
        })
    }

    /// Submits a call by its route. `fetching` is `None` behind a fetch.
    fn route_call(
        &mut self,
        index: usize,
        fetching: Option<Fetching>,
        world: &mut World<'_>,
    ) -> Result<(), Violation> {
        let call = &world.load.calls[index];
        if !call.goes_remote {
            world.placement.num_here += 1;
            return self.submit(index, None, false, world);
        }
        let route = self.route(SessionId(index as u128), &[], fetching, world);
        if let Route::Fetch(holder) = route {
            return match self.pull(holder.peer, &call.request, world) {
                Some(load) => {
                    self.pulling.insert(load, Behind::Call(index));
                    Ok(())
                }
                None => self.route_call(index, Some(Fetching::Never), world),
            };
        }
        match route {
            Route::Session { peer, asks_first } => {
                world.placement.num_near += u64::from(asks_first);
                world.placement.num_elsewhere += u64::from(!asks_first);
                self.submit(index, Some(peer), asks_first, world)
            }
            Route::Here(_) | Route::Fetch(_) => {
                world.placement.num_here += 1;
                self.submit(index, None, false, world)
            }
            Route::Refused | Route::TooSlow(_) => {
                world.placement.num_nobody += 1;
                match world.load.sessions.starts_locally {
                    true => Err(world.violation("a prefill node takes calls", index.to_string())),
                    false => Ok(()),
                }
            }
        }
    }

    fn route(
        &mut self,
        session: SessionId,
        tried: &[NodeId],
        fetching: Option<Fetching>,
        world: &World<'_>,
    ) -> Route {
        let call = &world.load.calls[session.0 as usize];
        let Request {
            namespace, prompt, ..
        } = &call.request;
        let hashes =
            { self.engine.block_hasher() }.hashes(namespace, prompt, self.engine.page_size());
        let hashes: Vec<PageHash> = hashes.collect();
        let Some(peers) = &mut self.peers else {
            return Route::Refused;
        };
        let first = { call.siblings }.and_then(|first| self.choices.get(&first).copied());
        let query = RouteQuery {
            session,
            num_prompt_tokens: prompt.len() as u32,
            num_expected_output_tokens: self.end.expected_output(
                session,
                namespace,
                &call.request.stopping,
            ),
            max_tpot_us: call.request.objectives.tpot_us,
            hashes: &hashes,
            num_choices: 1,
            stays: None,
            tried,
            sibling: first,
            // Choices are calls of their own here.
            seeks_holder: fetching.is_some() && call.siblings.is_none(),
            fetching: fetching.unwrap_or(Fetching::Never),
            here: &self.engine.stats(),
        };
        let route = peers.directory.route(&query, world.now_us);
        if let (Some(first), Route::Session { peer, .. }) = (call.siblings, route) {
            self.choices.entry(first).or_insert(peer.node);
        }
        route
    }

    /// Begins to load a prompt's blocks.
    fn pull(&mut self, from: Peer, request: &Request, world: &mut World<'_>) -> Option<LoadKey> {
        let soft_us = world.now_us + world.random.pick(&[0, 1_000, 20_000, 200_000]);
        let wanted = Wanted {
            source: Peer {
                node: self.place_of(from.node),
                ..from
            },
            namespace: request.namespace.clone(),
            tokens: request.prompt.clone(),
            soft_us,
            hard_us: soft_us + world.random.pick(&[1, 20_000, 1_000_000]),
        };
        let load = { self.exchange.as_mut()? }.start_load(wanted, &mut self.engine, world)?;
        world.placement.num_pulls += 1;
        Some(load)
    }

    /// Asks placement for another decode node.
    pub(super) fn try_next(
        &mut self,
        session: SessionId,
        tried: &[NodeId],
        world: &mut World<'_>,
    ) -> Result<(), Violation> {
        let peer = match self.peers {
            None => world.place(self.id, tried),
            Some(_) if self.end.request(session).is_none() => None,
            Some(_) => match self.route(session, tried, None, world) {
                Route::Session { peer, .. } => Some(peer),
                Route::Here(_) | Route::Fetch(_) | Route::Refused | Route::TooSlow(_) => None,
            },
        };
        if let Some(peer) = peer.filter(|peer| tried.contains(&peer.node)) {
            let what = format!("node {} is asked again for session {session}", peer.node);
            return Err(world.violation("a node is asked once", what));
        }
        self.end.handle_placement(session, peer, world.now_us);
        Ok(())
    }

    /// Learns from a decode node's message.
    pub(super) fn account(&mut self, key: SessionKey, message: &ToPrefill, world: &mut World<'_>) {
        let Some((node, place)) = self.asked.get(&key).copied().zip(place_of(key, world)) else {
            return;
        };
        let Some(peers) = &mut self.peers else {
            return;
        };
        match message {
            ToPrefill::Allocated(allocated) => {
                let peer = Peer {
                    node,
                    incarnation: key.decode_incarnation,
                };
                if let Some(request) = self.end.request(key.session) {
                    let (hasher, page_size) = (self.engine.block_hasher(), self.engine.page_size());
                    let hashes = hasher.hashes(&request.namespace, &request.prompt, page_size);
                    let (last, granted_as) = (hashes.last(), allocated.granted_as);
                    { &mut peers.directory }.handle_allocated(key.session, last, peer, granted_as);
                }
            }
            ToPrefill::LoadDone => {
                let request = &world.load.calls[key.session.0 as usize].request;
                let num_rows = request.prompt.len() as u64;
                let decode_index = place.0 as usize - world.load.num_prefill_nodes;
                let elapsed_us = num_rows * world.links().row_us[decode_index];
                let row_bytes =
                    { world.load.fleet.as_ref() }.map_or(0, |fleet| fleet.kv_bytes_per_token);
                let table = &mut peers.directory.peers;
                table.handle_transfer(node, num_rows * row_bytes, elapsed_us * 1000, world.now_us);
                world.placement.num_transfers += 1;
            }
            _ => {}
        }
    }

    /// The place of a peer in the network.
    pub(super) fn place_of(&self, node: NodeId) -> NodeId {
        { self.peers.as_ref() }.map_or(node, |peers| peers.place(node))
    }

    /// Releases the pages that a session has elsewhere.
    pub(super) fn leave(&mut self, session: SessionId) {
        if let Some(peers) = &mut self.peers {
            peers.directory.handle_left(session);
        }
    }

    pub(super) fn suspect(&mut self, node: NodeId, world: &mut World<'_>) {
        match &mut self.peers {
            Some(peers) => { &mut peers.directory.peers }.handle_session_lost(node, world.now_us),
            None => world.suspect(self.id, node),
        }
    }

    /// A node is known to have been restarted.
    pub fn handle_incarnation(&mut self, place: NodeId, incarnation: Incarnation, now_us: u64) {
        let met: Vec<_> = match &self.peers {
            Some(peers) => peers.met_at(place).collect(),
            None => vec![place],
        };
        for node in met {
            self.end.handle_incarnation(node, incarnation, now_us);
        }
    }

    /// Decides which node computes a prompt. In a pair it is drawn, also when that is known already.
    pub(super) fn decide(&mut self, key: SessionKey, world: &mut World<'_>) {
        let undecided = self.undecided.get(&key.session);
        let num_cached_rows = undecided.map_or(0, |&(_, num_rows)| num_rows);
        let request = &world.load.calls[key.session.0 as usize].request;
        let (node, fetching) = (self.asked.get(&key).copied(), self.fetching());
        let Some((node, peers)) = node.zip(self.peers.as_ref()) else {
            let place = match world.random.once_in(3) {
                true => ComputePlace::Here,
                false => ComputePlace::There,
            };
            return self.end.handle_decision(key, place, world.now_us);
        };
        let (page_size, stats) = (self.engine.page_size(), self.engine.stats());
        let (namespace, prompt) = (request.namespace.clone(), request.prompt.clone());
        let list = BlockList::new(namespace, prompt, self.engine.block_hasher(), page_size);
        let num_cached_here = self.engine.scheduler().look_up_blocks(&list) * page_size;
        let query = ComputeQuery {
            node,
            num_prompt_tokens: request.prompt.len() as u32,
            num_cached_rows,
            here: ComputeSite::of(&stats, num_cached_here),
            fetching,
        };
        let decision = peers.directory.decide(&query, world.now_us);
        match decision.place {
            ComputePlace::Here => world.placement.num_decided_here += 1,
            ComputePlace::There => world.placement.num_decided_there += 1,
        }
        let peer = Peer {
            node,
            incarnation: key.decode_incarnation,
        };
        if decision.fetches
            && let Some(load) = self.pull(peer, request, world)
        {
            self.pulling.insert(load, Behind::Decision(key));
            return;
        }
        self.end.handle_decision(key, decision.place, world.now_us);
    }

    /// Carries out the actions of loads, and goes on behind those that have begun or ended. Returns whether there was any.
    pub(super) fn settle_fleet(&mut self, world: &mut World<'_>) -> Result<bool, Violation> {
        let Some(exchange) = &mut self.exchange else {
            return Ok(false);
        };
        if exchange.settle(&mut self.engine, world)? {
            return Ok(true);
        }
        let mut pulling = self.pulling.iter();
        let known = pulling.find(|&(&load, _)| !exchange.is_undecided(load));
        let Some((&load, &behind)) = known else {
            return Ok(false);
        };
        self.pulling.remove(&load);
        match behind {
            Behind::Call(index) => self.route_call(index, None, world)?,
            Behind::Decision(key) => {
                { &mut self.end }.handle_decision(key, ComputePlace::Here, world.now_us);
            }
        }
        Ok(true)
    }

    pub(super) fn fleet_timeout(&self) -> Option<u64> {
        let load_us = { self.exchange.as_ref() }.and_then(Exchange::poll_timeout);
        let probe_us = { self.peers.as_ref() }.and_then(Peers::next_probe_us);
        [load_us, probe_us].into_iter().flatten().min()
    }

    pub(super) fn handle_fleet_timeout(&mut self, world: &mut World<'_>) {
        let now_us = world.now_us;
        if let Some(exchange) = &mut self.exchange {
            exchange.handle_timeout(now_us);
        }
        let Some(peers) = &mut self.peers else {
            return;
        };
        while let Some((peer, node)) = peers.poll_probe(now_us) {
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
