//! Requests of a pair with an adapter, which nodes identify by its contents.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use corella_cluster::kv_connector::PromptFetchOutcome;
use corella_core::{SamplingParams, TokenId};
use corella_cpu::{CpuConfig, CpuExecutor};
use corella_engine::{Engine, LoadedAdapter, Submission};
use corella_model::{Adapter, Checkpoint, DType, KvFormat};

use crate::pair::fixture::*;
use crate::pair::kv_connector::Node;

fn golden(name: &str) -> PathBuf {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    golden.join(name)
}

fn executor() -> Box<CpuExecutor> {
    let checkpoint = Checkpoint::open(golden("llama-gqa-tied")).expect("the model is there");
    let config = CpuConfig {
        num_threads: 1,
        turns: None,
        weight_format: None,
        kv_format: KvFormat::Float(DType::F32),
        kv_groups: None,
        num_pages: 256,
        page_size: 8,
        max_num_seqs: MAX_SEQS,
        max_num_batched_tokens: MAX_STEP_TOKENS,
        max_model_len: MAX_CONTEXT,
        max_draft_tokens: 0,
        num_snapshots: 0,
        isa: None,
        num_stages: 1,
        max_adapter_rank: Some(8),
        pin_threads: false,
        profile: None,
    };
    let spec = checkpoint.config().spec.clone();
    let weights = checkpoint.weights().expect("the weights can be read");
    Box::new(CpuExecutor::new(spec, weights, config).expect("the executor starts"))
}

/// Loads the adapter of a folder, as a server does for its callers.
fn load(engine: &Engine, name: &str, folder: &str) -> Arc<LoadedAdapter> {
    let model = Checkpoint::open(golden("llama-gqa-tied")).expect("the model is there");
    let adapter = Adapter::open(&golden("adapters").join(folder), model.config());
    let adapters = engine.adapters().expect("the executor takes adapters");
    let adapter = adapter.expect("it can be read");
    let loaded = Arc::new(LoadedAdapter::new(name, &adapter, adapters.clone()));
    engine.served_adapters().add(&loaded);
    loaded
}

fn prompts() -> Vec<Vec<TokenId>> {
    let prompt = |len| (0..len).map(|i| (i * 7 + len) % 79).collect();
    [5, 16, 40, 41, 100].map(prompt).to_vec()
}

/// Returns the answers of a generator with an adapter and without one.
async fn answers(
    submit: impl Fn(Submission) -> corella_engine::TokenStream,
    adapter: &Arc<LoadedAdapter>,
) -> Vec<Vec<TokenId>> {
    let mut all = Vec::new();
    for prompt in prompts() {
        for adapter in [Some(adapter.clone()), None] {
            let mut asked = submission(prompt.clone(), 16, SamplingParams::GREEDY);
            asked.adapter = adapter;
            all.push(finish(submit(asked)).await.0);
        }
    }
    all
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_adapter_is_known_by_its_contents() {
    let (alone, _) = start_engine(executor());
    let adapter = load(&alone, "alone", "llama-all");
    let ask = |asked| alone.submit(asked).expect("it is taken").remove(0);
    let expected = answers(ask, &adapter).await;
    let differ = expected.chunks(2).filter(|pair| pair[0] != pair[1]);
    assert!(differ.count() > 0, "the adapter changes no answer");

    let decode = Decode::start_with(executor(), 11).await;
    let prefill = Prefill::start_with(executor(), &[&decode]);
    let here = load(&prefill.engine, "here", "llama-all");
    let num_tokens = prompts().len() as u64 * 15;
    let num_decoded = || decode.engine.stats().scheduler.num_generated_tokens;

    // The decode node has no adapter, so requests with one stay on the prefill node.
    let ask = |asked| prefill.submit(asked).remove(0);
    assert_eq!(answers(ask, &here).await, expected);
    at_rest(&decode.engine).await;
    assert_eq!(num_decoded(), num_tokens);

    // This adapter has the same name and other contents.
    let other = load(&decode.engine, "here", "llama-some");
    assert_eq!(answers(ask, &here).await, expected);
    at_rest(&decode.engine).await;
    assert_eq!(num_decoded(), 2 * num_tokens);

    // This adapter has another name and the same contents.
    let there = load(&decode.engine, "there", "llama-all");
    assert_eq!(there.fingerprint(), here.fingerprint());
    assert_ne!(other.fingerprint(), here.fingerprint());
    assert_eq!(answers(ask, &here).await, expected);
    at_rest(&decode.engine).await;
    assert_eq!(num_decoded(), 4 * num_tokens);

    // The decode node no longer serves the adapter.
    decode.engine.served_adapters().remove(&there);
    assert_eq!(answers(ask, &here).await, expected);
    at_rest(&prefill.engine).await;
    at_rest(&decode.engine).await;
    assert_eq!(num_decoded(), 5 * num_tokens);
}

/// Returns a greedy request for `max_tokens`.
fn asked(prompt: &[TokenId], max_tokens: u32, adapter: Option<&Arc<LoadedAdapter>>) -> Submission {
    Submission {
        adapter: adapter.cloned(),
        ..submission(prompt.to_vec(), max_tokens, SamplingParams::GREEDY)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fetched_prompt_knows_an_adapter_by_its_contents() {
    let (alone, _) = start_engine(executor());
    let lone = load(&alone, "alone", "llama-all");
    let lone_other = load(&alone, "other", "llama-some");
    let lone_tokens = async |prompt: &[TokenId], adapter: Option<&Arc<LoadedAdapter>>| {
        let mut streams = alone.submit(asked(prompt, 16, adapter));
        let stream = streams.as_mut().expect("it is taken").remove(0);
        [finish(stream).await.0]
    };

    let (prefill, decode) = (
        Node::start_on(executor(), 7),
        Node::start_on(executor(), 11),
    );
    let here = load(&prefill.engine, "here", "llama-all");
    let there = load(&decode.engine, "there", "llama-all");
    for prompt in prompts() {
        let params = prefill.keep_for(asked(&prompt, 1, Some(&here))).await;
        let answer = decode.answer(&params, asked(&prompt, 16, Some(&there)));
        assert_eq!(answer.await, lone_tokens(&prompt, Some(&lone)).await);
    }
    let num_prompts = prompts().len() as u64;
    assert_eq!(decode.num(PromptFetchOutcome::Loaded), num_prompts);
    at_rest(&decode.engine).await;
    assert_eq!(
        decode.engine.stats().scheduler.num_scheduled_tokens,
        num_prompts * 16,
        "each answer computes one row for each of its tokens"
    );

    // On the decode node, the prefill node's name belongs to an adapter with other contents.
    let other = load(&decode.engine, "here", "llama-some");
    let prompt = prompts().pop().expect("there are prompts");
    let adapted = prefill.keep_for(asked(&prompt, 1, Some(&here))).await;
    let plain = prefill.keep_for(asked(&prompt, 1, None)).await;
    let cases = [
        (&adapted, Some(&other), Some(&lone_other)),
        (&adapted, None, None),
        (&plain, Some(&there), Some(&lone)),
    ];
    for (at, (params, adapter, lone)) in cases.into_iter().enumerate() {
        decode.engine.reset_prefix_cache().expect("nothing runs");
        let answer = decode.answer(params, asked(&prompt, 16, adapter));
        assert_eq!(answer.await, lone_tokens(&prompt, lone).await);
        assert_eq!(decode.num(PromptFetchOutcome::Unusable), at as u64 + 1);
        at_rest(&decode.engine).await;
    }
    // The rows are still kept for a request with the same adapter.
    decode.engine.reset_prefix_cache().expect("nothing runs");
    let answer = decode.answer(&adapted, asked(&prompt, 16, Some(&there)));
    assert_eq!(answer.await, lone_tokens(&prompt, Some(&lone)).await);
    assert_eq!(decode.num(PromptFetchOutcome::Loaded), num_prompts + 1);
}
