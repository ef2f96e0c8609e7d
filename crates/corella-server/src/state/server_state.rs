//! The state of a served model, which its handlers share.

use std::sync::Arc;

use corella_engine::{Engine, Generate};
use prometheus_client::collector::Collector;

use crate::adapter::adapter_use::AdapterMetrics;
use crate::adapter::served_adapter::{AdapterLoader, ServedAdapters};
use crate::call::call_engine::CallEngine;
use crate::call::kv_transfer::KvTransfer;
use crate::call::metrics::{Metrics, OutputMetrics};
use crate::call::prompt_memory::PromptMemory;
use crate::config::serve_config::{ServeConfig, TextModel};
use crate::state::engine_feed::EngineFeed;
use crate::state::role_control::RoleControl;
use crate::state::server_parts::ServerParts;
use crate::text::served_model::ServedModel;
use crate::text::text_thread::Caller;
use crate::wire::api_error::ApiError;

pub struct ServerState {
    /// The parts that belong to the server, and not to this model.
    pub(crate) parts: Arc<ServerParts>,
    pub(crate) config: Arc<ServeConfig>,
    pub(crate) served: Arc<ServedModel>,
    /// This node's engine: its state, counters and cache.
    pub(crate) engine: Engine,
    pub(crate) calls: Arc<CallEngine>,
    /// Reads `kv_transfer_params`, which are refused if this is `None`.
    pub(crate) kv_transfer: Option<Arc<dyn KvTransfer>>,
    /// Changes this node's role, if it may have others.
    pub(crate) roles: Option<Arc<dyn RoleControl>>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) engine_feed: EngineFeed,
}

/// The generator that a model's requests are submitted to, and what belongs to it.
pub struct Backend {
    pub generator: Arc<dyn Generate>,
    /// Takes requests with `kv_transfer_params`, which are refused if this is `None`.
    pub kv_transfer: Option<Arc<dyn KvTransfer>>,
    /// Changes this node's role, if it may have others.
    pub roles: Option<Arc<dyn RoleControl>>,
    /// Reads adapters, if the server takes any.
    pub adapters: Option<Arc<dyn AdapterLoader>>,
    /// Counts outputs, including those of other nodes' requests.
    pub outputs: OutputMetrics,
    /// Collectors that add metrics to the server's.
    pub collectors: Vec<Box<dyn Collector>>,
}

impl ServerState {
    /// A model whose engine generates everything.
    pub fn new(
        parts: Arc<ServerParts>,
        config: ServeConfig,
        text: TextModel,
        engine: Engine,
    ) -> Arc<Self> {
        let generator = Arc::new(engine.clone());
        let backend = Backend {
            generator,
            kv_transfer: None,
            roles: None,
            adapters: None,
            outputs: OutputMetrics::default(),
            collectors: Vec::new(),
        };
        Self::with_backend(parts, config, text, engine, backend)
    }

    /// A model that submits to `backend`, which uses `engine` and perhaps other nodes.
    pub fn with_backend(
        parts: Arc<ServerParts>,
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
        let server = parts.config.clone();
        let served = ServedModel::new(server, config.clone(), text, adapters, takes_kv_transfer);
        let served = Arc::new(served);
        let prompts = PromptMemory::new(&engine);
        Arc::new(Self {
            parts,
            metrics: Arc::new(Metrics::new(&config, &engine, outputs, collectors)),
            engine_feed: EngineFeed::default(),
            config,
            calls: Arc::new(CallEngine::new(served.clone(), generator, prompts)),
            served,
            engine,
            kv_transfer,
            roles,
        })
    }

    /// Loads the adapter in folder `path`, which callers then name in `model`. The error says why the adapter cannot be
    /// loaded.
    pub fn load_adapter(&self, name: &str, path: &str) -> Result<(), String> {
        let loaded = self.served.adapters.load_here(name, path);
        loaded.map_err(|error| error.message().to_owned())
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
        self.parts.text_threads.run(num_bytes, work).await
    }
}
