//! Sends spans to a collector of OpenTelemetry: OTLP over HTTP, as JSON.
//!
//! A thread sends them in batches. Requests never wait for the thread: spans that do not fit into its queue, or that
//! the collector refuses, are lost and counted.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use corella_engine::{Attribute, Span, SpanKind, SpanSink, rare_line};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::registry::Unit;
use serde_json::{Value, json};
use ureq::Agent;
use ureq::tls::{Certificate, RootCerts, TlsConfig};

use crate::Error;

/// Limits the waiting spans.
const MAX_WAITING: usize = 8192;
/// Limits the spans of one request to the collector.
const MAX_BATCH: usize = 512;
/// Time for which the first span of a batch waits for others.
const BATCH_DELAY: Duration = Duration::from_secs(1);
/// Limits the time until the collector answers.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The destination of spans, and the process's attributes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtlpConfig {
    /// The whole address, with its path.
    pub url: String,
    /// Headers of each request, for example a key of the collector.
    pub headers: Vec<(String, String)>,
    /// `service.name` and other attributes of the process.
    pub resource: Vec<(String, String)>,
}

/// Takes spans and sends them. Clones send to the same collector.
#[derive(Clone)]
pub struct OtlpExporter(Arc<Inner>);

struct Inner {
    /// `None` after the end, when no more spans are taken.
    queue: Mutex<Option<SyncSender<Span>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
    counts: Arc<Counts>,
}

#[derive(Default)]
struct Counts {
    sent: AtomicU64,
    dropped: AtomicU64,
}

impl OtlpExporter {
    pub fn start(config: OtlpConfig) -> Result<Self, Error> {
        let (queue, spans) = sync_channel(MAX_WAITING);
        let counts = Arc::new(Counts::default());
        let sender = Sender {
            agent: agent(),
            config,
            counts: counts.clone(),
        };
        let thread = std::thread::Builder::new()
            .name("otlp".to_owned())
            .spawn(move || sender.run(&spans))
            .map_err(|error| Error::Io("starting the thread for traces".to_owned(), error))?;
        Ok(Self(Arc::new(Inner {
            queue: Mutex::new(Some(queue)),
            thread: Mutex::new(Some(thread)),
            counts,
        })))
    }

    /// Sends the waiting spans, within the time limit of one request.
    pub fn finish(&self) {
        drop(lock(&self.0.queue).take());
        if let Some(thread) = lock(&self.0.thread).take() {
            // The thread ends after the last span. A thread that panicked sends nothing more.
            let _ = thread.join();
        }
    }
}

impl SpanSink for OtlpExporter {
    fn record(&self, span: Span) {
        // The lock is taken once for each span, not for each token, and held for a few instructions.
        let taken = match &*lock(&self.0.queue) {
            Some(queue) => queue.try_send(span).is_ok(),
            None => false,
        };
        if !taken {
            self.0.counts.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl fmt::Debug for OtlpExporter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OtlpExporter")
    }
}

impl Collector for OtlpExporter {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let Counts { sent, dropped } = &*self.0.counts;
        let counts = [
            (
                "corella_spans_sent",
                "Spans that the collector of traces has taken",
                sent,
            ),
            (
                "corella_spans_dropped",
                "Spans that were lost, because too many waited or the collector did not take them",
                dropped,
            ),
        ];
        for (name, help, count) in counts {
            let counter = ConstCounter::new(count.load(Ordering::Relaxed));
            let unit: Option<&Unit> = None;
            counter.encode(encoder.encode_descriptor(
                name,
                help,
                unit,
                counter.metric_type(),
            )?)?;
        }
        Ok(())
    }
}

/// The state of the sending thread.
struct Sender {
    agent: Agent,
    config: OtlpConfig,
    counts: Arc<Counts>,
}

impl Sender {
    fn run(self, spans: &Receiver<Span>) {
        while let Ok(first) = spans.recv() {
            let deadline = Instant::now() + BATCH_DELAY;
            let mut batch = vec![first];
            while batch.len() < MAX_BATCH {
                let wait = deadline.saturating_duration_since(Instant::now());
                match spans.recv_timeout(wait) {
                    Ok(span) => batch.push(span),
                    Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
                }
            }
            self.send(&batch);
        }
    }

    fn send(&self, batch: &[Span]) {
        let body = export_request(&self.config.resource, batch).to_string();
        let mut request = self.agent.post(&self.config.url);
        for (name, value) in &self.config.headers {
            request = request.header(name, value);
        }
        let sent = request
            .header("content-type", "application/json")
            .send(body.as_bytes());
        let num_spans = batch.len() as u64;
        let reason = match sent {
            Ok(response) if response.status().is_success() => {
                self.counts.sent.fetch_add(num_spans, Ordering::Relaxed);
                return;
            }
            Ok(response) => format!("it answers {}", response.status()),
            Err(error) => error.to_string(),
        };
        self.counts.dropped.fetch_add(num_spans, Ordering::Relaxed);
        rare_line!(
            warn,
            "spans are lost: the collector at {} rejects them: {reason}",
            self.config.url
        );
    }
}

fn agent() -> Agent {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let certs = rustls_native_certs::load_native_certs().certs;
    let roots: Vec<_> = certs
        .iter()
        .map(|one| Certificate::from_der(one).to_owned())
        .collect();
    let tls = TlsConfig::builder()
        .root_certs(RootCerts::new_with_certs(&roots))
        .unversioned_rustls_crypto_provider(provider);
    let agent = Agent::config_builder()
        .tls_config(tls.build())
        .http_status_as_error(false)
        .timeout_global(Some(TIMEOUT))
        .user_agent(concat!("corella/", env!("CARGO_PKG_VERSION")));
    agent.build().new_agent()
}

/// `ExportTraceServiceRequest` in the JSON form of Protocol Buffers, but with identifiers in hexadecimal.
fn export_request(resource: &[(String, String)], spans: &[Span]) -> Value {
    let resource: Vec<_> = resource
        .iter()
        .map(|(key, value)| json!({"key": key, "value": {"stringValue": value}}))
        .collect();
    let spans: Vec<_> = spans.iter().map(span_json).collect();
    json!({"resourceSpans": [{
        "resource": {"attributes": resource},
        "scopeSpans": [{
            "scope": {"name": "corella", "version": env!("CARGO_PKG_VERSION")},
            "spans": spans,
        }],
    }]})
}

fn span_json(span: &Span) -> Value {
    let attributes: Vec<_> = span
        .attributes
        .iter()
        .map(|(key, value)| {
            let value = match value {
                Attribute::Text(text) => json!({"stringValue": text}),
                // In the JSON form of Protocol Buffers, 64-bit integers are strings.
                Attribute::Number(number) => json!({"intValue": number.to_string()}),
            };
            json!({"key": key, "value": value})
        })
        .collect();
    let mut json = json!({
        "traceId": format!("{:032x}", span.context.trace_id),
        "spanId": format!("{:016x}", span.context.span_id),
        "name": span.name,
        "kind": match span.kind {
            SpanKind::Internal => 1,
            SpanKind::Server => 2,
            SpanKind::Client => 3,
        },
        "startTimeUnixNano": span.start_unix_ns.to_string(),
        "endTimeUnixNano": span.end_unix_ns.to_string(),
        "attributes": attributes,
    });
    if let Some(parent_id) = span.parent_id {
        json["parentSpanId"] = format!("{parent_id:016x}").into();
    }
    if let Some(error) = &span.error {
        json["status"] = json!({"code": 2, "message": error});
    }
    json
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
