//! Numbers keep all their digits on every way: into prompts, and into answers, whole and streamed.

use serde_json::{Map, Value, json};

use crate::client::post;
use crate::fixture::TestServer;
use crate::tools::hermes;

const NUMBERS: &str = r#"{"a": 12345678901234567890123, "b": 9007199254740993, "c": 0.10000000000000000555, "d": -1e+400, "e": -0.0, "f": 1.0, "g": 1e+16, "h": 1e-7, "i": 340282366920938463463374607431768211457}"#;

/// Python 3's `json.dumps(json.loads(NUMBERS))`.
const PYTHON_NUMBERS: &str = r#"{"a": 12345678901234567890123, "b": 9007199254740993, "c": 0.1, "d": -Infinity, "e": -0.0, "f": 1.0, "g": 1e+16, "h": 1e-07, "i": 340282366920938463463374607431768211457}"#;

fn numbers() -> Value {
    serde_json::from_str(NUMBERS).expect("JSON")
}

async fn server() -> TestServer {
    let reply =
        format!("<tool_call>\n{{\"name\": \"add\", \"arguments\": {NUMBERS}}}\n</tool_call>");
    hermes(&[&reply]).start().await
}

#[tokio::test]
async fn answers_have_the_numbers_of_the_model() {
    let server = server().await;
    let messages = json!([{"role": "user", "content": "hi"}]);
    let function = json!({"type": "function", "function": {"name": "add"}});
    let text = |arguments: &Value| -> Value {
        serde_json::from_str(arguments.as_str().expect("text")).expect("JSON")
    };
    let ask = async |path: &str, own: Value| {
        let mut body = json!({"temperature": 0, "seed": 0});
        let fields = body.as_object_mut().expect("an object");
        fields.extend(own.as_object().cloned().unwrap_or_default());
        let reply = post(server.address, path, &body).await;
        assert_eq!(reply.status, 200, "{path}: {}", reply.text());
        reply
    };
    let body = json!({"messages": messages, "tools": [function]});
    let answer = ask("/v1/chat/completions", body).await.json();
    let call = &answer["choices"][0]["message"]["tool_calls"][0];
    assert_eq!(text(&call["function"]["arguments"]), numbers());
    let body = json!({
        "input": "hi", "tools": [{"type": "function", "name": "add", "parameters": {"type": "object"}}],
    });
    let answer = ask("/v1/responses", body).await.json();
    assert_eq!(text(&answer["output"][0]["arguments"]), numbers());
    let mut body = json!({
        "messages": messages, "max_tokens": 500,
        "tools": [{"name": "add", "input_schema": {"type": "object"}}],
    });
    let answer = ask("/v1/messages", body.clone()).await.json();
    assert_eq!(answer["content"][0]["input"], numbers());
    body["stream"] = json!(true);
    let pieces = ask("/v1/messages", body).await.events();
    let pieces = pieces
        .iter()
        .filter_map(|event| event["delta"]["partial_json"].as_str());
    assert_eq!(text(&pieces.collect::<String>().into()), numbers());
    let mut body = json!({
        "messages": messages, "tools": [function], "options": {"temperature": 0, "seed": 0},
        "temperature": null, "seed": null, "stream": false,
    });
    let answer = ask("/api/chat", body.clone()).await.json();
    let arguments = &answer["message"]["tool_calls"][0]["function"]["arguments"];
    assert_eq!(*arguments, numbers());
    body["stream"] = json!(true);
    let streamed = ask("/api/chat", body).await;
    let lines = streamed
        .text()
        .lines()
        .map(|line| -> Value { serde_json::from_str(line).expect("JSON") });
    let mut calls = lines.filter_map(|line| {
        let arguments = line["message"]["tool_calls"][0]["function"]["arguments"].clone();
        (!arguments.is_null()).then_some(arguments)
    });
    assert_eq!(calls.next(), Some(numbers()));
}

/// As in Transformers, whose templates print what Python has read.
#[tokio::test]
async fn prompts_have_the_numbers_that_python_reads() {
    let server = server().await;
    let schema = json!({"type": "object", "properties": {"n": {"enum": [numbers()]}}});
    let function = json!({"name": "add", "parameters": schema});
    let call = |arguments: Value| json!({"id": "call_1", "type": "function", "function": {"name": "add", "arguments": arguments}});
    for arguments in [json!(NUMBERS), numbers()] {
        let body = json!({
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": null, "tool_calls": [call(arguments)]},
                {"role": "tool", "tool_call_id": "call_1", "content": "done"},
            ],
            "tools": [{"type": "function", "function": function}],
        });
        let answer = post(server.address, "/apply-template", &body).await.json();
        let prompt = answer["prompt"].as_str().expect("a text");
        let called = format!("\"arguments\": {PYTHON_NUMBERS}}}</tool_call>");
        assert!(prompt.contains(&called), "{prompt}");
        let offered = format!(r#""enum": [{PYTHON_NUMBERS}]"#);
        assert!(prompt.contains(&offered), "{prompt}");
    }
}

/// Only values that are passed on keep their text. Fields that are numbers read numbers in any spelling.
#[tokio::test]
async fn fields_that_are_numbers_have_their_types() {
    let server = TestServer::start().await;
    let ask = async |name: &str, number: &str| {
        let number: Value = serde_json::from_str(number).expect("JSON");
        let mut body = Map::new();
        body.insert("prompt".to_owned(), json!("hi"));
        body.insert("max_tokens".to_owned(), json!(1));
        body.insert(name.to_owned(), number);
        post(server.address, "/v1/completions", &Value::Object(body)).await
    };
    for (name, number) in [
        ("temperature", "0"),
        ("temperature", "5E-1"),
        ("temperature", "1.00000000000000000000000000001"),
        ("logit_bias", r#"{"5": -1.50e+0}"#),
        ("seed", "-9223372036854775808"),
    ] {
        let reply = ask(name, number).await;
        assert_eq!(reply.status, 200, "{name} {number}: {}", reply.text());
    }
    for (name, number) in [("temperature", "1e400"), ("seed", "1e400")] {
        assert_eq!(ask(name, number).await.status, 400, "{name} {number}");
    }
    for (name, number) in [
        ("temperature", "-1"),
        ("max_tokens", "1.5"),
        ("max_tokens", "18446744073709551616"),
        ("stop", "1.5"),
    ] {
        let reply = ask(name, number).await;
        assert_eq!(reply.status, 400, "{name} {number}");
        let param = reply.error()["param"].as_str().map(str::to_owned);
        assert!(
            param.is_some_and(|param| param.starts_with(name)),
            "{}",
            reply.text()
        );
    }
}
