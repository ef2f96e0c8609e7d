//! `/engine/events`: the engine's activity for all readers.

use std::time::Duration;

use corella_server::ApiKey;
use corella_test::wait_until_asked;
use serde_json::{Value, json};
use tokio::net::TcpStream;

use crate::client::{get, head, open, open_post, post, read_until};
use crate::fixture::{MODEL, Setup, TestServer};

/// A stream, and its bytes that were read but not yet parsed.
struct Watcher {
    socket: TcpStream,
    text: String,
}

impl Watcher {
    async fn new(server: &TestServer) -> Self {
        let head = head("GET", "/engine/events", &[], None);
        Self {
            socket: open(server.address, &head, b"").await,
            text: String::new(),
        }
    }

    /// The data of the next event of this name.
    async fn next(&mut self, name: &str) -> Value {
        let begin = format!("event: {name}\ndata: ");
        loop {
            if let Some((_, rest)) = self.text.split_once(&begin)
                && let Some((data, rest)) = rest.split_once("\n\n")
            {
                let data = serde_json::from_str(data).expect("it is JSON");
                self.text = rest.to_owned();
                return data;
            }
            self.text += &read_until(&mut self.socket, "\n\n").await;
        }
    }

    /// Adds snapshots to `all` up to the next one with the latency `name`, and returns the last snapshot.
    async fn read_latency(&mut self, name: &str, all: &mut Vec<Value>) -> Value {
        loop {
            let snapshot = self.next("snapshot").await;
            all.push(snapshot.clone());
            if snapshot["latency"][name].is_object() {
                return snapshot;
            }
        }
    }
}

fn sum(snapshots: &[Value], field: &str) -> u64 {
    let steps = snapshots
        .iter()
        .filter_map(|snapshot| snapshot["steps"].as_array());
    steps
        .flatten()
        .filter_map(|step| step[field].as_u64())
        .sum()
}

fn time_ms(snapshot: &Value) -> f64 {
    snapshot["time_ms"].as_f64().expect("a number")
}

#[tokio::test]
async fn steps_requests_and_pages_are_told() {
    let server = Setup::new().holding_behind(1).start().await;
    let mut watcher = Watcher::new(&server).await;
    let hello = watcher.next("server").await;
    assert_eq!(hello["model"], MODEL);
    assert_eq!(hello["num_pages"], 256);
    assert_eq!(hello["page_size"], 4);

    // The prompt's 16 bytes are 16 tokens. The step that computes them draws the first of 150 tokens.
    let body = json!({"prompt": "0123456789ABCDEF", "max_tokens": 150, "stream": true});
    let running = open_post(server.address, "/v1/completions", &body).await;
    let mut all = Vec::new();
    watcher.read_latency("time_to_first_token", &mut all).await;
    // The first token came before these two snapshots, and the second comes after them.
    let held = [
        watcher.next("snapshot").await,
        watcher.next("snapshot").await,
    ];
    let held_ms = time_ms(&held[1]) - time_ms(&held[0]);
    all.extend(held);
    server.gate().let_through(1);
    let busy = watcher.read_latency("inter_token", &mut all).await;
    assert_eq!(busy["requests"]["running"], 1, "{busy}");
    assert_eq!(busy["requests"]["list"][0]["status"], "decode");
    assert_eq!(busy["requests"]["list"][0]["prompt_tokens"], 16);
    assert_eq!(busy["requests"]["list"][0]["max_tokens"], 150);
    assert_eq!(busy["state"], "ready");
    let cells = busy["kv"]["map"]["cells"].as_str().expect("letters");
    assert_eq!(cells.len(), 256);
    let in_use = cells.matches('u').count() as u64;
    assert!(in_use >= 4);
    assert_eq!(busy["kv"]["in_use"], in_use);
    assert_eq!(busy["kv"]["free"], 256 - in_use);
    assert_eq!(busy["latency"]["inter_token"]["count"], 1);
    let inter_token_ms = busy["latency"]["inter_token"]["mean_ms"].as_f64();
    assert!(inter_token_ms >= Some(held_ms), "{held_ms} {busy}");

    server.gate().open();
    server.assert_at_rest().await;
    let is_last = |snapshot: &Value| {
        snapshot["totals"]["generated_tokens"] == 150 && snapshot["requests"]["running"] == 0
    };
    while !all.last().is_some_and(is_last) {
        all.push(watcher.next("snapshot").await);
    }
    assert_eq!(sum(&all, "prefill_tokens"), 16);
    assert_eq!(sum(&all, "decode_tokens"), 149);
    let last = all.last().expect("there are some");
    assert_eq!(last["requests"]["list"], json!([]));
    assert!(all.is_sorted_by_key(|snapshot| snapshot["number"].as_u64()));
    let firsts = all
        .iter()
        .filter_map(|snapshot| snapshot["latency"]["time_to_first_token"]["count"].as_u64());
    assert_eq!(firsts.sum::<u64>(), 1);
    drop(running);
}

#[tokio::test]
async fn key_is_required() {
    let mut setup = Setup::new();
    setup.server.api_keys = vec![ApiKey::unlimited("test", "secret")];
    let server = setup.start().await;
    assert_eq!(get(server.address, "/engine/events").await.status, 401);
    let with_key = head(
        "GET",
        "/engine/events",
        &[("authorization", "Bearer secret")],
        None,
    );
    let mut stream = open(server.address, &with_key, b"").await;
    read_until(&mut stream, "event: snapshot").await;
}

/// One task serves all readers. It ends with the last reader, and starts again for the next one.
#[tokio::test]
async fn readers_come_and_go() {
    let server = TestServer::start().await;
    for round in 1..=3 {
        let mut streams = [Watcher::new(&server).await, Watcher::new(&server).await];
        for stream in &mut streams {
            stream.next("snapshot").await;
        }
        drop(streams);
        wait_until_asked("the streams are counted as left", async || {
            server
                .metric("corella_http_requests_total", &["path=\"/engine/events\""])
                .await
                == Some(2.0 * f64::from(round))
        })
        .await;
    }
    let body = json!({"prompt": "x", "max_tokens": 1});
    assert_eq!(
        post(server.address, "/v1/completions", &body).await.status,
        200
    );
}

#[tokio::test]
async fn streams_do_not_hold_up_the_shutdown() {
    let mut setup = Setup::new();
    setup.server.drain_timeout = Duration::from_secs(3600);
    let server = setup.start().await;
    let mut watcher = Watcher::new(&server).await;
    watcher.next("snapshot").await;
    server.ask_to_stop();
    // If the stream waited for the grace period, this would hang.
    assert_eq!(server.stopped().await.num_cut_off, 0);
}
