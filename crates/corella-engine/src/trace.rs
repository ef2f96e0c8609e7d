//! A trace: the time spans of a request, on every node that serves it.
//!
//! Identifiers and their text follow W3C Trace Context, the rest the data model of OpenTelemetry.

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// A span of a trace, which may have children.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceContext {
    /// Not all zeros.
    pub trace_id: u128,
    /// Not zero.
    pub span_id: u64,
    /// Whether the origin of the trace records it.
    pub is_sampled: bool,
}

impl TraceContext {
    /// The first span of a new trace.
    pub fn root() -> Self {
        let trace_id = (u128::from(random()) << 64) | u128::from(random());
        Self {
            trace_id,
            span_id: random(),
            is_sampled: true,
        }
    }

    /// A new span in the same trace.
    pub fn child(&self) -> Self {
        Self {
            span_id: random(),
            ..*self
        }
    }

    /// Reads the header `traceparent`: `VERSION-TRACE_ID-SPAN_ID-FLAGS`. Later versions may have more fields after
    /// these.
    pub fn parse(header: &str) -> Option<Self> {
        let mut fields = header.split('-');
        let mut field = |num_digits: usize| {
            let text = fields.next()?;
            let is_hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
            let is_field = text.len() == num_digits && text.bytes().all(is_hex);
            is_field.then(|| u128::from_str_radix(text, 16).ok())?
        };
        let (version, trace_id, span_id, flags) = (field(2)?, field(32)?, field(16)?, field(2)?);
        let is_whole = version > 0 || fields.next().is_none();
        let is_valid = version != 0xff && trace_id != 0 && span_id != 0 && is_whole;
        is_valid.then_some(Self {
            trace_id,
            span_id: span_id as u64,
            is_sampled: flags & 1 == 1,
        })
    }
}

/// The header `traceparent`.
impl fmt::Display for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            trace_id,
            span_id,
            is_sampled,
        } = self;
        write!(
            f,
            "00-{trace_id:032x}-{span_id:016x}-{:02x}",
            u8::from(*is_sampled)
        )
    }
}

/// Returns a random number above 0. Each hasher of a process has random keys of its own.
fn random() -> u64 {
    RandomState::new().hash_one(0).max(1)
}

/// A span that has ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    pub name: String,
    pub context: TraceContext,
    /// The parent span, in this process or the caller's.
    pub parent_id: Option<u64>,
    pub kind: SpanKind,
    pub start_unix_ns: u64,
    pub end_unix_ns: u64,
    pub attributes: Vec<(&'static str, Attribute)>,
    /// The error, if any.
    pub error: Option<String>,
}

impl Span {
    /// `start` and `end` are times of this process.
    pub fn new(
        name: impl Into<String>,
        context: TraceContext,
        parent_id: Option<u64>,
        start: Instant,
        end: Instant,
    ) -> Self {
        Self {
            name: name.into(),
            context,
            parent_id,
            kind: SpanKind::Internal,
            start_unix_ns: unix_ns(start),
            end_unix_ns: unix_ns(end),
            attributes: Vec::new(),
            error: None,
        }
    }

    pub fn with(mut self, key: &'static str, value: impl Into<Attribute>) -> Self {
        self.attributes.push((key, value.into()));
        self
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpanKind {
    Internal,
    /// The span answers a request of another process.
    Server,
    /// The span waits for another process.
    Client,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Attribute {
    Text(String),
    Number(i64),
}

impl From<&str> for Attribute {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<u32> for Attribute {
    fn from(number: u32) -> Self {
        Self::Number(number.into())
    }
}

/// Takes ended spans. A sink neither waits nor fails: it loses the spans for which it has no room.
pub trait SpanSink: Send + Sync {
    fn record(&self, span: Span);
}

/// The sink of a process's spans.
#[derive(Clone)]
pub struct Tracer(Arc<dyn SpanSink>);

impl Tracer {
    pub fn new(sink: impl SpanSink + 'static) -> Self {
        Self(Arc::new(sink))
    }

    pub fn record(&self, span: Span) {
        self.0.record(span);
    }
}

impl fmt::Debug for Tracer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tracer")
    }
}

/// A span that has not ended, and its sink.
#[derive(Clone, Debug)]
pub struct TraceScope {
    tracer: Tracer,
    context: TraceContext,
    parent_id: Option<u64>,
}

impl TraceScope {
    /// A child of the caller's span, or the first span of a trace. `None` if the caller does not record the trace.
    pub fn begin(tracer: &Tracer, caller: Option<TraceContext>) -> Option<Self> {
        let context = match &caller {
            Some(caller) => caller.child(),
            None => TraceContext::root(),
        };
        context.is_sampled.then(|| Self {
            tracer: tracer.clone(),
            context,
            parent_id: caller.map(|caller| caller.span_id),
        })
    }

    /// A child of this span.
    pub fn child(&self) -> Self {
        Self {
            tracer: self.tracer.clone(),
            context: self.context.child(),
            parent_id: Some(self.context.span_id),
        }
    }

    /// The context for another process, whose spans become children of this one.
    pub fn context(&self) -> TraceContext {
        self.context
    }

    /// Ends the span, and records it after `describe` has added to it.
    pub fn finish(
        &self,
        name: &str,
        start: Instant,
        end: Instant,
        describe: impl FnOnce(Span) -> Span,
    ) {
        let span = Span::new(name, self.context, self.parent_id, start, end);
        self.tracer.record(describe(span));
    }
}

fn unix_ns(at: Instant) -> u64 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH);
    let ns = since_epoch
        .unwrap_or(Duration::ZERO)
        .saturating_sub(at.elapsed());
    u64::try_from(ns.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_example_of_the_standard_is_read_and_written() {
        let header = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
        let context = TraceContext::parse(header).expect("it is one");
        assert_eq!(context.trace_id, 0x4bf92f3577b34da6a3ce929d0e0e4736);
        assert_eq!(context.span_id, 0x00f067aa0ba902b7);
        assert!(context.is_sampled);
        assert_eq!(context.to_string(), header);
        let child = context.child();
        assert_eq!(child.trace_id, context.trace_id);
        assert_ne!(child.span_id, context.span_id);
        // A later version with one more field, and with an unknown flag.
        let later = "01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-02-more";
        let later = TraceContext::parse(later).expect("it is one");
        assert!(!later.is_sampled);
    }

    #[test]
    fn what_the_standard_rules_out_is_no_context() {
        for wrong in [
            "",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "00-4bf92f3577b34da6a3ce929d0e0e473-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-+0f067aa0ba902b7-01",
        ] {
            assert_eq!(TraceContext::parse(wrong), None, "{wrong}");
        }
    }
}
