//! Clients that leave, engines that fail, servers that stop.

use std::os::fd::AsFd;
use std::time::Duration;

use corella_core::StepId;
use corella_engine::EngineState;
use corella_model::Fault;
use corella_server::{Listener, Loading};
use corella_test::{wait_until, wait_until_asked, wait_until_async};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use crate::client::{events, get, head, open, open_post, post, read_reply, read_until};
use crate::fixture::{Setup, TestServer};

const PATH: &str = "/v1/completions";

/// Waits until this many requests have been counted with a status.
async fn counted(server: &TestServer, status: u16, num_requests: f64) {
    wait_until_asked("they are counted", async || {
        server.num_counted(PATH, status).await == num_requests
    })
    .await;
}

#[tokio::test]
async fn a_client_that_leaves_a_stream_is_aborted_and_counted() {
    let server = Setup::new().holding_behind(1).start().await;
    let body = json!({"prompt": "long", "max_tokens": 200, "n": 2, "stream": true});
    let mut socket = open_post(server.address, PATH, &body).await;
    read_until(&mut socket, "data:").await;
    drop(socket);
    server.has_aborted(2).await;
    server.gate().open();
    server.assert_at_rest().await;
    counted(&server, 499, 1.0).await;
    assert_eq!(server.num_counted(PATH, 200).await, 0.0);
    // No step follows the one in flight.
    let stats = server.engine.stats();
    assert_eq!(stats.num_finished_abort, 2);
    assert_eq!(stats.num_steps, 2, "{stats:?}");
}

#[tokio::test]
async fn a_client_that_leaves_before_any_answer_is_aborted_and_counted() {
    let server = Setup::new().holding_behind(0).start().await;
    let body = json!({"prompt": "long", "max_tokens": 200});
    let socket = open_post(server.address, PATH, &body).await;
    server.has_running(1).await;
    drop(socket);
    server.has_aborted(1).await;
    server.gate().open();
    server.assert_at_rest().await;
    counted(&server, 499, 1.0).await;
    assert_eq!(server.engine.stats().num_steps, 1);
}

#[tokio::test]
async fn a_failed_step_ends_a_stream_with_an_error() {
    let mut setup = Setup::new();
    setup.mock.faults = vec![(StepId(5), Fault::Fail)];
    let server = setup.start().await;
    let body = json!({
        "prompt": "unlucky", "temperature": 0, "max_tokens": 50, "stream": true,
        "stream_options": {"include_usage": true},
    });
    let reply = post(server.address, PATH, &body).await;
    let events = reply.events();
    let (error, chunks) = events.split_last().expect("events");
    assert_eq!(error["error"]["type"], "server_error", "{error}");
    assert!(reply.text().contains("event: error\n"));
    assert!(!reply.text().contains("[DONE]"));
    assert!(!chunks.is_empty());
    for chunk in chunks {
        assert_eq!(chunk["choices"][0]["finish_reason"], Value::Null);
    }
    let failed = server
        .metric("vllm:request_success_total", &["finished_reason=\"error\""])
        .await;
    assert_eq!(failed, Some(1.0));

    // The next request gets the same answer as without the failure.
    let body = json!({"prompt": "unlucky", "temperature": 0, "max_tokens": 50});
    let answer = post(server.address, PATH, &body).await.json();
    let expected = server.greedy(&server.encode("unlucky"), 50);
    assert_eq!(answer["choices"][0]["text"], expected);
    server.assert_at_rest().await;
}

#[tokio::test]
async fn a_failed_step_is_500_for_who_waits_for_the_whole() {
    let mut setup = Setup::new();
    setup.mock.faults = vec![(StepId(5), Fault::Fail)];
    let server = setup.start().await;
    let body = json!({"prompt": "unlucky", "max_tokens": 50});
    let reply = post(server.address, PATH, &body).await;
    assert_eq!(reply.status, 500);
    assert_eq!(reply.error()["code"], "engine_error");
}

#[tokio::test]
async fn a_lost_engine_ends_the_server_with_the_reason() {
    let mut setup = Setup::new();
    setup.mock.faults = vec![(StepId(3), Fault::Lost)];
    let server = setup.start().await;
    assert_eq!(get(server.address, "/health").await.status, 200);
    let body = json!({"prompt": "unlucky", "max_tokens": 50});
    assert_eq!(post(server.address, PATH, &body).await.status, 500);
    let EngineState::Lost(reason) = server.engine.state() else {
        panic!("{:?}", server.engine.state());
    };
    let error = server
        .ended()
        .await
        .expect_err("a lost engine ends the server");
    assert!(error.to_string().contains(&reason), "{error}");
}

/// The supervisor of the process must not see a clean end.
#[tokio::test]
async fn an_engine_lost_while_draining_is_an_error() {
    let mut setup = Setup::new().holding_behind(1);
    setup.mock.faults = vec![(StepId(8), Fault::Lost)];
    let server = setup.start().await;
    let body = json!({"prompt": "long", "max_tokens": 60, "stream": true});
    let mut socket = open_post(server.address, PATH, &body).await;
    read_until(&mut socket, "data:").await;
    server.ask_to_stop();
    server.is_draining().await;
    server.gate().open();
    let error = server.ended().await.expect_err("the engine is lost");
    assert!(error.to_string().contains("engine has stopped"), "{error}");
}

#[tokio::test]
async fn asked_to_stop_it_finishes_what_runs_and_takes_nothing_new() {
    let server = Setup::new().holding_behind(1).start().await;
    assert_eq!(get(server.address, "/ready").await.status, 200);
    let body = json!({"prompt": "long", "temperature": 0, "max_tokens": 60, "stream": true});
    let mut streamed = open_post(server.address, PATH, &body).await;
    let mut start = read_until(&mut streamed, "\n\n").await;
    let whole = json!({"prompt": "long", "temperature": 0, "max_tokens": 60});
    let mut unstreamed = open_post(server.address, PATH, &whole).await;
    // Each request needs a step to begin, and the counters need one more.
    wait_until_async("both are there", || {
        server.engine.stats().num_live_requests == 2
    })
    .await;
    server.gate().let_through(2);
    server.has_running(2).await;

    server.ask_to_stop();
    server.is_draining().await;
    assert_eq!(get(server.address, "/health").await.status, 200);
    let refused = post(server.address, PATH, &whole).await;
    assert_eq!(refused.status, 503);
    assert_eq!(refused.error()["code"], "draining");

    server.gate().open();
    let expected = server.greedy(&server.encode("long"), 60);
    start += &read_until(&mut streamed, "[DONE]").await;
    assert!(start.contains("\"finish_reason\":\"length\""));
    let answer = read_reply(&mut unstreamed).await;
    assert_eq!(answer.json()["choices"][0]["text"], expected);
    assert_eq!(server.stopped().await.num_cut_off, 0);
}

#[tokio::test]
async fn after_the_drain_timeout_streams_are_cut_off_visibly() {
    let mut setup = Setup::new().holding_behind(1);
    setup.server.drain_timeout = Duration::from_millis(200);
    let server = setup.start().await;
    let body = json!({"prompt": "long", "max_tokens": 240, "stream": true});
    let mut socket = open_post(server.address, PATH, &body).await;
    read_until(&mut socket, "data:").await;
    server.ask_to_stop();
    let (engine, gate) = (server.engine.clone(), server.gate().clone());
    assert_eq!(server.stopped().await.num_cut_off, 1);
    let mut rest = Vec::new();
    socket
        .read_to_end(&mut rest)
        .await
        .expect("it ends cleanly");
    let rest = String::from_utf8_lossy(&rest);
    let (_, error) = rest.split_once("event: error\ndata: ").expect("an error");
    assert!(error.contains("\"code\":\"cut_off\""), "{error}");
    assert!(error.contains("shutting down"), "{error}");
    assert!(error.ends_with("}}\n\n\r\n0\r\n\r\n"), "{error}");
    assert!(!rest.contains("[DONE]"));
    assert!(!rest.contains("\"finish_reason\":\"length\""));
    gate.open();
    wait_until("nothing is left", || engine.stats().num_live_requests == 0);
}

#[tokio::test]
async fn after_the_drain_timeout_who_waits_for_the_whole_gets_503() {
    let mut setup = Setup::new().holding_behind(0);
    setup.server.drain_timeout = Duration::from_millis(200);
    // One request runs, and another waits for it.
    setup.scheduler.max_num_seqs = 1;
    let server = setup.start().await;
    let body = json!({"prompt": "long", "max_tokens": 240});
    let mut running = open_post(server.address, PATH, &body).await;
    let mut waiting = open_post(server.address, PATH, &body).await;
    wait_until_async("one waits", || {
        let stats = server.engine.stats().scheduler;
        (stats.num_running, stats.num_waiting) == (1, 1)
    })
    .await;
    server.ask_to_stop();
    assert_eq!(server.stopped().await.num_cut_off, 2);
    for socket in [&mut running, &mut waiting] {
        let reply = read_reply(socket).await;
        assert_eq!(reply.status, 503);
        assert_eq!(reply.error()["code"], "cut_off");
    }
}

/// A draining server refuses a request without waiting for the rest of its body.
#[tokio::test]
async fn a_client_that_still_sends_does_not_hold_up_the_end() {
    let mut setup = Setup::new();
    setup.server.drain_timeout = Duration::from_secs(3600);
    let server = setup.start().await;
    let head = head("POST", PATH, &[], Some(1000));
    let mut sending = open(server.address, &head, b"{\"prompt\": \"").await;
    // A later connection has been answered, so the head of this one has been read.
    assert_eq!(get(server.address, "/ready").await.status, 200);
    server.ask_to_stop();
    let reply = read_reply(&mut sending).await;
    assert_eq!(reply.status, 503);
    assert_eq!(reply.error()["code"], "draining");
    assert_eq!(server.stopped().await.num_cut_off, 0);
}

#[tokio::test]
async fn asked_twice_it_does_not_wait() {
    let mut setup = Setup::new().holding_behind(1);
    setup.server.drain_timeout = Duration::from_secs(3600);
    let server = setup.start().await;
    let body = json!({"prompt": "long", "max_tokens": 240, "stream": true});
    let mut socket = open_post(server.address, PATH, &body).await;
    read_until(&mut socket, "data:").await;
    server.ask_to_stop();
    server.ask_to_stop();
    assert_eq!(server.stopped().await.num_cut_off, 1);
}

#[tokio::test]
async fn an_idle_server_does_not_wait_for_the_drain_timeout() {
    let mut setup = Setup::new();
    setup.server.drain_timeout = Duration::from_secs(3600);
    let server = setup.start().await;
    server.ask_to_stop();
    assert_eq!(server.stopped().await.num_cut_off, 0);
}

#[tokio::test]
async fn a_server_that_may_not_be_idle_ends_after_its_last_answer() {
    let mut setup = Setup::new().holding_behind(1);
    setup.server.exit_when_idle = Some(Duration::from_millis(1));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("it is bound");
    // This request is the only one, and is there before the server.
    let body = json!({"prompt": "long", "temperature": 0, "max_tokens": 60, "stream": true});
    let mut socket = open_post(address, PATH, &body).await;
    let server = setup.start_on(listener).await;
    let mut text = read_until(&mut socket, "data:").await;
    // The server is not idle while its answer waits for a step.
    assert_eq!(get(address, "/ready").await.status, 200);
    server.gate().open();
    text += &read_until(&mut socket, "[DONE]").await;
    assert!(text.contains("\"finish_reason\":\"length\""), "{text}");
    assert_eq!(server.stopped().await.num_cut_off, 0);
}

/// Probes that come all the time must not keep a server.
#[tokio::test]
async fn probes_are_no_use_of_a_server() {
    let mut setup = Setup::new();
    setup.server.exit_when_idle = Some(Duration::from_millis(100));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("it is bound");
    let head = "GET /health HTTP/1.1\r\nhost: test\r\n\r\n";
    let mut socket = open(address, head, b"").await;
    let server = setup.start_on(listener).await;
    let probe = tokio::spawn(async move {
        let mut answer = Vec::new();
        while socket.read_buf(&mut answer).await.is_ok_and(|num| num > 0) {
            if socket.write_all(head.as_bytes()).await.is_err() {
                break;
            }
        }
        answer
    });
    assert_eq!(server.stopped().await.num_cut_off, 0);
    let answer = probe.await.expect("it does not panic");
    assert!(answer.starts_with(b"HTTP/1.1 200"));
}

/// The owner of the socket starts the next server.
#[tokio::test]
async fn on_an_inherited_socket_clients_wait_for_the_next_server() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let kept = listener.as_fd().try_clone_to_owned().expect("it is open");
    let mut setup = Setup::new().holding_behind(1);
    setup.server.has_inherited_socket = true;
    let server = setup.start_on(listener).await;
    let body = json!({"prompt": "long", "temperature": 0, "max_tokens": 60, "stream": true});
    let mut running = open_post(server.address, PATH, &body).await;
    read_until(&mut running, "data:").await;
    server.ask_to_stop();
    server.parts.draining().await;
    let mut waiting = open_post(server.address, PATH, &body).await;
    server.gate().open();
    read_until(&mut running, "[DONE]").await;
    assert_eq!(server.stopped().await.num_cut_off, 0);
    let kept = TcpListener::from_std(kept.into()).expect("it listens");
    let next = Setup::new().start_on(kept).await;
    let answer = read_reply(&mut waiting).await;
    assert_eq!(answer.status, 200);
    assert!(answer.is_complete);
    next.assert_at_rest().await;
}

#[tokio::test]
async fn many_streams_with_departures_leave_the_engine_empty() {
    run_many_streams(1).await;
}

#[tokio::test]
async fn many_streams_with_overlapping_steps_leave_the_engine_empty() {
    run_many_streams(2).await;
}

/// Every stream equals its lone run, stop strings end it where they complete, and clients that leave change nothing for
/// the others.
async fn run_many_streams(max_inflight_steps: u32) {
    let mut setup = Setup::new();
    setup.scheduler.max_inflight_steps = max_inflight_steps;
    // The KV cache is too small for 24 requests together.
    setup.scheduler.num_pages = 80;
    setup.mock.num_pages = 80;
    let server = setup.with_step_ms(1).start().await;
    let mut tasks = JoinSet::new();
    for index in 0..24 {
        let address = server.address;
        let prompt = format!("stream number {index}");
        let mut expected = server.greedy(&server.encode(&prompt), 40);
        let mut stop = json!(null);
        if index % 3 == 1 {
            let at = expected.char_indices().nth(12).expect("12 characters").0;
            let found: String = expected[at..].chars().take(2).collect();
            expected.truncate(expected.find(&found).expect("it is there"));
            stop = json!(found);
        }
        tasks.spawn(async move {
            let leaves = index % 3 == 0;
            let max_tokens = if leaves { 200 } else { 40 };
            let body = json!({
                "prompt": prompt, "temperature": 0, "max_tokens": max_tokens, "stream": true,
                "stop": stop,
            });
            let mut socket = open_post(address, PATH, &body).await;
            if leaves {
                read_until(&mut socket, "data:").await;
                return;
            }
            let reply = read_reply(&mut socket).await;
            let text: String = events(reply.text())
                .iter()
                .filter_map(|event| event["choices"][0]["text"].as_str())
                .collect();
            assert_eq!(text, expected);
        });
    }
    while let Some(task) = tasks.join_next().await {
        task.expect("every stream is right");
    }
    server.assert_at_rest().await;
    // On a slow machine an answer may be complete before its client has left.
    wait_until_asked("all are counted", async || {
        server.num_counted(PATH, 200).await + server.num_counted(PATH, 499).await == 24.0
    })
    .await;
    assert!(server.num_counted(PATH, 200).await >= 16.0);
}

#[tokio::test]
async fn a_client_that_reads_nothing_is_given_up() {
    let mut setup = Setup::new();
    setup.server.write_timeout = Duration::from_millis(100);
    let server = setup.start().await;
    // The answer has some 40 MB. The system buffers only a few MB for a client that does not read.
    let body = json!({
        "prompt": "a", "max_tokens": 200, "n": 200, "logprobs": 20, "stream": true,
    });
    let mut socket = open_post(server.address, PATH, &body).await;
    counted(&server, 499, 1.0).await;
    server.assert_at_rest().await;
    let mut rest = Vec::new();
    let _ = socket.read_to_end(&mut rest).await;
    let rest = String::from_utf8_lossy(&rest);
    assert!(rest.contains("200 OK") && !rest.contains("[DONE]"));
}

#[tokio::test]
async fn while_the_model_is_loaded_every_answer_says_so() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("it is bound");
    let listener = Listener::Tcp(listener);
    let loading = Loading::start(&listener, None).expect("it starts");
    for path in ["/v1/models", "/health", "/ready", "/"] {
        let reply = get(address, path).await;
        assert_eq!(reply.status, 503, "{path}");
        assert_eq!(reply.error()["code"], "loading");
        assert_eq!(reply.header("retry-after"), Some("1"));
    }
    // A client that sends a long prompt also reads the answer.
    let long = vec![b' '; 8 << 20];
    let mut client = open(address, &head("POST", PATH, &[], Some(long.len())), &long).await;
    let mut answer = String::new();
    let read = client.read_to_string(&mut answer).await;
    assert!(
        read.is_ok() && answer.starts_with("HTTP/1.1 503"),
        "{read:?}: {answer}"
    );
    loading.end().await;
    let Listener::Tcp(listener) = listener else {
        unreachable!("it is TCP")
    };
    // The server accepts later clients.
    let _client = TcpStream::connect(address).await.expect("it listens");
    assert!(listener.accept().await.is_ok());
    let mut second = open(address, &head("GET", "/ready", &[], None), b"").await;
    let (mut stream, _) = listener.accept().await.expect("a client comes");
    read_until(&mut stream, "/ready").await;
    drop(stream);
    let mut answer = Vec::new();
    let _ = second.read_to_end(&mut answer).await;
    assert!(
        answer.is_empty(),
        "the listener of the loading time is closed"
    );
}
