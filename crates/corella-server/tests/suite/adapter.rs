//! Adapters: named instead of the model, loaded and unloaded while requests run.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use corella_engine::{Engine, LoadedAdapter};
use corella_model::Adapter;
use corella_server::AdapterLoader;
use corella_test::{wait_until_asked, wait_until_async};
use serde_json::{Value, json};

use crate::client::{get, open_post, post};
use crate::fixture::{MODEL, Setup, TestServer};

const PATH: &str = "/v1/completions";
const LOAD: &str = "/v1/load_lora_adapter";
const UNLOAD: &str = "/v1/unload_lora_adapter";

/// Loads adapters of every folder but `missing`. The mock executor only uses the name.
struct Loader {
    engine: Engine,
    mount: Arc<Mount>,
}

/// A file system that does not answer for the folder `stalled` until released.
#[derive(Default)]
struct Mount {
    num_stalled: AtomicUsize,
    goes_on: (Mutex<bool>, Condvar),
}

impl Mount {
    fn stall(&self) {
        self.num_stalled.fetch_add(1, Ordering::Relaxed);
        let (goes_on, changed) = &self.goes_on;
        let goes_on = goes_on.lock().expect("no holder panics");
        let _unused = changed.wait_while(goes_on, |goes_on| !*goes_on);
    }

    fn go_on(&self) {
        *self.goes_on.0.lock().expect("no holder panics") = true;
        self.goes_on.1.notify_all();
    }
}

impl AdapterLoader for Loader {
    fn load(&self, name: &str, path: &str) -> Result<LoadedAdapter, String> {
        if path == "missing" {
            return Err("missing/adapter_config.json: no such file".to_owned());
        }
        if path == "stalled" {
            self.mount.stall();
        }
        let adapters = self.engine.adapters().expect("the mock takes adapters");
        let adapter = Adapter {
            layers: Vec::new(),
            left_out: Vec::new(),
        };
        Ok(LoadedAdapter::new(name, &adapter, adapters.clone()))
    }
}

/// A server that takes adapters.
pub fn setup() -> Setup {
    setup_with(Arc::default())
}

fn setup_with(mount: Arc<Mount>) -> Setup {
    let mut setup = Setup::new();
    setup.serve.max_num_adapters = 2;
    setup.adapters = Some(Box::new(|engine| Arc::new(Loader { engine, mount })));
    setup
}

pub async fn load(server: &TestServer, name: &str) {
    let body = json!({"lora_name": name, "lora_path": format!("folder/{name}")});
    let reply = post(server.address, LOAD, &body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
}

async fn answer(server: &TestServer, model: &str) -> Value {
    let body = json!({
        "model": model, "prompt": "a long prompt that fills several pages", "max_tokens": 20,
        "temperature": 0,
    });
    let reply = post(server.address, PATH, &body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    let answer = reply.json();
    assert_eq!(answer["model"], model);
    answer
}

fn text(answer: &Value) -> &str {
    answer["choices"][0]["text"].as_str().expect("a text")
}

fn num_cached(answer: &Value) -> u64 {
    let details = &answer["usage"]["prompt_tokens_details"];
    details["cached_tokens"].as_u64().expect("a number")
}

#[tokio::test]
async fn an_adapter_is_a_model_with_a_cache_of_its_own() {
    let server = setup().start().await;
    load(&server, "red").await;
    load(&server, "blue").await;
    let names = [MODEL, "red", "blue"];
    let mut texts = Vec::new();
    for name in names {
        let first = answer(&server, name).await;
        assert_eq!(num_cached(&first), 0, "{name} sees another's pages");
        let second = answer(&server, name).await;
        assert!(num_cached(&second) > 0);
        assert_eq!(text(&first), text(&second));
        texts.push(text(&first).to_owned());
    }
    assert_ne!(texts[0], texts[1]);
    assert_ne!(texts[1], texts[2]);

    let list = get(server.address, "/v1/models").await.json();
    let models = list["data"].as_array().expect("a list").iter();
    let models: Vec<_> = models
        .map(|model| (&model["id"], &model["root"], &model["parent"]))
        .collect();
    let blue = (&json!("blue"), &json!("folder/blue"), &json!(MODEL));
    let red = (&json!("red"), &json!("folder/red"), &json!(MODEL));
    assert_eq!(
        models,
        [(&json!(MODEL), &json!(MODEL), &Value::Null), blue, red]
    );
}

#[tokio::test]
async fn an_adapter_has_vectors_of_its_own() {
    let server = setup().start().await;
    load(&server, "red").await;
    let mut vectors = Vec::new();
    for name in [MODEL, "red", "red"] {
        let body = json!({"model": name, "input": "a text of several pages"});
        let answer = post(server.address, "/v1/embeddings", &body).await.json();
        assert_eq!(answer["model"], name);
        vectors.push(answer["data"][0]["embedding"].clone());
    }
    assert_ne!(vectors[0], vectors[1]);
    assert_eq!(vectors[1], vectors[2]);
}

#[tokio::test]
async fn no_choice_of_names_mixes_two_adapters_up() {
    let server = setup().start().await;
    load(&server, "red#2").await;
    load(&server, "red").await;
    let first = answer(&server, "red#2").await;
    let other = answer(&server, "red").await;
    assert_eq!(num_cached(&other), 0);
    assert_ne!(text(&first), text(&other));
}

#[tokio::test]
async fn requests_end_with_the_adapter_that_they_began_with() {
    let server = setup().start().await;
    load(&server, "red").await;
    let expected = text(&answer(&server, "red").await).to_owned();
    let address = server.address;
    let body = json!({
        "model": "red", "prompt": "a long prompt that fills several pages", "max_tokens": 20,
        "temperature": 0,
    });
    server.gate().close();
    let running = tokio::spawn(async move { post(address, PATH, &body).await });
    server.has_running(1).await;
    let reply = post(address, UNLOAD, &json!({"lora_name": "red"})).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    let refused = post(address, PATH, &json!({"model": "red", "prompt": "a"})).await;
    assert_eq!(refused.status, 404, "{}", refused.text());
    server.gate().open();
    let answer = running.await.expect("it answers").json();
    assert_eq!(text(&answer), expected);

    // Blocks cached for the old adapter of this name must not match the new one.
    load(&server, "red").await;
    let again = self::answer(&server, "red").await;
    assert_eq!(num_cached(&again), 0);
}

#[tokio::test]
async fn what_cannot_be_loaded_says_why() {
    let server = setup().start().await;
    load(&server, "red").await;
    let refused = |body: Value| {
        let address = server.address;
        async move {
            let reply = post(address, LOAD, &body).await;
            let error = reply.json();
            let message = error["error"]["message"]
                .as_str()
                .unwrap_or_default()
                .to_owned();
            (reply.status, message)
        }
    };
    let (status, message) = refused(json!({"lora_name": "red", "lora_path": "a"})).await;
    assert_eq!(status, 400);
    assert!(message.contains("is loaded already"), "{message}");
    let (status, message) = refused(json!({"lora_name": MODEL, "lora_path": "a"})).await;
    assert_eq!(status, 400);
    assert!(message.contains("is the model's name"), "{message}");
    let (status, message) = refused(json!({"lora_name": "x", "lora_path": "missing"})).await;
    assert_eq!(status, 400);
    assert!(
        message.contains("adapter_config.json: no such file"),
        "{message}"
    );
    let (status, message) = refused(json!({"lora_path": "a"})).await;
    assert_eq!((status, &*message), (400, "lora_name: is required"));
    // The failed load has freed its place.
    load(&server, "blue").await;
    let (status, message) = refused(json!({"lora_name": "green", "lora_path": "a"})).await;
    assert_eq!(status, 409);
    assert!(message.contains("--max-loras"), "{message}");
    let reply = post(server.address, UNLOAD, &json!({"lora_name": "green"})).await;
    assert_eq!(reply.status, 400, "{}", reply.text());

    let without = TestServer::start().await;
    let body = json!({"lora_name": "red", "lora_path": "a"});
    let reply = post(without.address, LOAD, &body).await;
    assert_eq!(reply.status, 409);
    assert!(reply.text().contains("--enable-lora"), "{}", reply.text());
}

#[tokio::test]
async fn a_stalled_file_system_holds_up_nothing_but_its_own_loads() {
    let mount = Arc::new(Mount::default());
    let mut setup = setup_with(mount.clone());
    setup.serve.max_num_adapters = 8;
    let server = setup.start().await;
    let address = server.address;
    let mut stalled: Vec<_> = (0..4)
        .map(|i| {
            let body = json!({"lora_name": format!("stalled-{i}"), "lora_path": "stalled"});
            tokio::spawn(async move { post(address, LOAD, &body).await })
        })
        .collect();
    let is_stalled = || mount.num_stalled.load(Ordering::Relaxed) == 4;
    wait_until_async("four threads are stalled", is_stalled).await;
    answer(&server, MODEL).await;
    let further = post(
        address,
        LOAD,
        &json!({"lora_name": "red", "lora_path": "a"}),
    )
    .await;
    assert_eq!(further.status, 409);
    assert!(
        further.text().contains("does not answer"),
        "{}",
        further.text()
    );
    // An adapter unloaded during its load is never served.
    let unloaded = post(address, UNLOAD, &json!({"lora_name": "stalled-0"})).await;
    assert_eq!(unloaded.status, 200, "{}", unloaded.text());
    // The caller of this load stops waiting, but the loading thread does not.
    let cancelled = stalled.remove(0).await.expect("it is answered");
    assert_eq!(cancelled.status, 409, "{}", cancelled.text());
    mount.go_on();
    for load in stalled {
        assert_eq!(load.await.expect("it is answered").status, 200);
    }
    let unknown = post(address, PATH, &json!({"model": "stalled-0", "prompt": "a"})).await;
    assert_eq!(unknown.status, 404);
    load(&server, "red").await;
}

#[tokio::test]
async fn a_load_that_takes_too_long_is_given_up() {
    let mount = Arc::new(Mount::default());
    let mut setup = setup_with(mount.clone());
    setup.serve.adapter_load_timeout = Duration::ZERO;
    let server = setup.start().await;
    let body = json!({"lora_name": "red", "lora_path": "stalled"});
    for _ in 0..2 {
        // The adapter's name is free again at once.
        let reply = post(server.address, LOAD, &body).await;
        assert_eq!(reply.status, 400);
        assert!(reply.text().contains("given up"), "{}", reply.text());
    }
    mount.go_on();
}

#[tokio::test]
async fn a_load_whose_caller_has_left_is_given_up_too() {
    let mount = Arc::new(Mount::default());
    let mut setup = setup_with(mount.clone());
    setup.serve.adapter_load_timeout = Duration::from_secs(1);
    let server = setup.start().await;
    let address = server.address;
    let body = json!({"lora_name": "red", "lora_path": "stalled"});
    let client = open_post(address, LOAD, &body).await;
    let is_stalled = || mount.num_stalled.load(Ordering::Relaxed) == 1;
    wait_until_async("a thread is stalled", is_stalled).await;
    drop(client);
    let other = json!({"lora_name": "red", "lora_path": "missing"});
    wait_until_asked("its name is free again", async || {
        let reply = post(address, LOAD, &other).await;
        !reply.text().contains("loaded already")
    })
    .await;
    mount.go_on();
}

/// Gateways choose a server by the labels of vLLM's metric.
#[tokio::test]
async fn adapters_at_work_are_told_as_in_vllm() {
    const NAME: &str = "vllm:lora_requests_info";
    let plain = TestServer::start().await;
    assert_eq!(plain.metric(NAME, &[]).await, None);

    let mut setup = setup().holding_behind(1);
    setup.scheduler.max_num_seqs = 1;
    let server = setup.start().await;
    load(&server, "red").await;
    load(&server, "blue").await;
    let labels = |running: &str, waiting: &str| {
        [
            "max_lora=\"2\"".to_owned(),
            format!("running_lora_adapters=\"{running}\""),
            format!("waiting_lora_adapters=\"{waiting}\""),
        ]
    };
    let is_told = async |running: &str, waiting: &str| {
        let labels = labels(running, waiting);
        let labels: Vec<&str> = labels.iter().map(String::as_str).collect();
        wait_until_asked("the adapters are told", async || {
            server.metric(NAME, &labels).await.is_some()
        })
        .await;
    };
    is_told("", "").await;
    let call = |model: &str| json!({"model": model, "prompt": "hi", "max_tokens": 5});
    let first = open_post(server.address, PATH, &call("red")).await;
    is_told("red", "").await;
    let second = open_post(server.address, PATH, &call("blue")).await;
    is_told("red", "blue").await;
    // A client that leaves ends its call.
    drop(second);
    is_told("red", "").await;
    server.gate().open();
    is_told("", "").await;
    drop(first);
    server.assert_at_rest().await;
}
