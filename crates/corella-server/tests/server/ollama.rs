//! `/api/chat` and `/api/generate`, Ollama's API.

use corella_core::StepId;
use corella_model::Fault;
use serde_json::{Value, json};

use crate::client::{Reply, get, post};
use crate::fixture::{MAX_MODEL_LEN, MODEL, Setup, TestServer};
use crate::tools::{CALLS, hermes};

const CHAT: &str = "/api/chat";
const GENERATE: &str = "/api/generate";

fn lines(reply: &Reply) -> Vec<Value> {
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(reply.header("content-type"), Some("application/x-ndjson"));
    assert!(reply.text().ends_with('\n'));
    { reply.text().lines() }
        .map(|line| serde_json::from_str(line).expect("each line is JSON"))
        .collect()
}

fn text_of(lines: &[Value]) -> String {
    { lines.iter() }
        .filter_map(|line| {
            line["message"]["content"]
                .as_str()
                .or(line["response"].as_str())
        })
        .collect()
}

#[tokio::test]
async fn a_conversation_is_rendered_and_answered_in_lines() {
    let server = Setup::new().ending_at(9).start().await;
    let body = json!({
        "model": MODEL, "options": {"temperature": 0}, "keep_alive": "5m", "tools": [],
        "messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}],
    });
    let prompt = server.encode("<|system|>be kind<|end|><|user|>hi<|end|><|assistant|>");
    let lines = lines(&post(server.address, CHAT, &body).await);
    let (last, others) = lines.split_last().expect("there are lines");
    assert_eq!(text_of(&lines), server.greedy(&prompt, 8));
    for line in others {
        assert_eq!(line["done"], false);
        assert_eq!(line["model"], MODEL);
        assert_eq!(line["message"]["role"], "assistant");
        assert_eq!(line.get("eval_count"), None);
    }
    assert_eq!(last["done"], true);
    assert_eq!(last["done_reason"], "stop");
    assert_eq!(last["prompt_eval_count"], prompt.len());
    assert_eq!(last["eval_count"], 9);
    let created = last["created_at"].as_str().expect("a time");
    assert!(created.len() == 27 && created.ends_with('Z'), "{created}");
    // An answer that has begun is continued.
    let body = json!({
        "options": {"temperature": 0, "num_predict": 3}, "stream": false,
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ab"}],
    });
    let begun = server.encode("<|user|>hi<|end|><|assistant|>ab");
    let whole = post(server.address, CHAT, &body).await.json();
    assert_eq!(whole["message"]["content"], server.greedy(&begun, 3));
    assert_eq!(whole["done_reason"], "length");
}

#[tokio::test]
async fn a_prompt_is_a_message_or_goes_on_as_it_is() {
    let server = TestServer::start().await;
    let ask = async |more: Value| {
        let mut body = json!({
            "prompt": "hi", "stream": false, "options": {"temperature": 0, "num_predict": 6},
        });
        let Value::Object(more) = more else {
            panic!("an object is expected");
        };
        body.as_object_mut().expect("an object").extend(more);
        post(server.address, GENERATE, &body).await
    };
    let rendered = server.encode("<|system|>be kind<|end|><|user|>hi<|end|><|assistant|>");
    let answer = ask(json!({"system": "be kind"})).await.json();
    assert_eq!(answer["response"], server.greedy(&rendered, 6));
    let raw = ask(json!({"raw": true, "system": "", "template": "", "context": []})).await;
    assert_eq!(
        raw.json()["response"],
        server.greedy(&server.encode("hi"), 6)
    );
    let nothing = ask(json!({"prompt": ""})).await.json();
    assert_eq!(nothing["done_reason"], "load");
    assert_eq!(nothing["response"], "");
    let refused = ask(json!({"suffix": "x"})).await;
    assert_eq!(refused.status, 400);
    let message = &refused.json()["error"];
    assert!({ message.as_str() }.is_some_and(|message| message.contains("fill in the middle")));
    server.assert_at_rest().await;
}

#[tokio::test]
async fn thoughts_and_calls_have_their_members() {
    let server = hermes(&[CALLS]).start().await;
    let tools = json!([
        {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}},
        {"type": "function", "function": {"name": "time"}},
    ]);
    let mut body = json!({
        "messages": [{"role": "user", "content": "hi"}], "tools": tools, "options": {"seed": 0},
    });
    let lines = lines(&post(server.address, CHAT, &body).await);
    body["stream"] = json!(false);
    let whole = post(server.address, CHAT, &body).await.json();
    let message = &whole["message"];
    assert_eq!(text_of(&lines), message["content"].as_str().expect("text"));
    let thoughts: String = { lines.iter() }
        .filter_map(|line| line["message"]["thinking"].as_str())
        .collect();
    assert_eq!(thoughts, "É, hm.");
    assert_eq!(message["thinking"], "É, hm.");
    assert_eq!(message["content"], "I look.");
    let functions = |calls: &Value| -> Vec<Value> {
        { calls.as_array().into_iter().flatten() }
            .map(|call| call["function"].clone())
            .collect()
    };
    let streamed: Vec<Value> = { lines.iter() }
        .flat_map(|line| functions(&line["message"]["tool_calls"]))
        .collect();
    let expected = json!([
        {"index": 0, "name": "weather", "arguments": {"city": "Orléans", "days": 3}},
        {"index": 1, "name": "time", "arguments": {}},
    ]);
    assert_eq!(json!(streamed), expected);
    assert_eq!(streamed, functions(&message["tool_calls"]));
}

#[tokio::test]
async fn errors_are_texts_before_and_within_a_stream() {
    let mut setup = Setup::new();
    setup.mock.faults = vec![(StepId(5), Fault::Fail)];
    let server = setup.start().await;
    let body = json!({"prompt": "hi", "options": {"num_ctx": MAX_MODEL_LEN + 1}});
    let reply = post(server.address, GENERATE, &body).await;
    assert_eq!(reply.status, 400);
    let message = reply.json()["error"].clone();
    assert!({ message.as_str() }.is_some_and(|message| message.contains("options.num_ctx")));
    let body = json!({"prompt": "hi", "options": {"num_ctx": 1}});
    let lines = lines(&post(server.address, GENERATE, &body).await);
    let last = lines.last().expect("there are lines");
    assert!(last["error"].is_string(), "{last}");
    assert_eq!(last.get("done"), None);
}

#[tokio::test]
async fn models_are_told_of() {
    let server = TestServer::start().await;
    let tags = get(server.address, "/api/tags").await.json();
    assert_eq!(tags["models"][0]["model"], MODEL);
    assert_eq!(tags["models"][0].get("expires_at"), None);
    let running = get(server.address, "/api/ps").await.json();
    assert_eq!(running["models"][0]["context_length"], MAX_MODEL_LEN);
    let shown = post(server.address, "/api/show", &json!({"model": MODEL})).await;
    assert_eq!(shown.json()["capabilities"], json!(["completion"]));
    let other = post(server.address, "/api/show", &json!({"name": "other"})).await;
    assert_eq!(other.status, 404);
    assert!(other.json()["error"].is_string());
}
