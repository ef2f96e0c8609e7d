//! llama-server's own API.

use corella_core::TokenId;
use serde_json::{Value, json};

use crate::client::{get, open_post, post};
use crate::fixture::{END, MODEL, Setup, TestServer};

const INFILL_TOKENS: &[&str] = &[
    "<fim_prefix>",
    "<fim_suffix>",
    "<fim_middle>",
    "<file_sep>",
    "<repo_name>",
];

async fn answer(server: &TestServer, path: &str, body: Value) -> Value {
    let reply = post(server.address, path, &body).await;
    assert_eq!(reply.status, 200, "{body}: {}", reply.text());
    reply.json()
}

#[tokio::test]
async fn a_completion_is_what_the_model_says() {
    let server = TestServer::start().await;
    let prompt = server.encode("once");
    let text = server.greedy(&prompt, 8);
    for path in ["/completion", "/completions"] {
        let body = json!({"prompt": "once", "n_predict": 8, "temperature": 0, "return_tokens": true,
            "cache_prompt": true, "id_slot": -1, "repeat_last_n": 64, "samplers": null});
        let answer = answer(&server, path, body).await;
        assert_eq!(answer["content"], text);
        assert_eq!(answer["tokens"], json!(server.greedy_tokens(&prompt, 8)));
        assert_eq!(answer["tokens_predicted"], 8);
        assert_eq!(answer["tokens_evaluated"], prompt.len());
        assert_eq!(answer["stop"], true);
        assert_eq!(answer["stop_type"], "limit");
        assert_eq!(answer["prompt"], "once");
        assert_eq!(answer["model"], MODEL);
        assert_eq!(answer["generation_settings"]["temperature"], 0.0);
        assert_eq!(answer["timings"]["predicted_n"], 8);
    }
    // The context ends an answer without another limit.
    let body = json!({"prompt": "once", "n_predict": -1, "temperature": 0, "ignore_eos": true});
    let whole = answer(&server, "/completion", body).await;
    assert_eq!(
        whole["tokens_predicted"],
        crate::fixture::MAX_MODEL_LEN as usize - prompt.len()
    );
    let body = json!({"prompt": "once", "n_predict": 0});
    let none = answer(&server, "/completion", body).await;
    assert_eq!(none["content"], "");
    assert_eq!(none["tokens_predicted"], 0);
    server.assert_at_rest().await;
}

#[tokio::test]
async fn a_stream_has_events_without_a_done_and_the_last_one_stops() {
    let server = TestServer::start().await;
    let prompt = server.encode("once");
    let body =
        json!({"prompt": "once", "n_predict": 8, "temperature": 0, "stream": true, "n_probs": 2});
    let reply = post(server.address, "/completion", &body).await;
    let events = reply.events();
    let (last, pieces) = events.split_last().expect("there are events");
    assert_eq!(last["stop"], true);
    assert_eq!(last["content"], "");
    assert_eq!(last["tokens_predicted"], 8);
    assert!(pieces.iter().all(|piece| piece["stop"] == false));
    let text: String = pieces
        .iter()
        .filter_map(|piece| piece["content"].as_str())
        .collect();
    assert_eq!(text, server.greedy(&prompt, 8));
    let rows: Vec<_> = pieces
        .iter()
        .filter_map(|piece| piece["completion_probabilities"].as_array())
        .flatten()
        .collect();
    let ids: Vec<_> = rows.iter().map(|row| row["id"].clone()).collect();
    assert_eq!(json!(ids), json!(server.greedy_tokens(&prompt, 8)));
    for row in rows {
        let top = row["top_logprobs"].as_array().expect("an array");
        assert_eq!(top.len(), 2);
        // Greedy sampling draws the first of the most likely tokens.
        assert_eq!(top[0]["id"], row["id"]);
    }
}

#[tokio::test]
async fn several_prompts_and_choices_are_an_array() {
    let server = TestServer::start().await;
    let body = json!({"prompt": ["once", "twice"], "n_predict": 4, "temperature": 0});
    let answers = answer(&server, "/completion", body).await;
    for (index, prompt) in ["once", "twice"].into_iter().enumerate() {
        assert_eq!(answers[index]["index"], index);
        assert_eq!(answers[index]["prompt"], prompt);
        assert_eq!(
            answers[index]["content"],
            server.greedy(&server.encode(prompt), 4)
        );
    }
    let body =
        json!({"prompt": server.encode("once"), "n_predict": 4, "temperature": 0, "n_cmpl": 3});
    let answers = answer(&server, "/completion", body).await;
    assert_eq!(answers.as_array().map(Vec::len), Some(3));
}

#[tokio::test]
async fn a_stop_word_and_an_end_are_told_apart() {
    let server = Setup::new().ending_at(5).start().await;
    let body = json!({"prompt": "once", "n_predict": 20, "temperature": 0});
    let ended = answer(&server, "/completion", body.clone()).await;
    assert_eq!(ended["stop_type"], "eos");
    let text = ended["content"].as_str().expect("a text");
    let word = text.chars().nth(2).expect("a character").to_string();
    let mut with_stop = body;
    with_stop["stop"] = json!([word]);
    let stopped = answer(&server, "/completion", with_stop).await;
    assert_eq!(stopped["stop_type"], "word");
    assert_eq!(stopped["stopping_word"], word);
    assert_eq!(
        stopped["content"],
        text.split(&word).next().expect("a beginning")
    );
}

#[tokio::test]
async fn an_answer_keeps_what_response_fields_name() {
    let server = TestServer::start().await;
    let fields = json!(["content", "timings/predicted_n", "nothing/of/that", ""]);
    let body =
        json!({"prompt": "once", "n_predict": 3, "temperature": 0, "response_fields": fields});
    let kept = answer(&server, "/completion", body).await;
    let text = server.greedy(&server.encode("once"), 3);
    assert_eq!(kept, json!({"content": text, "timings/predicted_n": 3}));
}

#[tokio::test]
async fn an_answer_follows_its_grammar() {
    let server = TestServer::start().await;
    let mut body =
        json!({"prompt": "once", "temperature": 0, "grammar": "root ::= \"yes\" | \"no\""});
    let content = answer(&server, "/completion", body.clone()).await["content"].clone();
    assert!(content == "yes" || content == "no", "{content}");
    body["json_schema"] = json!({"type": "null"});
    let reply = post(server.address, "/completion", &body).await;
    assert_eq!(reply.error()["param"], "grammar", "{}", reply.text());
}

#[tokio::test]
async fn a_biased_token_is_drawn_or_never_drawn() {
    let server = TestServer::start().await;
    let prompt = server.encode("once");
    let drawn = server.greedy_tokens(&prompt, 1)[0];
    let other = if drawn == TokenId::from(b'x') {
        "y"
    } else {
        "x"
    };
    let first = async |bias: Value| {
        let body = json!({"prompt": "once", "n_predict": 1, "temperature": 0, "return_tokens": true, "logit_bias": bias});
        answer(&server, "/completion", body).await["tokens"][0].clone()
    };
    assert_ne!(first(json!([[drawn, false]])).await, json!(drawn));
    assert_eq!(
        first(json!([[other, 100]])).await,
        json!(other.as_bytes()[0])
    );
    assert_eq!(first(json!({drawn.to_string(): 1.0})).await, json!(drawn));
}

#[tokio::test]
async fn what_would_change_an_answer_is_refused_by_name() {
    let server = TestServer::start().await;
    for (field, value) in [
        ("grammar", json!("root ::= other")),
        ("mirostat", json!(2)),
        ("samplers", json!(["top_k"])),
        ("typical_p", json!(0.5)),
        ("n_predict", json!("many")),
        ("n_probs", json!(1000)),
        ("logit_bias", json!([["a"]])),
        ("repeat_penalty", json!(-1)),
        ("input_suffix", json!("b")),
        ("n_predictt", json!(1)),
    ] {
        let mut body = json!({"prompt": "once", "n_predict": 2});
        body[field] = value;
        let reply = post(server.address, "/completion", &body).await;
        assert_eq!(reply.status, 400, "{field}: {}", reply.text());
        assert_eq!(reply.error()["param"], field);
    }
    let body = json!({"prompt": "once", "repeat_last_n": 64, "repeat_penalty": 1.1});
    let reply = post(server.address, "/completion", &body).await;
    assert_eq!(reply.error()["param"], "repeat_last_n");
    let body = json!({"n_predict": 2});
    let reply = post(server.address, "/completion", &body).await;
    assert_eq!(reply.error()["param"], "prompt");
}

#[tokio::test]
async fn a_middle_follows_other_files_prefix_and_suffix() {
    let server = Setup::new().with_tokens(INFILL_TOKENS).start().await;
    let [prefix, suffix, middle, separator, repository] = [1, 2, 3, 4, 5].map(|at| END + at);
    // llama.vim sends this body.
    let mut body = json!({
        "input_prefix": "left", "input_suffix": "right", "prompt": " on", "n_predict": 6, "stop": [], "n_indent": 0,
        "top_k": 40, "top_p": 0.9, "temperature": 0, "stream": false, "samplers": ["top_k", "top_p", "infill"],
        "cache_prompt": true, "t_max_prompt_ms": 500, "t_max_predict_ms": 1000, "id_slot": 0, "input_extra": [],
    });
    let mut tokens = vec![prefix];
    tokens.extend(server.encode("left on"));
    tokens.push(suffix);
    tokens.extend(server.encode("right"));
    tokens.push(middle);
    let found = answer(&server, "/infill", body.clone()).await;
    assert_eq!(found["content"], server.greedy(&tokens, 6));

    body["input_extra"] = json!([{"filename": "a.rs", "text": "fn a"}]);
    let mut with_files = vec![repository];
    with_files.extend(server.encode("myproject\n"));
    with_files.push(separator);
    with_files.extend(server.encode("a.rs\nfn a"));
    with_files.push(separator);
    with_files.extend(server.encode("filename\n"));
    with_files.extend(tokens);
    let found = answer(&server, "/infill", body).await;
    assert_eq!(found["tokens_evaluated"], with_files.len());
    assert_eq!(found["content"], server.greedy(&with_files, 6));

    // Samplers have llama.cpp's names.
    let mut body = json!({"input_prefix": "left", "n_predict": 1, "temperature": 0.5, "top_p": 0.5, "min_p": 0.5});
    for (samplers, [top_p, min_p, temperature]) in [
        (json!(["nucleus", "temp"]), [0.5, 0.0, 0.5]),
        (json!(["min-p", "dry"]), [1.0, 0.5, 1.0]),
    ] {
        body["samplers"] = samplers;
        let settings = answer(&server, "/infill", body.clone()).await["generation_settings"].take();
        assert_eq!(settings["top_p"], top_p, "{settings}");
        assert_eq!(settings["min_p"], min_p, "{settings}");
        assert_eq!(settings["temperature"], temperature, "{settings}");
    }
    body["samplers"] = json!(["top_k", "topk"]);
    let reply = post(server.address, "/infill", &body).await;
    assert_eq!(reply.status, 400, "{}", reply.text());
    assert_eq!(reply.error()["param"], "samplers");

    let without = TestServer::start().await;
    let reply = post(without.address, "/infill", &json!({"input_prefix": "left"})).await;
    assert_eq!(reply.status, 400, "{}", reply.text());
    assert_eq!(reply.error()["param"], "input_prefix");
}

#[tokio::test]
async fn a_vector_is_that_of_openais_endpoint() {
    let server = TestServer::start().await;
    let openai = async |normalize: bool| {
        let body = json!({"input": ["a fox", "b"], "normalize": normalize});
        answer(&server, "/v1/embeddings", body).await["data"].clone()
    };
    for (path, field, normalize) in [
        ("/embedding", "content", 2),
        ("/embeddings", "input", -1),
        ("/embedding", "input", 2),
    ] {
        let body = json!({field: ["a fox", "b"], "embd_normalize": normalize});
        let found = answer(&server, path, body).await;
        let expected = openai(normalize == 2).await;
        for index in 0..2 {
            assert_eq!(found[index]["index"], index);
            assert_eq!(
                found[index]["embedding"],
                json!([expected[index]["embedding"]])
            );
        }
    }
    let pooled = answer(
        &server,
        "/pooling",
        json!({"input": ["a fox", "b"], "task": "embed"}),
    )
    .await;
    let expected = openai(true).await;
    for index in 0..2 {
        assert_eq!(pooled["data"][index]["object"], "pooling");
        assert_eq!(pooled["data"][index]["data"], expected[index]["embedding"]);
        assert!(pooled["data"][index].get("embedding").is_none());
    }
    for (path, body, field) in [
        (
            "/embedding",
            json!({"content": "a", "embd_normalize": 0}),
            "embd_normalize",
        ),
        ("/embedding", json!({}), "content"),
        ("/embedding", json!({"content": "a", "input": "b"}), "input"),
        (
            "/pooling",
            json!({"input": "a", "task": "token_embed"}),
            "task",
        ),
        ("/classify", json!({"input": "a"}), "model"),
    ] {
        let reply = post(server.address, path, &body).await;
        assert_eq!(reply.status, 400, "{path}: {}", reply.text());
        assert_eq!(reply.error()["param"], field, "{path}");
    }
}

#[tokio::test]
async fn a_template_writes_what_tokenize_counts() {
    let server = TestServer::start().await;
    let mut body = json!({"messages": [{"role": "user", "content": "Hi"}]});
    let found = answer(&server, "/apply-template", body.clone()).await;
    assert_eq!(found["prompt"], "<|user|>Hi<|end|><|assistant|>");
    // Fields of a chat are accepted, and change nothing.
    body["temperature"] = json!(0.5);
    body["max_tokens"] = json!(5);
    assert_eq!(answer(&server, "/apply-template", body).await, found);
    let reply = post(server.address, "/apply-template", &json!({"prompt": "Hi"})).await;
    assert_eq!(reply.error()["param"], "prompt");
}

/// A character of several bytes has several tokens here, each without a text of its own.
#[tokio::test]
async fn content_is_tokenised_as_in_llama_server() {
    let server = TestServer::start().await;
    let tokens = server.encode("abé");
    let found = answer(&server, "/tokenize", json!({"content": "abé"})).await;
    assert_eq!(found, json!({"tokens": tokens}));
    let text = answer(&server, "/detokenize", found).await;
    assert_eq!(text["content"], "abé");

    let body = json!({"content": "abé<|end|>", "with_pieces": true});
    let found = answer(&server, "/tokenize", body).await;
    let pieces = found["tokens"].as_array().expect("an array");
    let pieces: Vec<_> = pieces.iter().map(|token| token["piece"].clone()).collect();
    let expected = json!(["ab", [0xc3], [0xa9], "<|end|>"]);
    assert_eq!(json!(pieces), expected);
    assert_eq!(found["tokens"][0]["id"], tokens[0]);

    for (body, param) in [
        (json!({"content": "a", "prompt": "a"}), "prompt"),
        (
            json!({"content": "a", "messages": [{"role": "user", "content": "a"}]}),
            "messages",
        ),
        (
            json!({"content": "a", "return_token_strs": true}),
            "return_token_strs",
        ),
        (
            json!({"content": "a", "parse_special": false}),
            "parse_special",
        ),
        (json!({"prompt": "a", "with_pieces": true}), "with_pieces"),
        (json!({"content": 5}), "content"),
    ] {
        let reply = post(server.address, "/tokenize", &body).await;
        assert_eq!(reply.status, 400, "{body}: {}", reply.text());
        assert_eq!(reply.error()["param"], param, "{body}");
    }
    // Other endpoints explain the field.
    let reply = post(server.address, "/v1/completions", &json!({"content": "a"})).await;
    let message = reply.error()["message"].to_string();
    assert!(message.contains("use prompt or messages"), "{message}");
}

#[tokio::test]
async fn the_server_tells_its_properties_and_slots() {
    let mut setup = Setup::new().holding_behind(0);
    setup.scheduler.max_num_seqs = 2;
    setup.serve.generation_defaults.top_k = Some(7);
    let server = setup.start().await;
    let props = get(server.address, "/props").await.json();
    assert_eq!(props["total_slots"], 2);
    assert_eq!(props["model_alias"], MODEL);
    assert_eq!(props["default_generation_settings"]["params"]["top_k"], 7);
    assert_eq!(
        props["default_generation_settings"]["n_ctx"],
        crate::fixture::MAX_MODEL_LEN
    );
    let template = props["chat_template"].as_str().expect("a text");
    assert!(template.contains("message.role"), "{template}");
    assert!(
        !template.contains("corella"),
        "it is shown as it was given: {template}"
    );

    let busy = |slots: &Value| -> Vec<bool> {
        let slots = slots.as_array().expect("an array");
        slots
            .iter()
            .map(|slot| slot["is_processing"] == true)
            .collect()
    };
    assert_eq!(
        get(server.address, "/slots?fail_on_no_slot=1").await.status,
        200
    );
    let body = json!({"prompt": "once", "n_predict": 4, "n_cmpl": 2});
    let first = open_post(server.address, "/completion", &body).await;
    server.has_running(2).await;
    let slots = get(server.address, "/slots").await.json();
    assert_eq!(busy(&slots), [true, true]);
    let load = get(server.address, "/load").await.json();
    assert_eq!(load, json!({"server_load": 1}));
    let reply = get(server.address, "/slots?fail_on_no_slot=1").await;
    assert_eq!(reply.status, 503);
    assert_eq!(reply.error()["code"], "no_slot");
    drop(first);
    server.gate().open();
    server.assert_at_rest().await;
}
