//! `/api/chat`, `/api/generate` and `/api/embed`, Ollama's API.

use corella_core::{Pooling, StepId};
use corella_model::Fault;
use corella_server::ModelFacts;
use serde_json::{Value, json};

use crate::client::{Reply, get, post};
use crate::fixture::{MAX_MODEL_LEN, MODEL, Setup, TestServer};
use crate::tools::{CALLS, hermes};

const CHAT: &str = "/api/chat";
const GENERATE: &str = "/api/generate";

fn lines(reply: &Reply) -> Vec<Value> {
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(reply.header("content-type"), Some("application/x-ndjson"));
    assert!(reply.text().ends_with('\n'));
    reply
        .text()
        .lines()
        .map(|line| serde_json::from_str(line).expect("each line is JSON"))
        .collect()
}

fn text_of(lines: &[Value]) -> String {
    lines
        .iter()
        .filter_map(|line| {
            line["message"]["content"]
                .as_str()
                .or(line["response"].as_str())
        })
        .collect()
}

#[tokio::test]
async fn a_conversation_is_rendered_and_answered_in_lines() {
    let server = Setup::new().ending_at(9).start().await;
    let body = json!({
        "model": MODEL, "options": {"temperature": 0}, "keep_alive": "5m", "tools": [],
        "messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}],
    });
    let prompt = server.encode("<|system|>be kind<|end|><|user|>hi<|end|><|assistant|>");
    let lines = lines(&post(server.address, CHAT, &body).await);
    let (last, others) = lines.split_last().expect("there are lines");
    assert_eq!(text_of(&lines), server.greedy(&prompt, 8));
    for line in others {
        assert_eq!(line["done"], false);
        assert_eq!(line["model"], MODEL);
        assert_eq!(line["message"]["role"], "assistant");
        assert_eq!(line.get("eval_count"), None);
    }
    assert_eq!(last["done"], true);
    assert_eq!(last["done_reason"], "stop");
    assert_eq!(last["prompt_eval_count"], prompt.len());
    assert_eq!(last["eval_count"], 9);
    let created = last["created_at"].as_str().expect("a time");
    assert!(created.len() == 27 && created.ends_with('Z'), "{created}");
    // A begun answer is continued.
    let body = json!({
        "options": {"temperature": 0, "num_predict": 3, "repeat_last_n": 64}, "stream": false,
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ab"}],
    });
    let begun = server.encode("<|user|>hi<|end|><|assistant|>ab");
    let whole = post(server.address, CHAT, &body).await.json();
    assert_eq!(whole["message"]["content"], server.greedy(&begun, 3));
    assert_eq!(whole["done_reason"], "length");
}

#[tokio::test]
async fn a_prompt_is_a_message_or_goes_on_as_it_is() {
    let server = TestServer::start().await;
    let ask = async |more: Value| {
        let mut body = json!({
            "prompt": "hi", "stream": false, "options": {"temperature": 0, "num_predict": 6},
        });
        let Value::Object(more) = more else {
            panic!("an object is expected");
        };
        body.as_object_mut().expect("an object").extend(more);
        post(server.address, GENERATE, &body).await
    };
    let rendered = server.encode("<|system|>be kind<|end|><|user|>hi<|end|><|assistant|>");
    let answer = ask(json!({"system": "be kind"})).await.json();
    assert_eq!(answer["response"], server.greedy(&rendered, 6));
    let raw = ask(json!({"raw": true, "system": "", "template": "", "context": []})).await;
    assert_eq!(
        raw.json()["response"],
        server.greedy(&server.encode("hi"), 6)
    );
    let nothing = ask(json!({"prompt": ""})).await.json();
    assert_eq!(nothing["done_reason"], "load");
    assert_eq!(nothing["response"], "");
    let refused = ask(json!({"suffix": "x"})).await;
    assert_eq!(refused.status, 400);
    let message = &refused.json()["error"];
    assert!(
        message
            .as_str()
            .is_some_and(|message| message.contains("fill in the middle"))
    );
    server.assert_at_rest().await;
}

#[tokio::test]
async fn thoughts_and_calls_have_their_members() {
    let server = hermes(&[CALLS]).start().await;
    let tools = json!([
        {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}},
        {"type": "function", "function": {"name": "time"}},
    ]);
    let mut body = json!({
        "messages": [{"role": "user", "content": "hi"}], "tools": tools, "options": {"seed": 0},
    });
    let lines = lines(&post(server.address, CHAT, &body).await);
    body["stream"] = json!(false);
    let whole = post(server.address, CHAT, &body).await.json();
    let message = &whole["message"];
    assert_eq!(text_of(&lines), message["content"].as_str().expect("text"));
    let thoughts: String = lines
        .iter()
        .filter_map(|line| line["message"]["thinking"].as_str())
        .collect();
    assert_eq!(thoughts, "É, hm.");
    assert_eq!(message["thinking"], "É, hm.");
    assert_eq!(message["content"], "I look.");
    let functions = |calls: &Value| -> Vec<Value> {
        calls
            .as_array()
            .into_iter()
            .flatten()
            .map(|call| call["function"].clone())
            .collect()
    };
    let streamed: Vec<Value> = lines
        .iter()
        .flat_map(|line| functions(&line["message"]["tool_calls"]))
        .collect();
    let expected = json!([
        {"index": 0, "name": "weather", "arguments": {"city": "Orléans", "days": 3}},
        {"index": 1, "name": "time", "arguments": {}},
    ]);
    assert_eq!(json!(streamed), expected);
    assert_eq!(streamed, functions(&message["tool_calls"]));
}

#[tokio::test]
async fn errors_are_texts_before_and_within_a_stream() {
    let mut setup = Setup::new();
    setup.mock.faults = vec![(StepId(5), Fault::Fail)];
    let server = setup.start().await;
    let body = json!({"prompt": "hi", "options": {"temperature": -1}});
    let reply = post(server.address, GENERATE, &body).await;
    assert_eq!(reply.status, 400);
    let message = reply.json()["error"].clone();
    assert!(
        message
            .as_str()
            .is_some_and(|message| message.contains("options.temperature"))
    );
    let body = json!({"prompt": "hi", "options": {"num_ctx": 1}});
    let lines = lines(&post(server.address, GENERATE, &body).await);
    let last = lines.last().expect("there are lines");
    assert!(last["error"].is_string(), "{last}");
    assert_eq!(last.get("done"), None);
}

#[tokio::test]
async fn one_error_names_all_refused_options() {
    let server = TestServer::start().await;
    let body = json!({
        "prompt": "hi",
        "options": {"typical_p": 0.5, "repeat_last_n": 33, "mirostat": 1, "num_keep": 4},
    });
    let reply = post(server.address, GENERATE, &body).await;
    assert_eq!(reply.status, 400);
    let error = reply.json()["error"].as_str().expect("a text").to_owned();
    for name in ["typical_p", "repeat_last_n", "mirostat"] {
        assert!(error.contains(&format!("options.{name}: ")), "{error}");
    }
    assert!(!error.contains("num_keep"), "{error}");
}

/// Clients set `num_ctx` by habit.
#[tokio::test]
async fn any_context_may_be_asked_for() {
    let server = TestServer::start().await;
    let ask = async |num_ctx: Value| {
        let options = json!({"num_ctx": num_ctx, "temperature": 0, "num_predict": 5});
        let body = json!({"prompt": "hi", "options": options, "stream": false});
        post(server.address, GENERATE, &body).await.json()["response"].clone()
    };
    let whole = ask(json!(null)).await;
    assert!(whole.is_string());
    for num_ctx in [
        1,
        i64::from(MAX_MODEL_LEN),
        i64::from(MAX_MODEL_LEN) + 1,
        1 << 40,
    ] {
        assert_eq!(ask(json!(num_ctx)).await, whole, "{num_ctx}");
    }
}

#[tokio::test]
async fn a_model_is_pulled_that_is_there_and_has_its_facts() {
    let mut setup = Setup::new();
    setup.serve.other_names = vec!["mock:1b".to_owned(), "mock".to_owned()];
    setup.serve.model_facts = ModelFacts {
        family: "mock".to_owned(),
        num_parameters: 1_234_567_890,
        file_bytes: 2_470_000_123,
        weight_bytes: 2_469_135_780,
        gpu_weight_bytes: 1_000_000_000,
        weight_format: "bf16".to_owned(),
        kv_format: "bf16".to_owned(),
    };
    let server = setup.start().await;
    for model in [MODEL, "mock:1b", "mock:latest"] {
        let reply = post(server.address, "/api/pull", &json!({"model": model})).await;
        let lines = lines(&reply);
        assert_eq!(lines.last(), Some(&json!({"status": "success"})), "{model}");
    }
    let body = json!({"name": MODEL, "stream": false, "insecure": true});
    let reply = post(server.address, "/api/pull", &body).await;
    assert_eq!(reply.json(), json!({"status": "success"}));
    let reply = post(server.address, "/api/pull", &json!({"model": "other"})).await;
    assert_eq!(reply.status, 404);
    let message = reply.json()["error"].clone();
    assert!(
        message
            .as_str()
            .is_some_and(|message| message.contains("corella pull other"))
    );

    let tags = get(server.address, "/api/tags").await.json();
    let models = tags["models"].as_array().expect("a list");
    let names: Vec<_> = models.iter().map(|model| &model["name"]).collect();
    assert_eq!(names, ["org/mock:latest", "mock:1b", "mock:latest"]);
    assert_eq!(models[0]["size"], 2_470_000_123_u64);
    let running = get(server.address, "/api/ps").await.json();
    assert_eq!(running["models"].as_array().map(Vec::len), Some(1));
    let running = &running["models"][0];
    assert_eq!(running["size"], 2_469_135_780_u64);
    assert_eq!(running["size_vram"], 1_000_000_000);
    let details = &models[0]["details"];
    assert_eq!(details["family"], "mock");
    assert_eq!(details["families"], json!(["mock"]));
    assert_eq!(details["parameter_size"], "1.2B");
    assert_eq!(details["quantization_level"], "BF16");
    let shown = post(server.address, "/api/show", &json!({"model": "mock"}))
        .await
        .json();
    assert_eq!(shown["model_info"]["general.architecture"], "mock");
    assert_eq!(
        shown["model_info"]["general.parameter_count"],
        1_234_567_890_u64
    );
    assert_eq!(shown["model_info"]["mock.context_length"], MAX_MODEL_LEN);
}

#[tokio::test]
async fn models_are_told_of() {
    let server = TestServer::start().await;
    let tags = get(server.address, "/api/tags").await.json();
    assert_eq!(tags["models"][0]["model"], format!("{MODEL}:latest"));
    assert_eq!(tags["models"][0].get("expires_at"), None);
    let running = get(server.address, "/api/ps").await.json();
    assert_eq!(running["models"][0]["context_length"], MAX_MODEL_LEN);
    let shown = post(server.address, "/api/show", &json!({"model": MODEL})).await;
    assert_eq!(shown.json()["capabilities"], json!(["completion"]));
    assert_eq!(shown.json()["modelfile"], format!("FROM {MODEL}\n"));
    assert_eq!(shown.json()["parameters"], "");
    let template = shown.json()["template"].clone();
    assert!(
        template
            .as_str()
            .is_some_and(|text| text.contains("raise_exception('no robots')"))
    );
    let other = post(server.address, "/api/show", &json!({"name": "other"})).await;
    assert_eq!(other.status, 404);
    assert!(other.json()["error"].is_string());
}

#[tokio::test]
async fn default_parameters_are_those_of_a_modelfile() {
    let mut setup = Setup::new();
    setup.serve.generation_defaults.top_k = Some(7);
    setup.serve.generation_defaults.stop = vec!["\"end\"".to_owned(), "\nUser:".to_owned()];
    let server = setup.start().await;
    let shown = post(server.address, "/api/show", &json!({"model": MODEL})).await;
    let parameters = "top_k 7\nstop \"\\\"end\\\"\"\nstop \"\\nUser:\"";
    assert_eq!(shown.json()["parameters"], parameters);
    let modelfile = format!(
        "FROM {MODEL}\nPARAMETER {}\n",
        parameters.replace('\n', "\nPARAMETER ")
    );
    assert_eq!(shown.json()["modelfile"], modelfile);
}

/// The mock's hidden state of a text.
fn state_of(server: &TestServer, text: &str) -> Vec<f64> {
    let tokens = server.encode(text);
    let state = server.mock.lone_hidden_state(&tokens, Pooling::LastToken);
    state.iter().map(|&value| f64::from(value)).collect()
}

fn assert_close(found: &Value, expected: &[f64]) {
    let found = found.as_array().expect("a list");
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        let found = found.as_f64().expect("a number");
        assert!((found - expected).abs() < 1e-6, "{found} {expected}");
    }
}

#[tokio::test]
async fn texts_become_vectors_of_length_one() {
    let server = TestServer::start().await;
    let texts = ["a fox", "the lantern"];
    for (input, texts) in [
        (json!(texts), &texts[..]),
        (json!(texts[1]), &texts[1..]),
        (json!(""), &[]),
        (json!([]), &[]),
    ] {
        let body = json!({
            "model": format!("{MODEL}:latest"), "input": input, "dimensions": 4,
            "keep_alive": "5m", "truncate": true,
            "options": {"num_ctx": 16, "temperature": 0.5},
        });
        let reply = post(server.address, "/api/embed", &body).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        let answer = reply.json();
        assert_eq!(answer["model"], MODEL);
        let num_tokens: usize = texts.iter().map(|text| server.encode(text).len()).sum();
        assert_eq!(answer["prompt_eval_count"], num_tokens);
        let vectors = answer["embeddings"].as_array().expect("a list");
        assert_eq!(vectors.len(), texts.len());
        for (vector, text) in vectors.iter().zip(texts) {
            let expected = &state_of(&server, text)[..4];
            let length = expected.iter().map(|x| x * x).sum::<f64>().sqrt();
            let expected: Vec<f64> = expected.iter().map(|x| x / length).collect();
            assert_close(vector, &expected);
        }
    }
}

#[tokio::test]
async fn the_older_form_gives_the_vector_as_it_is() {
    let server = TestServer::start().await;
    let embedding = async |prompt: &str| {
        let body = json!({"model": MODEL, "prompt": prompt});
        let reply = post(server.address, "/api/embeddings", &body).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        reply.json()["embedding"].clone()
    };
    assert_close(&embedding("a fox").await, &state_of(&server, "a fox"));
    assert_eq!(embedding("").await, json!([]));
}

#[tokio::test]
async fn what_cannot_be_embedded_is_told_in_ollamas_shape() {
    let server = TestServer::start().await;
    let long = vec!["fox"; MAX_MODEL_LEN as usize + 1].join(" ");
    let cases = [
        (
            "/api/embed",
            json!({"input": "a", "model": "other"}),
            404,
            "other",
        ),
        ("/api/embed", json!({"prompt": "a"}), 400, "use input"),
        (
            "/api/embed",
            json!({"input": long, "truncate": true}),
            400,
            "input",
        ),
        ("/api/embed", json!({"input": ["a", long]}), 400, "input[1]"),
        (
            "/api/embed",
            json!({"input": "a", "dimensions": 0}),
            400,
            "dimensions",
        ),
        (
            "/api/embed",
            json!({"input": "a", "options": {"num_ctx": "long"}}),
            400,
            "num_ctx",
        ),
        (
            "/api/embed",
            json!({"input": "a", "options": {"heat": 1}}),
            400,
            "heat",
        ),
        ("/api/embeddings", json!({"input": "a"}), 400, "use prompt"),
        ("/api/embeddings", json!({"prompt": ["a"]}), 400, "prompt"),
    ];
    for (path, body, status, told) in cases {
        let reply = post(server.address, path, &body).await;
        assert_eq!(reply.status, status, "{body}");
        let answer = reply.json();
        let error = answer["error"].as_str().expect("a text");
        assert!(error.contains(told), "{body}: {error}");
    }
}
