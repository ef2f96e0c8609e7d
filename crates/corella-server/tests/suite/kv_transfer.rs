//! `kv_transfer_params` reach their reader, and its answer reaches the client, both unchanged.

use std::sync::{Arc, Mutex};

use corella_engine::{Engine, Generate, Submission, SubmitError, TokenStream};
use corella_server::{KvTransfer, KvTransferCall, KvTransferError};
use serde_json::{Map, Value, json};

use crate::client::{head, post, send};
use crate::fixture::{Setup, TestServer};

/// The parameters and the name of a request.
type Call = (Map<String, Value>, String);

/// A stand-in for another node. It only records its calls.
struct Recorder {
    engine: Engine,
    calls: Arc<Mutex<Vec<Call>>>,
}

struct RecordedCall {
    engine: Engine,
    answers: bool,
    prompt: Mutex<Option<Value>>,
}

impl KvTransfer for Recorder {
    fn begin(
        &self,
        params: &Map<String, Value>,
        request_name: &str,
    ) -> Result<Option<Box<dyn KvTransferCall>>, KvTransferError> {
        let mut calls = self.calls.lock().expect("no holder panics");
        calls.push((params.clone(), request_name.to_owned()));
        if params.contains_key("bad") {
            return Err(KvTransferError {
                field: "bad".to_owned(),
                message: "is not good".to_owned(),
            });
        }
        Ok(Some(Box::new(RecordedCall {
            engine: self.engine.clone(),
            answers: params.contains_key("do_remote_decode"),
            prompt: Mutex::default(),
        })))
    }
}

impl Generate for RecordedCall {
    fn submit(&self, submission: Submission) -> Result<Vec<TokenStream>, SubmitError> {
        *self.prompt.lock().expect("no holder panics") = Some(json!({
            "deep": [submission.prompt.len(), null],
            "min_tokens": submission.stopping.min_tokens,
        }));
        self.engine.submit(submission)
    }
}

impl KvTransferCall for RecordedCall {
    fn answers_with_params(&self) -> bool {
        self.answers
    }

    fn params(&self) -> Option<Value> {
        self.prompt.lock().expect("no holder panics").clone()
    }
}

type Calls = Arc<Mutex<Vec<(Map<String, Value>, String)>>>;

async fn start() -> (TestServer, Calls) {
    let calls = Calls::default();
    let recorded = calls.clone();
    let mut setup = Setup::new();
    setup.kv_transfer = Some(Box::new(move |engine| {
        let calls = recorded;
        Arc::new(Recorder { engine, calls })
    }));
    (setup.start().await, calls)
}

fn prompts() -> [(&'static str, Value, u32); 2] {
    let messages = json!({"messages": [{"role": "user", "content": "x"}]});
    [
        ("/v1/completions", json!({"prompt": "xyz"}), 3),
        ("/v1/chat/completions", messages, 4),
    ]
}

#[tokio::test]
async fn the_field_goes_there_and_back_unread() {
    let (server, calls) = start().await;
    let params = json!({"do_remote_decode": true, "remote_host": null, "other": [{"a": 1}]});
    for (path, mut body, num_tokens) in prompts() {
        body["max_tokens"] = 1.into();
        // A proxy has lowered only max_tokens.
        body["min_tokens"] = 5.into();
        body["kv_transfer_params"] = params.clone();
        let bytes = serde_json::to_vec(&body).expect("it is JSON");
        let head = head(
            "POST",
            path,
            &[("x-request-id", "a-name")],
            Some(bytes.len()),
        );
        let reply = send(server.address, &head, &bytes).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(reply.header("x-request-id"), Some("a-name"));
        let expected = json!({"deep": [num_tokens, null], "min_tokens": 1});
        assert_eq!(reply.json()["kv_transfer_params"], expected);
        let call = calls.lock().expect("no holder panics").pop();
        let expected = (params.as_object().expect("an object").clone(), "a-name");
        assert_eq!(call, Some((expected.0, expected.1.to_owned())));
    }
    // An answer that no other server continues has no such field.
    let body = json!({"prompt": "x", "kv_transfer_params": {"do_remote_prefill": true}});
    let reply = post(server.address, "/v1/completions", &body).await;
    assert_eq!(reply.json().get("kv_transfer_params"), None);
    // Nor does an answer to several prompts.
    let body = json!({"prompt": ["x", "y"], "kv_transfer_params": params});
    let reply = post(server.address, "/v1/completions", &body).await;
    assert_eq!(reply.json()["kv_transfer_params"], Value::Null);
    assert_eq!(reply.json()["choices"].as_array().map(Vec::len), Some(2));
    server.assert_at_rest().await;
}

/// llm-d sends the field of an endpoint with tokens where vLLM reads it.
#[tokio::test]
async fn the_field_of_tokens_is_read_in_two_places() {
    let (server, calls) = start().await;
    let params = json!({"do_remote_decode": true, "other": [1]});
    let extra = json!({"max_tokens": 1, "extra_args": {"kv_transfer_params": params}});
    let path = "/inference/v1/generate";
    for body in [
        json!({"token_ids": [97, 98, 99], "sampling_params": extra}),
        json!({"token_ids": [97, 98, 99], "sampling_params": {"max_tokens": 1}, "kv_transfer_params": params}),
        json!({"token_ids": [97, 98, 99], "sampling_params": extra, "kv_transfer_params": params}),
    ] {
        let reply = post(server.address, path, &body).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        let expected = json!({"deep": [3, null], "min_tokens": 0});
        assert_eq!(reply.json()["kv_transfer_params"], expected);
        let call = calls.lock().expect("no holder panics").pop();
        let (sent, _) = call.expect("a call");
        assert_eq!(Value::Object(sent), params);
    }
    let body = json!({"token_ids": [97], "sampling_params": extra, "kv_transfer_params": {"a": 1}});
    let reply = post(server.address, path, &body).await;
    assert_eq!(reply.status, 400, "{}", reply.text());
    let param = "sampling_params.extra_args.kv_transfer_params";
    assert_eq!(reply.error()["param"], param);
}

/// The answers of other APIs have no member for the parameters that the proxy needs.
#[tokio::test]
async fn other_apis_refuse_the_field() {
    let (server, calls) = start().await;
    for (path, mut body) in [
        ("/v1/responses", json!({"input": "hi"})),
        (
            "/v1/messages",
            json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}),
        ),
    ] {
        body["kv_transfer_params"] = json!({"do_remote_decode": true});
        let reply = post(server.address, path, &body).await;
        assert_eq!(reply.status, 400, "{}", reply.text());
        assert!(
            reply.text().contains("kv_transfer_params"),
            "{}",
            reply.text()
        );
    }
    assert!(calls.lock().expect("no holder panics").is_empty());
    server.assert_at_rest().await;
}

#[tokio::test]
async fn wrong_parameters_are_named() {
    let (server, _) = start().await;
    for (path, body, _) in prompts() {
        let cases = [
            (json!({"bad": 1}), "kv_transfer_params.bad"),
            (json!("yes"), "kv_transfer_params"),
            (json!([1]), "kv_transfer_params"),
        ];
        for (params, named) in cases {
            let mut body = body.clone();
            body["kv_transfer_params"] = params;
            let reply = post(server.address, path, &body).await;
            assert_eq!(
                (reply.status, &reply.error()["param"]),
                (400, &json!(named))
            );
        }
        let mut body = body.clone();
        body["stream"] = true.into();
        body["kv_transfer_params"] = json!({"do_remote_decode": true});
        let reply = post(server.address, path, &body).await;
        assert_eq!(
            (reply.status, &reply.error()["param"]),
            (400, &json!("stream"))
        );
        // A stream on the server that decodes is like any other.
        body["kv_transfer_params"] = json!({"do_remote_prefill": true});
        let reply = post(server.address, path, &body).await;
        assert_eq!(reply.status, 200);
        assert!(!reply.chunks().is_empty());
    }
    // Without a proxy's request the limit of min_tokens applies.
    let body = json!({"prompt": "x", "max_tokens": 1, "min_tokens": 5});
    let reply = post(server.address, "/v1/completions", &body).await;
    assert_eq!(
        (reply.status, &reply.error()["param"]),
        (400, &json!("min_tokens"))
    );
}
