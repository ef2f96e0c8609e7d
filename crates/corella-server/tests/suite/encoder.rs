//! Endpoints on an encoder's hidden states: other poolings, heads, prompts, and scores of classes.

use corella_core::{Pooling, TokenId};
use corella_model::{ClassHead, HeadActivation, HeadStep, SentenceConfig, VectorHead};
use serde_json::{Value, json};

use crate::client::post;
use crate::fixture::{Setup, TestServer};

fn numbers(value: &Value) -> Vec<f64> {
    let list = value.as_array().expect("a list").iter();
    list.map(|number| number.as_f64().expect("a number"))
        .collect()
}

fn assert_close(found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() < 1e-5, "{found} {expected}");
    }
}

/// Returns a dense layer with 16 inputs and an output for each row. `row(i)` is the weight of input `i`.
fn dense(rows: &[fn(usize) -> f32], activation: HeadActivation) -> HeadStep {
    let weights = rows.iter().flat_map(|row| (0..16).map(row));
    HeadStep::Dense {
        weight: weights.collect(),
        bias: vec![0.5; rows.len()],
        activation,
    }
}

async fn start(sentence: SentenceConfig) -> TestServer {
    let mut setup = Setup::new();
    setup.serve.has_head = false;
    setup.serve.is_encoder = true;
    setup.serve.sentence = sentence;
    setup.start().await
}

/// Returns a head whose class `n` scores the sum of the state's elements times `n + 1`.
fn classes(labels: &[&str]) -> ClassHead {
    let rows: Vec<fn(usize) -> f32> = vec![|_| 1.0, |_| 2.0, |_| 3.0];
    ClassHead {
        pooling: Pooling::FirstToken,
        head: VectorHead::new(vec![dense(&rows[..labels.len()], HeadActivation::None)]),
        labels: labels.iter().map(|&label| label.to_owned()).collect(),
        is_multi_label: false,
        is_regression: false,
        score_activation: None,
    }
}

/// The sum of the elements of a prompt's first hidden state.
fn first_sum(server: &TestServer, tokens: &[TokenId]) -> f64 {
    let state = server.mock.lone_hidden_state(tokens, Pooling::FirstToken);
    state.iter().copied().map(f64::from).sum()
}

#[tokio::test]
async fn an_encoder_pools_as_its_files_or_the_request_say() {
    let server = start(SentenceConfig {
        pooling: Some(Pooling::FirstToken),
        is_normalised: Some(false),
        ..SentenceConfig::default()
    })
    .await;
    let tokens = server.encode("a fox");
    for (name, pooling) in [
        (Value::Null, Pooling::FirstToken),
        ("cls".into(), Pooling::FirstToken),
        ("max".into(), Pooling::Max),
        ("mean".into(), Pooling::Mean),
        ("last".into(), Pooling::LastToken),
    ] {
        let body = json!({"input": "a fox", "pooling": name});
        let reply = post(server.address, "/v1/embeddings", &body).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        let state = server.mock.lone_hidden_state(&tokens, pooling);
        let expected: Vec<f64> = state.iter().copied().map(f64::from).collect();
        assert_close(&numbers(&reply.json()["data"][0]["embedding"]), &expected);
    }
    server.assert_at_rest().await;
}

#[tokio::test]
async fn a_decoder_has_no_first_token_to_pool() {
    let server = TestServer::start().await;
    for pooling in ["cls", "max"] {
        let body = json!({"input": "a fox", "pooling": pooling});
        let reply = post(server.address, "/v1/embeddings", &body).await;
        assert_eq!(reply.status, 400);
        assert_eq!(reply.error()["param"], "pooling");
    }
}

#[tokio::test]
async fn what_is_behind_the_pooling_shapes_vectors_and_cosines() {
    let rows: [fn(usize) -> f32; 3] = [|_| 1.0, |at| at as f32, |at| -(at as f32)];
    let server = start(SentenceConfig {
        pooling: Some(Pooling::Mean),
        head: VectorHead::new(vec![dense(&rows, HeadActivation::Relu)]),
        is_normalised: Some(true),
        ..SentenceConfig::default()
    })
    .await;
    let vector = |text: &str| -> Vec<f64> {
        let state = server
            .mock
            .lone_hidden_state(&server.encode(text), Pooling::Mean);
        let outputs = rows.iter().map(|row| {
            let products = state.iter().enumerate();
            let sum: f64 = products
                .map(|(at, &x)| f64::from(x) * f64::from(row(at)))
                .sum();
            (sum + 0.5).max(0.0)
        });
        let outputs: Vec<f64> = outputs.collect();
        let length = outputs.iter().map(|x| x * x).sum::<f64>().sqrt();
        outputs.iter().map(|x| x / length).collect()
    };
    let (a, b) = (vector("a fox"), vector("the lantern"));
    for (path, body, field) in [
        (
            "/v1/embeddings",
            json!({"input": "a fox"}),
            "/data/0/embedding",
        ),
        ("/pooling", json!({"input": "a fox"}), "/data/0/data"),
        ("/embedding", json!({"content": "a fox"}), "/0/embedding/0"),
        (
            "/api/embed",
            json!({"model": "org/mock", "input": "a fox"}),
            "/embeddings/0",
        ),
    ] {
        let reply = post(server.address, path, &body).await;
        assert_eq!(reply.status, 200, "{path}: {}", reply.text());
        let answer = reply.json();
        assert_close(&numbers(answer.pointer(field).expect(field)), &a);
    }
    let body = json!({"text_1": "a fox", "text_2": "the lantern"});
    let answer = post(server.address, "/score", &body).await.json();
    let cosine: f64 = a.iter().zip(&b).map(|(a, b)| a * b).sum();
    assert_close(
        &[answer["data"][0]["score"].as_f64().expect("a score")],
        &[cosine],
    );
    let long = json!({"input": "a fox", "dimensions": 4});
    let reply = post(server.address, "/v1/embeddings", &long).await;
    assert_eq!(reply.error()["param"], "dimensions");
}

#[tokio::test]
async fn prompts_are_written_before_texts() {
    let prompts = [("query", "find: "), ("document", "text: ")];
    let prompts = prompts.map(|(name, prompt)| (name.to_owned(), prompt.to_owned()));
    let server = start(SentenceConfig {
        pooling: Some(Pooling::Mean),
        prompts: prompts.into(),
        default_prompt: Some("document".to_owned()),
        ..SentenceConfig::default()
    })
    .await;
    let embedding = async |body: Value| {
        let reply = post(server.address, "/v1/embeddings", &body).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        reply.json()["data"][0]["embedding"].clone()
    };
    let query = embedding(json!({"input": "a fox", "prompt_name": "query"})).await;
    let unnamed = embedding(json!({"input": "a fox"})).await;
    // Token ids are not changed.
    let tokens = |text: &str| embedding(json!({"input": server.encode(text)}));
    assert_eq!(query, tokens("find: a fox").await);
    assert_eq!(unnamed, tokens("text: a fox").await);

    let body = json!({"query": "a fox", "documents": ["the lantern"]});
    let ranked = post(server.address, "/rerank", &body).await.json();
    let texts = json!({"text_1": server.encode("find: a fox"), "text_2": server.encode("text: the lantern")});
    let scored = post(server.address, "/score", &texts).await.json();
    assert_eq!(
        ranked["results"][0]["relevance_score"],
        scored["data"][0]["score"]
    );

    let body = json!({"input": "a fox", "prompt_name": "poem"});
    let reply = post(server.address, "/v1/embeddings", &body).await;
    assert_eq!(reply.status, 400);
    assert_eq!(reply.error()["param"], "prompt_name");
}

#[tokio::test]
async fn a_text_has_the_class_of_the_highest_score() {
    let server = start(SentenceConfig {
        classes: Some(classes(&["one", "two", "three"])),
        ..SentenceConfig::default()
    })
    .await;
    let texts = ["a fox", "the lantern"];
    let reply = post(server.address, "/classify", &json!({"input": texts})).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    let answer = reply.json();
    assert_eq!(answer["object"], "list");
    for (index, text) in texts.iter().enumerate() {
        let sum = first_sum(&server, &server.encode(text));
        let weights = [1.0, 2.0, 3.0].map(|times| (times * sum).exp());
        let total: f64 = weights.iter().sum();
        let item = &answer["data"][index];
        assert_eq!(item["index"], index);
        assert_eq!(item["num_classes"], 3);
        assert_eq!(item["label"], if sum > 0.0 { "three" } else { "one" });
        assert_close(
            &numbers(&item["probs"]),
            &weights.map(|weight| weight / total),
        );
    }
    for (path, body, param) in [
        ("/score", json!({"text_1": "a", "text_2": "b"}), "model"),
        (
            "/rerank",
            json!({"query": "a", "documents": ["b"]}),
            "model",
        ),
        ("/v1/embeddings", json!({"input": "a"}), "model"),
        ("/classify", json!({}), "input"),
        (
            "/classify",
            json!({"input": "a", "pooling": "mean"}),
            "pooling",
        ),
        ("/v1/completions", json!({"prompt": "a"}), "model"),
    ] {
        let reply = post(server.address, path, &body).await;
        assert_eq!(reply.status, 400, "{path}");
        assert_eq!(reply.error()["param"], param, "{path}");
    }
    server.assert_at_rest().await;
}

/// Qwen3-Reranker and others are decoders whose chat templates join two texts.
#[tokio::test]
async fn a_decoder_reads_a_pair_as_a_conversation() {
    let mut setup = Setup::new();
    let mut head = classes(&["fits"]);
    head.pooling = Pooling::LastToken;
    setup.serve.sentence = SentenceConfig {
        classes: Some(head),
        prompts: [("query".to_owned(), "judge".to_owned())].into(),
        default_prompt: Some("query".to_owned()),
        ..SentenceConfig::default()
    };
    let server = setup.start().await;
    let body = json!({"query": "a fox", "documents": ["a cub"]});
    let reply = post(server.address, "/rerank", &body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    let text = "<|system|>judge<|end|><|query|>a fox<|end|><|document|>a cub<|end|>";
    let tokens = server.encode(text);
    let state = server.mock.lone_hidden_state(&tokens, Pooling::LastToken);
    let sum: f64 = state.iter().copied().map(f64::from).sum();
    let score = reply.json()["results"][0]["relevance_score"].as_f64();
    assert_close(
        &[score.expect("a number")],
        &[1.0 / (1.0 + (-sum - 0.5).exp())],
    );
    let reply = post(server.address, "/classify", &json!({"input": "a fox"})).await;
    assert_eq!(reply.status, 400);
}

#[tokio::test]
async fn a_pair_is_one_prompt_with_one_score() {
    let server = start(SentenceConfig {
        classes: Some(classes(&["fits"])),
        ..SentenceConfig::default()
    })
    .await;
    let documents = ["a cub", "the lantern"];
    let body = json!({"query": "a fox", "documents": documents});
    let reply = post(server.address, "/rerank", &body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    let answer = reply.json();
    let mut num_tokens = 0;
    for (index, document) in documents.iter().enumerate() {
        // This tokenizer puts no token between two texts.
        let tokens = server.encode(&format!("a fox{document}"));
        num_tokens += tokens.len();
        let score = 1.0 / (1.0 + (-first_sum(&server, &tokens) - 0.5).exp());
        let results = answer["results"].as_array().expect("a list");
        let result = results.iter().find(|result| result["index"] == index);
        let found = result.expect("each document has a score")["relevance_score"].as_f64();
        assert_close(&[found.expect("a number")], &[score]);
    }
    assert_eq!(answer["usage"]["prompt_tokens"], num_tokens);
    let reply = post(server.address, "/classify", &json!({"input": "a fox"})).await;
    let sum = first_sum(&server, &server.encode("a fox"));
    let probability = 1.0 / (1.0 + (-sum - 0.5).exp());
    assert_close(&numbers(&reply.json()["data"][0]["probs"]), &[probability]);
}
