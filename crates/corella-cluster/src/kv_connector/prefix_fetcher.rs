//! Requests whose prefix another node has cached. This node loads the blocks, and the request waits for them like a
//! follower of a request with the same prefix. If the load fails, this node computes the prompt.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use corella_core::session::BlockFetchEnd;
use corella_core::{Namespace, PageHash, RequestId, TokenId};
use corella_engine::{BlockExchange, Engine, Generate, Submission, SubmitError, TokenStream};
use strum::{IntoStaticStr, VariantArray};
use tokio::runtime::Handle;

use super::allowed_peers::AllowedPeers;
use super::answer::Answers;
use super::params::Site;
use crate::blocks::{FetchConfig, FetchStart, FetcherNode};
use crate::transport::PeerAddress;

/// How the fetch for a request began.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "snake_case")]
pub enum FetchOutcome {
    /// The blocks are being loaded.
    Begun,
    /// The other node has no blocks of the prompt that are missing here.
    NothingNew,
    /// Computing the blocks is as quick as loading them.
    NotWorth,
    /// The other node does not answer or refuses.
    Failed,
    /// No pages were free, or too many fetches run.
    NoRoom,
    /// A request that never fetches: its prompt is shorter than a block, it has an adapter, or it asks for prompt
    /// outputs.
    Unsuitable,
}

impl FetchOutcome {
    pub const ALL: &'static [Self] = Self::VARIANTS;

    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

impl From<FetchStart> for FetchOutcome {
    fn from(start: FetchStart) -> Self {
        use corella_core::FetchRefusal;
        match start {
            FetchStart::Begun => Self::Begun,
            FetchStart::Unreachable => Self::Failed,
            FetchStart::Busy => Self::NoRoom,
            FetchStart::Ended(end) => match end {
                BlockFetchEnd::Loaded { .. } => Self::Begun,
                BlockFetchEnd::NotFound | BlockFetchEnd::NoPages(FetchRefusal::AllCached) => {
                    Self::NothingNew
                }
                BlockFetchEnd::NotWorth => Self::NotWorth,
                // The fetch of another request brings the same blocks.
                BlockFetchEnd::NoPages(FetchRefusal::UnderWay(_)) => Self::Begun,
                BlockFetchEnd::NoPages(_) => Self::NoRoom,
                BlockFetchEnd::Cancelled
                | BlockFetchEnd::TimedOut
                | BlockFetchEnd::RowsLost
                | BlockFetchEnd::Failed(_)
                | BlockFetchEnd::SourceLost => Self::Failed,
            },
        }
    }
}

/// Fetches the prefixes of requests before it submits them.
pub struct PrefixFetcher {
    engine: Engine,
    exchange: BlockExchange,
    node: Arc<FetcherNode>,
    /// The name of this host, if rows may be loaded inside the host.
    machine: Option<String>,
    allowed: AllowedPeers,
    config: FetchConfig,
    runtime: Handle,
    num_outcomes: [AtomicU64; FetchOutcome::ALL.len()],
}

impl PrefixFetcher {
    /// Must be called within a tokio runtime.
    pub fn new(
        engine: Engine,
        node: Arc<FetcherNode>,
        machine: Option<String>,
        allowed: AllowedPeers,
        config: FetchConfig,
    ) -> Arc<Self> {
        Arc::new(Self {
            exchange: engine.block_exchange(),
            engine,
            node,
            machine,
            allowed,
            config,
            runtime: Handle::current(),
            num_outcomes: Default::default(),
        })
    }

    /// Number of requests since the start.
    pub fn num_requests(&self, outcome: FetchOutcome) -> u64 {
        self.num_outcomes[outcome as usize].load(Ordering::Relaxed)
    }

    pub fn node(&self) -> &Arc<FetcherNode> {
        &self.node
    }

    /// Returns the name of this host, if rows may be loaded inside the host.
    pub fn machine(&self) -> Option<&str> {
        self.machine.as_deref()
    }

    /// Begins to load the blocks of a request's prompt from `source`, and then submits the request to `local`. `hashes`
    /// has the hashes of the blocks.
    pub fn submit_from(
        self: &Arc<Self>,
        submission: Submission,
        source: PeerAddress,
        hashes: Arc<[PageHash]>,
        local: &Arc<dyn Generate>,
    ) -> Result<Vec<TokenStream>, SubmitError> {
        self.submit_behind(submission, Source::Known(source, hashes), local)
    }

    /// Begins to fetch a request's prefix from the node at `site`, and then submits the request to `local`.
    pub(super) fn submit(
        self: &Arc<Self>,
        submission: Submission,
        site: &Site,
        local: &Arc<dyn Generate>,
    ) -> Result<Vec<TokenStream>, SubmitError> {
        self.submit_behind(submission, Source::Named(site.clone()), local)
    }

    fn submit_behind(
        self: &Arc<Self>,
        submission: Submission,
        source: Source,
        local: &Arc<dyn Generate>,
    ) -> Result<Vec<TokenStream>, SubmitError> {
        self.engine.state().check()?;
        let is_suitable =
            submission.adapter.is_none() && !submission.sampling.wants_prompt_outputs();
        let prefix = Prefix::of(&submission);
        if !is_suitable || !self.takes(prefix) {
            self.note(FetchOutcome::Unsuitable, prefix);
            return local.submit(submission);
        }
        let (answers, streams) = Answers::new(RequestId(0), submission.num_choices);
        let (fetcher, local) = (self.clone(), local.clone());
        self.runtime.spawn(async move {
            let prefix = Prefix::of(&submission);
            let outcome = match source {
                Source::Known(address, hashes) => {
                    fetcher.fetch_from(prefix, &hashes, address).await
                }
                Source::Named(site) => fetcher.fetch(prefix, &site).await,
            };
            fetcher.note(outcome, prefix);
            answers.relay(local.submit(submission), &fetcher.runtime);
        });
        Ok(streams)
    }

    /// Begins to fetch a prompt's blocks from `source`. Requests with that prompt wait for them.
    pub(crate) async fn begin(&self, prefix: Prefix<'_>, hashes: &[PageHash], source: PeerAddress) {
        let outcome = match self.takes(prefix) {
            true => self.fetch_from(prefix, hashes, source).await,
            false => FetchOutcome::Unsuitable,
        };
        self.note(outcome, prefix);
    }

    fn takes(&self, prefix: Prefix<'_>) -> bool {
        prefix.namespace.lora.is_none() && prefix.prompt.len() > self.exchange.page_size() as usize
    }

    async fn fetch(&self, prefix: Prefix<'_>, site: &Site) -> FetchOutcome {
        let address = site.address(self.machine.as_deref(), &self.allowed);
        let source = match tokio::time::timeout(self.config.greeting, address).await {
            Ok(Ok(source)) => source,
            Ok(Err(reason)) => {
                tracing::debug!("no blocks from {}: {reason}", site.name());
                return FetchOutcome::Failed;
            }
            Err(_) => return FetchOutcome::Failed,
        };
        let hashes = self.exchange.hashes(prefix.namespace, prefix.prompt);
        self.fetch_from(prefix, &hashes, source).await
    }

    async fn fetch_from(
        &self,
        prefix: Prefix<'_>,
        hashes: &[PageHash],
        source: PeerAddress,
    ) -> FetchOutcome {
        // The last token is always computed, because its logits are needed.
        let num_tokens = prefix.prompt.len() - 1;
        let tokens = &prefix.prompt[..num_tokens];
        let list = self.exchange.list(prefix.namespace, tokens, hashes);
        let prefill_us = self.engine.stats().scheduler.prefill_us;
        // `prefill_us` was measured for 1,024 tokens.
        let computing_us = prefill_us.saturating_mul(num_tokens as u64) / 1024;
        let computing = Duration::from_micros(computing_us);
        let FetchConfig { wait, limit, .. } = self.config;
        let wait = match prefill_us {
            // Before the first computed prompt, the computing time is unknown. A load that stalls ends long before
            // `limit`.
            0 => limit,
            _ => computing.max(wait).min(limit),
        };
        self.node.fetch(list, source, wait, limit).await.into()
    }

    fn note(&self, outcome: FetchOutcome, prefix: Prefix<'_>) {
        self.num_outcomes[outcome as usize].fetch_add(1, Ordering::Relaxed);
        let (id, outcome) = (prefix.trace_id, outcome.as_str());
        tracing::debug!(id, outcome, "blocks of a prompt are fetched");
    }
}

/// The prompt whose blocks are fetched.
#[derive(Clone, Copy)]
pub(crate) struct Prefix<'a> {
    pub namespace: &'a Namespace,
    pub prompt: &'a [TokenId],
    pub trace_id: Option<&'a str>,
}

impl<'a> Prefix<'a> {
    fn of(submission: &'a Submission) -> Self {
        Self {
            namespace: &submission.namespace,
            prompt: &submission.prompt,
            trace_id: submission.trace_id.as_deref(),
        }
    }
}

enum Source {
    /// The source, with the hashes of the prompt's blocks.
    Known(PeerAddress, Arc<[PageHash]>),
    Named(Site),
}
