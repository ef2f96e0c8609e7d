//! A model with sliding windows on two nodes. Its answers equal those of one process that keeps all pages, bit for bit,
//! and only the rows of a long prompt that the windows reach are sent.

use std::path::Path;

use corella_core::{FinishReason, SamplingParams, TokenId};
use corella_cpu::{CpuConfig, CpuExecutor};
use corella_model::{Checkpoint, DType, KvFormat, KvGroups, KvPages};

use crate::pair::fixture::*;

/// The page formats of a node for Gemma 3's shape, whose windows have 24 positions.
#[derive(Clone, Copy)]
struct Kind {
    keeps_context: bool,
    page_size: u32,
    num_stages: usize,
}

const PLAIN: Kind = Kind {
    keeps_context: true,
    page_size: 8,
    num_stages: 1,
};

fn executor(kind: Kind) -> Box<CpuExecutor> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/gemma3");
    let checkpoint = Checkpoint::open(&folder).expect("the model is there");
    let spec = checkpoint.config().spec.clone();
    let kv_groups = match kind.keeps_context {
        true => KvGroups::one(&spec),
        false => KvGroups::by_window(&spec),
    };
    let config = CpuConfig {
        num_threads: kind.num_stages,
        turns: None,
        weight_format: None,
        kv_format: KvFormat::Float(DType::Bf16),
        kv_groups: Some(kv_groups),
        num_pages: 400,
        page_size: kind.page_size,
        max_num_seqs: MAX_SEQS,
        max_num_batched_tokens: MAX_STEP_TOKENS,
        max_model_len: MAX_CONTEXT,
        max_draft_tokens: 0,
        num_snapshots: 0,
        isa: None,
        num_stages: kind.num_stages,
        max_adapter_rank: None,
        pin_threads: false,
        profile: None,
    };
    let weights = checkpoint.weights().expect("the weights can be read");
    Box::new(CpuExecutor::new(spec, weights, config).expect("the executor starts"))
}

/// Prompts that end before, in and after the first window, and at the end of a page, some with a common beginning.
fn prompts() -> Vec<Vec<TokenId>> {
    let prompt = |(seed, len): (u64, u64)| {
        let token = |i| (i * i * 37 + i * 11 + seed * 53) % 79;
        (0..len).map(|i| token(i) as TokenId).collect()
    };
    let asked = [
        (1, 5),
        (1, 24),
        (1, 96),
        (1, 97),
        (2, 150),
        (2, 200),
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn windows_reach_no_bit_of_an_answer_of_two_nodes() {
    const NUM_TOKENS: u32 = 20;
    let (alone, _) = start_engine(executor(PLAIN));
    let mut expected = Vec::new();
    for (at, prompt) in prompts().into_iter().enumerate() {
        let asked = submission(prompt, NUM_TOKENS, sampling(at));
        let stream = alone.submit(asked).expect("it is taken").remove(0);
        expected.push(finish(stream).await);
    }
    let prefill = Kind {
        keeps_context: false,
        ..PLAIN
    };
    // Stages divide pages differently.
    for num_stages in [1, 2] {
        let decode = Kind {
            num_stages,
            ..prefill
        };
        let decode = Decode::start_with(executor(decode), 11).await;
        let prefill = Prefill::start_with(executor(prefill), &[&decode]);
        for (at, prompt) in prompts().into_iter().enumerate() {
            let asked = submission(prompt, NUM_TOKENS, sampling(at));
            let answer = finish(prefill.submit(asked).remove(0)).await;
            assert_eq!(answer, expected[at], "prompt {at}, {num_stages} stages");
            assert_eq!(answer.1, FinishReason::Length);
        }
        at_rest(&prefill.engine).await;
        at_rest(&decode.engine).await;
        assert!(prefill.node.fallbacks().is_empty());
        let there = decode.engine.stats().scheduler;
        let num_decoded = prompts().len() as u64 * u64::from(NUM_TOKENS - 1);
        assert_eq!(there.num_generated_tokens, num_decoded);
        assert_eq!(there.num_prefix_query_tokens, 0, "it computes no prompt");
    }
}

/// The sent rows begin at a page of the prefill node. A larger page of the decode node may begin earlier. It would lack
/// rows, and the prefix cache would offer it to other requests.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_with_windows_and_other_pages_do_not_work_together() {
    let windows = Kind {
        keeps_context: false,
        ..PLAIN
    };
    let others = Kind {
        page_size: 16,
        ..windows
    };
    let decode = Decode::start_with(executor(others), 11).await;
    let prefill = Prefill::start_with(executor(windows), &[&decode]);
    let prompt: Vec<TokenId> = (0..200).map(|i| i * 7 % 79).collect();
    let asked = submission(prompt, 4, SamplingParams::GREEDY);
    let (tokens, _) = finish(prefill.submit(asked).remove(0)).await;
    assert_eq!(tokens.len(), 4);
    at_rest(&prefill.engine).await;
    assert_eq!(decode.engine.stats().scheduler.num_steps, 0);
}

/// Without a window, a layer has 25 pages of the prompt's 200 rows. A window of 24 positions reaches rows 177 to 199,
/// which lie in three pages.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_no_window_reaches_is_not_sent() {
    let windows = Kind {
        keeps_context: false,
        ..PLAIN
    };
    let decode = Decode::start_with(executor(windows), 11).await;
    let prefill = Prefill::start_with(executor(windows), &[&decode]);
    let prompt: Vec<TokenId> = (0..200).map(|i| i * 7 % 79).collect();
    let asked = submission(prompt, 4, SamplingParams::GREEDY);
    finish(prefill.submit(asked).remove(0)).await;
    at_rest(&prefill.engine).await;
    let pages = prefill.engine.kv_pages();
    let Layers { full, windowed } = layers(&**pages);
    let num_pages = full * 25 + windowed * 3;
    assert!(full > 0 && windowed > full);
    let num_bytes = u64::from(num_pages) * pages.geometry().layer_bytes() as u64;
    assert_eq!(prefill.node.stats().num_bytes_sent, num_bytes);
}

/// The numbers of layers without a window and with one.
struct Layers {
    full: u32,
    windowed: u32,
}

fn layers(pages: &dyn KvPages) -> Layers {
    let layers = &pages.geometry().layers;
    let groups = (0..layers.num_layers()).map(|layer| layers.group_of(layer));
    let windowed = groups.filter(|group| group.window.is_some()).count() as u32;
    Layers {
        full: layers.num_layers() - windowed,
        windowed,
    }
}
