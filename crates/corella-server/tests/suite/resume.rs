//! Answers that another server has begun.

use corella_core::TokenId;
use serde_json::{Value, json};

use crate::client::post;
use crate::fixture::{AB, END, Setup, TestServer, VOCAB_SIZE};
use crate::tools::{CALLS, assembled, body, hermes};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

/// Two servers of the same model.
async fn servers(setup: fn() -> Setup) -> [TestServer; 2] {
    [setup().start().await, setup().start().await]
}

fn with(body: &Value, more: Value) -> Value {
    let mut body = body.clone();
    let Value::Object(more) = more else {
        panic!("fields: {more}");
    };
    body.as_object_mut().expect("fields").extend(more);
    body
}

/// The ids of a chunk's tokens.
fn token_ids(chunk: &Value) -> Vec<TokenId> {
    let ids = &chunk["choices"][0]["token_ids"];
    serde_json::from_value(ids.clone()).unwrap_or_default()
}

/// The answer that a client joins from chunks, with its finish.
fn joined(chunks: &[Value]) -> (Value, Value, Value) {
    let last = &chunks.last().expect("chunks")["choices"][0];
    let (answer, finish) = match last.get("delta") {
        Some(_) => assembled(chunks),
        None => {
            let text = |chunk: &Value| chunk["choices"][0]["text"].as_str().map(str::to_owned);
            let text: String = chunks.iter().filter_map(text).collect();
            (Value::from(text), last["finish_reason"].clone())
        }
    };
    (answer, finish, last["stop_reason"].clone())
}

/// Cuts a run behind each of its tokens. The client keeps the chunks that it has by then. Another server continues the
/// answer, and the client appends that server's chunks.
async fn assert_continued(servers: &[TestServer; 2], path: &str, body: &Value) {
    let body = with(body, json!({"stream": true, "return_token_ids": true}));
    let reply = post(servers[0].address, path, &body).await;
    assert_eq!(reply.status, 200, "{body}: {}", reply.text());
    let whole = reply.chunks();
    let drawn: Vec<TokenId> = whole.iter().flat_map(token_ids).collect();
    assert!(drawn.len() > 3, "{body}: {whole:?}");
    for num_drawn in 1..drawn.len() {
        let mut num_sent = 0;
        let is_sent = |chunk: &&Value| {
            num_sent += token_ids(chunk).len();
            num_sent <= num_drawn
        };
        let mut chunks: Vec<_> = whole.iter().take_while(is_sent).cloned().collect();
        let body = with(&body, json!({"resume_token_ids": drawn[..num_drawn]}));
        let reply = post(servers[1].address, path, &body).await;
        assert_eq!(reply.status, 200, "{body}: {}", reply.text());
        let rest = reply.chunks();
        let more: Vec<TokenId> = rest.iter().flat_map(token_ids).collect();
        assert_eq!(more, drawn[num_drawn..], "{body}");
        chunks.extend(rest);
        assert_eq!(joined(&chunks), joined(&whole), "{body}");
    }
}

#[tokio::test]
async fn an_answer_goes_on_as_if_no_other_server_had_begun_it() {
    let servers = servers(|| Setup::new().ending_at(30)).await;
    let plain = json!({"prompt": "a story", "temperature": 0, "max_tokens": 24});
    let reply = post(servers[0].address, COMPLETIONS, &plain).await.json();
    let text = reply["choices"][0]["text"].as_str().expect("a text");
    let text: Vec<char> = text.chars().collect();
    let stop: String = text[9..13].iter().collect();
    let word: String = text[4..6].iter().collect();
    for more in [
        json!({}),
        json!({"max_tokens": 40}),
        json!({"temperature": 1.0, "seed": 7}),
        json!({"temperature": 0.8, "seed": 8, "top_k": 9, "top_p": 0.9, "min_p": 0.01}),
        json!({"presence_penalty": 1.5}),
        json!({"frequency_penalty": 2.0, "temperature": 0.7, "seed": 1}),
        json!({"repetition_penalty": 1.4}),
        json!({"logit_bias": {"97": 3.0, "98": -100.0}, "seed": 4, "temperature": 1.0}),
        json!({"bad_words": [word]}),
        json!({"stop": [stop]}),
        json!({"stop": [stop], "include_stop_str_in_output": true}),
        json!({"stop": [stop], "min_tokens": 20}),
        json!({"max_tokens": 40, "min_tokens": 35}),
        json!({"structured_outputs": {"regex": "(ab|cd)[a-z ]{4,20}"}}),
    ] {
        assert_continued(&servers, COMPLETIONS, &with(&plain, more)).await;
    }
    for server in &servers {
        server.assert_at_rest().await;
    }
}

#[tokio::test]
async fn a_reply_with_reasoning_and_calls_goes_on_within_each_of_them() {
    let servers = servers(|| hermes(&[CALLS, "{\"a\": [1, \"é\"]}"])).await;
    assert_continued(&servers, CHAT, &body(0)).await;
    let object = with(
        &body(1),
        json!({"response_format": {"type": "json_object"}, "tools": []}),
    );
    assert_continued(&servers, CHAT, &object).await;
}

/// Without a stream, the answer has the rest of the divided call.
#[tokio::test]
async fn a_whole_answer_has_the_rest_of_a_call() {
    let server = hermes(&[CALLS]).start().await;
    let (before, _) = CALLS.split_once("Orl").expect("the city");
    let drawn = server.encode(before);
    let num_all = server.encode(CALLS).len() + 1;
    let asked = with(&body(0), json!({"resume_token_ids": drawn}));
    let answer = post(server.address, CHAT, &asked).await.json();
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls", "{answer}");
    assert_eq!(choice["message"]["content"], Value::Null);
    let calls = choice["message"]["tool_calls"].as_array().expect("calls");
    let calls: Vec<_> = calls.iter().map(|call| call["function"].clone()).collect();
    let rest = json!({"name": "", "arguments": "Orléans\", \"days\": 3}"});
    assert_eq!(calls, [rest, json!({"name": "time", "arguments": "{}"})]);
    let usage = &answer["usage"];
    assert_eq!(usage["completion_tokens"], num_all - drawn.len());
    let details = &usage["completion_tokens_details"];
    assert_eq!(details["resumed_tokens"], drawn.len());
    assert_eq!(details["reasoning_tokens"], 0, "the reasoning came before");

    // Nothing follows the calls but the end.
    let drawn = server.encode(CALLS);
    let asked = with(&body(0), json!({"resume_token_ids": drawn}));
    let answer = post(server.address, CHAT, &asked).await.json();
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls", "{answer}");
    assert_eq!(choice["message"].get("tool_calls"), None);
    assert_eq!(answer["usage"]["completion_tokens"], 1);
}

/// The cache of the server that has begun the answer also has the answer's rows, which are no part of the prompt.
#[tokio::test]
async fn the_rows_of_a_resumed_answer_are_no_cached_prompt() {
    let server = TestServer::start().await;
    let prompt = "p".repeat(40);
    let body =
        json!({"prompt": prompt, "temperature": 0, "max_tokens": 100, "return_token_ids": true});
    let whole = post(server.address, COMPLETIONS, &body).await.json();
    let drawn = &whole["choices"][0]["token_ids"].as_array().expect("tokens")[..90];
    let asked = with(&body, json!({"resume_token_ids": drawn}));
    let answer = post(server.address, COMPLETIONS, &asked).await.json();
    let usage = &answer["usage"];
    assert_eq!(usage["prompt_tokens"], 40, "{answer}");
    assert_eq!(usage["completion_tokens"], 10);
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 40);
}

#[tokio::test]
async fn what_cannot_be_resumed_is_refused_with_its_field() {
    let server = TestServer::start().await;
    let field = "resume_token_ids";
    let first = "resume_token_ids[0]";
    let second = "resume_token_ids[1]";
    for (more, param) in [
        (json!({"n": 2, "resume_token_ids": [97]}), field),
        (json!({"best_of": 2, "resume_token_ids": [97]}), field),
        (
            json!({"prompt": ["a", "b"], "resume_token_ids": [97]}),
            field,
        ),
        (json!({"echo": true, "resume_token_ids": [97]}), field),
        (
            json!({"prompt_logprobs": 1, "resume_token_ids": [97]}),
            field,
        ),
        (
            json!({"max_tokens": 2, "resume_token_ids": [97, 98]}),
            field,
        ),
        (
            json!({"resume_token_ids": vec![97; 300], "max_tokens": 400}),
            field,
        ),
        (json!({"resume_token_ids": [97, VOCAB_SIZE]}), second),
        (json!({"resume_token_ids": [97, END]}), second),
        (
            json!({"stop_token_ids": [97], "resume_token_ids": [97]}),
            first,
        ),
        (
            json!({"stop": "xab", "resume_token_ids": [120, AB]}),
            second,
        ),
        (
            json!({"structured_outputs": {"regex": "[a-c]*d"}, "resume_token_ids": [97, 120]}),
            second,
        ),
    ] {
        let body = with(&json!({"prompt": "a", "max_tokens": 8}), more);
        let reply = post(server.address, COMPLETIONS, &body).await;
        assert_eq!(reply.status, 400, "{body}: {}", reply.text());
        assert_eq!(reply.error()["param"], param, "{body}: {}", reply.text());
    }
    for more in [
        json!({"resume_token_ids": []}),
        json!({"resume_token_ids": null, "n": 2}),
        json!({"resume_token_ids": [END], "ignore_eos": true}),
        json!({"resume_token_ids": [END], "min_tokens": 2}),
    ] {
        let body = with(&json!({"prompt": "a", "max_tokens": 8}), more);
        let reply = post(server.address, COMPLETIONS, &body).await;
        assert_eq!(reply.status, 200, "{body}: {}", reply.text());
    }
    let body = json!({"input": "a", "resume_token_ids": [97]});
    let reply = post(server.address, "/v1/responses", &body).await;
    assert_eq!(reply.status, 400, "only chats and completions resume");
}
