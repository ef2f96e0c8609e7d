//! Metrics of the server: its HTTP requests, its process, and the states of its models.

use std::fmt;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use crate::text::text_thread::TextWork;

use super::Names;
use super::process::ProcessMetrics;
use super::rendering::Renderer;

pub struct HttpMetrics {
    registry: Registry,
    /// Metrics of the process, without a model label.
    process: Registry,
    pub renderer: Renderer,
    text_work_waiting: Gauge,
    text_work_oldest: Gauge<f64, AtomicU64>,
    http_requests: Family<HttpLabels, Counter>,
    model_state: Family<StateLabels, Gauge>,
    model_load: Family<ModelLabels, Histogram, fn() -> Histogram>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct HttpLabels {
    path: String,
    status: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ModelLabels {
    model_name: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabels {
    model_name: String,
    state: &'static str,
}

/// Bounds for the time to load a model.
const LOAD_BUCKETS: [f64; 12] = [
    0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0,
];

impl HttpMetrics {
    /// `model_name` becomes a label, if the server has only one model.
    pub fn new(model_name: Option<&str>, collectors: Vec<Box<dyn Collector>>) -> Self {
        let label = model_name.map(|name| ("model_name".into(), name.to_owned().into()));
        let mut registry = Registry::with_labels(label.into_iter());
        for collector in collectors {
            registry.register_collector(collector);
        }
        let mut process = Registry::default();
        process.register_collector(Box::new(ProcessMetrics));
        let new_histogram: fn() -> Histogram = || Histogram::new(LOAD_BUCKETS);
        let (mut names, mut of_process) = (Names(&mut registry), Names(&mut process));
        Self {
            model_state: of_process.ours(
                "model_state",
                "1 for the present state of each model, and 0 for its other states",
                Family::default(),
            ),
            model_load: of_process.ours(
                "model_load_seconds",
                "Time to load a model for a request that waits for it",
                Family::new_with_constructor(new_histogram),
            ),
            text_work_waiting: names.ours(
                "text_work_waiting",
                "Bodies that wait for a text thread, which reads, renders and tokenises them",
                Gauge::default(),
            ),
            text_work_oldest: names.ours(
                "text_work_oldest_seconds",
                "How long a text thread has worked on the oldest body; new requests wait if this time keeps growing",
                Gauge::default(),
            ),
            http_requests: names.ours(
                "http_requests",
                "HTTP requests by path (other: one that does not exist) and status (499: the client left early)",
                Family::default(),
            ),
            registry,
            process,
            renderer: Renderer::new(Duration::ZERO),
        }
    }

    pub fn handle_response(&self, path: &str, status: u16) {
        let path = path.to_owned();
        self.http_requests
            .get_or_create(&HttpLabels { path, status })
            .inc();
    }

    pub fn handle_load(&self, model: &str, time: Duration) {
        let model_name = model.to_owned();
        let times = self.model_load.get_or_create(&ModelLabels { model_name });
        times.observe(time.as_secs_f64());
    }

    /// Notes the state of a model, which is one of `states`. The model's loads are listed even before the first one.
    pub fn set_model_state(&self, model: &str, state: &str, states: &[&'static str]) {
        for known in states {
            let labels = StateLabels {
                model_name: model.to_owned(),
                state: known,
            };
            let is_it = i64::from(*known == state);
            self.model_state.get_or_create(&labels).set(is_it);
        }
        let model_name = model.to_owned();
        let _ = self.model_load.get_or_create(&ModelLabels { model_name });
    }

    /// Adds these metrics to those of the models, as OpenMetrics text, which Prometheus prefers and older scrapers can
    /// read.
    pub fn encode(&self, text: &mut String, text_work: TextWork) -> fmt::Result {
        self.text_work_waiting.set(text_work.num_waiting as i64);
        self.text_work_oldest.set(text_work.oldest.as_secs_f64());
        encode_registry(text, &self.registry)?;
        encode_registry(text, &self.process)?;
        encode_eof(text)
    }
}
