//! The parts of the server that all its models share.

use std::sync::{Arc, OnceLock};

use prometheus_client::collector::Collector;
use tokio::sync::watch;

use crate::call::account::ApiKeys;
use crate::call::metrics::HttpMetrics;
use crate::clock::unix_now_s;
use crate::config::api_key::ApiKey;
use crate::config::server_config::ServerConfig;
use crate::state::use_count::UseCount;
use crate::store::batch_table::Batches;
use crate::store::response_store::ResponseStore;
use crate::text::text_thread::TextThreads;
use crate::wire::api_error::ApiError;
use crate::wire::constant_answer::ConstantAnswer;
use crate::wire::field_check::FieldCheck;
use crate::wire::field_table::Endpoint;
use crate::wire::request_body::BodyReader;

pub struct ServerParts {
    pub(crate) config: Arc<ServerConfig>,
    pub(crate) api_keys: Arc<ApiKeys>,
    pub(crate) bodies: BodyReader,
    pub(crate) responses: Arc<ResponseStore>,
    /// Batches and their files, if a folder is configured.
    batches: Option<Arc<Batches>>,
    pub(crate) http_metrics: HttpMetrics,
    /// Number of requests whose response is not yet complete.
    pub(crate) num_in_flight: watch::Sender<usize>,
    pub(crate) use_count: UseCount,
    pub(crate) started_unix_s: u64,
    is_draining: watch::Sender<bool>,
    pub(crate) text_threads: TextThreads,
    /// The answers of `/openapi.json`, `/` and `/docs`, each made for its first request.
    pub(crate) openapi: OnceLock<ConstantAnswer>,
    pub(crate) page: OnceLock<ConstantAnswer>,
    pub(crate) docs: OnceLock<ConstantAnswer>,
}

impl ServerParts {
    /// `model_name` labels the metrics of HTTP requests, if the server has only one model. `collectors` add metrics of
    /// parts unknown to the server.
    pub fn new(
        config: ServerConfig,
        batches: Option<Arc<Batches>>,
        model_name: Option<&str>,
        collectors: Vec<Box<dyn Collector>>,
    ) -> Arc<Self> {
        let is_draining = watch::Sender::new(false);
        Arc::new(Self {
            batches,
            responses: Arc::new(ResponseStore::new(config.max_stored_response_bytes)),
            bodies: BodyReader::new(&config, is_draining.subscribe()),
            http_metrics: HttpMetrics::new(model_name, collectors),
            api_keys: Arc::new(ApiKeys::new(config.api_keys.clone(), config.clock.clone())),
            config: Arc::new(config),
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

    /// The error tells the caller that the server has no folder for files.
    pub(crate) fn batches(&self) -> Result<&Arc<Batches>, ApiError> {
        self.batches.as_ref().ok_or_else(ApiError::no_files)
    }

    /// Returns the check of a request that concerns no model.
    pub(crate) fn field_check(&self, endpoint: Endpoint) -> FieldCheck {
        FieldCheck {
            endpoint,
            allow_unknown_fields: self.config.allow_unknown_fields,
            takes_kv_transfer: false,
        }
    }

    /// Refuses new requests from now on; running ones continue.
    pub(crate) fn drain(&self) {
        self.is_draining.send_replace(true);
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
}
