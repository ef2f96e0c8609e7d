//! Prompts that were computed here and are kept for nodes that nobody has named yet.
//!
//! Their rows stay in the pages of the request that computed them, under the engine's lease, until a
//! node has pulled them or the lease is over. Whoever knows a session's id may pull it once, so the ids
//! are drawn at random.

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::fmt;
use std::hash::BuildHasher;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use corella_core::session::SessionKey;
use corella_core::{KvFact, PageId, RequestId, SessionId};
use corella_engine::{
    Engine, KvExchange, KvFacts, Submission, SubmitError, TokenStream, rare_line,
};
use corella_model::KvPages;
use serde_json::{Map, Value};
use tokio::runtime::Handle;
use tokio::sync::watch;

use super::params::{KeptRows, NearSource, Source, prompt_digest};
use crate::transport::{KvSender, SendStatus};

/// How often it is looked whether somebody still pulls.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);

/// Who keeps the rows, and where others pull them.
#[derive(Clone, Debug)]
pub struct KeepConfig {
    pub incarnation: u64,
    pub model_fingerprint: u128,
    pub host: String,
    /// 0 when rows do not travel over the network.
    pub port: u16,
    pub near: Option<NearSource>,
    /// How long rows are kept behind the last that were pulled. The engine's own lease bounds how long
    /// they are kept for somebody who has not begun.
    pub lease: Duration,
}

/// How the keeping of a prompt has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeptEnd {
    /// A node has all of its rows.
    Pulled,
    /// Its lease was over, or a running request needed the pages.
    Expired,
    /// Its client has left, its rows were not computed, or there was no room to keep them.
    Dropped,
}

impl KeptEnd {
    pub const ALL: [Self; 3] = [Self::Pulled, Self::Expired, Self::Dropped];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pulled => "pulled",
            Self::Expired => "expired",
            Self::Dropped => "dropped",
        }
    }
}

pub struct KeptPrompts {
    engine: Engine,
    exchange: KvExchange,
    sender: Arc<KvSender>,
    pages: Arc<dyn KvPages>,
    config: KeepConfig,
    runtime: Handle,
    kept: Mutex<HashMap<RequestId, Kept>>,
    num_ended: [AtomicU64; KeptEnd::ALL.len()],
}

struct Kept {
    rows: KeptRows,
    key: SessionKey,
    /// The pages of its rows, as far as steps that compute them have been planned.
    pages: Vec<PageId>,
    name: Box<str>,
}

/// What an answer says of a prompt that is kept. Dropping it before it has said that lets go of the
/// prompt, because nobody else knows how to ask for it.
#[derive(Default)]
pub struct KeptTicket(Mutex<Option<(Arc<KeptPrompts>, RequestId)>>);

impl KeptTicket {
    /// The parameters for the node that decodes, once. `None` when nothing is kept.
    pub fn redeem(&self) -> Option<Map<String, Value>> {
        let (prompts, request) = self.lock().take()?;
        prompts.source(request).map(|source| source.to_params())
    }

    fn lock(&self) -> MutexGuard<'_, Option<(Arc<KeptPrompts>, RequestId)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for KeptTicket {
    fn drop(&mut self) {
        if let Some((prompts, request)) = self.lock().take() {
            prompts.end(request, KeptEnd::Dropped);
        }
    }
}

impl KeptPrompts {
    /// Runs on the caller's tokio runtime. Somebody has to bring it the engine's facts:
    /// [`follow`](Self::follow), or whoever reads them for other reasons, too.
    pub fn new(engine: Engine, sender: Arc<KvSender>, config: KeepConfig) -> Arc<Self> {
        Arc::new(Self {
            exchange: engine.kv_exchange(),
            pages: engine.kv_pages().clone(),
            engine,
            sender,
            config,
            runtime: Handle::current(),
            kept: Mutex::default(),
            num_ended: Default::default(),
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

    /// Prompts that are being computed or kept.
    pub fn num_kept(&self) -> usize {
        self.lock().len()
    }

    /// Since the start.
    pub fn num_ended(&self, how: KeptEnd) -> u64 {
        self.num_ended[how as usize].load(Ordering::Relaxed)
    }

    /// Computes a prompt and keeps its rows. `ticket` then tells how to ask for them.
    pub(super) fn submit(
        self: &Arc<Self>,
        submission: Submission,
        name: &str,
        ticket: &KeptTicket,
    ) -> Result<Vec<TokenStream>, SubmitError> {
        let rows = KeptRows {
            model_fingerprint: self.config.model_fingerprint,
            incarnation: self.config.incarnation,
            session: self.draw_session(),
            num_rows: submission.prompt.len() as u32,
            digest: prompt_digest(&submission.namespace, &submission.prompt),
        };
        // All choices have one prompt, whose rows are kept once.
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
            // Held until the request is known here: its facts may come at once.
            let mut kept = self.lock();
            let streams = self.engine.submit(first)?;
            let request = streams[0].id();
            let entry = Kept {
                key: rows.key(),
                rows,
                pages: Vec::new(),
                name: name.into(),
            };
            kept.insert(request, entry);
            *ticket.lock() = Some((self.clone(), request));
            streams
        };
        if let Some(others) = others {
            streams.extend(self.engine.submit(others)?);
        }
        Ok(streams)
    }

    /// Takes in a fact about a request whose prompt is to be kept. False when the request is somebody
    /// else's.
    pub fn handle_fact(self: &Arc<Self>, fact: &KvFact) -> bool {
        match fact {
            KvFact::Exported {
                request,
                first_row,
                pages,
                ..
            } => {
                let mut kept = self.lock();
                let Some(entry) = kept.get_mut(request) else {
                    return false;
                };
                // The first page may be there already, with some of its rows.
                let page_size = self.pages.geometry().page_size;
                entry.pages.truncate((first_row / page_size) as usize);
                entry.pages.extend_from_slice(pages);
                true
            }
            KvFact::Declined { request } => {
                let is_own = self.end(*request, KeptEnd::Dropped);
                if is_own {
                    tracing::debug!(%request, "too many pages are held; a prompt is not kept");
                }
                is_own
            }
            KvFact::ExportEnded { request, num_rows } => self.offer(*request, *num_rows),
            KvFact::LeaseEnded { request } => self.end(*request, KeptEnd::Expired),
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<RequestId, Kept>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// No two processes draw the same, and nobody can guess it.
    fn draw_session(&self) -> SessionId {
        // Its keys come from the operating system.
        let drawn = RandomState::new().hash_one(self.config.incarnation);
        SessionId(u128::from(self.config.incarnation) << 64 | u128::from(drawn))
    }

    fn source(&self, request: RequestId) -> Option<Source> {
        let rows = self.lock().get(&request)?.rows;
        Some(Source {
            host: self.config.host.clone(),
            port: self.config.port,
            near: self.config.near.clone(),
            rows: Some(rows),
        })
    }

    /// The rows are computed: others may pull them.
    fn offer(self: &Arc<Self>, request: RequestId, num_rows: u32) -> bool {
        let kept = self.lock();
        let Some(entry) = kept.get(&request) else {
            return false;
        };
        let key = entry.key;
        let is_whole = num_rows == entry.rows.num_rows;
        if !is_whole {
            drop(kept);
            return self.end(request, KeptEnd::Dropped);
        }
        // SAFETY: the engine holds the pages of the rows until it is told to release them, which
        // follows the end of the session in `end`.
        match unsafe { self.sender.store(key, num_rows) } {
            Ok(status) => {
                self.sender.add_pages(&key, &entry.pages);
                let num_layers = self.pages.geometry().num_layers;
                self.sender
                    .handle_rows_readable(&key, 0..num_layers, num_rows);
                self.sender.finish(&key);
                tracing::debug!(id = %entry.name, %key, num_rows, "a prompt is kept for another node");
                let watched = watch_pull(Arc::downgrade(self), request, key, status);
                self.runtime.spawn(watched);
                true
            }
            Err(error) => {
                rare_line!(warn, id = %entry.name, %error, "a prompt is not kept for another node");
                drop(kept);
                self.end(request, KeptEnd::Dropped)
            }
        }
    }

    /// Lets go of a prompt. False when there is none.
    fn end(&self, request: RequestId, how: KeptEnd) -> bool {
        let Some(entry) = self.lock().remove(&request) else {
            return false;
        };
        // The count comes first, so that an engine at rest has ended all that it counts.
        self.num_ended[how as usize].fetch_add(1, Ordering::Relaxed);
        // Also when nothing was stored: a peer that asks early learns that nothing will come.
        self.sender.delete(&entry.key);
        self.exchange.release_hold(request);
        tracing::debug!(id = %entry.name, key = %entry.key, end = how.as_str(), "a prompt is kept no more");
        true
    }
}

impl fmt::Debug for KeptPrompts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeptPrompts")
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

fn follow_facts(facts: &KvFacts, prompts: &Weak<KeptPrompts>) {
    while let Some(fact) = facts.next_blocking() {
        let Some(prompts) = prompts.upgrade() else {
            return;
        };
        if prompts.handle_fact(&fact) {
            continue;
        }
        // Its client left before the rows were computed.
        if let KvFact::ExportEnded { request, .. } | KvFact::LeaseEnded { request } = fact {
            prompts.exchange.release_hold(request);
        }
    }
}

/// Renews the lease while rows are pulled, and lets go of the prompt when all have been.
async fn watch_pull(
    prompts: Weak<KeptPrompts>,
    request: RequestId,
    key: SessionKey,
    mut status: watch::Receiver<SendStatus>,
) {
    let mut num_bytes = 0;
    loop {
        let changed = tokio::time::timeout(PROGRESS_INTERVAL, status.changed()).await;
        let Some(prompts) = prompts.upgrade() else {
            return;
        };
        // Ending the session changes its status, which must not be borrowed then.
        let now = *status.borrow_and_update();
        match now {
            SendStatus::Received => {
                prompts.end(request, KeptEnd::Pulled);
                return;
            }
            SendStatus::Over => return,
            SendStatus::Stored | SendStatus::Sending | SendStatus::Sent | SendStatus::Stopped => {}
        }
        if matches!(changed, Ok(Err(_))) {
            return;
        }
        if let Some(account) = prompts.sender.account(&key)
            && account.num_bytes > num_bytes
        {
            num_bytes = account.num_bytes;
            let lease = prompts.config.lease;
            prompts.exchange.renew_hold(request, lease);
        }
    }
}
