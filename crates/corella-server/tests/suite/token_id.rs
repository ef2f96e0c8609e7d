//! Token ids in answers: `return_token_ids` and `return_tokens_as_token_ids`; and `continuous_usage_stats`.

use serde_json::{Value, json};

use crate::client::post;
use crate::fixture::{END, Setup, TestServer};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

/// The members `name` of the choice with an index, in all chunks.
fn joined(chunks: &[Value], index: usize, name: &str) -> Vec<Value> {
    let choices = chunks.iter().map(|chunk| &chunk["choices"][0]);
    choices
        .filter(|choice| choice["index"] == index)
        .filter_map(|choice| choice[name].as_array())
        .flatten()
        .cloned()
        .collect()
}

#[tokio::test]
async fn the_ids_of_prompt_and_output_are_returned_with_the_end_token() {
    let server = Setup::new().ending_at(6).start().await;
    let prompt = server.encode("some text");
    let mut tokens = server.greedy_tokens(&prompt, 5);
    tokens.push(END);
    let mut body = json!({
        "prompt": "some text", "temperature": 0, "max_tokens": 20, "return_token_ids": true,
    });
    let whole = post(server.address, COMPLETIONS, &body).await.json();
    assert_eq!(whole["choices"][0]["prompt_token_ids"], json!(prompt));
    assert_eq!(whole["choices"][0]["token_ids"], json!(tokens));
    body["stream"] = json!(true);
    let chunks = post(server.address, COMPLETIONS, &body).await.chunks();
    assert_eq!(chunks[0]["choices"][0]["prompt_token_ids"], json!(prompt));
    assert_eq!(json!(joined(&chunks, 0, "prompt_token_ids")), json!(prompt));
    assert_eq!(json!(joined(&chunks, 0, "token_ids")), json!(tokens));
}

#[tokio::test]
async fn a_chat_has_its_prompt_ids_beside_the_choices() {
    let server = TestServer::start().await;
    let mut body = json!({
        "messages": [{"role": "user", "content": "hi"}], "n": 2, "seed": 4, "max_tokens": 30,
        "return_token_ids": true, "stop": "e",
    });
    let prompt = server.encode("<|user|>hi<|end|><|assistant|>");
    let whole = post(server.address, CHAT, &body).await.json();
    assert_eq!(whole["prompt_token_ids"], json!(prompt));
    body["stream"] = json!(true);
    let chunks = post(server.address, CHAT, &body).await.chunks();
    let num_tokens = whole["usage"]["completion_tokens"]
        .as_u64()
        .expect("a number");
    let mut num_returned = 0;
    for index in 0..2 {
        let ids = joined(&chunks, index, "token_ids");
        assert_eq!(json!(ids), whole["choices"][index]["token_ids"]);
        num_returned += ids.len() as u64;
        let first = chunks
            .iter()
            .find(|chunk| chunk["choices"][0]["index"] == index);
        assert_eq!(first.expect("a chunk")["prompt_token_ids"], json!(prompt));
    }
    assert_eq!(num_returned, num_tokens);
    // Without the field, the answer has no ids.
    body["return_token_ids"] = json!(false);
    for chunk in post(server.address, CHAT, &body).await.chunks() {
        assert!(chunk.get("prompt_token_ids").is_none(), "{chunk}");
        assert!(chunk["choices"][0].get("token_ids").is_none(), "{chunk}");
    }
}

#[tokio::test]
async fn log_probabilities_can_name_tokens_by_their_ids() {
    let server = TestServer::start().await;
    let prompt = server.encode("hi");
    let names: Vec<String> = server
        .greedy_tokens(&prompt, 8)
        .iter()
        .map(|token| format!("token_id:{token}"))
        .collect();
    let mut body = json!({
        "prompt": "hi", "temperature": 0, "max_tokens": 8, "logprobs": 2,
        "return_tokens_as_token_ids": true,
    });
    let logprobs = &post(server.address, COMPLETIONS, &body).await.json()["choices"][0]["logprobs"];
    assert_eq!(logprobs["tokens"], json!(names));
    for (name, top) in names
        .iter()
        .zip(logprobs["top_logprobs"].as_array().expect("rows"))
    {
        let top = top.as_object().expect("an object");
        assert!(top.contains_key(name), "{top:?}");
        assert!(
            top.keys().all(|key| key.starts_with("token_id:")),
            "{top:?}"
        );
    }
    body = json!({
        "messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 8,
        "logprobs": true, "top_logprobs": 1, "return_tokens_as_token_ids": true,
        "return_token_ids": true,
    });
    let choice = &post(server.address, CHAT, &body).await.json()["choices"][0];
    let rows = choice["logprobs"]["content"].as_array().expect("rows");
    for (row, id) in rows
        .iter()
        .zip(choice["token_ids"].as_array().expect("ids"))
    {
        assert_eq!(row["token"], format!("token_id:{id}"));
        assert_eq!(row["top_logprobs"][0]["token"], row["token"]);
    }
    assert_eq!(rows.len(), 8);
}

#[tokio::test]
async fn every_chunk_has_usage_where_that_is_asked_for() {
    let server = TestServer::start().await;
    let options = json!({"include_usage": true, "continuous_usage_stats": true});
    let bodies = [
        (
            COMPLETIONS,
            json!({"prompt": "hi", "n": 2, "max_tokens": 12}),
        ),
        (
            CHAT,
            json!({"messages": [{"role": "user", "content": "hi"}], "n": 2, "max_tokens": 12}),
        ),
    ];
    for (path, mut body) in bodies {
        body["stream"] = json!(true);
        body["stream_options"] = options.clone();
        let mut chunks = post(server.address, path, &body).await.chunks();
        let last = chunks.pop().expect("a chunk");
        assert_eq!(last["choices"], json!([]));
        assert_eq!(last["usage"]["completion_tokens"], 24);
        for index in 0..2 {
            let of_choice = chunks
                .iter()
                .filter(|chunk| chunk["choices"][0]["index"] == index);
            let mut before = 0;
            for chunk in of_choice {
                let usage = &chunk["usage"];
                assert_eq!(usage["prompt_tokens"], last["usage"]["prompt_tokens"]);
                let now = usage["completion_tokens"].as_u64().expect("a number");
                assert!(before <= now && now <= 12, "{chunk}");
                before = now;
            }
            assert_eq!(before, 12);
        }
    }
    let body = json!({
        "prompt": "hi", "stream": true, "stream_options": {"continuous_usage_stats": true},
    });
    let reply = post(server.address, COMPLETIONS, &body).await;
    assert_eq!(
        reply.error()["param"],
        "stream_options.continuous_usage_stats"
    );
}

#[tokio::test]
async fn ranks_come_with_ids_and_times_if_they_are_wanted() {
    let server = TestServer::start().await;
    let messages = json!([{"role": "user", "content": "hi"}]);
    for (path, asked) in [
        (COMPLETIONS, json!({"prompt": "some text", "logprobs": 1})),
        (
            CHAT,
            json!({"messages": messages, "logprobs": true, "top_logprobs": 1}),
        ),
    ] {
        let ask = async |more: Value| {
            let mut body = asked.clone();
            let fields = json!({"temperature": 0, "max_tokens": 4, "n": 2});
            for (name, value) in [fields, more].iter().flat_map(|it| it.as_object().unwrap()) {
                body[name] = value.clone();
            }
            post(server.address, path, &body).await
        };
        let ranks = |choice: &Value| match path {
            COMPLETIONS => choice["logprobs"]["ranks"].clone(),
            _ => {
                let rows = choice["logprobs"]["content"].as_array().unwrap();
                rows.iter().map(|row| row["rank"].clone()).collect()
            }
        };
        let plain = ask(json!({})).await.json();
        let choice = &plain["choices"][0];
        assert!(choice["metrics"].is_null(), "{choice}");
        assert!(!choice.to_string().contains("rank"), "{choice}");

        let wanted = json!({"return_tokens_as_token_ids": true, "return_metrics": true});
        let whole = ask(wanted.clone()).await.json();
        for choice in whole["choices"].as_array().unwrap() {
            // The most likely token is drawn each time.
            assert_eq!(ranks(choice), json!([1, 1, 1, 1]), "{choice}");
            assert_stages(&choice["metrics"]);
        }
        let mut streamed = wanted;
        streamed["stream"] = json!(true);
        let chunks = ask(streamed).await.chunks();
        let choices = chunks.iter().filter_map(|chunk| chunk["choices"].get(0));
        for choice in choices {
            match choice["finish_reason"].is_null() {
                true => assert!(choice["metrics"].is_null(), "{choice}"),
                false => assert_stages(&choice["metrics"]),
            }
        }
    }
}

fn assert_stages(metrics: &Value) {
    let stages = [
        "arrival_time",
        "queued_ts",
        "scheduled_ts",
        "first_token_ts",
        "last_token_ts",
    ];
    let times = stages.map(|stage| metrics[stage].as_f64().expect(stage));
    assert!(times.is_sorted(), "{metrics}");
    assert_eq!(metrics["num_generation_tokens"], 4, "{metrics}");
}
