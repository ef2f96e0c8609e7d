//! `/metrics`.

use serde_json::json;

use crate::client::{get, post};
use crate::fixture::{MODEL, TestServer};

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
    // Queue and prefill are sums over two choices; the first token is that of the faster one.
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
