//! `/v1/chat/completions`.

use serde_json::{Value, json};

use crate::client::post;
use crate::fixture::{MODEL, Setup, TestServer};

const PATH: &str = "/v1/chat/completions";

#[tokio::test]
async fn a_conversation_is_rendered_and_answered() {
    let server = Setup::new().ending_at(25).start().await;
    let body = json!({
        "model": MODEL, "temperature": 0,
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": null},
            {"role": "user", "content": [
                {"type": "text", "text": "one"}, {"type": "text", "text": "two"},
            ]},
        ],
    });
    let reply = post(server.address, PATH, &body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    let answer = reply.json();
    let prompt = "<|user|>hi<|end|><|assistant|><|end|><|user|>one\ntwo<|end|><|assistant|>";
    let prompt = server.encode(prompt);
    assert_eq!(answer["object"], "chat.completion");
    assert_eq!(answer["choices"][0]["message"]["role"], "assistant");
    assert_eq!(
        answer["choices"][0]["message"]["content"],
        server.greedy(&prompt, 24)
    );
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    assert_eq!(answer["usage"]["prompt_tokens"], prompt.len());
    assert_eq!(answer["usage"]["completion_tokens"], 25);
}

#[tokio::test]
async fn without_max_tokens_the_context_is_the_limit() {
    let server = TestServer::start().await;
    let body = json!({"messages": [{"role": "user", "content": "hi"}]});
    let answer = post(server.address, PATH, &body).await.json();
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert_eq!(
        answer["usage"]["total_tokens"],
        crate::fixture::MAX_MODEL_LEN
    );
}

#[tokio::test]
async fn a_stream_begins_with_the_role_and_ends_with_reason_usage_done() {
    let server = TestServer::start().await;
    let mut body = json!({
        "messages": [{"role": "user", "content": "hi"}], "n": 3, "seed": 9,
        "max_completion_tokens": 50, "logprobs": true, "top_logprobs": 1,
    });
    let whole = post(server.address, PATH, &body).await.json();
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    let mut chunks = post(server.address, PATH, &body).await.chunks();
    let last = chunks.pop().expect("a chunk");
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"]["completion_tokens"], 150);
    assert_eq!(
        last["usage"]["prompt_tokens"],
        whole["usage"]["prompt_tokens"]
    );
    for chunk in &chunks {
        assert_eq!(chunk["object"], "chat.completion.chunk");
        assert_eq!(chunk["id"], last["id"]);
        assert_eq!(chunk.get("usage"), Some(&Value::Null));
    }
    for index in 0..3 {
        let choices: Vec<&Value> = chunks
            .iter()
            .map(|chunk| &chunk["choices"][0])
            .filter(|choice| choice["index"] == index)
            .collect();
        assert_eq!(
            choices[0]["delta"],
            json!({"role": "assistant", "content": ""})
        );
        let (end, content) = choices[1..].split_last().expect("chunks");
        assert_eq!(end["finish_reason"], "length");
        assert_eq!(end["delta"], json!({}));
        assert!(
            content
                .iter()
                .all(|choice| choice["finish_reason"].is_null())
        );
        let text: String = content
            .iter()
            .map(|choice| choice["delta"]["content"].as_str().expect("content"))
            .collect();
        assert_eq!(text, whole["choices"][index]["message"]["content"]);
        let logprobs: Vec<Value> = content
            .iter()
            .flat_map(|choice| choice["logprobs"]["content"].as_array().cloned())
            .flatten()
            .collect();
        assert_eq!(logprobs.len(), 50);
        assert_eq!(
            Value::from(logprobs),
            whole["choices"][index]["logprobs"]["content"]
        );
    }
}

#[tokio::test]
async fn the_end_of_an_unfinished_character_is_not_lost() {
    // Half of é is the last token of many answers; streamed and whole answers must agree on it.
    let server = TestServer::start().await;
    for max_tokens in 1..24 {
        let mut body = json!({
            "messages": [{"role": "user", "content": "halves"}], "temperature": 0,
            "max_tokens": max_tokens,
        });
        let whole = post(server.address, PATH, &body).await.json();
        body["stream"] = json!(true);
        let chunks = post(server.address, PATH, &body).await.chunks();
        let text: String = chunks
            .iter()
            .filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str())
            .collect();
        assert_eq!(text, whole["choices"][0]["message"]["content"]);
        let prompt = server.encode("<|user|>halves<|end|><|assistant|>");
        assert_eq!(text, server.greedy(&prompt, max_tokens));
    }
}

#[tokio::test]
async fn a_final_message_can_be_continued() {
    let server = TestServer::start().await;
    let body = json!({
        "messages": [
            {"role": "user", "content": "hi"}, {"role": "assistant", "content": "well"},
        ],
        "continue_final_message": true, "temperature": 0, "max_tokens": 10,
    });
    let answer = post(server.address, PATH, &body).await.json();
    let prompt = server.encode("<|user|>hi<|end|><|assistant|>well");
    assert_eq!(
        answer["choices"][0]["message"]["content"],
        server.greedy(&prompt, 10)
    );
}

/// Mistral's and Kimi's APIs mark the beginning of the answer in the message itself.
#[tokio::test]
async fn a_marked_answer_is_continued() {
    let server = TestServer::start().await;
    let answer = async |last: Value, more: Value| {
        let mut body = json!({
            "messages": [{"role": "user", "content": "hi"}, last], "temperature": 0, "max_tokens": 10,
        });
        let fields = more.as_object().expect("an object").clone();
        body.as_object_mut().expect("an object").extend(fields);
        let answer = post(server.address, PATH, &body).await.json();
        answer["choices"][0]["message"]["content"].clone()
    };
    let begun = server.encode("<|user|>hi<|end|><|assistant|>well");
    let continued = server.greedy(&begun, 10);
    let ended = server.encode("<|user|>hi<|end|><|assistant|>well<|end|><|assistant|>");
    let new = server.greedy(&ended, 10);
    assert_ne!(continued, new);
    let said =
        |mark: &str, value: Value| json!({"role": "assistant", "content": "well", mark: value});
    for mark in ["prefix", "partial"] {
        assert_eq!(
            answer(said(mark, json!(true)), json!({})).await,
            continued,
            "{mark}"
        );
        assert_eq!(
            answer(said(mark, json!(false)), json!({})).await,
            new,
            "{mark}"
        );
        // The request's own field takes precedence.
        let more = json!({"continue_final_message": false});
        assert_eq!(answer(said(mark, json!(true)), more).await, new, "{mark}");
    }
}
