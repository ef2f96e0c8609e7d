//! The state that all handlers share.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use corella_core::TokenId;
use corella_engine::{Engine, Generate};
use corella_text::{EncodeLimit, EncodedPair, GrammarCompiler, RenderLimit, TextError};
use prometheus_client::collector::Collector;
use tokio::sync::watch;

use crate::adapter::{AdapterLoader, ServedAdapters};
use crate::api_error::ApiError;
use crate::api_key::{ApiKey, ApiKeys};
use crate::batches::Batches;
use crate::body_memory::BodyMemory;
use crate::caller_grammars::CallerGrammars;
use crate::engine_feed::EngineFeed;
use crate::kv_transfer::KvTransfer;
use crate::metrics::{AdapterMetrics, KvDiskMetrics, Metrics, OutputMetrics};
use crate::response_store::ResponseStore;
use crate::role::RoleControl;
use crate::serve_config::{ServeConfig, TextModel};
use crate::text_thread::{Caller, TextThreads, TextWork};
use crate::wire::constant_answer::ConstantAnswer;
use crate::wire::field_check::FieldCheck;
use crate::wire::field_table::Endpoint;

pub struct ServerState {
    pub(crate) config: ServeConfig,
    pub(crate) api_keys: ApiKeys,
    pub(crate) text: TextModel,
    /// This node's engine: its state, counters and cache.
    pub(crate) engine: Engine,
    /// The generator of answers: the engine, or the engine with other nodes.
    pub(crate) generator: Arc<dyn Generate>,
    /// Reads `kv_transfer_params`; without it they are refused.
    pub(crate) kv_transfer: Option<Arc<dyn KvTransfer>>,
    /// Changes this node's role, if it may have others.
    pub(crate) roles: Option<Arc<dyn RoleControl>>,
    pub(crate) body_memory: Arc<BodyMemory>,
    pub(crate) adapters: ServedAdapters,
    pub(crate) responses: ResponseStore,
    /// Batches and their files, if a folder is configured.
    batches: Option<Arc<Batches>>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) engine_feed: EngineFeed,
    /// Number of requests whose response is not yet complete.
    pub(crate) num_in_flight: watch::Sender<usize>,
    pub(crate) started_unix_s: u64,
    is_draining: watch::Sender<bool>,
    /// An atomic, because every token reads it.
    is_cutting_off: AtomicBool,
    text_threads: TextThreads,
    /// Made for the first request, as the page is.
    pub(crate) openapi: OnceLock<ConstantAnswer>,
    pub(crate) page: OnceLock<ConstantAnswer>,
    pub(crate) docs: OnceLock<ConstantAnswer>,
    /// Made for the first request that needs it, because reading the vocabulary takes time.
    grammars: OnceLock<Result<GrammarCompiler, String>>,
}

/// The generator that a server submits to, and its companions.
pub struct Backend {
    pub generator: Arc<dyn Generate>,
    /// Takes requests with `kv_transfer_params`, which are refused if it is `None`.
    pub kv_transfer: Option<Arc<dyn KvTransfer>>,
    /// Changes this node's role, if it may have others.
    pub roles: Option<Arc<dyn RoleControl>>,
    /// Reads adapters, if the server takes any.
    pub adapters: Option<Arc<dyn AdapterLoader>>,
    /// Runs batches, if a folder is configured.
    pub batches: Option<Arc<Batches>>,
    /// Counts outputs, including those of other nodes' requests.
    pub outputs: OutputMetrics,
    /// Add metrics to the server's.
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
            config.max_num_adapters,
            config.adapter_load_timeout,
            engine.served_adapters().clone(),
            outputs.adapter_uses.clone(),
        );
        if adapters.is_on() {
            collectors.push(Box::new(AdapterMetrics {
                uses: adapters.uses().clone(),
                max_adapters: config.max_num_adapters,
            }));
        }
        if engine.stats().kv_disk.is_some() {
            collectors.push(Box::new(KvDiskMetrics(engine.clone())));
        }
        Arc::new(Self {
            batches,
            responses: ResponseStore::new(config.max_stored_response_bytes),
            body_memory: BodyMemory::new(config.max_body_memory),
            adapters,
            metrics: Arc::new(Metrics::new(&config, engine.limits(), outputs, collectors)),
            engine_feed: EngineFeed::default(),
            api_keys: ApiKeys::new(config.api_keys.clone(), config.clock.clone()),
            config,
            text,
            engine,
            generator,
            kv_transfer,
            roles,
            num_in_flight: watch::Sender::new(0),
            started_unix_s: unix_now_s(),
            is_draining: watch::Sender::new(false),
            is_cutting_off: AtomicBool::new(false),
            text_threads: TextThreads::new(),
            openapi: OnceLock::new(),
            page: OnceLock::new(),
            docs: OnceLock::new(),
            grammars: OnceLock::new(),
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

    /// Refuses new requests from now on; running ones continue.
    pub(crate) fn drain(&self) {
        self.is_draining.send_replace(true);
        self.engine.drain();
    }

    /// Ends every generation with an error at its next poll. This wakes no task: the caller must then wake the
    /// connections, which poll their generations.
    pub(crate) fn cut_off(&self) {
        self.is_cutting_off.store(true, Ordering::Relaxed);
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

    pub(crate) fn is_cutting_off(&self) -> bool {
        self.is_cutting_off.load(Ordering::Relaxed)
    }

    pub(crate) fn field_check(&self, endpoint: Endpoint) -> FieldCheck {
        FieldCheck {
            endpoint,
            allow_unknown_fields: self.config.allow_unknown_fields,
            takes_kv_transfer: self.kv_transfer.is_some(),
        }
    }

    /// Tokenises a text, within the context. A tokenizer may have tokens that the model lacks;
    /// these are refused, because they would fail their whole step.
    pub(crate) fn encode(
        &self,
        param: &str,
        text: &str,
        add_special_tokens: bool,
        caller: &Caller,
    ) -> Result<Vec<TokenId>, ApiError> {
        let limit = EncodeLimit {
            max_tokens: self.config.max_model_len as usize,
            is_abandoned: &|| caller.has_left(),
        };
        let tokens = self
            .text
            .tokenizer
            .encode_within(text, add_special_tokens, limit)
            .map_err(|error| self.text_error(param, error))?;
        self.check_known(param, &tokens)?;
        Ok(tokens)
    }

    /// Tokenises two texts for a model that reads both at once, as `encode` does with one.
    pub(crate) fn encode_pair(
        &self,
        param: &str,
        pair: (&str, &str),
        add_special_tokens: bool,
        caller: &Caller,
    ) -> Result<EncodedPair, ApiError> {
        let limit = EncodeLimit {
            max_tokens: self.config.max_model_len as usize,
            is_abandoned: &|| caller.has_left(),
        };
        let encoded = { &self.text.tokenizer }.encode_pair(pair, add_special_tokens, limit);
        let encoded = encoded.map_err(|error| self.text_error(param, error))?;
        self.check_known(param, &encoded.tokens)?;
        Ok(encoded)
    }

    fn text_error(&self, param: &str, error: TextError) -> ApiError {
        match error {
            TextError::TooManyTokens { at_least } => {
                ApiError::prompt_too_long(param, at_least, self.config.max_model_len)
            }
            error => ApiError::invalid(param, error.to_string()),
        }
    }

    fn check_known(&self, param: &str, tokens: &[TokenId]) -> Result<(), ApiError> {
        let vocab_size = self.config.vocab_size;
        match tokens.iter().find(|&&token| token as usize >= vocab_size) {
            None => Ok(()),
            Some(token) => Err(ApiError::invalid(
                param,
                format!("holds token {token}; the model knows only {vocab_size}"),
            )),
        }
    }

    /// Returns the compiler of grammars for the model's vocabulary, which works while `caller` waits.
    pub(crate) fn grammars<'a>(
        &'a self,
        caller: &'a Caller,
    ) -> Result<CallerGrammars<'a>, ApiError> {
        let grammars = self.grammars.get_or_init(|| {
            let new = GrammarCompiler::new(&self.text.tokenizer, self.config.vocab_size);
            new.inspect_err(|error| tracing::error!(error, "no grammar can be followed"))
        });
        match grammars {
            Ok(compiler) => Ok(CallerGrammars { compiler, caller }),
            Err(_) => Err(ApiError::engine(
                "The vocabulary of this model cannot be held to a grammar.",
            )),
        }
    }

    /// Limits a template's output: a little more than the context can hold, because
    /// `continue_final_message` cuts off the text after the last message.
    pub(crate) fn render_limit<'a>(&self, is_abandoned: &'a dyn Fn() -> bool) -> RenderLimit<'a> {
        const BEHIND_BYTES: usize = 64 << 10;
        // Some tokenizers have no such bound.
        const MAX_BYTES_PER_TOKEN: usize = 1024;
        let max_bytes_per_token = self.text.tokenizer.max_bytes_per_token();
        let max_bytes_per_token = max_bytes_per_token.unwrap_or(MAX_BYTES_PER_TOKEN);
        let max_bytes = max_bytes_per_token.saturating_mul(self.config.max_model_len as usize);
        RenderLimit {
            max_bytes: max_bytes.saturating_add(BEHIND_BYTES),
            is_abandoned,
        }
    }

    pub(crate) fn text_work(&self) -> TextWork {
        self.text_threads.stats()
    }

    /// Runs work on a blocking thread: long work must not hold up the threads that serve sockets. `num_bytes` is the
    /// size of its input.
    pub(crate) async fn run_blocking<T: Send + 'static>(
        self: &Arc<Self>,
        num_bytes: usize,
        work: impl FnOnce(&Self, &Caller) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let state = self.clone();
        let work = move |caller: &Caller| work(&state, caller);
        self.text_threads.run(num_bytes, work).await
    }
}

pub(crate) fn unix_now_s() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |time| time.as_secs())
}
