//! Replays 1,000 decisions of running nodes with the directory as it was before each.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use corella_cluster::session::{DecodePeers, KvAddress, RegistryPeers};
use corella_cluster::{Peers, Registry, RegistryConfig, Role};
use corella_core::session::{Mismatch, Peer};
use corella_core::{
    ComputeDecision, ComputeQuery, Directory, DirectoryConfig, NodeId, PageHash, PeerStanding,
    PlacementConfig, Route, RouteQuery, SamplingParams, SchedulerStats, SessionId, StayReason,
    TokenId,
};
use corella_model::{CostModel, MockConfig, MockExecutor};
use corella_test::wait_until_async;
use tonic::transport::Channel;

use crate::pair::fixture::*;

/// A decision, and all that it was made from.
enum Decision {
    Route {
        query: Box<OwnedQuery>,
        route: Route,
    },
    Compute {
        query: ComputeQuery,
        decision: ComputeDecision,
    },
}

struct Recorded {
    before: Directory,
    now_us: u64,
    decision: Decision,
}

/// A query without its borrowed parts.
struct OwnedQuery {
    query: RouteQuery<'static>,
    hashes: Vec<PageHash>,
    tried: Vec<NodeId>,
    here: SchedulerStats,
}

impl OwnedQuery {
    fn new(query: &RouteQuery<'_>) -> Self {
        static NOTHING: std::sync::LazyLock<SchedulerStats> =
            std::sync::LazyLock::new(SchedulerStats::default);
        Self {
            query: RouteQuery {
                hashes: &[],
                tried: &[],
                here: &NOTHING,
                ..*query
            },
            hashes: query.hashes.to_vec(),
            tried: query.tried.to_vec(),
            here: *query.here,
        }
    }

    fn get(&self) -> RouteQuery<'_> {
        RouteQuery {
            hashes: &self.hashes,
            tried: &self.tried,
            here: &self.here,
            ..self.query
        }
    }
}

/// The decode nodes of a registry. Keeps what was known before each decision.
struct Recorder {
    peers: Arc<Peers>,
    nodes: Arc<RegistryPeers>,
    recorded: Mutex<Vec<Recorded>>,
}

impl Recorder {
    fn record<T>(
        &self,
        decide: impl FnOnce(&mut Directory, u64) -> T,
        name: impl FnOnce(&T) -> Decision,
    ) -> T {
        self.peers.with(|directory, now_us| {
            let before = directory.clone();
            let made = decide(directory, now_us);
            let decision = name(&made);
            self.recorded.lock().unwrap().push(Recorded {
                before,
                now_us,
                decision,
            });
            made
        })
    }
}

impl DecodePeers for Recorder {
    fn route(&self, query: &RouteQuery<'_>) -> Route {
        self.record(
            |directory, now_us| directory.route(query, now_us),
            |&route| Decision::Route {
                query: Box::new(OwnedQuery::new(query)),
                route,
            },
        )
    }

    fn decide(&self, query: &ComputeQuery) -> ComputeDecision {
        self.record(
            |directory, now_us| directory.decide(query, now_us),
            |&decision| Decision::Compute {
                query: *query,
                decision,
            },
        )
    }

    fn channel(&self, node: NodeId) -> Option<Channel> {
        self.nodes.channel(node)
    }

    fn kv_address(&self, node: NodeId) -> Option<KvAddress> {
        self.nodes.kv_address(node)
    }

    fn handle_allocated(
        &self,
        session: SessionId,
        last: Option<PageHash>,
        peer: Peer,
        granted_as: Option<u64>,
    ) {
        self.nodes.handle_allocated(session, last, peer, granted_as);
    }

    fn handle_left(&self, session: SessionId) {
        self.nodes.handle_left(session);
    }

    fn handle_transfer(&self, node: NodeId, num_bytes: u64, elapsed: Duration) {
        self.nodes.handle_transfer(node, num_bytes, elapsed);
    }

    fn mark_suspect(&self, node: NodeId) {
        self.nodes.mark_suspect(node);
    }

    fn mark_incompatible(&self, node: NodeId, mismatch: &Mismatch) {
        self.nodes.mark_incompatible(node, mismatch);
    }
}

fn num_healthy(peers: &Peers) -> usize {
    peers.with(|directory, now_us| {
        let nodes = directory.peers.decode_nodes(now_us).into_iter();
        nodes
            .filter(|node| node.standing == PeerStanding::Healthy)
            .count()
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn decisions_of_running_nodes_are_made_again_alike() {
    let model = MockConfig {
        cost: Some(CostModel::per_step(50.0)),
        ..model(256)
    };
    let decode = [
        Decode::start(&model, 11).await,
        Decode::start(&model, 12).await,
    ];
    let addresses = decode.each_ref().map(|node| node.address.to_string());
    let registry = Registry::start(
        &format!("static:{}", addresses.join(",")).parse().unwrap(),
        None,
        RegistryConfig {
            directory: DirectoryConfig {
                page_size: PAGE_SIZE,
                kv_bytes_per_token: session_config().row_bytes,
                placement: PlacementConfig {
                    disaggregate_min_tokens: 8,
                    ..PlacementConfig::default()
                },
                // The test keeps a copy of the directory for each decision.
                max_sent: 32,
                ..DirectoryConfig::default()
            },
            ..RegistryConfig::new(Role::Decode)
        },
    );
    let registry = registry.expect("it is a list of addresses");
    let peers = registry.peers().clone();
    let engine = start_engine(Box::new(MockExecutor::new(model)));
    let own = hello("prefill", PREFILL_INCARNATION, &*engine.1);
    let recorder = Arc::new(Recorder {
        nodes: RegistryPeers::start(peers.clone(), own, KvAddress::default(), None),
        peers,
        recorded: Mutex::default(),
    });
    wait_until_async("both decode nodes answer", || {
        num_healthy(&recorder.peers) == 2
    })
    .await;
    let prefill = Prefill::start_on(engine, recorder.clone(), None, None);

    // Conversations that grow by turns, beside short prompts and prompts with several choices.
    let mut turns: Vec<Vec<TokenId>> = (0..6).map(|i| (i..i + 20).collect()).collect();
    let num_decisions = || recorder.recorded.lock().unwrap().len();
    for round in 0.. {
        if num_decisions() >= 1000 {
            break;
        }
        let mut streams = Vec::new();
        for (i, turn) in turns.iter_mut().enumerate() {
            let mut asked = match (round + i) % 7 {
                0 => submission(vec![1, 2, 3], 2, SamplingParams::GREEDY),
                _ => submission(turn.clone(), 4, SamplingParams::GREEDY),
            };
            asked.num_choices = 1 + u32::from((round + i) % 11 == 0);
            streams.extend(prefill.submit(asked));
            turn.push((round % 40) as TokenId);
            if turn.len() > 120 {
                turn.truncate(20 - i);
            }
        }
        for stream in streams {
            finish(stream).await;
        }
    }

    let recorded = std::mem::take(&mut *recorder.recorded.lock().unwrap());
    let (mut num_short, mut num_asking, mut num_placed, mut num_decided) = (0, 0, 0, 0);
    for mut made in recorded {
        match made.decision {
            Decision::Route { query, route } => {
                assert_eq!(made.before.route(&query.get(), made.now_us), route);
                match route {
                    Route::Here(StayReason::Short) => num_short += 1,
                    Route::Session { asks_first, .. } if asks_first => num_asking += 1,
                    Route::Session { .. } => num_placed += 1,
                    _ => {}
                }
            }
            Decision::Compute { query, decision } => {
                assert_eq!(made.before.decide(&query, made.now_us), decision);
                num_decided += 1;
            }
        }
    }
    let seen = [num_short, num_asking, num_placed, num_decided];
    assert!(seen.iter().all(|&num| num > 0), "{seen:?}");
}
