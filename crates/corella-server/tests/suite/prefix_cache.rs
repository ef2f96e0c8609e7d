//! Why a prompt was not cached: each cause, at each endpoint that generates text.

use corella_core::{RecurrentState, SchedulerConfig};
use corella_engine::{KvDiskConfig, KvDiskLabel, KvPlaces};
use corella_server::ApiKey;
use corella_test::wait_until_asked;
use serde_json::{Value, json};

use crate::client::{Reply, head, post, send};
use crate::fixture::{MODEL, Setup, TestServer};

const PATH: &str = "/v1/completions";
/// 40 tokens, in ten pages of 4.
const PROMPT: &str = "You help with code. Today it is Monday. ";

/// Asks with the header, as the caller with an API key.
async fn ask_as(server: &TestServer, key: &str, path: &str, body: &Value) -> Reply {
    let body = body.to_string();
    let bearer = format!("Bearer {key}");
    let headers = [
        ("x-corella-explain", "cache"),
        ("authorization", bearer.as_str()),
    ];
    let head = head("POST", path, &headers, Some(body.len()));
    let reply = send(server.address, &head, body.as_bytes()).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply
}

fn completion(prompt: &str) -> Value {
    json!({"prompt": prompt, "temperature": 0, "max_tokens": 2})
}

async fn explain(server: &TestServer, body: &Value) -> Value {
    ask_as(server, "a", PATH, body).await.json()["prefix_cache"].clone()
}

async fn reset(server: &TestServer) {
    server.assert_at_rest().await;
    ask_as(server, "a", "/reset_prefix_cache", &json!({})).await;
}

/// Asserts the cause and the number of cached tokens. The text before the first computed token must fit this number.
fn assert_cause(explained: &Value, cause: &str, num_cached: usize) {
    assert_eq!(explained["cause"], cause, "{explained}");
    assert_eq!(explained["cached_tokens"], num_cached, "{explained}");
    let place = &explained["computed_from"];
    assert_eq!(place["position"], num_cached);
    let before = place["before"].as_str().expect("a text");
    assert_eq!(before.len(), num_cached.min(32));
}

#[tokio::test]
async fn tokens_from_host_memory_are_counted_apart() {
    let mut setup = Setup::new();
    setup.scheduler.max_fetched_pages = setup.scheduler.num_pages;
    setup.scheduler.max_served_pages = setup.scheduler.num_pages;
    setup.kv_disk = Some(KvDiskConfig {
        places: KvPlaces::Memory(1 << 20),
        label: KvDiskLabel::default(),
        identity: 1,
        keeps_salted: true,
        reads_always: true,
    });
    let server = setup.start().await;
    // The last token is computed, and ten pages are cached.
    let body = completion(&format!("{PROMPT}!"));
    for _ in 0..2 {
        explain(&server, &body).await;
    }
    wait_until_asked("ten pages are stored", async || {
        let stored = "corella_kv_host_blocks_stored_total";
        server.metric(stored, &[]).await == Some(10.0)
    })
    .await;
    reset(&server).await;
    let again = explain(&server, &body).await;
    let by_medium = json!({"memory": 0, "host": 40, "disk": 0, "peer": 0, "store": 0});
    assert_eq!(again["cached_tokens_by_medium"], by_medium);
    let hits = server.metric("corella_kv_host_hits_total", &[]).await;
    assert_eq!(hits, Some(10.0));
    // A request that wants only a cached prompt also takes it from there.
    reset(&server).await;
    let other = completion(&PROMPT.replace("Monday", "Tuesday"));
    for (body, status) in [(&body, 200), (&other, 412)] {
        let body = body.to_string();
        let head = head(
            "POST",
            PATH,
            &[("prefer", "if-available")],
            Some(body.len()),
        );
        let reply = send(server.address, &head, body.as_bytes()).await;
        assert_eq!(reply.status, status, "{}", reply.text());
    }
    assert_eq!(server.metric("corella_kv_disk_blocks", &[]).await, None);
}

fn with_keys() -> Setup {
    let mut setup = Setup::new();
    setup.server.api_keys = ["a", "b"]
        .map(|name| ApiKey::unlimited(name, name))
        .to_vec();
    setup
}

#[tokio::test]
async fn a_repeated_prompt_lacks_only_its_last_token_and_a_changed_word_is_shown() {
    let server = TestServer::start().await;
    let first = explain(&server, &completion(PROMPT)).await;
    assert_cause(&first, "restart", 0);
    assert_eq!(first["prompt_tokens"], 40);
    assert_eq!(first["computed_from"]["after"], PROMPT[..32]);

    let again = explain(&server, &completion(PROMPT)).await;
    assert_cause(&again, "partial_page", 39);
    let by_medium = json!({"memory": 39, "host": 0, "disk": 0, "peer": 0, "store": 0});
    assert_eq!(again["cached_tokens_by_medium"], by_medium);

    let changed = PROMPT.replace("Monday", "Tuesday");
    let changed = explain(&server, &completion(&changed)).await;
    assert_cause(
        &changed,
        "client",
        PROMPT.find("Monday").expect("it is there"),
    );
    assert_eq!(
        changed["computed_from"]["before"],
        "You help with code. Today it is "
    );
    assert_eq!(changed["computed_from"]["after"], "Tuesday. ");

    let other = explain(&server, &completion("Another prompt.")).await;
    assert_cause(&other, "first", 0);
}

#[tokio::test]
async fn what_the_cache_has_lost_is_told_from_what_it_never_had() {
    let server = TestServer::start().await;
    let body = json!({
        "prompt": PROMPT, "temperature": 0, "max_tokens": 12, "return_token_ids": true,
    });
    let answer = post(server.address, PATH, &body).await.json();
    let mut next = server.encode(PROMPT);
    let drawn = answer["choices"][0]["token_ids"]
        .as_array()
        .expect("tokens");
    next.extend(
        drawn
            .iter()
            .map(|token| token.as_u64().expect("a token") as u32),
    );
    let turn = |more: &str| {
        let prompt = [&*next, &server.encode(more)].concat();
        json!({"prompt": prompt, "temperature": 0, "max_tokens": 1})
    };
    // The last drawn token was not computed.
    let second = explain(&server, &turn("more")).await;
    assert_eq!(second["cause"], "client");
    assert_eq!(second["cached_tokens"], 51);

    reset(&server).await;
    // The cache has the prompt, and only the first token of the answer.
    explain(&server, &completion(PROMPT)).await;
    let third = explain(&server, &turn("less")).await;
    assert_eq!(third["cause"], "eviction");
    assert_eq!(third["cached_tokens"], 41);
}

#[tokio::test]
async fn a_prompt_that_others_have_pushed_out_was_evicted() {
    let mut setup = Setup::new();
    setup.scheduler = SchedulerConfig::new(24, 4, 64);
    setup.mock.num_pages = 24;
    setup.serve.max_model_len = 64;
    let server = setup.start().await;
    explain(&server, &completion(PROMPT)).await;
    for beginning in ["1", "2", "3"] {
        let other = completion(&format!("{beginning}{PROMPT}"));
        assert_cause(&explain(&server, &other).await, "first", 0);
    }
    let again = explain(&server, &completion(PROMPT)).await;
    assert_eq!(again["cause"], "eviction", "{again}");
}

#[tokio::test]
async fn a_caller_learns_nothing_about_prompts_of_another_key() {
    let server = with_keys().start().await;
    let asked = async |key: &str, body: &Value| {
        let reply = ask_as(&server, key, PATH, body).await;
        reply.json()["prefix_cache"].clone()
    };
    let salted = json!({"prompt": PROMPT, "max_tokens": 2, "cache_salt": "a's"});
    assert_cause(&asked("a", &salted).await, "restart", 0);
    // The caller's own salt is named, and the salt of the other key is not.
    let plain = completion(PROMPT);
    assert_cause(&asked("b", &plain).await, "restart", 0);
    let other_salt = json!({"prompt": PROMPT, "max_tokens": 2, "cache_salt": "another"});
    assert_cause(&asked("a", &other_salt).await, "salt", 0);
    assert_cause(
        &asked("b", &completion("Something else.")).await,
        "first",
        0,
    );

    reset(&server).await;
    // One key has sent the prompt before, and the other has not.
    assert_cause(&asked("a", &plain).await, "salt", 0);
    reset(&server).await;
    assert_cause(&asked("a", &plain).await, "eviction", 0);
    reset(&server).await;
    assert_cause(&asked("b", &plain).await, "eviction", 0);
    let of_a = completion("A secret that only one key has sent.");
    assert_cause(&asked("a", &of_a).await, "first", 0);
    reset(&server).await;
    assert_cause(&asked("b", &of_a).await, "first", 0);
}

/// Without keys, callers keep apart by salts that only they know.
#[tokio::test]
async fn without_keys_no_other_salt_is_told() {
    let server = TestServer::start().await;
    let salted = json!({"prompt": PROMPT, "max_tokens": 2, "cache_salt": "mine"});
    explain(&server, &salted).await;
    assert_cause(&explain(&server, &completion(PROMPT)).await, "first", 0);
}

#[tokio::test]
async fn the_same_prompt_for_another_adapter_is_told() {
    let server = crate::adapter::setup().start().await;
    crate::adapter::load(&server, "red").await;
    let body = |model: &str| json!({"model": model, "prompt": PROMPT, "max_tokens": 2});
    assert_cause(&explain(&server, &body("red")).await, "restart", 0);
    assert_cause(&explain(&server, &body(MODEL)).await, "adapter", 0);
    assert_cause(&explain(&server, &body("red")).await, "partial_page", 39);
}

#[tokio::test]
async fn a_request_that_may_not_use_the_cache_is_told_so() {
    let server = TestServer::start().await;
    explain(&server, &completion(PROMPT)).await;
    let scored = json!({"prompt": PROMPT, "max_tokens": 2, "prompt_logprobs": 1});
    assert_cause(&explain(&server, &scored).await, "off", 0);

    let mut setup = Setup::new();
    setup.scheduler.enable_prefix_caching = false;
    let server = setup.start().await;
    assert_cause(&explain(&server, &completion(PROMPT)).await, "off", 0);
}

/// The only recurrent state is the one after the whole pages of the first prompt.
#[tokio::test]
async fn a_recurrent_model_without_a_state_to_continue_from_is_told() {
    let mut setup = Setup::new();
    setup.scheduler.set_recurrent_state(RecurrentState {
        num_snapshots: 8,
        snapshot_interval: 100,
        least_distance: 100,
    });
    setup.mock.num_snapshots = Some(8);
    let server = setup.start().await;
    explain(&server, &completion(PROMPT)).await;
    let changed = PROMPT.replace("Monday", "Tuesday");
    assert_cause(&explain(&server, &completion(&changed)).await, "state", 0);
}

/// The request of each endpoint. Conversations have the same prompt.
fn bodies(turn: &str, stream: bool) -> [(&'static str, Value); 4] {
    let text = format!("{turn}{PROMPT}");
    let messages = json!([{"role": "user", "content": text}]);
    let body = |field: &str, value: Value, max_tokens: &str| json!({field: value, max_tokens: 4, "model": MODEL, "temperature": 0, "stream": stream});
    [
        (PATH, body("prompt", json!(text), "max_tokens")),
        (
            "/v1/chat/completions",
            body("messages", messages.clone(), "max_tokens"),
        ),
        (
            "/v1/messages",
            body("messages", messages.clone(), "max_tokens"),
        ),
        (
            "/v1/responses",
            body("input", messages, "max_output_tokens"),
        ),
    ]
}

/// The objects of an answer: the answer itself, or the events of its stream.
fn objects(reply: &Reply, stream: bool) -> Vec<Value> {
    match stream {
        true => crate::client::events(reply.text()),
        false => vec![reply.json()],
    }
}

/// Removes the explanations from an answer, and returns them.
fn take_explanations(objects: &mut [Value]) -> Vec<Value> {
    let mut found = Vec::new();
    for object in objects {
        let inner = match object.get("response").is_some() {
            true => &mut object["response"],
            false => object,
        };
        if let Some(fields) = inner.as_object_mut() {
            found.extend(fields.remove("prefix_cache"));
        }
    }
    found
}

/// The texts of an answer, without the ids and times that differ between answers.
fn texts(value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                match value.as_str() {
                    Some(text) if name == "text" || name == "content" || name == "delta" => {
                        found.push(text.to_owned());
                    }
                    _ => texts(value, found),
                }
            }
        }
        Value::Array(values) => values.iter().for_each(|value| texts(value, found)),
        _ => {}
    }
}

#[tokio::test]
async fn each_endpoint_explains_whole_and_in_its_last_chunk_to_callers_who_ask() {
    for stream in [false, true] {
        let server = TestServer::start().await;
        for (at, (path, body)) in bodies("1", stream).into_iter().enumerate() {
            let cold = post(server.address, path, &body).await;
            let mut cold = objects(&cold, stream);
            assert!(take_explanations(&mut cold).is_empty(), "{path}");
            let warm = ask_as(&server, "a", path, &body).await;
            let mut warm = objects(&warm, stream);
            let explained = take_explanations(&mut warm);
            assert_eq!(explained.len(), 1, "{path}: {explained:?}");
            assert_eq!(explained[0]["cause"], "partial_page", "{path}");
            let (mut before, mut after) = (Vec::new(), Vec::new());
            cold.iter().for_each(|object| texts(object, &mut before));
            warm.iter().for_each(|object| texts(object, &mut after));
            assert_eq!(before.concat(), after.concat(), "{path}");

            let (path, body) = bodies("2", stream)[at].clone();
            let other = ask_as(&server, "a", path, &body).await;
            let explained = take_explanations(&mut objects(&other, stream));
            // The third endpoint has the same prompt as the second.
            let cause = if at < 2 { "first" } else { "partial_page" };
            assert_eq!(explained[0]["cause"], cause, "{path} {explained:?}");
        }
    }
}

#[tokio::test]
async fn a_server_may_explain_without_being_asked_and_counts_misses() {
    let mut setup = Setup::new();
    setup.server.explains_cache = true;
    let server = setup.start().await;
    for cause in ["restart", "partial_page"] {
        let body = json!({"prompt": PROMPT, "max_tokens": 2, "n": 2});
        let answer = post(server.address, PATH, &body).await.json();
        assert_eq!(answer["prefix_cache"]["cause"], cause);
    }
    for (cause, num_tokens) in [("restart", 40.0), ("partial_page", 1.0)] {
        let label = format!("cause=\"{cause}\"");
        let labels = [label.as_str()];
        let misses = server.metric("corella_prefix_cache_misses_total", &labels);
        assert_eq!(misses.await, Some(num_tokens));
    }
}
