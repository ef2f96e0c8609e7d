//! Requests of a prefill node's own engine: prompts for decode nodes, and what is decoded here.

use std::future::poll_fn;
use std::sync::Arc;
use std::time::{Duration, Instant};

use corella_core::session::SessionKey;
use corella_core::{
    AdmissionError, FinishReason, Request, RequestError, RequestId, RequestOutput, SessionId,
};
use corella_engine::{Entry, StreamEvent, SubmitError, TokenStream, rare_line};
use tokio::task::AbortHandle;

use super::{Node, State};
use crate::session::driver::Driver;
use crate::session::export::Export;
use crate::transport::KvSender;

/// How often to check whether a decode node still takes rows.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);

/// A request of this node's engine.
pub(super) struct Run {
    pub id: RequestId,
    pub reader: AbortHandle,
    has_ended: bool,
    /// The engine holds pages for it, now or later, until `ReleaseHold`.
    is_held: bool,
    pub export: Export,
}

impl Node {
    pub(super) fn submit_locally(
        self: &Arc<Self>,
        state: &mut State,
        session: SessionId,
        run: u32,
        request: Request,
        entry: Entry,
    ) {
        let num_layers = self.pages.geometry().num_layers as usize;
        let exports_kv = request.exports_kv;
        match self.engine.submit_as(request.into(), entry) {
            Ok(mut streams) => {
                let stream = streams.remove(0);
                let id = stream.id();
                let exported_since = exports_kv.then(Instant::now);
                let reader = self
                    .clone()
                    .read_outputs(session, run, stream, exported_since);
                let reader = self.spawn(reader).abort_handle();
                let entry = Run {
                    id,
                    reader,
                    has_ended: false,
                    is_held: exports_kv,
                    export: Export::new(num_layers, self.pages.geometry().page_size),
                };
                state.runs.insert((session, run), entry);
                state.run_of.insert(id, (session, run));
            }
            Err(SubmitError::Refused(error)) => {
                let now_us = self.clock().now_us();
                state.end.handle_local_refused(session, run, error, now_us);
            }
            Err(SubmitError::QueueFull { num_waiting, limit }) => {
                let error = AdmissionError::QueueFull { num_waiting, limit };
                let now_us = self.clock().now_us();
                state.end.handle_local_refused(session, run, error, now_us);
            }
            Err(error) => {
                let reason = error.to_string().into();
                let output = RequestOutput {
                    request: RequestId(0),
                    sample: None,
                    prompt_logprobs: Vec::new(),
                    hidden_state: None,
                    finish: Some(FinishReason::Error(RequestError::EngineLost(reason))),
                    num_prompt_tokens: 0,
                    num_cached_tokens: 0,
                    num_output_tokens: 0,
                    queue_us: 0,
                };
                let now_us = self.clock().now_us();
                state.end.handle_local_output(session, run, output, now_us);
            }
        }
    }

    async fn read_outputs(
        self: Arc<Self>,
        session: SessionId,
        run: u32,
        mut stream: TokenStream,
        mut exported_since: Option<Instant>,
    ) {
        while let Some(event) = poll_fn(|cx| stream.poll_next(cx)).await {
            let mut state = self.lock();
            match event {
                // Where there is no fallback, a request is taken only with its first token.
                StreamEvent::Accepted => {
                    if self.falls_back
                        && let Some(client) = state.clients.get_mut(&session)
                    {
                        client.accept();
                    }
                }
                StreamEvent::Refused(error) => {
                    self.tell(&mut state, |end, now_us| {
                        end.handle_local_refused(session, run, error, now_us);
                    });
                    let_go_of_hold(&mut state, session, run);
                    end_run(&mut state, session, run);
                }
                StreamEvent::Output(output) => {
                    if output.sample.is_some()
                        && let Some(since) = exported_since.take()
                    {
                        self.times.prefill.observe(since.elapsed().as_secs_f64());
                    }
                    let has_ended = output.finish.is_some();
                    self.tell(&mut state, |end, now_us| {
                        end.handle_local_output(session, run, output, now_us);
                    });
                    if has_ended {
                        end_run(&mut state, session, run);
                    }
                }
            }
        }
    }

    pub(super) fn store(
        self: &Arc<Self>,
        state: &mut State,
        key: SessionKey,
        run: u32,
        num_rows: u32,
    ) {
        let run_key = (key.session, run);
        let now_us = self.clock().now_us();
        let Some(run) = state.runs.get_mut(&run_key) else {
            return state.end.handle_load_failed(key, now_us);
        };
        // SAFETY: exported rows stay as they are until the engine is told to release the hold, which
        // follows `delete`.
        match unsafe { self.sender.store(key, num_rows) } {
            Ok(_status) => {
                run.export.add_reader(key, &self.sender);
                state.run_of_key.insert(key, run_key);
                self.spawn(self.clone().watch_progress(key));
            }
            Err(error) => {
                rare_line!(warn, %key, %error, "KV rows are not offered");
                state.end.handle_load_failed(key, now_us);
            }
        }
    }

    async fn watch_progress(self: Arc<Self>, key: SessionKey) {
        let mut num_bytes = 0;
        loop {
            tokio::time::sleep(PROGRESS_INTERVAL).await;
            let Some(account) = self.sender.account(&key) else {
                return;
            };
            if account.num_bytes > num_bytes {
                num_bytes = account.num_bytes;
                self.with(|end, now_us| end.handle_load_progress(key, now_us));
            }
        }
    }

    /// Applies a fact from the engine to the rows that a request exports.
    pub(in crate::session) fn with_export(
        self: &Arc<Self>,
        request: RequestId,
        change: impl FnOnce(&mut Export, &KvSender),
    ) {
        let mut state = self.lock();
        if let Some(key) = state.run_of.get(&request).copied()
            && let Some(run) = state.runs.get_mut(&key)
        {
            change(&mut run.export, &self.sender);
        }
    }

    pub(in crate::session) fn handle_export_ended(
        self: &Arc<Self>,
        request: RequestId,
        num_rows: u32,
    ) {
        let mut state = self.lock();
        let Some(&(session, run)) = state.run_of.get(&request) else {
            // Its session has ended, and nobody reads its pages.
            self.exchange.release_hold(request);
            return;
        };
        let is_complete = match state.runs.get_mut(&(session, run)) {
            Some(run) => run.export.end(num_rows, &self.sender),
            None => false,
        };
        if !is_complete {
            self.tell(&mut state, |end, now_us| {
                end.handle_export_failed(session, run, now_us);
            });
        }
    }

    pub(in crate::session) fn handle_declined(self: &Arc<Self>, request: RequestId) {
        let mut state = self.lock();
        if let Some(&(session, run)) = state.run_of.get(&request) {
            self.tell(&mut state, |end, now_us| {
                end.handle_export_failed(session, run, now_us);
            });
            let_go_of_hold(&mut state, session, run);
        }
    }

    pub(in crate::session) fn handle_lease_ended(self: &Arc<Self>, request: RequestId) {
        let mut state = self.lock();
        match state.run_of.get(&request) {
            Some(&(session, run)) => self.tell(&mut state, |end, now_us| {
                end.handle_lease_ended(session, run, now_us);
            }),
            None => self.exchange.release_hold(request),
        }
    }
}

/// Marks a run as ended, because it has given its last output or because nobody wants its output
/// any more. If its pages are held for a reader, the entry is kept until the hold is released.
pub(super) fn end_run(state: &mut State, session: SessionId, run: u32) {
    if let Some(entry) = state.runs.get_mut(&(session, run)) {
        entry.has_ended = true;
        forget_run(state, session, run);
    }
}

pub(super) fn let_go_of_hold(state: &mut State, session: SessionId, run: u32) {
    if let Some(entry) = state.runs.get_mut(&(session, run)) {
        entry.is_held = false;
        forget_run(state, session, run);
    }
}

fn forget_run(state: &mut State, session: SessionId, run: u32) {
    if let Some(entry) = state.runs.get(&(session, run))
        && entry.has_ended
        && !entry.is_held
    {
        state.run_of.remove(&entry.id);
        state.runs.remove(&(session, run));
    }
}
