//! What every handler shares.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use corella_core::TokenId;
use corella_engine::Engine;
use tokio::sync::{Semaphore, watch};

use crate::api_error::ApiError;
use crate::metrics::Metrics;
use crate::request_body::BodyLimits;
use crate::serve_config::{ServeConfig, TextModel};

pub struct ServerState {
    pub(crate) config: ServeConfig,
    pub(crate) text: TextModel,
    pub(crate) engine: Engine,
    pub(crate) metrics: Arc<Metrics>,
    /// Requests whose response is not yet complete.
    pub(crate) num_in_flight: watch::Sender<usize>,
    pub(crate) started_unix_s: u64,
    draining: AtomicBool,
    /// Threads that parse, render and tokenize at once.
    text_permits: Arc<Semaphore>,
}

impl ServerState {
    pub fn new(config: ServeConfig, text: TextModel, engine: Engine) -> Arc<Self> {
        let num_text_threads = std::thread::available_parallelism().map_or(1, usize::from);
        Arc::new(Self {
            metrics: Arc::new(Metrics::new(config.model_name())),
            config,
            text,
            engine,
            num_in_flight: watch::Sender::new(0),
            started_unix_s: unix_now_s(),
            draining: AtomicBool::new(false),
            text_permits: Arc::new(Semaphore::new(num_text_threads)),
        })
    }

    /// Not ready from now on; what runs goes on.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
        self.engine.drain();
    }

    pub(crate) fn body_limits(&self) -> BodyLimits {
        BodyLimits {
            max_bytes: self.config.max_body_bytes,
            timeout: self.config.body_timeout,
        }
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// Tokens that the model knows. A tokenizer may have more, and such a token would fail the
    /// step of everyone who shares it.
    pub(crate) fn encode(
        &self,
        param: &str,
        text: &str,
        add_special_tokens: bool,
    ) -> Result<Vec<TokenId>, ApiError> {
        let tokens = self
            .text
            .tokenizer
            .encode(text, add_special_tokens)
            .map_err(|error| ApiError::invalid(param, error.to_string()))?;
        let vocab_size = self.config.vocab_size;
        match tokens.iter().find(|&&token| token as usize >= vocab_size) {
            None => Ok(tokens),
            Some(token) => Err(ApiError::invalid(
                param,
                format!("holds token {token}; the model knows only {vocab_size}"),
            )),
        }
    }

    /// Runs work that takes long for large prompts away from the threads that serve sockets.
    pub(crate) async fn run_blocking<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Self) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let state = self.clone();
        // Held by the work, not by its caller: a caller that leaves does not end the work.
        let permit = self.text_permits.clone().acquire_owned().await;
        let work = move || {
            let result = work(&state);
            drop(permit);
            result
        };
        match tokio::task::spawn_blocking(work).await {
            Ok(result) => result,
            Err(error) => {
                tracing::error!(%error, "preparing a request failed");
                Err(ApiError::engine("Preparing the request failed."))
            }
        }
    }
}

pub(crate) fn unix_now_s() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |time| time.as_secs())
}
