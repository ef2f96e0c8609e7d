//! `/v1/messages`, Anthropic's API.

use corella_core::StepId;
use corella_model::Fault;
use corella_server::ApiKey;
use serde_json::{Value, json};

use crate::client::{head, named_events, post, send};
use crate::fixture::{MODEL, Setup, TestServer};
use crate::tools::{CALLS, hermes};

const PATH: &str = "/v1/messages";
const COUNT: &str = "/v1/messages/count_tokens";

fn hi() -> Value {
    json!([{"role": "user", "content": "hi"}])
}

fn assert_error(reply: &crate::client::Reply, status: u16, kind: &str, message: &str) {
    assert_eq!(reply.status, status, "{}", reply.text());
    let body = reply.json();
    assert_eq!(body["type"], "error");
    assert_eq!(body["error"]["type"], kind, "{body}");
    let text = body["error"]["message"].as_str().expect("a message");
    assert!(text.contains(message), "{text}");
    assert_eq!(
        body["request_id"],
        reply.header("request-id").expect("a header")
    );
}

#[tokio::test]
async fn a_conversation_is_rendered_counted_and_answered() {
    let server = Setup::new().ending_at(9).start().await;
    let body = json!({
        "model": MODEL, "max_tokens": 40, "temperature": 0,
        "system": [{"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [{"type": "text", "text": "well"}]},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ],
        "metadata": {"user_id": "7"},
    });
    let prompt = "<|system|>be kind<|end|><|user|>hi<|end|><|assistant|>well<|end|>\
                  <|user|>a\nb<|end|><|assistant|>";
    let prompt = server.encode(prompt);
    let reply = post(server.address, PATH, &body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    let answer = reply.json();
    assert_eq!(answer["type"], "message");
    assert_eq!(answer["role"], "assistant");
    assert_eq!(answer["model"], MODEL);
    assert!(answer["id"].as_str().expect("an id").starts_with("msg_"));
    let content = json!([{"type": "text", "text": server.greedy(&prompt, 8)}]);
    assert_eq!(answer["content"], content);
    assert_eq!(answer["stop_reason"], "end_turn");
    assert_eq!(answer["stop_sequence"], Value::Null);
    assert_eq!(answer["usage"]["input_tokens"], prompt.len());
    assert_eq!(answer["usage"]["output_tokens"], 9);
    let count = post(server.address, COUNT, &body).await.json();
    assert_eq!(count, json!({"input_tokens": prompt.len()}));
}

/// Claude Code's extra fields. Its billing header differs between sessions, so the prompt must not begin with it.
#[tokio::test]
async fn what_claude_code_adds_changes_nothing() {
    let server = TestServer::start().await;
    let body = |header: &str| {
        json!({
            "model": MODEL, "max_tokens": 5, "temperature": 0, "messages": hi(),
            "system": [
                {"type": "text", "text": format!("x-anthropic-billing-header: cc_version=2.1; {header}")},
                {"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}},
            ],
            "thinking": {"type": "adaptive", "display": "omitted"},
            "output_config": {"effort": "high"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "metadata": {"user_id": "7"},
        })
    };
    let prompt = server.encode("<|system|>be kind<|end|><|user|>hi<|end|><|assistant|>");
    for header in ["a", "b"] {
        let reply = post(server.address, PATH, &body(header)).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        let usage = &reply.json()["usage"];
        let num_tokens = usage["input_tokens"].as_u64().expect("a number")
            + usage["cache_read_input_tokens"].as_u64().expect("a number");
        assert_eq!(num_tokens as usize, prompt.len());
        let count = post(server.address, COUNT, &body(header)).await.json();
        assert_eq!(count, json!({"input_tokens": prompt.len()}));
    }
    // These values leave no system prompt.
    let prompt = server.encode("<|user|>hi<|end|><|assistant|>");
    let billed = "x-anthropic-billing-header: x";
    for system in [
        json!([]),
        json!(billed),
        json!([{"type": "text", "text": billed}]),
    ] {
        let body = json!({"model": MODEL, "messages": hi(), "system": system});
        let count = post(server.address, COUNT, &body).await.json();
        assert_eq!(count, json!({"input_tokens": prompt.len()}), "{system}");
    }
    let body = json!({"messages": hi(), "max_tokens": 5, "output_config": {"effort": 3}});
    let reply = post(server.address, PATH, &body).await;
    assert_error(
        &reply,
        400,
        "invalid_request_error",
        "output_config.effort: ",
    );
}

#[tokio::test]
async fn a_tool_may_have_a_long_name_and_an_error_names_its_place() {
    let server = hermes(&[CALLS]).start().await;
    let mut body = body_with_tools();
    body["tools"][1]["name"] = json!("m".repeat(128));
    let reply = post(server.address, PATH, &body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    for path in [PATH, COUNT] {
        body["tools"][1]["name"] = json!("m".repeat(129));
        let reply = post(server.address, path, &body).await;
        assert_error(
            &reply,
            400,
            "invalid_request_error",
            "tools[1].name: must be 1 to 128",
        );
    }
}

#[tokio::test]
async fn errors_about_tools_have_the_names_of_this_api() {
    let server = hermes(&[CALLS]).start().await;
    let call = |name: &str| {
        let block = json!({"type": "tool_use", "id": "a", "name": name, "input": {}});
        json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": [block]}])
    };
    for (field, value, expected) in [
        (
            "tool_choice",
            json!({"type": "tool", "name": "no_such_tool"}),
            "tool_choice.name: is not the name of one of the tools",
        ),
        (
            "tool_choice",
            json!({"type": "tool"}),
            "tool_choice.name: must be the name of a tool",
        ),
        ("messages", call(""), "messages[1].content[0].name: "),
        (
            "output_config",
            json!({"format": {"type": "json_schema", "schema": [null]}}),
            "output_config.format.schema: must be a JSON schema",
        ),
        (
            "output_config",
            json!({"format": {"type": "json_schema", "schema": false}}),
            "output_config.format.schema: must be an object",
        ),
    ] {
        let mut body = body_with_tools();
        body[field] = value;
        for path in [PATH, COUNT] {
            let reply = post(server.address, path, &body).await;
            assert_error(&reply, 400, "invalid_request_error", expected);
        }
    }
}

/// A template that omits the last message cannot continue it.
#[tokio::test]
async fn a_message_that_cannot_be_continued_is_named_by_this_api() {
    let mut setup = Setup::new();
    setup.template =
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}";
    let server = setup.start().await;
    let messages =
        json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well"}]);
    let body = json!({"messages": messages, "max_tokens": 5});
    let reply = post(server.address, PATH, &body).await;
    assert_error(&reply, 400, "invalid_request_error", "messages: ");
    let body = json!({"model": MODEL, "messages": messages});
    let reply = post(server.address, "/api/chat", &body).await;
    let error = reply.json()["error"].clone();
    let error = error.as_str().expect("a text");
    assert!(error.starts_with("messages: "), "{error}");
}

#[tokio::test]
async fn tokens_from_the_cache_are_counted_apart() {
    let server = TestServer::start().await;
    let text = "a long text that fills some pages of the cache, so that there is something to find";
    let body = json!({"max_tokens": 4, "messages": [{"role": "user", "content": text}]});
    let cold = post(server.address, PATH, &body).await.json()["usage"].clone();
    let warm = post(server.address, PATH, &body).await.json()["usage"].clone();
    let number = |usage: &Value, name: &str| usage[name].as_u64().expect("a number");
    assert_eq!(number(&cold, "cache_read_input_tokens"), 0);
    let cached = number(&warm, "cache_read_input_tokens");
    assert!(cached > 0);
    let all = number(&cold, "input_tokens");
    assert_eq!(number(&warm, "input_tokens") + cached, all);
}

#[tokio::test]
async fn the_last_message_of_the_assistant_is_continued() {
    let server = TestServer::start().await;
    let messages = json!([
        {"role": "user", "content": "hi"}, {"role": "assistant", "content": "well"},
    ]);
    let body = json!({"messages": messages, "temperature": 0, "max_tokens": 10});
    let answer = post(server.address, PATH, &body).await.json();
    let prompt = server.encode("<|user|>hi<|end|><|assistant|>well");
    assert_eq!(answer["content"][0]["text"], server.greedy(&prompt, 10));
    assert_eq!(answer["stop_reason"], "max_tokens");
}

#[tokio::test]
async fn a_stream_has_the_events_of_the_whole_message() {
    let server = TestServer::start().await;
    let mut body = json!({
        "messages": hi(), "max_tokens": 30, "seed": 5, "stop_sequences": ["e", "zz"],
    });
    body["temperature"] = json!(1.5);
    let whole = post(server.address, PATH, &body).await.json();
    body["stream"] = json!(true);
    let events = named_events(&post(server.address, PATH, &body).await);
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    let (start, rest) = names.split_at(2);
    assert_eq!(start, ["message_start", "content_block_start"]);
    let (deltas, end) = rest.split_at(rest.len() - 3);
    assert!(
        deltas.iter().all(|name| *name == "content_block_delta"),
        "{names:?}"
    );
    assert_eq!(end, ["content_block_stop", "message_delta", "message_stop"]);
    let message = &events[0].1["message"];
    assert_eq!(message["content"], json!([]));
    // The prefix cache has a part of the second prompt.
    let num_input = |usage: &Value| {
        let names = ["input_tokens", "cache_read_input_tokens"];
        names
            .map(|name| usage[name].as_u64().expect("a number"))
            .iter()
            .sum::<u64>()
    };
    assert_eq!(num_input(&message["usage"]), num_input(&whole["usage"]));
    let text: String = events
        .iter()
        .filter_map(|(_, data)| data["delta"]["text"].as_str())
        .collect();
    assert_eq!(text, whole["content"][0]["text"]);
    let delta = &events[events.len() - 2].1;
    assert_eq!(delta["delta"]["stop_reason"], "stop_sequence");
    assert_eq!(delta["delta"]["stop_sequence"], whole["stop_sequence"]);
    assert_eq!(
        delta["usage"]["output_tokens"],
        whole["usage"]["output_tokens"]
    );
}

#[tokio::test]
async fn an_empty_answer_has_no_content() {
    let server = Setup::new().ending_at(1).start().await;
    let mut body = json!({"messages": hi(), "max_tokens": 5});
    let answer = post(server.address, PATH, &body).await.json();
    assert_eq!(answer["content"], json!([]));
    body["stream"] = json!(true);
    let events = named_events(&post(server.address, PATH, &body).await);
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["message_start", "message_delta", "message_stop"]);
}

#[tokio::test]
async fn what_is_wrong_is_said_in_their_shape() {
    let server = TestServer::start().await;
    let invalid = "invalid_request_error";
    let cases = [
        (json!({"max_tokens": 5}), "messages: is required"),
        (json!({"messages": hi()}), "max_tokens: is required"),
        (
            json!({"messages": [], "max_tokens": 5}),
            "messages: must hold at least one",
        ),
        (
            json!({"messages": hi(), "max_tokens": 5, "stop_sequences": [""]}),
            "stop_sequences: ",
        ),
        (
            json!({"messages": hi(), "max_tokens": 5, "tools": [{}]}),
            "tools[0].input_schema: ",
        ),
        (
            json!({"messages": hi(), "max_tokens": 5, "temprature": 1}),
            "did you mean `temperature`?",
        ),
        (
            json!({"messages": hi(), "max_tokens": 5, "stop": "x"}),
            "use stop_sequences",
        ),
        (
            json!({"messages": hi(), "max_tokens": 5, "thinking": {"type": "enabled"}}),
            "thinking.type: ",
        ),
        (
            json!({"messages": [{"role": "tool", "content": "x"}], "max_tokens": 5}),
            "messages[0].role: ",
        ),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 5}),
            "messages[0].content[0].type: ",
        ),
        (
            json!({"messages": hi(), "system": [{"type": "text", "text": 1}], "max_tokens": 5}),
            "system[0].text: ",
        ),
        (
            json!({"messages": hi(), "tool_choice": {"type": "auto", "name": 1}, "max_tokens": 5}),
            "tool_choice.name: ",
        ),
        (
            json!({
                "messages": hi(), "max_tokens": 5,
                "tool_choice": {"type": "auto", "disable_parallel_tool_use": "yes"},
            }),
            "tool_choice.disable_parallel_tool_use: ",
        ),
    ];
    for (body, message) in cases {
        let reply = post(server.address, PATH, &body).await;
        assert_error(&reply, 400, invalid, message);
    }
    let body = json!({"model": "other", "messages": hi(), "max_tokens": 5});
    let reply = post(server.address, PATH, &body).await;
    assert_error(&reply, 404, "not_found_error", "`other` does not exist");
}

#[tokio::test]
async fn a_key_may_come_in_their_header() {
    let mut setup = Setup::new();
    setup.server.api_keys = vec![ApiKey::unlimited("test", "secret")];
    let server = setup.start().await;
    let body = json!({"messages": hi(), "max_tokens": 2}).to_string();
    for (key, status) in [("secret", 200), ("Secret", 401)] {
        let head = head("POST", PATH, &[("x-api-key", key)], Some(body.len()));
        let reply = send(server.address, &head, body.as_bytes()).await;
        assert_eq!(reply.status, status, "{}", reply.text());
        if status == 401 {
            assert_error(&reply, 401, "authentication_error", "x-api-key");
        }
    }
}

#[tokio::test]
async fn a_stream_that_fails_ends_with_an_error() {
    let mut setup = Setup::new();
    setup.mock.faults = vec![(StepId(5), Fault::Fail)];
    let server = setup.start().await;
    let body = json!({"messages": hi(), "max_tokens": 50, "stream": true});
    let events = named_events(&post(server.address, PATH, &body).await);
    let (name, data) = events.last().expect("events");
    assert_eq!(name, "error");
    assert_eq!(data["error"]["type"], "api_error");
    let is_end = |name: &str| name == "message_delta" || name == "message_stop";
    assert!(!events.iter().any(|(name, _)| is_end(name)), "{events:?}");
}

/// Returns the reply of `CALLS` as blocks of content, with the calls' actual ids.
fn blocks_of_calls(content: &Value) -> Value {
    json!([
        {"type": "thinking", "thinking": "É, hm.", "signature": ""},
        {"type": "text", "text": "I look."},
        {
            "type": "tool_use", "id": content[2]["id"], "name": "weather",
            "input": {"city": "Orléans", "days": 3},
        },
        {"type": "tool_use", "id": content[3]["id"], "name": "time", "input": {}},
    ])
}

fn body_with_tools() -> Value {
    let schema = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    json!({
        "messages": hi(), "max_tokens": 500, "temperature": 0, "seed": 0,
        "tools": [
            {"name": "weather", "description": "d", "input_schema": schema},
            {"type": "custom", "name": "time", "input_schema": {"type": "object"}},
        ],
    })
}

#[tokio::test]
async fn calls_and_thoughts_are_blocks_whole_and_streamed() {
    let server = hermes(&[CALLS]).start().await;
    let mut body = body_with_tools();
    let reply = post(server.address, PATH, &body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    let whole = reply.json();
    assert_eq!(whole["content"], blocks_of_calls(&whole["content"]));
    assert_ne!(whole["content"][2]["id"], whole["content"][3]["id"]);
    assert_eq!(whole["stop_reason"], "tool_use");
    body["stream"] = json!(true);
    let events = named_events(&post(server.address, PATH, &body).await);
    let mut content: Vec<Value> = Vec::new();
    let mut inputs = vec![String::new(); 4];
    for (name, data) in &events {
        let index = data["index"].as_u64().unwrap_or(0) as usize;
        let delta = &data["delta"];
        match name.as_str() {
            "content_block_start" => {
                assert_eq!(index, content.len());
                content.push(data["content_block"].clone());
            }
            "content_block_delta" => match delta["type"].as_str().expect("a type") {
                "input_json_delta" => {
                    inputs[index] += delta["partial_json"].as_str().expect("JSON")
                }
                kind => {
                    let member = kind.strip_suffix("_delta").expect("a delta");
                    let text = content[index][member].as_str().expect("text").to_owned();
                    content[index][member] = json!(text + delta[member].as_str().expect("text"));
                }
            },
            _ => {}
        }
    }
    for index in [2, 3] {
        content[index]["input"] = serde_json::from_str(&inputs[index]).expect("JSON");
    }
    let content = Value::from(content);
    assert_eq!(content, blocks_of_calls(&content));
    assert_eq!(
        events[events.len() - 2].1["delta"]["stop_reason"],
        "tool_use"
    );
}

#[tokio::test]
async fn a_history_with_tools_is_the_same_prompt_as_a_chat() {
    let server = hermes(&[CALLS]).start().await;
    let mut body = body_with_tools();
    body["messages"] = json!([
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "x"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Paris"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "rain"}]},
            {"type": "text", "text": "And?"},
        ]},
    ]);
    body["tool_choice"] = json!({"type": "auto", "disable_parallel_tool_use": true});
    let call = json!({
        "id": "c1", "type": "function",
        "function": {"name": "weather", "arguments": "{\"city\": \"Paris\"}"},
    });
    let schema = &body["tools"][0]["input_schema"];
    let chat = json!({
        "messages": [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant", "content": "I look.", "reasoning_content": "hm",
                "tool_calls": [call],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
            {"role": "user", "content": "And?"},
        ],
        "tools": [
            {"type": "function", "function": {
                "name": "weather", "description": "d", "parameters": schema,
            }},
            {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}},
        ],
    });
    let chat = post(server.address, "/tokenize", &chat).await;
    assert_eq!(chat.status, 200, "{}", chat.text());
    let count = post(server.address, COUNT, &body).await;
    assert_eq!(count.status, 200, "{}", count.text());
    assert_eq!(count.json()["input_tokens"], chat.json()["count"]);
}
