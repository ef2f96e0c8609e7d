//! The streams to decode nodes, and the measured times of each attempt.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use corella_core::NodeId;
use corella_core::session::{SessionKey, ToDecode, ToPrefill};
use corella_engine::{Attribute, SpanKind, TraceScope};
use tracing::Instrument;

use super::{Node, State};
use crate::driver::Driver;
use crate::session::link::{Link, linger};
use crate::session::service;
use crate::session::wire::{self, Envelope};
use crate::transport::TransferAccount;

/// Measurements of an attempt.
struct Progress {
    /// The span of the session, within the span of its request.
    trace: Option<TraceScope>,
    opened_at: Instant,
    is_allocated: bool,
    has_decoded: bool,
}

impl Progress {
    /// Ends the session's span, for any outcome.
    fn end_trace(&self, node: NodeId) {
        let Some(trace) = &self.trace else {
            return;
        };
        trace.finish("session", self.opened_at, Instant::now(), |mut span| {
            span.kind = SpanKind::Client;
            span.with("corella.decode_node", &*node.to_string())
        });
    }
}

impl Node {
    pub(super) fn open(self: &Arc<Self>, state: &mut State, key: SessionKey, node: NodeId) {
        let Some(channel) = self.connect(state, node) else {
            let now_us = self.clock().now_us();
            return state.node.sessions().handle_stream_closed(key, now_us);
        };
        let (link, outgoing, mut closed) = Link::new();
        state.sessions.open(key, link);
        let client = state.sessions.client(key.session);
        let client = client.as_deref();
        let trace_id = client.and_then(|client| client.trace_id.as_deref());
        let span = tracing::info_span!(parent: None, "session", %key, trace_id);
        let trace = client.and_then(|client| client.facts.trace.as_ref());
        let trace = trace.map(TraceScope::child);
        let context = trace.as_ref().map(TraceScope::context);
        let mut progress = Progress {
            trace,
            opened_at: Instant::now(),
            is_allocated: false,
            has_decoded: false,
        };
        let this = self.clone();
        let serve = async move {
            match service::open(channel, outgoing, context).await {
                Ok(mut incoming) => {
                    let read = |body| wire::from_decode(body, &this.hello);
                    while let Some(message) = closed.next(&mut incoming, read).await {
                        this.account(key, node, &message, &mut progress);
                        this.with(|node, now_us| node.handle_message(key, message, now_us));
                    }
                    this.handle_closed(key);
                    progress.end_trace(node);
                    linger(incoming).await;
                }
                Err(status) => {
                    tracing::debug!(%status, "a decode node cannot be reached");
                    this.handle_closed(key);
                }
            }
        };
        self.spawn(serve.instrument(span));
    }

    /// Measures the stages of an attempt by its decode node's messages.
    fn account(&self, key: SessionKey, node: NodeId, message: &ToPrefill, progress: &mut Progress) {
        match message {
            ToPrefill::Allocated(_) if !std::mem::replace(&mut progress.is_allocated, true) => {
                let seconds = progress.opened_at.elapsed().as_secs_f64();
                self.times.allocate.observe(seconds);
                tracing::debug!(%node, "a decode node takes the request");
            }
            ToPrefill::LoadDone => {
                if let Some(account) = self.exporter.sender.handle_loaded(&key) {
                    self.account_transfer(key, node, &account, progress);
                }
            }
            ToPrefill::Tokens(tokens) => {
                let num_tokens = tokens.samples.len() as u64;
                self.num_remote_tokens
                    .fetch_add(num_tokens, Ordering::Relaxed);
                if !std::mem::replace(&mut progress.has_decoded, true)
                    && let Some(attempt) = self.lock().sessions.attempt(key)
                    && let Some(since) = attempt.handed_over_at.take()
                {
                    self.times.handover.observe(since.elapsed().as_secs_f64());
                }
            }
            _ => {}
        }
    }

    fn account_transfer(
        &self,
        key: SessionKey,
        node: NodeId,
        account: &TransferAccount,
        progress: &Progress,
    ) {
        let (Some(first), Some(received)) = (account.first_byte_at, account.received_at) else {
            return;
        };
        let seconds = received.saturating_duration_since(first).as_secs_f64();
        self.times.transfer.observe(seconds);
        if let Some(trace) = &progress.trace {
            trace.child().finish("transfer", first, received, |span| {
                let num_bytes = i64::try_from(account.num_bytes).unwrap_or(i64::MAX);
                span.with("corella.kv_bytes", Attribute::Number(num_bytes))
            });
        }
        let sender = &self.exporter.sender;
        let bandwidth = sender.bandwidth_bytes_per_s(key.decode_incarnation.0);
        let Some(bytes_per_s) = bandwidth.filter(|_| account.num_bytes > 0) else {
            return;
        };
        let alone = account.num_bytes as f64 / bytes_per_s;
        let (num_bytes, elapsed_ns) = (account.num_bytes, (alone * 1e9) as u64);
        let now_us = self.clock().now_us();
        let mut state = self.lock();
        let known = state
            .node
            .handle_transfer(node, num_bytes, elapsed_ns, now_us);
        if let Some(bytes_per_s) = known
            && let Some(record) = state.book.record(node)
        {
            let (name, megabytes) = (&record.instance_id, bytes_per_s as f64 / 1e6);
            tracing::info!("the link to {name} takes {megabytes:.1} MB/s, by its first transfer");
        }
        drop(state);
        if let (Some(computed), Some(last)) = (account.computed_at, account.last_byte_at) {
            let tail = last.saturating_duration_since(computed).as_secs_f64();
            self.times
                .hidden_share
                .observe((1.0 - tail / alone).max(0.0));
        }
    }

    fn handle_closed(self: &Arc<Self>, key: SessionKey) {
        self.with(|node, now_us| node.sessions().handle_stream_closed(key, now_us));
        self.lock().sessions.close(key);
    }

    pub(super) fn send(&self, state: &mut State, key: SessionKey, message: ToDecode) {
        let Some(attempt) = state.sessions.attempt(key) else {
            return;
        };
        let is_first = matches!(message, ToDecode::Hello(_));
        if matches!(message, ToDecode::FirstToken(_)) {
            attempt.handed_over_at = Some(Instant::now());
        }
        let envelope = Envelope {
            key: is_first.then(|| key.into()),
            body: Some(wire::to_decode(message, &self.kv_address)),
        };
        if !attempt.link.send(envelope) {
            state.sessions.close(key);
            let now_us = self.clock().now_us();
            state.node.sessions().handle_stream_closed(key, now_us);
        }
    }
}
