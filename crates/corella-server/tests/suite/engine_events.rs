//! `/engine/events`: what the engine does, told to whoever reads.

use corella_server::ApiKey;
use serde_json::{Value, json};
use tokio::net::TcpStream;

use crate::client::{get, head, open, open_post, post, read_until};
use crate::fixture::{MODEL, Setup, TestServer, wait_for};

/// A stream, and what was read of it and not looked at.
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

#[tokio::test]
async fn steps_requests_and_pages_are_told() {
    let server = Setup::new().with_step_ms(5).start().await;
    let mut watcher = Watcher::new(&server).await;
    let hello = watcher.next("server").await;
    assert_eq!(hello["model"], MODEL);
    assert_eq!(hello["num_pages"], 256);
    assert_eq!(hello["page_size"], 4);

    // 16 bytes are 16 tokens, and the first of 150 tokens comes with them.
    let body = json!({"prompt": "0123456789ABCDEF", "max_tokens": 150, "stream": true});
    let running = open_post(server.address, "/v1/completions", &body).await;
    let mut all = Vec::new();
    let busy = loop {
        let snapshot = watcher.next("snapshot").await;
        all.push(snapshot.clone());
        if snapshot["latency"]["inter_token"].is_object() {
            break snapshot;
        }
    };
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
    assert!(
        busy["latency"]["inter_token"]["p50_ms"].as_f64() >= Some(4.0),
        "{busy}"
    );

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
    setup.serve.api_keys = vec![ApiKey::unlimited("test", "secret")];
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

/// Several readers are served by one task, which ends with the last of them, and starts again.
#[tokio::test]
async fn readers_come_and_go() {
    let server = TestServer::start().await;
    for _ in 0..3 {
        let mut streams = [Watcher::new(&server).await, Watcher::new(&server).await];
        for stream in &mut streams {
            stream.next("snapshot").await;
        }
        drop(streams);
        wait_for("the streams are counted as left", async || {
            server
                .metric("corella_http_requests_total", &["path=\"/engine/events\""])
                .await
                > Some(0.0)
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
    let server = TestServer::start().await;
    let mut watcher = Watcher::new(&server).await;
    watcher.next("snapshot").await;
    let begun = std::time::Instant::now();
    server.ask_to_stop();
    let report = server.stopped().await;
    assert_eq!(report.num_cut_off, 0);
    // The grace period is 10 s.
    assert!(begun.elapsed().as_secs() < 5);
}
