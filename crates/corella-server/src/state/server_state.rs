//! The state that all handlers share.

use std::sync::{Arc, OnceLock};

use corella_engine::{Engine, Generate};
use prometheus_client::collector::Collector;
use tokio::sync::watch;

use crate::adapter::adapter_use::AdapterMetrics;
use crate::adapter::served_adapter::{AdapterLoader, ServedAdapters};
use crate::call::account::ApiKeys;
use crate::call::call_engine::CallEngine;
use crate::call::kv_transfer::KvTransfer;
use crate::call::metrics::{Metrics, OutputMetrics};
use crate::call::prompt_memory::PromptMemory;
use crate::clock::unix_now_s;
use crate::config::api_key::ApiKey;
use crate::config::serve_config::{ServeConfig, TextModel};
use crate::state::engine_feed::EngineFeed;
use crate::state::role_control::RoleControl;
use crate::state::use_count::UseCount;
use crate::store::batch_table::Batches;
use crate::store::response_store::ResponseStore;
use crate::text::served_model::ServedModel;
use crate::text::text_thread::{Caller, TextThreads, TextWork};
use crate::wire::api_error::ApiError;
use crate::wire::constant_answer::ConstantAnswer;
use crate::wire::request_body::BodyReader;

pub struct ServerState {
    pub(crate) config: Arc<ServeConfig>,
    pub(crate) api_keys: Arc<ApiKeys>,
    pub(crate) served: Arc<ServedModel>,
    /// This node's engine: its state, counters and cache.
    pub(crate) engine: Engine,
    pub(crate) calls: Arc<CallEngine>,
    /// Reads `kv_transfer_params`, which are refused if this is `None`.
    pub(crate) kv_transfer: Option<Arc<dyn KvTransfer>>,
    /// Changes this node's role, if it may have others.
    pub(crate) roles: Option<Arc<dyn RoleControl>>,
    pub(crate) bodies: BodyReader,
    pub(crate) responses: Arc<ResponseStore>,
    /// Batches and their files, if a folder is configured.
    batches: Option<Arc<Batches>>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) engine_feed: EngineFeed,
    /// Number of requests whose response is not yet complete.
    pub(crate) num_in_flight: watch::Sender<usize>,
    pub(crate) use_count: UseCount,
    pub(crate) started_unix_s: u64,
    is_draining: watch::Sender<bool>,
    text_threads: TextThreads,
    /// The answers of `/openapi.json`, `/` and `/docs`, each made for its first request.
    pub(crate) openapi: OnceLock<ConstantAnswer>,
    pub(crate) page: OnceLock<ConstantAnswer>,
    pub(crate) docs: OnceLock<ConstantAnswer>,
}

/// The generator that a server submits to, and what belongs to it.
pub struct Backend {
    pub generator: Arc<dyn Generate>,
    /// Takes requests with `kv_transfer_params`, which are refused if this is `None`.
    pub kv_transfer: Option<Arc<dyn KvTransfer>>,
    /// Changes this node's role, if it may have others.
    pub roles: Option<Arc<dyn RoleControl>>,
    /// Reads adapters, if the server takes any.
    pub adapters: Option<Arc<dyn AdapterLoader>>,
    /// Runs batches, if a folder is configured.
    pub batches: Option<Arc<Batches>>,
    /// Counts outputs, including those of other nodes' requests.
    pub outputs: OutputMetrics,
    /// Collectors that add metrics to the server's.
    pub collectors: Vec<Box<dyn Collector>>,
}

impl ServerState {
    /// A server whose engine generates everything.
    pub fn new(config: ServeConfig, text: TextModel, engine: Engine) -> Arc<Self> {
        let generator = Arc::new(engine.clone());
        let backend = Backend {
            generator,
            kv_transfer: None,
            roles: None,
            adapters: None,
            batches: None,
            outputs: OutputMetrics::default(),
            collectors: Vec::new(),
        };
        Self::with_backend(config, text, engine, backend)
    }

    /// A server that submits to `backend`, which uses `engine` and perhaps other nodes.
    pub fn with_backend(
        config: ServeConfig,
        text: TextModel,
        engine: Engine,
        backend: Backend,
    ) -> Arc<Self> {
        let Backend {
            generator,
            kv_transfer,
            roles,
            adapters,
            batches,
            outputs,
            mut collectors,
        } = backend;
        let adapters = ServedAdapters::new(
            adapters,
            &config,
            engine.served_adapters().clone(),
            outputs.adapter_uses.clone(),
        );
        if adapters.is_on() {
            collectors.push(Box::new(AdapterMetrics {
                uses: adapters.uses().clone(),
                max_adapters: config.max_num_adapters,
            }));
        }
        let config = Arc::new(config);
        let takes_kv_transfer = kv_transfer.is_some();
        let served = ServedModel::new(config.clone(), text, adapters, takes_kv_transfer);
        let served = Arc::new(served);
        let is_draining = watch::Sender::new(false);
        let prompts = PromptMemory::new(&engine);
        Arc::new(Self {
            batches,
            responses: Arc::new(ResponseStore::new(config.max_stored_response_bytes)),
            bodies: BodyReader::new(&config, is_draining.subscribe()),
            metrics: Arc::new(Metrics::new(&config, &engine, outputs, collectors)),
            engine_feed: EngineFeed::default(),
            api_keys: Arc::new(ApiKeys::new(config.api_keys.clone(), config.clock.clone())),
            config,
            calls: Arc::new(CallEngine::new(served.clone(), generator, prompts)),
            served,
            engine,
            kv_transfer,
            roles,
            num_in_flight: watch::Sender::new(0),
            use_count: UseCount::default(),
            started_unix_s: unix_now_s(),
            is_draining,
            text_threads: TextThreads::new(),
            openapi: OnceLock::new(),
            page: OnceLock::new(),
            docs: OnceLock::new(),
        })
    }

    /// Replaces all keys from the next request on. `keys` must not be empty: a server never becomes open while it runs.
    pub fn replace_api_keys(&self, keys: Vec<ApiKey>) {
        assert!(!keys.is_empty(), "a server that requires keys keeps some");
        self.api_keys.replace(keys);
    }

    /// Loads the adapter in folder `path`, which callers then name in `model`. The error says why the adapter cannot be
    /// loaded.
    pub fn load_adapter(&self, name: &str, path: &str) -> Result<(), String> {
        let loaded = self.served.adapters.load_here(name, path);
        loaded.map_err(|error| error.message().to_owned())
    }

    /// The error tells the caller that the server has no folder for files.
    pub(crate) fn batches(&self) -> Result<&Arc<Batches>, ApiError> {
        self.batches.as_ref().ok_or_else(ApiError::no_files)
    }

    /// Refuses new requests from now on; running ones continue.
    pub(crate) fn drain(&self) {
        self.is_draining.send_replace(true);
        self.engine.drain();
    }

    pub(crate) fn is_draining(&self) -> bool {
        *self.is_draining.borrow()
    }

    /// Returns when the server begins to drain.
    pub async fn draining(&self) {
        // The sender is part of `self`, so it outlives the wait.
        let _ = self
            .is_draining
            .subscribe()
            .wait_for(|&is_draining| is_draining)
            .await;
    }

    pub(crate) fn text_work(&self) -> TextWork {
        self.text_threads.stats()
    }

    /// Runs work on a blocking thread: long work must not hold up the threads that serve sockets. `num_bytes` is the
    /// size of the work's input.
    pub(crate) async fn run_blocking<T: Send + 'static>(
        &self,
        num_bytes: usize,
        work: impl FnOnce(&ServedModel, &Caller) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let served = self.served.clone();
        let work = move |caller: &Caller| work(&served, caller);
        self.text_threads.run(num_bytes, work).await
    }
}
