//! Encoders through the whole program: sentence-transformers' folders, and its results for the same texts.
//! `tests/encoder` has both, and the script that makes them.

use std::fs;
use std::path::{Path, PathBuf};

use corella::{LocalServer, load_by_keywords};
use serde_json::{Map, Value, json};
use tokio::runtime::Runtime;

use crate::held_isa::held_isa;
use crate::server::corella;

/// Vectors and scores have values around 1.
const TOLERANCE: f64 = 1e-4;

fn folder(name: &str) -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/encoder");
    tests.join(name)
}

/// A model behind the API, and its golden results.
struct Served {
    runtime: Runtime,
    server: LocalServer,
    golden: Value,
}

impl Served {
    fn load(name: &str, more: Value) -> Self {
        let mut keywords = Map::new();
        keywords.insert("model".into(), folder(name).to_str().unwrap().into());
        if let Some(isa) = held_isa() {
            keywords.insert("isa".into(), isa.to_string().into());
        }
        keywords.extend(more.as_object().unwrap().clone());
        let golden = fs::read(folder(name).join("golden.json")).unwrap();
        Self {
            runtime: Runtime::new().unwrap(),
            server: load_by_keywords(&keywords).unwrap(),
            golden: serde_json::from_slice(&golden).unwrap(),
        }
    }

    fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let client = &self.server.client;
        let answer = async {
            let mut response = client
                .post(path, body.to_string().into_bytes())
                .await
                .unwrap();
            let bytes = response.bytes().await.unwrap();
            (response.status(), serde_json::from_slice(&bytes).unwrap())
        };
        self.runtime.block_on(answer)
    }

    fn ask(&self, path: &str, body: &Value) -> Value {
        let (status, answer) = self.post(path, body);
        assert_eq!(status, 200, "{path}: {answer}");
        answer
    }

    fn vectors(&self, body: &Value) -> Vec<Vec<f64>> {
        let answer = self.ask("/v1/embeddings", body);
        let data = answer["data"].as_array().unwrap().iter();
        data.map(|item| numbers(&item["embedding"])).collect()
    }
}

fn numbers(value: &Value) -> Vec<f64> {
    let list = value.as_array().unwrap().iter();
    list.map(|number| number.as_f64().unwrap()).collect()
}

fn assert_close(found: &[f64], expected: &[f64], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (found, expected) in found.iter().zip(expected) {
        assert!(
            (found - expected).abs() < TOLERANCE,
            "{what}: {found}, expected {expected}"
        );
    }
}

#[test]
fn vectors_are_those_of_sentence_transformers() {
    for name in [
        "bert-cls",
        "bert-max",
        "bert-mean",
        "modernbert-mean",
        "nomic-bert-mean",
        "xlm-roberta-cls",
    ] {
        let served = Served::load(name, json!({}));
        let texts = &served.golden["texts"];
        for (prompt, golden) in served.golden["vectors"].as_object().unwrap() {
            let mut body = json!({"input": texts});
            if !prompt.is_empty() {
                body["prompt_name"] = prompt.as_str().into();
            }
            let vectors = served.vectors(&body);
            let golden = golden.as_array().unwrap();
            assert_eq!(vectors.len(), golden.len());
            for (vector, golden) in vectors.iter().zip(golden) {
                assert_close(
                    vector,
                    &numbers(golden),
                    &format!("{name}, prompt {prompt:?}"),
                );
            }
        }
    }
}

/// Matryoshka models are trained so that the first values of a vector are also a vector.
#[test]
fn vectors_are_cut_before_their_length_is_made_one() {
    let served = Served::load("bert-mean", json!({}));
    let input = &served.golden["texts"][1];
    let whole = numbers(&served.golden["vectors"][""][1]);
    let length = whole[..8].iter().map(|x| x * x).sum::<f64>().sqrt();
    let expected: Vec<f64> = whole[..8].iter().map(|x| x / length).collect();
    let found = served.vectors(&json!({"input": input, "dimensions": 8}));
    assert_close(&found[0], &expected, "8 dimensions");
    // The vectors have 20 values for any size of hidden states.
    let (status, error) = served.post("/v1/embeddings", &json!({"input": input, "dimensions": 21}));
    assert_eq!(
        (status, &error["error"]["param"]),
        (400, &json!("dimensions"))
    );
}

#[test]
fn a_request_may_pool_in_another_way() {
    let served = Served::load("xlm-roberta-cls", json!({}));
    let input = &served.golden["texts"];
    let [own, cls, mean] = [Value::Null, "cls".into(), "mean".into()]
        .map(|pooling| served.vectors(&json!({"input": input, "pooling": pooling})));
    assert_eq!(own, cls);
    assert_ne!(own, mean);
}

#[test]
fn scores_of_pairs_are_those_of_cross_encoders() {
    for name in [
        "bert-pair",
        "modernbert-pair",
        "qwen3-pair",
        "xlm-roberta-pair",
    ] {
        let served = Served::load(name, json!({}));
        let golden = numbers(&served.golden["scores"]);
        let pairs = served.golden["pairs"].as_array().unwrap();
        let side = |at: usize| -> Vec<&Value> { pairs.iter().map(|pair| &pair[at]).collect() };
        let answer = served.ask("/score", &json!({"text_1": side(0), "text_2": side(1)}));
        let data = answer["data"].as_array().unwrap().iter();
        let scores: Vec<f64> = data.map(|item| item["score"].as_f64().unwrap()).collect();
        assert_close(&scores, &golden, name);

        // The first two pairs have the same first text.
        let body = json!({"query": pairs[0][0], "documents": [pairs[0][1], pairs[1][1]]});
        let answer = served.ask("/rerank", &body);
        for ranked in answer["results"].as_array().unwrap() {
            let index = ranked["index"].as_u64().unwrap() as usize;
            let score = ranked["relevance_score"].as_f64().unwrap();
            assert_close(&[score], &golden[index..=index], name);
        }
        let ranked = |at: usize| answer["results"][at]["relevance_score"].as_f64().unwrap();
        assert!(ranked(0) >= ranked(1));

        let (status, error) = served.post("/v1/embeddings", &json!({"input": "a"}));
        let message = error["error"]["message"].as_str().unwrap();
        assert_eq!(status, 400);
        assert!(message.contains("makes no embeddings"), "{message}");
        let tokens = json!({"text_1": [5, 6], "text_2": [7]});
        assert_eq!(served.post("/score", &tokens).1["error"]["param"], "text_1");
    }
}

#[test]
fn classes_are_as_likely_as_transformers_says() {
    for (name, labels) in [
        ("bert-classes", &["calm", "glad", "sad"][..]),
        ("roberta-classes", &["off", "on"]),
    ] {
        let served = Served::load(name, json!({}));
        let answer = served.ask("/classify", &json!({"input": served.golden["texts"]}));
        let data = answer["data"].as_array().unwrap();
        let golden = served.golden["probabilities"].as_array().unwrap();
        assert_eq!(data.len(), golden.len());
        for (item, golden) in data.iter().zip(golden) {
            let golden = numbers(golden);
            assert_close(&numbers(&item["probs"]), &golden, name);
            assert_eq!(item["num_classes"], labels.len());
            let best = (0..golden.len()).max_by(|&a, &b| golden[a].total_cmp(&golden[b]));
            assert_eq!(item["label"], labels[best.unwrap()], "{name}");
        }
        let (status, error) = served.post("/score", &json!({"text_1": "a", "text_2": "b"}));
        let message = error["error"]["message"].as_str().unwrap();
        assert_eq!(status, 400);
        assert!(message.contains("/classify"), "{message}");
    }
}

/// Cut into steps, a text would have other vectors, because its first tokens would not see its last ones.
#[test]
fn a_text_longer_than_a_step_is_computed_as_a_whole() {
    let served = Served::load("bert-mean", json!({"max_num_batched_tokens": 16}));
    let texts = &served.golden["texts"];
    let golden = served.golden["vectors"][""].as_array().unwrap();
    let vectors = served.vectors(&json!({"input": texts}));
    for (vector, golden) in vectors.iter().zip(golden) {
        assert_close(vector, &numbers(golden), "16 tokens per step");
    }
    let long = "fox ".repeat(200);
    let (status, error) = served.post("/v1/embeddings", &json!({"input": long}));
    assert_eq!(
        (status, &error["error"]["code"]),
        (400, &json!("context_length_exceeded"))
    );
}

#[test]
fn weights_and_rows_may_be_integers() {
    let served = Served::load("bert-mean", json!({"dtype": "int8"}));
    let vectors = served.vectors(&json!({"input": served.golden["texts"]}));
    let golden = served.golden["vectors"][""].as_array().unwrap();
    for (vector, golden) in vectors.iter().zip(golden) {
        let cosine: f64 = vector.iter().zip(numbers(golden)).map(|(a, b)| a * b).sum();
        assert!(cosine > 0.99, "{cosine}");
    }
}

#[test]
fn what_generates_text_says_why_not() {
    let served = Served::load("bert-mean", json!({}));
    let messages = json!([{"role": "user", "content": "a"}]);
    for (path, body) in [
        ("/v1/completions", json!({"prompt": "a"})),
        ("/v1/chat/completions", json!({"messages": messages})),
        ("/v1/responses", json!({"input": "a"})),
        ("/completion", json!({"prompt": "a"})),
    ] {
        let (status, error) = served.post(path, &body);
        let message = error["error"]["message"].as_str().unwrap();
        assert_eq!(status, 400, "{path}");
        assert!(message.contains("is an encoder"), "{path}: {message}");
    }
    let (status, error) = served.post("/classify", &json!({"input": "a"}));
    let message = error["error"]["message"].as_str().unwrap();
    assert_eq!(status, 400);
    assert!(message.contains("no classification head"), "{message}");
    let unknown = json!({"input": "a", "prompt_name": "poem"});
    let (status, error) = served.post("/v1/embeddings", &unknown);
    let message = error["error"]["message"].as_str().unwrap();
    assert_eq!(status, 400);
    assert!(message.contains("document, query"), "{message}");
}

/// No command panics, and each error names its reason.
#[test]
fn commands_that_generate_refuse_encoders() {
    let model = folder("bert-mean");
    let model = model.to_str().unwrap();
    let target = std::env::temp_dir().join(format!("encoder-quantised-{}", std::process::id()));
    let target = target.to_str().unwrap();
    for (arguments, reason) in [
        (
            vec!["generate", model, "--no-limits", "-p", "a"],
            "generates none",
        ),
        (
            vec!["quantize", model, target, "--format", "int8"],
            "not quantised",
        ),
        (
            vec!["serve", model, "--port", "0", "--pin-prefix", "a"],
            "--pin-prefix",
        ),
        (
            vec!["serve", model, "--port", "0", "--speculate", "ngram"],
            "is an encoder",
        ),
    ] {
        let output = corella(&arguments).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{arguments:?}");
        assert!(error.contains(reason), "{arguments:?}: {error}");
        assert!(!error.contains("panicked"), "{arguments:?}: {error}");
    }
    let output = corella(&["inspect", model]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("BertModel"), "{text}");
    assert!(text.contains("no head: an encoder"), "{text}");
    assert!(!text.contains("KV cache"), "{text}");
    assert!(text.contains("problems      none"), "{text}");
}
