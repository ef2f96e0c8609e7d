//! Pairs of nodes, and the answers that their clients get.

use std::future::poll_fn;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use corella_cluster::entrance::BlockFetcher;
use corella_cluster::node::ModelFacts;
use corella_cluster::session::{
    DecodeNode, DecodePeers, KvAddress, NodeListener, NodeSite, PrefillNode, PrefillParts,
    serve_sessions,
};
use corella_cluster::transport::{
    KvReceiver, KvSender, ReceiverConfig, SenderConfig, TransferThreads,
};
use corella_core::session::{Hello, Mismatch, Peer, SessionConfig};
use corella_core::{
    ComputeDecision, ComputePlace, ComputeQuery, Directory, DirectoryConfig, FinishReason,
    Incarnation, KvGroup, LoadReport, LostKv, Namespace, NodeId, PeerRecord, PlacementConfig,
    PromptLogprob, RecurrentState, Route, RouteQuery, SamplingParams, SchedulerConfig, StayReason,
    StoppingCriteria, TokenId,
};
use corella_engine::{
    Engine, EngineConfig, Generate, Receipt, StreamEvent, Submission, TokenStream,
};
use corella_model::{Executor, KvPages, MockConfig, MockExecutor};
use corella_test::wait_until_async;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tonic::transport::{Channel, Endpoint};

use crate::pair::constraint::EvenMaker;

pub const PAGE_SIZE: u32 = 4;
pub const FINGERPRINT: u128 = 0x5eed;
/// Ends an answer that would hang. No passing test comes near it.
const ANSWER_TIMEOUT: Duration = Duration::from_mins(5);
/// Limits one attempt to connect to a running node.
pub const CONNECT_TIMEOUT: Duration = Duration::from_mins(1);

pub fn model(num_pages: u32) -> MockConfig {
    MockConfig {
        num_layers: 3,
        ..MockConfig::new(50, num_pages, PAGE_SIZE)
    }
}

/// The same model with three KV groups. Two have windows that end within pages. A page has the layers of one group.
pub fn windowed_model(num_pages: u32) -> MockConfig {
    let groups = [None, Some(10), Some(17)].map(|window| KvGroup { window });
    MockConfig {
        kv_groups: groups.to_vec(),
        ..model(3 * num_pages)
    }
}

pub fn hello(instance: &str, incarnation: u64, pages: &dyn KvPages) -> Hello {
    hello_with(instance, incarnation, pages, "any")
}

/// Returns the greeting of a node with weights in a format of this name.
pub fn hello_with(
    instance: &str,
    incarnation: u64,
    pages: &dyn KvPages,
    weight_format: &str,
) -> Hello {
    let geometry = pages.geometry();
    let facts = ModelFacts {
        model_fingerprint: FINGERPRINT,
        tokenizer_digest: 1,
        kv_format: format!("{:?}", geometry.format).into(),
        weight_format: weight_format.into(),
        instruction_set: "any".into(),
    };
    Hello {
        instance: instance.into(),
        incarnation: Incarnation(incarnation),
        ..facts.hello(geometry)
    }
}

/// Times that a busy machine keeps, so that only faults decide which node draws which token.
pub fn session_config() -> SessionConfig {
    SessionConfig {
        lost_after_us: 30_000_000,
        allocate_budget_us: 20_000_000,
        hold_lease_us: 60_000_000,
        load_base_us: 20_000_000,
        ..SessionConfig::new(64)
    }
}

/// Limits of one step and one request.
pub const MAX_SEQS: u32 = 16;
pub const MAX_STEP_TOKENS: u32 = 64;
pub const MAX_CONTEXT: u32 = 256;
/// The snapshots of models with recurrent layers.
pub const NUM_SNAPSHOTS: u32 = 24;

pub fn start_engine(executor: Box<dyn Executor>) -> (Engine, Arc<dyn KvPages>) {
    start_engine_with(executor, |_| {})
}

/// Starts an engine whose limits `set` changes.
pub fn start_engine_with(
    executor: Box<dyn Executor>,
    set: impl FnOnce(&mut SchedulerConfig),
) -> (Engine, Arc<dyn KvPages>) {
    let pages = executor.kv_pages();
    let geometry = pages.geometry();
    let mut limits = SchedulerConfig {
        max_num_seqs: MAX_SEQS,
        max_num_batched_tokens: MAX_STEP_TOKENS,
        max_prefill_tokens: 32,
        kv_groups: geometry.layers.groups().to_vec(),
        ..SchedulerConfig::new(geometry.num_pages, geometry.page_size, MAX_CONTEXT)
    };
    if pages.states().is_some() {
        limits.set_recurrent_state(RecurrentState {
            num_snapshots: NUM_SNAPSHOTS,
            snapshot_interval: 4,
            least_distance: 1,
        });
    }
    set(&mut limits);
    let engine = Engine::start(EngineConfig::new(limits), executor);
    (engine.expect("the engine starts"), pages)
}

pub struct Decode {
    pub engine: Engine,
    pub node: Arc<DecodeNode>,
    pub address: SocketAddr,
    pub incarnation: u64,
    server: JoinHandle<()>,
    // The threads that receive rows.
    _threads: TransferThreads,
}

impl Decode {
    pub async fn start(model: &MockConfig, incarnation: u64) -> Self {
        Self::start_with(Box::new(MockExecutor::new(model.clone())), incarnation).await
    }

    pub async fn start_with(executor: Box<dyn Executor>, incarnation: u64) -> Self {
        Self::start_limited(executor, incarnation, |_| {}).await
    }

    /// Starts a decode node whose engine's limits `set` changes.
    pub async fn start_limited(
        executor: Box<dyn Executor>,
        incarnation: u64,
        set: impl FnOnce(&mut SchedulerConfig),
    ) -> Self {
        Self::start_on(start_engine_with(executor, set), incarnation, "any").await
    }

    /// Starts a decode node with weights in a format of this name.
    pub async fn start_on(
        (engine, pages): (Engine, Arc<dyn KvPages>),
        incarnation: u64,
        weight_format: &str,
    ) -> Self {
        let instance = format!("decode-{incarnation}");
        let hello = hello_with(&instance, incarnation, &*pages, weight_format);
        let threads = TransferThreads::start(1).expect("threads start");
        let config = ReceiverConfig {
            connect_timeout: CONNECT_TIMEOUT,
            ..ReceiverConfig::new(incarnation, FINGERPRINT, hello.arithmetic())
        };
        let receiver = Arc::new(KvReceiver::new(config, pages, &threads));
        let node = DecodeNode::start(
            session_config(),
            hello,
            engine.clone(),
            receiver,
            Some(Arc::new(EvenMaker)),
            NodeSite::default(),
            None,
        );
        let node = node.expect("its configuration is valid");
        let listener = TcpListener::bind("127.0.0.1:0")
            .await
            .expect("a port is free");
        let address = listener.local_addr().expect("it is bound");
        let sessions = serve_sessions(
            NodeListener::new(listener),
            node.clone(),
            None,
            std::future::pending(),
        );
        let server = tokio::spawn(async move {
            let _ = sessions.await;
        });
        Self {
            engine,
            node,
            address,
            incarnation,
            server,
            _threads: threads,
        }
    }

    /// Vanishes like a killed process: nothing that it holds is released to others.
    pub fn kill(&self) {
        self.server.abort();
    }
}

/// Chooses the nodes in turn.
pub struct FixedPeers {
    nodes: Vec<(Peer, Channel)>,
    next: AtomicUsize,
    holder: Option<NodeId>,
    /// The source of each node's blocks.
    pub kv_address: Option<KvAddress>,
    /// The number of requests that each node reports.
    pub num_running: u32,
    compute_place: Option<ComputePlace>,
}

impl FixedPeers {
    pub fn new(decode: &[&Decode], holder: Option<NodeId>) -> Self {
        let nodes = decode.iter().enumerate().map(|(i, decode)| {
            let peer = Peer {
                node: NodeId(i as u32),
                incarnation: Incarnation(decode.incarnation),
            };
            let endpoint = Endpoint::from_shared(format!("http://{}", decode.address));
            (peer, endpoint.expect("an address").connect_lazy())
        });
        Self {
            nodes: nodes.collect(),
            next: AtomicUsize::new(0),
            holder,
            kv_address: None,
            num_running: 0,
            compute_place: None,
        }
    }
}

impl DecodePeers for FixedPeers {
    fn route(&self, query: &RouteQuery<'_>) -> Route {
        let may_ask = query.seeks_holder
            && query.num_choices == 1
            && self.compute_place != Some(ComputePlace::Here);
        let holder = self.holder.filter(|_| may_ask);
        let next = || self.next.fetch_add(1, Ordering::Relaxed);
        let first = { holder.or(query.sibling) }.map_or_else(next, |node| node.0 as usize);
        let num_nodes = self.nodes.len();
        let mut nodes = (0..num_nodes).map(|i| self.nodes[(first + i) % num_nodes].0);
        let chosen = match query.stays {
            Some(reason) => return Route::Here(reason),
            None => nodes.find(|peer| !query.tried.contains(&peer.node)),
        };
        chosen.map_or(Route::Here(StayReason::NoRoom), |peer| Route::Session {
            peer,
            asks_first: holder == Some(peer.node),
        })
    }

    /// Decides as a directory that knows these nodes and their load.
    fn decide(&self, query: &ComputeQuery) -> ComputeDecision {
        let mut directory = Directory::new(DirectoryConfig {
            placement: PlacementConfig {
                compute_place: self.compute_place,
                ..PlacementConfig::default()
            },
            page_size: PAGE_SIZE,
            kv_bytes_per_token: session_config().row_bytes,
            ..DirectoryConfig::default()
        });
        let records: Vec<_> = { 0..self.nodes.len() }
            .map(|index| PeerRecord {
                instance_id: index.to_string(),
                incarnation: None,
                max_prompt_tokens: u32::MAX,
                is_draining: false,
            })
            .collect();
        directory.peers.handle_list(&records, 0);
        let report = LoadReport {
            num_running: self.num_running,
            ..LoadReport::default()
        };
        directory.peers.handle_report(query.node, report, 0);
        directory.decide(query, 0)
    }

    fn channel(&self, node: NodeId) -> Option<Channel> {
        Some(self.nodes[node.0 as usize].1.clone())
    }

    fn kv_address(&self, _: NodeId) -> Option<KvAddress> {
        self.kv_address.clone()
    }

    fn mark_suspect(&self, _: NodeId) {}

    fn mark_incompatible(&self, _: NodeId, _: &Mismatch) {}
}

pub struct Prefill {
    pub engine: Engine,
    pub node: PrefillNode,
    _threads: TransferThreads,
}

pub const PREFILL_INCARNATION: u64 = 7;

impl Prefill {
    pub fn start(model: &MockConfig, decode: &[&Decode]) -> Self {
        Self::start_with(Box::new(MockExecutor::new(model.clone())), decode)
    }

    pub fn start_with(executor: Box<dyn Executor>, decode: &[&Decode]) -> Self {
        let peers = FixedPeers::new(decode, None);
        Self::start_among(executor, Arc::new(peers), None)
    }

    /// Starts a node that asks the first decode node how much of a prompt it has before computing the prompt.
    pub fn start_asking(model: &MockConfig, decode: &[&Decode]) -> Self {
        Self::start_placing(model, decode, None)
    }

    /// Does the same with a fixed node for the rest of a prompt.
    pub fn start_placing(
        model: &MockConfig,
        decode: &[&Decode],
        compute_place: Option<ComputePlace>,
    ) -> Self {
        let peers = FixedPeers {
            compute_place,
            ..FixedPeers::new(decode, Some(NodeId(0)))
        };
        let executor = Box::new(MockExecutor::new(model.clone()));
        Self::start_among(executor, Arc::new(peers), None)
    }

    pub fn start_among(
        executor: Box<dyn Executor>,
        peers: Arc<dyn DecodePeers>,
        max_bandwidth: Option<u64>,
    ) -> Self {
        Self::start_on(start_engine(executor), peers, max_bandwidth, None)
    }

    pub fn start_on(
        engine: (Engine, Arc<dyn KvPages>),
        peers: Arc<dyn DecodePeers>,
        max_bandwidth: Option<u64>,
        fetcher: Option<Arc<BlockFetcher>>,
    ) -> Self {
        let hello = hello("prefill", PREFILL_INCARNATION, &*engine.1);
        Self::start_as(hello, engine, peers, max_bandwidth, fetcher)
    }

    pub fn start_as(
        hello: Hello,
        (engine, pages): (Engine, Arc<dyn KvPages>),
        peers: Arc<dyn DecodePeers>,
        max_bandwidth: Option<u64>,
        fetcher: Option<Arc<BlockFetcher>>,
    ) -> Self {
        let threads = TransferThreads::start(1).expect("threads start");
        let mut config = SenderConfig::new(PREFILL_INCARNATION, FINGERPRINT, hello.arithmetic());
        config.max_bandwidth = max_bandwidth;
        let sender = KvSender::start(config, pages, &threads).unwrap();
        let local: SocketAddr = "127.0.0.1:0".parse().expect("an address");
        let kv_address = sender.listen(local).expect("a port is free");
        let node = PrefillNode::start(
            session_config(),
            hello,
            engine.clone(),
            PrefillParts {
                sender: Arc::new(sender),
                kv_address: KvAddress {
                    address: kv_address.to_string(),
                    ..KvAddress::default()
                },
                peers,
                kept: None,
                fetcher,
                fetches_always: false,
            },
        );
        Self {
            engine,
            node: node.expect("its configuration is valid"),
            _threads: threads,
        }
    }

    pub fn submit(&self, submission: Submission) -> Vec<TokenStream> {
        self.node.submit(submission).expect("it is taken")
    }
}

pub fn submission(prompt: Vec<TokenId>, max_tokens: u32, sampling: SamplingParams) -> Submission {
    Submission {
        prompt,
        output: Vec::new(),
        exports_kv: false,
        sampling,
        num_choices: 1,
        stopping: StoppingCriteria {
            max_tokens: Some(max_tokens),
            ..Default::default()
        },
        priority: 0,
        objectives: Default::default(),
        namespace: Namespace::default(),
        constraint: None,
        adapter: None,
        trace_id: None,
        trace: None,
    }
}

/// Reads the answer to its end.
pub async fn finish(stream: TokenStream) -> (Vec<TokenId>, FinishReason) {
    let (tokens, reason, _) = finish_scored(stream).await;
    (tokens, reason)
}

/// Reads the answer to its end, with the log-probabilities of the prompt.
pub async fn finish_scored(
    mut stream: TokenStream,
) -> (Vec<TokenId>, FinishReason, Vec<PromptLogprob>) {
    let (mut tokens, mut logprobs) = (Vec::new(), Vec::new());
    let read = async {
        let mut is_accepted = false;
        while let Some(event) = poll_fn(|cx| stream.poll_next(cx)).await {
            match event {
                StreamEvent::Accepted => is_accepted = true,
                StreamEvent::Refused(error) => panic!("refused: {error}"),
                StreamEvent::Output(output) => {
                    assert!(is_accepted, "tokens come after `Accepted`");
                    logprobs.extend(output.prompt_logprobs);
                    tokens.extend(output.sample.map(|sample| sample.token));
                    assert_eq!(output.num_output_tokens as usize, tokens.len());
                    if let Some(reason) = output.finish {
                        return reason;
                    }
                }
            }
        }
        panic!("the stream ended without a terminal event");
    };
    let reason = tokio::time::timeout(ANSWER_TIMEOUT, read).await;
    let reason = reason.expect("the stream ends");
    (tokens, reason, logprobs)
}

/// Pages that an engine reserves for KV that never comes, until this is dropped.
pub struct KeptPages {
    engine: Engine,
    receipt: Option<Receipt>,
}

impl KeptPages {
    pub async fn new(engine: &Engine, num_tokens: u32) -> Self {
        let asked = submission(vec![3; num_tokens as usize], 1, SamplingParams::GREEDY);
        let receipt = engine.reserve(asked, Duration::from_hours(1));
        let mut receipt = receipt.expect("the engine runs");
        let answer = poll_fn(|cx| receipt.stream.poll_next(cx)).await;
        assert!(matches!(answer, Some(StreamEvent::Accepted)), "{answer:?}");
        // The loop publishes its counts after it has answered.
        wait_until_async("the reservation is counted", || {
            engine.stats().scheduler.num_receiving > 0
        })
        .await;
        Self {
            engine: engine.clone(),
            receipt: Some(receipt),
        }
    }
}

impl Drop for KeptPages {
    fn drop(&mut self) {
        let Some(receipt) = self.receipt.take() else {
            return;
        };
        let id = receipt.stream.id();
        drop(receipt);
        let how = LostKv::End("nobody wants it any more".into());
        self.engine.kv_exchange().handle_kv_lost(id, how);
    }
}

/// Waits until an engine holds no pages for requests or other nodes.
pub async fn at_rest(engine: &Engine) {
    wait_until_async("the engine is at rest", || {
        let stats = engine.stats();
        let scheduler = stats.scheduler;
        let num_busy = scheduler.num_in_use_pages
            + scheduler.num_held_pages
            + scheduler.num_receiving
            + scheduler.num_inflight_steps
            + stats.num_live_requests;
        num_busy == 0
    })
    .await;
}
