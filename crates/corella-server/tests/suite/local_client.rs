//! Calls without a socket.

use serde_json::{Value, json};

use crate::client::post;
use crate::fixture::{Setup, TestServer};

const PATH: &str = "/v1/chat/completions";

async fn post_locally(server: &TestServer, path: &str, body: &Value) -> (u16, Value) {
    let response = server.local.post(path, body.to_string().into_bytes());
    let mut response = response.await.expect("it is a path");
    assert!(!response.request_id.is_empty());
    let bytes = response.bytes().await.expect("it has a body");
    let json = serde_json::from_slice(&bytes).expect("it is JSON");
    (response.status, json)
}

#[tokio::test]
async fn it_gets_what_a_client_with_a_socket_gets() {
    let server = TestServer::start().await;
    let messages = json!([{"role": "user", "content": "hi"}]);
    for (path, body, status) in [
        (
            PATH,
            json!({"messages": messages, "max_tokens": 9, "temperature": 0}),
            200,
        ),
        (PATH, json!({"messages": messages, "temperature": -1}), 400),
        (PATH, json!({"messages": messages, "temprature": 1}), 400),
        ("/v1/nothing", json!({}), 404),
    ] {
        let by_socket = post(server.address, path, &body).await;
        let (local_status, local) = post_locally(&server, path, &body).await;
        assert_eq!(local_status, status, "{local}");
        assert_eq!(by_socket.status, status);
        let by_socket = by_socket.json();
        for field in ["error", "choices"] {
            assert_eq!(local[field], by_socket[field], "{path} {body}");
        }
        assert_eq!(local["error"].is_null(), status == 200);
    }
}

#[tokio::test]
async fn a_dropped_stream_aborts_its_request() {
    let server = Setup::new().holding_behind(1).start().await;
    let body = json!({
        "messages": [{"role": "user", "content": "hi"}], "max_tokens": 200, "ignore_eos": true,
        "stream": true,
    });
    let response = server.local.post(PATH, body.to_string().into_bytes());
    let mut response = response.await.expect("it is a path");
    assert_eq!(response.status, 200);
    let first = response.chunk().await.expect("it goes on");
    assert!(first.expect("it has begun").starts_with(b"data: "));
    drop(response);
    server.has_aborted(1).await;
    server.gate().open();
    server.assert_at_rest().await;
    assert_eq!(server.num_counted(PATH, 499).await, 1.0);
    // The token of the step in flight is dropped.
    assert_eq!(server.engine.stats().scheduler.num_generated_tokens, 1);
}
