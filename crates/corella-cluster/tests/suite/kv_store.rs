//! Blocks in LMCache's server, with a stand-in for the server.

mod lmcache;

use std::sync::Arc;
use std::time::Duration;

use corella_cluster::kv_store::{KvStore, KvStoreConfig, LMCACHE_VERSION, StoreReader};
use corella_core::{SamplingParams, SchedulerConfig, TokenId};
use corella_engine::{Engine, Generate};
use corella_model::{MockConfig, MockExecutor};
use corella_test::wait_until_async;

use crate::pair::fixture::{finish, model, start_engine_with, submission, windowed_model};
use lmcache::{CHUNK, FakeServer};

/// A process with an empty cache.
struct Node {
    engine: Engine,
    store: Arc<KvStore>,
    reader: StoreReader,
}

impl Node {
    async fn start(server: &FakeServer) -> Self {
        let engine = engine(&model(64));
        let store = KvStore::start(&engine, config(server)).await.unwrap();
        let reader = StoreReader::new(store.clone(), Arc::new(engine.clone()));
        Self {
            engine,
            store,
            reader,
        }
    }

    async fn ask(&self, prompt: &[TokenId]) -> Vec<TokenId> {
        ask(&self.reader, prompt).await
    }

    /// Asks twice, so that the prompt is worth a copy, and waits until the server has `num_chunks` of this process.
    async fn store(&self, prompt: &[TokenId], num_chunks: u64) {
        for _ in 0..2 {
            self.ask(prompt).await;
        }
        wait_until_async("the chunks are stored", || {
            self.store.stats().num_stored == num_chunks
        })
        .await;
    }
}

fn engine(model: &MockConfig) -> Engine {
    let set = |limits: &mut SchedulerConfig| {
        (limits.max_fetched_pages, limits.max_served_pages) = (48, 48);
    };
    start_engine_with(Box::new(MockExecutor::new(model.clone())), set).0
}

fn config(server: &FakeServer) -> KvStoreConfig {
    KvStoreConfig {
        check_after: Duration::from_millis(20),
        ..KvStoreConfig::new(server.port, server.status_port, 7)
    }
}

async fn ask(generator: &dyn Generate, prompt: &[TokenId]) -> Vec<TokenId> {
    let asked = submission(prompt.to_vec(), 4, SamplingParams::GREEDY);
    let stream = generator.submit(asked).unwrap().pop().unwrap();
    finish(stream).await.0
}

/// The answer without a store.
async fn plain_answer(prompt: &[TokenId]) -> Vec<TokenId> {
    ask(&engine(&model(64)), prompt).await
}

/// A prompt of three whole chunks and a part of a fourth, so that no whole chunk has the last token.
fn prompt(seed: u32) -> Vec<TokenId> {
    (0..3 * CHUNK as u32 + 6)
        .map(|at| (at * at + seed) % 49 + 1)
        .collect()
}

async fn at_rest(server: &FakeServer) {
    wait_until_async("nothing is open at the server", || server.num_open() == 0).await;
}

#[tokio::test]
async fn another_process_continues_from_stored_chunks() {
    let server = FakeServer::start(LMCACHE_VERSION).await;
    let (prompt, first) = (prompt(0), Node::start(&server).await);
    first.store(&prompt, 3).await;
    let expected = plain_answer(&prompt).await;
    assert_eq!(first.ask(&prompt).await, expected);
    // The node looked up the prompt once, when the server was empty. Later answers found it in the node's own cache.
    assert_eq!((server.num_chunks(), server.num_lookups()), (3, 1));
    drop(first);

    let second = Node::start(&server).await;
    assert_eq!(second.ask(&prompt).await, expected);
    let stats = second.store.stats();
    assert_eq!(
        (stats.num_hits, stats.num_damaged, stats.num_errors),
        (6, 0, 0)
    );
    // A fetch is counted when it has ended, after its last block.
    wait_until_async("the fetch is counted", || {
        second.engine.stats().scheduler.num_fetched_blocks == 6
    })
    .await;
    // A prompt that differs in its third chunk takes the first two.
    let mut other = prompt.clone();
    other[2 * CHUNK + 1] ^= 1;
    let third = Node::start(&server).await;
    assert_eq!(third.ask(&other).await, plain_answer(&other).await);
    assert_eq!(third.store.stats().num_hits, 4);
    at_rest(&server).await;
}

#[tokio::test]
async fn prompts_are_computed_while_the_server_is_away() {
    let server = FakeServer::start(LMCACHE_VERSION).await;
    let (prompt, node) = (prompt(1), Node::start(&server).await);
    node.store(&prompt, 3).await;
    server.stop();
    wait_until_async("the server is missed", || !node.store.stats().is_on).await;
    let other = self::prompt(2);
    assert_eq!(node.ask(&other).await, plain_answer(&other).await);

    server.start_again();
    wait_until_async("the server is back", || node.store.stats().is_on).await;
    // The new server has none of the chunks. The chunks of the other prompt go to its new memory.
    node.store(&other, 6).await;
    let second = Node::start(&server).await;
    assert_eq!(second.ask(&other).await, plain_answer(&other).await);
    assert_eq!(second.store.stats().num_hits, 6);
    at_rest(&server).await;
}

#[tokio::test]
async fn damaged_and_evicted_chunks_are_computed() {
    let expected = plain_answer(&prompt(3)).await;
    for is_evicted in [false, true] {
        let server = FakeServer::start(LMCACHE_VERSION).await;
        Node::start(&server).await.store(&prompt(3), 3).await;
        match is_evicted {
            true => server.evict_after_lookups(),
            false => server.damage(1),
        }
        let node = Node::start(&server).await;
        assert_eq!(node.ask(&prompt(3)).await, expected);
        let stats = node.store.stats();
        assert_eq!((stats.num_hits, stats.num_errors), (0, 0));
        assert_eq!(stats.num_damaged, u64::from(!is_evicted));
        at_rest(&server).await;
    }
}

#[tokio::test]
async fn other_versions_and_models_are_refused() {
    let server = FakeServer::start("0.5.7").await;
    let refused = KvStore::start(&engine(&model(64)), config(&server)).await;
    let refused = refused.err().unwrap().to_string();
    assert!(
        refused.contains("0.5.7") && refused.contains("lmcache==0.5.6"),
        "{refused}"
    );

    let server = FakeServer::start(LMCACHE_VERSION).await;
    let engine = engine(&windowed_model(64));
    let refused = KvStore::start(&engine, config(&server)).await;
    let refused = refused.err().unwrap().to_string();
    assert!(refused.contains("sliding windows"), "{refused}");
}

/// A server that is not there at the start is found later.
#[tokio::test]
async fn a_server_may_start_later() {
    let server = FakeServer::start(LMCACHE_VERSION).await;
    server.stop();
    let store = KvStore::start(&engine(&model(64)), config(&server)).await;
    let store = store.unwrap();
    assert!(!store.stats().is_on);
    server.start_again();
    wait_until_async("the server is found", || store.stats().is_on).await;
}
