//! Queues, bodies, headers and connections are bounded.

use std::io::ErrorKind;
use std::time::Duration;

use corella_core::SamplingParams;
use corella_test::{wait_for_async, wait_until_asked, wait_until_async};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::client::{self, get, head, open, open_post, post, read_reply, read_until, send};
use crate::fixture::{MAX_MODEL_LEN, Setup, TestServer};

#[tokio::test]
async fn a_full_queue_is_429_and_a_place_is_free_when_someone_leaves() {
    let mut setup = Setup::new().holding_behind(1);
    setup.scheduler.max_num_seqs = 1;
    setup.scheduler.max_queued_requests = 2;
    let server = setup.start().await;
    let num_waiting = || server.engine.stats().scheduler.num_waiting;
    let long = json!({"prompt": "long", "max_tokens": 240, "stream": true});
    let mut running = open_post(server.address, "/v1/completions", &long).await;
    read_until(&mut running, "data:").await;
    let waiting = [
        open_post(server.address, "/v1/completions", &long).await,
        open_post(server.address, "/v1/completions", &long).await,
    ];
    wait_until_async("two wait", || num_waiting() == 2).await;

    let short = json!({"prompt": "short", "max_tokens": 1});
    let refused = post(server.address, "/v1/completions", &short).await;
    assert_eq!(refused.status, 429, "{}", refused.text());
    assert!(refused.header("retry-after").is_some());
    assert_eq!(refused.error()["code"], "queue_full");

    drop(waiting);
    wait_until_async("no request waits", || num_waiting() == 0).await;
    // Only two of the three choices fit, so none is accepted.
    let three = json!({"prompt": "short", "max_tokens": 1, "n": 3});
    let refused = post(server.address, "/v1/completions", &three).await;
    assert_eq!(refused.status, 429, "{}", refused.text());
    let two = json!({"prompt": "short", "max_tokens": 1, "n": 2, "stream": true});
    let mut taken = open_post(server.address, "/v1/completions", &two).await;
    wait_until_async("both wait", || num_waiting() == 2).await;
    drop(running);
    server.has_aborted(3).await;
    server.gate().open();
    assert_eq!(read_reply(&mut taken).await.chunks().len(), 2);
    server.assert_at_rest().await;
    // Requests whose clients left count as aborted; the refused one does not.
    let aborted = ["finished_reason=\"abort\""];
    let aborted = server.metric("vllm:request_success_total", &aborted);
    assert_eq!(aborted.await, Some(3.0));
}

#[tokio::test]
async fn a_request_that_cannot_be_in_time_is_429_when_asked_for() {
    for is_on in [false, true] {
        let mut setup = Setup::new().with_step_ms(20);
        setup.scheduler.enable_slo_admission = is_on;
        let server = setup.start().await;
        let path = "/v1/completions";
        // The first request shows the server the duration of steps.
        let first = json!({"prompt": "a first text", "max_tokens": 3});
        assert_eq!(post(server.address, path, &first).await.status, 200);
        let late = json!({"prompt": "another text", "max_tokens": 3, "ttft_slo_ms": 1});
        let reply = post(server.address, path, &late).await;
        assert_eq!(reply.status, if is_on { 429 } else { 200 });
        if is_on {
            assert_eq!(reply.error()["code"], "slo_unreachable");
            assert_eq!(reply.error()["param"], "ttft_slo_ms");
            assert!(reply.header("retry-after").is_some());
            wait_until_asked("it is counted", async || {
                let refused = server.metric("corella_requests_too_late_total", &[]);
                refused.await == Some(1.0)
            })
            .await;
        }
        // llm-d's headers hold unless the body has the fields.
        for (name, value, ttft_ms, refused) in [
            ("x-llm-d-slo-ttft-ms", "1", json!(null), is_on),
            ("x-slo-ttft-ms", "1", json!(null), is_on),
            ("x-llm-d-slo-ttft-ms", "1", json!(60_000), false),
            ("x-llm-d-slo-ttft-ms", "0", json!(null), false),
            ("x-llm-d-slo-ttft-ms", "soon", json!(null), false),
        ] {
            let body = json!({"prompt": "a text", "max_tokens": 3, "ttft_slo_ms": ttft_ms});
            let body = body.to_string();
            let headers = [("content-type", "application/json"), (name, value)];
            let head = head("POST", path, &headers, Some(body.len()));
            let reply = send(server.address, &head, body.as_bytes()).await;
            assert_eq!(
                reply.status,
                if refused { 429 } else { 200 },
                "{name}: {value}"
            );
        }
        let easy = json!({"prompt": "a third text", "max_tokens": 3, "ttft_slo_ms": 60_000});
        assert_eq!(post(server.address, path, &easy).await.status, 200);
        let wrong = json!({"prompt": "a", "max_tokens": 3, "tpot_slo_ms": 0});
        let reply = post(server.address, path, &wrong).await;
        assert_eq!(reply.status, 400);
        assert_eq!(reply.error()["param"], "tpot_slo_ms");
    }
}

#[tokio::test]
async fn a_servers_seed_makes_runs_of_different_draws_equal() {
    let run = async || {
        let mut setup = Setup::new();
        setup.serve.seed = Some(11);
        let server = setup.start().await;
        let mut texts = Vec::new();
        for prompt in [json!("dice"), json!("dice"), json!(["dice", "dice"])] {
            let body = json!({"prompt": prompt, "temperature": 1.0, "max_tokens": 40});
            let reply = post(server.address, "/v1/completions", &body).await;
            let choices = reply.json()["choices"].as_array().cloned();
            let choices = choices.expect("it answers");
            texts.extend(choices.iter().map(|choice| choice["text"].clone()));
        }
        let sampling = SamplingParams {
            temperature: 1.0,
            seed: 11,
            ..SamplingParams::GREEDY
        };
        let first = server.oracle(&server.encode("dice"), &sampling, 40);
        assert_eq!(texts[0], first, "the first request has the seed itself");
        texts
    };
    let texts = run().await;
    assert_eq!(run().await, texts);
    for (at, text) in texts.iter().enumerate() {
        assert!(!texts[..at].contains(text), "{text} at {at}");
    }
}

#[tokio::test]
async fn more_prompts_than_places_leave_nothing_behind() {
    let mut setup = Setup::new().holding_behind(0);
    setup.scheduler.max_num_seqs = 1;
    setup.scheduler.max_queued_requests = 2;
    let server = setup.start().await;
    let body = json!({"prompt": ["a", "b", "c", "d", "e", "f"], "max_tokens": 200});
    let reply = post(server.address, "/v1/completions", &body).await;
    assert_eq!(reply.status, 429, "{}", reply.text());
    server.gate().open();
    server.assert_at_rest().await;
}

#[tokio::test]
async fn a_body_over_the_limit_is_413_however_it_is_sent() {
    let mut setup = Setup::new();
    setup.server.max_body_bytes = 10_000;
    let server = setup.start().await;
    let body = vec![b' '; 5_000_000];
    let reply = client::post_bytes(server.address, "/v1/completions", &body).await;
    assert_eq!(reply.status, 413);
    assert!(
        reply.error()["message"]
            .as_str()
            .expect("text")
            .contains("10000")
    );

    let chunked = head(
        "POST",
        "/v1/completions",
        &[("transfer-encoding", "chunked")],
        None,
    );
    let mut framed = Vec::new();
    for piece in body.chunks(0x1000) {
        framed.extend_from_slice(format!("{:x}\r\n", piece.len()).as_bytes());
        framed.extend_from_slice(piece);
        framed.extend_from_slice(b"\r\n");
    }
    framed.extend_from_slice(b"0\r\n\r\n");
    let reply = client::send(server.address, &chunked, &framed).await;
    assert_eq!(reply.status, 413);
}

/// Rule 37. A partial body also takes memory, until its connection is closed.
#[tokio::test]
async fn bodies_are_bounded_together_and_a_small_one_finds_room() {
    let mut setup = Setup::new();
    setup.server.max_body_memory = 100_000;
    let server = setup.start().await;
    let path = "/v1/completions";
    let slow = head("POST", path, &[], Some(70_000));
    let slow = open(server.address, &slow, &[b' '; 60_000]).await;
    let ask = async |num_bytes: usize| {
        let mut body = json!({"prompt": "a", "max_tokens": 1}).to_string();
        body.extend(std::iter::repeat_n(' ', num_bytes));
        client::post_bytes(server.address, path, body.as_bytes()).await
    };
    wait_until_asked("another large body finds no room", async || {
        let reply = ask(50_000).await;
        if reply.status == 200 {
            return false;
        }
        assert_eq!(
            (reply.status, reply.header("retry-after")),
            (429, Some("1"))
        );
        assert_eq!(reply.error()["code"], "body_memory_full");
        true
    })
    .await;
    assert_eq!(ask(1_000).await.status, 200);
    drop(slow);
    wait_until_asked("there is room again", async || {
        ask(50_000).await.status == 200
    })
    .await;
}

/// The error gives a lower bound of the number of tokens, which are not counted.
#[tokio::test]
async fn what_cannot_fit_by_its_bytes_is_not_tokenised() {
    let server = TestServer::start().await;
    // The longest token, `<|assistant|>`, has 13 bytes.
    let text = "x".repeat(7_000_000);
    let at_least = format!("at least {} tokens", 7_000_000usize.div_ceil(13));
    let cases = [
        ("/v1/completions", json!({"prompt": text}), "prompt"),
        ("/v1/completions", json!({"prompt": ["a", text]}), "prompt"),
        ("/tokenize", json!({"prompt": text}), "prompt"),
    ];
    for (path, body, param) in cases {
        let reply = post(server.address, path, &body).await;
        assert_too_long(&reply, param);
        let message = reply.error()["message"].to_string();
        assert!(message.contains(&at_least), "{message}");
    }
    let user = json!([{"role": "user", "content": text}]);
    for path in ["/v1/chat/completions", "/tokenize"] {
        let reply = post(server.address, path, &json!({"messages": user})).await;
        assert_too_long(&reply, "messages");
    }
}

#[tokio::test]
async fn more_messages_or_tokens_than_the_context_are_refused() {
    let server = TestServer::start().await;
    let messages = vec![json!({"role": "user", "content": ""}); 100_000];
    for path in ["/v1/chat/completions", "/tokenize"] {
        let reply = post(server.address, path, &json!({"messages": messages})).await;
        assert_too_long(&reply, "messages");
        let message = reply.error()["message"].to_string();
        assert!(message.contains("100000"), "{message}");
    }
    let tokens = vec![97; MAX_MODEL_LEN as usize + 1];
    let reply = post(
        server.address,
        "/v1/completions",
        &json!({"prompt": tokens}),
    )
    .await;
    assert_too_long(&reply, "prompt");
    let reply = post(server.address, "/detokenize", &json!({"tokens": tokens})).await;
    assert_too_long(&reply, "tokens");
    let tokens = &tokens[1..];
    let reply = post(server.address, "/detokenize", &json!({"tokens": tokens})).await;
    assert_eq!(reply.status, 200);
    let text = "a".repeat(MAX_MODEL_LEN as usize);
    assert_eq!(reply.json()["prompt"], text);
    let reply = post(server.address, "/tokenize", &json!({"prompt": text})).await;
    assert_eq!(reply.json()["count"], MAX_MODEL_LEN);
    let reply = post(server.address, "/tokenize", &json!({"prompt": text + "a"})).await;
    assert_too_long(&reply, "prompt");
}

/// Rule 37. Values take many times the memory of their text, and are kept before they are checked.
#[tokio::test]
async fn a_body_of_too_many_values_is_refused_by_its_field() {
    let server = TestServer::start().await;
    let messages = json!([{"role": "user", "content": "hi"}]);
    let many = vec![json!({"a": 0}); 70_000];
    let few = vec![json!({"a": 0}); 60_000];
    let fields = [
        (
            "chat_template_kwargs",
            json!({"x": many}),
            json!({"x": few}),
        ),
        ("tools", json!(many), json!(null)),
        (
            "response_format",
            json!({"type": "json_schema", "json_schema": {"schema": {"enum": many}}}),
            json!(null),
        ),
    ];
    for (field, many, few) in fields {
        let ask = async |value: &Value| {
            let mut body = json!({"messages": messages, "max_tokens": 1});
            body[field] = value.clone();
            post(server.address, "/v1/chat/completions", &body).await
        };
        let reply = ask(&many).await;
        assert_eq!(
            (reply.status, &reply.error()["param"]),
            (400, &json!(field))
        );
        let message = reply.error()["message"].to_string();
        assert!(message.contains("131072 values"), "{message}");
        assert_eq!(ask(&few).await.status, 200);
    }
}

fn assert_too_long(reply: &client::Reply, param: &str) {
    assert_eq!(reply.status, 400);
    let error = reply.error();
    assert_eq!(error["code"], "context_length_exceeded", "{error}");
    assert_eq!(error["param"], param, "{error}");
    let message = error["message"].as_str().expect("text");
    assert!(
        message.contains("maximum context length is 256 tokens"),
        "{message}"
    );
}

#[tokio::test]
async fn a_body_that_does_not_come_is_408() {
    let mut setup = Setup::new();
    setup.server.body_timeout = Duration::from_millis(100);
    let server = setup.start().await;
    let head = head("POST", "/v1/completions", &[], Some(100));
    let mut socket = open(server.address, &head, b"{").await;
    assert_eq!(read_reply(&mut socket).await.status, 408);
}

/// The timeout covers the whole head: arriving bytes do not prolong it.
#[tokio::test]
async fn headers_that_trickle_in_close_the_connection() {
    let mut setup = Setup::new();
    setup.server.header_timeout = Duration::from_millis(300);
    let server = setup.start().await;
    let socket = open(server.address, "GET /health HTTP/1.1\r\nx-a: ", b"").await;
    let mut answer = [0; 1];
    let num_bytes = wait_for_async("it is closed", || {
        if let Err(error) = socket.try_write(b"x") {
            return (error.kind() != ErrorKind::WouldBlock).then_some(0);
        }
        match socket.try_read(&mut answer) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => None,
            read => Some(read.unwrap_or(0)),
        }
    });
    assert_eq!(num_bytes.await, 0, "a head without end got an answer");
    assert_eq!(get(server.address, "/health").await.status, 200);
}

#[tokio::test]
async fn headers_without_end_are_refused() {
    let server = TestServer::start().await;
    let header = format!("x-long: {}\r\n", "x".repeat(200_000));
    let head = format!("GET /health HTTP/1.1\r\nhost: test\r\n{header}\r\n");
    let mut socket = TcpStream::connect(server.address)
        .await
        .expect("it listens");
    // The server may close before it has read all bytes.
    let _ = socket.write_all(head.as_bytes()).await;
    let mut answer = Vec::new();
    let _ = socket.read_to_end(&mut answer).await;
    assert!(answer.is_empty() || client::parse(&answer).status == 431);
    assert_eq!(get(server.address, "/health").await.status, 200);
}

#[tokio::test]
async fn idle_connections_do_not_keep_others_waiting() {
    let server = TestServer::start().await;
    let mut idle = Vec::new();
    for _ in 0..300 {
        idle.push(
            TcpStream::connect(server.address)
                .await
                .expect("it listens"),
        );
    }
    let body = json!({"prompt": "x", "max_tokens": 3});
    assert_eq!(
        post(server.address, "/v1/completions", &body).await.status,
        200
    );
}

#[tokio::test]
async fn beyond_the_limit_connections_wait_for_a_place() {
    let mut setup = Setup::new();
    setup.server.max_num_connections = 2;
    let server = setup.start().await;
    let mut first = open(server.address, "", b"").await;
    let second = open(server.address, "", b"").await;
    let mut third = open(server.address, &head("GET", "/health", &[], None), b"").await;
    // The server runs on this thread. It answers one of the first two connections again and again, and could have
    // answered the third many times meanwhile.
    for _ in 0..50 {
        let again = b"GET /health HTTP/1.1\r\nhost: test\r\n\r\n";
        first.write_all(again).await.expect("it reads");
        let reply = read_until(&mut first, "\r\n\r\n").await;
        assert!(reply.starts_with("HTTP/1.1 200 OK"), "{reply}");
    }
    let early = third.try_read(&mut [0; 1]).map_err(|error| error.kind());
    assert_eq!(early, Err(ErrorKind::WouldBlock), "a third was served");
    drop(second);
    assert_eq!(read_reply(&mut third).await.status, 200);
}
