//! `suffix` of `/v1/completions`: the text between two others.

use corella_core::TokenId;
use corella_model::MockEnd;
use serde_json::json;

use crate::client::post;
use crate::fixture::{END, Setup, TestServer};

const PATH: &str = "/v1/completions";
const TOKENS: &[&str] = &["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>"];
/// The ids of `TOKENS`, which follow the end token.
const PREFIX: TokenId = END + 1;
const SUFFIX: TokenId = END + 2;
const MIDDLE: TokenId = END + 3;
const PAD: TokenId = END + 4;

#[tokio::test]
async fn prefix_suffix_and_then_the_middle_are_what_the_model_sees() {
    let server = Setup::new().with_tokens(TOKENS).start().await;
    let body = json!({
        "prompt": "left", "suffix": "right", "temperature": 0, "max_tokens": 12,
        "return_token_ids": true,
    });
    let reply = post(server.address, PATH, &body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    let choice = &reply.json()["choices"][0];
    let mut prompt = vec![PREFIX];
    prompt.extend(server.encode("left"));
    prompt.push(SUFFIX);
    prompt.extend(server.encode("right"));
    prompt.push(MIDDLE);
    assert_eq!(choice["prompt_token_ids"], json!(prompt));
    assert_eq!(choice["text"], server.greedy(&prompt, 12));
}

#[tokio::test]
async fn a_token_that_no_middle_has_ends_it() {
    let mut setup = Setup::new().with_tokens(TOKENS);
    setup.mock.end = Some(MockEnd {
        token: PAD,
        probability: 0.0,
        at_output: Some(5),
    });
    let server = setup.start().await;
    let mut body = json!({"prompt": "left", "suffix": "right", "max_tokens": 12});
    let answer = post(server.address, PATH, &body).await.json();
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    assert_eq!(answer["usage"]["completion_tokens"], 5);
    body["suffix"] = json!("");
    let answer = post(server.address, PATH, &body).await.json();
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
}

#[tokio::test]
async fn what_cannot_be_filled_in_is_refused() {
    let body = json!({"prompt": "left", "suffix": "right"});
    let without = TestServer::start().await;
    let reply = post(without.address, PATH, &body).await;
    assert_eq!(reply.status, 400, "{}", reply.text());
    assert_eq!(reply.error()["param"], "suffix");
    let server = Setup::new().with_tokens(TOKENS).start().await;
    for (field, value) in [("echo", json!(true)), ("prompt", json!([1, 2]))] {
        let mut body = body.clone();
        body[field] = value;
        let reply = post(server.address, PATH, &body).await;
        assert_eq!(reply.status, 400, "{}", reply.text());
        assert_eq!(reply.error()["param"], field);
    }
}
