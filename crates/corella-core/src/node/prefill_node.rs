//! A prefill node: its sessions, and the directory from which it chooses their decode nodes.

use alloc::collections::BTreeMap;
use alloc::sync::Arc;

use crate::fleet::compute_choice::{ComputePlace, ComputeSite};
use crate::fleet::peer_table::{PeerChange, PeerTable};
use crate::node::directory::{Directory, DirectoryConfig};
use crate::node::route::{ComputeQuery, Fetching, Route, RouteQuery, StayReason};
use crate::session::{
    Hello, NodeIncarnation, PrefillAction, PrefillEnd, SessionConfig, SessionConfigError,
    SessionKey, Submission, SubmissionError, ToPrefill,
};
use crate::stats::SchedulerStats;
use crate::{AdmissionError, Namespace, NodeId, PageHash, SessionId, StoppingCriteria};

/// Routes requests and runs their sessions.
///
/// * Commands: [`route`](Self::route), then [`submit`](Self::submit) for each choice; [`cancel`](Self::cancel)
/// * Facts: `handle_*` here, and `handle_*` of [`sessions`](Self::sessions) and [`peers`](Self::peers)
/// * Actions: [`poll_action`](Self::poll_action) and [`poll_change`](Self::poll_change), after every call until both
///   return `None`
/// * Time: [`poll_timeout`](Self::poll_timeout) gives the time of the next [`handle_timeout`](Self::handle_timeout)
#[derive(Clone, Debug)]
pub struct PrefillNode {
    end: PrefillEnd,
    directory: Directory,
    /// The sessions whose client waits.
    calls: BTreeMap<SessionId, PlacedCall>,
    /// The state of this node's engine at the last call.
    here: SchedulerStats,
    num_decisions: [u64; 2],
}

/// A session's prompt, and the node that was chosen first for this choice or for another choice of the prompt.
#[derive(Clone, Debug)]
struct PlacedCall {
    hashes: Arc<[PageHash]>,
    node: Option<NodeId>,
}

/// A client's request before it has a session.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    pub session: SessionId,
    pub namespace: &'a Namespace,
    pub num_prompt_tokens: u32,
    pub stopping: &'a StoppingCriteria,
    /// The longest useful time per output token, in microseconds.
    pub max_tpot_us: Option<u64>,
    /// The hashes of the prompt's whole blocks.
    pub hashes: &'a [PageHash],
    /// The number of choices of the prompt, each with its own session.
    pub num_choices: u32,
    /// The session of the first choice, if this call is for another choice.
    pub sibling: Option<SessionId>,
    /// The reason why the request cannot leave this node, if there is one.
    pub stays: Option<StayReason>,
    /// `None` after a fetch.
    pub fetching: Option<Fetching>,
}

/// The number of leading rows of a prompt that this node has cached, and the number that the decode node has cached.
#[derive(Clone, Copy, Debug)]
pub struct CachedRows {
    pub num_here: u32,
    pub num_there: u32,
}

impl PrefillNode {
    /// `hello` is this node's greeting.
    pub fn new(
        sessions: SessionConfig,
        directory: DirectoryConfig,
        hello: Hello,
    ) -> Result<Self, SessionConfigError> {
        Ok(Self {
            end: PrefillEnd::new(sessions, hello)?,
            directory: Directory::new(directory),
            calls: BTreeMap::new(),
            here: SchedulerStats::default(),
            num_decisions: [0; 2],
        })
    }

    /// Chooses the route of a call, and counts its pages as taken on the node that decodes it. `here` is the state of
    /// this node's engine.
    pub fn route(&mut self, call: &Call<'_>, here: &SchedulerStats, now_us: u64) -> Route {
        self.here = *here;
        let num_expected_output_tokens =
            self.end
                .expected_output(call.session, call.namespace, call.stopping);
        let sibling = call.sibling.and_then(|sibling| self.calls.get(&sibling));
        let query = RouteQuery {
            session: call.session,
            num_prompt_tokens: call.num_prompt_tokens,
            num_expected_output_tokens,
            max_tpot_us: call.max_tpot_us,
            hashes: call.hashes,
            num_choices: call.num_choices,
            stays: call.stays,
            tried: &[],
            sibling: sibling.and_then(|sibling| sibling.node),
            seeks_holder: call.fetching.is_some(),
            fetching: call.fetching.unwrap_or(Fetching::Never),
            here,
        };
        let route = self.directory.route(&query, now_us);
        if let Route::Session { peer, .. } = route
            && let Some(sibling) = call.sibling
            && let Some(sibling) = self.calls.get_mut(&sibling)
        {
            sibling.node.get_or_insert(peer.node);
        }
        route
    }

    /// Begins the session of a call along the chosen route. After an error, nothing of the call is kept.
    pub fn submit(
        &mut self,
        submission: Submission,
        hashes: Arc<[PageHash]>,
        route: Route,
        now_us: u64,
    ) -> Result<(), SubmissionError> {
        let session = submission.session;
        let (peer, asks_first) = match route {
            Route::Session { peer, asks_first } => (Some(peer), asks_first),
            Route::Here(_) => (None, false),
            Route::TooSlow(missed) => {
                let error = AdmissionError::ObjectiveMissed(missed);
                return Err(SubmissionError::Refused(error));
            }
            Route::Fetch(_) | Route::Refused => {
                return Err(SubmissionError::Refused(AdmissionError::NoDecodeNode));
            }
        };
        let call = PlacedCall {
            hashes,
            node: peer.map(|peer| peer.node),
        };
        let submission = Submission {
            asks_first,
            ..submission
        };
        let submitted = self.end.submit(submission, peer, now_us);
        match submitted {
            Ok(()) => drop(self.calls.insert(session, call)),
            Err(_) => self.directory.handle_left(session),
        }
        submitted
    }

    /// Gives up a call that was routed and is not submitted.
    pub fn give_up(&mut self, session: SessionId) {
        self.directory.handle_left(session);
    }

    /// Ends a session for its client, as [`PrefillEnd::cancel`] does.
    pub fn cancel(&mut self, session: SessionId, now_us: u64) -> bool {
        self.calls.remove(&session);
        self.end.cancel(session, now_us)
    }

    pub fn handle_message(&mut self, key: SessionKey, message: ToPrefill, now_us: u64) {
        if let ToPrefill::Allocated(allocated) = &message
            && let Some(node) = self.end.node_of(key)
        {
            let peer = NodeIncarnation {
                node,
                incarnation: key.decode_incarnation,
            };
            let call = self.calls.get(&key.session);
            let last = call.and_then(|call| call.hashes.last().copied());
            self.directory
                .handle_allocated(key.session, last, peer, allocated.granted_as);
        }
        self.end.handle_message(key, message, now_us);
    }

    /// Handles the engine's answer about the cached part of a prompt, after [`PrefillAction::Decide`], and chooses the
    /// node that computes the rest. `here` is the state of this node's engine. Returns the decode node if its blocks
    /// are to be fetched first; [`handle_fetch_begun`](Self::handle_fetch_begun) follows then.
    pub fn handle_looked_up(
        &mut self,
        key: SessionKey,
        cached: CachedRows,
        fetching: Fetching,
        here: &SchedulerStats,
        now_us: u64,
    ) -> Option<NodeIncarnation> {
        self.here = *here;
        let (node, request) = (self.end.node_of(key)?, self.end.request(key.session)?);
        let query = ComputeQuery {
            node,
            num_prompt_tokens: request.prompt.len() as u32,
            num_cached_rows: cached.num_there,
            here: ComputeSite::of(here, cached.num_here),
            fetching,
        };
        let decision = self.directory.decide(&query, now_us);
        self.num_decisions[decision.place as usize] += 1;
        if decision.fetches {
            let incarnation = key.decode_incarnation;
            return Some(NodeIncarnation { node, incarnation });
        }
        self.end.handle_decision(key, decision.place, now_us);
        None
    }

    /// Handles that the fetch of a prompt's blocks has begun, or that no blocks come. Either way, the prompt is
    /// computed here.
    pub fn handle_fetch_begun(&mut self, key: SessionKey, now_us: u64) {
        self.end.handle_decision(key, ComputePlace::Here, now_us);
    }

    /// The decode node of an attempt has received `num_bytes`, which takes `elapsed_ns` at the speed of its link.
    /// Returns the speed in bytes per second if it was unknown before.
    pub fn handle_transfer(
        &mut self,
        node: NodeId,
        num_bytes: u64,
        elapsed_ns: u64,
        now_us: u64,
    ) -> Option<u64> {
        let peers = &mut self.directory.peers;
        peers.handle_transfer(node, num_bytes, elapsed_ns, now_us)
    }

    /// Takes facts of the sessions: streams, loads, runs, exported rows.
    pub fn sessions(&mut self) -> &mut PrefillEnd {
        &mut self.end
    }

    /// Takes the registry's lists and the answers to probes.
    pub fn peers(&mut self) -> &mut PeerTable {
        &mut self.directory.peers
    }

    pub fn directory(&self) -> &Directory {
        &self.directory
    }

    /// The hashes of a prompt's blocks, while its client waits.
    pub fn hashes(&self, session: SessionId) -> Option<&Arc<[PageHash]>> {
        self.calls.get(&session).map(|call| &call.hashes)
    }

    /// The number of prompts with a part cached on a decode node whose rest was given to the node at `place`.
    pub fn num_decisions(&self, place: ComputePlace) -> u64 {
        self.num_decisions[place as usize]
    }

    /// Returns the next action of the sessions. Actions that concern the directory are already carried out, and are
    /// returned for logs and checks. Actions about an incompatible node are left out if they would fill the log.
    pub fn poll_action(&mut self) -> Option<PrefillAction> {
        loop {
            let action = self.end.poll_action()?;
            let now_us = self.end.now_us();
            match &action {
                PrefillAction::TryNext { session, tried } => {
                    let peer = self.next_peer(*session, tried, now_us);
                    self.end.handle_placement(*session, peer, now_us);
                }
                // A suspected node is probed again, which also shows whether it was restarted.
                PrefillAction::MarkSuspect { node } | PrefillAction::MarkRestarted { node, .. } => {
                    self.directory.peers.handle_session_lost(*node, now_us);
                }
                PrefillAction::MarkIncompatible { node, .. } => {
                    let peers = &mut self.directory.peers;
                    let start = peers.incarnation(*node);
                    let warns =
                        start.is_some_and(|it| peers.handle_incompatible(*node, it, now_us));
                    if !warns {
                        continue;
                    }
                }
                PrefillAction::CloseStream { key } => self.directory.handle_left(key.session),
                PrefillAction::Emit { session, event } if event.finish.is_some() => {
                    self.calls.remove(session);
                }
                _ => {}
            }
            return Some(action);
        }
    }

    /// Returns the next change among the peers. Sessions with an earlier start of a node are over.
    pub fn poll_change(&mut self, now_us: u64) -> Option<PeerChange> {
        let change = self.directory.peers.poll_change()?;
        if let PeerChange::Restarted { old, .. } = &change {
            self.end.handle_peer_lost(*old, now_us);
        }
        Some(change)
    }

    pub fn poll_timeout(&self) -> Option<u64> {
        self.end.poll_timeout()
    }

    pub fn handle_timeout(&mut self, now_us: u64) {
        self.end.handle_timeout(now_us);
    }

    /// # Panics
    /// When the bookkeeping contradicts itself.
    pub fn check_invariants(&self) {
        self.end.check_invariants();
        for &session in self.calls.keys() {
            let is_open = self.end.request(session).is_some();
            assert!(
                is_open,
                "session {session} has ended, and its prompt is kept"
            );
        }
    }

    /// Chooses another decode node for a session.
    fn next_peer(
        &mut self,
        session: SessionId,
        tried: &[NodeId],
        now_us: u64,
    ) -> Option<NodeIncarnation> {
        let request = self.end.request(session)?;
        let (namespace, stopping) = (&request.namespace, &request.stopping);
        let query = RouteQuery {
            session,
            num_prompt_tokens: request.prompt.len() as u32,
            num_expected_output_tokens: self.end.expected_output(session, namespace, stopping),
            max_tpot_us: request.objectives.tpot_us,
            hashes: &[],
            num_choices: 1,
            stays: None,
            tried,
            sibling: None,
            seeks_holder: false,
            fetching: Fetching::Never,
            here: &self.here,
        };
        match self.directory.route(&query, now_us) {
            Route::Session { peer, .. } => Some(peer),
            Route::Here(_) | Route::Fetch(_) | Route::Refused | Route::TooSlow(_) => None,
        }
    }
}
