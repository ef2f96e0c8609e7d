//! The models that a key may use.

use super::*;

#[tokio::test]
async fn only_keys_that_may_change_the_server_load_models() {
    let mut options = Options::of(&["a"], 1);
    let mut user = ApiKey::unlimited("user", "user");
    user.is_admin = false;
    let mut other = ApiKey::unlimited("other", "other");
    other.models = Some(vec!["b".to_owned()]);
    options.server.api_keys = vec![user, other, ApiKey::unlimited("admin", "admin")];
    let server = options.start().await;
    let body = json!({"model": "a"}).to_string();
    for path in ["/models/load", "/models/unload"] {
        for (key, status) in [("user", 403), ("other", 404), ("admin", 200)] {
            let key = format!("Bearer {key}");
            let headers = [("authorization", &*key)];
            let head = head("POST", path, &headers, Some(body.len()));
            let reply = send(server.address, &head, body.as_bytes()).await;
            assert_eq!(reply.status, status, "{path} {key}: {}", reply.text());
        }
    }
}

#[tokio::test]
async fn a_key_adds_no_other_model() {
    let server = with_key(&["a"]).await;
    server.loader.further.lock().expect("no panic").push("c");
    let ask = async |method: &str, path: &str, body: &str| {
        let headers = [("authorization", "Bearer secret")];
        let length = (!body.is_empty()).then_some(body.len());
        let head = head(method, path, &headers, length);
        send(server.address, &head, body.as_bytes()).await
    };
    let body = ModelServer::body("c").to_string();
    let refused = ask("POST", "/v1/completions", &body).await;
    assert_eq!(refused.error()["code"], "model_not_found");
    let list = ask("GET", "/v1/models", "").await.json();
    assert_eq!(list["data"].as_array().map(Vec::len), Some(1));
    assert_eq!(server.loads(), [] as [usize; 0]);
}

#[tokio::test]
async fn a_key_loads_only_its_models() {
    let mut options = Options::of(&["a", "b"], 2);
    let mut key = ApiKey::unlimited("one", "secret");
    key.models = Some(vec!["a".to_owned()]);
    options.server.api_keys = vec![key];
    let server = options.start().await;
    let ask = async |model: &str| {
        let body = ModelServer::body(model).to_string();
        let headers = [("authorization", "Bearer secret")];
        let head = head("POST", "/v1/completions", &headers, Some(body.len()));
        send(server.address, &head, body.as_bytes()).await.status
    };
    assert_eq!(ask("b").await, 404);
    assert_eq!(server.loads(), [] as [usize; 0]);
    assert_eq!(ask("a").await, 200);
    let list = head(
        "GET",
        "/v1/models",
        &[("authorization", "Bearer secret")],
        None,
    );
    let list = send(server.address, &list, b"").await.json();
    assert_eq!(list["data"].as_array().map(Vec::len), Some(1));
}

/// Questions without a name, and errors, show a key its own models only.
#[tokio::test]
async fn a_key_sees_only_its_models() {
    let server = with_key(&["b", "unknown"]).await;
    let ask = async |method: &str, path: &str, body: &Value| {
        let body = match method {
            "GET" => String::new(),
            _ => body.to_string(),
        };
        let length = (method != "GET").then_some(body.len());
        let headers = [("authorization", "Bearer secret")];
        let head = head(method, path, &headers, length);
        send(server.address, &head, body.as_bytes()).await
    };
    let get = async |path: &str| ask("GET", path, &Value::Null).await;
    let asleep = get("/props").await;
    assert_eq!(asleep.error()["code"], "model_asleep");
    assert!(asleep.text().contains("`b`"), "{}", asleep.text());
    let body = json!({"prompt": "x", "max_tokens": 1});
    let reply = ask("POST", "/v1/completions", &body).await;
    assert_eq!(reply.json()["model"], "b", "{}", reply.text());
    assert_eq!(server.loads(), [1]);
    assert_eq!(get("/props").await.json()["model_alias"], "b");
    for path in ["/props?model=a", "/slots?model=a", "/engine/events?model=a"] {
        assert_eq!(get(path).await.status, 404, "{path}");
    }
    let unknown = ask("POST", "/v1/completions", &ModelServer::body("unknown")).await;
    assert_eq!(unknown.error()["code"], "model_not_found");
    assert!(!unknown.text().contains("`a`"), "{}", unknown.text());
    assert!(unknown.text().contains("`b`"), "{}", unknown.text());
    // Ollama's form of errors has the text only.
    let pull = ask("POST", "/api/pull", &json!({"model": "unknown"})).await;
    assert_eq!(pull.status, 404);
    assert!(!pull.text().contains("`a`"), "{}", pull.text());
}

#[tokio::test]
async fn a_key_without_a_model_of_the_server_is_told_so() {
    let server = with_key(&["unknown"]).await;
    for body in [ModelServer::body("unknown"), json!({"prompt": "x"})] {
        let body = body.to_string();
        let headers = [("authorization", "Bearer secret")];
        let head = head("POST", "/v1/completions", &headers, Some(body.len()));
        let refused = send(server.address, &head, body.as_bytes()).await;
        assert_eq!(refused.error()["code"], "model_not_found");
        for name in ["`a`", "`b`"] {
            assert!(!refused.text().contains(name), "{}", refused.text());
        }
    }
    assert_eq!(server.loads(), [] as [usize; 0]);
}

/// The name means the first model that has it, and permits no other.
#[tokio::test]
async fn a_short_name_of_several_models_permits_the_first() {
    let server = with_key(&["shared"]).await;
    let ask = async |model: &str| {
        let body = ModelServer::body(model).to_string();
        let headers = [("authorization", "Bearer secret")];
        let head = head("POST", "/v1/completions", &headers, Some(body.len()));
        send(server.address, &head, body.as_bytes()).await.status
    };
    assert_eq!(ask("b").await, 404);
    assert_eq!(ask("a").await, 200);
    assert_eq!(ask("shared").await, 200);
    assert_eq!(server.loads(), [0]);
    let server = Options::of(&["a", "b"], 2).start().await;
    let tags = get(server.address, "/api/tags").await.json();
    let tags = tags["models"].as_array().expect("a list");
    let names: Vec<_> = tags.iter().map(|model| &model["name"]).collect();
    let expected = [
        "a:latest",
        "a:short",
        "shared:latest",
        "b:latest",
        "b:short",
    ];
    assert_eq!(names, expected);
}

/// Models `a` and `b`, and a key that may use these names.
async fn with_key(models: &[&str]) -> ModelServer {
    let mut options = Options::of(&["a", "b"], 2);
    let mut key = ApiKey::unlimited("one", "secret");
    key.models = Some(models.iter().map(|&name| name.to_owned()).collect());
    options.server.api_keys = vec![key];
    options.start().await
}
