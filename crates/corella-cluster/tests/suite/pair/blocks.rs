//! How a node loads other nodes' cached blocks, and serves its own.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use corella_cluster::blocks::{FetchConfig, FetchStats, FetcherNode, SourceNode, follow_facts};
use corella_cluster::kv_connector::{AllowedPeers, PrefixFetcher};
use corella_cluster::transport::{
    KvReceiver, KvSender, PeerAddress, ReceiverConfig, SenderConfig, TransferThreads,
};
use corella_core::Incarnation;
use corella_core::session::Hello;
use corella_engine::Engine;
use corella_test::wait_until_async;
use serde_json::{Map, Value, json};

use crate::pair::fixture::*;

/// Limits that no passing test comes near.
pub const FETCHES: FetchConfig = FetchConfig {
    is_forced: true,
    greeting: CONNECT_TIMEOUT,
    lookup: CONNECT_TIMEOUT,
    stall: CONNECT_TIMEOUT,
    wait: CONNECT_TIMEOUT,
    limit: Duration::from_mins(2),
};

#[derive(Clone, Copy)]
pub enum Way {
    Tcp,
    /// Inside the host: rows are read from the other process's memory.
    Shm,
}

pub struct Blocks {
    pub fetcher: Arc<PrefixFetcher>,
    /// The address from which the node's blocks are loaded over TCP.
    pub address: SocketAddr,
    /// `kv_transfer_params` that name the node as the source of blocks.
    pub params: Map<String, Value>,
    pub source: Arc<SourceNode>,
    pub receiver: Arc<KvReceiver>,
    sender: Arc<KvSender>,
    _threads: TransferThreads,
}

impl Blocks {
    pub fn start(engine: &Engine, incarnation: u64, way: Way) -> Self {
        Self::start_with(engine, incarnation, way, FETCHES, None)
    }

    pub fn start_with(
        engine: &Engine,
        incarnation: u64,
        way: Way,
        fetches: FetchConfig,
        max_bandwidth: Option<u64>,
    ) -> Self {
        let hello = hello("blocks", incarnation, &**engine.kv_pages());
        Self::start_as(&hello, engine, way, fetches, max_bandwidth)
    }

    pub fn start_as(
        hello: &Hello,
        engine: &Engine,
        way: Way,
        fetches: FetchConfig,
        max_bandwidth: Option<u64>,
    ) -> Self {
        let (incarnation, arithmetic) = (hello.incarnation.0, hello.arithmetic());
        let pages = engine.kv_pages().clone();
        let threads = TransferThreads::start(1).expect("threads start");
        let config = SenderConfig {
            max_bandwidth,
            ..SenderConfig::new(incarnation, FINGERPRINT, arithmetic)
        };
        let sender = Arc::new(KvSender::start(config, pages.clone(), &threads).unwrap());
        let local: SocketAddr = "127.0.0.1:0".parse().expect("an address");
        let PeerAddress::Tcp(address) = sender.listen(local).expect("a port is free") else {
            panic!("a TCP address was asked for");
        };
        let process = std::process::id();
        let socket = format!(
            "corella-kv-{process}-fetch-{}-{incarnation:x}",
            address.port()
        );
        let site = match way {
            Way::Tcp => json!({"host": "127.0.0.1", "port": address.port()}),
            Way::Shm => {
                let listening = sender.listen(PeerAddress::Unix(socket.clone()));
                listening.expect("the name is free");
                json!({"host": "127.0.0.1", "port": 0, "socket": socket, "machine": "here"})
            }
        };
        let config = ReceiverConfig {
            connect_timeout: CONNECT_TIMEOUT,
            ..ReceiverConfig::new(incarnation, FINGERPRINT, arithmetic)
        };
        let receiver = Arc::new(KvReceiver::new(config, pages.clone(), &threads));
        let (life, geometry) = (Incarnation(incarnation), pages.geometry());
        let source = SourceNode::start(life, engine.block_exchange(), &sender, geometry);
        let node = FetcherNode::start(life, engine.clone(), receiver.clone(), geometry, fetches);
        follow_facts(engine.subscribe_block_facts(), &source, &node).expect("a thread starts");
        let machine = Some("here".to_owned());
        let allowed = AllowedPeers::new([]);
        let fetcher = PrefixFetcher::new(engine.clone(), node, machine, allowed, fetches);
        Self {
            fetcher,
            address,
            params: named(site),
            source,
            receiver,
            sender,
            _threads: threads,
        }
    }

    pub fn loads(&self) -> FetchStats {
        self.fetcher.node().stats()
    }

    /// Returns the number of blocks loaded from other nodes.
    pub fn num_blocks(&self) -> u64 {
        self.loads().num_blocks
    }

    pub async fn at_rest(&self) {
        wait_until_async("loads have ended", || {
            self.source.num_loads() + self.fetcher.node().num_fetches() == 0
                && self.sender.stats().num_exported == 0
        })
        .await;
    }
}

/// `kv_transfer_params` that name a node as the source of blocks.
pub fn named(site: Value) -> Map<String, Value> {
    let mut params = Map::new();
    params.insert("cached_blocks".to_owned(), site);
    params
}
