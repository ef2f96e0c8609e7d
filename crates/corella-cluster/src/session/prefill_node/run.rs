//! Requests of a prefill node's own engine: prompts for decode nodes, and requests decoded here.

use std::future::poll_fn;
use std::sync::Arc;
use std::time::{Duration, Instant};

use corella_core::session::SessionKey;
use corella_core::{Request, SessionId};
use corella_engine::{Entry, StreamEvent, Submission, SubmitError, TokenStream};

use super::{ExportTask, Exported, Node, State};
use crate::driver::Driver;

/// Time between two checks whether a decode node still takes rows.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);

impl Node {
    pub(super) fn submit_locally(
        self: &Arc<Self>,
        state: &mut State,
        session: SessionId,
        run: u32,
        request: Request,
        entry: Entry,
    ) {
        let exports_kv = request.exports_kv;
        let client = state.sessions.client(session);
        let facts = client.map(|client| &client.facts);
        let submission = Submission {
            adapter: facts.and_then(|facts| facts.adapter.clone()),
            constraint: facts.and_then(|facts| facts.constraint.clone()),
            ..request.into()
        };
        let submitted = self.engine.submit_as(submission, entry);
        let now_us = self.clock().now_us();
        let sessions = state.node.sessions();
        match submitted {
            Ok(mut streams) => {
                let stream = streams.remove(0);
                let id = stream.id();
                let exported_since = exports_kv.then(Instant::now);
                let reader = self
                    .clone()
                    .read_outputs(session, run, stream, exported_since);
                let reader = self.spawn(reader).abort_handle();
                state.sessions.add_reader(session, id, reader);
                sessions.handle_submitted(session, run, id, now_us);
            }
            Err(SubmitError::Refused(error)) => {
                sessions.handle_local_refused(session, run, error, now_us);
            }
            Err(error) => {
                sessions.handle_engine_lost(session, run, error.to_string().into(), now_us);
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
                // Without fallback, a request is accepted only with its first token.
                StreamEvent::Accepted => {
                    if self.falls_back
                        && let Some(client) = state.sessions.client(session)
                    {
                        client.accept();
                    }
                }
                StreamEvent::Refused(error) => self.tell(&mut state, |node, now_us| {
                    node.sessions()
                        .handle_local_refused(session, run, error, now_us);
                }),
                StreamEvent::Output(output) => {
                    if output.sample.is_some()
                        && let Some(since) = exported_since.take()
                    {
                        self.times.prefill.observe(since.elapsed().as_secs_f64());
                    }
                    self.tell(&mut state, |node, now_us| {
                        node.sessions().handle_local_output(output, now_us);
                    });
                }
            }
        }
        self.lock().sessions.take_reader(session, stream.id());
    }

    pub(super) fn export(self: &Arc<Self>, state: &mut State, task: ExportTask) {
        let now_us = self.clock().now_us();
        match self.exporter.carry_out(task) {
            Exported::Nothing => {}
            Exported::Opened(key, _status) => {
                self.spawn(self.clone().watch_progress(key));
            }
            Exported::Refused(key) => state.node.sessions().handle_load_failed(key, now_us),
            Exported::Deleted(key) => state.node.sessions().handle_deleted(key, now_us),
        }
    }

    async fn watch_progress(self: Arc<Self>, key: SessionKey) {
        let mut num_bytes = 0;
        loop {
            tokio::time::sleep(PROGRESS_INTERVAL).await;
            let Some(account) = self.exporter.sender.account(&key) else {
                return;
            };
            if account.num_bytes > num_bytes {
                num_bytes = account.num_bytes;
                self.with(|node, now_us| node.sessions().handle_load_progress(key, now_us));
            }
        }
    }
}
