//! Loads of cached blocks whose other end is lost, restarted or slow, or whose clients leave.
//!
//! A proxy between the nodes cuts the connection. To each node this looks as if the other process were killed.

use std::time::Duration;

use corella_cluster::blocks::{FetchConfig, FetchStats};
use corella_cluster::kv_connector::FetchOutcome;
use corella_cluster::transport::{
    BlockMessage, BlockVerb, FRAME_BYTES, Frame, decode_blocks, encode_blocks,
};
use corella_core::TokenId;
use corella_core::session::ToSource;
use corella_engine::Submission;
use corella_model::MockConfig;
use corella_test::wait_until_async;

use crate::pair::blocks::{FETCHES, Way};
use crate::pair::fetch_node::*;
use crate::pair::fixture::*;
use crate::pair::frame_proxy::*;

/// Blocks of a prompt without its last token.
const NUM_BLOCKS: u64 = 8;
const NUM_TOKENS: u32 = 6;
const SOON: Duration = Duration::from_millis(1);

fn prompt(seed: u32) -> Vec<TokenId> {
    (0..33).map(|i| (i * i + seed) % 50).collect()
}

fn request(seed: u32) -> Submission {
    submission(prompt(seed), NUM_TOKENS, seeded(2))
}

/// Returns the answer of a single node.
fn lone(model: &MockConfig, seed: u32) -> Vec<TokenId> {
    model.lone_tokens(&prompt(seed), &seeded(2), NUM_TOKENS as usize)
}

/// Two nodes with a proxy before the first one, which has cached the prompt with seed 0.
struct Scene {
    model: MockConfig,
    first: Node,
    second: Node,
    proxy: FrameProxy,
}

impl Scene {
    async fn new(model: MockConfig, times: FetchConfig) -> Self {
        let first = Node::start(&model, 7, Way::Tcp);
        let second = Node::start_with(&model, 11, Way::Tcp, times, None);
        first.cache(request(0)).await;
        let proxy = FrameProxy::start(first.blocks.address, first.engine.kv_pages().geometry());
        Self {
            model,
            first,
            second,
            proxy,
        }
    }

    async fn assert_answered(&self, seed: u32) {
        let answers = self.second.answer_from(&self.proxy.params, request(seed));
        assert_eq!(answers.await, [lone(&self.model, seed)]);
    }

    async fn at_rest(&self) {
        self.first.at_rest().await;
        self.second.at_rest().await;
    }

    /// Sends the first prompt to the second node again, and returns the number of tokens that the node computes for it.
    /// If the prompt's blocks are cached, these are the last token of the prompt and all tokens of the answer except
    /// the last.
    async fn num_computed_again(&self) -> u32 {
        let engine = &self.second.engine;
        let before = engine.stats().scheduler.num_scheduled_tokens;
        self.second.cache(request(0)).await;
        (engine.stats().scheduler.num_scheduled_tokens - before) as u32
    }

    /// Makes the proxy hold frames with rows.
    fn hold_rows(&self) {
        self.proxy.judge(|passing| match passing.is_rows() {
            true => Verdict::Hold,
            false => Verdict::Pass,
        });
    }

    async fn rows_wait(&self) {
        wait_until_async("rows wait", || self.proxy.num_held() == 1).await;
    }

    async fn loads_have_ended(&self) {
        let node = self.second.blocks.fetcher.node();
        wait_until_async("loads have ended", || node.num_fetches() == 0).await;
    }
}

/// A phase of a load, named by its next frame.
struct Phase {
    name: &'static str,
    /// The frame that triggers the fault.
    is_it: fn(&Passing<'_>) -> bool,
    num_before: u32,
    fault: Verdict,
    /// Whether requests already wait for the fetch.
    has_begun: bool,
}

impl Phase {
    fn new(name: &'static str, is_it: fn(&Passing<'_>) -> bool, has_begun: bool) -> Self {
        Self {
            name,
            is_it,
            num_before: 0,
            fault: Verdict::Kill,
            has_begun,
        }
    }
}

fn phases() -> [Phase; 9] {
    let is_whole = |passing: &Passing<'_>| matches!(passing.frame, Frame::Complete { .. });
    [
        Phase::new("asked", |frame| frame.is(BlockVerb::Lookup), false),
        Phase::new("looked up", |frame| frame.is(BlockVerb::Found), false),
        Phase::new("wanted", |frame| frame.is(BlockVerb::LoadBlocks), true),
        Phase::new("held", |frame| frame.is_rows(), true),
        Phase {
            num_before: 1,
            ..Phase::new("rows on their way", |frame| frame.is_rows(), true)
        },
        Phase {
            fault: Verdict::Tear,
            ..Phase::new("in the middle of a page", |frame| frame.is_rows(), true)
        },
        Phase::new("all sent", is_whole, true),
        Phase::new("landed", |frame| frame.is(BlockVerb::Landed), true),
        Phase::new("confirmed", |frame| frame.is(BlockVerb::Complete), true),
    ]
}

/// Fails one load in each phase. If the source `restarts`, its next incarnation listens at the address when the fault
/// happens.
async fn fail_in_each_phase(model: MockConfig, restarts: bool) {
    for phase in phases() {
        let scene = Scene::new(model.clone(), FETCHES).await;
        let next = restarts.then(|| Node::start(&model, 29, Way::Tcp));
        if let Some(next) = &next {
            scene.proxy.set_next(next.blocks.address);
        }
        let (is_it, mut num_left, fault) = (phase.is_it, phase.num_before, phase.fault);
        scene.proxy.judge(move |passing| {
            if !is_it(passing) {
                return Verdict::Pass;
            }
            match num_left.checked_sub(1) {
                Some(num) => {
                    num_left = num;
                    Verdict::Pass
                }
                None => fault.clone(),
            }
        });
        scene.assert_answered(0).await;
        let name = phase.name;
        assert_eq!(scene.proxy.num_kills(), 1, "{name}");
        let one_failed = FetchStats {
            num_failed: 1,
            ..FetchStats::default()
        };
        assert_eq!(scene.second.blocks.loads(), one_failed, "{name}");
        let outcome = match phase.has_begun {
            true => FetchOutcome::Begun,
            false => FetchOutcome::Failed,
        };
        assert_eq!(scene.second.num(outcome), 1, "{name}");
        scene.at_rest().await;
        scene.proxy.pass_all();
        if let Some(next) = next {
            // The restarted node lends the blocks that it has computed itself.
            next.cache(request(1)).await;
            scene.assert_answered(1).await;
            assert_eq!(scene.second.num_blocks(), NUM_BLOCKS, "{name}");
            assert_eq!(next.blocks.source.stats().num_complete, 1, "{name}");
            next.at_rest().await;
        }
        scene.at_rest().await;
        // Blocks computed in place of the load are cached.
        assert_eq!(scene.num_computed_again().await, NUM_TOKENS, "{name}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_whose_other_end_is_killed_in_any_phase_costs_a_prompt() {
    fail_in_each_phase(model(256), false).await;
    fail_in_each_phase(windowed_model(256), false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_source_that_starts_again_in_any_phase_gives_nothing_of_its_last_life() {
    fail_in_each_phase(model(256), true).await;
}

/// Published blocks stay without their source.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_stay_when_their_source_is_killed_behind_the_load() {
    let scene = Scene::new(model(256), FETCHES).await;
    scene.assert_answered(0).await;
    scene.proxy.kill();
    scene.first.at_rest().await;
    assert_eq!(scene.second.num_blocks(), NUM_BLOCKS);
    assert_eq!(scene.num_computed_again().await, NUM_TOKENS);
    scene.at_rest().await;
}

/// The proxy shortens the lease and holds rows until it is over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_whose_lease_ends_while_it_is_read_fails_even_if_all_bytes_come() {
    let mut lease_us = 1_000;
    loop {
        let scene = Scene::new(model(256), FETCHES).await;
        scene.proxy.judge(move |passing| match &passing.frame {
            Frame::Data(_) => Verdict::Hold,
            Frame::Blocks(frame) if frame.verb == BlockVerb::LoadBlocks => {
                Verdict::Replace(with_lease(passing, lease_us))
            }
            _ => Verdict::Pass,
        });
        let mut streams = scene.second.submit(&scene.proxy.params, request(0));
        let source = &scene.first.blocks.source;
        wait_until_async("the lease is over", || {
            let stats = source.stats();
            stats.num_failed + stats.num_refused == 1
        })
        .await;
        wait_until_async("nothing is read", || source.num_loads() == 0).await;
        let was_being_read = scene.proxy.num_held() == 1;
        scene.proxy.release();
        let (tokens, _) = finish(streams.remove(0)).await;
        assert_eq!(tokens, lone(&scene.model, 0));
        scene.at_rest().await;
        let loads = scene.second.blocks.loads();
        assert_eq!((loads.num_failed, loads.num_blocks), (1, 0));
        assert_eq!(source.stats().num_complete, 0);
        if was_being_read {
            return;
        }
        // On a busy machine the lease was over before the first rows.
        lease_us *= 4;
    }
}

fn with_lease(passing: &Passing<'_>, lease_us: u64) -> Vec<u8> {
    let Frame::Blocks(frame) = &passing.frame else {
        panic!("a message about blocks");
    };
    let payload = &passing.bytes[FRAME_BYTES..];
    match decode_blocks(frame, payload) {
        Ok(BlockMessage::ToSource(ToSource::LoadBlocks(mut load))) => {
            load.lease_us = lease_us;
            let message = BlockMessage::ToSource(ToSource::LoadBlocks(load));
            encode_blocks(frame.key, &message).expect("it has a form")
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_waits_for_slow_rows_until_the_soft_deadline() {
    let times = FetchConfig {
        wait: SOON,
        ..FETCHES
    };
    let scene = Scene::new(model(256), times).await;
    // From now on the node can estimate the prompt's computing time.
    scene.second.compute(request(5)).await;
    scene.hold_rows();
    scene.assert_answered(0).await;
    scene.rows_wait().await;
    let loads = scene.second.blocks.loads();
    assert_eq!(
        scene.second.blocks.fetcher.node().num_fetches(),
        1,
        "{loads:?}"
    );
    // The rows arrive after the prompt has been computed.
    scene.proxy.release();
    scene.at_rest().await;
    assert_eq!(scene.second.blocks.loads().num_loaded, 1);
    scene.assert_answered(0).await;
    scene.at_rest().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_load_delays_no_other() {
    let scene = Scene::new(model(256), FETCHES).await;
    scene.first.cache(request(1)).await;
    scene.hold_rows();
    let asked = scene.second.submit(&scene.proxy.params, request(0));
    let slow = tokio::spawn(async move {
        let mut answers = Vec::new();
        for stream in asked {
            answers.push(finish(stream).await.0);
        }
        answers
    });
    scene.rows_wait().await;
    // One request loads blocks of the same node, another computes its prompt.
    let answers = scene.second.answer(&scene.first, request(1)).await;
    assert_eq!(answers, [lone(&scene.model, 1)]);
    assert_eq!(scene.second.num_blocks(), NUM_BLOCKS);
    let answers = scene.second.answer(&scene.first, request(3)).await;
    assert_eq!(answers, [lone(&scene.model, 3)]);
    assert!(!slow.is_finished() && scene.proxy.num_held() == 1);
    scene.proxy.release();
    let answers = slow.await.expect("it is answered");
    assert_eq!(answers, [lone(&scene.model, 0)]);
    assert_eq!(scene.second.num_blocks(), 2 * NUM_BLOCKS);
    scene.at_rest().await;
}

/// A client leaves while the rows of its prompt arrive. Another client waits for them, too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_while_blocks_land_takes_them_from_no_other() {
    let scene = Scene::new(model(256), FETCHES).await;
    scene.hold_rows();
    let leaving = scene.second.submit(&scene.proxy.params, request(0));
    scene.rows_wait().await;
    // This request names the node itself: behind the proxy, held rows delay later frames.
    let mut staying = scene.second.submit(&scene.first.blocks.params, request(0));
    let num_live = || scene.second.engine.stats().num_live_requests;
    wait_until_async("both wait", || num_live() == 2).await;
    drop(leaving);
    wait_until_async("one has left", || num_live() == 1).await;
    scene.proxy.release();
    let (tokens, _) = finish(staying.remove(0)).await;
    assert_eq!(tokens, lone(&scene.model, 0));
    assert_eq!(scene.second.num_blocks(), NUM_BLOCKS);
    let stats = scene.second.engine.stats().scheduler;
    assert_eq!(stats.num_prefix_hit_tokens, 4 * NUM_BLOCKS);
    scene.at_rest().await;
}

/// The load's only client leaves. The load ends when it is done, its source is killed, or it stalls for too long.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_without_a_client_gives_back_the_pages_of_both_ends() {
    type End = fn(&FrameProxy);
    let quick = FetchConfig {
        stall: SOON,
        ..FETCHES
    };
    let ends: [(FetchConfig, End); 3] = [
        (FETCHES, FrameProxy::release),
        (FETCHES, FrameProxy::kill),
        (quick, |_| {}),
    ];
    for (times, end) in ends {
        let scene = Scene::new(model(256), times).await;
        scene.hold_rows();
        let leaving = scene.second.submit(&scene.proxy.params, request(0));
        // With the short times of `quick`, the load may end before its client leaves.
        wait_until_async("the load has begun", || {
            scene.second.num(FetchOutcome::Begun) == 1
        })
        .await;
        drop(leaving);
        let num_live = || scene.second.engine.stats().num_live_requests;
        wait_until_async("it has left", || num_live() == 0).await;
        end(&scene.proxy);
        scene.at_rest().await;
        let loads = scene.second.blocks.loads();
        assert_eq!(loads.num_loaded + loads.num_failed, 1);
        scene.proxy.release();
        let tokens = scene.second.compute(request(0)).await;
        assert_eq!(tokens, lone(&scene.model, 0));
    }
}

/// Answers and rows that arrive after their deadlines are dropped.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_comes_behind_its_deadline_is_dropped() {
    let quick = FetchConfig {
        lookup: SOON,
        ..FETCHES
    };
    let scene = Scene::new(model(256), quick).await;
    scene
        .proxy
        .judge(|passing| match passing.is(BlockVerb::Found) {
            true => Verdict::Hold,
            false => Verdict::Pass,
        });
    scene.assert_answered(0).await;
    assert_eq!(scene.second.num(FetchOutcome::Failed), 1);
    wait_until_async("the answer waits", || scene.proxy.num_held() == 1).await;
    scene.proxy.release();
    // The next answer arrives after the late one.
    let third = Node::start(&scene.model, 13, Way::Tcp);
    assert_eq!(
        third.answer_from(&scene.proxy.params, request(0)).await,
        [lone(&scene.model, 0)]
    );
    scene.assert_answered(1).await;
    assert_eq!(scene.second.num_blocks(), 0);
    third.at_rest().await;
    scene.at_rest().await;
    assert_eq!(scene.first.blocks.source.stats().num_complete, 1);

    let quick = FetchConfig {
        stall: SOON,
        ..FETCHES
    };
    let scene = Scene::new(model(256), quick).await;
    scene.hold_rows();
    scene.assert_answered(0).await;
    scene.loads_have_ended().await;
    assert_eq!(scene.second.blocks.loads().num_failed, 1);
    scene.at_rest().await;
    // The load's pages belong to other requests by now.
    let tokens = scene.second.compute(request(4)).await;
    assert_eq!(tokens, lone(&scene.model, 4));
    let are_late = scene.proxy.num_held() == 1;
    scene.proxy.release();
    if are_late {
        wait_until_async("late rows have come", || {
            scene.second.blocks.receiver.stats().num_unknown_frames > 0
        })
        .await;
    }
    scene.assert_answered(4).await;
    assert_eq!(scene.second.num_blocks(), 0);
    scene.at_rest().await;
}
