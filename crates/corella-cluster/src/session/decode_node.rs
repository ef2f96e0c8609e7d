//! The decode node's side: passes facts to a [`DecodeEnd`] and carries out its actions.

use std::collections::HashMap;
use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use corella_core::session::{
    Allocate, Allocated, DecodeAction, DecodeEnd, Hello, Refusal, SessionConfig,
    SessionConfigError, SessionKey, ToDecode, ToPrefill,
};
use corella_core::{Arithmetic, LoadReport, LostKv, NodeId, PageTable, RequestId, SnapshotId};
use corella_engine::{
    ConstraintMaker, Engine, EngineState, KvExchange, OutputMeter, Receipt, SpanKind, StreamEvent,
    Submission, SubmitError, TraceScope, rare_line,
};
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tonic::{Status, Streaming};
use tracing::Instrument;

use super::link::{Link, LinkClosed, linger};
use super::service::SessionHandler;
use super::stage_times::DecodeTimes;
use super::wire::{self, Body, Envelope, KvAddress};
use crate::driver::{Driver, Shared};
use crate::peer_log::PeerLog;
use crate::transport::{KvReceiver, LoadHandle, LoadRequest};

/// The limit of prefill nodes that get a `NodeId` of their own. All further prefill nodes share one, and count as one
/// node.
const MAX_NAMES: usize = 4096;

/// A node that takes over requests whose prompt another node computes.
pub struct DecodeNode {
    engine: Engine,
    exchange: KvExchange,
    receiver: Arc<KvReceiver>,
    hello: Hello,
    /// Makes constraints. If `None`, requests with constraints are refused.
    constraints: Option<Arc<dyn ConstraintMaker>>,
    site: NodeSite,
    /// The longest prompt that this node takes. `None` means no limit.
    max_prompt_tokens: Option<u32>,
    /// Counts the outputs of other nodes' requests for the metrics.
    meter: Option<Arc<dyn OutputMeter>>,
    is_draining: AtomicBool,
    times: DecodeTimes,
    log: PeerLog,
    shared: Shared<State>,
}

/// The location of a decode node.
#[derive(Clone, Debug, Default)]
pub struct NodeSite {
    /// The name of this host, if rows may be loaded inside the host.
    pub host: Option<String>,
    /// The address from which other nodes load this node's cached blocks.
    pub kv_address: KvAddress,
}

/// The parts that a decode node shares with the rest of its process.
pub struct DecodeParts {
    pub receiver: Arc<KvReceiver>,
    /// Makes constraints. If `None`, requests with constraints are refused.
    pub constraints: Option<Arc<dyn ConstraintMaker>>,
    pub site: NodeSite,
    /// Counts the outputs of other nodes' requests for the metrics.
    pub meter: Option<Arc<dyn OutputMeter>>,
}

pub(crate) struct State {
    end: DecodeEnd,
    links: HashMap<SessionKey, PeerLink>,
    requests: HashMap<SessionKey, LocalRequest>,
    loads: HashMap<SessionKey, Arc<LoadHandle>>,
    /// The `NodeId`s of prefill nodes, by name.
    names: HashMap<Box<str>, NodeId>,
}

struct PeerLink {
    link: Link<Result<Envelope, Status>>,
    kv_address: KvAddress,
}

struct LocalRequest {
    id: RequestId,
    /// The arithmetic of the request's rows.
    arithmetic: Arithmetic,
    /// The pages of the prompt by KV group, once they are reserved.
    tables: Vec<PageTable>,
    /// The destination of the request's recurrent state.
    state: Option<SnapshotId>,
    asked_at: Instant,
    /// Whether the KV rows have arrived or will never come. Before that, the pages may be freed only at `Release`.
    has_arrived: bool,
    /// How the request started. `None` before the start, and after the first drawn token.
    start: Option<Start>,
    /// Reads the request's outputs. Aborting this task drops the stream, which aborts the request.
    reader: AbortHandle,
}

/// How another node's request started.
enum Start {
    /// The request's KV rows and first token have arrived.
    Arrived(Instant),
    /// This node computes the prompt.
    Computed,
}

impl DecodeNode {
    /// Must be called within a tokio runtime.
    pub fn start(
        config: SessionConfig,
        hello: Hello,
        engine: Engine,
        parts: DecodeParts,
    ) -> Result<Arc<Self>, SessionConfigError> {
        let max_prompt_tokens = Some(config.max_prompt_tokens).filter(|&most| most < u32::MAX);
        let end = DecodeEnd::new(config, hello.clone())?;
        let node = Arc::new(Self {
            max_prompt_tokens,
            exchange: engine.kv_exchange(),
            engine,
            receiver: parts.receiver,
            hello,
            constraints: parts.constraints,
            site: parts.site,
            meter: parts.meter,
            is_draining: AtomicBool::new(false),
            times: DecodeTimes::new(),
            log: PeerLog::default(),
            shared: Shared::new(State {
                end,
                links: HashMap::new(),
                requests: HashMap::new(),
                loads: HashMap::new(),
                names: HashMap::new(),
            }),
        });
        node.start_timer();
        Ok(node)
    }

    /// Refuses new sessions from now on, or accepts them again.
    pub fn set_draining(&self, is_draining: bool) {
        self.is_draining.store(is_draining, Ordering::Relaxed);
        self.lock().end.set_draining(is_draining);
    }

    fn is_draining(&self) -> bool {
        self.is_draining.load(Ordering::Relaxed)
    }

    pub fn times(&self) -> &DecodeTimes {
        &self.times
    }

    /// The number of sessions that have not ended, or whose pages may still be written to.
    pub fn num_sessions(&self) -> usize {
        self.lock().end.stats().num_sessions
    }
}

impl Driver for DecodeNode {
    type End = DecodeEnd;
    type State = State;

    fn shared(&self) -> &Shared<State> {
        &self.shared
    }

    fn end(state: &mut State) -> &mut DecodeEnd {
        &mut state.end
    }

    fn act(self: &Arc<Self>, state: &mut State, action: DecodeAction) {
        let now_us = self.clock().now_us();
        tracing::trace!(now_us, ?action);
        match action {
            DecodeAction::Send { key, message } => self.send(state, key, message),
            DecodeAction::CloseStream { key } => drop(state.links.remove(&key)),
            DecodeAction::Reserve {
                key,
                allocate,
                deadline_us,
            } => self.handle_allocate(state, key, *allocate, deadline_us),
            DecodeAction::Load {
                key,
                first_row,
                num_rows,
                deadline_us,
                ..
            } => self.load(state, key, first_row, num_rows, deadline_us),
            DecodeAction::CancelLoad { key } => {
                if let Some(load) = state.loads.remove(&key) {
                    load.cancel();
                }
                state.end.handle_load_cancelled(key, now_us);
            }
            DecodeAction::Arrived { key, first_token } => {
                state.loads.remove(&key);
                if let Some(request) = state.requests.get_mut(&key) {
                    request.has_arrived = true;
                    request.start = Some(Start::Arrived(Instant::now()));
                    let token = first_token.sample.token;
                    self.exchange.handle_kv_arrived(request.id, token);
                }
            }
            DecodeAction::Compute { key } => {
                if let Some(request) = state.requests.get_mut(&key) {
                    tracing::debug!(%key, "this node computes the rest of a prompt");
                    request.has_arrived = true;
                    request.start = Some(Start::Computed);
                    self.exchange.handle_kv_lost(request.id, LostKv::Recompute);
                }
            }
            DecodeAction::AbortLocal { key } => {
                if let Some(request) = state.requests.get(&key) {
                    request.reader.abort();
                    if request.has_arrived {
                        state.requests.remove(&key);
                    }
                }
            }
            DecodeAction::Release { key } => {
                state.loads.remove(&key);
                if let Some(request) = state.requests.remove(&key) {
                    let how = LostKv::End("its prefill node has given it up".into());
                    self.exchange.handle_kv_lost(request.id, how);
                    request.reader.abort();
                }
            }
            DecodeAction::MarkSuspect { node } => {
                let names = state.names.iter().find(|(_, number)| **number == node);
                let name = names.map_or("of an unknown name", |(name, _)| name);
                if self.log.is_due(name, Instant::now()) {
                    tracing::warn!("the prefill node {name} does not answer");
                }
            }
        }
    }
}

impl DecodeNode {
    fn handle_allocate(
        self: &Arc<Self>,
        state: &mut State,
        key: SessionKey,
        allocate: Allocate,
        deadline_us: u64,
    ) {
        let now_us = self.clock().now_us();
        let source = allocate.constraint.clone();
        let adapters = self.engine.served_adapters();
        let adapter = allocate.adapter.map(|adapter| adapters.find(adapter));
        if let Some(None) = adapter {
            let refused = Err(Refusal::Unsuitable);
            return state.end.handle_reserved(key, refused, now_us);
        }
        let submission = Submission {
            adapter: adapter.flatten(),
            ..allocate.into_request(RequestId(0), now_us).into()
        };
        match source {
            None => self.reserve(state, key, submission, deadline_us),
            Some(source) => {
                let reserving = self.clone();
                self.spawn(reserving.reserve_with_constraint(key, source, submission, deadline_us));
            }
        }
    }

    fn send(&self, state: &mut State, key: SessionKey, message: ToPrefill) {
        let Some(peer) = state.links.get(&key) else {
            return;
        };
        let body = wire::to_prefill(message, &self.hello);
        let envelope = Envelope {
            key: None,
            body: Some(body),
        };
        if !peer.link.send(Ok(envelope)) {
            state.links.remove(&key);
            state.end.handle_stream_closed(key, self.clock().now_us());
        }
    }

    fn reserve(
        self: &Arc<Self>,
        state: &mut State,
        key: SessionKey,
        submission: Submission,
        deadline_us: u64,
    ) {
        let timeout = self.clock().until(deadline_us);
        let arithmetic = submission.namespace.arithmetic;
        match self.engine.reserve(submission, timeout) {
            Ok(receipt) => {
                let id = receipt.stream.id();
                let reader = self.spawn(self.clone().read_outputs(key, receipt));
                let request = LocalRequest {
                    id,
                    arithmetic: arithmetic.unwrap_or_else(|| self.hello.arithmetic()),
                    tables: Vec::new(),
                    state: None,
                    asked_at: Instant::now(),
                    has_arrived: false,
                    start: None,
                    reader: reader.abort_handle(),
                };
                state.requests.insert(key, request);
            }
            Err(error) => {
                let now_us = self.clock().now_us();
                state.end.handle_reserved(key, Err(refusal(&error)), now_us);
            }
        }
    }

    /// Reserves pages for a request with a constraint once the constraint is made.
    async fn reserve_with_constraint(
        self: Arc<Self>,
        key: SessionKey,
        source: Arc<str>,
        submission: Submission,
        deadline_us: u64,
    ) {
        let maker = self.constraints.clone();
        let make = move || match maker {
            Some(maker) => maker.make(&source),
            None => Err("this node makes none".to_owned()),
        };
        let made = tokio::task::spawn_blocking(make).await;
        let made = made.unwrap_or_else(|error| Err(error.to_string()));
        match made {
            Ok(constraint) => {
                let submission = Submission {
                    constraint: Some(constraint),
                    ..submission
                };
                let mut state = self.lock();
                self.reserve(&mut state, key, submission, deadline_us);
                self.tell(&mut state, |_, _| {});
            }
            Err(error) => {
                rare_line!(warn, %key, error, "an answer cannot be held to its constraint here");
                let refused = Err(Refusal::Unsuitable);
                self.with(|end, now_us| end.handle_reserved(key, refused, now_us));
            }
        }
    }

    fn load(
        self: &Arc<Self>,
        state: &mut State,
        key: SessionKey,
        first_row: u32,
        num_rows: u32,
        deadline_us: u64,
    ) {
        let now_us = self.clock().now_us();
        let (Some(request), Some(peer)) = (state.requests.get(&key), state.links.get(&key)) else {
            return state.end.handle_load_failed(key, now_us);
        };
        let Some(address) = peer.kv_address.reach(self.site.host.as_deref()) else {
            rare_line!(warn, address = ?peer.kv_address, "a prefill node's KV address is wrong");
            return state.end.handle_load_failed(key, now_us);
        };
        let request = LoadRequest {
            key,
            peer: address,
            arithmetic: request.arithmetic,
            first_row,
            num_rows,
            tables: request.tables.clone(),
            state: request.state,
            deadline: self.clock().instant(deadline_us),
        };
        // SAFETY: the engine has reserved these pages for this request, and gives them to no other until
        // `handle_kv_arrived` or `handle_kv_lost`, which follow the end of the load.
        match unsafe { self.receiver.load(request) } {
            Ok(load) => {
                let load = Arc::new(load);
                state.loads.insert(key, load.clone());
                let node = self.clone();
                let since = Instant::now();
                self.spawn(async move {
                    let is_done = load.wait_done().await;
                    if is_done {
                        node.times.load.observe(since.elapsed().as_secs_f64());
                    }
                    node.with(|end, now_us| match is_done {
                        true => end.handle_load_done(key, now_us),
                        false => end.handle_load_failed(key, now_us),
                    });
                });
            }
            Err(error) => {
                rare_line!(warn, %error, "KV rows are not loaded");
                state.end.handle_load_failed(key, now_us);
            }
        }
    }

    async fn read_outputs(self: Arc<Self>, key: SessionKey, mut receipt: Receipt) {
        let mut count = None;
        while let Some(event) = poll_fn(|cx| receipt.stream.poll_next(cx)).await {
            match event {
                StreamEvent::Accepted => {
                    let reservation = receipt
                        .reservation()
                        .cloned()
                        .unwrap_or_else(|| unreachable!("what is accepted has been reserved"));
                    let mut state = self.lock();
                    if let Some(request) = state.requests.get_mut(&key) {
                        request.tables = reservation.tables;
                        request.state = reservation.state;
                        let seconds = request.asked_at.elapsed().as_secs_f64();
                        self.times.reserve.observe(seconds);
                    }
                    drop(state);
                    let allocated = Allocated {
                        num_cached_rows: reservation.num_cached_rows,
                        granted_as: Some(reservation.granted_as),
                    };
                    self.with(|end, now_us| end.handle_reserved(key, Ok(allocated), now_us));
                }
                StreamEvent::Refused(error) => {
                    let refusal = Refusal::from(&error);
                    self.lock().requests.remove(&key);
                    self.with(|end, now_us| end.handle_reserved(key, Err(refusal), now_us));
                }
                StreamEvent::Output(output) => {
                    let has_ended = output.finish.is_some();
                    if output.sample.is_some()
                        && let Some(request) = self.lock().requests.get_mut(&key)
                        && let Some(start) = request.start.take()
                    {
                        let num_received = match start {
                            Start::Arrived(since) => {
                                let seconds = since.elapsed().as_secs_f64();
                                self.times.first_decode.observe(seconds);
                                let reservation = receipt.reservation();
                                let cached = reservation.map_or(0, |it| it.num_cached_rows);
                                output.num_prompt_tokens.saturating_sub(cached)
                            }
                            Start::Computed => 0,
                        };
                        let meter = self.meter.as_ref();
                        count = meter.map(|meter| meter.begin(num_received, receipt.adapter()));
                    }
                    if let Some(count) = &mut count {
                        count.handle_output(&output);
                    }
                    self.with(|end, now_us| end.handle_local_output(key, output, now_us));
                    let mut state = self.lock();
                    let request = state.requests.get(&key);
                    if has_ended && request.is_some_and(|request| request.has_arrived) {
                        state.requests.remove(&key);
                    }
                }
            }
        }
    }

    /// Connects to the source of a prefill node's rows, if this node can use those rows.
    fn expect_loads(&self, theirs: wire::Hello, kv_address: &KvAddress) {
        let is_compatible =
            Hello::try_from(theirs).is_ok_and(|theirs| self.hello.check(&theirs).is_ok());
        if is_compatible && let Some(address) = kv_address.reach(self.site.host.as_deref()) {
            self.receiver.expect_loads(&address);
        }
    }

    /// Serves a prefill node's stream, from its first message to its end.
    async fn serve_stream(
        self: Arc<Self>,
        mut incoming: Streaming<Envelope>,
        outgoing: mpsc::Sender<Result<Envelope, Status>>,
        trace: Option<TraceScope>,
    ) {
        let opened_at = Instant::now();
        let Ok(Some(first)) = incoming.message().await else {
            return;
        };
        let Some(Body::Hello(hello)) = first.body else {
            let error = Status::invalid_argument("the first message of a stream must be a hello");
            let _ = outgoing.send(Err(error)).await;
            return;
        };
        let kv_address = KvAddress::from(&hello);
        let Some(key) = first.key else {
            // A probe only asks for this node's facts, but its sender may open sessions later.
            self.expect_loads(hello, &kv_address);
            let mut answer = wire::hello(&self.hello, &self.site.kv_address);
            let stats = self.engine.stats().scheduler;
            let (is_draining, max_prompt_tokens) = (!self.is_serving(), self.max_prompt_tokens);
            answer.load = Some(LoadReport::of(&stats, is_draining, max_prompt_tokens).into());
            let answer = Envelope {
                key: None,
                body: Some(Body::Hello(answer)),
            };
            let _ = outgoing.send(Ok(answer)).await;
            return;
        };
        let parsed = SessionKey::try_from(key)
            .and_then(|key| Ok((key, wire::from_prefill(Body::Hello(hello))?)));
        let (key, hello) = match parsed {
            Ok(parsed) => parsed,
            Err(error) => {
                let error = Status::invalid_argument(error.to_string());
                let _ = outgoing.send(Err(error)).await;
                return;
            }
        };
        let (link, mut closed) = Link::over(outgoing);
        let node = {
            let mut state = self.lock();
            if state.links.contains_key(&key) {
                // The session belongs to the first stream with this key. Any other stream is closed.
                return;
            }
            state.links.insert(key, PeerLink { link, kv_address });
            node_number(&mut state, &hello)
        };
        self.with(|end, now_us| end.handle_message(node, key, hello, now_us));
        let span = tracing::info_span!("session", %key, trace_id = tracing::field::Empty);
        self.read_messages(node, key, &mut incoming, &mut closed)
            .instrument(span)
            .await;
        self.with(|end, now_us| end.handle_stream_closed(key, now_us));
        self.lock().links.remove(&key);
        if let Some(trace) = trace {
            trace.finish("decode", opened_at, Instant::now(), |mut span| {
                span.kind = SpanKind::Server;
                span.with("corella.session", &*key.to_string())
            });
        }
        linger(incoming).await;
    }

    async fn read_messages(
        self: &Arc<Self>,
        node: NodeId,
        key: SessionKey,
        incoming: &mut Streaming<Envelope>,
        closed: &mut LinkClosed,
    ) {
        while let Some(message) = closed.next(incoming, wire::from_prefill).await {
            if let ToDecode::Allocate(allocate) = &message {
                let trace_id = allocate.trace_id.as_deref();
                tracing::Span::current().record("trace_id", trace_id);
                tracing::debug!(%node, "a prefill node brings a request");
            }
            self.with(|end, now_us| end.handle_message(node, key, message, now_us));
        }
    }
}

impl SessionHandler for DecodeNode {
    fn is_serving(&self) -> bool {
        self.engine.state() == EngineState::Ready && !self.is_draining()
    }

    fn serve(
        self: &Arc<Self>,
        incoming: Streaming<Envelope>,
        outgoing: mpsc::Sender<Result<Envelope, Status>>,
        trace: Option<TraceScope>,
    ) {
        self.spawn(self.clone().serve_stream(incoming, outgoing, trace));
    }
}

fn node_number(state: &mut State, hello: &ToDecode) -> NodeId {
    let ToDecode::Hello(hello) = hello else {
        return NodeId(u32::MAX);
    };
    let next = NodeId(state.names.len() as u32);
    if state.names.len() >= MAX_NAMES && !state.names.contains_key(&hello.instance) {
        return NodeId(u32::MAX);
    }
    *state.names.entry(hello.instance.clone()).or_insert(next)
}

fn refusal(error: &SubmitError) -> Refusal {
    match error {
        SubmitError::Draining | SubmitError::Lost(_) => Refusal::Draining,
        SubmitError::Refused(error) => error.into(),
    }
}
