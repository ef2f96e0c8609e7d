//! How a prefill node of a fleet finds decode nodes, and the cached blocks of its prompts.

use corella_core::session::{Peer, SessionKey, ToPrefill};
use corella_core::{BlockList, ComputePlace, ComputeSite, NodeId, Request, SessionId};

use crate::blocks::exchange::{Exchange, Wanted};
use crate::pair::directory::{Choice, Directory, Holder, Search};
use crate::pair::prefill_node::PrefillNode;
use crate::pair::wire::{ConnectionId, Wire};
use crate::pair::world::{Event, World};
use crate::violation::Violation;

impl PrefillNode {
    /// Brings back what a decode node has of the prompt, unless that node is to compute the rest, and submits the call.
    pub(super) fn call_in_fleet(
        &mut self,
        index: usize,
        world: &mut World<'_>,
    ) -> Result<(), Violation> {
        let call = &world.load.calls[index];
        let is_forced = { world.load.fleet.as_ref() }.is_some_and(|fleet| fleet.pulls_always);
        let holder = self.holder(index, world);
        let is_pulled = |holder: &Holder| {
            let place = self.predict(*holder, call.request.prompt.len() as u32, world.now_us);
            is_forced || place == ComputePlace::Here
        };
        // A call with a deadline is watched from its beginning.
        let pulled = holder.filter(|holder| call.deadline_us.is_none() && is_pulled(holder));
        let Some(holder) = pulled else {
            return self.place_call(index, !is_forced, world);
        };
        let soft_us = world.now_us + world.random.pick(&[0, 1_000, 20_000, 200_000]);
        let wanted = Wanted {
            source: holder.peer,
            namespace: call.request.namespace.clone(),
            tokens: call.request.prompt.clone(),
            soft_us,
            hard_us: soft_us + world.random.pick(&[1, 20_000, 1_000_000]),
        };
        let exchange = self.exchange.as_mut();
        let load =
            exchange.and_then(|exchange| exchange.start_load(wanted, &mut self.engine, world));
        match load {
            Some(load) => {
                world.placement.num_pulls += 1;
                self.pulling.insert(load, index);
                Ok(())
            }
            None => self.place_call(index, false, world),
        }
    }

    /// The node that is said to have a part of a call's prompt.
    fn holder(&mut self, index: usize, world: &World<'_>) -> Option<Holder> {
        let call = &world.load.calls[index];
        if !call.goes_remote || call.siblings.is_some() {
            return None;
        }
        self.directory.as_mut()?.holder(&call.request)
    }

    fn place_call(
        &mut self,
        index: usize,
        asks_holder: bool,
        world: &mut World<'_>,
    ) -> Result<(), Violation> {
        let call = &world.load.calls[index];
        let holder = match asks_holder {
            true => self.holder(index, world),
            false => None,
        };
        let near = holder.map(|holder| holder.peer.node);
        let choice = match call.goes_remote {
            true => self.choose(SessionId(index as u128), &[], near, world),
            false => Choice::Here,
        };
        match choice {
            Choice::Peer(peer) => {
                let is_near = near == Some(peer.node);
                world.placement.num_near += u64::from(is_near);
                world.placement.num_elsewhere += u64::from(!is_near);
                self.submit(index, Some(peer), is_near, world)
            }
            Choice::Here => {
                world.placement.num_here += 1;
                self.submit(index, None, false, world)
            }
            Choice::Nobody => {
                world.placement.num_nobody += 1;
                match world.load.sessions.starts_locally {
                    true => Err(world.violation("a prefill node takes calls", index.to_string())),
                    false => Ok(()),
                }
            }
        }
    }

    fn choose(
        &mut self,
        session: SessionId,
        tried: &[NodeId],
        near: Option<NodeId>,
        world: &World<'_>,
    ) -> Choice {
        let call = &world.load.calls[session.0 as usize];
        let search = Search {
            session,
            request: &call.request,
            tried,
            near,
            siblings: call.siblings,
            prefill_us: self.engine.stats().prefill_us,
        };
        let directory = self.directory.as_mut();
        directory.map_or(Choice::Nobody, |directory| {
            directory.place(&search, world.now_us)
        })
    }

    /// Asks placement for another decode node.
    pub(super) fn try_next(
        &mut self,
        session: SessionId,
        tried: &[NodeId],
        world: &mut World<'_>,
    ) -> Result<(), Violation> {
        let peer = match self.directory {
            None => world.place(self.id, tried),
            Some(_) if self.end.request(session).is_none() => None,
            Some(_) => match self.choose(session, tried, None, world) {
                Choice::Peer(peer) => Some(peer),
                Choice::Here | Choice::Nobody => None,
            },
        };
        if let Some(peer) = peer.filter(|peer| tried.contains(&peer.node)) {
            let what = format!("node {} is asked again for session {session}", peer.node);
            return Err(world.violation("a node is asked once", what));
        }
        self.end.handle_placement(session, peer, world.now_us);
        Ok(())
    }

    /// Learns from what a decode node says.
    pub(super) fn account(&mut self, key: SessionKey, message: &ToPrefill, world: &mut World<'_>) {
        let Some((node, directory)) = self.node_of(key, world).zip(self.directory.as_mut()) else {
            return;
        };
        match message {
            ToPrefill::Allocated(allocated) => {
                let peer = Peer {
                    node,
                    incarnation: key.decode_incarnation,
                };
                if let Some(request) = self.end.request(key.session) {
                    directory.handle_allocated(key.session, request, peer, allocated.granted_as);
                }
            }
            ToPrefill::LoadDone => {
                let request = &world.load.calls[key.session.0 as usize].request;
                let num_rows = request.prompt.len() as u32;
                let decode_index = node.0 as usize - world.load.num_prefill_nodes;
                let elapsed_us = u64::from(num_rows) * world.links().row_us[decode_index];
                directory.handle_transfer(node, num_rows, elapsed_us, world.now_us);
                world.placement.num_transfers += 1;
            }
            _ => {}
        }
    }

    fn node_of(&self, key: SessionKey, world: &World<'_>) -> Option<NodeId> {
        let wire = Wire::Control;
        let connection = world.network.connections.get(&ConnectionId { key, wire });
        connection.map(|connection| connection.decode)
    }

    /// Nothing is done for a session elsewhere.
    pub(super) fn leave(&mut self, session: SessionId) {
        if let Some(directory) = &mut self.directory {
            directory.handle_left(session);
        }
    }

    pub(super) fn suspect(&mut self, node: NodeId, world: &mut World<'_>) {
        match &mut self.directory {
            Some(directory) => directory.mark_suspect(node, world.now_us),
            None => world.suspect(self.id, node),
        }
    }

    /// Which node computes a prompt. In a pair it is drawn, also when that is known already.
    pub(super) fn compute_place(
        &mut self,
        key: SessionKey,
        num_cached_rows: u32,
        world: &mut World<'_>,
    ) -> ComputePlace {
        let node = self.node_of(key, world);
        let Some((node, directory)) = node.zip(self.directory.as_ref()) else {
            return match world.random.once_in(3) {
                true => ComputePlace::Here,
                false => ComputePlace::There,
            };
        };
        let Request {
            namespace, prompt, ..
        } = &world.load.calls[key.session.0 as usize].request;
        let (page_size, stats) = (self.engine.page_size(), self.engine.stats());
        let hasher = self.engine.block_hasher();
        let list = BlockList::new(namespace.clone(), prompt.clone(), hasher, page_size);
        let num_cached_here = self.engine.scheduler().look_up_blocks(&list) * page_size;
        let here = ComputeSite::of(&stats, num_cached_here);
        let num_tokens = prompt.len() as u32;
        let place = directory.compute_place(node, num_tokens, num_cached_rows, here, world.now_us);
        match place {
            ComputePlace::Here => world.placement.num_decided_here += 1,
            ComputePlace::There => world.placement.num_decided_there += 1,
        }
        place
    }

    /// Predicts the decision before the decode node is asked: the rows that were sent there are likely here as well.
    fn predict(&self, holder: Holder, num_prompt_tokens: u32, now_us: u64) -> ComputePlace {
        let here = ComputeSite::of(&self.engine.stats(), holder.num_rows);
        let directory = self.directory.as_ref();
        directory.map_or(ComputePlace::Here, |directory| {
            let (node, num_rows) = (holder.peer.node, holder.num_rows);
            directory.compute_place(node, num_prompt_tokens, num_rows, here, now_us)
        })
    }

    /// Does what loads of blocks want, and submits the calls whose load has begun or ended. Returns whether that was
    /// anything.
    pub(super) fn settle_fleet(&mut self, world: &mut World<'_>) -> Result<bool, Violation> {
        let Some(exchange) = &mut self.exchange else {
            return Ok(false);
        };
        if exchange.settle(&mut self.engine, world)? {
            return Ok(true);
        }
        let mut pulling = self.pulling.iter();
        let known = pulling.find(|&(&load, _)| !exchange.is_undecided(load));
        let Some((&load, &index)) = known else {
            return Ok(false);
        };
        self.pulling.remove(&load);
        self.place_call(index, false, world)?;
        Ok(true)
    }

    pub(super) fn fleet_timeout(&self) -> Option<u64> {
        let load_us = { self.exchange.as_ref() }.and_then(Exchange::poll_timeout);
        let probe_us = { self.directory.as_ref() }.and_then(Directory::next_probe_us);
        [load_us, probe_us].into_iter().flatten().min()
    }

    pub(super) fn handle_fleet_timeout(&mut self, world: &mut World<'_>) {
        let now_us = world.now_us;
        if let Some(exchange) = &mut self.exchange {
            exchange.handle_timeout(now_us);
        }
        let Some(directory) = &mut self.directory else {
            return;
        };
        while let Some((peer, node)) = directory.poll_probe(now_us) {
            world.placement.num_probes += 1;
            let by = (self.id, self.incarnation);
            let at_us = now_us + world.latency_us();
            world.push(at_us, Event::Probe { by, peer, node });
        }
    }
}
