//! `best_of` returns the most likely of several choices, compared with a call that returns them all.

use corella_model::MockEnd;
use serde_json::{Value, json};

use crate::client::post;
use crate::fixture::{END, Setup, TestServer};

const PATH: &str = "/v1/completions";

async fn answer(server: &TestServer, body: &Value) -> Value {
    let reply = post(server.address, PATH, body).await;
    assert_eq!(reply.status, 200, "{body}: {}", reply.text());
    reply.json()
}

/// Returns the mean over all drawn tokens. The end token has no entry, but was drawn: with the mock, it is so likely
/// when it comes that its log-probability is 0.
fn mean_logprob(choice: &Value) -> f64 {
    let logprobs = choice["logprobs"]["token_logprobs"]
        .as_array()
        .expect("an array");
    let sum: f64 = logprobs
        .iter()
        .map(|logprob| logprob.as_f64().expect("a number"))
        .sum();
    let num_ends = usize::from(choice["finish_reason"] == "stop");
    sum / (logprobs.len() + num_ends) as f64
}

fn without_index(choices: &Value) -> Vec<Value> {
    let mut choices = choices.as_array().expect("choices").clone();
    for (index, choice) in choices.iter_mut().enumerate() {
        assert_eq!(choice["index"], index);
        choice["index"] = Value::Null;
    }
    choices
}

#[tokio::test]
async fn the_choices_with_the_highest_mean_log_probability_are_returned() {
    // Choices end early or late, so that sums and means rank them differently.
    let mut setup = Setup::new();
    setup.mock.end = Some(MockEnd {
        token: END,
        probability: 0.1,
        at_output: None,
    });
    let server = setup.start().await;
    let mut num_differing = 0;
    for seed in 0..6 {
        let mut body = json!({
            "prompt": ["first", "second"], "n": 8, "seed": seed, "max_tokens": 20, "logprobs": 2,
        });
        let all = answer(&server, &body).await;
        let choices = without_index(&all["choices"]);
        let mut expected = Vec::new();
        for of_prompt in choices.chunks(8) {
            let mut ranked = of_prompt.to_vec();
            ranked.sort_by(|a, b| mean_logprob(b).total_cmp(&mean_logprob(a)));
            expected.extend_from_slice(&ranked[..3]);
            let sum = |choice: &Value| {
                let logprobs = choice["logprobs"]["token_logprobs"].as_array();
                let logprobs = logprobs.expect("an array").iter();
                logprobs
                    .map(|logprob| logprob.as_f64().expect("a number"))
                    .sum::<f64>()
            };
            let most_likely = of_prompt.iter().max_by(|a, b| sum(a).total_cmp(&sum(b)));
            num_differing += usize::from(most_likely != Some(&ranked[0]));
        }
        body["n"] = json!(3);
        body["best_of"] = json!(8);
        let best = answer(&server, &body).await;
        assert_eq!(without_index(&best["choices"]), expected, "seed {seed}");
        // Generated choices outside the answer count, too.
        assert_eq!(
            best["usage"]["completion_tokens"],
            all["usage"]["completion_tokens"]
        );
        assert_eq!(
            best["usage"]["prompt_tokens"],
            all["usage"]["prompt_tokens"]
        );

        // Without `logprobs`, the same choices are returned, without log-probabilities.
        body["logprobs"] = Value::Null;
        for choice in &mut expected {
            choice["logprobs"] = Value::Null;
        }
        let best = answer(&server, &body).await;
        assert_eq!(without_index(&best["choices"]), expected, "seed {seed}");
    }
    assert!(num_differing > 0, "a ranking by sums must fail this test");
    server.assert_at_rest().await;
}

#[tokio::test]
async fn nothing_is_chosen_when_all_are_wanted() {
    let server = TestServer::start().await;
    for n in [1, 3] {
        let mut body = json!({"prompt": "all", "n": n, "seed": 3, "max_tokens": 9});
        let expected = answer(&server, &body).await["choices"].clone();
        body["best_of"] = json!(n);
        assert_eq!(answer(&server, &body).await["choices"], expected);
        body["stream"] = json!(true);
        assert_eq!(post(server.address, PATH, &body).await.status, 200);
    }
}

#[tokio::test]
async fn the_text_begins_with_the_prompt_and_ends_at_a_stop_string_as_ever() {
    let server = TestServer::start().await;
    let mut body = json!({
        "prompt": "echo", "echo": true, "n": 5, "seed": 4, "max_tokens": 30, "stop": ["e", "t"],
    });
    let all = answer(&server, &body).await;
    body["n"] = json!(2);
    body["best_of"] = json!(5);
    let best = answer(&server, &body).await;
    let texts: Vec<&Value> = all["choices"]
        .as_array()
        .expect("choices")
        .iter()
        .map(|choice| &choice["text"])
        .collect();
    for choice in best["choices"].as_array().expect("choices") {
        assert!(texts.contains(&&choice["text"]), "{choice}");
        assert!(choice["text"].as_str().expect("text").starts_with("echo"));
    }
}
