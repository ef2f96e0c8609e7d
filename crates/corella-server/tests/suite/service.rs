//! The endpoints around generation: API keys, request ids, models, tokens, the prefix cache.

use corella_server::ApiKey;
use serde_json::json;
use tokio::io::AsyncWriteExt;

use crate::client::{get, head, open, open_post, post, read_until, send};
use crate::fixture::{MAX_MODEL_LEN, MODEL, Setup, TestServer};

#[tokio::test]
async fn a_key_is_required_where_it_matters() {
    let mut setup = Setup::new();
    setup.server.api_keys = vec![ApiKey::unlimited("test", "secret")];
    let server = setup.start().await;
    let models = async |headers: &[(&str, &str)]| {
        let head = head("GET", "/v1/models", headers, None);
        send(server.address, &head, b"").await
    };
    let missing = models(&[]).await;
    assert_eq!(missing.status, 401);
    assert_eq!(missing.error()["code"], "invalid_api_key");
    assert_eq!(missing.header("www-authenticate"), Some("Bearer"));
    for wrong in [
        "Bearer secre",
        "Bearer secrets",
        "Bearer ",
        "Basic secret",
        "secret",
    ] {
        let reply = models(&[("authorization", wrong)]).await;
        assert_eq!(reply.status, 401, "{wrong}");
    }
    assert_eq!(
        models(&[("authorization", "Bearer secret")]).await.status,
        200
    );
    assert_eq!(
        models(&[("Authorization", "bearer secret")]).await.status,
        200
    );
    let reply = post(server.address, "/v1/completions", &json!({"prompt": "x"})).await;
    assert_eq!(reply.status, 401);
    let reply = post(server.address, "/reset_prefix_cache", &json!({})).await;
    assert_eq!(reply.status, 401);
    for open in ["/health", "/ready", "/metrics", "/version"] {
        assert_eq!(get(server.address, open).await.status, 200, "{open}");
    }
}

#[tokio::test]
async fn every_response_has_a_request_id() {
    let server = TestServer::start().await;
    let given = head("GET", "/health", &[("x-request-id", "trace-7")], None);
    let reply = send(server.address, &given, b"").await;
    assert_eq!(reply.header("x-request-id"), Some("trace-7"));

    // A caller with a W3C trace and without a request name.
    let parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let traced = head("GET", "/health", &[("traceparent", parent)], None);
    let reply = send(server.address, &traced, b"").await;
    let id = reply.header("x-request-id");
    assert_eq!(id, Some("4bf92f3577b34da6a3ce929d0e0e4736"));
    for broken in [
        "",
        "00",
        "00-4bf9-00f0-01",
        &parent.replace("4bf92f3577b34da6a3ce929d0e0e4736", &"0".repeat(32)),
    ] {
        let traced = head("GET", "/health", &[("traceparent", broken)], None);
        let reply = send(server.address, &traced, b"").await;
        let id = reply.header("x-request-id").expect("an id");
        assert_eq!(id.len(), 24, "{broken}");
    }

    let first = get(server.address, "/nowhere").await;
    let second = get(server.address, "/nowhere").await;
    let id = first.header("x-request-id").expect("an id");
    assert_eq!(id.len(), 24);
    assert_ne!(Some(id), second.header("x-request-id"));

    let reply = post(server.address, "/v1/completions", &json!({"prompt": "x"})).await;
    let id = reply.header("x-request-id").expect("an id");
    assert_eq!(reply.json()["id"], format!("cmpl-{id}"));
}

#[tokio::test]
async fn one_connection_carries_many_requests() {
    let server = TestServer::start().await;
    let body = json!({"prompt": "x", "max_tokens": 2, "stream": true}).to_string();
    let request = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut socket = open(server.address, "", b"").await;
    for _ in 0..3 {
        socket
            .write_all(request.as_bytes())
            .await
            .expect("it reads");
        let reply = read_until(&mut socket, "\r\n0\r\n\r\n").await;
        assert!(reply.starts_with("HTTP/1.1 200 OK"), "{reply}");
        assert_eq!(reply.matches("[DONE]").count(), 1);
    }
    assert_eq!(server.num_counted("/v1/completions", 200).await, 3.0);
}

#[tokio::test]
async fn models_are_listed_under_all_their_names() {
    let mut setup = Setup::new();
    setup.serve.served_model_names.push("alias".into());
    let server = setup.start().await;
    let list = get(server.address, "/v1/models").await.json();
    assert_eq!(list["object"], "list");
    assert_eq!(list["data"][0]["id"], MODEL);
    assert_eq!(list["data"][1]["id"], "alias");
    assert_eq!(list["data"][1]["root"], MODEL);
    assert_eq!(list["data"][0]["max_model_len"], MAX_MODEL_LEN);
    let one = get(server.address, &format!("/v1/models/{MODEL}")).await;
    assert_eq!(one.json()["id"], MODEL);
    let other = get(server.address, "/v1/models/other").await;
    assert_eq!(other.status, 404);
    let error = other.error();
    assert_eq!(error["code"], "model_not_found");
    let message = error["message"].as_str().expect("a message");
    assert!(
        message.contains(&format!("`{MODEL}`, `alias`")),
        "{message}"
    );
    let body = json!({"prompt": "x", "model": "alias"});
    let answer = post(server.address, "/v1/completions", &body).await.json();
    assert_eq!(answer["model"], "alias");
}

#[tokio::test]
async fn an_unknown_name_shows_a_key_its_own_names() {
    let mut setup = Setup::new();
    setup.serve.served_model_names.push("alias".into());
    let mut key = ApiKey::unlimited("test", "secret");
    key.models = Some(vec!["alias".into(), "unknown".into()]);
    setup.server.api_keys = vec![key];
    let server = setup.start().await;
    let ask = async |model: &str| {
        let body = json!({"prompt": "x", "max_tokens": 1, "model": model}).to_string();
        let headers = [("authorization", "Bearer secret")];
        let head = head("POST", "/v1/completions", &headers, Some(body.len()));
        send(server.address, &head, body.as_bytes()).await
    };
    let answer = ask("alias").await;
    assert_eq!(answer.json()["model"], "alias", "{}", answer.text());
    let unknown = ask("unknown").await;
    assert_eq!(unknown.status, 404);
    let text = unknown.text();
    assert!(text.contains("`alias`"), "{text}");
    assert!(!text.contains(&format!("`{MODEL}`")), "{text}");
}

#[tokio::test]
async fn unknown_paths_and_methods_are_json_errors() {
    let server = TestServer::start().await;
    assert_eq!(get(server.address, "/v1/nothing").await.status, 404);
    assert!(get(server.address, "/nothing").await.error().is_object());
    let wrong = get(server.address, "/v1/completions").await;
    assert_eq!(wrong.status, 405);
    assert!(wrong.error().is_object());
}

#[tokio::test]
async fn tokens_and_text_convert_both_ways() {
    let server = TestServer::start().await;
    let text = "abc é <|user|>";
    let reply = post(server.address, "/tokenize", &json!({"prompt": text}))
        .await
        .json();
    assert_eq!(reply["tokens"], json!(server.encode(text)));
    assert_eq!(reply["count"], server.encode(text).len());
    assert_eq!(reply["max_model_len"], MAX_MODEL_LEN);
    let body = json!({"tokens": reply["tokens"]});
    let reply = post(server.address, "/detokenize", &body).await.json();
    assert_eq!(reply["prompt"], text);

    let body = json!({"messages": [{"role": "user", "content": "hi"}]});
    let reply = post(server.address, "/tokenize", &body).await.json();
    assert_eq!(
        reply["tokens"],
        json!(server.encode("<|user|>hi<|end|><|assistant|>"))
    );
    let reply = post(server.address, "/detokenize", &json!({"tokens": [9999]})).await;
    assert_eq!(reply.status, 400);
    assert_eq!(reply.error()["param"], "tokens[0]");
}

#[tokio::test]
async fn the_prefix_cache_is_reset_only_when_no_request_uses_it() {
    let server = Setup::new().holding_behind(1).start().await;
    let body = json!({"prompt": "a prompt of some length", "max_tokens": 200, "stream": true});
    let mut running = open_post(server.address, "/v1/completions", &body).await;
    read_until(&mut running, "data:").await;
    let refused = post(server.address, "/reset_prefix_cache", &json!({})).await;
    assert_eq!(refused.status, 409, "{}", refused.text());
    drop(running);
    server.gate().open();
    server.assert_at_rest().await;

    let cached = async || {
        let body = json!({"prompt": "a prompt of some length", "max_tokens": 1});
        let answer = post(server.address, "/v1/completions", &body).await.json();
        answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64()
    };
    assert!(cached().await > Some(0));
    let reset = post(server.address, "/reset_prefix_cache", &json!({})).await;
    assert_eq!(reset.status, 200, "{}", reset.text());
    assert_eq!(cached().await, Some(0));

    let reset = async |body| post(server.address, "/reset_prefix_cache", &body).await;
    let with_tiers = reset(json!({"tiers": true})).await;
    assert_eq!(with_tiers.status, 200, "{}", with_tiers.text());
    assert_eq!(cached().await, Some(0));
    let wrong = reset(json!({"tiers": "all"})).await;
    assert_eq!(
        (wrong.status, &wrong.error()["param"]),
        (400, &json!("tiers"))
    );
    assert_eq!(reset(json!({"levels": true})).await.status, 400);
    assert!(cached().await > Some(0), "nothing was reset");
}

#[tokio::test]
async fn the_version_is_the_crates() {
    let server = TestServer::start().await;
    let version = get(server.address, "/version").await.json();
    assert_eq!(version["version"], env!("CARGO_PKG_VERSION"));
}
