//! `/inference/v1/generate` and the endpoints that render its bodies.

use corella_core::TokenId;
use serde_json::{Value, json};

use crate::client::{Reply, head, post, send};
use crate::fixture::{AB, END, MAX_MODEL_LEN, Setup, TestServer};
use crate::tools::{CALLS, hermes};

const GENERATE: &str = "/inference/v1/generate";
const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

async fn answer(server: &TestServer, path: &str, body: &Value) -> Value {
    let reply = post(server.address, path, body).await;
    assert_eq!(reply.status, 200, "{path} {body}: {}", reply.text());
    reply.json()
}

fn ids(value: &Value) -> Vec<TokenId> {
    serde_json::from_value(value.clone()).expect("token ids")
}

/// The text of an answer's tokens. Its end token has no text.
async fn text_of(server: &TestServer, tokens: &[TokenId]) -> String {
    let tokens: Vec<_> = tokens.iter().filter(|&&token| token != END).collect();
    let body = json!({"tokens": tokens});
    let text = answer(server, "/detokenize", &body).await;
    text["prompt"].as_str().expect("a text").to_owned()
}

fn with(body: &Value, more: &Value) -> Value {
    let mut body = body.clone();
    let more = more.as_object().expect("fields").clone();
    body.as_object_mut().expect("fields").extend(more);
    body
}

/// A model that writes any byte in any order, so that a format comes from the grammar.
fn setup() -> Setup {
    let mut setup = Setup::new().ending_at(40);
    setup.mock.drawable = (b' '..=b'~').map(TokenId::from).collect();
    setup
}

#[tokio::test]
async fn a_rendered_request_is_answered_like_the_request() {
    let server = setup().start().await;
    let chat = json!({"messages": [{"role": "user", "content": "A story."}], "max_tokens": 20});
    let completion = json!({"prompt": "A story.", "max_tokens": 20});
    let schema =
        json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]});
    for more in [
        json!({"temperature": 0}),
        json!({"temperature": 0.7, "seed": 4, "top_k": 7, "top_p": 0.9, "min_p": 0.02}),
        json!({"temperature": 0, "presence_penalty": 0.3, "frequency_penalty": 1.1}),
        json!({"temperature": 0, "repetition_penalty": 1.3}),
        json!({"temperature": 0, "max_tokens": null, "cache_salt": "s", "priority": 3}),
        json!({"temperature": 0, "logit_bias": {"97": 30}, "allowed_token_ids": [97, 98, 99]}),
        json!({"temperature": 0, "bad_words": ["a", "e"], "min_tokens": 4}),
        json!({"temperature": 0, "ignore_eos": true, "stop_token_ids": [101]}),
        json!({"seed": 9, "n": 3}),
        json!({"temperature": 0, "structured_outputs": {"regex": "(ab|cd)[x-z]{3}"}}),
        json!({"temperature": 0, "response_format":
            {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}),
        json!({"temperature": 0, "response_format": {"type": "json_object"}}),
    ] {
        for (path, body) in [(CHAT, &chat), (COMPLETIONS, &completion)] {
            let body = with(body, &more);
            let expected = answer(&server, path, &body).await;
            let rendered = answer(&server, &format!("{path}/render"), &body).await;
            let rendered = rendered.as_array().map_or(&rendered, |prompts| &prompts[0]);
            let generated = answer(&server, GENERATE, rendered).await;
            for count in ["prompt_tokens", "completion_tokens"] {
                let num_expected = &expected["usage"][count];
                assert_eq!(&generated["usage"][count], num_expected, "{body}");
            }
            let choices = expected["choices"].as_array().expect("choices");
            for (at, choice) in choices.iter().enumerate() {
                let same = &generated["choices"][at];
                let text = text_of(&server, &ids(&same["token_ids"])).await;
                let text_there = choice.get("text").unwrap_or(&choice["message"]["content"]);
                // The stop token has a text, which is no part of the answer.
                let text = match choice["stop_reason"].is_number() {
                    true => &text[..text.len() - 1],
                    false => &text,
                };
                assert_eq!(text_there, text, "{body}");
                assert_eq!(same["finish_reason"], choice["finish_reason"]);
            }
        }
    }
    server.assert_at_rest().await;
}

#[tokio::test]
async fn each_prompt_is_rendered_with_the_rest_of_the_context() {
    let server = TestServer::start().await;
    let body = json!({"prompt": ["ab", [97, 98, 99]], "max_tokens": null, "stream": true,
        "stream_options": {"include_usage": true}});
    let reply = post(server.address, "/v1/completions/render", &body).await;
    let name = reply.header("x-request-id").expect("a name").to_owned();
    let rendered = reply.json();
    assert_eq!(rendered[0]["token_ids"], json!([AB]));
    assert_eq!(rendered[1]["token_ids"], json!([97, 98, 99]));
    assert_eq!(rendered[1]["request_id"], format!("cmpl-{name}-1"));
    assert_eq!(rendered[0]["features"], Value::Null);
    assert_eq!(rendered[0]["stream"], true);
    assert_eq!(rendered[0]["stream_options"]["include_usage"], true);
    // A completion has its own default, and a chat gets the rest.
    assert_eq!(rendered[1]["sampling_params"]["max_tokens"], 16);
    let chat = json!({"messages": [{"role": "user", "content": "hi"}]});
    let rendered = answer(&server, "/v1/chat/completions/render", &chat).await;
    let tokenized = answer(&server, "/tokenize", &chat).await;
    assert_eq!(rendered["token_ids"], tokenized["tokens"]);
    let num_prompt_tokens = tokenized["count"].as_u64().expect("a count");
    let num_left = u64::from(MAX_MODEL_LEN) - num_prompt_tokens;
    assert_eq!(rendered["sampling_params"]["max_tokens"], num_left);
    assert_eq!(
        server.engine.stats().num_finished_length,
        0,
        "nothing is computed"
    );
}

#[tokio::test]
async fn what_cannot_be_rendered_is_refused() {
    let server = hermes(&[CALLS]).start().await;
    let tool = json!([{"type": "function", "function": {"name": "time"}}]);
    for (path, more, param) in [
        (
            CHAT,
            json!({"tools": tool, "tool_choice": "required"}),
            "tool_choice",
        ),
        (
            CHAT,
            json!({"response_format": {"type": "json_object"}}),
            "response_format",
        ),
        (COMPLETIONS, json!({"best_of": 2}), "best_of"),
        (COMPLETIONS, json!({"echo": true}), "echo"),
        (COMPLETIONS, json!({"temperature": -1}), "temperature"),
    ] {
        let messages = json!([{"role": "user", "content": "hi"}]);
        let body = match path {
            CHAT => json!({"messages": messages}),
            _ => json!({"prompt": "hi"}),
        };
        let body = with(&body, &more);
        let reply = post(server.address, &format!("{path}/render"), &body).await;
        assert_eq!(reply.status, 400, "{body}: {}", reply.text());
        assert_eq!(reply.error()["param"], param, "{body}");
    }
}

#[tokio::test]
async fn a_stream_has_each_token_with_its_log_probability() {
    // The halves of é have no text of their own.
    let server = Setup::new().ending_at(30).start().await;
    let prompt = server.encode("a prompt");
    let params = json!({"temperature": 0, "logprobs": 2, "prompt_logprobs": null});
    let body = json!({"token_ids": prompt, "sampling_params": params});
    let whole = answer(&server, GENERATE, &body).await;
    let choice = &whole["choices"][0];
    let tokens = ids(&choice["token_ids"]);
    assert_eq!(tokens[..29], server.greedy_tokens(&prompt, 29));
    assert_eq!(tokens[29..], [END]);
    assert_eq!(whole["id"], whole["request_id"]);
    let id = whole["id"].as_str().expect("an id");
    assert!(id.starts_with("generate-tokens-"), "{id}");
    let members = ["routed_experts"].map(|name| (choice, name));
    for (object, name) in members.into_iter().chain([(&whole, "ec_transfer_params")]) {
        assert_eq!(object.get(name), Some(&Value::Null));
    }
    let rows = choice["logprobs"]["content"].as_array().expect("rows");
    let names: Vec<_> = rows.iter().map(|row| row["token"].clone()).collect();
    let expected: Vec<_> = tokens
        .iter()
        .map(|token| format!("token_id:{token}"))
        .collect();
    assert_eq!(json!(names), json!(expected));
    assert!(
        rows.iter()
            .all(|row| row["top_logprobs"].as_array().expect("top").len() == 2)
    );

    let streamed = with(
        &body,
        &json!({"stream": true, "stream_options": {"include_usage": true}}),
    );
    let mut chunks = post(server.address, GENERATE, &streamed).await.chunks();
    let last = chunks.pop().expect("a chunk of the usage");
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"]["completion_tokens"], tokens.len());
    assert_eq!(chunks.len(), tokens.len());
    for (at, chunk) in chunks.iter().enumerate() {
        let choice = &chunk["choices"][0];
        assert_eq!(choice["token_ids"], json!([tokens[at]]));
        assert_eq!(choice["logprobs"]["content"], json!([rows[at]]));
        let finish = if at + 1 == tokens.len() {
            json!("stop")
        } else {
            Value::Null
        };
        assert_eq!(choice["finish_reason"], finish);
    }

    // The answer goes on behind the tokens of another server.
    let resumed = with(&body, &json!({"resume_token_ids": tokens[..10]}));
    let rest = answer(&server, GENERATE, &resumed).await;
    assert_eq!(ids(&rest["choices"][0]["token_ids"]), tokens[10..]);
    let scored = json!({"temperature": 0, "max_tokens": 1, "prompt_logprobs": 0});
    let scored = json!({"token_ids": prompt, "sampling_params": scored});
    let scored = answer(&server, GENERATE, &scored).await;
    let num_scored = scored["prompt_logprobs"].as_array().map(Vec::len);
    assert_eq!(num_scored, Some(prompt.len()));
}

/// vLLM's own parameters come with members that change nothing.
#[tokio::test]
async fn members_without_effect_are_accepted_and_others_refused_by_their_place() {
    let server = TestServer::start().await;
    let accepted = json!({
        "token_ids": [97, 98], "request_id": "r", "features": null, "priority": 0, "cache_salt": null,
        "kv_transfer_params": null,
        "sampling_params": {
            "n": 1, "temperature": 0.5, "top_k": 0, "min_p": 0.0, "seed": null, "stop": [],
            "stop_token_ids": [], "bad_words": [], "max_tokens": 3, "min_tokens": 0, "logprobs": null,
            "output_kind": 2, "skip_clone": true, "detokenize": false, "skip_special_tokens": true,
            "spaces_between_special_tokens": true, "skip_reading_prefix_cache": false,
            "extra_args": null, "structured_outputs": null,
        },
    });
    let reply = answer(&server, GENERATE, &accepted).await;
    assert_eq!(reply["choices"][0]["finish_reason"], "length");
    let features = json!({"mm_hashes": {}, "mm_placeholders": {}, "kwargs_data": null});
    answer(
        &server,
        GENERATE,
        &with(&accepted, &json!({"features": features})),
    )
    .await;
    let params = "sampling_params";
    for (body, param) in [
        (json!({}), "token_ids"),
        (json!({"token_ids": [97, 999]}), "token_ids[1]"),
        (json!({"token_ids": vec![97; 400]}), "token_ids"),
        (
            json!({"token_ids": [97], "features": {"mm_hashes": {"image": ["a"]}}}),
            "features",
        ),
        (json!({"token_ids": [97], "temperature": 1}), "temperature"),
        (
            json!({"token_ids": [97], params: {"temperature": -1}}),
            "sampling_params.temperature",
        ),
        (
            json!({"token_ids": [97], params: {"top_k": "x"}}),
            "sampling_params.top_k",
        ),
        (
            json!({"token_ids": [97], params: {"logprobs": 900}}),
            "sampling_params.logprobs",
        ),
        (
            json!({"token_ids": [97], params: {"max_token": 9}}),
            "sampling_params.max_token",
        ),
        (
            json!({"token_ids": [97], params: {"skip_reading_prefix_cache": true}}),
            "sampling_params.skip_reading_prefix_cache",
        ),
        (
            json!({"token_ids": [97], params: {"structured_outputs": {"regex": "("}}}),
            "sampling_params.structured_outputs.regex",
        ),
        (
            json!({"token_ids": [97], params: {"extra_args": {"other": 1}}}),
            "sampling_params.extra_args.other",
        ),
        // This server moves no KV rows.
        (
            json!({"token_ids": [97], params: {"extra_args": {"kv_transfer_params": {"a": 1}}}}),
            "sampling_params.extra_args.kv_transfer_params",
        ),
        (
            json!({"token_ids": [97], "stream_options": {"include_usage": true}}),
            "stream_options",
        ),
        (
            json!({"token_ids": [97], "resume_token_ids": [END]}),
            "resume_token_ids[0]",
        ),
    ] {
        let reply = post(server.address, GENERATE, &body).await;
        assert_eq!(reply.status, 400, "{body}: {}", reply.text());
        assert_eq!(reply.error()["param"], param, "{body}: {}", reply.text());
    }
}

async fn ask(server: &TestServer, path: &str, prefer: &str, body: &Value) -> Reply {
    let body = body.to_string();
    let head = head("POST", path, &[("prefer", prefer)], Some(body.len()));
    send(server.address, &head, body.as_bytes()).await
}

/// Sends each request again without the header, whose usage tells the cached tokens.
#[tokio::test]
async fn a_prompt_is_refused_exactly_if_the_cache_lacks_a_block() {
    let server = TestServer::start().await;
    let page_size = u64::from(server.engine.limits().page_size);
    let mut num_refused = 0;
    for num_known in [0, 3, 4, 5, 24, 27, 28, 29, 39, 40, 41, 50] {
        for salt in ["", "s"] {
            let known: Vec<_> = (0..num_known).map(|at| 97 + at % 20).collect();
            let prompt: Vec<_> = (0..41).map(|at| 97 + at % 20).collect();
            let salt = format!("{num_known}{salt}");
            let body = |tokens: &[TokenId]| {
                let params = json!({"max_tokens": 1, "temperature": 0});
                json!({"token_ids": tokens, "sampling_params": params, "cache_salt": salt})
            };
            if num_known > 0 {
                answer(&server, GENERATE, &body(&known)).await;
                server.assert_at_rest().await;
            }
            let body = body(&prompt);
            let asked = ask(&server, GENERATE, "respond-async, IF-Available; a=1", &body).await;
            let whole = answer(&server, GENERATE, &body).await;
            let cached = &whole["usage"]["prompt_tokens_details"]["cached_tokens"];
            let num_cached = cached.as_u64().expect("a number");
            let is_short = num_cached / page_size < 40 / page_size;
            assert_eq!(
                asked.status,
                if is_short { 412 } else { 200 },
                "{num_known}: {num_cached}"
            );
            if is_short {
                num_refused += 1;
                assert_eq!(asked.error()["code"], "prompt_not_cached");
            }
        }
    }
    assert!((10..20).contains(&num_refused), "{num_refused}");
    let short = json!({"prompt": "a", "max_tokens": 1});
    assert_eq!(
        ask(&server, COMPLETIONS, "if-available", &short)
            .await
            .status,
        200
    );
    let long = json!({"messages": [{"role": "user", "content": "A new text."}], "max_tokens": 1});
    assert_eq!(ask(&server, CHAT, "if-available", &long).await.status, 412);
    assert_eq!(ask(&server, CHAT, "respond-async", &long).await.status, 200);
    server.assert_at_rest().await;
}

#[tokio::test]
async fn a_conversation_may_come_with_its_tokens() {
    let server = TestServer::start().await;
    let chat = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "temperature": 0,
        "return_token_ids": true});
    let own = answer(&server, CHAT, &chat).await;
    let rendered = answer(&server, "/v1/chat/completions/render", &chat).await;
    let sent = json!({"token_ids": rendered["token_ids"], "features": {"mm_hashes": {}}});
    let same = answer(&server, CHAT, &with(&chat, &json!({"tokens": sent}))).await;
    assert_eq!(same["choices"], own["choices"]);
    let other = json!({"tokens": {"token_ids": [97, 98, 99], "features": null}});
    let other = answer(&server, CHAT, &with(&chat, &other)).await;
    assert_eq!(other["prompt_token_ids"], json!([97, 98, 99]));
    let drawn = ids(&other["choices"][0]["token_ids"]);
    assert_eq!(drawn, server.greedy_tokens(&[97, 98, 99], 9));
    for (tokens, param) in [
        (json!("a"), "tokens"),
        (json!({}), "tokens.token_ids"),
        (json!({"token_ids": []}), "tokens.token_ids"),
        (json!({"token_ids": [900]}), "tokens.token_ids[0]"),
        (
            json!({"token_ids": [97], "features": {"mm_hashes": {"image": ["a"]}}}),
            "tokens.features",
        ),
    ] {
        let body = with(&chat, &json!({"tokens": tokens}));
        let reply = post(server.address, CHAT, &body).await;
        assert_eq!(reply.status, 400, "{body}: {}", reply.text());
        assert_eq!(reply.error()["param"], param, "{body}: {}", reply.text());
    }
}
