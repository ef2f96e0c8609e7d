//! `cache_control` of `/v1/messages`: what the prefix cache retains, and what answers count.

use serde_json::{Value, json};

use crate::client::{named_events, post};
use crate::fixture::{MODEL, Setup};

const PATH: &str = "/v1/messages";

/// A question after a system prompt, both with a mark. Each letter is a token, and so are `<|user|>`, `<|assistant|>`
/// and `<|end|>`. A page has 4 tokens. There are 28 tokens before the question.
fn question(text: &str) -> Value {
    json!({
        "model": MODEL, "max_tokens": 2, "temperature": 0,
        "system": [{
            "type": "text", "text": "be kind and calm",
            "cache_control": {"type": "ephemeral", "ttl": "1h"},
        }],
        "messages": [{"role": "user", "content": [
            {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}},
        ]}],
    })
}

/// Cached tokens, computed tokens that are retained for five minutes and for an hour, and other tokens.
fn counts(usage: &Value) -> [u64; 4] {
    let creation = &usage["cache_creation"];
    let values = [
        &usage["cache_read_input_tokens"],
        &creation["ephemeral_5m_input_tokens"],
        &creation["ephemeral_1h_input_tokens"],
        &usage["input_tokens"],
    ];
    let counts = values.map(|value| value.as_u64().unwrap_or_else(|| panic!("{usage}")));
    assert_eq!(
        usage["cache_creation_input_tokens"],
        counts[1] + counts[2],
        "{usage}"
    );
    counts
}

#[tokio::test]
async fn a_marked_prefix_is_retained_and_counted() {
    let mut setup = Setup::new();
    setup.scheduler.max_retained_pages = 10;
    let server = setup.start().await;
    let retained = async || server.metric("corella_kv_pages_retained", &[]).await;
    let ask = async |text: &str| {
        let reply = post(server.address, PATH, &question(text)).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        counts(&reply.json()["usage"])
    };
    // 36 tokens: the mark after the question is in the ninth page.
    assert_eq!(ask("a fox?").await, [0, 4, 28, 4]);
    assert_eq!(retained().await, Some(8.0));
    assert_eq!(ask("a fox?").await, [35, 0, 0, 1]);
    assert_eq!(retained().await, Some(8.0));
    // The last row before the difference is copied.
    assert_eq!(ask("an owl sat").await, [29, 7, 0, 4]);
    assert_eq!(retained().await, Some(10.0));
    // The first question makes room. Its pages are still cached.
    assert_eq!(ask("wolves").await, [28, 4, 0, 4]);
    assert_eq!(retained().await, Some(10.0));
    // Seven more pages find no room.
    assert_eq!(ask(&"w".repeat(28)).await, [29, 0, 0, 29]);
    let refused = server.metric("corella_kv_retentions_refused_total", &[]);
    assert_eq!(refused.await, Some(1.0));

    let mut streamed = question("a bear");
    streamed["stream"] = json!(true);
    let reply = post(server.address, PATH, &streamed).await;
    let events = named_events(&reply);
    let (name, start) = &events[0];
    assert_eq!(name, "message_start");
    assert_eq!(counts(&start["message"]["usage"]), [30, 2, 0, 4]);

    server.assert_at_rest().await;
    post(server.address, "/reset_prefix_cache", &json!({})).await;
    assert_eq!(ask("a bear").await, [0, 4, 28, 4]);
}

/// A mark on the request stands for one after its last block.
#[tokio::test]
async fn a_request_may_have_a_mark_of_its_own() {
    let mut setup = Setup::new();
    setup.scheduler.max_retained_pages = 8;
    let server = setup.start().await;
    let body = json!({
        "model": MODEL, "max_tokens": 2, "temperature": 0,
        "cache_control": {"type": "ephemeral"},
        "messages": [{"role": "user", "content": "a fox and an owl"}],
    });
    let reply = post(server.address, PATH, &body).await;
    assert_eq!(counts(&reply.json()["usage"]), [0, 16, 0, 3]);
}

#[tokio::test]
async fn marks_are_checked() {
    let server = Setup::new().start().await;
    let mark = |mark: Value| {
        let text = json!({"type": "text", "text": "a", "cache_control": mark});
        json!([{"role": "user", "content": [text]}])
    };
    let within = json!({
        "type": "tool_result", "tool_use_id": "1",
        "content": [{"type": "text", "text": "a", "cache_control": {"type": "permanent"}}],
    });
    let five =
        vec![json!({"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}); 5];
    let cases = [
        (
            mark(json!({"type": "ephemeral", "ttl": "2h"})),
            "messages[0].content[0].cache_control.ttl: must be \"5m\" or \"1h\"",
        ),
        (
            mark(json!({"ttl": "1h"})),
            "messages[0].content[0].cache_control.type: must be \"ephemeral\"",
        ),
        (
            mark(json!("1h")),
            "messages[0].content[0].cache_control: must be an object",
        ),
        (
            mark(json!({"type": "ephemeral", "tll": "1h"})),
            "unknown field `tll` in messages[0].content[0].cache_control",
        ),
        (
            json!([{"role": "user", "content": [within]}]),
            "messages[0].content[0].content[0].cache_control.type: must be \"ephemeral\"",
        ),
        (
            json!([{"role": "user", "content": five}]),
            "cache_control: marks 5 places of the prompt, of at most 4",
        ),
    ];
    for (messages, expected) in cases {
        let body = json!({"model": MODEL, "max_tokens": 2, "messages": messages});
        for path in [PATH, "/v1/messages/count_tokens"] {
            let reply = post(server.address, path, &body).await;
            assert_eq!(reply.status, 400, "{}", reply.text());
            let error = reply.json();
            let text = error["error"]["message"].as_str().expect("a message");
            assert!(text.contains(expected), "{text}");
        }
    }
    // Marks change no answer, and null counts as absent.
    for value in [Value::Null, json!({"type": "ephemeral", "ttl": null})] {
        let body = json!({"model": MODEL, "max_tokens": 2, "messages": mark(value)});
        let reply = post(server.address, PATH, &body).await;
        assert_eq!(counts(&reply.json()["usage"])[1..3], [0, 0]);
    }
}
