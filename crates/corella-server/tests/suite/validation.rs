//! Requests that cannot be served are refused with the name of the field.

use serde_json::{Value, json};

use crate::client::{get, post, post_bytes};
use crate::fixture::{MAX_MODEL_LEN, Setup, TestServer, VOCAB_SIZE};

async fn assert_names(server: &TestServer, path: &str, body: Value, param: &str) {
    let reply = post(server.address, path, &body).await;
    assert_eq!(reply.status, 400, "{body}: {}", reply.text());
    let error = reply.error();
    assert_eq!(error["param"], param, "{body}: {error}");
    assert_eq!(error["type"], "invalid_request_error");
}

#[tokio::test]
async fn every_error_names_its_field() {
    let server = TestServer::start().await;
    let cases = [
        ("temperature", json!(-0.1)),
        ("temperature", json!("hot")),
        ("temperature", json!(1e39)),
        ("top_p", json!(0)),
        ("top_p", json!(1.01)),
        // Rounded to an f32, this would be 1.
        ("top_p", json!(1.000_000_01)),
        ("temperature", json!(-1e-60)),
        ("top_k", json!(-2)),
        ("top_k", json!(5_000_000_000i64)),
        ("min_p", json!(1.5)),
        ("presence_penalty", json!(2.1)),
        ("frequency_penalty", json!(-2.1)),
        ("repetition_penalty", json!(0)),
        ("seed", json!("seven")),
        ("seed", json!(1.5)),
        ("n", json!(0)),
        ("n", json!(100_000)),
        ("n", json!(-1)),
        ("max_tokens", json!(0)),
        ("max_tokens", json!(-5)),
        ("max_completion_tokens", json!(0)),
        ("max_tokens", json!("many")),
        ("min_tokens", json!(1_000_000)),
        ("stop", json!([""])),
        ("stop", json!(7)),
        ("stop[1]", json!(["a", 7])),
        ("stop", json!(vec!["x"; 33])),
        ("stop_token_ids[1]", json!([0, VOCAB_SIZE])),
        ("stop_token_ids[0]", json!([-1])),
        ("ignore_eos", json!("yes")),
        ("stream", json!(1)),
        ("stream_options", json!({"include_usage": true})),
        ("stream_options.include_usage", json!({"include_usage": 3})),
        ("cache_salt", json!("")),
        ("priority", json!(1.5)),
        (
            "response_format.json_schema.schema",
            json!({"type": "json_schema", "json_schema": {}}),
        ),
        ("logit_bias.5", json!({"5": 100.5})),
        ("logit_bias.5", json!({"4": 1, "5": -1000})),
        ("logit_bias.5", json!({"5": "much"})),
        ("logit_bias", json!({"abc": 1})),
        ("logit_bias", json!({"-1": 1})),
        ("logit_bias", json!({"+1": 1})),
        ("logit_bias", json!({VOCAB_SIZE.to_string(): 1})),
        ("logit_bias", json!([1])),
        ("allowed_token_ids", json!([])),
        ("allowed_token_ids[1]", json!([5, VOCAB_SIZE])),
        ("allowed_token_ids[0]", json!([-1])),
        ("allowed_token_ids", json!("abc")),
        ("allowed_token_ids", json!(vec![5; 16_385])),
        ("bad_words[1]", json!(["x", ""])),
        ("bad_words[0]", json!(["  "])),
        ("bad_words[0]", json!(["x".repeat(129)])),
        ("bad_words[1]", json!(["x", 7])),
        ("bad_words", json!("x")),
        ("bad_words", json!(vec!["x"; 257])),
        ("guided_json", json!(1)),
        ("prompt_logprobs", json!(21)),
        ("prompt_logprobs", json!(-1)),
        ("use_beam_search", json!(true)),
    ];
    for (param, value) in cases {
        let field = param.split(['[', '.']).next().expect("a name");
        for (path, mut body) in [
            ("/v1/completions", json!({"prompt": "hi"})),
            (
                "/v1/chat/completions",
                json!({"messages": [{"role": "user", "content": "hi"}]}),
            ),
        ] {
            body[field] = value.clone();
            assert_names(&server, path, body, param).await;
        }
    }
    server.assert_at_rest().await;
}

#[tokio::test]
async fn prompts_and_messages_are_checked_part_by_part() {
    let server = TestServer::start().await;
    let prompts = [
        ("prompt", json!(null)),
        ("prompt", json!("")),
        ("prompt", json!([])),
        ("prompt", json!([[]])),
        ("prompt", json!({"text": "hi"})),
        ("prompt[1]", json!([1, VOCAB_SIZE])),
        ("prompt[1]", json!([1, -1])),
        ("prompt[1]", json!([1, "x"])),
        ("prompt[0][2]", json!([[1, 2, 3.5]])),
        ("prompt", json!(["x", 1])),
        ("prompt[0]", json!([5_000_000_000i64])),
        ("prompt", json!(vec!["x"; 1000])),
    ];
    for (param, prompt) in prompts {
        assert_names(&server, "/v1/completions", json!({"prompt": prompt}), param).await;
    }
    let completions = [
        ("logprobs", json!({"prompt": "x", "logprobs": 21})),
        (
            "prompt_logprobs",
            json!({"prompt": "x", "prompt_logprobs": 1, "stream": true}),
        ),
        ("suffix", json!({"prompt": "x", "suffix": "y"})),
        ("best_of", json!({"prompt": "x", "best_of": 0})),
        ("best_of", json!({"prompt": "x", "best_of": 2, "n": 3})),
        ("best_of", json!({"prompt": "x", "best_of": 257})),
        (
            "best_of",
            json!({"prompt": "x", "best_of": 2, "stream": true}),
        ),
        ("prompt", json!({"prompt": ["x", "y", "z"], "best_of": 100})),
    ];
    for (param, body) in completions {
        assert_names(&server, "/v1/completions", body, param).await;
    }

    let messages = [
        ("messages", json!(null)),
        ("messages", json!([])),
        ("messages", json!("hi")),
        ("messages[0]", json!(["hi"])),
        ("messages[0].role", json!([{"content": "hi"}])),
        (
            "messages[1].content",
            json!([
                {"role": "user", "content": "hi"}, {"role": "user"},
            ]),
        ),
        (
            "messages[0].content",
            json!([{"role": "user", "content": 7}]),
        ),
        (
            "messages[0].content[0].type",
            json!([
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            ]),
        ),
        (
            "messages[0].content[0].text",
            json!([{"role": "user", "content": [{"type": "text"}]}]),
        ),
        (
            "messages[0].tool_calls[0].function",
            json!([
                {"role": "assistant", "content": "", "tool_calls": [{}]},
            ]),
        ),
    ];
    for (param, messages) in messages {
        let body = json!({"messages": messages});
        assert_names(&server, "/v1/chat/completions", body, param).await;
    }
    let user = json!([{"role": "user", "content": "hi"}]);
    let chats = [
        ("top_logprobs", json!({"messages": user, "top_logprobs": 3})),
        (
            "top_logprobs",
            json!({"messages": user, "logprobs": true, "top_logprobs": 21}),
        ),
        ("logprobs", json!({"messages": user, "logprobs": 3})),
        ("echo", json!({"messages": user, "echo": true})),
        (
            "chat_template",
            json!({"messages": user, "chat_template": "{{ 1 }}"}),
        ),
        (
            "chat_template_kwargs",
            json!({"messages": user, "chat_template_kwargs": []}),
        ),
    ];
    for (param, body) in chats {
        assert_names(&server, "/v1/chat/completions", body, param).await;
    }
}

#[tokio::test]
async fn fields_that_an_answer_does_not_need_are_checked_too() {
    let server = TestServer::start().await;
    let user = json!([{"role": "user", "content": "hi"}]);
    let nameless = json!([{"type": "function", "function": {}}]);
    let cases = [
        (
            "/tokenize",
            json!({"prompt": "a", "messages": user}),
            "messages",
        ),
        (
            "/tokenize",
            json!({"prompt": "a", "reasoning_effort": 1}),
            "reasoning_effort",
        ),
        (
            "/tokenize",
            json!({"prompt": "a", "tools": nameless}),
            "tools[0].function.name",
        ),
        (
            "/rerank",
            json!({"query": "a", "documents": ["b"], "top_n": 1_u64 << 32}),
            "top_n",
        ),
    ];
    for (path, body, param) in cases {
        assert_names(&server, path, body, param).await;
    }
}

#[tokio::test]
async fn tokens_that_only_the_tokenizer_knows_are_refused() {
    let mut setup = Setup::new();
    // The model lacks the tokenizer's special tokens.
    setup.serve.vocab_size = 258;
    setup.mock.vocab_size = 258;
    let server = setup.start().await;
    let user = json!([{"role": "user", "content": "hi"}]);
    let cases = [
        ("/v1/completions", json!({"prompt": "a<|user|>"}), "prompt"),
        ("/v1/completions", json!({"prompt": [97, 258]}), "prompt[1]"),
        (
            "/v1/chat/completions",
            json!({"messages": user}),
            "messages",
        ),
    ];
    for (path, body, param) in cases {
        assert_names(&server, path, body, param).await;
    }
    let known = post(
        server.address,
        "/v1/completions",
        &json!({"prompt": [97, 257]}),
    )
    .await;
    assert_eq!(known.status, 200);
}

#[tokio::test]
async fn a_template_refuses_in_its_own_words() {
    let server = TestServer::start().await;
    let body = json!({"messages": [{"role": "robot", "content": "beep"}]});
    let reply = post(server.address, "/v1/chat/completions", &body).await;
    assert_eq!(reply.status, 400);
    let error = reply.error();
    assert_eq!(error["param"], "messages");
    assert!(
        error["message"]
            .as_str()
            .expect("text")
            .contains("no robots")
    );
}

#[tokio::test]
async fn harmless_fields_and_values_are_accepted() {
    let server = TestServer::start().await;
    let body = json!({
        "prompt": "x", "user": "me", "metadata": {"a": "b"}, "store": false,
        "response_format": {"type": "text"}, "logit_bias": {},
        "bad_words": [],
        "best_of": 1, "suffix": null, "stop": null, "seed": null, "top_k": -1, "n": null,
        "stream": false, "stream_options": null, "logprobs": null, "seed": -3,
    });
    let reply = post(server.address, "/v1/completions", &body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
}

#[tokio::test]
async fn what_is_not_json_is_said_to_be_so() {
    let server = TestServer::start().await;
    let bodies: [&[u8]; 8] = [
        b"",
        b"{\"prompt\": \"x\"",
        b"{\"prompt\": \"x\"} trailing",
        b"[1, 2]",
        b"\"text\"",
        b"{\"prompt\": \"\xff\xfe\"}",
        b"\x00\x01",
        b"{\"prompt\": \"\\ud800\"}",
    ];
    for body in bodies {
        for path in ["/v1/completions", "/v1/chat/completions", "/tokenize"] {
            let reply = post_bytes(server.address, path, body).await;
            assert_eq!(reply.status, 400, "{:?}", String::from_utf8_lossy(body));
            assert_eq!(reply.error()["type"], "invalid_request_error");
        }
    }
    // JSON that is nested too deeply for the stack of a recursive parser.
    let deep = format!("{{\"prompt\": {}", "[".repeat(100_000));
    let reply = post_bytes(server.address, "/v1/completions", deep.as_bytes()).await;
    assert_eq!(reply.status, 400);
}

#[tokio::test]
async fn a_prompt_too_long_is_refused_with_the_numbers() {
    let server = TestServer::start().await;
    let length = MAX_MODEL_LEN as usize - 10;
    let body = |max_tokens: u32| json!({"prompt": "x".repeat(length), "max_tokens": max_tokens});
    let reply = post(server.address, "/v1/completions", &body(10)).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    let reply = post(server.address, "/v1/completions", &body(11)).await;
    assert_eq!(reply.status, 400);
    let error = reply.error();
    assert_eq!(error["code"], "context_length_exceeded");
    assert_eq!(error["param"], "prompt");
    let message = error["message"].as_str().expect("text");
    for number in [MAX_MODEL_LEN, MAX_MODEL_LEN + 1, MAX_MODEL_LEN - 10, 11] {
        assert!(message.contains(&number.to_string()), "{message}");
    }

    let content = "x".repeat(MAX_MODEL_LEN as usize);
    let body = json!({"messages": [{"role": "user", "content": content}]});
    let reply = post(server.address, "/v1/chat/completions", &body).await;
    assert_eq!(reply.status, 400);
    assert_eq!(reply.error()["code"], "context_length_exceeded");
    assert_eq!(reply.error()["param"], "messages");
    server.assert_at_rest().await;
}

#[tokio::test]
async fn an_unknown_model_is_not_found() {
    let server = TestServer::start().await;
    let body = json!({"model": "gpt-9", "prompt": "x"});
    let reply = post(server.address, "/v1/completions", &body).await;
    assert_eq!(reply.status, 404);
    assert_eq!(reply.error()["code"], "model_not_found");
    assert_eq!(reply.error()["param"], "model");
}

/// An error repeats only a part of a long value from a caller.
#[tokio::test]
async fn an_error_is_short_whatever_it_repeats() {
    let server = TestServer::start().await;
    let long = "ü".repeat(100_000);
    let message = |member: &str| json!([{"role": "user", "content": "hi", member: long}]);
    let tool = json!([{"type": "function", "function": {"name": long}}]);
    let schema =
        json!({"type": "object", "properties": {&*long: {"type": "string", "pattern": "("}}});
    for (path, body) in [
        ("/v1/completions", json!({"prompt": "hi", "model": long})),
        (
            "/v1/completions",
            json!({"prompt": "hi", "max_tokens": long}),
        ),
        ("/v1/completions", json!({"prompt": "hi", &*long: 1})),
        (
            "/v1/completions",
            json!({"prompt": "hi", "guided_regex": format!("{long}(")}),
        ),
        (
            "/v1/completions",
            json!({"prompt": "hi", "logit_bias": {&*long: 1}}),
        ),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": long, "content": "hi"}]}),
        ),
        ("/v1/chat/completions", json!({"messages": message(&long)})),
        (
            "/v1/chat/completions",
            json!({"messages": message("role"), "tools": tool}),
        ),
        (
            "/v1/chat/completions",
            json!({"messages": message("name"), "tool_choice": long}),
        ),
        (
            "/v1/chat/completions",
            json!({"messages": message("name"), "guided_json": schema}),
        ),
        ("/v1/responses", json!({"input": [{"type": long}]})),
        (
            "/v1/responses",
            json!({"input": [{"type": "item_reference", "id": long}]}),
        ),
        ("/v1/responses", json!({"input": "hi", "include": [long]})),
        (
            "/v1/responses",
            json!({"input": "hi", "previous_response_id": long}),
        ),
        (
            "/v1/messages",
            json!({"model": long, "max_tokens": 1, "messages": message("name")}),
        ),
        (
            "/api/chat",
            json!({"model": long, "messages": message("name")}),
        ),
        ("/api/show", json!({"model": long})),
    ] {
        let reply = post(server.address, path, &body).await;
        let sent: String = body.to_string().chars().take(80).collect();
        assert!(
            (400..500).contains(&reply.status),
            "{path} {sent}: {}",
            reply.status
        );
        assert!(
            reply.body.len() < 2000,
            "{path} {sent}: {}",
            reply.body.len()
        );
    }
    for path in [
        format!("/{}", "x".repeat(10_000)),
        format!("/v1/models/{}", "x".repeat(10_000)),
    ] {
        let reply = get(server.address, &path).await;
        assert_eq!(reply.status, 404);
        assert!(reply.body.len() < 1000, "{}", reply.body.len());
    }
}
