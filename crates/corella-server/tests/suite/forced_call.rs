//! Demanded calls, and formats of the text after reasoning. The model draws at random among the allowed tokens, so that
//! any order comes from the grammar.

use serde_json::{Value, json};

use crate::client::{named_events, post};
use crate::fixture::{Setup, TestServer};
use crate::tools::{CALLS, assembled, hermes};

const CHAT: &str = "/v1/chat/completions";
const MESSAGES: &str = "/v1/messages";
const RESPONSES: &str = "/v1/responses";

/// A template that shows a format by the words in its comment, and may open the reasoning.
macro_rules! template {
    ($marks:literal) => {
        template!($marks, "")
    };
    ($marks:literal, $opening:literal) => {
        concat!(
            "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>",
            "{{ m.content if m.content is string else '' }}<|end|>{% endfor %}",
            "{% if add_generation_prompt %}<|assistant|>",
            $opening,
            "{% endif %}{# ",
            $marks,
            " #}"
        )
    };
}

/// The template of each format and its special tokens.
const FORMATS: [(&str, &[&str]); 9] = [
    (
        template!("<tool_call>", "{% if thinks %}<think>{% endif %}"),
        &["<tool_call>", "</tool_call>", "<think>", "</think>"],
    ),
    (
        template!("<tool_call>", "{% if thinks %}<think>{% endif %}"),
        &["<think>", "</think>"],
    ),
    (
        template!("<tool_call> <function= <parameter="),
        &["<tool_call>", "</tool_call>"],
    ),
    (template!("<|python_tag|>"), &["<|python_tag|>"]),
    (template!("[TOOL_CALLS]"), &["[TOOL_CALLS]"]),
    (
        template!("[TOOL_CALLS] [THINK]"),
        &["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"],
    ),
    (
        template!("<|channel|> <|message|>"),
        &[
            "<|start|>",
            "<|channel|>",
            "<|message|>",
            "<|constrain|>",
            "<|call|>",
            "<|return|>",
        ],
    ),
    (
        template!("<｜tool▁call▁begin｜> ```json </think>"),
        &[
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜>",
            "<think>",
            "</think>",
        ],
    ),
    (
        template!("<｜tool▁call▁begin｜>"),
        &[
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜>",
        ],
    ),
];

fn setup((template, tokens): (&'static str, &'static [&'static str])) -> Setup {
    let mut setup = Setup::new().with_tokens(tokens);
    setup.template = template;
    setup.mock.drawable = Vec::new();
    setup.serve.max_model_len = 8192;
    setup.scheduler.max_model_len = 8192;
    setup.scheduler.num_pages = 8192;
    setup.mock.num_pages = 8192;
    if template.contains("<|channel|>") {
        // In this format, messages within a reply end with the token that ends replies of the other formats.
        setup.serve.end_token_ids = Vec::new();
    }
    setup
}

fn weather() -> Value {
    json!({
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 4},
            "days": {"type": "integer", "minimum": 1, "maximum": 12},
        },
        "required": ["city", "days"],
    })
}

fn tools() -> Value {
    json!([
        {"type": "function", "function": {"name": "weather", "parameters": weather()}},
        {"type": "function", "function": {"name": "time"}},
    ])
}

fn body(seed: u64, choice: Value) -> Value {
    json!({
        "messages": [{"role": "user", "content": "hi"}], "tools": tools(), "tool_choice": choice,
        "seed": seed, "temperature": 2.0,
    })
}

fn named(name: &str) -> Value {
    json!({"type": "function", "function": {"name": name}})
}

/// Checks the schemas' rules by hand.
fn assert_call(name: &str, arguments: &Value) {
    let members = arguments.as_object().expect("an object");
    match name {
        "time" => assert!(members.is_empty(), "{arguments}"),
        name => {
            assert_eq!((name, members.len()), ("weather", 2), "{arguments}");
            assert!(members["city"].as_str().expect("text").chars().count() <= 4);
            assert!((1..=12).contains(&members["days"].as_u64().expect("a number")));
        }
    }
}

fn parsed(arguments: &Value) -> Value {
    let text = arguments.as_str().expect("text");
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

#[tokio::test]
async fn calls_that_are_demanded_are_made_in_every_format_whole_and_streamed() {
    for format in FORMATS {
        let server = setup(format).start().await;
        let mut most_calls = 0;
        for seed in 0..12 {
            let (choice, is_named) = match seed % 3 {
                0 => (named("weather"), true),
                _ => (json!("required"), false),
            };
            let mut body = body(seed, choice);
            body["parallel_tool_calls"] = json!(seed % 3 == 1);
            let reply = post(server.address, CHAT, &body).await;
            assert_eq!(reply.status, 200, "{format:?}: {}", reply.text());
            let answer = reply.json()["choices"][0].clone();
            let message = &answer["message"];
            let reason = if is_named { "stop" } else { "tool_calls" };
            assert_eq!(answer["finish_reason"], reason, "{format:?}: {answer}");
            assert_eq!(message["content"], Value::Null, "{format:?}: {answer}");
            let calls = message["tool_calls"].as_array().expect("calls");
            for call in calls {
                let function = &call["function"];
                let name = function["name"].as_str().expect("a name");
                assert_call(name, &parsed(&function["arguments"]));
                assert!(!is_named || name == "weather");
            }
            match seed % 3 {
                1 => most_calls = most_calls.max(calls.len()),
                _ => assert_eq!(calls.len(), 1, "{answer}"),
            }
            body["stream"] = json!(true);
            let chunks = post(server.address, CHAT, &body).await.chunks();
            let (streamed, streamed_reason) = assembled(&chunks);
            assert_eq!(streamed_reason, reason);
            let functions: Vec<_> = calls.iter().map(|call| call["function"].clone()).collect();
            assert_eq!(streamed["tool_calls"], json!(functions));
        }
        let has_several = !format.0.contains("<|channel|>");
        assert_eq!(most_calls > 1, has_several, "{format:?}");
        server.assert_at_rest().await;
    }
}

#[tokio::test]
async fn other_apis_demand_calls_in_their_own_words() {
    let server = setup(FORMATS[0]).start().await;
    let mut body = json!({
        "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4000, "temperature": 2.0,
        "tools": [{"name": "weather", "input_schema": weather()}],
    });
    for (choice, seed) in [
        (json!({"type": "any"}), 1),
        (json!({"type": "tool", "name": "weather"}), 2),
        (json!({"type": "any", "disable_parallel_tool_use": true}), 3),
    ] {
        let is_one = choice["type"] == "tool" || choice.get("disable_parallel_tool_use").is_some();
        body["tool_choice"] = choice;
        body["seed"] = json!(seed);
        let reply = post(server.address, MESSAGES, &body).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        let answer = reply.json();
        assert_eq!(answer["stop_reason"], "tool_use");
        let blocks = answer["content"].as_array().expect("blocks");
        let calls: Vec<_> = blocks
            .iter()
            .filter(|block| block["type"] == "tool_use")
            .collect();
        assert!(
            !calls.is_empty() && (!is_one || calls.len() == 1),
            "{answer}"
        );
        assert!(
            blocks.iter().all(|block| block["type"] != "text"),
            "{answer}"
        );
        for call in calls {
            assert_call("weather", &call["input"]);
        }
    }
    let mut body = json!({
        "input": "hi", "temperature": 2.0, "seed": 4,
        "tools": [{"type": "function", "name": "weather", "parameters": weather()}],
    });
    let allowed = json!({
        "type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}],
    });
    for choice in [
        json!("required"),
        json!({"type": "function", "name": "weather"}),
        allowed,
    ] {
        body["tool_choice"] = choice.clone();
        let reply = post(server.address, RESPONSES, &body).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        let answer = reply.json();
        assert_eq!(
            (&answer["status"], &answer["tool_choice"]),
            (&json!("completed"), &choice)
        );
        let items = answer["output"].as_array().expect("items");
        let calls: Vec<_> = items
            .iter()
            .filter(|item| item["type"] == "function_call")
            .collect();
        assert!(!calls.is_empty(), "{answer}");
        for call in calls {
            assert_call("weather", &parsed(&call["arguments"]));
        }
    }
    body["stream"] = json!(true);
    let events = named_events(&post(server.address, RESPONSES, &body).await);
    let done = events
        .iter()
        .find(|(name, _)| name == "response.function_call_arguments.done");
    assert_call("weather", &parsed(&done.expect("a call").1["arguments"]));
    server.assert_at_rest().await;
}

#[tokio::test]
async fn only_allowed_tools_are_offered() {
    let server = setup(FORMATS[0]).start().await;
    let allowed = |mode: &str| {
        let tools = json!([named("time")]);
        json!({"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}})
    };
    for seed in 0..6 {
        let answer = post(server.address, CHAT, &body(seed, allowed("required")))
            .await
            .json();
        let calls = answer["choices"][0]["message"]["tool_calls"].clone();
        for call in calls.as_array().expect("calls") {
            assert_eq!(call["function"]["name"], "time");
            assert_eq!(parsed(&call["function"]["arguments"]), json!({}));
        }
    }
    let mut auto = body(0, allowed("auto"));
    auto["max_tokens"] = json!(1);
    let auto = post(server.address, CHAT, &auto).await.json();
    let mut lone = body(0, json!("auto"));
    lone["tools"] = json!([tools()[1]]);
    lone["max_tokens"] = json!(1);
    let lone = post(server.address, CHAT, &lone).await.json();
    assert_eq!(
        auto["usage"]["prompt_tokens"],
        lone["usage"]["prompt_tokens"]
    );
    assert!(lone["usage"]["prompt_tokens"].is_u64());
}

#[tokio::test]
async fn a_tool_that_cannot_be_followed_is_named_with_the_place() {
    let server = setup(FORMATS[0]).start().await;
    let bad = json!({"type": "object", "properties": {"a": {"type": "text"}}});
    let mut chat = body(0, json!("required"));
    chat["tools"][1]["function"]["parameters"] = bad.clone();
    let reply = post(server.address, CHAT, &chat).await;
    assert_eq!(reply.status, 400, "{}", reply.text());
    assert_eq!(
        reply.error()["param"],
        "tools[1].function.parameters.properties.a"
    );
    // The model may call the tool, but need not.
    chat["tool_choice"] = json!("auto");
    chat["max_tokens"] = json!(1);
    assert_eq!(post(server.address, CHAT, &chat).await.status, 200);
    let tool = json!({"type": "function", "name": "f", "parameters": bad});
    let response = json!({"input": "hi", "tools": [tool], "tool_choice": "required"});
    let reply = post(server.address, RESPONSES, &response).await;
    assert_eq!(reply.status, 400, "{}", reply.text());
    assert_eq!(reply.error()["param"], "tools[0].parameters.properties.a");
    let message = json!({
        "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9,
        "tools": [{"name": "f", "input_schema": bad}], "tool_choice": {"type": "any"},
    });
    let reply = post(server.address, MESSAGES, &message).await;
    assert_eq!(reply.status, 400, "{}", reply.text());
    assert!(
        reply
            .text()
            .contains("tools[0].input_schema.properties.a: "),
        "{}",
        reply.text()
    );
    server.assert_at_rest().await;
}

/// The format of an answer constrains the text after the reasoning. A model with offered tools may call them instead.
#[tokio::test]
async fn a_format_leaves_reasoning_and_calls_free() {
    let server = setup(FORMATS[0]).start().await;
    let format = json!({"type": "json_schema", "json_schema": {"name": "w", "schema": {
        "type": "object", "properties": {"days": {"enum": [1, 2]}}, "required": ["days"],
        "additionalProperties": false,
    }}});
    let (mut num_texts, mut num_calls, mut num_thoughts) = (0, 0, 0);
    for seed in 0..12 {
        let mut body = body(seed, json!("auto"));
        body["response_format"] = format.clone();
        body["chat_template_kwargs"] = json!({"thinks": seed % 2 == 0});
        if seed < 4 {
            body["tools"] = json!([]);
        }
        let reply = post(server.address, CHAT, &body).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        let message = reply.json()["choices"][0]["message"].clone();
        num_thoughts += usize::from(message["reasoning_content"].is_string());
        if seed % 2 == 0 {
            assert!(message["reasoning_content"].is_string(), "{message}");
        }
        if message["content"].is_null() {
            assert!(seed >= 4, "{message}");
            num_calls += 1;
        } else {
            num_texts += 1;
            let days = parsed(&message["content"])["days"].clone();
            assert!(days == 1 || days == 2, "{message}");
        }
    }
    assert!(num_texts > 4 && num_calls > 0, "{num_texts} {num_calls}");
    assert!(num_thoughts >= 6);
    server.assert_at_rest().await;
}

#[tokio::test]
async fn tokens_of_reasoning_are_counted() {
    let server = hermes(&[CALLS, "Just text.", "<think>\nHm"]).start().await;
    let thought = server.encode("<think>\nÉ, hm.\n</think>").len();
    let unfinished = server.encode("<think>\nHm").len();
    for (seed, expected) in [(0, thought), (1, 0), (2, unfinished)] {
        let mut body = json!({
            "messages": [{"role": "user", "content": "hi"}], "tools": tools(), "seed": seed,
            "temperature": 0, "stop": ["\n\nZ"],
        });
        let answer = post(server.address, CHAT, &body).await.json();
        let details = json!({"reasoning_tokens": expected});
        assert_eq!(
            answer["usage"]["completion_tokens_details"], details,
            "{answer}"
        );
        body["stream"] = json!(true);
        body["stream_options"] = json!({"include_usage": true});
        let chunks = post(server.address, CHAT, &body).await.chunks();
        let last = chunks.last().expect("a chunk");
        assert_eq!(last["usage"]["completion_tokens_details"], details);
        let response = json!({"input": "hi", "seed": seed, "temperature": 0});
        let usage = post(server.address, RESPONSES, &response).await.json()["usage"].clone();
        assert_eq!(usage["output_tokens_details"], details, "{usage}");
    }
}

/// This format has a separate channel for thoughts.
#[tokio::test]
async fn tokens_of_an_analysis_are_counted() {
    let thought = "<|channel|>analysis<|message|>Hm.<|end|>";
    let reply = format!("{thought}<|start|>assistant<|channel|>final<|message|>Yes.");
    let mut setup = setup(FORMATS[6]).ending_at(1000);
    setup.serve.end_token_ids = vec![266];
    setup.mock.end.as_mut().expect("an end").token = 266;
    setup.replies = vec![reply];
    let server = setup.start().await;
    let body =
        json!({"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "seed": 0});
    let answer = post(server.address, CHAT, &body).await.json();
    assert_eq!(
        answer["choices"][0]["message"]["content"], "Yes.",
        "{answer}"
    );
    let expected = json!({"reasoning_tokens": server.encode(thought).len()});
    assert_eq!(answer["usage"]["completion_tokens_details"], expected);
}

#[tokio::test]
async fn a_choice_of_tools_that_are_not_there_is_refused() {
    let server: TestServer = setup(FORMATS[0]).start().await;
    let some = |fields: Value| json!({"type": "allowed_tools", "allowed_tools": fields});
    for (choice, param) in [
        (
            some(json!({"mode": "auto"})),
            "tool_choice.allowed_tools.tools",
        ),
        (
            some(json!({"mode": "any", "tools": [named("time")]})),
            "tool_choice.allowed_tools.mode",
        ),
        (
            some(json!({"mode": "auto", "tools": [named("time"), named("x")]})),
            "tool_choice.allowed_tools.tools[1].function.name",
        ),
        (named("x"), "tool_choice.function.name"),
        (json!({"type": "custom"}), "tool_choice"),
    ] {
        let reply = post(server.address, CHAT, &body(0, choice)).await;
        assert_eq!(reply.status, 400, "{}", reply.text());
        assert_eq!(reply.error()["param"], param);
    }
}
