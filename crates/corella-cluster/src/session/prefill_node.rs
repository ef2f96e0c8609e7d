//! The prefill node's side: passes facts to the core's [`PrefillNode`](Machine) and carries out its actions.

mod attempt;
mod decision;
mod probe;
mod run;
mod session_table;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use corella_core::session::{
    ClientEvent, ExportTask, Hello, PrefillAction, SessionConfig, SessionConfigError,
    SessionFinish, Submission as SessionSubmission, SubmissionError,
};
use corella_core::{
    AdmissionError, Call, ComputePlace, DirectoryConfig, Fetching, FinishReason, LatencyObjectives,
    NodeId, PageHash, PeerTable, PrefillNode as Machine, Request, RequestError, RequestId,
    RequestOutput, Route, SchedulerStats, SessionId, StayReason,
};
use corella_engine::{
    Engine, Entry, Generate, StreamEvent, Submission, SubmitError, TokenStream, relayed_stream,
};
use corella_model::KvPages;

use super::stage_times::PrefillTimes;
use super::stay::StayCounts;
use super::wire::{self, KvAddress};
use crate::driver::{Driver, Shared};
use crate::exporter::{Exported, Exporter};
use crate::kv_connector::{KeptPrompts, PrefixFetcher};
use crate::registry::{NodeRecord, PeerBook};
use crate::tls::ClusterTls;
use crate::transport::{KvSender, PeerAddress};

use session_table::{Client, ClientFacts, SessionTable};

/// `num_sessions` is the current number; the other fields are totals since the node started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefillNodeStats {
    /// Requests of clients that have not ended.
    pub num_sessions: usize,
    /// Tokens that decode nodes have sent back.
    pub num_remote_tokens: u64,
    /// Bytes of KV rows that went to decode nodes.
    pub num_bytes_sent: u64,
    /// Loads of decode nodes that wait for their rows to be exported.
    pub num_waiting_loads: usize,
}

/// The node that clients talk to. It computes prompts, has other nodes decode the output, and
/// finishes every request even if those nodes fail.
#[derive(Clone)]
pub struct PrefillNode(Arc<Node>);

pub(super) struct Node {
    engine: Engine,
    exporter: Exporter,
    pub(super) pages: Arc<dyn KvPages>,
    hello: Hello,
    kv_address: KvAddress,
    tls: Option<ClusterTls>,
    /// Whether this node decodes requests that every decode node refuses.
    falls_back: bool,
    num_sessions: AtomicU64,
    num_remote_tokens: AtomicU64,
    times: PrefillTimes,
    stays: StayCounts,
    fetcher: Option<Arc<PrefixFetcher>>,
    fetches_always: bool,
    watch: Option<RouteWatch>,
    shared: Shared<State>,
}

pub(crate) struct State {
    node: Machine,
    book: PeerBook,
    /// The address of each node's cached blocks, for nodes that compute the same bits as this one.
    kv_addresses: HashMap<NodeId, KvAddress>,
    sessions: SessionTable,
}

/// Called with each chosen route, and with the machine as it was before the choice.
pub type RouteWatch = Arc<dyn Fn(Machine, &Call<'_>, &SchedulerStats, u64, Route) + Send + Sync>;

/// The parts that a prefill node shares with the rest of its process.
pub struct PrefillParts {
    pub sender: Arc<KvSender>,
    /// The address at which other nodes find `sender`.
    pub kv_address: KvAddress,
    pub directory: DirectoryConfig,
    pub tls: Option<ClusterTls>,
    /// Receives the engine's facts about prompts that are kept for nodes without a session.
    pub kept: Option<Arc<KeptPrompts>>,
    /// Fetches a prompt's blocks from a decode node before the prompt is computed here.
    pub fetcher: Option<Arc<PrefixFetcher>>,
    /// Blocks are fetched even if computing them is quicker.
    pub fetches_always: bool,
    pub watch: Option<RouteWatch>,
}

impl PrefillNode {
    /// Must be called within a tokio runtime.
    pub fn start(
        config: SessionConfig,
        hello: Hello,
        engine: Engine,
        parts: PrefillParts,
    ) -> Result<Self, SessionConfigError> {
        let PrefillParts {
            sender,
            kv_address,
            directory,
            tls,
            kept,
            fetcher,
            fetches_always,
            watch,
        } = parts;
        let falls_back = config.falls_back;
        let shared = Shared::new(State {
            node: Machine::new(config, directory, hello.clone())?,
            book: PeerBook::default(),
            kv_addresses: HashMap::new(),
            sessions: SessionTable::default(),
        });
        let node = Arc::new(Node {
            pages: engine.kv_pages().clone(),
            exporter: Exporter {
                sender,
                exchange: engine.kv_exchange(),
                clock: shared.clock,
            },
            hello,
            kv_address,
            tls,
            falls_back,
            num_sessions: AtomicU64::new(0),
            num_remote_tokens: AtomicU64::new(0),
            times: PrefillTimes::new(),
            stays: StayCounts::default(),
            engine,
            fetcher,
            fetches_always,
            watch,
            shared,
        });
        super::export::start_thread(&node, node.engine.subscribe_kv_facts(), kept);
        node.start_timer();
        node.start_probes();
        Ok(Self(node))
    }

    /// Gives access to the table of peers, together with the present time on its clock.
    pub fn with_peers<T>(&self, act: impl FnOnce(&mut PeerTable, u64) -> T) -> T {
        self.0.change_peers(&mut self.0.lock(), act)
    }

    /// Returns the records of all peers, healthy or not.
    pub fn records(&self) -> BTreeMap<NodeId, NodeRecord> {
        self.0.lock().book.records().clone()
    }

    /// The number of sessions that have not ended, plus the number of runs whose pages decode nodes still read.
    pub fn num_obligations(&self) -> usize {
        let stats = self.0.lock().node.sessions().stats();
        stats.num_sessions + stats.num_exports
    }

    pub fn times(&self) -> &PrefillTimes {
        &self.0.times
    }

    /// Requests meant for a decode node that continued here, by reason.
    pub fn fallbacks(&self) -> BTreeMap<&'static str, u64> {
        self.0.lock().node.sessions().fallbacks().clone()
    }

    /// Requests that no decode node was asked for, by reason.
    pub fn stays(&self) -> &StayCounts {
        &self.0.stays
    }

    /// Requests whose decode node had a part of the prompt, by the node chosen to compute the rest.
    pub fn num_decisions(&self, place: ComputePlace) -> u64 {
        self.0.lock().node.num_decisions(place)
    }

    pub fn stats(&self) -> PrefillNodeStats {
        let sender = self.0.exporter.sender.stats();
        PrefillNodeStats {
            num_waiting_loads: sender.num_waiting_loads,
            num_sessions: self.0.lock().node.sessions().stats().num_sessions,
            num_remote_tokens: self.0.num_remote_tokens.load(Ordering::Relaxed),
            num_bytes_sent: sender.num_bytes_sent,
        }
    }
}

impl Generate for PrefillNode {
    fn submit(&self, submission: Submission) -> Result<Vec<TokenStream>, SubmitError> {
        let exchange = self.0.engine.block_exchange();
        let hashes = exchange.hashes(&submission.namespace, &submission.prompt);
        let way = match &self.0.fetcher {
            Some(_) if self.0.fetches_always => Fetching::Always,
            Some(fetcher) => Fetching::IfQuicker(fetcher.node().pace()),
            None => Fetching::Never,
        };
        self.submit_by(submission, hashes, Some(way))
    }
}

/// Submits a request whose blocks are being fetched, without a second fetch.
struct Fetched {
    node: PrefillNode,
    hashes: Arc<[PageHash]>,
}

impl Generate for Fetched {
    fn submit(&self, submission: Submission) -> Result<Vec<TokenStream>, SubmitError> {
        self.node.submit_by(submission, self.hashes.clone(), None)
    }
}

impl PrefillNode {
    /// Chooses the route of a request, and submits the request by that route. `fetching` is `None` after a fetch was
    /// tried.
    fn submit_by(
        &self,
        submission: Submission,
        hashes: Arc<[PageHash]>,
        fetching: Option<Fetching>,
    ) -> Result<Vec<TokenStream>, SubmitError> {
        let node = &self.0;
        node.engine.state().check()?;
        let constraint = submission.constraint.clone();
        let source = constraint.as_ref().and_then(|it| it.source());
        let source = source.filter(|source| source.len() <= wire::MAX_CONSTRAINT_BYTES);
        let num_choices = submission.num_choices;
        let number = node.take_numbers(num_choices);
        let objectives = match node.engine.limits().enable_slo_admission {
            true => submission.objectives,
            false => LatencyObjectives::default(),
        };
        let (namespace, stopping) = (submission.namespace.clone(), submission.stopping.clone());
        let mut call = Call {
            session: node.session(number),
            namespace: &namespace,
            num_prompt_tokens: submission.prompt.len() as u32,
            stopping: &stopping,
            max_tpot_us: objectives.tpot_us,
            hashes: &hashes,
            num_choices,
            sibling: None,
            stays: stay_reason(&submission, source.as_deref()),
            fetching,
        };
        let mut route = node.route(&mut node.lock(), &call);
        if let Route::Fetch(holder) = route {
            let source = node.source(&node.lock(), holder.peer.node);
            if let Some((fetcher, source)) = source {
                let local: Arc<dyn Generate> = Arc::new(Fetched {
                    node: self.clone(),
                    hashes: hashes.clone(),
                });
                return fetcher.submit_from(submission, source, hashes, &local);
            }
            call.fetching = Some(Fetching::Never);
            route = node.route(&mut node.lock(), &call);
        }
        let (trace_id, trace) = (submission.trace_id.clone(), submission.trace.clone());
        if let Route::Here(reason) = route
            && call.stays.is_some()
        {
            node.stays.note(reason, num_choices, trace_id.as_deref());
            return node.engine.submit(submission);
        }
        let adapter = submission.adapter.clone();
        let first = Request {
            exports_kv: false,
            objectives,
            ..submission.into_request(RequestId(0), 0)
        };
        let max_tokens = node.engine.limits().check_request(&first);
        let max_tokens = max_tokens.map_err(|error| {
            node.lock().node.give_up(call.session);
            SubmitError::Refused(error)
        })?;
        let first = SessionSubmission {
            session: call.session,
            request: first,
            max_tokens,
            deadline_us: None,
            siblings: (num_choices > 1).then_some(call.session),
            adapter: adapter.as_ref().map(|adapter| adapter.fingerprint()),
            constraint: source,
            trace_id,
            asks_first: false,
        };
        let client = ClientFacts {
            adapter,
            constraint,
            trace,
        };
        node.begin_choices(number, first, client, &hashes, call, route)
    }
}

/// Returns why no decode node can be asked. Only the node that computes the prompt has the prompt's log-probabilities
/// and hidden state. A constraint without a source, or with a source above 1 MiB, cannot be sent.
fn stay_reason(submission: &Submission, source: Option<&str>) -> Option<StayReason> {
    if submission.sampling.wants_prompt_outputs() {
        return Some(StayReason::PromptOutputs);
    }
    // A session counts the tokens of an answer from its own first one.
    if !submission.output.is_empty() {
        return Some(StayReason::Resumed);
    }
    let cannot_be_sent = submission.constraint.is_some() && source.is_none();
    cannot_be_sent.then_some(StayReason::Constraint)
}

impl Node {
    /// Reserves `num_sessions` session numbers, and returns the first of them.
    fn take_numbers(&self, num_sessions: u32) -> u64 {
        let numbers = &self.num_sessions;
        numbers.fetch_add(num_sessions.into(), Ordering::Relaxed)
    }

    /// Returns a session id that is unique among all nodes, because it contains the incarnation.
    fn session(&self, number: u64) -> SessionId {
        SessionId(u128::from(self.hello.incarnation.0) << 64 | u128::from(number))
    }

    /// Chooses the route of a call.
    fn route(&self, state: &mut State, call: &Call<'_>) -> Route {
        let (here, now_us) = (self.engine.stats().scheduler, self.clock().now_us());
        let before = self.watch.as_ref().map(|_| state.node.clone());
        let route = state.node.route(call, &here, now_us);
        if let Some((watch, before)) = self.watch.as_ref().zip(before) {
            watch(before, call, &here, now_us, route);
        }
        tracing::trace!(?route, "a request is placed");
        if route == Route::Refused {
            self.warn_of_refusal(state);
        }
        route
    }

    /// Begins the first choice by its route, and chooses a route for each other choice.
    fn begin_choices(
        self: &Arc<Self>,
        number: u64,
        first: SessionSubmission,
        client: ClientFacts,
        hashes: &Arc<[PageHash]>,
        mut call: Call<'_>,
        mut route: Route,
    ) -> Result<Vec<TokenStream>, SubmitError> {
        let mut streams = Vec::with_capacity(call.num_choices as usize);
        for choice in 0..call.num_choices {
            let number = number + u64::from(choice);
            if choice > 0 {
                call.session = self.session(number);
                call.sibling = first.siblings;
                call.fetching = Some(Fetching::Never);
                route = self.route(&mut self.lock(), &call);
            }
            let mut submission = first.clone();
            submission.session = call.session;
            submission.request.sampling.choice += choice;
            let begun = self.clone();
            let begun = begun.begin(number, submission, client.clone(), hashes, route);
            // Dropping the streams of the earlier choices cancels them.
            streams.push(begun?);
        }
        Ok(streams)
    }

    fn begin(
        self: Arc<Self>,
        number: u64,
        submission: SessionSubmission,
        facts: ClientFacts,
        hashes: &Arc<[PageHash]>,
        route: Route,
    ) -> Result<TokenStream, SubmitError> {
        let id = submission.session;
        if let Route::Here(reason) = route {
            self.stays.note(reason, 1, submission.trace_id.as_deref());
        }
        let weak = Arc::downgrade(&self);
        let (relay, stream) = relayed_stream(RequestId(number), move || {
            if let Some(node) = weak.upgrade() {
                node.with(|node, now_us| node.cancel(id, now_us));
            }
        });
        let client = Client::new(relay, submission.trace_id.clone(), facts);
        let mut state = self.lock();
        state.sessions.begin(id, client);
        let hashes = hashes.clone();
        let submitted = self.tell(&mut state, |node, now_us| {
            node.submit(submission, hashes, route, now_us)
        });
        submitted.map_err(|error| {
            state.sessions.leave(id);
            match error {
                SubmissionError::Refused(error) => SubmitError::Refused(error),
                SubmissionError::TooManySessions { limit } => {
                    let num_waiting = limit as usize;
                    SubmitError::Refused(AdmissionError::QueueFull { num_waiting, limit })
                }
                SubmissionError::DuplicateSession | SubmissionError::Ended => {
                    SubmitError::Lost("a session's id came twice".into())
                }
            }
        })?;
        Ok(stream)
    }

    /// The source of another node's blocks, if this node may fetch from it.
    fn source(&self, state: &State, node: NodeId) -> Option<(&Arc<PrefixFetcher>, PeerAddress)> {
        let fetcher = self.fetcher.as_ref()?;
        let source = state.kv_addresses.get(&node)?.reach(fetcher.machine())?;
        Some((fetcher, source))
    }
}

impl Driver for Node {
    type End = Machine;
    type State = State;

    fn shared(&self) -> &Shared<State> {
        &self.shared
    }

    fn end(state: &mut State) -> &mut Machine {
        &mut state.node
    }

    fn act(self: &Arc<Self>, state: &mut State, action: PrefillAction) {
        tracing::trace!(now_us = self.clock().now_us(), ?action);
        match action {
            PrefillAction::OpenStream { key, node } => self.open(state, key, node),
            PrefillAction::Send { key, message } => self.send(state, key, message),
            PrefillAction::CloseStream { key } => state.sessions.close(key),
            PrefillAction::Decide {
                key,
                num_cached_rows,
                ..
            } => self.decide(state, key, num_cached_rows),
            PrefillAction::SubmitLocally {
                session,
                run,
                is_accepted,
                request,
            } => {
                let entry = if is_accepted {
                    Entry::Accepted
                } else {
                    Entry::Taken
                };
                self.submit_locally(state, session, run, *request, entry);
            }
            PrefillAction::AbortLocal { session, request } => {
                if let Some(reader) = state.sessions.take_reader(session, request) {
                    reader.abort();
                }
            }
            PrefillAction::Export(task) => self.export(state, task),
            PrefillAction::Emit { session, event } => self.emit(state, session, event),
            PrefillAction::MarkIncompatible { node, mismatch } => {
                probe::warn_incompatible(state, node, &mismatch);
            }
            // The peer directory has carried out these actions.
            PrefillAction::TryNext { .. }
            | PrefillAction::MarkSuspect { .. }
            | PrefillAction::MarkRestarted { .. } => {}
        }
    }
}

impl Node {
    fn emit(&self, state: &mut State, session: SessionId, event: ClientEvent) {
        let Some(client) = state.sessions.client(session) else {
            return;
        };
        let is_last = event.finish.is_some();
        let finish = match event.finish {
            Some(SessionFinish::Refused(error)) if !client.is_accepted => {
                client.relay.send(StreamEvent::Refused(error));
                return state.sessions.leave(session);
            }
            None => None,
            Some(SessionFinish::Finished(reason)) => Some(reason),
            Some(SessionFinish::Refused(error)) => Some(failed(error.to_string())),
            Some(SessionFinish::DeadlinePassed) => {
                Some(failed("the request's deadline has passed".into()))
            }
            Some(SessionFinish::DecodeLost(reason)) => {
                let reason = reason.to_string().into();
                Some(FinishReason::Error(RequestError::DecodeLost(reason)))
            }
        };
        client.accept();
        client.relay.send(StreamEvent::Output(RequestOutput {
            request: client.relay.id(),
            sample: event.sample,
            prompt_logprobs: [].into(),
            hidden_state: None,
            finish,
            num_prompt_tokens: event.num_prompt_tokens,
            cache_use: event.cache_use,
            num_output_tokens: event.num_output_tokens,
            queue_us: event.queue_us,
        }));
        if is_last {
            state.sessions.leave(session);
        }
    }
}

fn failed(reason: String) -> FinishReason {
    FinishReason::Error(RequestError::Elsewhere(reason.into()))
}
