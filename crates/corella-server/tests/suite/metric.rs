//! `/metrics`.

use corella_core::Speculation;
use serde_json::json;

use crate::client::{get, post, send};
use crate::fixture::{MODEL, Setup, TestServer};

#[tokio::test]
async fn counts_appear_under_both_names() {
    let server = TestServer::start().await;
    let body = json!({"prompt": "count", "max_tokens": 9, "n": 2, "ignore_eos": true});
    assert_eq!(
        post(server.address, "/v1/completions", &body).await.status,
        200
    );
    let bad = json!({"prompt": "count", "n": 0});
    assert_eq!(
        post(server.address, "/v1/completions", &bad).await.status,
        400
    );
    assert_eq!(get(server.address, "/nowhere").await.status, 404);

    let reply = get(server.address, "/metrics").await;
    assert_eq!(reply.status, 200);
    let text = reply.text();
    for prefix in ["corella_", "vllm:"] {
        let expected = [
            ("generation_tokens_total", 18.0),
            ("prompt_tokens_total", 10.0),
            ("num_requests_running", 0.0),
            ("num_requests_waiting", 0.0),
            ("num_preemptions_total", 0.0),
            ("prefix_cache_queries_total", 10.0),
            ("time_to_first_token_seconds_count", 1.0),
            ("inter_token_latency_seconds_count", 16.0),
            ("request_time_per_output_token_seconds_count", 2.0),
            ("e2e_request_latency_seconds_count", 1.0),
            ("request_queue_time_seconds_count", 2.0),
            ("request_prefill_time_seconds_count", 2.0),
            ("request_decode_time_seconds_count", 2.0),
            ("request_inference_time_seconds_count", 2.0),
            ("request_prompt_tokens_sum", 10.0),
            ("request_generation_tokens_sum", 18.0),
            ("request_max_num_generation_tokens_sum", 9.0),
            ("request_params_n_sum", 2.0),
            ("request_params_max_tokens_sum", 9.0),
            ("spec_decode_num_drafts_total", 0.0),
        ];
        for (name, value) in expected {
            let labels = [format!("model_name=\"{MODEL}\"")];
            let found = server
                .metric(&format!("{prefix}{name}"), &[&labels[0]])
                .await;
            assert_eq!(found, Some(value), "{prefix}{name}:\n{text}");
        }
        let stopped = server
            .metric(
                &format!("{prefix}request_success_total"),
                &["finished_reason=\"length\""],
            )
            .await;
        assert_eq!(stopped, Some(2.0));
        assert!(text.contains(&format!("{prefix}kv_cache_usage_perc{{")));
        assert!(text.contains(&format!("{prefix}prefix_cache_hits_total{{")));
    }
    assert!(text.contains("corella_slow_steps_total{"));
    let seconds = async |stage: &str| {
        let name = format!("{stage}_seconds_sum");
        server.metric(&name, &[]).await.unwrap()
    };
    let tokenize = seconds("corella_request_tokenize_time").await;
    let queue = seconds("corella_request_queue_time").await;
    let prefill = seconds("corella_request_prefill_time").await;
    let to_first_token = seconds("corella_time_to_first_token").await;
    // Queue and prefill are sums over two choices; the first token belongs to the faster one.
    assert!(tokenize > 0.0 && tokenize < to_first_token);
    assert!(tokenize + (queue + prefill) / 2.0 >= to_first_token * 0.999);
    assert_eq!(
        server.metric("corella_max_passed_over", &[]).await,
        Some(0.0)
    );
    let step_seconds = server.metric("corella_step_seconds_total", &[]).await;
    assert!(step_seconds.is_some_and(|seconds| seconds > 0.0 && seconds < 60.0));
    assert!(text.contains("vllm:time_per_output_token_seconds_count"));
    assert_eq!(server.num_counted("/v1/completions", 200).await, 1.0);
    assert_eq!(server.num_counted("/v1/completions", 400).await, 1.0);
    // Unknown paths share one label, so that a scanner cannot fill memory.
    assert_eq!(server.num_counted("other", 404).await, 1.0);
}

/// The series that vLLM's dashboards (`examples/observability`, September 2026) show of a server with one engine and
/// speculation, and without KV offloading.
const OF_VLLMS_DASHBOARDS: &str = "
    cache_config_info e2e_request_latency_seconds_bucket e2e_request_latency_seconds_count
    e2e_request_latency_seconds_sum generation_tokens_total inter_token_latency_seconds_bucket
    inter_token_latency_seconds_count inter_token_latency_seconds_sum iteration_tokens_total_bucket
    iteration_tokens_total_count iteration_tokens_total_sum kv_cache_usage_perc num_preemptions_total
    num_requests_running num_requests_waiting prefix_cache_hits_total prefix_cache_queries_total prompt_tokens_total
    request_decode_time_seconds_bucket request_decode_time_seconds_sum request_generation_tokens_bucket
    request_generation_tokens_count request_generation_tokens_sum request_inference_time_seconds_bucket
    request_max_num_generation_tokens_bucket request_max_num_generation_tokens_count
    request_max_num_generation_tokens_sum request_params_max_tokens_bucket request_params_max_tokens_count
    request_params_max_tokens_sum request_params_n_bucket request_params_n_count request_params_n_sum
    request_prefill_time_seconds_bucket request_prefill_time_seconds_sum request_prompt_tokens_bucket
    request_prompt_tokens_count request_prompt_tokens_sum request_queue_time_seconds_bucket
    request_queue_time_seconds_count request_queue_time_seconds_sum request_success_total
    request_time_per_output_token_seconds_bucket spec_decode_num_accepted_tokens_per_pos_total
    spec_decode_num_accepted_tokens_total spec_decode_num_draft_tokens_total spec_decode_num_drafts_total
    time_per_output_token_seconds_bucket time_to_first_token_seconds_bucket time_to_first_token_seconds_count time_to_first_token_seconds_sum
";

#[tokio::test]
async fn vllms_dashboards_find_their_series() {
    let mut setup = Setup::new();
    setup.scheduler.speculation = Speculation::Ngram;
    let server = setup.start().await;
    let body = json!({"prompt": "count", "max_tokens": 9, "n": 2, "ignore_eos": true});
    let reply = post(server.address, "/v1/completions", &body).await;
    assert_eq!(reply.status, 200);
    let reply = get(server.address, "/metrics").await;
    let text = reply.text();
    for name in OF_VLLMS_DASHBOARDS.split_whitespace() {
        assert!(text.contains(&format!("\nvllm:{name}{{")), "{name}");
    }
    let value = |series: &str, label: &str| -> f64 {
        let mut lines = text.lines().filter(|line| line.starts_with(series));
        let line = lines.find(|line| line.contains(label));
        let number = line.and_then(|line| line.rsplit(' ').next());
        let number = number.and_then(|number| number.parse().ok());
        number.unwrap_or_else(|| panic!("{series} is missing:\n{text}"))
    };
    // The prompt of five tokens is computed once, and each of two choices computes all of its tokens but the last.
    assert!(value("vllm:iteration_tokens_total_sum{", "") >= 5.0 + 2.0 * 8.0);
    let num_steps = value("vllm:iteration_tokens_total_bucket{", "le=\"+Inf\"");
    assert_eq!(num_steps, value("corella_steps_total{", ""));
    assert_eq!(num_steps, value("vllm:iteration_tokens_total_count{", ""));
}

#[tokio::test]
async fn the_cache_is_described_as_in_vllm() {
    let mut setup = Setup::new();
    setup.scheduler.enable_prefix_caching = false;
    setup.serve.model_facts.kv_format = "bf16".to_owned();
    let (page_size, num_pages) = (setup.scheduler.page_size, setup.scheduler.num_pages);
    let server = setup.start().await;
    let labels = [
        format!("model_name=\"{MODEL}\""),
        format!("block_size=\"{page_size}\""),
        format!("num_gpu_blocks=\"{num_pages}\""),
        "cache_dtype=\"bf16\"".to_owned(),
        "enable_prefix_caching=\"False\"".to_owned(),
    ];
    let labels: Vec<&str> = labels.iter().map(String::as_str).collect();
    for prefix in ["corella_", "vllm:"] {
        let name = format!("{prefix}cache_config_info");
        assert_eq!(server.metric(&name, &labels).await, Some(1.0), "{name}");
    }
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn the_process_has_its_usual_metrics() {
    let server = TestServer::start().await;
    let reply = get(server.address, "/metrics").await;
    let text = reply.text();
    let value = |name: &str| -> f64 {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        let number = line.unwrap_or_else(|| panic!("{name} is missing:\n{text}"));
        number.trim().parse().expect("a number without labels")
    };
    // The time is in seconds since 1970, and not since the machine's start.
    assert!(value("process_start_time_seconds ") > 1.7e9, "{text}");
    assert!(value("process_cpu_seconds_total ") >= 0.0, "{text}");
    let (resident, mapped) = (
        value("process_resident_memory_bytes "),
        value("process_virtual_memory_bytes "),
    );
    assert!(resident > 1e6 && resident < mapped, "{resident} {mapped}");
    let (open, most) = (value("process_open_fds "), value("process_max_fds "));
    assert!(open > 3.0 && open < most, "{open} {most}");
    assert!(text.contains("# TYPE process_cpu_seconds_total counter\n"));
    assert!(!text.contains("# EOF"));
}

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/src/metrics.md");
const LIST_START: &str =
    "<!-- Written by `UPDATE_DOCS=1 cargo test -p corella-server list_of_metrics`. -->\n";
const LIST_END: &str = "<!-- End of the list. -->";

#[cfg(target_os = "linux")]
#[tokio::test]
async fn the_list_of_metrics_is_current() {
    let server = crate::adapter::setup().start().await;
    // Requests, and the causes of computed prompts, are counted from the first one on.
    let body = json!({"prompt": "count", "max_tokens": 1});
    let answer = post(server.address, "/v1/completions", &body).await;
    assert_eq!(answer.status, 200);
    let head = "GET /metrics HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\
                accept: application/openmetrics-text\r\n\r\n";
    let scrape = send(server.address, head, b"").await;
    let scrape = scrape.text();
    let line = |kind: &str, name: &str| {
        let line = format!("# {kind} {name} ");
        scrape.lines().find_map(|found| found.strip_prefix(&line))
    };
    let mut list = "\n| name | type | vLLM | |\n|---|---|---|---|\n".to_owned();
    for named in scrape
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE "))
    {
        let (name, kind) = named.split_once(' ').expect("a name and a type");
        let Some(bare) = name
            .strip_prefix("corella_")
            .or(name.strip_prefix("process_"))
        else {
            continue;
        };
        let vllm = line("TYPE", &format!("vllm:{bare}")).map_or("", |_| "✓");
        let help = line("HELP", name).expect("each metric has its text");
        let help = help.trim_end_matches('.');
        list += &format!("| `{name}` | {kind} | {vllm} | {help} |\n");
    }
    let page = std::fs::read_to_string(PAGE).expect("the book has the page");
    let (before, rest) = page.split_once(LIST_START).expect("the list has a start");
    let (committed, after) = rest.split_once(LIST_END).expect("the list has an end");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        let page = [before, LIST_START, &list, "\n", LIST_END, after].concat();
        std::fs::write(PAGE, page).expect("the book's folder is writable");
        return;
    }
    assert!(
        committed.trim() == list.trim(),
        "docs/src/metrics.md is stale; update it with `UPDATE_DOCS=1 cargo test -p corella-server list_of_metrics`"
    );
}
