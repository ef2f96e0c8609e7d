//! `logit_bias`, `allowed_token_ids` and `bad_words`, compared with models that cannot draw other tokens.

use corella_core::{HeadRoom, SamplingParams, Speculation, TokenId};
use corella_model::MockEcho;
use serde_json::{Value, json};

use crate::client::post;
use crate::fixture::{AB, END, Setup, TestServer};

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";
const NUM_TOKENS: usize = 40;

/// Returns the output of a model that can draw only the tokens allowed by `may_follow`, which also gets the output so
/// far. Each token is drawn from a mock with fewer tokens, so no rules are needed.
fn restricted(
    server: &TestServer,
    prompt: &[TokenId],
    sampling: &SamplingParams,
    may_follow: impl Fn(&[TokenId], TokenId) -> bool,
) -> Vec<TokenId> {
    let mut tokens = prompt.to_vec();
    for _ in 0..NUM_TOKENS {
        let mut model = (*server.mock).clone();
        let output = &tokens[prompt.len()..];
        model.drawable.retain(|&token| may_follow(output, token));
        // A model that repeats itself draws a token even if it is not allowed.
        model.echo = model.echo.filter(|echo| {
            let repeated = tokens.len().checked_sub(echo.distance);
            repeated.is_none_or(|from| may_follow(output, tokens[from]))
        });
        let drawn = model.lone_tokens(&tokens, sampling, 1);
        tokens.extend(drawn);
    }
    tokens.split_off(prompt.len())
}

fn text(server: &TestServer, tokens: &[TokenId]) -> String {
    server.tokenizer.decode(tokens, true).expect("it decodes")
}

/// Returns the text of each choice, without and with a stream, which must not differ.
async fn answers(server: &TestServer, path: &str, body: &Value) -> Vec<String> {
    let reply = post(server.address, path, body).await;
    assert_eq!(reply.status, 200, "{body}: {}", reply.text());
    let choices = reply.json()["choices"].clone();
    let choices = choices.as_array().expect("choices").iter();
    let whole: Vec<String> = choices
        .map(|choice| {
            let text = choice.get("text").unwrap_or(&choice["message"]["content"]);
            text.as_str().expect("text").to_owned()
        })
        .collect();
    let mut streamed = vec![String::new(); whole.len()];
    let mut body = body.clone();
    body["stream"] = json!(true);
    for chunk in post(server.address, path, &body).await.chunks() {
        for choice in chunk["choices"].as_array().expect("choices") {
            let text = choice.get("text").unwrap_or(&choice["delta"]["content"]);
            let index = choice["index"].as_u64().expect("an index") as usize;
            streamed[index] += text.as_str().unwrap_or_default();
        }
    }
    assert_eq!(whole, streamed);
    whole
}

/// Greedy and drawn, as a request and as parameters.
fn ways() -> [(Value, SamplingParams); 2] {
    let drawn = SamplingParams {
        temperature: 1.5,
        seed: 11,
        ..SamplingParams::GREEDY
    };
    [
        (json!({"temperature": 0}), SamplingParams::GREEDY),
        (json!({"temperature": 1.5, "seed": 11}), drawn),
    ]
}

fn body(way: &Value, fields: Value) -> Value {
    let mut body = json!({"prompt": "rules", "max_tokens": NUM_TOKENS});
    for part in [way.clone(), fields] {
        let Value::Object(part) = part else { continue };
        body.as_object_mut().expect("an object").extend(part);
    }
    body
}

async fn check(
    server: &TestServer,
    fields: Value,
    may_follow: impl Fn(&[TokenId], TokenId) -> bool,
) {
    let prompt = server.encode("rules");
    for (way, sampling) in ways() {
        let expected = restricted(server, &prompt, &sampling, &may_follow);
        let body = body(&way, fields.clone());
        let found = answers(server, COMPLETIONS, &body).await;
        assert_eq!(found, [text(server, &expected)], "{body}");
        let free = restricted(server, &prompt, &sampling, |_, _| true);
        assert_ne!(expected, free, "{body} must change something");
    }
}

#[tokio::test]
async fn only_allowed_tokens_are_drawn() {
    let server = TestServer::start().await;
    let letters: Vec<TokenId> = b"xyzabc".iter().copied().map(TokenId::from).collect();
    let fields = json!({"allowed_token_ids": letters});
    check(&server, fields, |_, token| letters.contains(&token)).await;
    server.assert_at_rest().await;
}

#[tokio::test]
async fn a_conversation_has_the_same_fields() {
    let server = TestServer::start().await;
    let messages = json!([{"role": "user", "content": "hi"}]);
    let prompt = server.encode("<|user|>hi<|end|><|assistant|>");
    let expected = restricted(&server, &prompt, &SamplingParams::GREEDY, |_, token| {
        [97, 98, 100].contains(&token) && token != 97
    });
    let body = json!({
        "messages": messages, "temperature": 0, "max_tokens": NUM_TOKENS,
        "allowed_token_ids": [100, 98, 97, 98], "bad_words": ["a"],
    });
    let found = answers(&server, CHAT, &body).await;
    assert_eq!(found, [text(&server, &expected)]);
}

#[tokio::test]
async fn a_bias_moves_a_token_up_or_down() {
    let server = TestServer::start().await;
    // All logits are between 0 and 8, so a bias of ±100 outweighs all others.
    let vowels = json!({"97": -100, "101": -100, "105": -100.0, "111": -100, "117": -100});
    let fields = json!({"logit_bias": vowels});
    check(&server, fields, |_, token| {
        !b"aeiou".contains(&(token as u8)) || token > 255
    })
    .await;
    let fields = json!({"logit_bias": {"97": 100, "98": 100, "99": 50}});
    check(&server, fields, |_, token| token == 97 || token == 98).await;
    // The bias of a token that the model cannot draw changes nothing.
    let both = json!({"logit_bias": {"97": 100, "98": 100}, "allowed_token_ids": [98, 99, 100]});
    check(&server, both, |_, token| token == 98).await;
}

#[tokio::test]
async fn a_word_of_one_token_is_not_drawn() {
    let server = TestServer::start().await;
    let banned: Vec<TokenId> = vec![b'q'.into(), b'r'.into(), b's'.into(), b't'.into(), AB];
    // Spaces before a word are stripped. A word after a space has two tokens.
    let fields = json!({"bad_words": ["q", "  r", "s", "t", "ab"]});
    check(&server, fields, |_, token| !banned.contains(&token)).await;
}

#[tokio::test]
async fn a_word_of_several_tokens_is_not_completed() {
    let server = TestServer::start().await;
    // In this model any two letters may follow each other; in the answer without rules, some do.
    let prompt = server.encode("rules");
    let free = server.greedy_tokens(&prompt, NUM_TOKENS);
    let drawn = server.mock.lone_tokens(&prompt, &ways()[1].1, NUM_TOKENS);
    // Some of the first letters have tokens for pairs.
    let is_letter = |token: &TokenId| (100..123).contains(token);
    let mut words: Vec<Vec<TokenId>> = Vec::new();
    for tokens in [&free, &drawn] {
        for len in [2, 3] {
            let word = tokens.windows(len).find(|word| word.iter().all(is_letter));
            words.push(word.expect("letters").to_vec());
        }
    }
    let strings: Vec<String> = words.iter().map(|word| text(&server, word)).collect();
    let fields = json!({"bad_words": strings});
    let may_follow = |output: &[TokenId], token: TokenId| {
        let ends = |word: &[TokenId]| {
            let mut coming = output.to_vec();
            coming.push(token);
            coming.ends_with(word)
        };
        !words.iter().any(|word| ends(word))
    };
    check(&server, fields.clone(), may_follow).await;
    // The prompt is not part of the answer, so its end begins no word.
    let word = &words[0];
    let mut prompt = server.encode("rules");
    prompt.push(word[0]);
    let forced = json!({
        "prompt": prompt, "max_tokens": 1, "bad_words": [strings[0]],
        "allowed_token_ids": [word[1]],
    });
    let found = answers(&server, COMPLETIONS, &forced).await;
    assert_eq!(found, [text(&server, &word[1..])]);
}

#[tokio::test]
async fn every_choice_has_the_rules_of_its_call() {
    let server = TestServer::start().await;
    let prompt = server.encode("rules");
    let fields = json!({
        "n": 3, "temperature": 1.5, "seed": 11, "allowed_token_ids": [97, 98, 99, 100, 101, 102],
    });
    let found = answers(&server, COMPLETIONS, &body(&json!({}), fields)).await;
    for (choice, found) in (0..).zip(&found) {
        let sampling = SamplingParams {
            choice,
            ..ways()[1].1.clone()
        };
        let may_follow = |_: &[TokenId], token| (97..103).contains(&token);
        let expected = restricted(&server, &prompt, &sampling, may_follow);
        assert_eq!(*found, text(&server, &expected));
    }
    assert_ne!(found[0], found[1]);
}

/// With few pages, requests are preempted; with speculation, tokens are drawn after drafts.
#[tokio::test]
async fn rules_hold_through_preemption_and_speculation() {
    for (speculation, max_inflight_steps) in [(Speculation::Off, 2), (Speculation::Ngram, 1)] {
        let mut setup = Setup::new();
        setup.scheduler.num_pages = 24;
        setup.mock.num_pages = 24;
        setup.scheduler.head_room = HeadRoom::fixed_share(0);
        setup.scheduler.speculation = speculation;
        setup.scheduler.max_inflight_steps = max_inflight_steps;
        setup.mock.echo = Some(MockEcho {
            distance: 4,
            probability: 0.7,
        });
        let server = setup.start().await;
        let prompt = server.encode("rules");
        let may_follow = |output: &[TokenId], token: TokenId| {
            let is_banned = token == 100 && output.last() == Some(&99);
            (97..107).contains(&token) && !is_banned
        };
        let allowed: Vec<TokenId> = (97..107).collect();
        let fields = json!({
            "n": 6, "temperature": 1.5, "seed": 11, "bad_words": ["cd"],
            "allowed_token_ids": allowed,
        });
        let found = answers(&server, COMPLETIONS, &body(&json!({}), fields)).await;
        for (choice, found) in (0..).zip(&found) {
            let sampling = SamplingParams {
                choice,
                ..ways()[1].1.clone()
            };
            let expected = restricted(&server, &prompt, &sampling, may_follow);
            assert_eq!(*found, text(&server, &expected), "choice {choice}");
        }
        let stats = server.engine.stats().scheduler;
        assert!(stats.num_preemptions > 0, "{stats:?}");
    }
}

#[tokio::test]
async fn rules_that_leave_nothing_are_refused_or_end_the_request() {
    let server = TestServer::start().await;
    let refused = [
        json!({"allowed_token_ids": [97], "bad_words": ["a"]}),
        json!({"allowed_token_ids": [END], "min_tokens": 1}),
        json!({"allowed_token_ids": [97, END], "min_tokens": 1, "stop_token_ids": [97]}),
        json!({"allowed_token_ids": [97], "guided_choice": ["ba"]}),
        json!({"allowed_token_ids": [97, 98], "bad_words": ["b"], "guided_regex": "b+"}),
    ];
    for fields in refused {
        let mut chat = body(&json!({}), fields.clone());
        chat.as_object_mut().expect("an object").remove("prompt");
        chat["messages"] = json!([{"role": "user", "content": "hi"}]);
        let completion = body(&json!({}), fields);
        for (path, body) in [(COMPLETIONS, completion), (CHAT, chat)] {
            let reply = post(server.address, path, &body).await;
            assert_eq!(reply.status, 400, "{}", reply.text());
            assert_eq!(reply.error()["param"], "allowed_token_ids");
        }
    }
    for (fields, param) in [
        (
            json!({"bad_words": ["a"], "guided_choice": ["a"]}),
            "bad_words",
        ),
        (
            json!({"guided_choice": ["a"], "min_tokens": 1, "stop_token_ids": [97]}),
            "min_tokens",
        ),
    ] {
        let reply = post(server.address, COMPLETIONS, &body(&json!({}), fields)).await;
        assert_eq!(reply.status, 400, "{}", reply.text());
        assert_eq!(reply.error()["param"], param);
    }
    // After one a, no token is left.
    let fields = json!({"allowed_token_ids": [97], "bad_words": ["aa"]});
    let reply = post(server.address, COMPLETIONS, &body(&json!({}), fields)).await;
    assert_eq!(reply.status, 400, "{}", reply.text());
    let error = reply.error().clone();
    assert_eq!(error["code"], "nothing_to_draw", "{error}");
    assert_eq!(error["type"], "invalid_request_error");
    let mut stream = body(
        &json!({"stream": true}),
        json!({"allowed_token_ids": [97, 98], "bad_words": ["aa", "ab", "ba", "bb"]}),
    );
    stream["temperature"] = json!(0);
    let reply = post(server.address, COMPLETIONS, &stream).await;
    assert!(reply.text().contains("nothing_to_draw"), "{}", reply.text());
    assert!(!reply.text().contains("[DONE]"));
    // A format that demands a banned word ends in its middle.
    let fields = json!({"guided_choice": ["xyz"], "bad_words": ["yz"]});
    let reply = post(server.address, COMPLETIONS, &body(&json!({}), fields)).await;
    assert_eq!(
        (reply.status, &reply.error()["code"]),
        (400, &json!("nothing_to_draw"))
    );
    server.assert_at_rest().await;
}
