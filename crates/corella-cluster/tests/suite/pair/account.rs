//! A prefill node places requests by its knowledge of the decode nodes.

use std::future::poll_fn;
use std::sync::Arc;

use corella_cluster::{Registry, RegistryConfig, Role};
use corella_core::{
    DecodeCandidate, FinishReason, PeerPolicy, PeerStanding, SamplingParams, StayReason, TokenId,
};
use corella_engine::StreamEvent;
use corella_model::{CostModel, MockConfig, MockExecutor};
use corella_test::wait_until_async;

use crate::pair::fixture::*;

/// Bytes of a key and a value of two 32-bit numbers each, in one layer.
const MOCK_ROW_BYTES: u64 = 16;

/// A prefill node with one decode node in its registry. It probes the decode node when it begins, and at the test's
/// request.
struct Pair {
    prefill: Prefill,
    decode: Decode,
    _registry: Registry,
    model: MockConfig,
}

impl Pair {
    async fn start(model: MockConfig, decode: MockConfig, max_bandwidth: Option<u64>) -> Self {
        let decode = Decode::start(&decode, 11).await;
        let url = format!("static:{}", decode.address);
        let url = url.parse().expect("a registry");
        let mut options = PrefillOptions {
            max_bandwidth,
            ..PrefillOptions::default()
        };
        options.directory.placement.policy = PeerPolicy::Weighted;
        options.directory.kv_bytes_per_token = MOCK_ROW_BYTES * u64::from(model.num_layers);
        let engine = start_engine(Box::new(MockExecutor::new(model.clone())));
        let prefill = Prefill::start_on(engine, options);
        let nodes = Arc::new(prefill.node.clone());
        let registry = Registry::start(&url, None, RegistryConfig::new(Role::Decode), nodes);
        let registry = registry.expect("its configuration is valid");
        let pair = Self {
            prefill,
            decode,
            _registry: registry,
            model,
        };
        pair.until("it answers", |node| {
            node.standing == PeerStanding::Healthy && node.report.is_some()
        })
        .await;
        pair
    }

    /// Returns the decode node's facts for placement.
    fn seen(&self) -> Option<DecodeCandidate> {
        let nodes = self
            .prefill
            .node
            .with_peers(|peers, now_us| peers.decode_nodes(now_us));
        nodes.first().copied()
    }

    fn num_unreported_pages(&self) -> u32 {
        self.seen().expect("it is known").num_unreported_pages
    }

    async fn until(&self, what: &str, is_so: impl Fn(&DecodeCandidate) -> bool) {
        wait_until_async(what, || self.seen().is_some_and(|node| is_so(&node))).await;
    }

    /// Probes the decode node, as after a broken session.
    fn probe(&self) {
        let peer = self.seen().expect("it is known").peer_id;
        self.prefill
            .node
            .with_peers(|peers, now_us| peers.handle_session_lost(peer, now_us));
    }

    /// Records a transfer of this size and time to the decode node.
    fn note_transfer(&self, num_bytes: u64, elapsed_us: u64) {
        let peer = self.seen().expect("it is known").peer_id;
        self.prefill.node.with_peers(|peers, now_us| {
            peers.handle_transfer(peer, num_bytes, elapsed_us * 1000, now_us);
        });
    }

    /// Returns whether the decode node decodes a new prompt, which begins with the token `first`.
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
    // The answer of 200 tokens takes 100 s.
    slow.cost = Some(CostModel::per_step(500_000.0));
    let pair = Pair::start(slow.clone(), slow, None).await;
    let asked = submission(vec![1; 20], 200, SamplingParams::GREEDY);
    let mut stream = pair.prefill.submit(asked).remove(0);
    assert_eq!(pair.num_unreported_pages(), 55, "220 tokens in pages of 4");
    while !matches!(
        poll_fn(|cx| stream.poll_next(cx)).await,
        Some(StreamEvent::Output(_))
    ) {}
    assert_eq!(pair.num_unreported_pages(), 55, "there is no other report");
    pair.probe();
    pair.until("the report counts it", |node| {
        node.standing == PeerStanding::Healthy && node.num_unreported_pages == 0
    })
    .await;
    let there = pair.decode.engine.stats().scheduler;
    assert_eq!(there.num_running, 1);
    let report = pair.seen().and_then(|node| node.report);
    let report = report.expect("it has reported");
    assert_eq!(report.num_reservations, 1);
    assert!(report.num_free_pages <= 128 - 5, "{report:?}");
    drop(stream);
    at_rest(&pair.prefill.engine).await;
    at_rest(&pair.decode.engine).await;
    // A cancelled request is gone at once, with or without a report.
    let asked = submission(vec![2; 20], 200, SamplingParams::GREEDY);
    let stream = pair.prefill.submit(asked).remove(0);
    assert_eq!(pair.num_unreported_pages(), 55);
    drop(stream);
    assert_eq!(pair.num_unreported_pages(), 0);
}

/// The decode node has reserved pages for another request, which its last report does not count.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_reservation_leaves_the_books_at_once() {
    let pair = Pair::start(model(16), model(16), None).await;
    let there = &pair.decode.engine;
    let others = KeptPages::new(there, 40).await;
    let report = pair.seen().and_then(|node| node.report);
    assert_eq!(report.map(|it| it.num_free_pages), Some(16));
    assert!(!pair.goes_away(1, 40).await, "it has six pages");
    assert_eq!(there.stats().num_refused, 1);
    assert_eq!(pair.num_unreported_pages(), 0);
    drop(others);
    at_rest(there).await;
}

/// 200 rows of 512 layers have 1.6 MB. Sending them takes four seconds, and computing them a thirtieth of a second.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_takes_longer_to_send_than_to_compute_is_decoded_here() {
    let model = MockConfig {
        num_layers: 512,
        cost: Some(CostModel::per_step(5_000.0)),
        ..model(256)
    };
    let limit = 400_000;
    let pair = Pair::start(model.clone(), model, Some(limit)).await;
    assert_eq!(pair.seen().and_then(|node| node.bandwidth), None);
    assert!(pair.goes_away(1, 200).await, "nothing has been measured");
    let prefill_us = pair.prefill.engine.stats().scheduler.prefill_us;
    assert!(prefill_us >= 1024 / 32 * 5_000, "{prefill_us}");
    pair.until("the link is measured", |node| node.bandwidth.is_some())
        .await;
    // A burst goes out at once, and a delayed sender sends less.
    let bandwidth = pair.seen().and_then(|node| node.bandwidth);
    assert!(bandwidth.is_some_and(|b| b <= limit), "{bandwidth:?}");
    let num_stays = || pair.prefill.node.stays().get(StayReason::SlowLink);
    assert_eq!(num_stays(), 0);
    assert!(!pair.goes_away(2, 200).await);
    assert!(!pair.goes_away(3, 200).await);
    assert_eq!(num_stays(), 2);
    assert_eq!(pair.prefill.node.stays().get(StayReason::NoRoom), 0);
}

/// The first transfer is a few kilobytes. The test sets the link's speed after it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_link_is_said_to_take_decides_where_requests_are_decoded() {
    let model = MockConfig {
        cost: Some(CostModel::per_step(1_000.0)),
        ..model(256)
    };
    let pair = Pair::start(model.clone(), model, None).await;
    assert!(pair.goes_away(1, 200).await);
    pair.until("the link is measured", |node| node.bandwidth.is_some())
        .await;
    for _ in 0..100 {
        pair.note_transfer(1 << 20, 1_000_000_000_000);
    }
    assert!(!pair.goes_away(2, 200).await, "a byte a second");
    assert!(pair.goes_away(1, 200).await, "its rows are there");
    pair.note_transfer(1 << 40, 1);
    assert!(pair.goes_away(3, 200).await, "no time at all");
}
