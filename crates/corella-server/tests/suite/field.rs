//! No field is ignored: each is read, accepted because it changes nothing, or refused by name.

use serde_json::{Value, json};

use crate::client::{Reply, post};
use crate::fixture::{Setup, TestServer};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

/// Fields that never affect an answer, with any value.
const ACCEPTED: &[&str] = &[
    // OpenAI
    "user",
    "metadata",
    "store",
    "safety_identifier",
    "service_tier",
    "prompt_cache_key",
    "prompt_cache_retention",
    // vLLM
    "request_id",
    "guided_decoding_backend",
    "spaces_between_special_tokens",
    "truncation_side",
    // llama.cpp
    "cache_prompt",
    "id_slot",
    "mirostat_tau",
    "mirostat_eta",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "xtc_threshold",
    "dynatemp_exponent",
    // Ollama
    "keep_alive",
    "num_gpu",
    "num_thread",
    "num_batch",
    "use_mmap",
    // SGLang
    "rid",
    // TGI
    "tool_prompt",
    "guideline",
];

/// Fields that are read, each with a value that is valid at both endpoints.
const READ: &[(&str, &str)] = &[
    ("temperature", "0.5"),
    ("top_p", "0.9"),
    ("n", "2"),
    ("stop", "[\"x\"]"),
    ("response_format", "{\"type\": \"text\"}"),
    ("seed", "1"),
    ("presence_penalty", "0.1"),
    ("frequency_penalty", "0.1"),
    ("max_tokens", "2"),
    ("max_completion_tokens", "2"),
    ("resume_token_ids", "[97]"),
    ("stream", "false"),
    ("top_k", "5"),
    ("min_p", "0.1"),
    ("repetition_penalty", "1.1"),
    ("logit_bias", "{\"97\": 1}"),
    ("allowed_token_ids", "[97, 98]"),
    ("bad_words", "[\"x\"]"),
    ("min_tokens", "1"),
    ("stop_token_ids", "[3]"),
    ("ignore_eos", "true"),
    ("include_stop_str_in_output", "true"),
    ("skip_special_tokens", "false"),
    ("add_special_tokens", "true"),
    ("cache_salt", "\"salt\""),
    ("priority", "1"),
    ("return_token_ids", "true"),
    ("return_tokens_as_token_ids", "true"),
    ("return_metrics", "true"),
    ("ttft_slo_ms", "100000"),
    ("tpot_slo_ms", "100000"),
];

/// Fields that are refused with the first value. The second value, if there is one, asks for Corella's behaviour and is
/// accepted.
const REFUSED: &[(&str, &str, &str)] = &[
    // OpenAI
    ("functions", "[{}]", "[]"),
    ("function_call", "{\"name\": \"f\"}", "\"none\""),
    ("modalities", "[\"text\", \"audio\"]", "[\"text\"]"),
    ("audio", "{\"voice\": \"alloy\"}", ""),
    ("prediction", "{\"type\": \"content\"}", ""),
    ("verbosity", "\"low\"", "\"medium\""),
    ("web_search_options", "{}", ""),
    // vLLM
    ("use_beam_search", "true", "false"),
    ("length_penalty", "0.5", "1.0"),
    ("logits_processors", "[\"x\"]", "[]"),
    ("prompt_embeds", "\"x\"", ""),
    ("truncate_prompt_tokens", "5", ""),
    ("guided_whitespace_pattern", "\" \"", ""),
    ("structural_tag", "\"a\"", ""),
    ("include_reasoning", "false", "true"),
    ("separate_reasoning", "false", "true"),
    ("stream_reasoning", "false", "true"),
    ("parse_tool_calls", "false", "true"),
    ("reasoning_format", "\"none\"", "\"auto\""),
    ("thinking_forced_open", "true", "false"),
    ("kv_transfer_params", "{\"a\": 1}", "{}"),
    ("vllm_xargs", "{\"a\": 1}", "{}"),
    ("chat_template", "\"x\"", ""),
    ("documents", "[{}]", "[]"),
    ("mm_processor_kwargs", "{\"a\": 1}", "{}"),
    ("media_io_kwargs", "{\"a\": 1}", "{}"),
    // llama.cpp
    ("n_predict", "5", ""),
    ("n_probs", "3", "0"),
    ("min_keep", "3", "0"),
    ("n_keep", "-1", "0"),
    ("n_indent", "2", "0"),
    ("t_max_predict_ms", "100", "-1"),
    ("repeat_penalty", "1.2", "1"),
    ("repeat_last_n", "64", "-1"),
    ("dynatemp_range", "0.5", "0"),
    ("top_n_sigma", "1.0", "-1"),
    ("typical_p", "0.5", "1.0"),
    ("tfs_z", "0.5", "1"),
    ("xtc_probability", "0.5", "0.0"),
    ("dry_multiplier", "0.8", "0"),
    ("mirostat", "2", "0"),
    ("grammar", "\"root ::= x\"", "\"\""),
    ("json_schema", "{}", ""),
    ("samplers", "[\"top_k\"]", ""),
    ("lora", "[{\"id\": 0}]", "[]"),
    ("return_tokens", "true", "false"),
    ("return_progress", "true", "false"),
    ("timings_per_token", "true", "false"),
    ("post_sampling_probs", "true", "false"),
    ("response_fields", "[\"content\"]", "[]"),
    ("image_data", "[{}]", "[]"),
    ("input_prefix", "\"a\"", ""),
    // Ollama
    ("options", "{\"temperature\": 0}", "{}"),
    ("format", "\"json\"", "\"\""),
    ("think", "true", ""),
    ("raw", "true", "false"),
    ("system", "\"be brief\"", "\"\""),
    ("template", "\"x\"", "\"\""),
    ("context", "[1]", "[]"),
    ("images", "[\"x\"]", "[]"),
    ("num_ctx", "4096", ""),
    ("num_predict", "5", ""),
    ("num_keep", "5", "0"),
    // SGLang
    ("regex", "\"a\"", ""),
    ("ebnf", "\"a\"", ""),
    ("stop_regex", "\"a\"", "[]"),
    ("no_stop_trim", "true", "false"),
    ("lora_path", "\"a\"", ""),
    ("session_params", "{\"id\": 1}", "{}"),
    ("custom_logit_processor", "\"a\"", ""),
    ("custom_params", "{\"a\": 1}", "{}"),
    ("return_hidden_states", "true", "false"),
    ("bootstrap_host", "\"a\"", ""),
    ("bootstrap_port", "1", ""),
    ("bootstrap_room", "1", ""),
    ("data_parallel_rank", "0", ""),
    ("min_new_tokens", "1", ""),
    ("input_ids", "[1]", ""),
    ("sampling_params", "{}", ""),
    // TGI
    ("inputs", "\"a\"", ""),
    ("parameters", "{\"top_k\": 1}", "{}"),
    ("max_new_tokens", "5", ""),
    ("do_sample", "false", "true"),
    ("truncate", "5", "false"),
    ("return_full_text", "true", "false"),
    ("decoder_input_details", "true", "false"),
    ("details", "true", "false"),
    ("top_n_tokens", "5", "0"),
    ("watermark", "true", "false"),
    ("adapter_id", "\"a\"", ""),
    // The parameter by which Python clients add fields to a body.
    ("extra_body", "{\"top_k\": 1}", "{}"),
];

const TYPOS: &[(&str, &str)] = &[
    ("temprature", "temperature"),
    ("Temperature", "temperature"),
    ("stops", "stop"),
    ("topp", "top_p"),
    ("tpo_k", "top_k"),
    ("max_token", "max_tokens"),
    ("maxTokens", "max_tokens"),
    ("frequency_penality", "frequency_penalty"),
    ("steam", "stream"),
    ("ignore_eso", "ignore_eos"),
    ("respnse_format", "response_format"),
];

fn parsed(json: &str) -> Value {
    serde_json::from_str(json).expect("it is JSON")
}

fn bodies() -> [(&'static str, Value); 2] {
    let user = json!([{"role": "user", "content": "hi"}]);
    [
        (COMPLETIONS, json!({"prompt": "hi", "max_tokens": 2})),
        (CHAT, json!({"messages": user, "max_tokens": 2})),
    ]
}

async fn post_field(
    server: &TestServer,
    path: &str,
    body: &Value,
    name: &str,
    value: Value,
) -> Reply {
    let mut body = body.clone();
    body[name] = value;
    post(server.address, path, &body).await
}

fn assert_refused(reply: &Reply, param: &str, code: &str) {
    assert_eq!(reply.status, 400, "{param}: {}", reply.text());
    let error = reply.error();
    assert_eq!(error["param"], param, "{error}");
    assert_eq!(error["code"], code, "{error}");
    let message = error["message"].as_str().expect("text");
    assert!(
        message.contains(param.rsplit('.').next().expect("a name")),
        "{message}"
    );
}

#[tokio::test]
async fn what_changes_nothing_is_accepted() {
    let server = TestServer::start().await;
    for (path, body) in bodies() {
        for name in ACCEPTED {
            for value in [json!("x"), json!(false), json!({"a": [1]})] {
                let reply = post_field(&server, path, &body, name, value).await;
                assert_eq!(reply.status, 200, "{name}: {}", reply.text());
            }
        }
        for (name, value) in READ {
            let reply = post_field(&server, path, &body, name, parsed(value)).await;
            assert_eq!(reply.status, 200, "{name}: {}", reply.text());
        }
    }
}

#[tokio::test]
async fn what_is_not_done_is_refused_by_name() {
    let server = TestServer::start().await;
    for (path, body) in bodies() {
        for (name, value, neutral) in REFUSED {
            let reply = post_field(&server, path, &body, name, parsed(value)).await;
            assert_refused(&reply, name, "unsupported_parameter");
            let neutral = match *neutral {
                "" => "null",
                neutral => neutral,
            };
            for neutral in [Value::Null, parsed(neutral)] {
                let reply = post_field(&server, path, &body, name, neutral).await;
                assert_eq!(reply.status, 200, "{name}: {}", reply.text());
            }
        }
    }
}

#[tokio::test]
async fn what_is_unknown_is_refused_with_the_nearest_name() {
    let server = TestServer::start().await;
    for (path, body) in bodies() {
        for (typo, meant) in TYPOS {
            let reply = post_field(&server, path, &body, typo, json!(1)).await;
            assert_refused(&reply, typo, "unknown_parameter");
            let expected = format!("unknown field `{typo}`; did you mean `{meant}`?");
            assert_eq!(reply.error()["message"], expected);
        }
        let reply = post_field(&server, path, &body, "flux_capacitance", json!(7)).await;
        assert_refused(&reply, "flux_capacitance", "unknown_parameter");
        assert!(!reply.text().contains("did you mean"), "{}", reply.text());
        // Newer client libraries send unknown members as null.
        let reply = post_field(&server, path, &body, "flux_capacitance", json!(null)).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
    }
    let body = json!({"prompt": "hi", "add_special_token": true});
    let reply = post(server.address, "/tokenize", &body).await;
    assert_refused(&reply, "add_special_token", "unknown_parameter");
    let reply = post(server.address, "/detokenize", &json!({"token": [1]})).await;
    assert_refused(&reply, "token", "unknown_parameter");
}

#[tokio::test]
async fn unknown_fields_are_ignored_where_that_is_asked_for() {
    let mut setup = Setup::new();
    setup.server.allow_unknown_fields = true;
    let server = setup.start().await;
    for (path, body) in bodies() {
        let reply = post_field(&server, path, &body, "temprature", json!(1)).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        // A field of another endpoint, too.
        let reply = post_field(&server, path, &body, "top_n", json!(1)).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        let reply = post_field(&server, path, &body, "functions", json!([{}])).await;
        assert_refused(&reply, "functions", "unsupported_parameter");
    }
}

#[tokio::test]
async fn a_field_of_another_endpoint_says_where_it_belongs() {
    let server = TestServer::start().await;
    let [(_, completion), (_, chat)] = bodies();
    let response = json!({"input": "hi", "max_output_tokens": 1});
    let cases = [
        ("/v1/responses", &response, "add_generation_prompt", CHAT),
        (COMPLETIONS, &completion, "messages", CHAT),
        (COMPLETIONS, &completion, "top_logprobs", CHAT),
        (COMPLETIONS, &completion, "chat_template_kwargs", CHAT),
        (CHAT, &chat, "prompt", COMPLETIONS),
        (CHAT, &chat, "best_of", COMPLETIONS),
    ];
    for (path, body, name, belongs) in cases {
        let reply = post_field(&server, path, body, name, json!([1])).await;
        assert_refused(&reply, name, "unknown_parameter");
        assert!(reply.text().contains(belongs), "{}", reply.text());
        let reply = post_field(&server, path, body, name, json!(null)).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
    }
    // The same body can be sent to `/tokenize` to count its tokens.
    let mut body = chat;
    body["top_logprobs"] = json!(3);
    body["logprobs"] = json!(true);
    body["temperature"] = json!(0.5);
    let reply = post(server.address, "/tokenize", &body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
}

#[tokio::test]
async fn fields_within_fields_are_checked() {
    let server = TestServer::start().await;
    let message = |message: Value| json!({"messages": [{"role": "user", "content": "a"}, message]});
    let part = |part: Value| message(json!({"role": "user", "content": [part]}));
    let streamed = |options: Value| {
        let user = json!([{"role": "user", "content": "hi"}]);
        json!({"messages": user, "stream": true, "max_tokens": 2, "stream_options": options})
    };
    let assistant = json!({
        "role": "assistant", "content": "b", "refusal": null, "annotations": [], "audio": null,
        "function_call": null, "tool_calls": [], "reasoning_content": "hm", "name": "me",
    });
    let text = json!({"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}});
    for body in [
        message(assistant),
        part(text),
        streamed(json!({"include_usage": true, "include_obfuscation": false})),
        streamed(json!({"include_usage": true, "continuous_usage_stats": false})),
        streamed(json!({})),
        streamed(json!(null)),
    ] {
        let reply = post(server.address, CHAT, &body).await;
        assert_eq!(reply.status, 200, "{body}: {}", reply.text());
    }
    let unknown = "unknown_parameter";
    let unsupported = "unsupported_parameter";
    let cases = [
        (
            message(json!({"role": "user", "contnet": "a"})),
            "messages[1].contnet",
            unknown,
        ),
        (
            message(json!({"role": "assistant", "tool_calls": [{"functoin": {}}]})),
            "messages[1].tool_calls[0].functoin",
            unknown,
        ),
        (
            part(json!({"type": "text", "txt": "a"})),
            "messages[1].content[0].txt",
            unknown,
        ),
        (
            part(json!({"type": "text", "text": "a", "image_url": {"url": "x"}})),
            "messages[1].content[0].image_url",
            unsupported,
        ),
        (
            streamed(json!({"include_usge": true})),
            "stream_options.include_usge",
            unknown,
        ),
    ];
    for (body, param, code) in cases {
        let reply = post(server.address, CHAT, &body).await;
        assert_refused(&reply, param, code);
    }
    let reply = post(
        server.address,
        CHAT,
        &message(json!({"role": "user", "contnet": "a"})),
    )
    .await;
    let expected = "unknown field `contnet` in messages[1]; did you mean `content`?";
    assert_eq!(reply.error()["message"], expected);
}
