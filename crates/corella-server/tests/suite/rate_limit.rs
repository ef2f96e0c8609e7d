//! API keys with limits of their own, against a clock that the test moves.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use corella_server::{ApiKey, Clock};
use serde_json::{Value, json};

use crate::client::{Reply, head, send};
use crate::fixture::{MODEL, Setup, TestServer};

const SECOND_US: u64 = 1_000_000;

/// An accepted name of the model that is not listed.
const SHORT_NAME: &str = "mock:1b";

/// A server with keys, whose clock only the test advances.
struct Metered {
    server: TestServer,
    now_us: Arc<AtomicU64>,
}

impl Metered {
    async fn start(keys: Vec<ApiKey>) -> Self {
        let now_us = Arc::new(AtomicU64::new(0));
        let mut setup = Setup::new();
        setup.server.api_keys = keys;
        setup.serve.other_names = vec![SHORT_NAME.to_owned()];
        let shown = now_us.clone();
        setup.server.clock =
            Clock::new(move || Duration::from_micros(shown.load(Ordering::Relaxed)));
        Self {
            server: setup.start().await,
            now_us,
        }
    }

    fn pass(&self, time_us: u64) {
        self.now_us.fetch_add(time_us, Ordering::Relaxed);
    }

    async fn post(&self, key: &str, path: &str, body: &Value) -> Reply {
        let body = body.to_string();
        let bearer = format!("Bearer {key}");
        let head = head(
            "POST",
            path,
            &[("authorization", &bearer)],
            Some(body.len()),
        );
        send(self.server.address, &head, body.as_bytes()).await
    }

    async fn get(&self, key: &str, path: &str) -> Reply {
        let bearer = format!("Bearer {key}");
        let head = head("GET", path, &[("authorization", &bearer)], None);
        send(self.server.address, &head, b"").await
    }

    /// Asks for a completion with this many tokens in prompt and answer.
    async fn complete(&self, key: &str, num_prompt: usize, max_tokens: u32) -> Reply {
        let prompt = vec![u32::from(b'x'); num_prompt];
        let body = json!({"prompt": prompt, "max_tokens": max_tokens});
        self.post(key, "/v1/completions", &body).await
    }
}

fn limited(requests: Option<u32>, tokens: Option<u32>) -> ApiKey {
    ApiKey {
        requests_per_minute: requests,
        tokens_per_minute: tokens,
        is_admin: false,
        ..ApiKey::unlimited("limited", "limited")
    }
}

#[tokio::test]
async fn requests_are_allowed_to_the_microsecond() {
    let keys = vec![
        limited(Some(2), None),
        ApiKey::unlimited("other", "unlimited"),
    ];
    let metered = Metered::start(keys).await;
    let first = metered.complete("limited", 1, 1).await;
    assert_eq!(first.status, 200, "{}", first.text());
    assert_eq!(first.header("x-ratelimit-limit-requests"), Some("2"));
    assert_eq!(first.header("x-ratelimit-remaining-requests"), Some("1"));
    assert_eq!(first.header("x-ratelimit-reset-requests"), Some("30s"));
    assert_eq!(first.header("x-ratelimit-limit-tokens"), None);
    metered.pass(2 * SECOND_US);
    assert_eq!(metered.complete("limited", 1, 1).await.status, 200);

    // Two requests per minute are one per 30 seconds. Two of the 30 seconds have passed.
    let refused = metered.complete("limited", 1, 1).await;
    assert_eq!(refused.status, 429);
    assert_eq!(refused.error()["code"], "rate_limit_exceeded");
    assert_eq!(refused.header("retry-after"), Some("28"));
    assert_eq!(refused.header("retry-after-ms"), Some("28000"));
    assert_eq!(refused.header("x-ratelimit-remaining-requests"), Some("0"));
    assert_eq!(refused.header("x-ratelimit-reset-requests"), Some("58s"));
    // Other keys are not affected, and reading costs nothing.
    assert_eq!(metered.complete("unlimited", 1, 1).await.status, 200);
    assert_eq!(metered.get("limited", "/v1/models").await.status, 200);

    metered.pass(28 * SECOND_US - 1);
    let refused = metered.complete("limited", 1, 1).await;
    assert_eq!(refused.status, 429);
    assert_eq!(refused.header("retry-after-ms"), Some("1"));
    metered.pass(1);
    assert_eq!(metered.complete("limited", 1, 1).await.status, 200);
    // A faulty request counts as well.
    metered.pass(30 * SECOND_US);
    let wrong = json!({"prompt": 5});
    let reply = metered.post("limited", "/v1/completions", &wrong).await;
    assert_eq!(reply.status, 400);
    assert_eq!(metered.complete("limited", 1, 1).await.status, 429);
}

#[tokio::test]
async fn tokens_of_prompts_and_answers_are_counted() {
    let metered = Metered::start(vec![limited(None, Some(60))]).await;
    let reply = metered.complete("limited", 10, 5).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(reply.header("x-ratelimit-limit-tokens"), Some("60"));
    assert_eq!(reply.header("x-ratelimit-remaining-tokens"), Some("45"));
    assert_eq!(reply.header("x-ratelimit-reset-tokens"), Some("15s"));
    assert_eq!(reply.header("x-ratelimit-limit-requests"), None);

    // Two choices of five tokens each; their prompt counts once.
    let two = json!({"prompt": [120, 120], "max_tokens": 5, "n": 2});
    let reply = metered.post("limited", "/v1/completions", &two).await;
    assert_eq!(reply.header("x-ratelimit-remaining-tokens"), Some("33"));

    let refused = metered.complete("limited", 40, 1).await;
    assert_eq!(refused.status, 429, "{}", refused.text());
    assert_eq!(refused.error()["code"], "rate_limit_exceeded");
    assert_eq!(refused.header("retry-after"), Some("7"));
    assert_eq!(refused.header("x-ratelimit-remaining-tokens"), Some("33"));

    // An answer may take more tokens than remain, and the next request waits longer.
    let reply = metered.complete("limited", 30, 23).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(reply.header("x-ratelimit-remaining-tokens"), Some("0"));
    let refused = metered.complete("limited", 1, 1).await;
    assert_eq!(refused.header("retry-after"), Some("21"));
    metered.pass(21 * SECOND_US);
    assert_eq!(metered.complete("limited", 1, 1).await.status, 200);

    // Waiting does not help here, so the error does not suggest it.
    let never = metered.complete("limited", 61, 1).await;
    assert_eq!(never.status, 400, "{}", never.text());
    assert_eq!(never.error()["code"], "rate_limit_exceeded");
    assert_eq!(never.error()["param"], "prompt");
    assert_eq!(never.header("retry-after"), None);
}

#[tokio::test]
async fn a_prompt_that_the_engine_refuses_costs_no_tokens() {
    let metered = Metered::start(vec![limited(None, Some(600))]).await;
    // Prompt and answer do not fit into the context together.
    let refused = metered.complete("limited", 200, 200).await;
    assert_eq!(refused.status, 400, "{}", refused.text());
    let remaining = refused.header("x-ratelimit-remaining-tokens");
    assert_eq!(remaining, Some("600"));
}

#[tokio::test]
async fn messages_are_refused_in_their_own_shape() {
    let metered = Metered::start(vec![limited(Some(1), None)]).await;
    let body = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1});
    let reply = metered.post("limited", "/v1/messages", &body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    let refused = metered.post("limited", "/v1/messages", &body).await;
    assert_eq!(refused.status, 429);
    assert_eq!(refused.json()["error"]["type"], "rate_limit_error");
    assert_eq!(refused.header("retry-after"), Some("60"));
    assert_eq!(refused.header("x-ratelimit-remaining-requests"), Some("0"));
}

#[tokio::test]
async fn a_key_may_be_held_to_models_and_from_changing_the_server() {
    let other = ApiKey {
        models: Some(vec!["sql".to_owned()]),
        is_admin: false,
        ..ApiKey::unlimited("other", "other")
    };
    let mut same = other.clone();
    same.models = Some(vec![MODEL.to_owned()]);
    same.secret = ApiKey::unlimited("", "same").secret;
    let metered = Metered::start(vec![other, same, ApiKey::unlimited("boss", "boss")]).await;
    for (key, status) in [("other", 404), ("same", 200), ("boss", 200)] {
        // The model is the same with or without its name.
        for body in [
            json!({"prompt": "x", "max_tokens": 1}),
            json!({"prompt": "x", "max_tokens": 1, "model": MODEL}),
        ] {
            let reply = metered.post(key, "/v1/completions", &body).await;
            assert_eq!(reply.status, status, "{key}: {}", reply.text());
            if status == 404 {
                assert_eq!(reply.error()["code"], "model_not_found");
            }
        }
        let path = format!("/v1/models/{MODEL}");
        assert_eq!(metered.get(key, &path).await.status, status);
        let models = metered.get(key, "/v1/models").await.json();
        let num_models = usize::from(status == 200);
        assert_eq!(models["data"].as_array().map(Vec::len), Some(num_models));
    }
    for (key, status) in [("same", 403), ("boss", 200)] {
        let path = "/reset_prefix_cache";
        let reply = metered.post(key, path, &json!({})).await;
        assert_eq!(reply.status, status, "{key}: {}", reply.text());
        if status == 403 {
            assert_eq!(reply.error()["code"], "insufficient_permissions");
        }
    }
}

/// A short name means the same model, whichever of the two names a key has.
#[tokio::test]
async fn a_key_for_a_model_takes_its_short_name() {
    let key = |name: &str, model: &str| ApiKey {
        models: Some(vec![model.to_owned()]),
        ..ApiKey::unlimited(name, name)
    };
    let keys = vec![
        key("full", MODEL),
        key("short", SHORT_NAME),
        key("other", "sql"),
    ];
    let metered = Metered::start(keys).await;
    for (name, status) in [("full", 200), ("short", 200), ("other", 404)] {
        for model in [MODEL, SHORT_NAME] {
            let body = json!({"prompt": "x", "max_tokens": 1, "model": model});
            let reply = metered.post(name, "/v1/completions", &body).await;
            assert_eq!(reply.status, status, "{name} {model}: {}", reply.text());
            let body = json!({"model": model});
            let shown = metered.post(name, "/api/show", &body).await;
            assert_eq!(shown.status, status, "{name} {model}");
        }
        let listed = metered.get(name, "/api/tags").await.json();
        // A program finds the model under each of its names.
        let num_models = if status == 200 { 2 } else { 0 };
        assert_eq!(listed["models"].as_array().map(Vec::len), Some(num_models));
    }
}

/// A key pays for the tokens of vectors' texts, but not for texts that were not computed.
#[tokio::test]
async fn vectors_count_against_the_limit_of_tokens() {
    let keys = vec![ApiKey {
        models: Some(vec![MODEL.to_owned()]),
        ..limited(None, Some(100))
    }];
    let metered = Metered::start(keys).await;
    let texts = |len: usize| json!({"input": [vec![7; len - 30], vec![8; 30]]});
    let embed = async |body: Value| metered.post("limited", "/v1/embeddings", &body).await;
    assert_eq!(embed(texts(60)).await.status, 200);
    let refused = embed(texts(50)).await;
    assert_eq!(refused.status, 429, "{}", refused.text());
    // The second text is never computed, so only the first may have been charged.
    let empty = json!({"input": [[1, 2, 3], []]});
    assert_eq!(embed(empty).await.status, 400);
    let score = json!({"text_1": [vec![7; 20]], "text_2": [vec![8; 17]]});
    let scored = metered.post("limited", "/score", &score).await;
    assert_eq!(scored.status, 200, "{}", scored.text());
    let other = json!({"model": "other", "input": "a"});
    assert_eq!(embed(other).await.status, 404);
}
