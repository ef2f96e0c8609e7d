//! Requests whose prompt another node has computed and keeps: this node fetches the prompt's rows and decodes. If the
//! fetch fails, this node computes the prompt.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use corella_core::session::{Hello, SessionConfig};
use corella_core::{Arithmetic, FinishReason, LostKv, RequestError};
use corella_engine::{
    Engine, Entry, Generate, KvExchange, Receipt, StreamEvent, Submission, SubmitError,
    TokenStream, rare_line,
};
use strum::{IntoStaticStr, VariantArray};
use tokio::runtime::Handle;

use super::allowed_peers::AllowedPeers;
use super::answer::{Answer, Answers};
use super::params::{KeptRows, Source, prompt_digest};
use crate::transport::{KvReceiver, LoadHandle, LoadRequest, LoadStatus};

/// The time by which the reservation outlasts the load's deadline, so that the load ends first.
const RESERVATION_SLACK: Duration = Duration::from_secs(10);

/// The outcome of fetching a request's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum PromptFetchOutcome {
    Loaded,
    /// The prefix cache has all rows.
    Cached,
    /// No pages were free for the rows. The request waits and computes its prompt.
    NoRoom,
    /// The rows belong to another model, adapter, prompt or engine.
    Unusable,
    /// The other node does not answer, has released the rows, or was too slow.
    Failed,
}

impl PromptFetchOutcome {
    pub const ALL: &'static [Self] = Self::VARIANTS;

    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

pub struct PromptFetcher {
    engine: Engine,
    exchange: KvExchange,
    receiver: Arc<KvReceiver>,
    /// The name of this host, if rows may be fetched inside the host.
    machine: Option<String>,
    allowed: AllowedPeers,
    model_fingerprint: u128,
    arithmetic: Arithmetic,
    times: SessionConfig,
    runtime: Handle,
    num_outcomes: [AtomicU64; PromptFetchOutcome::ALL.len()],
    num_rows: AtomicU64,
}

/// A request whose rows are fetched.
struct PromptFetch {
    fetcher: Arc<PromptFetcher>,
    source: Source,
    rows: KeptRows,
    name: Box<str>,
    /// The submission with all choices. The choices after the first are submitted after the fetch.
    submission: Submission,
}

impl PromptFetcher {
    /// Must be called within a tokio runtime.
    pub fn new(
        engine: Engine,
        receiver: Arc<KvReceiver>,
        machine: Option<String>,
        allowed: AllowedPeers,
        hello: &Hello,
        times: SessionConfig,
    ) -> Arc<Self> {
        Arc::new(Self {
            exchange: engine.kv_exchange(),
            engine,
            receiver,
            machine,
            allowed,
            model_fingerprint: hello.model_fingerprint,
            arithmetic: hello.arithmetic(),
            times,
            runtime: Handle::current(),
            num_outcomes: Default::default(),
            num_rows: AtomicU64::new(0),
        })
    }

    /// Number of requests since the start.
    pub fn num_requests(&self, outcome: PromptFetchOutcome) -> u64 {
        self.num_outcomes[outcome as usize].load(Ordering::Relaxed)
    }

    /// Returns the number of rows fetched since the start.
    pub fn num_rows(&self) -> u64 {
        self.num_rows.load(Ordering::Relaxed)
    }

    pub(super) fn submit(
        self: &Arc<Self>,
        submission: Submission,
        source: &Source,
        name: &str,
        local: &Arc<dyn Generate>,
    ) -> Result<Vec<TokenStream>, SubmitError> {
        let rows = match self.usable_rows(source, &submission) {
            Ok(rows) => rows,
            Err(reason) => {
                self.note(PromptFetchOutcome::Unusable, source, name, reason);
                return local.submit(submission);
            }
        };
        let timeout = Duration::from_micros(self.times.load_timeout_us(rows.num_rows));
        let reserved = timeout + RESERVATION_SLACK;
        let mut reservation = submission.clone();
        if self.is_foreign(&rows) {
            reservation.namespace.arithmetic = Some(rows.arithmetic);
        }
        let receipt = self.engine.reserve(reservation, reserved)?;
        let (answers, streams) = Answers::new(receipt.stream.id(), submission.num_choices);
        let fetch = PromptFetch {
            fetcher: self.clone(),
            source: source.clone(),
            rows,
            name: name.into(),
            submission,
        };
        self.runtime
            .spawn(fetch.run(receipt, answers, Instant::now() + timeout));
        Ok(streams)
    }

    /// Whether the rows have other bits than rows that this node computes.
    fn is_foreign(&self, rows: &KeptRows) -> bool {
        rows.arithmetic != self.arithmetic
    }

    /// Returns the rows, or the reason why they do not belong to this prompt.
    fn usable_rows(
        &self,
        source: &Source,
        submission: &Submission,
    ) -> Result<KeptRows, &'static str> {
        if submission.sampling.wants_prompt_outputs() {
            return Err("log-probabilities or a hidden state of the prompt are wanted");
        }
        if !submission.output.is_empty() {
            return Err("the request resumes an answer, whose rows the other node lacks");
        }
        if self.engine.kv_pages().states().is_some() {
            return Err(
                "the model has recurrent layers, whose states `kv_transfer_params` do not move yet",
            );
        }
        let rows = source.rows.ok_or("it is another kind of engine")?;
        let digest = prompt_digest(&submission.namespace, &submission.prompt);
        let adapter = submission.adapter.as_ref();
        if rows.model_fingerprint != self.model_fingerprint {
            Err("it serves another model")
        } else if rows.adapter != adapter.map(|adapter| adapter.fingerprint()) {
            Err(match (adapter, rows.adapter) {
                (None, _) => "it has computed the prompt with an adapter",
                (_, None) => "it has computed the prompt without an adapter",
                _ => "its adapter has other contents than the one here",
            })
        } else if (rows.num_rows as usize, rows.digest) != (submission.prompt.len(), digest) {
            Err("it has read the prompt as other tokens")
        } else if self.is_foreign(&rows) && submission.num_choices > 1 {
            // Only one choice gets the fetched rows. Rows that the other choices compute would have other bits.
            Err("its weights or KV rows have another format, and several choices are wanted")
        } else {
            Ok(rows)
        }
    }

    /// Waits for the end of a load as long as rows keep coming. The error says why rows are missing.
    async fn wait(&self, load: &mut LoadHandle) -> Result<(), String> {
        let lost_after = Duration::from_micros(self.times.lost_after_us);
        loop {
            match tokio::time::timeout(lost_after, load.changed()).await {
                Ok(LoadStatus::Done { .. }) => return Ok(()),
                Ok(LoadStatus::Failed(failure)) => return Err(failure.to_string()),
                Ok(LoadStatus::Opening | LoadStatus::Receiving { .. }) => {}
                Err(_) => return Err("no more rows have come".to_owned()),
            }
        }
    }

    fn note(
        &self,
        outcome: PromptFetchOutcome,
        source: &Source,
        name: &str,
        reason: impl ToString,
    ) {
        self.num_outcomes[outcome as usize].fetch_add(1, Ordering::Relaxed);
        let (peer, reason) = (source.site.name(), reason.to_string());
        // A client chooses the peer, so a line for each peer could be a line for each request.
        rare_line!(
            warn,
            id = name,
            "cannot use what {peer} has computed, and computes it here: {reason}"
        );
        tracing::debug!(id = name, peer, reason, "a prompt is computed here");
    }

    fn note_good(&self, outcome: PromptFetchOutcome, num_rows: u32, name: &str) {
        self.num_outcomes[outcome as usize].fetch_add(1, Ordering::Relaxed);
        self.num_rows.fetch_add(num_rows.into(), Ordering::Relaxed);
        tracing::debug!(
            id = name,
            num_rows,
            "a prompt was fetched from another node"
        );
    }
}

/// A request that has pages and waits for its rows. If it is dropped before `settle`, the pages are released once the
/// load no longer writes to them.
struct Reserved<'a> {
    exchange: &'a KvExchange,
    receipt: Option<Receipt>,
    load: Option<LoadHandle>,
}

impl Reserved<'_> {
    /// Hands the request to the engine, which continues it like any other request.
    fn settle(mut self, tell: impl FnOnce(&KvExchange, corella_core::RequestId)) -> TokenStream {
        self.load = None;
        let receipt = self
            .receipt
            .take()
            .unwrap_or_else(|| unreachable!("it settles once"));
        tell(self.exchange, receipt.stream.id());
        receipt.stream
    }
}

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        // End the load first: the pages must outlive the load.
        self.load = None;
        if let Some(receipt) = self.receipt.take() {
            let id = receipt.stream.id();
            drop(receipt);
            let how = LostKv::End("its client has left".into());
            self.exchange.handle_kv_lost(id, how);
        }
    }
}

impl PromptFetch {
    async fn run(self, receipt: Receipt, mut answers: Answers, deadline: Instant) {
        let (first, cancelled) = answers.0.remove(0);
        let run = async {
            let stream = self.fetch(receipt, deadline).await;
            self.relay(stream, first, answers).await;
        };
        tokio::select! {
            () = run => {}
            _ = cancelled => {}
        }
    }

    /// Returns the stream of a request whose rows are loaded or left to be computed. Returns `None` for a request that
    /// has no pages and must be submitted anew.
    async fn fetch(&self, mut receipt: Receipt, deadline: Instant) -> Option<TokenStream> {
        let fetcher = &self.fetcher;
        match poll_fn(|cx| receipt.stream.poll_next(cx)).await {
            Some(StreamEvent::Accepted) => {}
            Some(StreamEvent::Refused(error)) => {
                fetcher.note(PromptFetchOutcome::NoRoom, &self.source, &self.name, error);
                return None;
            }
            // The engine is lost. A new submission will report that.
            Some(StreamEvent::Output(_)) | None => return None,
        }
        let reservation = receipt.reservation().cloned()?;
        let mut reserved = Reserved {
            exchange: &fetcher.exchange,
            receipt: Some(receipt),
            load: None,
        };
        let num_rows = self.rows.num_rows;
        let num_cached_rows = reservation.num_cached_rows;
        if num_cached_rows == num_rows {
            fetcher.note_good(PromptFetchOutcome::Cached, 0, &self.name);
            return Some(reserved.settle(KvExchange::handle_rows_arrived));
        }
        let resolving = self
            .source
            .site
            .address(fetcher.machine.as_deref(), &fetcher.allowed);
        let resolved = tokio::time::timeout_at(deadline.into(), resolving).await;
        let resolved = resolved.unwrap_or_else(|_| Err("its name is not found in time".to_owned()));
        let failure = match resolved {
            Err(reason) => reason,
            Ok(peer) => {
                let request = LoadRequest {
                    key: self.rows.key(),
                    peer,
                    arithmetic: self.rows.arithmetic,
                    first_row: num_cached_rows,
                    num_rows,
                    tables: reservation.tables,
                    state: reservation.state,
                    deadline,
                };
                // SAFETY: the engine has reserved these pages for this request. It gives them to no other request until
                // `reserved` is settled or dropped, and both end the load first.
                match unsafe { fetcher.receiver.load(request) } {
                    Err(rejection) => rejection.to_string(),
                    Ok(load) => match fetcher.wait(reserved.load.insert(load)).await {
                        Err(failure) => failure,
                        Ok(()) => {
                            let num_loaded = num_rows - num_cached_rows;
                            fetcher.note_good(PromptFetchOutcome::Loaded, num_loaded, &self.name);
                            return Some(reserved.settle(KvExchange::handle_rows_arrived));
                        }
                    },
                }
            }
        };
        fetcher.note(
            PromptFetchOutcome::Failed,
            &self.source,
            &self.name,
            failure,
        );
        if fetcher.is_foreign(&self.rows) {
            // The reservation is in the namespace of the other node's rows. Rows that this node computes belong to
            // another namespace, so the request is submitted anew.
            return None;
        }
        Some(reserved.settle(|exchange, id| exchange.handle_kv_lost(id, LostKv::Recompute)))
    }

    /// Passes on the first choice's events. The other choices start after the first choice's first token, when the
    /// prefix cache has the prompt.
    async fn relay(&self, stream: Option<TokenStream>, mut first: Answer, others: Answers) {
        let mut others = Some(others);
        // The reservation has accepted the call already.
        let entry = match stream {
            Some(_) => Entry::Accepted,
            None => Entry::Taken,
        };
        if let Some(mut stream) = stream {
            first.accept();
            let mut has_output = false;
            while let Some(event) = poll_fn(|cx| stream.poll_next(cx)).await {
                if !has_output && is_late(&event) {
                    break;
                }
                has_output = true;
                if let Some(others) = others.take() {
                    self.submit_others(others, entry);
                }
                first.pass(event);
            }
            if has_output {
                return;
            }
        }
        let submission = Submission {
            num_choices: 1,
            ..self.submission.clone()
        };
        match self.fetcher.engine.submit_as(submission, entry) {
            Ok(mut streams) => {
                if let Some(others) = others {
                    self.submit_others(others, entry);
                }
                first.relay_all(streams.remove(0)).await;
            }
            Err(error) => first.refuse(error),
        }
    }

    fn submit_others(&self, answers: Answers, entry: Entry) {
        if answers.0.is_empty() {
            return;
        }
        let mut submission = self.submission.clone();
        submission.num_choices = answers.0.len() as u32;
        submission.sampling.choice += 1;
        let submitted = self.fetcher.engine.submit_as(submission, entry);
        answers.relay(submitted, &self.fetcher.runtime);
    }
}

/// Returns whether a reservation ended because its rows were missing. If so, the prompt can still be computed.
fn is_late(event: &StreamEvent) -> bool {
    let StreamEvent::Output(output) = event else {
        return false;
    };
    let is_error = |finish: &FinishReason| {
        matches!(finish, FinishReason::Error(RequestError::KvNotReceived(_)))
    };
    output.finish.as_ref().is_some_and(is_error)
}
