//! The prefill node's side: passes facts to a [`PrefillEnd`] and carries out its actions.

mod decision;
mod run;
mod session_table;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use corella_core::session::{
    ClientEvent, ExportTask, Hello, Peer, PrefillAction, PrefillEnd, SessionConfig,
    SessionConfigError, SessionFinish, SessionKey, Submission as SessionSubmission,
    SubmissionError, ToDecode, ToPrefill,
};
use corella_core::{
    AdmissionError, ComputePlace, Fetching, FinishReason, LatencyObjectives, NodeId, PageHash,
    Request, RequestError, RequestId, RequestOutput, Route, RouteQuery, SessionId, StayReason,
};
use corella_engine::{
    Attribute, Engine, EngineState, Entry, Generate, SpanKind, StreamEvent, Submission,
    SubmitError, TokenStream, TraceScope, rare_line, relayed_stream,
};
use corella_model::KvPages;
use tracing::Instrument;

use super::link::{Link, linger};
use super::search::DecodePeers;
use super::service;
use super::stage_times::PrefillTimes;
use super::stay::StayCounts;
use super::wire::{self, Envelope, KvAddress};
use crate::driver::{Driver, Shared};
use crate::entrance::{BlockFetcher, KeptPrompts};
use crate::exporter::{Exported, Exporter};
use crate::transport::{KvSender, PeerAddress, TransferAccount};

use decision::DecisionCounts;
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
    /// Loads of decode nodes that wait for their rows to be stored.
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
    peers: Arc<dyn DecodePeers>,
    hello: Hello,
    kv_address: KvAddress,
    /// Whether this node decodes requests that every decode node refuses.
    falls_back: bool,
    num_sessions: AtomicU64,
    num_remote_tokens: AtomicU64,
    times: PrefillTimes,
    stays: StayCounts,
    decisions: DecisionCounts,
    fetcher: Option<Arc<BlockFetcher>>,
    fetches_always: bool,
    shared: Shared<State>,
}

pub(crate) struct State {
    end: PrefillEnd,
    sessions: SessionTable,
}

/// Measurements of an attempt.
struct Progress {
    /// The span of the session, within the span of its request.
    trace: Option<TraceScope>,
    opened_at: Instant,
    is_allocated: bool,
    has_decoded: bool,
}

impl Progress {
    /// Ends the session's span, for any outcome.
    fn end_trace(&self, node: NodeId) {
        let Some(trace) = &self.trace else {
            return;
        };
        trace.finish("session", self.opened_at, Instant::now(), |mut span| {
            span.kind = SpanKind::Client;
            span.with("corella.decode_node", &*node.to_string())
        });
    }
}

/// The parts of a prefill node that other subjects share.
pub struct PrefillParts {
    pub sender: Arc<KvSender>,
    /// The address at which others find `sender`.
    pub kv_address: KvAddress,
    pub peers: Arc<dyn DecodePeers>,
    /// Receives the engine's facts about prompts that are kept for nodes without a session.
    pub kept: Option<Arc<KeptPrompts>>,
    /// Fetches a prompt's blocks from a decode node before the prompt is computed here.
    pub fetcher: Option<Arc<BlockFetcher>>,
    /// Blocks are fetched even if computing them is quicker.
    pub fetches_always: bool,
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
            peers,
            kept,
            fetcher,
            fetches_always,
        } = parts;
        let falls_back = config.starts_locally;
        let end = PrefillEnd::new(config, hello.clone())?;
        let shared = Shared::new(State {
            end,
            sessions: SessionTable::default(),
        });
        let node = Arc::new(Node {
            pages: engine.kv_pages().clone(),
            exporter: Exporter {
                sender,
                exchange: engine.kv_exchange(),
                clock: shared.clock,
            },
            peers,
            hello,
            kv_address,
            falls_back,
            num_sessions: AtomicU64::new(0),
            num_remote_tokens: AtomicU64::new(0),
            times: PrefillTimes::new(),
            stays: StayCounts::default(),
            engine,
            decisions: DecisionCounts::default(),
            fetcher,
            fetches_always,
            shared,
        });
        super::export::start_thread(&node, node.engine.subscribe_kv_facts(), kept);
        node.start_timer();
        Ok(Self(node))
    }

    /// Number of sessions that have not ended, and of runs whose pages decode nodes still read.
    pub fn num_obligations(&self) -> usize {
        let stats = self.0.lock().end.stats();
        stats.num_sessions + stats.num_exports
    }

    pub fn times(&self) -> &PrefillTimes {
        &self.0.times
    }

    /// Requests meant for a decode node that continued here, by reason.
    pub fn fallbacks(&self) -> BTreeMap<&'static str, u64> {
        self.0.lock().end.fallbacks().clone()
    }

    /// Requests that no decode node was asked for, by reason.
    pub fn stays(&self) -> &StayCounts {
        &self.0.stays
    }

    /// Requests whose decode node had a part of the prompt, by the node chosen to compute the rest.
    pub fn num_decisions(&self, place: ComputePlace) -> u64 {
        self.0.decisions.get(place)
    }

    pub fn stats(&self) -> PrefillNodeStats {
        let sender = self.0.exporter.sender.stats();
        PrefillNodeStats {
            num_waiting_loads: sender.num_waiting_loads,
            num_sessions: self.0.lock().end.stats().num_sessions,
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
            Some(fetcher) => Fetching::IfQuicker(fetcher.loader().pace()),
            None => Fetching::Never,
        };
        self.submit_by(submission, hashes, Some(way))
    }
}

/// A prefill node that has begun to fetch the blocks of a prompt.
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
    /// Submits a request by its route. `fetching` is `None` behind a fetch.
    fn submit_by(
        &self,
        submission: Submission,
        hashes: Arc<[PageHash]>,
        fetching: Option<Fetching>,
    ) -> Result<Vec<TokenStream>, SubmitError> {
        let node = &self.0;
        match node.engine.state() {
            EngineState::Ready => {}
            EngineState::Draining => return Err(SubmitError::Draining),
            EngineState::Lost(reason) => return Err(SubmitError::Lost(reason)),
        }
        let constraint = submission.constraint.clone();
        let source = constraint.as_ref().and_then(|it| it.source());
        let source = source.filter(|source| source.len() <= wire::MAX_CONSTRAINT_BYTES);
        let num_choices = submission.num_choices;
        let number = node
            .num_sessions
            .fetch_add(num_choices.into(), Ordering::Relaxed);
        let here = node.engine.stats().scheduler;
        let objectives = match node.engine.limits().enable_slo_admission {
            true => submission.objectives,
            false => LatencyObjectives::default(),
        };
        let session = node.session(number);
        let (namespace, stopping) = (&submission.namespace, &submission.stopping);
        let num_expected_output_tokens = node
            .lock()
            .end
            .expected_output(session, namespace, stopping);
        let query = RouteQuery {
            session,
            num_prompt_tokens: submission.prompt.len() as u32,
            num_expected_output_tokens,
            max_tpot_us: objectives.tpot_us,
            hashes: &hashes,
            num_choices,
            // Only the node that computes the prompt has its log-probabilities and its hidden state. A constraint without
            // a source, or with a source above 1 MiB, cannot be sent.
            stays: match submission.sampling.is_told_of_prompt() {
                true => Some(StayReason::PromptOutputs),
                false => {
                    { constraint.is_some() && source.is_none() }.then_some(StayReason::Constraint)
                }
            },
            tried: &[],
            sibling: None,
            seeks_holder: fetching.is_some(),
            fetching: fetching.unwrap_or(Fetching::Never),
            here: &here,
        };
        let mut route = node.peers.route(&query);
        if let Route::Fetch(holder) = route {
            match node.source(holder.peer.node) {
                Some((fetcher, source)) => {
                    let local: Arc<dyn Generate> = Arc::new(Fetched {
                        node: self.clone(),
                        hashes: hashes.clone(),
                    });
                    return fetcher.submit_from(submission, source, hashes, &local);
                }
                None => {
                    let fetching = Fetching::Never;
                    route = node.peers.route(&RouteQuery { fetching, ..query });
                }
            }
        }
        let (trace_id, trace) = (submission.trace_id.clone(), submission.trace.clone());
        if let Route::Here(reason) = route
            && query.stays.is_some()
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
            node.peers.handle_left(query.session);
            SubmitError::Refused(error)
        })?;
        let siblings = (num_choices > 1).then_some(query.session);
        let mut sibling = None;
        let mut streams = Vec::with_capacity(num_choices as usize);
        for choice in 0..num_choices {
            let mut request = first.clone();
            request.sampling.choice += choice;
            let number = number + u64::from(choice);
            let session = node.session(number);
            if choice > 0 {
                route = node.peers.route(&RouteQuery {
                    session,
                    sibling,
                    fetching: Fetching::Never,
                    ..query
                });
            }
            let (peer, asks_first) = match route {
                Route::Session { peer, asks_first } => (Some(peer), asks_first),
                Route::Here(reason) => {
                    node.stays.note(reason, 1, trace_id.as_deref());
                    (None, false)
                }
                Route::TooSlow(missed) => {
                    let error = AdmissionError::ObjectiveMissed(missed);
                    return Err(SubmitError::Refused(error));
                }
                Route::Fetch(_) | Route::Refused => {
                    return Err(SubmitError::Refused(AdmissionError::NoDecodeNode));
                }
            };
            sibling = sibling.or(peer.map(|peer| peer.node));
            let submission = SessionSubmission {
                session,
                request,
                max_tokens,
                deadline_us: None,
                siblings,
                adapter: adapter.as_ref().map(|adapter| adapter.fingerprint()),
                constraint: source.clone(),
                trace_id: trace_id.clone(),
                asks_first,
            };
            let client = ClientFacts {
                adapter: adapter.clone(),
                constraint: constraint.clone(),
                trace: trace.clone(),
                hashes: hashes.clone(),
            };
            // Dropping the streams of the earlier choices cancels them.
            streams.push(node.clone().begin(number, submission, client, peer)?);
        }
        Ok(streams)
    }
}

impl Node {
    /// Unique among all nodes, as their incarnations are.
    fn session(&self, number: u64) -> SessionId {
        SessionId(u128::from(self.hello.incarnation.0) << 64 | u128::from(number))
    }

    fn begin(
        self: Arc<Self>,
        number: u64,
        submission: SessionSubmission,
        facts: ClientFacts,
        peer: Option<Peer>,
    ) -> Result<TokenStream, SubmitError> {
        let id = submission.session;
        let weak = Arc::downgrade(&self);
        let (relay, stream) = relayed_stream(RequestId(number), move || {
            if let Some(node) = weak.upgrade() {
                node.with(|end, now_us| end.cancel(id, now_us));
            }
        });
        let client = Client::new(relay, submission.trace_id.clone(), facts);
        self.lock().sessions.begin(id, client);
        let submitted = self.with(|end, now_us| end.submit(submission, peer, now_us));
        submitted.map_err(|error| {
            self.forget_client(&mut self.lock(), id);
            match error {
                SubmissionError::TooManySessions { limit } => SubmitError::QueueFull {
                    num_waiting: limit as usize,
                    limit,
                },
                SubmissionError::DuplicateSession | SubmissionError::Ended => {
                    SubmitError::Lost("a session's id came twice".into())
                }
            }
        })?;
        Ok(stream)
    }

    /// The hashes of a prompt's blocks, while its client waits.
    fn hashes(&self, session: SessionId) -> Option<Arc<[PageHash]>> {
        let mut state = self.lock();
        { state.sessions.client(session) }.map(|client| client.facts.hashes.clone())
    }

    /// Chooses another decode node for a session.
    fn try_next(&self, end: &PrefillEnd, session: SessionId, tried: &[NodeId]) -> Option<Peer> {
        let request = end.request(session)?;
        let here = self.engine.stats().scheduler;
        let route = self.peers.route(&RouteQuery {
            session,
            num_prompt_tokens: request.prompt.len() as u32,
            num_expected_output_tokens: end.expected_output(
                session,
                &request.namespace,
                &request.stopping,
            ),
            max_tpot_us: request.objectives.tpot_us,
            hashes: &[],
            num_choices: 1,
            stays: None,
            tried,
            sibling: None,
            seeks_holder: false,
            fetching: Fetching::Never,
            here: &here,
        });
        match route {
            Route::Session { peer, .. } => Some(peer),
            Route::Here(_) | Route::Fetch(_) | Route::Refused | Route::TooSlow(_) => None,
        }
    }

    /// The source of another node's blocks, if this node may fetch from it.
    fn source(&self, node: NodeId) -> Option<(&Arc<BlockFetcher>, PeerAddress)> {
        let fetcher = self.fetcher.as_ref()?;
        let source = self.peers.kv_address(node)?.reach(fetcher.machine())?;
        Some((fetcher, source))
    }
}

impl Driver for Node {
    type End = PrefillEnd;
    type State = State;

    fn shared(&self) -> &Shared<State> {
        &self.shared
    }

    fn end(state: &mut State) -> &mut PrefillEnd {
        &mut state.end
    }

    fn act(self: &Arc<Self>, state: &mut State, action: PrefillAction) {
        let now_us = self.clock().now_us();
        tracing::trace!(now_us, ?action);
        match action {
            PrefillAction::TryNext { session, tried } => {
                let peer = self.try_next(&state.end, session, &tried);
                state.end.handle_placement(session, peer, now_us);
            }
            PrefillAction::OpenStream { key, node } => self.open(state, key, node),
            PrefillAction::Send { key, message } => self.send(state, key, message),
            PrefillAction::CloseStream { key } => {
                state.sessions.close(key);
                self.peers.handle_left(key.session);
            }
            PrefillAction::Decide {
                key,
                node,
                num_cached_rows,
            } => self.decide(state, key, node, num_cached_rows),
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
            // A suspected node is probed again, which also shows whether it was restarted.
            PrefillAction::MarkSuspect { node } | PrefillAction::MarkRestarted { node, .. } => {
                self.peers.mark_suspect(node);
            }
            PrefillAction::MarkIncompatible { node, mismatch } => {
                self.peers.mark_incompatible(node, &mismatch);
            }
        }
    }
}

impl Node {
    fn open(self: &Arc<Self>, state: &mut State, key: SessionKey, node: NodeId) {
        let Some(channel) = self.peers.channel(node) else {
            return state.end.handle_stream_closed(key, self.clock().now_us());
        };
        let (link, outgoing, mut closed) = Link::new();
        state.sessions.open(key, link);
        let client = state.sessions.client(key.session);
        let client = client.as_deref();
        let trace_id = client.and_then(|client| client.trace_id.as_deref());
        let span = tracing::info_span!(parent: None, "session", %key, trace_id);
        let trace = client.and_then(|client| client.facts.trace.as_ref());
        let trace = trace.map(TraceScope::child);
        let context = trace.as_ref().map(TraceScope::context);
        let mut progress = Progress {
            trace,
            opened_at: Instant::now(),
            is_allocated: false,
            has_decoded: false,
        };
        let this = self.clone();
        let serve = async move {
            match service::open(channel, outgoing, context).await {
                Ok(mut incoming) => {
                    while let Some(envelope) = closed.next(&mut incoming).await {
                        let Some(body) = envelope.body else {
                            // This kind of message comes from a later version.
                            continue;
                        };
                        match wire::from_decode(body, &this.hello) {
                            Ok(message) => {
                                this.account(key, node, &message, &mut progress);
                                this.with(|end, now_us| end.handle_message(key, message, now_us));
                            }
                            Err(error) => {
                                rare_line!(warn, %key, %error, "a decode node breaks the protocol");
                                break;
                            }
                        }
                    }
                    this.handle_closed(key);
                    progress.end_trace(node);
                    linger(incoming).await;
                }
                Err(status) => {
                    tracing::debug!(%status, "a decode node cannot be reached");
                    this.handle_closed(key);
                }
            }
        };
        self.spawn(serve.instrument(span));
    }

    /// Records the load and link speed that a decode node reports.
    fn account(&self, key: SessionKey, node: NodeId, message: &ToPrefill, progress: &mut Progress) {
        match message {
            ToPrefill::Allocated(allocated) => {
                if !std::mem::replace(&mut progress.is_allocated, true) {
                    let seconds = progress.opened_at.elapsed().as_secs_f64();
                    self.times.allocate.observe(seconds);
                    tracing::debug!(%node, "a decode node takes the request");
                }
                let incarnation = key.decode_incarnation;
                let peer = Peer { node, incarnation };
                let last = self
                    .hashes(key.session)
                    .and_then(|hashes| hashes.last().copied());
                self.peers
                    .handle_allocated(key.session, last, peer, allocated.granted_as);
            }
            ToPrefill::LoadDone => {
                if let Some(account) = self.exporter.sender.handle_loaded(&key) {
                    self.account_transfer(key, node, &account, progress);
                }
            }
            ToPrefill::Tokens(tokens) => {
                let num_tokens = tokens.samples.len() as u64;
                self.num_remote_tokens
                    .fetch_add(num_tokens, Ordering::Relaxed);
                if !std::mem::replace(&mut progress.has_decoded, true)
                    && let Some(attempt) = self.lock().sessions.attempt(key)
                    && let Some(since) = attempt.handed_over_at.take()
                {
                    self.times.handover.observe(since.elapsed().as_secs_f64());
                }
            }
            _ => {}
        }
    }

    fn account_transfer(
        &self,
        key: SessionKey,
        node: NodeId,
        account: &TransferAccount,
        progress: &Progress,
    ) {
        let (Some(first), Some(received)) = (account.first_byte_at, account.received_at) else {
            return;
        };
        let seconds = received.saturating_duration_since(first).as_secs_f64();
        self.times.transfer.observe(seconds);
        if let Some(trace) = &progress.trace {
            trace.child().finish("transfer", first, received, |span| {
                let num_bytes = i64::try_from(account.num_bytes).unwrap_or(i64::MAX);
                span.with("corella.kv_bytes", Attribute::Number(num_bytes))
            });
        }
        let sender = &self.exporter.sender;
        let bandwidth = sender.bandwidth_bytes_per_s(key.decode_incarnation.0);
        let Some(bytes_per_s) = bandwidth.filter(|_| account.num_bytes > 0) else {
            return;
        };
        let alone = account.num_bytes as f64 / bytes_per_s;
        let elapsed = Duration::from_secs_f64(alone);
        self.peers.handle_transfer(node, account.num_bytes, elapsed);
        if let (Some(computed), Some(last)) = (account.computed_at, account.last_byte_at) {
            let tail = last.saturating_duration_since(computed).as_secs_f64();
            self.times
                .hidden_share
                .observe((1.0 - tail / alone).max(0.0));
        }
    }

    fn handle_closed(self: &Arc<Self>, key: SessionKey) {
        self.with(|end, now_us| end.handle_stream_closed(key, now_us));
        self.lock().sessions.close(key);
    }

    fn send(&self, state: &mut State, key: SessionKey, message: ToDecode) {
        let Some(attempt) = state.sessions.attempt(key) else {
            return;
        };
        let is_first = matches!(message, ToDecode::Hello(_));
        if matches!(message, ToDecode::FirstToken(_)) {
            attempt.handed_over_at = Some(Instant::now());
        }
        let envelope = Envelope {
            key: is_first.then(|| key.into()),
            body: Some(wire::to_decode(message, &self.kv_address)),
        };
        if !attempt.link.send(envelope) {
            state.sessions.close(key);
            state.end.handle_stream_closed(key, self.clock().now_us());
        }
    }

    fn emit(&self, state: &mut State, session: SessionId, event: ClientEvent) {
        let Some(client) = state.sessions.client(session) else {
            return;
        };
        let is_last = event.finish.is_some();
        let finish = match event.finish {
            Some(SessionFinish::Refused(error)) if !client.is_accepted => {
                client.relay.send(StreamEvent::Refused(error));
                return self.forget_client(state, session);
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
            prompt_logprobs: Vec::new(),
            hidden_state: None,
            finish,
            num_prompt_tokens: event.num_prompt_tokens,
            num_cached_tokens: event.num_cached_tokens,
            num_output_tokens: event.num_output_tokens,
            queue_us: event.queue_us,
        }));
        if is_last {
            self.forget_client(state, session);
        }
    }

    fn forget_client(&self, state: &mut State, session: SessionId) {
        state.sessions.leave(session);
        self.peers.handle_left(session);
    }
}

fn failed(reason: String) -> FinishReason {
    FinishReason::Error(RequestError::Elsewhere(reason.into()))
}
