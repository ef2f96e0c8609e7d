//! The load generator, against a server whose delays and faults are known.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use corella_bench::serve::{self, BenchServeOptions, Endpoint, PromptSource, RandomPrompts, Unit};
use corella_bench::{BenchError, Report, ReportFiles};
use corella_test::wait_until_async;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

/// The server's time for a token. The server sleeps, because these times are the subject: a report may show more on a
/// busy machine, and never less.
const FIRST: Duration = Duration::from_millis(60);
const NEXT: Duration = Duration::from_millis(15);

/// The server's fault.
#[derive(Clone, Copy, PartialEq)]
enum Fault {
    None,
    /// Every third request is refused.
    Refuse,
    /// It sends an error event after two tokens.
    ErrorEvent,
    /// It closes the connection after two tokens.
    Close,
    /// It sends nothing more after two tokens.
    Silence,
    /// Its streams end correctly, but without usage, and it has no metrics.
    NoUsage,
}

#[derive(Default)]
struct Seen {
    num_requests: AtomicUsize,
    num_running: AtomicUsize,
    max_running: AtomicUsize,
    /// All requests but the first are answered only when this many are present together.
    min_together: usize,
    bodies: std::sync::Mutex<Vec<Value>>,
}

/// Runs the benchmark once.
async fn run(options: BenchServeOptions) -> Result<Report, BenchError> {
    let mut repeats = serve::run(options).await?;
    assert_eq!(repeats.runs.len(), 1);
    Ok(repeats.runs.remove(0))
}

/// Starts a server that answers like an OpenAI server, one request per connection, and returns its
/// base URL.
async fn server(fault: Fault) -> (String, Arc<Seen>) {
    server_of(fault, 1).await
}

async fn server_of(fault: Fault, min_together: usize) -> (String, Arc<Seen>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let seen = Arc::new(Seen {
        min_together,
        ..Seen::default()
    });
    let shared = seen.clone();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let seen = shared.clone();
            // The client may have left before the answer is written.
            tokio::spawn(async move { answer(stream, fault, &seen).await });
        }
    });
    (format!("http://{address}"), seen)
}

async fn answer(stream: TcpStream, fault: Fault, seen: &Seen) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut stream = BufReader::new(stream);
    let (mut request_line, mut len) = (String::new(), 0);
    stream.read_line(&mut request_line).await?;
    loop {
        let mut line = String::new();
        stream.read_line(&mut line).await?;
        if line.trim().is_empty() {
            break;
        }
        let (name, value) = line.split_once(':').unwrap();
        if name.eq_ignore_ascii_case("content-length") {
            len = value.trim().parse().unwrap();
        }
    }
    let mut body = vec![0; len];
    stream.read_exact(&mut body).await?;
    if request_line.starts_with("GET /v1/models ") {
        let body = r#"{"object": "list", "data": [{"id": "parrot"}]}"#;
        return reply(stream, "200 OK", body).await;
    }
    // Other servers may not tell their version.
    if request_line.starts_with("GET /version ") {
        return reply(stream, "404 Not Found", "").await;
    }
    if request_line.starts_with("GET /metrics ") && fault == Fault::NoUsage {
        return reply(stream, "404 Not Found", "").await;
    }
    if request_line.starts_with("GET /metrics ") {
        let num_requests = seen.num_requests.load(Ordering::SeqCst);
        let seconds = 0.5 * num_requests as f64;
        let body = format!(
            "vllm:request_queue_time_seconds_count {num_requests}\n\
             vllm:request_queue_time_seconds_sum {seconds}\ncorella_max_passed_over 3\n"
        );
        return reply(stream, "200 OK", &body).await;
    }
    if request_line.starts_with("POST /tokenize ") {
        let body: Value = serde_json::from_slice(&body).unwrap();
        let tokens: Vec<usize> = body["prompt"]
            .as_str()
            .unwrap()
            .split(' ')
            .map(str::len)
            .collect();
        let body = json!({ "count": tokens.len(), "tokens": tokens }).to_string();
        return reply(stream, "200 OK", &body).await;
    }
    let is_chat = request_line.starts_with("POST /v1/chat/completions ");
    assert!(
        is_chat || request_line.starts_with("POST /v1/completions "),
        "{request_line}"
    );
    let body: Value = serde_json::from_slice(&body).unwrap();
    let num_tokens = body["max_tokens"].as_u64().unwrap();
    seen.bodies.lock().unwrap().push(body);

    let index = seen.num_requests.fetch_add(1, Ordering::SeqCst);
    if index % 3 == 2 && fault == Fault::Refuse {
        let body = r#"{"error": {"message": "the queue is full", "type": "overloaded"}}"#;
        return reply(stream, "429 Too Many Requests", body).await;
    }
    let running = seen.num_running.fetch_add(1, Ordering::SeqCst) + 1;
    seen.max_running.fetch_max(running, Ordering::SeqCst);
    if index > 0 {
        wait_until_async("enough requests run together", || {
            seen.max_running.load(Ordering::SeqCst) >= seen.min_together
        })
        .await;
    }
    let outcome = stream_tokens(stream, fault, is_chat, num_tokens).await;
    seen.num_running.fetch_sub(1, Ordering::SeqCst);
    outcome
}

async fn reply(mut stream: BufReader<TcpStream>, status: &str, body: &str) -> std::io::Result<()> {
    let len = body.len();
    let reply = format!("HTTP/1.1 {status}\r\nContent-Length: {len}\r\n\r\n{body}");
    stream.write_all(reply.as_bytes()).await
}

async fn stream_tokens(
    mut stream: BufReader<TcpStream>,
    fault: Fault,
    is_chat: bool,
    num_tokens: u64,
) -> std::io::Result<()> {
    let head =
        "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";
    stream.write_all(head.as_bytes()).await?;
    let choice = |text: &str, finish_reason: Value| match is_chat {
        true => json!({"choices": [{"delta": {"content": text}, "finish_reason": finish_reason}]}),
        false => json!({"choices": [{"text": text, "finish_reason": finish_reason}]}),
    };
    if is_chat {
        // The role comes before any computation, so it does not count as a token.
        send(
            &mut stream,
            &json!({"choices": [{"delta": {"role": "assistant", "content": ""}}]}),
        )
        .await?;
    }
    for token in 0..num_tokens {
        tokio::time::sleep(if token == 0 { FIRST } else { NEXT }).await;
        if token == 2 {
            match fault {
                Fault::Close => return Ok(()),
                Fault::Silence => std::future::pending().await,
                Fault::ErrorEvent => {
                    send(&mut stream, &json!({"error": {"message": "out of pages"}})).await?;
                }
                Fault::None | Fault::Refuse | Fault::NoUsage => {}
            }
        }
        send(&mut stream, &choice("a", Value::Null)).await?;
    }
    send(&mut stream, &choice("", "length".into())).await?;
    if fault != Fault::NoUsage {
        let usage = json!({"prompt_tokens": 7, "completion_tokens": num_tokens});
        send(&mut stream, &json!({"choices": [], "usage": usage})).await?;
    }
    stream
        .write_all(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        .await?;
    stream.flush().await
}

async fn send(stream: &mut BufReader<TcpStream>, event: &Value) -> std::io::Result<()> {
    let event = format!("data: {event}\n\n");
    let chunk = format!("{:x}\r\n{event}\r\n", event.len());
    stream.write_all(chunk.as_bytes()).await?;
    stream.flush().await
}

fn options(base_url: String) -> BenchServeOptions {
    BenchServeOptions {
        base_url,
        prompts: PromptSource::Repeats {
            phrase: "fly".into(),
            repeats: vec![3, 1],
        },
        num_prompts: 6,
        max_concurrency: Some(2),
        max_tokens: 5,
        num_warmups: 0,
        ..BenchServeOptions::default()
    }
}

fn assert_adds_up(report: &Report) {
    for request in &report.requests {
        let Some(ttft) = request.ttft else { continue };
        assert_eq!(
            request.latency - ttft,
            request.itls.iter().sum::<Duration>()
        );
    }
}

#[tokio::test]
async fn times_what_the_server_does() {
    for endpoint in [Endpoint::Completions, Endpoint::Chat] {
        let (base_url, seen) = server_of(Fault::None, 2).await;
        let report = run(BenchServeOptions {
            endpoint,
            ignore_eos: true,
            seed: 3,
            temperature: 0.5,
            ..options(base_url)
        });
        let report = report.await.unwrap();
        assert_eq!((report.num_completed, report.num_failed), (6, 0));
        assert_eq!(report.head.model, "parrot");
        assert_eq!(
            (report.total_input_tokens, report.total_output_tokens),
            (6 * 7, 6 * 5)
        );
        assert_eq!(seen.max_running.load(Ordering::SeqCst), 2);
        assert_adds_up(&report);
        for request in &report.requests {
            assert!(request.ttft.unwrap() >= FIRST);
            assert!(request.latency >= FIRST + 4 * NEXT);
            assert_eq!(request.itls.len(), 4);
            let tpot = (request.latency - request.ttft.unwrap()).as_secs_f64() / 4.0;
            assert!((request.tpot().unwrap() - tpot).abs() < 1e-9);
        }
        assert!(report.duration >= 3 * (FIRST + 4 * NEXT));

        let bodies = seen.bodies.lock().unwrap();
        let prompt = |text: &str| match endpoint {
            Endpoint::Completions => json!(text),
            Endpoint::Chat => json!([{"role": "user", "content": text}]),
        };
        let key = if endpoint == Endpoint::Chat {
            "messages"
        } else {
            "prompt"
        };
        let num_long = bodies
            .iter()
            .filter(|body| body[key] == prompt("fly fly fly"))
            .count();
        assert_eq!(num_long, 3);
        assert!(bodies.iter().all(|body| {
            body["model"] == "parrot"
                && body["max_tokens"] == 5
                && body["ignore_eos"] == true
                && body["seed"] == 3
                && body["temperature"] == 0.5
                && body["stream"] == true
                && body["stream_options"]["include_usage"] == true
        }));
    }
}

#[tokio::test]
async fn all_at_once_runs_them_together() {
    let (base_url, seen) = server_of(Fault::None, 6).await;
    let all = BenchServeOptions {
        max_concurrency: None,
        num_warmups: 1,
        ..options(format!("{base_url}/v1/"))
    };
    let report = run(all).await.unwrap();
    assert_eq!(report.num_completed, 6);
    assert_eq!(
        seen.num_requests.load(Ordering::SeqCst),
        7,
        "six requests and the warm-up were not sent"
    );
    assert_eq!(seen.max_running.load(Ordering::SeqCst), 6);
}

#[tokio::test]
async fn failures_are_counted_and_kept_out_of_the_times() {
    let (base_url, _) = server(Fault::Refuse).await;
    let report = run(options(base_url)).await.unwrap();
    assert_eq!((report.num_completed, report.num_failed), (4, 2));
    assert_eq!(report.total_output_tokens, 4 * 5);
    assert!(
        report
            .to_string()
            .contains("2 x 429 Too Many Requests: the queue is full"),
        "{report}"
    );

    for (fault, reason) in [
        (Fault::ErrorEvent, "out of pages"),
        (Fault::Close, "unexpected EOF"),
        (Fault::Silence, "the server sent nothing for 0.3 s"),
    ] {
        let (base_url, _) = server(fault).await;
        let mut options = options(base_url);
        if fault == Fault::Silence {
            options.idle_timeout = Duration::from_millis(300);
        }
        let report = run(options).await.unwrap();
        assert_eq!((report.num_completed, report.num_failed), (0, 6));
        assert_eq!(report.e2el_ms.mean, 0.0);
        assert_eq!(report.output_throughput(), 0.0);
        assert_adds_up(&report);
        let error = report.requests[0].error.as_deref().unwrap();
        assert!(error.contains(reason), "{error}");
    }
}

#[tokio::test]
async fn without_usage_events_are_counted() {
    let (base_url, _) = server(Fault::NoUsage).await;
    let report = run(options(base_url)).await.unwrap();
    assert_eq!(
        (report.total_input_tokens, report.total_output_tokens),
        (0, 6 * 5)
    );
    assert_eq!(
        report.server_phases,
        [],
        "a server without metrics has phases"
    );
    assert_eq!(report.max_passed_over, None);
}

#[tokio::test]
async fn one_token_has_no_time_per_output_token() {
    let (base_url, _) = server(Fault::None).await;
    let report = run(BenchServeOptions {
        max_tokens: 1,
        ..options(base_url)
    })
    .await
    .unwrap();
    assert!(
        report
            .requests
            .iter()
            .all(|request| request.tpot().is_none())
    );
    assert!(
        report
            .requests
            .iter()
            .all(|request| request.ttft == Some(request.latency))
    );
    assert_eq!(report.tpot_ms.mean, 0.0);
    assert!(report.ttft_ms.mean >= FIRST.as_secs_f64() * 1e3);
}

#[tokio::test]
async fn writes_the_keys_of_vllm_bench_serve() {
    let (base_url, _) = server_of(Fault::None, 2).await;
    let path =
        std::env::temp_dir().join(format!("corella-bench-serve-{}.json", std::process::id()));
    let report = run(BenchServeOptions {
        files: ReportFiles {
            json: Some(path.clone()),
            is_detailed: true,
            html: None,
        },
        ..options(base_url)
    });
    let report = report.await.unwrap();
    let json: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    std::fs::remove_file(&path).unwrap();

    assert_eq!(json["completed"], 6);
    assert_eq!(json["failed"], 0);
    assert_eq!(json["num_prompts"], 6);
    assert_eq!(json["max_concurrency"], 2);
    assert_eq!(json["model_id"], "parrot");
    assert_eq!(json["total_output_tokens"], 30);
    let seconds = json["duration"].as_f64().unwrap();
    assert!((json["request_throughput"].as_f64().unwrap() - 6.0 / seconds).abs() < 1e-9);
    assert!((json["output_throughput"].as_f64().unwrap() - 30.0 / seconds).abs() < 1e-9);
    assert!((json["total_token_throughput"].as_f64().unwrap() - 72.0 / seconds).abs() < 1e-9);
    for metric in ["ttft", "tpot", "itl", "e2el"] {
        for kind in ["mean", "median", "std", "p50", "p95", "p99"] {
            assert!(
                json[format!("{kind}_{metric}_ms")].is_f64(),
                "{kind}_{metric}_ms"
            );
        }
    }
    assert_eq!(json["itls"][0].as_array().unwrap().len(), 4);
    for key in ["ttfts", "e2els", "errors", "input_lens", "output_lens"] {
        assert_eq!(json[key].as_array().unwrap().len(), 6, "{key}");
    }
    assert!(report.to_json(false).get("itls").is_none());
    assert_eq!(
        (&json["request_rate"], &json["burstiness"]),
        (&json!("inf"), &json!(1.0))
    );
    assert_eq!(json["max_concurrent_requests"], 2);
    assert!(json["max_output_tokens_per_s"].is_u64());
    assert_eq!(json["start_times"].as_array().unwrap().len(), 6);
    assert_eq!(json["mean_queue_ms"], 500.0);
    assert_eq!(json["max_passed_over"], 3);
    assert_eq!(json.get("mean_prefill_ms"), None);
}

#[tokio::test]
async fn repeats_send_other_random_prompts_each_time() {
    let (base_url, seen) = server(Fault::None).await;
    let vocab_size = 200;
    let path = std::env::temp_dir().join(format!("corella-repeats-{}", std::process::id()));
    let repeats = serve::run(BenchServeOptions {
        prompts: PromptSource::Random(RandomPrompts {
            unit: Unit::Tokens {
                vocab_size,
                unique: true,
            },
            len: 20,
            ..RandomPrompts::default()
        }),
        num_prompts: 4,
        num_warmups: 2,
        num_repeats: 3,
        max_tokens: 2,
        files: ReportFiles {
            json: Some(path.with_extension("json")),
            is_detailed: false,
            html: Some(path.with_extension("html")),
        },
        ..options(base_url)
    });
    let repeats = repeats.await.unwrap();
    let json: Value =
        serde_json::from_slice(&std::fs::read(path.with_extension("json")).unwrap()).unwrap();
    let html = std::fs::read_to_string(path.with_extension("html")).unwrap();
    for kind in ["json", "html"] {
        std::fs::remove_file(path.with_extension(kind)).unwrap();
    }
    assert_eq!(json["runs"].as_array().unwrap().len(), 3);
    let mut throughputs: Vec<f64> = repeats.runs.iter().map(Report::output_throughput).collect();
    throughputs.sort_by(f64::total_cmp);
    // A number read back from JSON may differ in its last bit.
    let is = |value: &Value, expected: f64| (value.as_f64().unwrap() - expected).abs() < 1e-9;
    assert!(is(&json["output_throughput"], throughputs[1]));
    assert!(is(
        &json["spread"]["output_throughput"]["max"],
        throughputs[2]
    ));
    assert!(
        html.contains("Time to first token") && html.contains("3 runs, whose medians are shown"),
        "{html}"
    );

    let bodies = seen.bodies.lock().unwrap();
    assert_eq!(bodies.len(), 2 + 3 * 4);
    let firsts = bodies
        .iter()
        .map(|body| body["prompt"][0].as_u64().unwrap());
    assert_eq!(firsts.collect::<BTreeSet<_>>().len(), 14);
    assert!(
        bodies
            .iter()
            .all(|body| body["prompt"].as_array().unwrap().len() == 20)
    );
}

#[tokio::test]
async fn prompts_are_tokenised_before_the_run() {
    let (base_url, seen) = server(Fault::None).await;
    let options = BenchServeOptions {
        pre_tokenize: true,
        submit_interval: Some(Duration::from_millis(40)),
        max_concurrency: None,
        ..options(base_url)
    };
    let report = run(options.clone()).await.unwrap();
    assert!(report.duration >= 5 * Duration::from_millis(40) + FIRST + 4 * NEXT);
    assert!(report.lag_ms.is_some());
    let starts = report.requests.iter().map(|request| request.start);
    for (index, start) in starts.enumerate() {
        assert!(
            start >= index as u32 * Duration::from_millis(40),
            "{start:?}"
        );
    }
    let bodies = std::mem::take(&mut *seen.bodies.lock().unwrap());
    let num_long = bodies
        .iter()
        .filter(|body| body["prompt"] == json!([3, 3, 3]))
        .count();
    let num_short = bodies
        .iter()
        .filter(|body| body["prompt"] == json!([3]))
        .count();
    assert_eq!((num_long, num_short), (3, 3));

    let chat = BenchServeOptions {
        endpoint: Endpoint::Chat,
        ..options
    };
    let error = run(chat).await.unwrap_err().to_string();
    assert!(error.contains("--pre-tokenize"), "{error}");
}

#[tokio::test]
async fn what_cannot_run_says_why() {
    let (base_url, seen) = server(Fault::None).await;
    let free = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let closed = format!("http://{}", free.local_addr().unwrap());
    drop(free);
    let cases = [
        (options(closed), "refused"),
        (
            options("https://127.0.0.1".into()),
            "no authority of certificates is known",
        ),
        (
            options("ftp://127.0.0.1".into()),
            "only http and https are supported",
        ),
        (options("127.0.0.1:8000".into()), "--base-url"),
        (
            BenchServeOptions {
                num_prompts: 0,
                ..options(base_url.clone())
            },
            "--num-prompts",
        ),
        (
            BenchServeOptions {
                max_concurrency: Some(0),
                ..options(base_url.clone())
            },
            "--max-concurrency",
        ),
        (
            BenchServeOptions {
                files: ReportFiles {
                    json: Some("/no/such/folder/x.json".into()),
                    ..ReportFiles::default()
                },
                ..options(base_url)
            },
            "/no/such",
        ),
    ];
    for (options, reason) in cases {
        let error = run(options).await.unwrap_err().to_string();
        assert!(error.contains(reason) && !error.contains('\n'), "{error}");
    }
    assert_eq!(seen.num_requests.load(Ordering::SeqCst), 0);

    let (base_url, _) = server(Fault::ErrorEvent).await;
    let warm = BenchServeOptions {
        num_warmups: 1,
        ..options(base_url)
    };
    assert!(
        matches!(run(warm).await, Err(BenchError::Warmup(reason)) if reason.contains("out of pages"))
    );
}
