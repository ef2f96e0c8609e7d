//! Pairs of nodes, and the answers that their clients get.

use std::future::poll_fn;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use corella_cluster::kv_connector::PrefixFetcher;
use corella_cluster::node::ModelFacts;
use corella_cluster::session::{
    DecodeNode, DecodeParts, KvAddress, NodeListener, NodeSite, PrefillNode, PrefillParts,
    RouteWatch, serve_sessions,
};
use corella_cluster::transport::{
    KvReceiver, KvSender, ReceiverConfig, SenderConfig, TransferThreads,
};
use corella_cluster::{NodeList, NodeRecord};
use corella_core::session::{Hello, SessionConfig};
use corella_core::{
    ComputePlace, DirectoryConfig, FinishReason, Incarnation, KvGroup, LoadReport, LostKv,
    PeerFacts, PeerPolicy, PeerStanding, PeerTableConfig, PlacementConfig, PromptLogprob,
    RecurrentState, SamplingParams, SchedulerConfig, TokenId,
};
use corella_engine::{
    Engine, EngineConfig, Generate, Receipt, StreamEvent, Submission, TokenStream,
};
use corella_model::{Executor, KvPages, MockConfig, MockExecutor};
use corella_test::wait_until_async;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

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
        engine: (Engine, Arc<dyn KvPages>),
        incarnation: u64,
        weight_format: &str,
    ) -> Self {
        Self::start_at(engine, incarnation, weight_format, NodeSite::default()).await
    }

    /// Starts a decode node whose cached blocks others load from `site`.
    pub async fn start_at(
        (engine, pages): (Engine, Arc<dyn KvPages>),
        incarnation: u64,
        weight_format: &str,
        site: NodeSite,
    ) -> Self {
        let instance = format!("decode-{incarnation}");
        let hello = hello_with(&instance, incarnation, &*pages, weight_format);
        let threads = TransferThreads::start(1).expect("threads start");
        let config = ReceiverConfig {
            connect_timeout: CONNECT_TIMEOUT,
            ..ReceiverConfig::new(incarnation, FINGERPRINT, hello.arithmetic())
        };
        let receiver = Arc::new(KvReceiver::new(config, pages, &threads));
        let parts = DecodeParts {
            receiver,
            constraints: Some(Arc::new(EvenMaker)),
            site,
            meter: None,
        };
        let node = DecodeNode::start(session_config(), hello, engine.clone(), parts);
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

    /// Returns the node's name in registries.
    fn name(&self) -> String {
        format!("decode-{}", self.incarnation)
    }

    /// Vanishes like a killed process: nothing that it holds is released to others.
    pub fn kill(&self) {
        self.server.abort();
    }
}

/// The pause between two probes of one node, so long that no probe replaces a test's settings.
const HOUR_US: u64 = 3_600_000_000;

/// A prefill node's parts that tests vary.
pub struct PrefillOptions {
    pub directory: DirectoryConfig,
    pub max_bandwidth: Option<u64>,
    pub fetcher: Option<Arc<PrefixFetcher>>,
    pub watch: Option<RouteWatch>,
}

impl Default for PrefillOptions {
    /// Decode nodes take turns.
    fn default() -> Self {
        Self {
            directory: DirectoryConfig {
                peer_table: PeerTableConfig {
                    probe_interval_us: HOUR_US,
                    ..PeerTableConfig::default()
                },
                placement: PlacementConfig {
                    policy: PeerPolicy::RoundRobin,
                    max_report_age_us: HOUR_US,
                    ..PlacementConfig::default()
                },
                kv_bytes_per_token: session_config().row_bytes,
                ..DirectoryConfig::default()
            },
            max_bandwidth: None,
            fetcher: None,
            watch: None,
        }
    }
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

    /// Starts a node that computes every prompt itself.
    pub fn start_with(executor: Box<dyn Executor>, decode: &[&Decode]) -> Self {
        Self::start_placing(executor, decode, Some(ComputePlace::Here))
    }

    /// Starts a node that may leave a prompt to the decode node that has most of it.
    pub fn start_asking(model: &MockConfig, decode: &[&Decode]) -> Self {
        Self::start_placing(Box::new(MockExecutor::new(model.clone())), decode, None)
    }

    pub fn start_placing(
        executor: Box<dyn Executor>,
        decode: &[&Decode],
        compute_place: Option<ComputePlace>,
    ) -> Self {
        let mut options = PrefillOptions::default();
        options.directory.placement.compute_place = compute_place;
        let prefill = Self::start_on(start_engine(executor), options);
        prefill.know(decode);
        prefill
    }

    pub fn start_on(engine: (Engine, Arc<dyn KvPages>), options: PrefillOptions) -> Self {
        let hello = hello("prefill", PREFILL_INCARNATION, &*engine.1);
        Self::start_as(hello, engine, options)
    }

    pub fn start_as(
        hello: Hello,
        (engine, pages): (Engine, Arc<dyn KvPages>),
        options: PrefillOptions,
    ) -> Self {
        let threads = TransferThreads::start(1).expect("threads start");
        let mut config = SenderConfig::new(PREFILL_INCARNATION, FINGERPRINT, hello.arithmetic());
        config.max_bandwidth = options.max_bandwidth;
        let page_size = pages.geometry().page_size;
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
                directory: DirectoryConfig {
                    page_size,
                    ..options.directory
                },
                tls: None,
                kept: None,
                fetcher: options.fetcher,
                fetches_always: false,
                watch: options.watch,
            },
        );
        Self {
            engine,
            node: node.expect("its configuration is valid"),
            _threads: threads,
        }
    }

    /// Lists decode nodes, and sets their answers to the first probe: they have room for all requests.
    pub fn know(&self, decode: &[&Decode]) {
        self.list(decode);
        for decode in decode {
            let facts = PeerFacts {
                incarnation: decode.incarnation,
                page_size: PAGE_SIZE,
            };
            let report = LoadReport {
                num_free_pages: 1 << 20,
                ..LoadReport::default()
            };
            self.node.with_peers(|peers, now_us| {
                let peer = peers.peer_id(&decode.name()).expect("it is listed");
                peers.handle_hello(peer, facts, now_us);
                peers.handle_report(peer, report, now_us);
            });
        }
    }

    /// Lists decode nodes, which are probed.
    pub fn list(&self, decode: &[&Decode]) {
        let records = decode
            .iter()
            .map(|decode| NodeRecord::at(&decode.name(), &decode.address.to_string()));
        self.node.handle_list(records.collect());
    }

    /// Waits until all listed nodes have answered.
    pub async fn meet_all(&self) {
        let is_met = |node: &corella_core::DecodeCandidate| {
            node.standing == PeerStanding::Healthy && node.report.is_some()
        };
        wait_until_async("the decode nodes answer", || {
            let nodes = self
                .node
                .with_peers(|peers, now_us| peers.decode_nodes(now_us));
            !nodes.is_empty() && nodes.iter().all(is_met)
        })
        .await;
    }

    pub fn submit(&self, submission: Submission) -> Vec<TokenStream> {
        self.node.submit(submission).expect("it is taken")
    }
}

pub fn submission(prompt: Vec<TokenId>, max_tokens: u32, sampling: SamplingParams) -> Submission {
    Submission {
        sampling,
        ..Submission::new(prompt, max_tokens)
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
        let how = LostKv::End("its pages are no longer needed".into());
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
