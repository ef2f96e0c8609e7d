//! What a prefill node knows of its decode nodes decides where requests go.

use std::future::poll_fn;
use std::time::{Duration, Instant};

use corella_cluster::session::{KvAddress, RegistryPeers};
use corella_cluster::{Registry, RegistryConfig, Role};
use corella_core::{
    DecodeNode, FinishReason, PeerStanding, PlacementConfig, SamplingParams, TokenId,
};
use corella_engine::StreamEvent;
use corella_model::{CostModel, Executor, MockConfig, MockExecutor};

use crate::pair::fixture::*;

const PATIENCE: Duration = Duration::from_secs(60);
/// A key and a value of two 32-bit numbers each, in one layer.
const MOCK_ROW_BYTES: u64 = 16;

/// A prefill node that knows one decode node by a registry.
struct Pair {
    prefill: Prefill,
    decode: Decode,
    registry: Registry,
    model: MockConfig,
}

impl Pair {
    async fn start(model: MockConfig, decode: MockConfig, max_bandwidth: Option<u64>) -> Self {
        let decode = Decode::start(&decode, 11).await;
        let url = format!("static:{}", decode.address);
        let url = url.parse().expect("a registry");
        let registry = Registry::start(&url, None, RegistryConfig::new(Role::Decode));
        let registry = registry.expect("its configuration is valid");
        let executor = MockExecutor::new(model.clone());
        let pages = executor.kv_pages();
        let peers = RegistryPeers::start(
            registry.peers().clone(),
            PlacementConfig::default(),
            hello("prefill", PREFILL_INCARNATION, &*pages),
            // The decode node hears of it with the first session.
            KvAddress::default(),
            MOCK_ROW_BYTES * u64::from(model.num_layers),
            None,
        );
        let prefill = Prefill::start_among(Box::new(executor), peers, max_bandwidth);
        let pair = Self {
            prefill,
            decode,
            registry,
            model,
        };
        pair.until("it answers", |node| {
            node.standing == PeerStanding::Healthy && node.report.is_some()
        })
        .await;
        pair
    }

    /// The decode node as placement sees it.
    fn seen(&self) -> Option<DecodeNode> {
        let peers = self.registry.peers();
        peers.with_table(|table, now_us| table.decode_nodes(now_us).first().copied())
    }

    fn num_unreported_pages(&self) -> u32 {
        self.seen().expect("it is known").num_unreported_pages
    }

    async fn until(&self, what: &str, is_so: impl Fn(&DecodeNode) -> bool) {
        let since = Instant::now();
        while !self.seen().is_some_and(|node| is_so(&node)) {
            assert!(since.elapsed() < PATIENCE, "{what}: {:?}", self.seen());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Whether a prompt of its own is decoded by the other node.
    async fn goes_away(&self, first: TokenId, num_prompt_tokens: u32) -> bool {
        let prompt: Vec<_> = (first..first + num_prompt_tokens).map(|i| i % 50).collect();
        let expected = (self.model).lone_tokens(&prompt, &SamplingParams::GREEDY, 3);
        let granted = || self.decode.engine.stats().scheduler.num_reservations;
        let before = granted();
        let asked = submission(prompt, 3, SamplingParams::GREEDY);
        let stream = self.prefill.submit(asked).remove(0);
        assert_eq!(finish(stream).await, (expected, FinishReason::Length));
        granted() > before
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_granted_reservation_counts_here_until_the_nodes_own_report_counts_it() {
    let mut slow = model(128);
    slow.cost = Some(CostModel::per_step(50_000.0));
    let pair = Pair::start(slow.clone(), slow, None).await;
    let asked = submission(vec![1; 20], 200, SamplingParams::GREEDY);
    let mut stream = pair.prefill.submit(asked).remove(0);
    assert_eq!(pair.num_unreported_pages(), 55, "220 tokens in pages of 4");
    while !matches!(
        poll_fn(|cx| stream.poll_next(cx)).await,
        Some(StreamEvent::Output(_))
    ) {}
    pair.until("the report counts it", |node| {
        node.num_unreported_pages == 0
    })
    .await;
    let there = pair.decode.engine.stats().scheduler;
    assert_eq!(there.num_running, 1, "it has nine more seconds to run");
    let report = pair.seen().and_then(|node| node.report);
    let report = report.expect("it has reported");
    assert_eq!(report.num_reservations, 1);
    assert!(report.num_free_pages <= 128 - 5, "{report:?}");
    drop(stream);
    at_rest(&pair.prefill.engine).await;
    at_rest(&pair.decode.engine).await;
    // A cancelled one is gone at once, whether or not a report has come.
    let asked = submission(vec![2; 20], 200, SamplingParams::GREEDY);
    let stream = pair.prefill.submit(asked).remove(0);
    assert_eq!(pair.num_unreported_pages(), 55);
    drop(stream);
    assert_eq!(pair.num_unreported_pages(), 0);
}

/// The decode node works for somebody else, of whom this node's report does not know yet.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_reservation_leaves_the_books_at_once() {
    let mut slow = model(16);
    slow.cost = Some(CostModel::per_step(20_000.0));
    let pair = Pair::start(model(16), slow, None).await;
    let there = &pair.decode.engine;
    let mut num_tries = 0;
    while there.stats().num_refused == 0 {
        num_tries += 1;
        assert!(num_tries < 20, "a report was always in between");
        let is_free = |node: &DecodeNode| node.report.is_some_and(|it| it.num_free_pages == 16);
        pair.until("all pages are free", is_free).await;
        let others = submission(vec![3; 40], 20, SamplingParams::GREEDY);
        let others = there.submit(others).expect("it has room");
        while there.stats().scheduler.num_in_use_pages < 10 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert!(!pair.goes_away(1, 40).await, "it has six pages");
        assert_eq!(pair.num_unreported_pages(), 0);
        drop(others);
        at_rest(there).await;
    }
}

/// 200 rows of 512 layers have 1.6 MB. Sending them takes a second at 1.6 MB/s, and a few milliseconds
/// over loopback; computing them takes a seventh of a second.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_takes_longer_to_send_than_to_compute_is_decoded_here() {
    let model = MockConfig {
        num_layers: 512,
        cost: Some(CostModel::per_step(20_000.0)),
        ..model(256)
    };
    for max_bandwidth in [Some(1_600_000), None] {
        let pair = Pair::start(model.clone(), model.clone(), max_bandwidth).await;
        assert_eq!(pair.seen().and_then(|node| node.bandwidth), None);
        assert!(pair.goes_away(1, 200).await, "nothing has been measured");
        let bandwidth = pair.seen().and_then(|node| node.bandwidth);
        let prefill_us = pair.prefill.engine.stats().scheduler.prefill_us;
        assert!(prefill_us >= 1024 / 32 * 20_000, "{prefill_us}");
        match max_bandwidth {
            Some(limit) => assert!(bandwidth.is_some_and(|b| b < 2 * limit), "{bandwidth:?}"),
            // Each layer has gone before the next is computed: that is too little to measure.
            None => assert!(bandwidth.is_none_or(|b| b > 16_000_000), "{bandwidth:?}"),
        }
        let is_far = max_bandwidth.is_some();
        assert_eq!(!pair.goes_away(2, 200).await, is_far);
        assert_eq!(!pair.goes_away(3, 200).await, is_far);
    }
}
