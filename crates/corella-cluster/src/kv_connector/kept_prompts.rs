//! Prompts that are computed here and kept for a node that the proxy has not chosen yet.
//!
//! Their rows stay in the pages of the request that computed them, under the engine's lease, until a node has fetched
//! them or the lease is over. Any node that knows a session's id may fetch the session's rows once, so the ids are
//! drawn at random.

use std::collections::hash_map::RandomState;
use std::fmt;
use std::hash::BuildHasher;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use corella_core::session::{ExportBook, KeptEnd, SessionKey};
use corella_core::{Arithmetic, KvFact, SessionId};
use corella_engine::{Engine, FeedReader, Submission, SubmitError, TokenStream, rare_line};
use serde_json::{Map, Value};
use tokio::runtime::Handle;
use tokio::sync::watch;

use super::params::{KeptRows, Site, Source, prompt_digest};
use crate::clock::Clock;
use crate::exporter::{Exported, Exporter};
use crate::transport::{KvSender, SendStatus};

/// The interval between two checks whether a fetch still progresses.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);

/// The owner of the rows, and the address from which they are fetched.
#[derive(Clone, Debug)]
pub struct KeepConfig {
    pub incarnation: u64,
    pub model_fingerprint: u128,
    pub arithmetic: Arithmetic,
    pub site: Site,
    /// How long rows are kept after the last progress of a fetch. Before a fetch has begun, the engine's own lease
    /// decides.
    pub lease: Duration,
}

pub struct KeptPrompts {
    engine: Engine,
    exporter: Exporter,
    config: KeepConfig,
    runtime: Handle,
    book: Mutex<ExportBook>,
}

/// The parameters of a kept prompt, for the answer. Dropping an unredeemed ticket releases the prompt, because no other
/// node can know the prompt's session.
#[derive(Default)]
pub struct KeptTicket(Mutex<Option<(Arc<KeptPrompts>, KeptRows)>>);

impl KeptTicket {
    /// Returns the parameters for the decode node, at the first call only. Returns `None` when nothing is kept.
    pub fn redeem(&self) -> Option<Map<String, Value>> {
        let (prompts, rows) = self.lock().take()?;
        prompts.source(rows).map(|source| source.to_params())
    }

    fn lock(&self) -> MutexGuard<'_, Option<(Arc<KeptPrompts>, KeptRows)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for KeptTicket {
    fn drop(&mut self) {
        if let Some((prompts, rows)) = self.lock().take() {
            prompts.end(rows.session, KeptEnd::Dropped);
        }
    }
}

impl KeptPrompts {
    /// Must be called within a tokio runtime. The engine's facts must be passed on by [`follow`](Self::follow), or by
    /// another reader of the facts.
    pub fn new(engine: Engine, sender: Arc<KvSender>, config: KeepConfig) -> Arc<Self> {
        let geometry = engine.kv_pages().geometry();
        Arc::new(Self {
            book: Mutex::new(ExportBook::new(geometry.page_size, geometry.num_layers)),
            exporter: Exporter {
                sender,
                exchange: engine.kv_exchange(),
                clock: Clock::start(),
            },
            engine,
            config,
            runtime: Handle::current(),
        })
    }

    /// Reads the engine's facts on a thread of its own, until the engine has stopped.
    pub fn follow(self: &Arc<Self>) -> std::io::Result<()> {
        let facts = self.engine.subscribe_kv_facts();
        let weak = Arc::downgrade(self);
        let thread = std::thread::Builder::new().name("corella-kept".to_owned());
        thread.spawn(move || follow_facts(&facts, &weak))?;
        Ok(())
    }

    /// Returns the number of prompts that are being computed or kept.
    pub fn num_kept(&self) -> usize {
        self.lock().num_kept()
    }

    /// Number of prompts since the start.
    pub fn num_ended(&self, how: KeptEnd) -> u64 {
        self.lock().num_kept_ended(how)
    }

    /// Computes a prompt and keeps the prompt's rows. `ticket` then gives the rows' parameters.
    pub(super) fn submit(
        self: &Arc<Self>,
        submission: Submission,
        name: &str,
        ticket: &KeptTicket,
    ) -> Result<Vec<TokenStream>, SubmitError> {
        if self.engine.kv_pages().states().is_some() {
            // The node that fetches the rows draws the first token from the state before the prompt's last token.
            rare_line!(
                warn,
                id = name,
                "a prompt is not kept for another node: the model has recurrent layers, whose states \
                 `kv_transfer_params` do not move yet"
            );
            return self.engine.submit(submission);
        }
        let rows = KeptRows {
            model_fingerprint: self.config.model_fingerprint,
            arithmetic: self.config.arithmetic,
            incarnation: self.config.incarnation,
            session: self.draw_session(),
            num_rows: submission.prompt.len() as u32,
            digest: prompt_digest(&submission.namespace, &submission.prompt),
            adapter: { submission.adapter.as_ref() }.map(|adapter| adapter.fingerprint()),
        };
        // All choices share one prompt, whose rows are kept once.
        let others = (submission.num_choices > 1).then(|| {
            let mut others = submission.clone();
            others.num_choices -= 1;
            others.sampling.choice += 1;
            others
        });
        let first = Submission {
            exports_kv: true,
            num_choices: 1,
            ..submission
        };
        let mut streams = {
            // The lock is held until the request is registered: its facts may come at once.
            let mut book = self.lock();
            let streams = self.engine.submit(first)?;
            book.keep(rows.key(), streams[0].id(), rows.num_rows);
            streams
        };
        *ticket.lock() = Some((self.clone(), rows));
        tracing::debug!(id = name, key = %rows.key(), "a prompt is to be kept for another node");
        if let Some(others) = others {
            streams.extend(self.engine.submit(others)?);
        }
        Ok(streams)
    }

    /// Handles a fact about a request whose prompt is to be kept. Returns false for another request.
    pub fn handle_fact(self: &Arc<Self>, fact: &KvFact) -> bool {
        let is_own = self.lock().run_of(fact.request()).is_some();
        if is_own {
            self.with(|book, _| book.handle_kv_fact(fact));
        }
        is_own
    }

    /// Updates the export book and carries out its tasks.
    fn with<T>(self: &Arc<Self>, tell: impl FnOnce(&mut ExportBook, u64) -> T) -> T {
        let mut book = self.lock();
        let told = tell(&mut book, self.exporter.clock.now_us());
        while let Some(task) = book.poll_task() {
            match self.exporter.carry_out(task) {
                Exported::Nothing => {}
                Exported::Opened(key, status) => {
                    tracing::debug!(%key, "a prompt is kept for another node");
                    let watched = watch_fetch(Arc::downgrade(self), key, status);
                    self.runtime.spawn(watched);
                }
                Exported::Refused(key) => {
                    book.end_kept(key.session, KeptEnd::Dropped);
                }
                Exported::Deleted(key) => {
                    tracing::debug!(%key, "a prompt is kept no more");
                    book.handle_deleted(key);
                }
            }
        }
        told
    }

    fn lock(&self) -> MutexGuard<'_, ExportBook> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Session ids are unique among processes and cannot be guessed.
    fn draw_session(&self) -> SessionId {
        // The operating system provides the keys of `RandomState`.
        let drawn = RandomState::new().hash_one(self.config.incarnation);
        SessionId(u128::from(self.config.incarnation) << 64 | u128::from(drawn))
    }

    fn source(&self, rows: KeptRows) -> Option<Source> {
        self.lock().keeps(rows.session).then(|| Source {
            site: self.config.site.clone(),
            rows: Some(rows),
        })
    }

    fn end(self: &Arc<Self>, session: SessionId, how: KeptEnd) {
        self.with(|book, _| book.end_kept(session, how));
    }
}

impl fmt::Debug for KeptPrompts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeptPrompts")
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

fn follow_facts(facts: &FeedReader<KvFact>, prompts: &Weak<KeptPrompts>) {
    while let Some(fact) = facts.next_blocking() {
        let Some(prompts) = prompts.upgrade() else {
            return;
        };
        prompts.with(|book, _| book.handle_kv_fact(&fact));
    }
}

/// Renews the lease while rows are fetched, and releases the prompt when all rows have been fetched.
async fn watch_fetch(
    prompts: Weak<KeptPrompts>,
    key: SessionKey,
    mut status: watch::Receiver<SendStatus>,
) {
    let mut num_bytes = 0;
    loop {
        let changed = tokio::time::timeout(PROGRESS_INTERVAL, status.changed()).await;
        let Some(prompts) = prompts.upgrade() else {
            return;
        };
        // Ending the session changes its status, so the status must not stay borrowed.
        let now = *status.borrow_and_update();
        match now {
            SendStatus::Received => {
                prompts.end(key.session, KeptEnd::Fetched);
                return;
            }
            SendStatus::Over => return,
            SendStatus::Exported | SendStatus::Sending | SendStatus::Sent | SendStatus::Stopped => {
            }
        }
        if matches!(changed, Ok(Err(_))) {
            return;
        }
        if let Some(account) = prompts.exporter.sender.account(&key)
            && account.num_bytes > num_bytes
        {
            num_bytes = account.num_bytes;
            let lease_us = prompts.config.lease.as_micros() as u64;
            prompts.with(|book, now_us| book.renew_kept(key.session, now_us + lease_us));
        }
    }
}
