//! A loaded model, with the threads that answer requests.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use corella::LocalServer;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use serde_json::{Map, Value};
use tokio::runtime::{Handle, Runtime};

use crate::job::Job;

/// The longest time that Python waits without checking for signals.
pub const SIGNAL_INTERVAL: Duration = Duration::from_millis(50);

/// The state that the engine and its jobs share.
pub struct Shared {
    /// `None` only during the drop.
    threads: Option<Threads>,
    handle: Handle,
    is_closed: AtomicBool,
    /// The number of requests so far.
    num_requests: AtomicU64,
    /// The process that loaded the model. Threads do not survive a fork.
    process: u32,
}

/// State that is of use only in the process that has the threads.
struct Threads {
    server: LocalServer,
    runtime: Runtime,
}

impl Shared {
    fn load(keywords: &Map<String, Value>) -> Result<Self, String> {
        let server = corella::load_by_keywords(keywords)?;
        let runtime = Runtime::new().map_err(|error| format!("starting threads: {error}"))?;
        Ok(Self {
            handle: runtime.handle().clone(),
            threads: Some(Threads { server, runtime }),
            is_closed: AtomicBool::new(false),
            num_requests: AtomicU64::new(0),
            process: std::process::id(),
        })
    }

    pub fn server(&self) -> &LocalServer {
        let threads = self.threads.as_ref();
        &threads
            .expect("the engine's threads are used during its drop")
            .server
    }

    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Reserves numbers for new requests, and returns the first. Numbers follow the order of the calls; threads may
    /// then send the requests in any order.
    pub fn take_numbers(&self, num_requests: usize) -> u64 {
        self.num_requests
            .fetch_add(num_requests as u64, Ordering::Relaxed)
    }

    /// Returns why this process cannot use the engine, if it is a fork of the process that loaded the model.
    pub fn why_elsewhere(&self) -> Option<&'static str> {
        (self.process != std::process::id()).then_some(
            "this LLM was loaded before the process forked, and its threads are in the other process: load \
             it afterwards, or start processes by `spawn`",
        )
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        match self.threads.take() {
            // A fork cannot stop threads that it does not have, and they may hold locks for ever.
            Some(threads) if self.why_elsewhere().is_some() => std::mem::forget(threads),
            // A plain drop would wait, with Python's lock held, for threads that read requests.
            Some(threads) => threads.runtime.shutdown_background(),
            None => {}
        }
    }
}

#[pyclass(frozen, module = "corella._corella")]
pub struct Engine {
    shared: Arc<Shared>,
}

#[pymethods]
impl Engine {
    /// Loads a model with the options `keywords`, a JSON object. Handles signals while it waits.
    #[new]
    fn new(py: Python<'_>, keywords: &str) -> PyResult<Self> {
        let keywords = serde_json::from_str(keywords);
        let keywords: Map<String, Value> =
            keywords.map_err(|error| PyValueError::new_err(error.to_string()))?;
        let (sender, mut loaded) = channel();
        let load = move || {
            // An interrupted caller no longer waits, and the model is dropped.
            let _ = sender.send(Shared::load(&keywords));
        };
        let thread = std::thread::Builder::new().name("corella-load".to_owned());
        thread.spawn(load)?;
        loop {
            // A `Receiver` is `Send` but not `Sync`, so the closure borrows it mutably.
            let loaded = &mut loaded;
            match py.detach(move || loaded.recv_timeout(SIGNAL_INTERVAL)) {
                Ok(Ok(shared)) => {
                    return Ok(Self {
                        shared: Arc::new(shared),
                    });
                }
                Ok(Err(reason)) => return Err(PyValueError::new_err(reason)),
                Err(RecvTimeoutError::Timeout) => py.check_signals()?,
                Err(RecvTimeoutError::Disconnected) => {
                    let reason = "loading the model failed, as standard error tells";
                    return Err(PyRuntimeError::new_err(reason));
                }
            }
        }
    }

    /// The name of the folder or file of the model.
    #[getter]
    fn name(&self) -> &str {
        &self.shared.server().name
    }

    #[getter]
    fn max_model_len(&self) -> u32 {
        self.shared.server().max_model_len
    }

    #[getter]
    fn has_chat_template(&self) -> bool {
        self.shared.server().has_chat_template
    }

    /// The engine's configuration, in one line.
    #[getter]
    fn summary(&self) -> &str {
        &self.shared.server().summary
    }

    /// The sampling parameters that the model's files recommend: fields of a request, as a JSON object.
    #[getter]
    fn generation_defaults(&self) -> PyResult<String> {
        let fields = serde_json::to_string(&self.shared.server().generation_defaults);
        fields.map_err(|error| PyRuntimeError::new_err(error.to_string()))
    }

    /// The number of the engine's requests, waiting or running; 0 in a fork.
    #[getter]
    fn num_live_requests(&self) -> usize {
        match self.shared.why_elsewhere() {
            None => self.shared.server().engine.stats().num_live_requests,
            Some(_) => 0,
        }
    }

    /// Posts each body to an endpoint. Items are answers, in the order of their arrival.
    fn answer_all(&self, path: String, bodies: Vec<String>) -> PyResult<Job> {
        self.check()?;
        Ok(Job::answer_all(self.shared.clone(), path, bodies))
    }

    /// Checks each body for an endpoint, and answers none. Items are refusals, in the order of the bodies.
    fn check_all(&self, path: String, bodies: Vec<String>) -> PyResult<Job> {
        self.check()?;
        Ok(Job::check_all(self.shared.clone(), path, bodies))
    }

    /// Posts a body that asks for a stream. Items are events.
    fn stream(&self, path: String, body: String) -> PyResult<Job> {
        self.check()?;
        Ok(Job::stream(self.shared.clone(), path, body))
    }

    /// Returns the text of each token. A text may be a part of a character.
    fn token_texts(&self, token_ids: Vec<u32>) -> Vec<String> {
        let tokenizer = &self.shared.server().tokenizer;
        let bytes = |id: u32| tokenizer.token_bytes(id).unwrap_or_default();
        let text = |id| String::from_utf8_lossy(bytes(id)).into_owned();
        token_ids.into_iter().map(text).collect()
    }

    /// The size of the tokenizer's vocabulary, which may be smaller than the model's.
    #[getter]
    fn vocab_size(&self) -> usize {
        self.shared.server().tokenizer.vocab_size()
    }

    fn encode(&self, py: Python<'_>, text: &str, add_special_tokens: bool) -> PyResult<Vec<u32>> {
        let tokenizer = &self.shared.server().tokenizer;
        let encoded = py.detach(|| tokenizer.encode(text, add_special_tokens));
        encoded.map_err(|error| PyRuntimeError::new_err(error.to_string()))
    }

    fn decode(&self, token_ids: Vec<u32>, skip_special_tokens: bool) -> PyResult<String> {
        let tokenizer = &self.shared.server().tokenizer;
        let decoded = tokenizer.decode(&token_ids, skip_special_tokens);
        decoded.map_err(|error| PyRuntimeError::new_err(error.to_string()))
    }

    /// Ends every request and stops the engine.
    fn close(&self, py: Python<'_>) {
        self.shared.is_closed.store(true, Ordering::SeqCst);
        // A fork has no engine to stop.
        if self.shared.why_elsewhere().is_none() {
            py.detach(|| self.shared.server().engine.shutdown());
        }
    }

    #[getter]
    fn is_closed(&self) -> bool {
        self.shared.is_closed.load(Ordering::SeqCst)
    }
}

impl Engine {
    fn check(&self) -> PyResult<()> {
        let closed = self.is_closed().then_some("this LLM is closed");
        match closed.or_else(|| self.shared.why_elsewhere()) {
            Some(reason) => Err(PyRuntimeError::new_err(reason)),
            None => Ok(()),
        }
    }
}
