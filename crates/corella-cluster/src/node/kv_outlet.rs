//! The outlet from which other nodes load this node's KV rows.

use std::sync::Arc;
use std::time::Duration;

use corella_core::session::Hello;

use super::Node;
use super::error::NodeError;
use super::host_name::host_name;
use super::listener::NodePort;
use crate::blocks::{FetcherNode, SourceNode, follow_facts};
use crate::kv_connector::{
    KeepConfig, KeptPrompts, NearSource, PrefixFetcher, SOCKET_PREFIX, Site,
};
use crate::session::KvAddress;
use crate::transport::{KvReceiver, KvSender, PeerAddress, RowPath, SenderConfig};

pub struct KvOutlet {
    pub sender: Arc<KvSender>,
    pub address: KvAddress,
    /// The address in the form that requests use.
    pub site: Site,
}

impl Node {
    /// Sends KV rows to nodes that connect to the listener or, on this host, to a named socket.
    pub fn start_outlet(
        &self,
        listener: NodePort,
        hello: &Hello,
        paths: &[Arc<dyn RowPath>],
    ) -> Result<KvOutlet, NodeError> {
        let config = &self.config;
        let pages = self.model.engine.kv_pages().clone();
        let mut sender_config = SenderConfig::new(
            hello.incarnation.0,
            hello.model_fingerprint,
            hello.arithmetic(),
        );
        sender_config.max_bandwidth = config.max_bandwidth;
        sender_config.tls.clone_from(&self.tls);
        sender_config.paths.extend_from_slice(paths);
        let sender = KvSender::start(sender_config, pages, &self.threads);
        let sender = sender.map_err(|error| NodeError::Config(format!("KV rows by {error}")))?;
        let sender = Arc::new(sender);
        let (host, port) = (config.host(), listener.address.port());
        let address = listener.address;
        sender.listen_on(listener.listener).map_err(|error| {
            NodeError::Io(format!("cannot listen on {address} for KV rows"), error)
        })?;
        let socket = config.uses_host.then(|| socket_name(hello));
        if let Some(name) = &socket {
            let listening = sender.listen(PeerAddress::Unix(name.clone()));
            listening.map_err(|error| {
                let what =
                    "cannot listen for nodes on this host (--transport tcp needs no local socket)";
                NodeError::Io(what.to_owned(), error)
            })?;
        }
        let address = KvAddress {
            address: match config.uses_network {
                true => format!("{host}:{port}"),
                false => String::new(),
            },
            socket: socket.clone().unwrap_or_default(),
            host: host_name(),
        };
        let near = socket.map(|socket| NearSource {
            socket,
            machine: host_name(),
        });
        let port = if config.uses_network { port } else { 0 };
        Ok(KvOutlet {
            sender,
            address,
            site: Site { host, port, near },
        })
    }

    /// Keeps prompts for nodes that a proxy chooses.
    pub fn keep_prompts(&self, outlet: &KvOutlet, hello: &Hello) -> Arc<KeptPrompts> {
        let keep = KeepConfig {
            incarnation: hello.incarnation.0,
            model_fingerprint: hello.model_fingerprint,
            arithmetic: hello.arithmetic(),
            site: outlet.site.clone(),
            lease: Duration::from_micros(self.model.engine.limits().hold_lease_us),
        };
        KeptPrompts::new(self.model.engine.clone(), outlet.sender.clone(), keep)
    }

    /// Lends cached blocks to other nodes, and loads them from other nodes.
    pub fn start_blocks(
        &self,
        hello: &Hello,
        outlet: &KvOutlet,
        receiver: Arc<KvReceiver>,
    ) -> Result<CachedBlocks, NodeError> {
        let engine = &self.model.engine;
        let (incarnation, geometry) = (hello.incarnation, engine.kv_pages().geometry());
        let exchange = engine.block_exchange();
        let source = SourceNode::start(incarnation, exchange, &outlet.sender, geometry);
        let fetches = self.config.fetches.unwrap_or_default();
        // Blocks are useless without the recurrent states after them, and only sessions move such states.
        let has_states = engine.kv_pages().states().is_some();
        let fetches_blocks = self.config.fetches.is_some() && !has_states;
        let node = FetcherNode::start(incarnation, engine.clone(), receiver, geometry, fetches);
        let following = follow_facts(engine.subscribe_block_facts(), &source, &node);
        following.map_err(|error| NodeError::Io("starting a thread".to_owned(), error))?;
        let machine = self.config.uses_host.then(host_name);
        let allowed = self.allowed_peers();
        let fetcher = PrefixFetcher::new(engine.clone(), node, machine, allowed, fetches);
        Ok(CachedBlocks {
            source,
            fetcher: fetches_blocks.then_some(fetcher),
        })
    }
}

/// Both ends of loads of cached blocks.
pub struct CachedBlocks {
    pub source: Arc<SourceNode>,
    pub fetcher: Option<Arc<PrefixFetcher>>,
}

/// The name differs for each incarnation of a node.
fn socket_name(hello: &Hello) -> String {
    let (process, incarnation) = (std::process::id(), hello.incarnation.0);
    format!("{SOCKET_PREFIX}{process}-{incarnation:x}")
}
