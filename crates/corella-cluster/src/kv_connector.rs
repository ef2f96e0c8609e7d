//! The connector for proxies: a proxy has one node compute a prompt and another decode, and carries
//! `kv_transfer_params` from the first answer to the second request.
//!
//! llm-d's sidecar (connector `nixlv2`) and vLLM's proxies work this way. The prefill node keeps the prompt's rows for
//! a bounded time ([`KeptPrompts`]). The decode node fetches the rows ([`PromptFetcher`]), and computes the prompt
//! itself when fetching fails. No session connects the two nodes: `params.rs` has all that one node must know about the
//! other.

mod allowed_peers;
mod answer;
mod block_site;
mod kept_prompts;
mod params;
mod prefix_fetcher;
mod prompt_fetcher;

use std::sync::Arc;

pub use corella_core::session::KeptEnd;
use corella_engine::{Generate, Submission, SubmitError, TokenStream};
use serde_json::{Map, Value};

pub use allowed_peers::{AllowedPeers, Network};
pub(crate) use answer::Answers;
pub use kept_prompts::{KeepConfig, KeptPrompts};
pub use params::{NearSource, ParamError, SOCKET_PREFIX, Site};
pub(crate) use prefix_fetcher::Prefix;
pub use prefix_fetcher::{FetchOutcome, PrefixFetcher};
pub use prompt_fetcher::{PromptFetchOutcome, PromptFetcher};

use kept_prompts::KeptTicket;
use params::{Fetch, Transfer};

/// The parts of a node that serve requests with `kv_transfer_params`.
#[derive(Clone)]
pub struct KvConnector {
    /// `None` when this node sends no rows.
    pub kept: Option<Arc<KeptPrompts>>,
    /// `None` when this node fetches no rows.
    pub prompt_fetcher: Option<Arc<PromptFetcher>>,
    /// `None` when this node loads no cached blocks.
    pub fetcher: Option<Arc<PrefixFetcher>>,
    /// Takes submissions whose rows are neither kept nor fetched.
    pub local: Arc<dyn Generate>,
}

/// One request with `kv_transfer_params`.
pub struct ConnectorCall {
    connector: KvConnector,
    transfer: Transfer,
    name: Arc<str>,
    ticket: Arc<KeptTicket>,
}

/// Takes submissions whose prompt is computed here and then kept.
struct Keeping {
    kept: Arc<KeptPrompts>,
    name: Arc<str>,
    ticket: Arc<KeptTicket>,
}

impl KvConnector {
    /// Reads the parameters of a request, which the client calls `name`. Returns `None` when the parameters ask for
    /// nothing.
    pub fn begin(
        &self,
        fields: &Map<String, Value>,
        name: &str,
    ) -> Result<Option<ConnectorCall>, ParamError> {
        let transfer = params::parse(fields)?;
        Ok(transfer.map(|transfer| ConnectorCall {
            connector: self.clone(),
            transfer,
            name: name.into(),
            ticket: Arc::default(),
        }))
    }
}

impl ConnectorCall {
    /// Returns whether another node wants the prompt's rows.
    pub fn keeps_prompt(&self) -> bool {
        self.transfer.keeps
    }

    /// Returns the answer's parameters for the other node, if rows are kept for it.
    pub fn response(&self) -> Option<Value> {
        self.ticket.redeem().map(Value::Object)
    }
}

impl Generate for ConnectorCall {
    fn submit(&self, submission: Submission) -> Result<Vec<TokenStream>, SubmitError> {
        let connector = &self.connector;
        let local: Arc<dyn Generate> = match &connector.kept {
            Some(kept) if self.transfer.keeps => Arc::new(Keeping {
                kept: kept.clone(),
                name: self.name.clone(),
                ticket: self.ticket.clone(),
            }),
            _ => connector.local.clone(),
        };
        match &self.transfer.fetch {
            Some(Fetch::Prompt(source)) if let Some(prompt_fetcher) = &connector.prompt_fetcher => {
                prompt_fetcher.submit(submission, source, &self.name, &local)
            }
            Some(Fetch::Blocks(site)) if let Some(fetcher) = &connector.fetcher => {
                fetcher.submit(submission, site, &local)
            }
            _ => local.submit(submission),
        }
    }
}

impl Generate for Keeping {
    fn submit(&self, submission: Submission) -> Result<Vec<TokenStream>, SubmitError> {
        self.kept.submit(submission, &self.name, &self.ticket)
    }
}
