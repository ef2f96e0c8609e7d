//! Clients get the same answers with and without speculation.

use corella_core::Speculation;
use corella_model::MockEcho;
use serde_json::{Value, json};

use crate::client::post;
use crate::fixture::{Setup, TestServer};

async fn start(speculation: Speculation) -> TestServer {
    let mut setup = Setup::new().ending_at(60);
    setup.scheduler.speculation = speculation;
    setup.mock.echo = Some(MockEcho {
        distance: 5,
        probability: 0.9,
    });
    setup.start().await
}

#[tokio::test]
async fn answers_are_the_same_with_guesses() {
    let plain = start(Speculation::Off).await;
    let guessing = start(Speculation::Ngram).await;
    let prompt = "tell me and tell me";
    let text = plain.greedy(&plain.encode(prompt), 40);
    let middle: String = text.chars().skip(20).take(3).collect();
    let stop_token = plain.greedy_tokens(&plain.encode(prompt), 25)[24];
    for extra in [
        json!({}),
        json!({"max_tokens": 17}),
        json!({"stop": [middle]}),
        json!({"stop": middle, "min_tokens": 30, "include_stop_str_in_output": true}),
        json!({"stop_token_ids": [stop_token], "min_tokens": 12}),
        json!({"logprobs": 3, "max_tokens": 30}),
        json!({"n": 3, "temperature": 0.9, "seed": 7}),
        json!({"temperature": 0.7, "seed": 3, "frequency_penalty": 0.5, "repetition_penalty": 1.2}),
        json!({"ignore_eos": true, "max_tokens": 90}),
        json!({"stream": true, "stop": middle, "stream_options": {"include_usage": true}}),
    ] {
        let mut body = json!({"prompt": prompt, "max_tokens": 80, "temperature": 0});
        for (name, value) in extra.as_object().expect("an object") {
            body[name] = value.clone();
        }
        let expected = answer(&plain, &body).await;
        assert!(!expected.is_empty(), "{body}");
        assert_eq!(answer(&guessing, &body).await, expected, "{body}");
    }
    guessing.assert_at_rest().await;

    for prefix in ["corella_", "vllm:"] {
        let count = async |server: &TestServer, name: &str| {
            let name = format!("{prefix}spec_decode_num_{name}_total");
            server.metric(&name, &[]).await.expect("it is reported")
        };
        let drafts = count(&guessing, "draft_tokens").await;
        let accepted = count(&guessing, "accepted_tokens").await;
        assert!(
            0.0 < accepted && accepted < drafts,
            "{accepted} of {drafts}"
        );
        // Each draft has one token or several.
        let times = count(&guessing, "drafts").await;
        assert!(0.0 < times && times < drafts, "{times} of {drafts}");
        assert_eq!(count(&plain, "draft_tokens").await, 0.0);
        // A draft token holds only if all drafts before it hold. A request has at most eight drafts.
        let name = format!("{prefix}spec_decode_num_accepted_tokens_per_pos_total");
        let mut by_position = Vec::new();
        for position in 0..8 {
            let label = format!("position=\"{position}\"");
            by_position.push(guessing.metric(&name, &[&label]).await.expect(&label));
        }
        assert!(by_position.is_sorted_by(|a, b| a >= b), "{by_position:?}");
        assert!(
            0.0 < by_position[1] && by_position[0] < times,
            "{by_position:?}"
        );
        assert_eq!(by_position.iter().sum::<f64>(), accepted);
        assert_eq!(guessing.metric(&name, &["position=\"8\""]).await, None);
        assert_eq!(plain.metric(&name, &[]).await, Some(0.0));
    }
}

/// Returns the part of a reply that depends neither on the time nor on its chunks.
async fn answer(server: &TestServer, body: &Value) -> Vec<Value> {
    let reply = post(server.address, "/v1/completions", body).await;
    assert_eq!(reply.status, 200, "{body}");
    let text = reply.text();
    let chunks: Vec<Value> = match body["stream"] == true {
        false => vec![serde_json::from_str(text).expect("JSON")],
        true => text
            .lines()
            .filter_map(|line| line.strip_prefix("data: "))
            .filter(|data| *data != "[DONE]")
            .map(|data| serde_json::from_str(data).expect("JSON"))
            .collect(),
    };
    let mut whole = Vec::new();
    let mut streamed = String::new();
    for mut chunk in chunks {
        whole.push(chunk["usage"]["completion_tokens"].take());
        for choice in chunk["choices"].as_array_mut().expect("choices") {
            if body["stream"] == true {
                streamed += choice["text"].as_str().expect("a text");
                whole.push(choice["finish_reason"].take());
                whole.push(choice["stop_reason"].take());
            } else {
                whole.push(choice.take());
            }
        }
    }
    whole.retain(|value| !value.is_null());
    whole.push(streamed.into());
    whole
}
