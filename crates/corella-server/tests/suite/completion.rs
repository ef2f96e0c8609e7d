//! `/v1/completions`.

use corella_core::SamplingParams;
use serde_json::{Value, json};

use crate::client::post;
use crate::fixture::{MODEL, Setup, TestServer};

const PATH: &str = "/v1/completions";

/// The text and the finish reason of one choice of a stream.
fn joined(chunks: &[Value], index: usize) -> (String, String) {
    let mut text = String::new();
    let mut finish = None;
    let choices = chunks
        .iter()
        .flat_map(|chunk| chunk["choices"].as_array().expect("choices"))
        .filter(|choice| choice["index"] == index);
    for choice in choices {
        assert_eq!(finish, None, "nothing follows a finish reason");
        text += choice["text"].as_str().expect("text");
        finish = choice["finish_reason"].as_str().map(str::to_owned);
    }
    (text, finish.expect("a finish reason"))
}

#[tokio::test]
async fn a_text_prompt_is_continued_as_the_model_alone_would() {
    let server = TestServer::start().await;
    let body = json!({"model": MODEL, "prompt": "the abc", "temperature": 0, "max_tokens": 40});
    let reply = post(server.address, PATH, &body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    let answer = reply.json();
    // t h e ␣ ab c
    let expected = server.greedy(&server.encode("the abc"), 40);
    assert_eq!(answer["object"], "text_completion");
    assert_eq!(answer["model"], MODEL);
    assert_eq!(answer["choices"][0]["text"], expected);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert_eq!(answer["choices"][0]["logprobs"], Value::Null);
    assert_eq!(
        answer["usage"],
        json!({
            "prompt_tokens": 6, "completion_tokens": 40, "total_tokens": 46,
            "prompt_tokens_details": {"cached_tokens": 0},
        })
    );
    server.assert_at_rest().await;
}

#[tokio::test]
async fn token_ids_and_arrays_of_prompts_are_prompts() {
    let server = TestServer::start().await;
    let tokens = server.encode("zebra");
    let one = server.greedy(&tokens, 16);
    let two = server.greedy(&server.encode("other"), 16);
    let cases = [
        (json!(tokens), vec![&one]),
        (json!([tokens]), vec![&one]),
        (json!(["zebra", "other"]), vec![&one, &two]),
        (json!([server.encode("other"), "zebra"]), vec![&two, &one]),
    ];
    for (prompt, expected) in cases {
        let body = json!({"prompt": prompt, "temperature": 0});
        let answer = post(server.address, PATH, &body).await.json();
        let choices = answer["choices"].as_array().expect("choices");
        assert_eq!(choices.len(), expected.len(), "{prompt}");
        for (index, text) in expected.into_iter().enumerate() {
            assert_eq!(choices[index]["index"], index);
            // OpenAI's default of `max_tokens` is 16 at this endpoint.
            assert_eq!(choices[index]["text"], *text, "{prompt}");
        }
    }
}

#[tokio::test]
async fn a_stream_says_what_the_whole_answer_says() {
    let server = TestServer::start().await;
    for stop in [json!(null), json!(["qu", "é"]), json!("e")] {
        let mut body = json!({
            "prompt": ["one", "two"], "n": 2, "seed": 5, "max_tokens": 60, "stop": stop,
            "temperature": 1.3,
        });
        let whole = post(server.address, PATH, &body).await.json();
        body["stream"] = json!(true);
        let reply = post(server.address, PATH, &body).await;
        assert_eq!(
            reply.header("content-type"),
            Some("text/event-stream; charset=utf-8")
        );
        let chunks = reply.chunks();
        assert!(chunks.len() > 4);
        for index in 0..4 {
            let (text, finish) = joined(&chunks, index);
            assert_eq!(text, whole["choices"][index]["text"]);
            assert_eq!(finish, whole["choices"][index]["finish_reason"]);
        }
        assert!(chunks.iter().all(|chunk| chunk.get("usage").is_none()));
    }
}

#[tokio::test]
async fn usage_comes_last_in_a_stream_that_asked_for_it() {
    let server = TestServer::start().await;
    let body = json!({
        "prompt": "hello", "max_tokens": 7, "n": 3, "stream": true,
        "stream_options": {"include_usage": true},
    });
    let mut chunks = post(server.address, PATH, &body).await.chunks();
    let last = chunks.pop().expect("a chunk");
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"]["prompt_tokens"], 5);
    assert_eq!(last["usage"]["completion_tokens"], 21);
    assert_eq!(last["usage"]["total_tokens"], 26);
    for chunk in &chunks {
        assert_eq!(chunk.get("usage"), Some(&Value::Null));
    }
    for index in 0..3 {
        assert_eq!(joined(&chunks, index).1, "length");
    }
}

#[tokio::test]
async fn choices_of_one_seed_differ_and_repeat() {
    let server = TestServer::start().await;
    let body = json!({"prompt": "dice", "n": 3, "seed": 77, "max_tokens": 30, "top_k": 10});
    let first = post(server.address, PATH, &body).await.json();
    let again = post(server.address, PATH, &body).await.json();
    assert_eq!(first["choices"], again["choices"]);
    for choice in 0..3 {
        let sampling = SamplingParams {
            temperature: 1.0,
            top_k: 10,
            seed: 77,
            choice,
            ..SamplingParams::GREEDY
        };
        let expected = server.oracle(&server.encode("dice"), &sampling, 30);
        assert_eq!(first["choices"][choice as usize]["text"], expected);
    }
    assert_ne!(first["choices"][0]["text"], first["choices"][1]["text"]);
}

#[tokio::test]
async fn without_a_seed_answers_differ() {
    let server = TestServer::start().await;
    let body = json!({"prompt": "dice", "max_tokens": 30});
    let first = post(server.address, PATH, &body).await.json();
    let second = post(server.address, PATH, &body).await.json();
    assert_ne!(first["choices"][0]["text"], second["choices"][0]["text"]);
}

#[tokio::test]
async fn a_stop_string_ends_its_choice_and_is_left_out() {
    let server = TestServer::start().await;
    let text = server.greedy(&server.encode("stop"), 60);
    let at = text.char_indices().nth(20).expect("20 characters").0;
    let stop: String = text[at..].chars().take(3).collect();
    let first = text.find(&stop).expect("it is there");
    for stream in [false, true] {
        let mut body = json!({
            "prompt": "stop", "temperature": 0, "max_tokens": 60, "stop": [stop, "\u{1}"],
            "stream": stream,
        });
        let read = async |body: &Value| {
            let reply = post(server.address, PATH, body).await;
            if stream {
                joined(&reply.chunks(), 0)
            } else {
                let choice = reply.json()["choices"][0].clone();
                assert_eq!(choice["stop_reason"], stop);
                (
                    choice["text"].as_str().expect("text").to_owned(),
                    choice["finish_reason"].as_str().expect("one").to_owned(),
                )
            }
        };
        let (found, finish) = read(&body).await;
        assert_eq!(found, text[..first]);
        assert_eq!(finish, "stop");
        body["include_stop_str_in_output"] = json!(true);
        assert_eq!(read(&body).await.0, text[..first + stop.len()]);
    }
    server.assert_at_rest().await;
}

#[tokio::test]
async fn nothing_ends_a_choice_before_min_tokens() {
    let server = Setup::new().start().await;
    let tokens = server.greedy_tokens(&server.encode("least"), 60);
    let text = |num: usize| server.tokenizer.decode(&tokens[..num], true).expect("text");
    // Look for a token that is a letter and comes again later.
    let (first, second) = (0..60)
        .flat_map(|first| (first + 2..60).map(move |second| (first, second)))
        .find(|&(first, second)| {
            let letter = (tokens[first] as u8) as char;
            tokens[first] < 128
                && letter.is_ascii_lowercase()
                && !text(first).contains(letter)
                && text(second).matches(letter).count() == 1
                && tokens[second] == tokens[first]
        })
        .expect("a letter comes twice");
    let stop = char::from(tokens[first] as u8).to_string();
    for (min_tokens, num_tokens) in [
        (0, first),
        (first, first),
        (first + 1, second),
        (second, second),
    ] {
        let body = json!({
            "prompt": "least", "temperature": 0, "max_tokens": 60, "stop": stop,
            "min_tokens": min_tokens,
        });
        let answer = post(server.address, PATH, &body).await.json();
        assert_eq!(
            answer["choices"][0]["text"],
            text(num_tokens),
            "{min_tokens}"
        );
        assert_eq!(answer["choices"][0]["stop_reason"], stop);
    }
}

#[tokio::test]
async fn default_stop_strings_are_those_of_requests_without_any() {
    let server = TestServer::start().await;
    let text = server.greedy(&server.encode("stop"), 60);
    let stop: String = text.chars().skip(20).take(3).collect();
    let mut setup = Setup::new();
    setup.serve.generation_defaults.stop = vec![stop.clone()];
    let server = setup.start().await;
    let mut body = json!({"prompt": "stop", "temperature": 0, "max_tokens": 60});
    let answer = post(server.address, PATH, &body).await.json();
    let before = text.find(&stop).expect("it is there");
    assert_eq!(answer["choices"][0]["text"], text[..before]);
    assert_eq!(answer["choices"][0]["stop_reason"], stop);
    body["stop"] = json!([]);
    let answer = post(server.address, PATH, &body).await.json();
    assert_eq!(answer["choices"][0]["text"], text);
}

#[tokio::test]
async fn end_and_stop_tokens_are_not_part_of_the_text() {
    let server = Setup::new().ending_at(11).start().await;
    let mut body = json!({"prompt": "end", "temperature": 0, "max_tokens": 30});
    let answer = post(server.address, PATH, &body).await.json();
    let text = server.greedy(&server.encode("end"), 10);
    assert_eq!(answer["choices"][0]["text"], text);
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    assert_eq!(answer["choices"][0]["stop_reason"], Value::Null);
    assert_eq!(answer["usage"]["completion_tokens"], 11);

    // The end token is then like any other token, and special tokens are not rendered.
    body["ignore_eos"] = json!(true);
    body["max_tokens"] = json!(12);
    let answer = post(server.address, PATH, &body).await.json();
    assert_eq!(answer["choices"][0]["text"], text);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");

    body["ignore_eos"] = json!(false);
    body["stop_token_ids"] = json!(server.encode(&text[..1]));
    let answer = post(server.address, PATH, &body).await.json();
    assert_eq!(answer["choices"][0]["text"], "");
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    assert_eq!(
        answer["choices"][0]["stop_reason"],
        body["stop_token_ids"][0]
    );
}

#[tokio::test]
async fn a_repeated_prompt_is_read_from_the_cache() {
    let server = TestServer::start().await;
    let prompt = "a prompt that fills some pages";
    let body = json!({"prompt": prompt, "temperature": 0});
    let cold = post(server.address, PATH, &body).await.json();
    let warm = post(server.address, PATH, &body).await.json();
    let cached = |answer: &Value| answer["usage"]["prompt_tokens_details"]["cached_tokens"].clone();
    assert_eq!(cold["choices"], warm["choices"]);
    assert_eq!(cached(&cold), 0);
    assert_eq!(cached(&warm), prompt.len() - 1);

    let salted = json!({"prompt": prompt, "temperature": 0, "cache_salt": "mine"});
    let other = post(server.address, PATH, &salted).await.json();
    assert_eq!(cached(&other), 0);
    assert_eq!(cold["choices"], other["choices"]);
}

#[tokio::test]
async fn log_probabilities_are_the_same_streamed_and_whole() {
    let server = TestServer::start().await;
    let mut body = json!({"prompt": "log", "temperature": 0, "max_tokens": 40, "logprobs": 2});
    let answer = post(server.address, PATH, &body).await.json();
    let choice = &answer["choices"][0];
    let columns = &choice["logprobs"];
    let rows = |column: &str| columns[column].as_array().expect("a column").clone();
    for column in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(rows(column).len(), 40, "{column}");
    }
    let text: Vec<char> = choice["text"].as_str().expect("text").chars().collect();
    for (token, offset) in rows("tokens").iter().zip(rows("text_offset")) {
        let (token, offset) = (
            token.as_str().expect("a token"),
            offset.as_u64().expect("one"),
        );
        if !token.contains('\u{fffd}') && !text.contains(&'\u{fffd}') {
            let found: String = text[offset as usize..][..token.chars().count()]
                .iter()
                .collect();
            assert_eq!(found, token);
        }
    }
    for (logprob, top) in rows("token_logprobs").iter().zip(rows("top_logprobs")) {
        let best = top.as_object().expect("alternatives").values();
        let best = best.map(|value| value.as_f64().expect("a number"));
        // Greedy draws the most likely token.
        assert_eq!(logprob.as_f64(), best.reduce(f64::max));
    }

    body["stream"] = json!(true);
    let chunks = post(server.address, PATH, &body).await.chunks();
    for column in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        let streamed: Vec<Value> = chunks
            .iter()
            .filter_map(|chunk| chunk["choices"][0]["logprobs"][column].as_array().cloned())
            .flatten()
            .collect();
        assert_eq!(streamed, rows(column), "{column}");
    }
}

#[tokio::test]
async fn echo_repeats_the_prompt_before_the_answer() {
    let server = TestServer::start().await;
    let tokens = server.encode("say é");
    let expected = format!("say é{}", server.greedy(&tokens, 16));
    for prompt in [json!("say é"), json!(tokens)] {
        let mut body = json!({"prompt": prompt, "echo": true, "temperature": 0});
        let answer = post(server.address, PATH, &body).await.json();
        assert_eq!(answer["choices"][0]["text"], expected);
        body["stream"] = json!(true);
        let chunks = post(server.address, PATH, &body).await.chunks();
        assert_eq!(joined(&chunks, 0).0, expected);
    }
}
