//! Vectors of texts: `/v1/embeddings`, `/score` and `/rerank`.

use corella_core::{Pooling, TokenId};
use corella_test::{wait_until, wait_until_asked, wait_until_async};
use serde_json::{Value, json};

use crate::client::{get, open_post, post, read_reply};
use crate::fixture::{MAX_MODEL_LEN, MODEL, Setup, TestServer};

const PATH: &str = "/v1/embeddings";

/// The mock's hidden state of a prompt, cut to `len` values and scaled to length 1.
fn vector(server: &TestServer, tokens: &[TokenId], pooling: Pooling, len: usize) -> Vec<f64> {
    let state = server.mock.lone_hidden_state(tokens, pooling);
    let values: Vec<f64> = state.iter().take(len).map(|&x| f64::from(x)).collect();
    let length = values.iter().map(|x| x * x).sum::<f64>().sqrt();
    values.iter().map(|x| x / length).collect()
}

fn numbers(value: &Value) -> Vec<f64> {
    let list = value.as_array().expect("a list");
    let numbers = list.iter().map(|number| number.as_f64().expect("a number"));
    numbers.collect()
}

fn assert_close(found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() < 1e-6, "{found} {expected}");
    }
}

#[tokio::test]
async fn each_form_of_input_gets_the_vectors_of_the_model() {
    let server = TestServer::start().await;
    let (a, b) = (server.encode("a fox"), server.encode("the lantern"));
    let forms = [
        (json!("a fox"), vec![&a]),
        (json!(["a fox", "the lantern", "a fox"]), vec![&a, &b, &a]),
        (json!(b), vec![&b]),
        (json!([b, a]), vec![&b, &a]),
    ];
    for (input, prompts) in forms {
        for (name, pooling) in [("last", Pooling::LastToken), ("mean", Pooling::Mean)] {
            let body = json!({"input": input, "model": MODEL, "pooling": name, "user": "u"});
            let reply = post(server.address, PATH, &body).await;
            assert_eq!(reply.status, 200, "{}", reply.text());
            let answer = reply.json();
            assert_eq!(answer["object"], "list");
            assert_eq!(answer["model"], MODEL);
            let num_tokens: usize = prompts.iter().map(|prompt| prompt.len()).sum();
            let usage = json!({"prompt_tokens": num_tokens, "total_tokens": num_tokens});
            assert_eq!(answer["usage"], usage);
            let data = answer["data"].as_array().expect("a list");
            assert_eq!(data.len(), prompts.len());
            for (index, (item, prompt)) in data.iter().zip(&prompts).enumerate() {
                assert_eq!(item["index"], index);
                assert_eq!(item["object"], "embedding");
                let expected = vector(&server, prompt, pooling, 16);
                assert_close(&numbers(&item["embedding"]), &expected);
            }
        }
    }
    server.assert_at_rest().await;
}

#[tokio::test]
async fn vectors_are_shortened_left_as_they_are_or_written_as_bytes() {
    let server = TestServer::start().await;
    let tokens = server.encode("a fox");
    let embedding = async |fields: Value| {
        let mut body = json!({"input": "a fox"});
        let more = fields.as_object().expect("an object").clone();
        body.as_object_mut().expect("an object").extend(more);
        let reply = post(server.address, PATH, &body).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        reply.json()["data"][0]["embedding"].clone()
    };
    for len in [1, 5, 16] {
        let found = embedding(json!({"dimensions": len})).await;
        let expected = vector(&server, &tokens, Pooling::LastToken, len);
        assert_close(&numbers(&found), &expected);
    }
    let raw = server.mock.lone_hidden_state(&tokens, Pooling::LastToken);
    let found = embedding(json!({"normalize": false, "dimensions": 3})).await;
    let raw: Vec<f64> = raw.iter().take(3).map(|&x| f64::from(x)).collect();
    assert_close(&numbers(&found), &raw);

    // A vector of one value and length 1 is 1.0 or -1.0. The bytes of these are 00 00 80 3f and 00 00 80 bf in f32.
    let found = embedding(json!({"encoding_format": "base64", "dimensions": 1})).await;
    let expected = match raw[0] > 0.0 {
        true => "AACAPw==",
        false => "AACAvw==",
    };
    assert_eq!(found, expected);
}

#[tokio::test]
async fn what_cannot_be_embedded_is_refused_and_named() {
    let server = TestServer::start().await;
    let long = "x".repeat(MAX_MODEL_LEN as usize + 1);
    let cases = [
        (json!({}), "input"),
        (json!({"input": []}), "input"),
        (json!({"input": ""}), "input"),
        (json!({"input": ["a", ""]}), "input[1]"),
        (json!({"input": ["a", long]}), "input[1]"),
        (json!({"input": [[1], [1, 70_000]]}), "input[1][1]"),
        (json!({"input": vec!["a"; 2049]}), "input"),
        (json!({"input": {"text": "a"}}), "input"),
        (json!({"input": "a", "dimensions": 0}), "dimensions"),
        (json!({"input": "a", "dimensions": 17}), "dimensions"),
        (
            json!({"input": "a", "encoding_format": "int8"}),
            "encoding_format",
        ),
        (json!({"input": "a", "pooling": "cls"}), "pooling"),
        (json!({"input": "a", "cache_salt": ""}), "cache_salt"),
        (
            json!({"input": "a", "truncate_prompt_tokens": 5}),
            "truncate_prompt_tokens",
        ),
        (json!({"inputs": "a"}), "inputs"),
        (json!({"input": "a", "temperature": 1}), "temperature"),
    ];
    for (body, param) in cases {
        let reply = post(server.address, PATH, &body).await;
        assert_eq!(reply.status, 400, "{param}: {}", reply.text());
        assert_eq!(reply.error()["param"], param, "{}", reply.text());
    }
    let reply = post(server.address, PATH, &json!({"input": "a", "model": "b"})).await;
    assert_eq!(reply.status, 404);
    server.assert_at_rest().await;
}

/// The inputs of a call exceed the limits of waiting and running requests, so they take turns. Requests that generate
/// text are served meanwhile.
#[tokio::test]
async fn a_call_of_many_inputs_leaves_room_for_others() {
    let mut setup = Setup::new();
    setup.scheduler.max_num_seqs = 4;
    setup.scheduler.max_queued_requests = 6;
    let server = setup.start().await;
    let texts: Vec<String> = (0..200).map(|index| format!("text {index}")).collect();
    let many = json!({"input": texts, "pooling": "mean"});
    let other = json!({"input": "another", "dimensions": 4});
    // The server runs on this thread. While the wait blocks it, the engine ends or refuses all prompts that it was
    // given, so the server finds many ends at once.
    let holdups = async {
        loop {
            wait_until("the engine has ended what it was given", || {
                server.engine.stats().num_live_requests == 0
            });
            tokio::task::yield_now().await;
        }
    };
    let answers = async {
        tokio::join!(
            post(server.address, PATH, &many),
            post(server.address, PATH, &other)
        )
    };
    let (many, other) = tokio::select! {
        answers = answers => answers,
        () = holdups => unreachable!("they end with the answers"),
    };
    assert_eq!(many.status, 200, "{}", many.text());
    assert!([200, 429].contains(&other.status), "{}", other.text());
    let many = many.json();
    for (index, text) in texts.iter().enumerate() {
        let expected = vector(&server, &server.encode(text), Pooling::Mean, 16);
        assert_close(&numbers(&many["data"][index]["embedding"]), &expected);
    }
    server.assert_at_rest().await;
    let pooled = ["finished_reason=\"pooled\""];
    let pooled = server
        .metric("corella_request_success_total", &pooled)
        .await;
    assert!(pooled.is_some_and(|count| count >= 200.0));
    let tokens = server.metric("corella_prompt_tokens_total", &[]).await;
    let num_tokens: usize = texts.iter().map(|text| server.encode(text).len()).sum();
    assert!(tokens.is_some_and(|count| count >= num_tokens as f64));
}

/// A call has at most `max_num_choices` inputs in the engine at a time.
#[tokio::test]
async fn a_call_of_many_inputs_does_not_fill_the_queue() {
    let mut setup = Setup::new().holding_behind(0);
    setup.scheduler.max_num_seqs = 1;
    setup.scheduler.max_queued_requests = 5;
    setup.serve.max_num_choices = 4;
    let server = setup.start().await;
    let num_live = async |num: usize| {
        wait_until_async("they are in the engine", || {
            server.engine.stats().num_live_requests == num
        })
        .await;
    };
    let many = json!({"input": vec!["a text"; 20]});
    let mut many = open_post(server.address, PATH, &many).await;
    num_live(4).await;
    let mut other = open_post(server.address, PATH, &json!({"input": "another"})).await;
    num_live(5).await;
    server.gate().open();
    assert_eq!(read_reply(&mut other).await.status, 200);
    assert_eq!(read_reply(&mut many).await.status, 200);
    server.assert_at_rest().await;
}

#[tokio::test]
async fn a_client_that_leaves_aborts_its_inputs() {
    let server = Setup::new().holding_behind(0).start().await;
    let body = json!({"input": vec!["a text of some length"; 500]});
    let socket = open_post(server.address, PATH, &body).await;
    wait_until_async("it runs", || {
        server.engine.stats().scheduler.num_running > 0
    })
    .await;
    drop(socket);
    wait_until_asked("it is counted", async || {
        server.num_counted(PATH, 499).await == 1.0
    })
    .await;
    server.gate().open();
    server.assert_at_rest().await;
}

/// The hidden state of the last token may be computed after cached rows. The vector stays the same.
#[tokio::test]
async fn cached_prefixes_change_no_vector() {
    let server = TestServer::start().await;
    let text = "a text that fills several pages of four";
    let body = json!({"prompt": text, "max_tokens": 2});
    post(server.address, "/v1/completions", &body).await;
    let before = server.engine.stats().scheduler.num_prefix_hit_tokens;
    let reply = post(server.address, PATH, &json!({"input": text})).await;
    let found = numbers(&reply.json()["data"][0]["embedding"]);
    assert_close(
        &found,
        &vector(&server, &server.encode(text), Pooling::LastToken, 16),
    );
    let hits = server.engine.stats().scheduler.num_prefix_hit_tokens;
    assert!(hits > before);
    let body = json!({"input": text, "pooling": "mean"});
    let reply = post(server.address, PATH, &body).await;
    let found = numbers(&reply.json()["data"][0]["embedding"]);
    assert_close(
        &found,
        &vector(&server, &server.encode(text), Pooling::Mean, 16),
    );
    assert_eq!(server.engine.stats().scheduler.num_prefix_hit_tokens, hits);
}

/// The cosine of the angle between the vectors of two texts.
fn cosine(server: &TestServer, a: &str, b: &str) -> f64 {
    let [a, b] = [a, b].map(|text| vector(server, &server.encode(text), Pooling::LastToken, 16));
    a.iter().zip(&b).map(|(a, b)| a * b).sum()
}

#[tokio::test]
async fn texts_are_scored_in_pairs_or_one_with_all() {
    let server = TestServer::start().await;
    let texts = ["a fox", "the lantern", "a fox"];
    for path in ["/score", "/v1/score"] {
        for (first, second, pairs) in [
            (json!("one"), json!("two"), vec![("one", "two")]),
            (
                json!("a fox"),
                json!(texts),
                texts.map(|text| ("a fox", text)).to_vec(),
            ),
            (
                json!(["x", "y"]),
                json!(["y", "z"]),
                vec![("x", "y"), ("y", "z")],
            ),
        ] {
            let body = json!({"text_1": first, "text_2": second});
            let reply = post(server.address, path, &body).await;
            assert_eq!(reply.status, 200, "{}", reply.text());
            let answer = reply.json();
            let data = answer["data"].as_array().expect("a list");
            assert_eq!(data.len(), pairs.len());
            for (index, (item, (a, b))) in data.iter().zip(pairs).enumerate() {
                assert_eq!(item["object"], "score");
                assert_eq!(item["index"], index);
                assert_close(
                    &[item["score"].as_f64().expect("a number")],
                    &[cosine(&server, a, b)],
                );
            }
        }
    }
    for (body, param) in [
        (json!({"text_1": "a"}), "text_2"),
        (json!({"text_1": ["a", "b"], "text_2": ["c"]}), "text_2"),
        (
            json!({"text_1": ["a", ""], "text_2": ["c", "d"]}),
            "text_1[1]",
        ),
        (json!({"queries": "a", "text_2": "b"}), "queries"),
    ] {
        let reply = post(server.address, "/score", &body).await;
        assert_eq!(reply.status, 400, "{}", reply.text());
        assert_eq!(reply.error()["param"], param);
    }
}

#[tokio::test]
async fn documents_are_ordered_by_their_scores() {
    let server = TestServer::start().await;
    let documents = ["a fox", "the lantern", "what?", "a fox", "nothing"];
    let mut expected: Vec<_> = documents
        .iter()
        .enumerate()
        .map(|(index, text)| (index, cosine(&server, "a fox", text)))
        .collect();
    expected.sort_by(|a, b| b.1.total_cmp(&a.1));
    assert_eq!(
        [expected[0].0, expected[1].0],
        [0, 3],
        "the same text comes first"
    );
    for (path, top_n) in [("/rerank", 0), ("/v1/rerank", 2), ("/v2/rerank", 9)] {
        let body = json!({"query": "a fox", "documents": documents, "top_n": top_n});
        let reply = post(server.address, path, &body).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        let answer = reply.json();
        let results = answer["results"].as_array().expect("a list");
        assert_eq!(results.len(), if top_n == 2 { 2 } else { 5 });
        for (item, &(index, score)) in results.iter().zip(&expected) {
            assert_eq!(item["index"], index);
            assert_eq!(item["document"]["text"], documents[index]);
            assert_close(
                &[item["relevance_score"].as_f64().expect("a number")],
                &[score],
            );
        }
    }
    let body = json!({"query": "a", "documents": ["b"], "return_documents": false});
    let answer = post(server.address, "/rerank", &body).await.json();
    assert_eq!(answer["results"][0].get("document"), None);
    // SGLang's gateway writes such a body for a request without a model.
    for (model, status) in [("unknown", 200), ("unknown-2", 404)] {
        let body = json!({
            "query": "a", "documents": ["b"], "model": model, "top_k": null, "return_documents": true,
            "rid": null, "user": null,
        });
        let reply = post(server.address, "/v1/rerank", &body).await;
        assert_eq!(reply.status, status, "{}", reply.text());
        if status == 200 {
            assert_eq!(reply.json()["model"], MODEL);
        }
    }
    let reply = post(
        server.address,
        "/rerank",
        &json!({"query": "a", "documents": []}),
    )
    .await;
    assert_eq!(reply.error()["param"], "documents");
}

#[tokio::test]
async fn the_document_describes_them() {
    let server = TestServer::start().await;
    let document = get(server.address, "/openapi.json").await.json();
    let fields = &document["components"]["schemas"]["EmbeddingsRequest"]["properties"];
    assert_eq!(fields["dimensions"]["maximum"], 16);
    assert_eq!(fields["input"]["anyOf"][2]["maxItems"], 2048);
    assert_eq!(fields.get("user"), None);
}

#[tokio::test]
async fn a_model_without_a_head_makes_embeddings_only() {
    let mut setup = Setup::new();
    setup.serve.has_head = false;
    let server = setup.start().await;
    let reply = post(server.address, PATH, &json!({"input": "a fox"})).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    let scored = json!({"text_1": "a fox", "text_2": "the lantern"});
    assert_eq!(post(server.address, "/score", &scored).await.status, 200);
    let embedded = json!({"model": MODEL, "input": "a fox"});
    assert_eq!(
        post(server.address, "/api/embed", &embedded).await.status,
        200
    );
    let counted = json!({"model": MODEL, "messages": [{"role": "user", "content": "a"}]});
    let reply = post(server.address, "/v1/messages/count_tokens", &counted).await;
    assert_eq!(reply.status, 200, "{}", reply.text());

    let message = json!([{"role": "user", "content": "a"}]);
    for (path, body) in [
        ("/v1/completions", json!({"prompt": "a"})),
        (
            "/v1/chat/completions",
            json!({"messages": message, "stream": true}),
        ),
        ("/v1/responses", json!({"input": "a"})),
        (
            "/v1/messages",
            json!({"max_tokens": 1, "messages": message}),
        ),
        ("/api/chat", json!({"messages": message})),
        ("/api/generate", json!({"prompt": "a"})),
    ] {
        let mut body = body;
        body["model"] = MODEL.into();
        let reply = post(server.address, path, &body).await;
        assert_eq!(reply.status, 400, "{path}: {}", reply.text());
        assert!(reply.text().contains("lm_head"), "{path}: {}", reply.text());
        let error = &reply.json()["error"];
        if path.starts_with("/v1/") && path != "/v1/messages" {
            assert_eq!(error["param"], "model", "{path}");
        }
    }
    let shown = post(server.address, "/api/show", &json!({"model": MODEL})).await;
    assert_eq!(shown.json()["capabilities"], json!(["embedding"]));
    server.assert_at_rest().await;
}
