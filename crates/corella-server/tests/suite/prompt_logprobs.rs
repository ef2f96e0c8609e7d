//! Log-probabilities of prompts: `prompt_logprobs`, and `echo` with `logprobs`.

use corella_core::TokenId;
use serde_json::{Value, json};

use crate::client::post;
use crate::fixture::TestServer;

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

/// The model never draws the capital letter, so the letter's probability is 0.
const PROMPT: &str = "a Prompt";

/// The log-probability of a value of JSON. −∞ is written as −9999.
fn expected(logprob: f32) -> f64 {
    f64::from(logprob.max(-9999.0))
}

fn is_close(found: &Value, logprob: f32) -> bool {
    let found = found.as_f64().expect("a number");
    (found - expected(logprob)).abs() < 1e-5
}

fn name(server: &TestServer, token: TokenId) -> String {
    let bytes = server.tokenizer.token_bytes(token).expect("a token");
    String::from_utf8_lossy(bytes).into_owned()
}

/// Checks `prompt_logprobs` of a prompt against the model.
fn check(server: &TestServer, found: &Value, prompt: &[TokenId], num_top: usize) {
    let found = found.as_array().expect("a list");
    assert_eq!(found.len(), prompt.len());
    assert_eq!(found[0], Value::Null);
    let scored = server.prompt_logprobs(prompt, num_top);
    for (found, scored) in found[1..].iter().zip(&scored) {
        let found = found.as_object().expect("an object");
        let mut ranks: Vec<(TokenId, f32, u32)> = vec![];
        ranks.push((scored.token, scored.logprobs.token, scored.logprobs.rank));
        for (at, &(token, logprob)) in scored.logprobs.top.iter().enumerate() {
            if token != scored.token {
                ranks.push((token, logprob, at as u32 + 1));
            }
        }
        assert_eq!(found.len(), ranks.len(), "{found:?}");
        for (token, logprob, rank) in ranks {
            let entry = &found[&token.to_string()];
            assert!(is_close(&entry["logprob"], logprob), "{entry} {logprob}");
            assert_eq!(entry["rank"], rank);
            assert_eq!(entry["decoded_token"], name(server, token));
        }
    }
}

#[tokio::test]
async fn prompt_logprobs_are_those_of_the_model_in_both_endpoints() {
    let server = TestServer::start().await;
    let prompt = server.encode(PROMPT);
    for num_top in [0, 1, 20] {
        let body = json!({
            "prompt": [PROMPT, "other"], "n": 2, "max_tokens": 2, "prompt_logprobs": num_top,
        });
        let answer = post(server.address, COMPLETIONS, &body).await.json();
        for choice in 0..4 {
            let prompt = server.encode([PROMPT, "other"][choice / 2]);
            let found = &answer["choices"][choice]["prompt_logprobs"];
            check(&server, found, &prompt, num_top);
        }
        let body = json!({
            "messages": [{"role": "user", "content": "x"}], "max_tokens": 1,
            "prompt_logprobs": num_top,
        });
        let answer = post(server.address, CHAT, &body).await.json();
        let prompt = server.encode("<|user|>x<|end|><|assistant|>");
        check(&server, &answer["prompt_logprobs"], &prompt, num_top);
        assert_eq!(answer["choices"][0].get("prompt_logprobs"), None);
    }
    // The prompt is cached by now, and is scored again.
    let body = json!({"prompt": prompt, "max_tokens": 0, "prompt_logprobs": 3});
    let answer = post(server.address, COMPLETIONS, &body).await.json();
    check(
        &server,
        &answer["choices"][0]["prompt_logprobs"],
        &prompt,
        3,
    );
    assert_eq!(answer["choices"][0]["text"], "");
    assert_eq!(answer["usage"]["completion_tokens"], 0);
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 0);

    let body = json!({"prompt": PROMPT, "max_tokens": 1});
    let answer = post(server.address, COMPLETIONS, &body).await.json();
    assert_eq!(answer["choices"][0].get("prompt_logprobs"), None);
}

/// lm-eval-harness sends this request and reads these members.
#[tokio::test]
async fn an_echoed_prompt_has_log_probabilities_in_front_of_the_answer_s() {
    let server = TestServer::start().await;
    let tokens = server.encode(PROMPT);
    let scored = server.prompt_logprobs(&tokens, 2);
    for max_tokens in [0, 1, 5] {
        for (prompt, stream) in [
            (json!(PROMPT), false),
            (json!([tokens]), false),
            (json!(tokens), true),
        ] {
            let body = json!({
                "prompt": prompt, "echo": true, "logprobs": 2, "temperature": 0,
                "max_tokens": max_tokens, "stream": stream,
            });
            let reply = post(server.address, COMPLETIONS, &body).await;
            let chunks = if stream {
                reply.chunks()
            } else {
                vec![reply.json()]
            };
            let column = |name: &str| -> Vec<Value> {
                let columns = chunks
                    .iter()
                    .map(|chunk| &chunk["choices"][0]["logprobs"][name]);
                columns
                    .filter_map(Value::as_array)
                    .flatten()
                    .cloned()
                    .collect()
            };
            let texts = chunks
                .iter()
                .map(|chunk| chunk["choices"][0]["text"].as_str());
            let text: String = texts.map(Option::unwrap_or_default).collect();
            let output = server.greedy_tokens(&tokens, max_tokens);
            let all = [&tokens[..], &output[..]].concat();

            let expected_text = server.tokenizer.decode(&all, true).expect("text");
            assert_eq!(text, expected_text);
            let names: Vec<_> = all.iter().map(|&token| name(&server, token)).collect();
            assert_eq!(column("tokens"), names);
            let logprobs = column("token_logprobs");
            let top = column("top_logprobs");
            assert_eq!((logprobs.len(), top.len()), (all.len(), all.len()));
            assert_eq!((&logprobs[0], &top[0]), (&Value::Null, &Value::Null));
            for (at, scored) in scored.iter().enumerate() {
                assert!(is_close(&logprobs[at + 1], scored.logprobs.token));
                let top = top[at + 1].as_object().expect("an object");
                assert!(is_close(&top[&names[at + 1]], scored.logprobs.token));
                for &(token, logprob) in &scored.logprobs.top {
                    let name = name(&server, token);
                    // The halves of a character have the same name.
                    assert!(name == "\u{FFFD}" || is_close(&top[&name], logprob));
                }
            }
            // Each offset is the place of the token's text, also after the prompt.
            let offsets = column("text_offset");
            for (at, offset) in offsets.iter().enumerate().filter(|_| text.is_ascii()) {
                let offset = offset.as_u64().expect("a number") as usize;
                assert!(text[offset..].starts_with(&names[at]), "{at}: {offset}");
            }
            let before: usize = names[..tokens.len()].iter().map(String::len).sum();
            assert_eq!(
                offsets
                    .get(tokens.len())
                    .map_or(before, |at| { at.as_u64().expect("a number") as usize }),
                before
            );
        }
    }
}

#[tokio::test]
async fn an_echo_without_log_probabilities_may_have_no_answer() {
    let server = TestServer::start().await;
    let body = json!({"prompt": PROMPT, "echo": true, "max_tokens": 0});
    let answer = post(server.address, COMPLETIONS, &body).await.json();
    let choice = &answer["choices"][0];
    assert_eq!(choice["text"], PROMPT);
    assert_eq!(choice["logprobs"], Value::Null);
    assert_eq!(choice["finish_reason"], "length");
    assert_eq!(answer["usage"]["completion_tokens"], 0);
    let num_prompt_tokens = server.encode(PROMPT).len() as f64;
    let counted = server.metric("corella_prompt_tokens_total", &[]).await;
    assert_eq!(counted, Some(num_prompt_tokens));
}
