//! Nodes with all pairs of weight and KV formats, and all ways in which rows come from one to the other. Whatever a
//! node has received, its own requests get the bits of a lone process.

use std::future::poll_fn;
use std::sync::Arc;

use corella_cluster::kv_connector::{FetchOutcome, KvConnector, PromptFetchOutcome};
use corella_core::session::Hello;
use corella_core::{Sample, SamplingParams, TokenId};
use corella_engine::{Engine, Generate, StreamEvent, Submission, TokenStream};
use corella_model::{DType, KvFormat, KvPages, WeightFormat};
use serde_json::{Map, Value};

use crate::pair::blocks::{Blocks, FETCHES, Way};
use crate::pair::fixture::*;
use crate::pair::kv_connector;
use crate::pair::mixed::{Kind, in_turn};

const NUM_TOKENS: usize = 8;

fn kinds() -> Vec<Kind> {
    let weights = [
        None,
        Some(WeightFormat::Int8),
        Some(WeightFormat::Int4 { group_len: 128 }),
    ];
    let with_kv = |weight_format| {
        [KvFormat::Float(DType::Bf16), KvFormat::Int8].map(|kv_format| Kind {
            weight_format,
            kv_format,
            page_size: 16,
        })
    };
    weights.into_iter().flat_map(with_kv).collect()
}

/// Four whole pages and a part of one.
fn prompt() -> Vec<TokenId> {
    (0..75).map(|i| 300 + i * 37 % 1500).collect()
}

fn scored() -> SamplingParams {
    SamplingParams {
        logprobs: Some(4),
        ..SamplingParams::GREEDY
    }
}

fn asked(prompt: &[TokenId]) -> Submission {
    submission(prompt.to_vec(), NUM_TOKENS as u32, scored())
}

/// The tokens of an answer with their log-probabilities.
async fn samples(mut stream: TokenStream) -> Vec<Sample> {
    let mut samples = Vec::new();
    while let Some(event) = poll_fn(|cx| stream.poll_next(cx)).await {
        match event {
            StreamEvent::Accepted => {}
            StreamEvent::Refused(error) => panic!("refused: {error}"),
            StreamEvent::Output(output) => samples.extend(output.sample),
        }
    }
    assert_eq!(samples.len(), NUM_TOKENS);
    samples
}

async fn plain(engine: &Engine) -> Vec<Sample> {
    let mut streams = engine.submit(asked(&prompt())).expect("it is taken");
    samples(streams.remove(0)).await
}

async fn through(connector: &KvConnector, params: &Map<String, Value>) -> Vec<Sample> {
    let call = connector.begin(params, "a-test").expect("it is valid");
    let call = call.expect("it asks for something");
    let mut streams = call.submit(asked(&prompt())).expect("it is taken");
    samples(streams.remove(0)).await
}

fn tokens(samples: &[Sample]) -> Vec<TokenId> {
    samples.iter().map(|sample| sample.token).collect()
}

fn start(kind: Kind) -> (Engine, Arc<dyn KvPages>) {
    start_engine(Box::new(kind.executor()))
}

fn hello_of(kind: Kind, incarnation: u64, pages: &dyn KvPages) -> Hello {
    let weight_format = format!("{:?}", kind.weight_format);
    hello_with("a-node", incarnation, pages, &weight_format)
}

/// Starts two nodes of each kind.
fn two_of_each<N>(
    kinds: &[Kind],
    start_node: impl Fn(&Hello, (Engine, Arc<dyn KvPages>)) -> N,
) -> [Vec<N>; 2] {
    [100, 200].map(|first_incarnation| {
        let nodes = (first_incarnation..)
            .zip(kinds)
            .map(|(incarnation, &kind)| {
                let engine = start(kind);
                let hello = hello_of(kind, incarnation, &*engine.1);
                start_node(&hello, engine)
            });
        nodes.collect()
    })
}

/// What each kind of node answers alone.
async fn lone_answers(kinds: &[Kind]) -> Vec<Vec<Sample>> {
    let mut answers = Vec::new();
    for &kind in kinds {
        answers.push(plain(&start(kind).0).await);
    }
    for (i, answer) in answers.iter().enumerate() {
        assert!(!answers[..i].contains(answer), "the formats show");
    }
    answers
}

async fn reset(engine: &Engine) {
    at_rest(engine).await;
    engine.reset_prefix_cache().expect("nothing runs");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hint_brings_no_blocks_of_other_bits() {
    let kinds = kinds();
    let lone = lone_answers(&kinds).await;
    let [sources, targets] = two_of_each(&kinds, |hello, (engine, _)| {
        let blocks = Blocks::start_as(hello, &engine, Way::Tcp, FETCHES, None);
        (engine, blocks)
    });
    for (engine, _) in &sources {
        plain(engine).await;
    }
    for (from, (_, source)) in sources.iter().enumerate() {
        for (to, (engine, target)) in targets.iter().enumerate() {
            let pair = format!("{:?} to {:?}", kinds[from], kinds[to]);
            reset(engine).await;
            let connector = KvConnector {
                kept: None,
                prompt_fetcher: None,
                fetcher: Some(target.fetcher.clone()),
                local: Arc::new(engine.clone()),
            };
            let num = |outcome| target.fetcher.num_requests(outcome);
            let before = (num(FetchOutcome::Begun), num(FetchOutcome::Failed));
            let num_blocks = target.loads().num_blocks;
            assert_eq!(
                through(&connector, &source.params).await,
                lone[to],
                "{pair}"
            );
            assert_eq!(plain(engine).await, lone[to], "{pair}, behind it");
            let after = (num(FetchOutcome::Begun), num(FetchOutcome::Failed));
            let num_loaded = target.loads().num_blocks - num_blocks;
            match from == to {
                true => assert_eq!((after.0 - before.0, num_loaded), (1, 4)),
                false => assert_eq!((after.1 - before.1, num_loaded), (1, 0), "{pair}"),
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fetched_rows_of_other_bits_are_found_by_prompt_fetches_alone() {
    let kinds = kinds();
    let lone = lone_answers(&kinds).await;
    let [sources, targets] = two_of_each(&kinds, |hello, engine| {
        kv_connector::Node::start_as(hello, engine, None, session_config(), CONNECT_TIMEOUT)
    });
    let prompt = prompt();
    for (from, source) in sources.iter().enumerate() {
        for (to, target) in targets.iter().enumerate() {
            let (sent, there) = (kinds[from], kinds[to]);
            let pair = format!("{sent:?} to {there:?}");
            reset(&target.engine).await;
            // The node that fetches computes the last row itself.
            let row = prompt.len() - 1;
            let expected = in_turn(row, sent, there, &prompt, &scored(), NUM_TOKENS);
            let num_loaded = target.num(PromptFetchOutcome::Loaded);
            for time in ["once", "again"] {
                let params = source.keep(&prompt).await;
                let answer = through(&target.connector, &params).await;
                assert_eq!(tokens(&answer), expected, "{pair}, {time}");
                assert_eq!(plain(&target.engine).await, lone[to], "{pair}, {time}");
            }
            assert_eq!(
                target.num(PromptFetchOutcome::Loaded),
                num_loaded + 2,
                "{pair}"
            );

            // Rows of other bits are of no use for several choices.
            reset(&target.engine).await;
            let params = source.keep(&prompt).await;
            let call = target.connector.begin(&params, "a-test");
            let call = call.expect("it is valid").expect("it asks for something");
            let twice = Submission {
                num_choices: 2,
                ..asked(&prompt)
            };
            for stream in call.submit(twice).expect("it is taken") {
                assert_eq!(samples(stream).await, lone[to], "{pair}, two choices");
            }
            let expected = num_loaded + 2 + u64::from(from == to);
            assert_eq!(target.num(PromptFetchOutcome::Loaded), expected, "{pair}");

            // A caller claims that the rows have this node's arithmetic.
            reset(&target.engine).await;
            let mut params = source.keep(&prompt).await;
            let engine_id = params["remote_engine_id"].as_str().expect("a string");
            let mut parts: Vec<_> = engine_id.split('-').collect();
            let own = hello_of(there, 200, &**target.engine.kv_pages()).arithmetic();
            let own = format!("{:x}", own.0);
            parts[3] = &own;
            let claimed = parts.join("-");
            params.insert("remote_engine_id".to_owned(), claimed.into());
            let answer = through(&target.connector, &params).await;
            assert_eq!(answer, lone[to], "{pair}, claimed to be equal");
            assert_eq!(plain(&target.engine).await, lone[to], "{pair}, behind that");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_of_a_session_between_formats_are_found_by_such_sessions_alone() {
    let kinds = kinds();
    let lone = lone_answers(&kinds).await;
    let prompt = prompt();
    for &sent in &kinds {
        for (to, &there) in kinds.iter().enumerate() {
            let pair = format!("{sent:?} to {there:?}");
            let weight_format = format!("{:?}", there.weight_format);
            let decode = Decode::start_on(start(there), 11, &weight_format).await;
            let engine = start(sent);
            let hello = hello_of(sent, PREFILL_INCARNATION, &*engine.1);
            let prefill = Prefill::start_as(hello, engine, PrefillOptions::default());
            prefill.know(&[&decode]);
            let num_sent = || prefill.node.stats().num_bytes_sent;
            let mut turn = prompt.clone();
            let mut sizes = Vec::new();
            for time in ["first", "again", "next turn"] {
                let before = num_sent();
                let expected = in_turn(turn.len(), sent, there, &turn, &scored(), NUM_TOKENS);
                let stream = prefill.submit(asked(&turn)).remove(0);
                let answer = tokens(&samples(stream).await);
                assert_eq!(answer, expected, "{pair}, {time}");
                sizes.push(num_sent() - before);
                assert_eq!(plain(&decode.engine).await, lone[to], "{pair}, {time}");
                if time == "again" {
                    // The prefill node would have computed other rows for the answer than the decode node has.
                    turn.extend(&answer);
                    turn.extend(301..320);
                }
            }
            assert!(sizes[1] < sizes[0], "{pair}: the rows are found, {sizes:?}");
            // Wherever the first prompt was computed, its whole pages are not sent again.
            assert!(sizes[2] < sizes[0], "{pair}: the rows are found, {sizes:?}");
            at_rest(&prefill.engine).await;
            at_rest(&decode.engine).await;
        }
    }
}
