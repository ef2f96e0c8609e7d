//! Servers whose models are loaded by use.

mod key;
mod sleep;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use corella_core::SamplingParams;
use corella_model::{MockConfig, StepGate};
use corella_server::{
    ApiKey, KeepAlive, ModelId, ModelLoader, ModelMemory, ModelSet, ModelSetConfig, ModelSetting,
    ServeConfig, ServerConfig, ServerParts, ServerState, Shutdown, ShutdownSender, TextModel,
    serve,
};
use corella_test::wait_until_asked;
use serde_json::{Value, json};
use tokio::net::TcpListener;

use crate::client::{
    Reply, get, head, open, open_post, post, post_bytes, read_reply, read_until, send,
};
use crate::fixture::{MODEL, Setup, TestServer};

/// Each model takes this much memory.
const MODEL_BYTES: u64 = 100;
const MEMORY: ModelMemory = ModelMemory {
    weights: MODEL_BYTES,
    kv_pool: 0,
    working: 0,
};

/// Loads mock models, which differ in their seeds.
struct MockLoader {
    parts: Arc<ServerParts>,
    names: Vec<&'static str>,
    mocks: Vec<MockConfig>,
    /// The loads so far, failed ones included.
    loads: Mutex<Vec<usize>>,
    /// Models that cannot be loaded, and why.
    faults: Mutex<HashMap<usize, String>>,
    /// Models that are not listed.
    further: Mutex<Vec<&'static str>>,
    /// The looks for these.
    num_looks: Mutex<usize>,
    /// The models whose files have left the page cache.
    dropped: Mutex<Vec<usize>>,
}

impl ModelLoader for MockLoader {
    fn plan(&self, _: ModelId, _: &str) -> Result<ModelMemory, String> {
        Ok(MEMORY)
    }

    fn load(
        &self,
        model: ModelId,
        name: &str,
        planned: ModelMemory,
    ) -> Result<Arc<ServerState>, String> {
        assert_eq!(planned, MEMORY, "the plan arrives");
        self.loads.lock().expect("no panic").push(model.0);
        if let Some(reason) = self.faults.lock().expect("no panic").get(&model.0) {
            return Err(reason.clone());
        }
        Ok(self.setup(model, name).load(self.parts.clone()))
    }

    fn describe(&self, model: ModelId, name: &str) -> Result<(ServeConfig, TextModel), String> {
        if let Some(reason) = self.faults.lock().expect("no panic").get(&model.0) {
            return Err(reason.clone());
        }
        let setup = self.setup(model, name);
        let text = setup.text();
        Ok((setup.serve, text))
    }

    fn drop_page_cache(&self, model: ModelId, _: &str) {
        self.dropped.lock().expect("no panic").push(model.0);
    }

    fn further_models(&self) -> Vec<ModelSetting> {
        *self.num_looks.lock().expect("no panic") += 1;
        let names = self.further.lock().expect("no panic").clone();
        let setting = |name| setting(name, KeepAlive::Forever);
        names.into_iter().map(setting).collect()
    }
}

impl MockLoader {
    fn setup(&self, model: ModelId, name: &str) -> Setup {
        let mut setup = Setup::new();
        setup.mock = self.mocks[model.0].clone();
        setup.serve.served_model_names = vec![name.to_owned()];
        setup.serve.other_names = other_names(name);
        setup
    }
}

fn setting(name: &str, keep_alive: KeepAlive) -> ModelSetting {
    ModelSetting {
        names: vec![name.to_owned()],
        other_names: other_names(name),
        adapters: Vec::new(),
        is_pinned: false,
        keep_alive,
        takes_keep_alive: true,
    }
}

struct ModelServer {
    address: SocketAddr,
    models: ModelSet,
    loader: Arc<MockLoader>,
    shutdown: ShutdownSender,
}

struct Options {
    names: Vec<&'static str>,
    server: ServerConfig,
    num_in_memory: u64,
    keep_alive: KeepAlive,
    takes_keep_alive: bool,
    pinned: Option<&'static str>,
}

/// A short name of the model's own, and one that all models have.
fn other_names(name: &str) -> Vec<String> {
    vec![format!("{name}:short"), "shared".to_owned()]
}

impl Options {
    fn of(names: &[&'static str], num_in_memory: u64) -> Self {
        Self {
            names: names.to_vec(),
            server: ServerConfig::default(),
            num_in_memory,
            keep_alive: KeepAlive::Forever,
            takes_keep_alive: true,
            pinned: None,
        }
    }

    async fn start(self) -> ModelServer {
        let parts = ServerParts::new(self.server, None, None, Vec::new());
        let mocks = (0..=self.names.len() as u64).map(|seed| MockConfig {
            seed,
            ..Setup::new().mock
        });
        let loader = Arc::new(MockLoader {
            parts: parts.clone(),
            names: self.names.clone(),
            mocks: mocks.collect(),
            loads: Mutex::default(),
            faults: Mutex::default(),
            further: Mutex::default(),
            num_looks: Mutex::default(),
            dropped: Mutex::default(),
        });
        let settings = self.names.iter().map(|name| ModelSetting {
            is_pinned: self.pinned == Some(*name),
            takes_keep_alive: self.takes_keep_alive,
            ..setting(name, self.keep_alive)
        });
        let config = ModelSetConfig {
            models: settings.collect(),
            has_several: self.names.len() > 1,
            max_memory_bytes: self.num_in_memory * MODEL_BYTES,
            load_timeout: Duration::from_secs(600),
            loader: Some(loader.clone()),
        };
        let models = ModelSet::new(parts, config).expect("the names differ");
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("an address");
        let (shutdown, asked) = Shutdown::channel();
        tokio::spawn(serve(listener, None, models.clone(), asked));
        ModelServer {
            address,
            models,
            loader,
            shutdown,
        }
    }
}

impl Drop for ModelServer {
    fn drop(&mut self) {
        self.models.close();
    }
}

impl ModelServer {
    fn body(model: &str) -> Value {
        json!({"model": model, "prompt": "ab", "max_tokens": 5, "temperature": 0})
    }

    async fn complete(&self, model: &str) -> Reply {
        post(self.address, "/v1/completions", &Self::body(model)).await
    }

    /// Returns the answer of a model, computed without a server.
    fn oracle(&self, model: usize) -> Vec<u32> {
        let mock = &self.loader.mocks[model];
        mock.lone_tokens(&[crate::fixture::AB], &SamplingParams::GREEDY, 5)
    }

    async fn asks_and_is_right(&self, model: usize) {
        let name = self.loader.names[model];
        let mut body = Self::body(name);
        body["return_token_ids"] = json!(true);
        let reply = post(self.address, "/v1/completions", &body).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        let choice = &reply.json()["choices"][0];
        assert_eq!(choice["token_ids"], json!(self.oracle(model)), "{name}");
    }

    /// Returns the states of all models in `/v1/models`.
    async fn states(&self) -> Vec<String> {
        let list = get(self.address, "/v1/models").await.json();
        let models = list["data"].as_array().expect("a list");
        let state = |model: &Value| model["status"]["value"].as_str().map(str::to_owned);
        models.iter().filter_map(state).collect()
    }

    async fn reaches(&self, states: &[&str]) {
        wait_until_asked("the models have these states", async || {
            self.states().await == states
        })
        .await;
    }

    /// Waits until a step of a request is in flight: a drain refuses a request that is still being prepared.
    async fn runs(&self, model: &str) {
        wait_until_asked("a request runs", async || {
            self.counter("corella_num_requests_running", model).await == Some(1.0)
        })
        .await;
    }

    fn loads(&self) -> Vec<usize> {
        self.loader.loads.lock().expect("no panic").clone()
    }

    async fn counter(&self, name: &str, model: &str) -> Option<f64> {
        let text = get(self.address, "/metrics").await;
        let label = format!("model_name=\"{model}\"");
        let line = text.text().lines().find(|line| {
            line.strip_prefix(name)
                .is_some_and(|rest| rest.starts_with('{'))
                && line.contains(&label)
        })?;
        line.rsplit(' ').next()?.parse().ok()
    }
}

#[tokio::test]
async fn requests_load_their_models_and_the_least_recently_used_makes_room() {
    let server = Options::of(&["a", "b", "c"], 2).start().await;
    assert_eq!(server.states().await, ["unloaded", "unloaded", "unloaded"]);
    for model in [0, 1, 0, 2] {
        server.asks_and_is_right(model).await;
    }
    assert_eq!(server.states().await, ["loaded", "unloaded", "loaded"]);
    server.asks_and_is_right(1).await;
    assert_eq!(server.states().await, ["unloaded", "loaded", "loaded"]);
    assert_eq!(server.loads(), [0, 1, 2, 1]);
    let running = get(server.address, "/api/ps").await.json();
    let running = running["models"].as_array().expect("a list");
    let names: Vec<_> = running.iter().map(|model| &model["name"]).collect();
    assert_eq!(names, ["b:latest", "c:latest"]);
}

#[tokio::test]
async fn a_model_stays_while_its_requests_run() {
    let server = Options::of(&["a", "b"], 1).start().await;
    let gate = &server.loader.mocks[0].gate;
    gate.close();
    let mut first = open_post(server.address, "/v1/completions", &ModelServer::body("a")).await;
    server.reaches(&["loaded", "unloaded"]).await;
    let mut second = open_post(server.address, "/v1/completions", &ModelServer::body("b")).await;
    server.reaches(&["loaded", "loading"]).await;
    assert_eq!(server.loads(), [0]);
    gate.open();
    assert_eq!(read_reply(&mut first).await.status, 200);
    assert_eq!(read_reply(&mut second).await.status, 200);
    assert_eq!(server.loads(), [0, 1]);
}

#[tokio::test]
async fn models_are_loaded_and_unloaded_by_name() {
    let server = Options::of(&["a", "b"], 1).start().await;
    let ask = async |path: &str, model: &str| {
        let reply = post(server.address, path, &json!({"model": model})).await;
        if reply.status == 200 {
            assert_eq!(reply.json(), json!({"success": true}));
        }
        reply.status
    };
    assert_eq!(ask("/models/unload", "a").await, 400, "it is not loaded");
    assert_eq!(ask("/models/load", "a").await, 200);
    server.reaches(&["loaded", "unloaded"]).await;
    assert_eq!(ask("/models/load", "a:short").await, 400, "it is loaded");
    assert_eq!(ask("/models/load", "b").await, 200);
    server.reaches(&["unloaded", "loaded"]).await;
    let list = get(server.address, "/models").await.json();
    let statuses = [&list["data"][0]["status"], &list["data"][1]["status"]];
    assert_eq!(statuses[0], &json!({"value": "unloaded"}));
    let loaded = json!({"value": "loaded", "memory_bytes": MODEL_BYTES});
    assert_eq!(statuses[1], &loaded);
    // A running request ends first.
    let gate = server.loader.mocks[1].gate.clone();
    let _end = OpenAtEnd(gate.clone());
    gate.close();
    let mut running = open_post(server.address, "/v1/completions", &ModelServer::body("b")).await;
    server.runs("b").await;
    assert_eq!(ask("/models/unload", "b").await, 200);
    assert_eq!(server.states().await, ["unloaded", "loaded"]);
    gate.open();
    assert_eq!(read_reply(&mut running).await.status, 200);
    server.reaches(&["unloaded", "unloaded"]).await;
    assert_eq!(server.loads(), [0, 1]);
    for path in ["/models/load", "/models/unload"] {
        assert_eq!(ask(path, "c").await, 404, "{path}");
        let refused = post(server.address, path, &json!({})).await;
        assert_eq!(
            (refused.status, &refused.error()["param"]),
            (400, &json!("model"))
        );
    }
    let fault = (0, "its file has gone".to_owned());
    server
        .loader
        .faults
        .lock()
        .expect("no panic")
        .extend([fault]);
    assert_eq!(ask("/models/load", "a").await, 200);
    server.reaches(&["failed", "unloaded"]).await;
    let refused = post(server.address, "/models/load", &json!({"model": "a"})).await;
    assert_eq!(refused.error()["code"], "model_unavailable");
    let list = get(server.address, "/v1/models").await.json();
    let failed = json!({"value": "failed", "failed": true, "error": "its file has gone"});
    assert_eq!(list["data"][0]["status"], failed);
}

#[tokio::test]
async fn a_model_is_shown_without_being_loaded() {
    let server = Options::of(&["a", "b"], 1).start().await;
    let show = async |body: Value| post(server.address, "/api/show", &body).await;
    let unloaded = show(json!({"model": "b:latest"})).await.json();
    assert_eq!(server.loads(), [] as [usize; 0]);
    assert_eq!(unloaded["modelfile"], "FROM b\n");
    assert_eq!(unloaded["capabilities"], json!(["completion"]));
    let length = &unloaded["model_info"]["decoder.context_length"];
    assert_eq!(length, &json!(crate::fixture::MAX_MODEL_LEN));
    server.asks_and_is_right(1).await;
    assert_eq!(show(json!({"name": "b"})).await.json(), unloaded);
    assert_eq!(show(json!({})).await.json()["modelfile"], "FROM a\n");
    assert_eq!(show(json!({"model": "c"})).await.status, 404);
    // Files that cannot be read.
    let server = Options::of(&["a"], 1).start().await;
    let fault = (0, "its file has gone".to_owned());
    server
        .loader
        .faults
        .lock()
        .expect("no panic")
        .extend([fault]);
    let refused = post(server.address, "/api/show", &json!({"model": "a"})).await;
    assert_eq!(refused.status, 503);
    assert!(
        refused.text().contains("its file has gone"),
        "{}",
        refused.text()
    );
}

#[tokio::test]
async fn a_model_without_a_loader_stays() {
    let server = TestServer::start().await;
    let refused = post(server.address, "/sleep", &json!({})).await;
    assert_eq!(refused.status, 409);
    let unload = post(server.address, "/models/unload", &json!({"model": MODEL})).await;
    assert_eq!(unload.status, 409);
    let load = post(server.address, "/models/load", &json!({"model": MODEL})).await;
    assert_eq!(load.status, 400, "it is loaded");
    let asleep = get(server.address, "/is_sleeping").await.json();
    assert_eq!(asleep, json!({"is_sleeping": false}));
    let body = json!({"model": MODEL, "keep_alive": 0, "stream": false});
    let reply = post(server.address, "/api/generate", &body).await;
    assert_eq!(reply.json()["done_reason"], "load");
}

#[tokio::test]
async fn ollama_requests_say_how_long_a_model_stays() {
    let server = Options::of(&["a"], 1).start().await;
    let ask = async |keep_alive: Value| {
        let body = json!({
            "model": "a:latest", "prompt": "x", "stream": false, "options": {"num_predict": 2},
            "keep_alive": keep_alive,
        });
        let reply = post(server.address, "/api/generate", &body).await;
        assert_eq!(reply.json()["done_reason"], "length", "{}", reply.text());
    };
    let expires_at = async || {
        let running = get(server.address, "/api/ps").await.json();
        running["models"][0]["expires_at"]
            .as_str()
            .map(str::to_owned)
    };
    ask(json!(-1)).await;
    assert_eq!(expires_at().await.as_deref(), Some("9999-12-31T23:59:59Z"));
    ask(json!("24h")).await;
    let later = expires_at().await.expect("it is loaded");
    assert!(later.starts_with("20"), "{later}");
    // Ten thousand years are for ever: clients cannot read years of five digits.
    ask(json!("87660000h")).await;
    assert_eq!(expires_at().await.as_deref(), Some("9999-12-31T23:59:59Z"));
    ask(json!(0)).await;
    server.reaches(&["unloaded"]).await;
    ask(json!("24h")).await;
    let body = json!({"model": "a", "keep_alive": 0});
    let unloaded = post(server.address, "/api/generate", &body).await.json();
    assert_eq!(unloaded["done_reason"], "unload");
    assert_eq!(unloaded["done"], true);
    server.reaches(&["unloaded"]).await;
    // No load begins only to unload the model again.
    let body = json!({"model": "a", "messages": [], "keep_alive": "0s"});
    let unloaded = post(server.address, "/api/chat", &body).await.json();
    assert_eq!(unloaded["done_reason"], "unload");
    assert_eq!(server.loads(), [0, 0]);
    let body = json!({"model": "a", "prompt": "x", "keep_alive": "5"});
    assert_eq!(
        post(server.address, "/api/generate", &body).await.status,
        400
    );
}

/// A caller that has the model unloaded cannot hold up other callers: their requests are admitted until the model is
/// idle.
#[tokio::test]
async fn a_busy_model_that_is_to_leave_takes_further_requests() {
    let server = Options::of(&["a"], 1).start().await;
    let gate = &server.loader.mocks[0].gate;
    gate.close();
    let mut first = open_post(server.address, "/v1/completions", &ModelServer::body("a")).await;
    server.reaches(&["loaded"]).await;
    let body = json!({"model": "a", "keep_alive": 0});
    let unloaded = post(server.address, "/api/generate", &body).await.json();
    assert_eq!(unloaded["done_reason"], "unload");
    let text = json!({"model": "a", "prompt": "x"});
    let reply = post(server.address, "/tokenize", &text).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    gate.open();
    assert_eq!(read_reply(&mut first).await.status, 200);
    server.reaches(&["unloaded"]).await;
    assert_eq!(server.loads(), [0]);
}

#[tokio::test]
async fn a_server_without_a_time_for_idle_models_ignores_that_of_requests() {
    let mut options = Options::of(&["a"], 1);
    options.takes_keep_alive = false;
    let server = options.start().await;
    for (prompt, done_reason) in [("x", "length"), ("", "load")] {
        let body = json!({
            "model": "a", "prompt": prompt, "stream": false, "options": {"num_predict": 2},
            "keep_alive": 0,
        });
        let reply = post(server.address, "/api/generate", &body).await;
        assert_eq!(reply.json()["done_reason"], done_reason);
    }
    let running = get(server.address, "/api/ps").await.json();
    assert_eq!(running["models"][0]["expires_at"], "9999-12-31T23:59:59Z");
    assert_eq!(server.states().await, ["loaded"]);
    assert_eq!(server.loads(), [0]);
}

/// Rule 37. A request that waits for its model holds its body, and the handler takes the same one.
#[tokio::test]
async fn the_bodies_of_waiting_requests_are_bounded_together() {
    let mut options = Options::of(&["a", "b"], 1);
    options.server.max_body_memory = 100_000;
    let server = options.start().await;
    let gate = &server.loader.mocks[0].gate;
    gate.close();
    let mut first = open_post(server.address, "/v1/completions", &ModelServer::body("a")).await;
    server.reaches(&["loaded", "unloaded"]).await;
    let padded = |num_bytes: usize| {
        let mut body = ModelServer::body("b").to_string();
        body.extend(std::iter::repeat_n(' ', num_bytes));
        body
    };
    let large = padded(60_000);
    let head = head("POST", "/v1/completions", &[], Some(large.len()));
    let mut waiting = open(server.address, &head, large.as_bytes()).await;
    server.reaches(&["loaded", "loading"]).await;
    let refused = post_bytes(server.address, "/v1/completions", padded(50_000).as_bytes()).await;
    assert_eq!(refused.error()["code"], "body_memory_full");
    gate.open();
    assert_eq!(read_reply(&mut first).await.status, 200);
    assert_eq!(read_reply(&mut waiting).await.status, 200);
    let reply = post_bytes(server.address, "/v1/completions", padded(50_000).as_bytes()).await;
    assert_eq!(reply.status, 200, "the body's share is given back");
}

/// A text thread parses bodies of this size.
#[tokio::test]
async fn a_large_body_chooses_its_model_and_has_the_bound_on_values() {
    let server = Options::of(&["a", "b"], 2).start().await;
    let mut body = ModelServer::body("b").to_string();
    body.extend(std::iter::repeat_n(' ', 300_000));
    let reply = post_bytes(server.address, "/v1/completions", body.as_bytes()).await;
    assert_eq!(reply.json()["model"], "b");
    let mut body = ModelServer::body("b");
    body["stream"] = json!(vec![json!([]); 150_000]);
    let refused = post(server.address, "/v1/completions", &body).await;
    assert_eq!(
        (refused.status, &refused.error()["param"]),
        (400, &json!("stream"))
    );
    assert!(refused.text().contains("values"), "{}", refused.text());
}

#[tokio::test]
async fn an_idle_model_is_unloaded() {
    let mut options = Options::of(&["a"], 1);
    options.keep_alive = KeepAlive::For(Duration::from_millis(1));
    let server = options.start().await;
    server.asks_and_is_right(0).await;
    server.reaches(&["unloaded"]).await;
    server.asks_and_is_right(0).await;
}

#[tokio::test]
async fn a_model_that_cannot_be_loaded_fails_only_its_own_requests() {
    let server = Options::of(&["a", "b"], 2).start().await;
    let faults = &server.loader.faults;
    faults
        .lock()
        .expect("no panic")
        .insert(0, "its file has gone".to_owned());
    for _ in 0..2 {
        let refused = server.complete("a").await;
        assert_eq!(refused.status, 503);
        let error = refused.error();
        assert_eq!(error["code"], "model_unavailable");
        let message = error["message"].as_str().expect("a message");
        assert!(message.contains("its file has gone"), "{message}");
    }
    assert_eq!(
        server.loads(),
        [0],
        "the second request is refused without a load"
    );
    server.asks_and_is_right(1).await;
    assert_eq!(server.states().await, ["failed", "loaded"]);
}

#[tokio::test]
async fn a_model_that_never_fits_is_refused_with_the_figures() {
    let server = Options::of(&["a"], 0).start().await;
    let refused = server.complete("a").await;
    assert_eq!(
        (refused.status, &refused.error()["code"]),
        (503, &json!("model_unavailable"))
    );
    assert!(
        refused.text().contains("--model-memory"),
        "{}",
        refused.text()
    );
    assert_eq!(server.loads(), [] as [usize; 0]);
}

#[tokio::test]
async fn names_choose_the_model_and_unknown_ones_load_none() {
    let server = Options::of(&["a", "b"], 2).start().await;
    let unknown = server.complete("c").await;
    assert_eq!(
        (unknown.status, &unknown.error()["code"]),
        (404, &json!("model_not_found"))
    );
    assert!(unknown.text().contains("`a`, `b`"), "{}", unknown.text());
    assert_eq!(server.loads(), [] as [usize; 0]);
    assert_eq!(server.complete("b:short").await.status, 200);
    assert_eq!(server.loads(), [1]);
    let absent = json!({"prompt": "x", "max_tokens": 1});
    let first = post(server.address, "/v1/completions", &absent)
        .await
        .json();
    assert_eq!(first["model"], "a");
    for query in ["model=b", "x=1&model=%62%3ashort"] {
        let props = get(server.address, &format!("/props?{query}")).await.json();
        assert_eq!(props["model_alias"], "b", "{query}");
    }
    let malformed = get(server.address, "/props?model=%6").await;
    assert_eq!(malformed.status, 400);
}

#[tokio::test]
async fn a_request_may_name_a_model_that_only_the_loader_knows() {
    let server = Options::of(&["a", "b"], 2).start().await;
    assert_eq!(server.complete("owner/c").await.status, 404);
    server
        .loader
        .further
        .lock()
        .expect("no panic")
        .push("owner/c");
    // The page lists the models of the last look.
    let page = get(server.address, "/page/models.json").await.json();
    assert_eq!(page["data"].as_array().map(Vec::len), Some(2));
    // A list is no use.
    assert_eq!(server.states().await, ["unloaded", "unloaded", "unloaded"]);
    let page = get(server.address, "/page/models.json").await.json();
    assert_eq!(page["data"][2]["id"], "owner/c");
    let tags = get(server.address, "/api/tags").await.json();
    assert_eq!(tags["models"][5]["name"], "owner/c:latest");
    assert_eq!(tags["models"][6]["name"], "owner/c:short");
    let asleep = get(server.address, "/props?model=owner%2Fc").await;
    assert_eq!(asleep.error()["code"], "model_asleep");
    for name in ["owner/../owner/c", "/owner/c", "../c", "owner/d"] {
        let unknown = server.complete(name).await;
        assert_eq!(unknown.error()["code"], "model_not_found", "{name}");
        assert!(unknown.text().contains("`owner/c`"), "{}", unknown.text());
    }
    assert_eq!(
        server.counter("corella_model_loads_total", "owner/c").await,
        None
    );
    let reply = server.complete("owner/c:short").await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(server.states().await, ["unloaded", "unloaded", "loaded"]);
    assert_eq!(server.loads(), [2]);
    let model = get(server.address, "/v1/models/owner/c").await.json();
    assert_eq!(model["status"]["value"], "loaded");
    // Its place stays when the loader has lost it, and its name means no other model.
    server.loader.further.lock().expect("no panic").clear();
    assert_eq!(server.complete("owner/c").await.status, 200);
    assert_eq!(server.loads(), [2]);
}

#[tokio::test]
async fn ollamas_tag_costs_a_known_model_no_look() {
    let server = Options::of(&["a", "b"], 2).start().await;
    let ask = async |model: &str| {
        let body = json!({"model": model, "prompt": "ab", "stream": false});
        post(server.address, "/api/generate", &body).await.status
    };
    let num_looks = || *server.loader.num_looks.lock().expect("no panic");
    server.loader.further.lock().expect("no panic").push("c");
    assert_eq!(ask("a:latest").await, 200);
    assert_eq!(ask("b").await, 200);
    assert_eq!(num_looks(), 0);
    assert_eq!(ask("c:latest").await, 200);
    assert_eq!(num_looks(), 1);
    assert_eq!(ask("c:latest").await, 200);
    assert_eq!(num_looks(), 1);
    assert_eq!(ask("d:latest").await, 404);
    assert_eq!(num_looks(), 2);
    get(server.address, "/page/models.json").await;
    assert_eq!(num_looks(), 2);
}

#[tokio::test]
async fn a_pinned_model_is_loaded_without_a_request_and_stays() {
    let mut options = Options::of(&["a", "b", "c"], 2);
    options.pinned = Some("b");
    options.keep_alive = KeepAlive::For(Duration::ZERO);
    let server = options.start().await;
    server.models.load_pinned();
    server.reaches(&["unloaded", "loaded", "unloaded"]).await;
    for model in [1, 0, 2, 0] {
        server.asks_and_is_right(model).await;
    }
    server.reaches(&["unloaded", "loaded", "unloaded"]).await;
    assert_eq!(server.loads(), [1, 0, 2, 0]);
}

#[tokio::test]
async fn a_drain_ends_the_wait_for_a_model() {
    let server = Options::of(&["a", "b"], 1).start().await;
    let gate = &server.loader.mocks[0].gate;
    gate.close();
    let mut first = open_post(server.address, "/v1/completions", &ModelServer::body("a")).await;
    server.reaches(&["loaded", "unloaded"]).await;
    let mut second = open_post(server.address, "/v1/completions", &ModelServer::body("b")).await;
    server.reaches(&["loaded", "loading"]).await;
    server.runs("a").await;
    server.shutdown.try_send(()).expect("it runs");
    let refused = read_reply(&mut second).await;
    assert_eq!(refused.error()["code"], "draining");
    gate.open();
    assert_eq!(read_reply(&mut first).await.status, 200);
}

#[tokio::test]
async fn a_model_that_was_put_in_expires_without_a_request() {
    let mut options = Options::of(&["a"], 1);
    options.keep_alive = KeepAlive::For(Duration::from_millis(1));
    let server = options.start().await;
    let state = server
        .loader
        .load(ModelId(0), "a", MEMORY)
        .expect("no fault");
    server.models.put_loaded(ModelId(0), MEMORY, state);
    server.reaches(&["unloaded"]).await;
}

/// Opens a gate when a test ends, so that no engine's thread outlives it.
struct OpenAtEnd(StepGate);

impl Drop for OpenAtEnd {
    fn drop(&mut self) {
        self.0.open();
    }
}

#[tokio::test]
async fn a_slow_body_does_not_hold_a_model() {
    let server = Options::of(&["a"], 1).start().await;
    server.asks_and_is_right(0).await;
    let head = head("POST", "/role", &[], Some(10));
    let mut slow = open(server.address, &head, b"").await;
    wait_until_asked("the request is there", async || {
        get(server.address, "/load").await.json() == json!({"server_load": 1})
    })
    .await;
    let slept = post(server.address, "/sleep", &json!({})).await;
    assert_eq!(slept.status, 200, "{}", slept.text());
    tokio::io::AsyncWriteExt::write_all(&mut slow, b"{        }")
        .await
        .expect("it reads");
    assert_eq!(read_reply(&mut slow).await.error()["code"], "model_asleep");
}

#[tokio::test]
async fn a_reset_says_which_caches_it_has_reached() {
    let server = Options::of(&["a", "b"], 2).start().await;
    server.asks_and_is_right(0).await;
    let gate = server.loader.mocks[1].gate.clone();
    let _end = OpenAtEnd(gate.clone());
    gate.close();
    gate.let_through(1);
    let mut body = ModelServer::body("b");
    body["prompt"] = json!("a prompt of some length");
    body["stream"] = json!(true);
    let mut running = open_post(server.address, "/v1/completions", &body).await;
    read_until(&mut running, "data:").await;
    let refused = post(server.address, "/reset_prefix_cache", &json!({})).await;
    assert_eq!(refused.status, 409, "{}", refused.text());
    let message = refused.error()["message"].to_string();
    let told = "Only `a` was reset. `b` was not: ";
    assert!(message.contains(told), "{message}");
}
