//! Models with recurrent layers on two nodes: their answers equal one process's, bit for bit.

use std::path::Path;

use corella_core::{HeadRoom, SamplingParams, SchedulerConfig, Speculation, TokenId};
use corella_cpu::{CpuConfig, CpuExecutor};
use corella_model::{Checkpoint, MockConfig};

use crate::pair::fixture::*;

const NUM_TOKENS: u32 = 24;

/// The ways in which two nodes of the same model may differ.
#[derive(Clone, Copy)]
struct Kind {
    num_pages: u32,
    num_stages: u32,
    /// Records of states are larger where drafts may be taken back.
    num_drafts: u32,
    has_head: bool,
}

const PLAIN: Kind = Kind {
    num_pages: 400,
    num_stages: 1,
    num_drafts: 0,
    has_head: false,
};

impl Kind {
    fn set(self, limits: &mut SchedulerConfig) {
        limits.num_pages = self.num_pages;
        limits.num_pipeline_stages = self.num_stages;
        // A draft depends on the token before it.
        limits.max_inflight_steps = if self.num_drafts > 0 { 1 } else { 2 };
        // The limit must not be 0, even without speculation.
        limits.max_draft_tokens = self.num_drafts.max(1);
        limits.speculation = match (self.has_head, self.num_drafts) {
            (true, _) => Speculation::Draft { draw_cost: 0 },
            (false, 0) => Speculation::Off,
            (false, _) => Speculation::Ngram,
        };
    }
}

fn executor(model: &str, kind: Kind) -> Box<CpuExecutor> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    let mut checkpoint = Checkpoint::open(folder.join(model)).expect("the model is there");
    if kind.has_head {
        checkpoint.add_draft_head().expect("the model has a head");
    }
    let mut limits = SchedulerConfig::new(kind.num_pages, 8, MAX_CONTEXT);
    limits.max_num_seqs = MAX_SEQS;
    limits.max_num_batched_tokens = MAX_STEP_TOKENS;
    kind.set(&mut limits);
    let config = CpuConfig {
        num_snapshots: NUM_SNAPSHOTS,
        ..CpuConfig::for_scheduler(&limits, kind.num_stages as usize)
    };
    let spec = checkpoint.config().spec.clone();
    let weights = checkpoint.weights().expect("the weights can be read");
    Box::new(CpuExecutor::new(spec, weights, config).expect("the executor starts"))
}

/// Prompts shorter than a page, prompts that end in and after the first chunk of a state and at the end of a page,
/// prompts of several chunks, and some with a common beginning.
fn prompts() -> Vec<Vec<TokenId>> {
    let prompt = |(seed, len): (u64, u64)| {
        let token = |i| (i * i * 37 + i * 11 + seed * 53) % 79;
        (0..len).map(|i| token(i) as TokenId).collect()
    };
    let asked = [
        (1, 1),
        (1, 5),
        (2, 16),
        (1, 24),
        (1, 96),
        (1, 97),
        (3, 150),
        (3, 200),
        (1, 96),
    ];
    asked.map(prompt).to_vec()
}

fn sampling(at: usize) -> SamplingParams {
    let mut sampling = SamplingParams::GREEDY;
    if at % 2 == 1 {
        sampling.temperature = 0.7;
        sampling.seed = at as u64;
    }
    sampling
}

/// Returns the answers of one process, each request alone.
async fn answers_of_one(model: &str) -> Vec<Vec<TokenId>> {
    let (alone, _) = start_engine_with(executor(model, PLAIN), |limits| PLAIN.set(limits));
    let mut expected = Vec::new();
    for (at, prompt) in prompts().into_iter().enumerate() {
        let asked = submission(prompt, NUM_TOKENS, sampling(at));
        let stream = alone.submit(asked).expect("it is taken").remove(0);
        expected.push(finish(stream).await.0);
    }
    expected
}

async fn decode_node(model: &str, kind: Kind) -> Decode {
    Decode::start_limited(executor(model, kind), 11, |limits| kind.set(limits)).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn recurrent_states_reach_the_other_node_bit_for_bit() {
    let plain = PLAIN;
    let staged = Kind {
        num_stages: 2,
        ..PLAIN
    };
    let drafting = Kind {
        num_drafts: 3,
        ..PLAIN
    };
    for model in ["qwen3-next", "qwen3-5", "lfm2"] {
        let expected = answers_of_one(model).await;
        for (how, kind) in [("plain", plain), ("staged", staged), ("drafting", drafting)] {
            let decode = decode_node(model, kind).await;
            let prefill = Prefill::start_with(executor(model, PLAIN), &[&decode]);
            // The prompts run one after the other, and then all together, when their beginnings are cached.
            for (at, prompt) in prompts().into_iter().enumerate() {
                let asked = submission(prompt, NUM_TOKENS, sampling(at));
                let (tokens, _) = finish(prefill.submit(asked).remove(0)).await;
                assert_eq!(tokens, expected[at], "{model}, {how}, prompt {at}");
            }
            let asked = prompts().into_iter().enumerate();
            let streams: Vec<_> = asked
                .map(|(at, prompt)| submission(prompt, NUM_TOKENS, sampling(at)))
                .map(|asked| prefill.submit(asked).remove(0))
                .collect();
            for (at, stream) in streams.into_iter().enumerate() {
                let (tokens, _) = finish(stream).await;
                assert_eq!(tokens, expected[at], "{model}, {how}, prompt {at} of many");
            }
            at_rest(&prefill.engine).await;
            at_rest(&decode.engine).await;
            assert!(prefill.node.fallbacks().is_empty(), "{model}, {how}");
            let there = decode.engine.stats().scheduler;
            let num_decoded = 2 * prompts().len() as u64 * u64::from(NUM_TOKENS - 1);
            assert_eq!(there.num_generated_tokens, num_decoded, "{model}, {how}");
            assert_eq!(there.num_prefix_query_tokens, 0, "it computes no prompt");
        }
    }
}

/// The head of this model guesses right wherever it has the preceding tokens' states.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_draft_head_guesses_on_the_decode_node() {
    let model = "mtp/agreeing";
    let expected = answers_of_one(model).await;
    let kind = Kind {
        num_drafts: 3,
        has_head: true,
        ..PLAIN
    };
    let decode = decode_node(model, kind).await;
    let prefill = Prefill::start_with(executor(model, PLAIN), &[&decode]);
    for (at, prompt) in prompts().into_iter().enumerate() {
        let asked = submission(prompt, NUM_TOKENS, sampling(at));
        let (tokens, _) = finish(prefill.submit(asked).remove(0)).await;
        assert_eq!(tokens, expected[at], "prompt {at}");
    }
    at_rest(&decode.engine).await;
    let there = decode.engine.stats().scheduler;
    assert!(there.num_accepted_draft_tokens > 0, "{there:?}");
}

/// A preempted request returns to its prefill node, which has its prompt and its tokens.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_a_decode_node_preempts_end_as_in_one_process() {
    for model in ["qwen3-next", "lfm2"] {
        let expected = answers_of_one(model).await;
        let kind = Kind {
            num_pages: 32,
            ..PLAIN
        };
        let decode = Decode::start_limited(executor(model, kind), 11, |limits| {
            kind.set(limits);
            limits.head_room = HeadRoom::fixed_share(0);
        });
        let decode = decode.await;
        let prefill = Prefill::start_with(executor(model, PLAIN), &[&decode]);
        for round in 0..3 {
            let asked = prompts().into_iter().enumerate();
            let streams: Vec<_> = asked
                .map(|(at, prompt)| submission(prompt, NUM_TOKENS, sampling(at)))
                .map(|asked| prefill.submit(asked).remove(0))
                .collect();
            for (at, stream) in streams.into_iter().enumerate() {
                let (tokens, _) = finish(stream).await;
                assert_eq!(tokens, expected[at], "{model}, prompt {at}, round {round}");
            }
        }
        at_rest(&prefill.engine).await;
        at_rest(&decode.engine).await;
    }
}

/// The mock refuses a slot that starts with the state of other tokens.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn states_belong_to_their_prompts() {
    let model = MockConfig {
        num_snapshots: Some(NUM_SNAPSHOTS),
        ..model(200)
    };
    let decode = Decode::start(&model, 11).await;
    let prefill = Prefill::start(&model, &[&decode]);
    let streams: Vec<_> = (1..40)
        .map(|len| {
            let prompt = (0..len).map(|i| (i * 7 + len % 3) % 50).collect();
            submission(prompt, 6, SamplingParams::GREEDY)
        })
        .map(|asked| prefill.submit(asked).remove(0))
        .collect();
    for stream in streams {
        assert_eq!(finish(stream).await.0.len(), 6);
    }
    at_rest(&prefill.engine).await;
    at_rest(&decode.engine).await;
    assert!(decode.engine.stats().scheduler.num_steps > 0);
}
