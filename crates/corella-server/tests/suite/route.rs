//! Paths: documented ones are answered, and errors of others name them.

use serde_json::Value;

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::client::{get, head, open, post, read_until, send};
use crate::fixture::{Setup, TestServer};

async fn ask(
    server: &TestServer,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
) -> crate::client::Reply {
    send(server.address, &head(method, path, headers, Some(0)), b"").await
}

#[tokio::test]
async fn every_documented_path_is_answered() {
    let server = TestServer::start().await;
    let document = get(server.address, "/openapi.json").await.json();
    let paths = document["paths"].as_object().expect("an object");
    for (path, methods) in paths {
        let filled: String = path.replace(['{', '}'], "");
        for method in methods.as_object().expect("an object").keys() {
            if path == "/engine/events" {
                continue;
            }
            let reply = ask(&server, &method.to_uppercase(), &filled, &[]).await;
            assert_ne!(reply.status, 405, "{method} {path}");
            assert!(
                !String::from_utf8_lossy(&reply.body).contains("Did you mean"),
                "{method} {path}"
            );
        }
    }
}

#[tokio::test]
async fn a_wrong_path_or_method_names_one_that_exists() {
    let mut setup = Setup::new();
    setup.server.root_path = "/llm".to_owned();
    let server = setup.start().await;
    for path in ["/v1/v1/chat/completions", "/llm/v1/v1/chat/completions"] {
        let reply = ask(&server, "POST", path, &[]).await;
        assert_eq!(reply.status, 404);
        let message = reply.error()["message"].clone();
        let message = message.as_str().expect("a text");
        assert!(
            message.ends_with("Did you mean POST /v1/chat/completions?"),
            "{message}"
        );
    }
    for path in ["/v1/chat/completions", "/llm/v1/chat/completions"] {
        let reply = get(server.address, path).await;
        assert_eq!(reply.status, 405);
        let message = reply.error()["message"].clone();
        let message = message.as_str().expect("a text");
        assert!(
            message.ends_with("does not answer GET; send POST."),
            "{message}"
        );
    }
    let reply = get(server.address, "/api/tag").await;
    let message: Value = reply.json()["error"].clone();
    assert_eq!(
        message,
        "There is no /api/tag here. Did you mean GET /api/tags?"
    );
}

/// A request answered before its body was read leaves the connection usable, or announces its end.
#[tokio::test]
async fn a_connection_outlives_a_refusal() {
    let server = TestServer::start().await;
    let next = head("GET", "/version", &[], None);
    let kept = |path: &str, num_bytes: usize| {
        format!("POST {path} HTTP/1.1\r\nhost: test\r\ncontent-length: {num_bytes}\r\n\r\n")
    };
    for (path, num_bytes) in [("/api/create", 100), ("/health", 100_000)] {
        let mut socket = open(server.address, &kept(path, num_bytes), b"").await;
        socket.write_all(&vec![b'x'; num_bytes]).await.unwrap();
        socket.write_all(next.as_bytes()).await.unwrap();
        let mut answers = String::new();
        socket.read_to_string(&mut answers).await.unwrap();
        assert_eq!(answers.matches("HTTP/1.1 ").count(), 2, "{path}: {answers}");
        assert!(answers.contains("HTTP/1.1 200"), "{path}: {answers}");
    }
    let expects = kept("/api/create", 100).replace("host:", "expect: 100-continue\r\nhost:");
    let mut socket = open(server.address, &expects, b"").await;
    let mut answer = String::new();
    socket.read_to_string(&mut answer).await.unwrap();
    assert!(
        answer.starts_with("HTTP/1.1 404") && answer.contains("connection: close"),
        "{answer}"
    );
}

/// A proxy before the server may read such a request differently.
#[tokio::test]
async fn a_head_with_two_readings_is_refused() {
    let server = TestServer::start().await;
    for (version, headers, status) in [
        ("1.1", "host: a\r\n", 200),
        ("1.1", "host:\r\n", 200),
        ("1.0", "", 200),
        ("1.1", "host: a\r\ntransfer-encoding: Chunked\r\n", 200),
        ("1.1", "", 400),
        ("1.1", "host: a\r\nhost: a\r\n", 400),
        ("1.0", "host: a\r\nhost: b\r\n", 400),
        (
            "1.1",
            "host: a\r\ntransfer-encoding: gzip, chunked\r\n",
            400,
        ),
        (
            "1.1",
            "host: a\r\ntransfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n",
            400,
        ),
    ] {
        let request = format!("POST /ping HTTP/{version}\r\n{headers}\r\n");
        let mut socket = open(server.address, &request, b"").await;
        if headers.contains("unked") {
            socket.write_all(b"0\r\n\r\n").await.expect("it reads");
        }
        let answer = read_until(&mut socket, "\r\n\r\n").await;
        let found = answer.split(' ').nth(1).map(str::parse);
        assert_eq!(found, Some(Ok(status)), "{request}: {answer}");
        let closes = answer.contains("connection: close");
        assert!(closes || status == 200, "{answer}");
    }
}

#[tokio::test]
async fn endpoints_of_ollama_that_change_models_say_what_to_do() {
    let server = TestServer::start().await;
    for (method, path) in [
        ("POST", "/api/create"),
        ("POST", "/api/copy"),
        ("POST", "/api/push"),
        ("DELETE", "/api/delete"),
    ] {
        let reply = ask(&server, method, path, &[]).await;
        assert_eq!(reply.status, 404);
        let message = reply.json()["error"].to_string();
        assert!(
            message.contains("corella pull") && !message.contains("Did you mean"),
            "{message}"
        );
    }
}

#[tokio::test]
async fn paths_of_other_servers_have_the_same_answers() {
    let server = TestServer::start().await;
    for path in ["/ping", "/v1/health", "/health"] {
        let reply = get(server.address, path).await;
        assert_eq!(reply.status, 200, "{path}");
        assert_eq!(reply.json(), serde_json::json!({"status": "ok"}));
    }
    assert_eq!(ask(&server, "POST", "/ping", &[]).await.status, 200);
    let models = get(server.address, "/v1/models").await.json();
    assert_eq!(get(server.address, "/models").await.json(), models);
    let body = serde_json::json!({"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 3});
    let choices =
        async |path: &str| post(server.address, path, &body).await.json()["choices"].clone();
    assert_eq!(
        choices("/chat/completions").await,
        choices("/v1/chat/completions").await
    );
}

#[tokio::test]
async fn metrics_have_the_format_that_accept_prefers() {
    let server = TestServer::start().await;
    // A counter has a series only after its first count.
    assert_eq!(get(server.address, "/health").await.status, 200);
    let open = ask(
        &server,
        "GET",
        "/metrics",
        &[("accept", "application/openmetrics-text;version=1.0.0")],
    )
    .await;
    let kind = |reply: &crate::client::Reply| reply.header("content-type").map(str::to_owned);
    assert!(kind(&open).is_some_and(|kind| kind.starts_with("application/openmetrics-text")));
    assert!(open.text().ends_with("# EOF\n"));
    assert!(open.text().contains("# TYPE corella_http_requests counter"));
    for accept in [&[("accept", "text/plain;version=0.0.4")][..], &[]] {
        let plain = ask(&server, "GET", "/metrics", accept).await;
        assert_eq!(
            kind(&plain).as_deref(),
            Some("text/plain; version=0.0.4; charset=utf-8")
        );
        assert!(!plain.text().contains("# EOF"));
        assert!(
            plain
                .text()
                .contains("# TYPE corella_http_requests_total counter")
        );
    }
}
