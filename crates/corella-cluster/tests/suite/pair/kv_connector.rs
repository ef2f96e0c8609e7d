//! Two nodes that a proxy pairs: one keeps prompts, the other fetches them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use corella_cluster::kv_connector::{
    AllowedPeers, KeepConfig, KeptEnd, KeptPrompts, KvConnector, PromptFetchOutcome, PromptFetcher,
    Site,
};
use corella_cluster::transport::{
    KvReceiver, KvSender, PeerAddress, ReceiverConfig, SenderConfig, TransferThreads,
};
use corella_core::session::{Hello, SessionConfig};
use corella_core::{FinishReason, SamplingParams, TokenId};
use corella_engine::{Engine, Generate, Submission};
use corella_model::{Executor, KvPages, MockConfig, MockExecutor};
use corella_test::wait_until_async;
use serde_json::{Map, Value, json};
use tokio::net::TcpListener;

use crate::pair::fixture::*;

pub struct Node {
    pub engine: Engine,
    pub connector: KvConnector,
    kept: Arc<KeptPrompts>,
    prompt_fetcher: Arc<PromptFetcher>,
    // The threads that send and receive rows.
    _threads: TransferThreads,
}

impl Node {
    fn start(model: &MockConfig, incarnation: u64) -> Self {
        Self::start_on(Box::new(MockExecutor::new(model.clone())), incarnation)
    }

    pub fn start_on(executor: Box<dyn Executor>, incarnation: u64) -> Self {
        Self::start_with(
            executor,
            incarnation,
            None,
            session_config(),
            CONNECT_TIMEOUT,
        )
    }

    fn start_with(
        executor: Box<dyn Executor>,
        incarnation: u64,
        max_bandwidth: Option<u64>,
        times: SessionConfig,
        connect_timeout: Duration,
    ) -> Self {
        let engine = start_engine(executor);
        let hello = hello("a-node", incarnation, &*engine.1);
        Self::start_as(&hello, engine, max_bandwidth, times, connect_timeout)
    }

    pub fn start_as(
        hello: &Hello,
        (engine, pages): (Engine, Arc<dyn KvPages>),
        max_bandwidth: Option<u64>,
        times: SessionConfig,
        connect_timeout: Duration,
    ) -> Self {
        let (incarnation, arithmetic) = (hello.incarnation.0, hello.arithmetic());
        let threads = TransferThreads::start(1).expect("threads start");
        let mut config = SenderConfig::new(incarnation, FINGERPRINT, arithmetic);
        config.max_bandwidth = max_bandwidth;
        let sender = Arc::new(KvSender::start(config, pages.clone(), &threads).unwrap());
        let local: SocketAddr = "127.0.0.1:0".parse().expect("an address");
        let PeerAddress::Tcp(address) = sender.listen(local).expect("a port is free") else {
            panic!("a TCP address was asked for");
        };
        let keep = KeepConfig {
            incarnation,
            model_fingerprint: FINGERPRINT,
            arithmetic,
            site: Site {
                host: address.ip().to_string(),
                port: address.port(),
                near: None,
            },
            lease: Duration::from_secs(60),
        };
        let kept = KeptPrompts::new(engine.clone(), sender, keep);
        kept.follow().expect("a thread starts");
        let config = ReceiverConfig {
            connect_timeout,
            ..ReceiverConfig::new(incarnation, FINGERPRINT, arithmetic)
        };
        let receiver = Arc::new(KvReceiver::new(config, pages, &threads));
        let prompt_fetcher = PromptFetcher::new(
            engine.clone(),
            receiver,
            None,
            AllowedPeers::new([]),
            hello,
            times,
        );
        let connector = KvConnector {
            kept: Some(kept.clone()),
            prompt_fetcher: Some(prompt_fetcher.clone()),
            fetcher: None,
            local: Arc::new(engine.clone()),
        };
        Self {
            engine,
            connector,
            kept,
            prompt_fetcher,
            _threads: threads,
        }
    }

    /// Returns the parameters of a prompt that this node computes and keeps.
    pub async fn keep(&self, prompt: &[TokenId]) -> Map<String, Value> {
        let asked = submission(prompt.to_vec(), 1, SamplingParams::GREEDY);
        self.keep_for(asked).await
    }

    /// Like `keep`, for a submission of one token.
    pub async fn keep_for(&self, submission: Submission) -> Map<String, Value> {
        let asked = json!({"do_remote_decode": true, "do_remote_prefill": false});
        let call = self
            .connector
            .begin(asked.as_object().expect("an object"), "a-test");
        let call = call.expect("it is valid").expect("it asks for something");
        assert!(call.keeps_prompt());
        let mut streams = call.submit(submission).expect("it is taken");
        let (tokens, reason) = finish(streams.remove(0)).await;
        assert_eq!((tokens.len(), reason), (1, FinishReason::Length));
        match call.response() {
            Some(Value::Object(params)) => params,
            other => panic!("the prompt is not kept: {other:?}"),
        }
    }

    /// Returns the tokens of each choice.
    pub async fn answer(
        &self,
        params: &Map<String, Value>,
        submission: Submission,
    ) -> Vec<Vec<TokenId>> {
        let call = self.connector.begin(params, "a-test");
        let call = call.expect("it is valid").expect("it asks for something");
        assert!(!call.keeps_prompt());
        let mut answers = Vec::new();
        for stream in call.submit(submission).expect("it is taken") {
            let (tokens, reason) = finish(stream).await;
            assert_eq!(reason, FinishReason::Length);
            answers.push(tokens);
        }
        assert_eq!(call.response(), None);
        answers
    }

    pub fn num(&self, outcome: PromptFetchOutcome) -> u64 {
        self.prompt_fetcher.num_requests(outcome)
    }
}

fn seeded(seed: u64) -> SamplingParams {
    SamplingParams {
        temperature: 1.0,
        seed,
        ..SamplingParams::GREEDY
    }
}

fn prompt(first: TokenId, num_tokens: u32) -> Vec<TokenId> {
    (0..num_tokens).map(|i| (first + i * i) % 50).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_that_one_node_keeps_is_not_computed_by_the_other() {
    for model in [model(256), windowed_model(256)] {
        compare_fetched_with_lone_runs(model).await;
    }
}

async fn compare_fetched_with_lone_runs(model: MockConfig) {
    let (prefill, decode) = (Node::start(&model, 7), Node::start(&model, 11));
    // One token, less than a page, whole pages, and more; some prompts share a beginning.
    for (at, num_tokens) in [1, 3, 4, 5, 8, 31, 32, 33, 100].into_iter().enumerate() {
        let prompt = prompt(at as TokenId / 2, num_tokens);
        let params = prefill.keep(&prompt).await;
        let sampling = seeded(at as u64);
        let expected = model.lone_tokens(&prompt, &sampling, 12);
        let asked = submission(prompt, 12, sampling);
        assert_eq!(decode.answer(&params, asked).await, [expected]);
    }
    at_rest(&prefill.engine).await;
    at_rest(&decode.engine).await;
    assert_eq!((prefill.kept.num_kept(), decode.kept.num_kept()), (0, 0));
    assert_eq!(decode.num(PromptFetchOutcome::Loaded), 9);
    assert_eq!(prefill.kept.num_ended(KeptEnd::Fetched), 9);
    let there = decode.engine.stats().scheduler;
    assert_eq!(
        there.num_scheduled_tokens,
        9 * 12,
        "each answer computes one row for each of its tokens"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn choices_share_what_the_first_has_fetched() {
    let model = model(256);
    let (prefill, decode) = (Node::start(&model, 7), Node::start(&model, 11));
    let prompt = prompt(0, 30);
    let params = prefill.keep(&prompt).await;
    let sampling = seeded(5);
    let mut asked = submission(prompt.clone(), 12, sampling.clone());
    asked.num_choices = 4;
    let expected: Vec<_> = (0..4)
        .map(|choice| {
            let sampling = SamplingParams {
                choice,
                ..sampling.clone()
            };
            model.lone_tokens(&prompt, &sampling, 12)
        })
        .collect();
    assert_eq!(decode.answer(&params, asked).await, expected);
    assert_eq!(decode.num(PromptFetchOutcome::Loaded), 1);
    let hits = decode.engine.stats().scheduler.num_prefix_hit_tokens;
    assert!(hits >= 3 * 28, "the whole pages of the prompt: {hits}");
    at_rest(&prefill.engine).await;
    at_rest(&decode.engine).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_fetched_is_computed() {
    let model = model(256);
    let prefill = Node::start(&model, 7);
    // Failing attempts to connect last this long.
    let connect_timeout = Duration::from_millis(250);
    let decode = Node::start_with(
        Box::new(MockExecutor::new(model.clone())),
        11,
        None,
        session_config(),
        connect_timeout,
    );
    let prompt = prompt(0, 30);
    let expected = [model.lone_tokens(&prompt, &SamplingParams::GREEDY, 12)];
    let asked = || submission(prompt.clone(), 12, SamplingParams::GREEDY);
    let params = prefill.keep(&prompt).await;

    // Another prompt of the same length, and another model.
    let mut other = prompt.clone();
    other[6] += 1;
    let theirs = model.lone_tokens(&other, &SamplingParams::GREEDY, 12);
    let answer = decode.answer(&params, submission(other, 12, SamplingParams::GREEDY));
    assert_eq!(answer.await, [theirs]);
    let mut changed = params.clone();
    let engine_id = params["remote_engine_id"].as_str().expect("a string");
    let engine_id = engine_id.replace("5eed", "5eee");
    changed.insert("remote_engine_id".to_owned(), engine_id.into());
    assert_eq!(decode.answer(&changed, asked()).await, expected);
    assert_eq!(decode.num(PromptFetchOutcome::Unusable), 2);
    // Rows do not give the prompt's log-probabilities.
    let mut scored = asked();
    scored.sampling.prompt_logprobs = Some(0);
    assert_eq!(decode.answer(&params, scored).await, expected);
    assert_eq!(decode.num(PromptFetchOutcome::Unusable), 3);

    // An earlier life of the same node, a session that it does not know, a closed port, and a port that accepts and
    // stays silent.
    let silent = TcpListener::bind("127.0.0.1:0")
        .await
        .expect("a port is free");
    let silent_port = silent.local_addr().expect("it is bound").port();
    let free = TcpListener::bind("127.0.0.1:0")
        .await
        .expect("a port is free");
    let free_port = free.local_addr().expect("it is bound").port();
    drop(free);
    let request_id = params["remote_request_id"].as_str().expect("a string");
    let unknown = format!("1{}", &request_id[1..]);
    let engine_id = params["remote_engine_id"].as_str().expect("a string");
    let (engine, _life) = engine_id.rsplit_once('-').expect("it ends with a life");
    let earlier = format!("{engine}-6");
    let changes = [
        ("remote_engine_id", json!(earlier)),
        ("remote_request_id", json!(unknown)),
        ("remote_port", json!(free_port)),
        ("remote_port", json!(0)),
        ("remote_port", json!(silent_port)),
        ("remote_host", json!("no such host")),
    ];
    let mut num_failed = 0;
    for (field, value) in changes {
        let mut changed = params.clone();
        changed.insert(field.to_owned(), value);
        decode.engine.reset_prefix_cache().expect("nothing runs");
        assert_eq!(decode.answer(&changed, asked()).await, expected);
        num_failed += 1;
        assert_eq!(
            decode.num(PromptFetchOutcome::Failed),
            num_failed,
            "{field}"
        );
        at_rest(&decode.engine).await;
    }

    // The rows are still kept, for one fetch by one node.
    decode.engine.reset_prefix_cache().expect("nothing runs");
    assert_eq!(decode.answer(&params, asked()).await, expected);
    assert_eq!(decode.num(PromptFetchOutcome::Loaded), 1);
    at_rest(&prefill.engine).await;
    decode.engine.reset_prefix_cache().expect("nothing runs");
    assert_eq!(decode.answer(&params, asked()).await, expected);
    assert_eq!(decode.num(PromptFetchOutcome::Failed), num_failed + 1);
    // No fetch is needed when all rows are cached.
    assert_eq!(decode.answer(&params, asked()).await, expected);
    at_rest(&decode.engine).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_takes_everything_along() {
    let model = model(256);
    let (prefill, decode) = (Node::start(&model, 7), Node::start(&model, 11));
    let prompt = prompt(0, 30);
    // While the node waits for rows from a silent peer.
    let mut params = prefill.keep(&prompt).await;
    let silent = TcpListener::bind("127.0.0.1:0")
        .await
        .expect("a port is free");
    let port = silent.local_addr().expect("it is bound").port();
    params.insert("remote_port".to_owned(), port.into());
    let call = decode.connector.begin(&params, "a-test");
    let call = call.expect("it is valid").expect("it asks for something");
    let streams = call.submit(submission(prompt.clone(), 12, SamplingParams::GREEDY));
    let (_socket, _) = silent.accept().await.expect("the node connects");
    assert!(decode.engine.stats().num_live_requests > 0);
    drop(streams);
    at_rest(&decode.engine).await;
    assert_eq!(decode.num(PromptFetchOutcome::Failed), 0);

    // Before the parameters for the rows are known.
    let kept = prefill.kept.num_kept();
    let asked = json!({"do_remote_decode": true});
    let call = prefill
        .connector
        .begin(asked.as_object().expect("an object"), "a-test");
    let call = call.expect("it is valid").expect("it asks for something");
    let streams = call.submit(submission(prompt, 1, SamplingParams::GREEDY));
    assert_eq!(prefill.kept.num_kept(), kept + 1);
    drop((streams, call));
    assert_eq!(prefill.kept.num_kept(), kept);
    assert_eq!(prefill.kept.num_ended(KeptEnd::Dropped), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_without_room_computes_the_prompt_when_it_has() {
    let prefill = Node::start(&model(256), 7);
    let small = model(16);
    let decode = Node::start(&small, 11);
    let prompt = prompt(1, 20);
    let params = prefill.keep(&prompt).await;
    let others = KeptPages::new(&decode.engine, 60).await;
    let asked = submission(prompt.clone(), 30, SamplingParams::GREEDY);
    let make_room = async {
        wait_until_async("there is no room", || {
            decode.num(PromptFetchOutcome::NoRoom) == 1
        })
        .await;
        drop(others);
    };
    let (answer, ()) = tokio::join!(decode.answer(&params, asked), make_room);
    let expected = small.lone_tokens(&prompt, &SamplingParams::GREEDY, 30);
    assert_eq!(answer, [expected]);
    assert_eq!(decode.num(PromptFetchOutcome::Loaded), 0);
    at_rest(&decode.engine).await;
}

/// The other node keeps its connection, and sends next to nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fetch_that_stands_still_is_given_up_long_before_its_deadline() {
    let model = model(256);
    let prefill = Node::start_with(
        Box::new(MockExecutor::new(model.clone())),
        7,
        Some(1),
        session_config(),
        CONNECT_TIMEOUT,
    );
    let times = SessionConfig {
        lost_after_us: 500_000,
        load_base_us: 3_600_000_000,
        ..session_config()
    };
    let decode = Node::start_with(
        Box::new(MockExecutor::new(model.clone())),
        11,
        None,
        times,
        CONNECT_TIMEOUT,
    );
    let prompt = prompt(0, 100);
    let params = prefill.keep(&prompt).await;
    let expected = model.lone_tokens(&prompt, &SamplingParams::GREEDY, 12);
    let asked = submission(prompt, 12, SamplingParams::GREEDY);
    assert_eq!(decode.answer(&params, asked).await, [expected]);
    assert_eq!(decode.num(PromptFetchOutcome::Failed), 1);
    at_rest(&decode.engine).await;
}
