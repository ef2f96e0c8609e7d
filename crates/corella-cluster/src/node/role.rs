//! A running role, from its start to its end.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use corella_core::session::{Hello, SessionConfig};
use corella_core::{DirectoryConfig, PeerStanding, PeerTableConfig, PlacementConfig};
use corella_engine::Generate;
use tokio::net::TcpListener;
use tokio::sync::oneshot;

use super::Node;
use super::error::{NodeError, transport_error};
use super::host_name::host_name;
use super::kv_outlet::{CachedBlocks, KvOutlet};
use super::listener::NodePort;
use crate::blocks::SourceNode;
use crate::kv_connector::{AllowedPeers, KeptPrompts, KvConnector, Network, PromptFetcher, Site};
use crate::registry::{NodeRecord, Peers, Registry, RegistryConfig, Role};
use crate::session::{
    DecodeNode, DecodeParts, NodeListener, NodeSite, PrefillNode, PrefillParts, serve_sessions,
};
use crate::transport::{KvReceiver, PathKind, ReceiverConfig, RowPath, TransferThreads};

/// The time that a registry has to remove this node's record when the node leaves.
const DEREGISTER_TIMEOUT: Duration = Duration::from_secs(2);

pub enum RunningRole {
    Unified(UnifiedRole),
    Prefill(PrefillRole),
    Decode(DecodeRole),
}

/// The engine alone, unless a proxy pairs it with other nodes.
#[derive(Default)]
pub struct UnifiedRole {
    paired: Option<(KvConnector, Outlet)>,
}

/// The ways in which other nodes load from this one.
struct Outlet {
    kv: KvOutlet,
    /// Keeps prompts for nodes that a proxy chooses.
    kept: Option<Arc<KeptPrompts>>,
    blocks: CachedBlocks,
}

pub struct PrefillRole {
    pub node: PrefillNode,
    pub registry: Registry,
    /// Whether this node decodes requests that no decode node takes.
    falls_back: bool,
    connector: KvConnector,
    outlet: Outlet,
}

pub struct DecodeRole {
    pub node: Arc<DecodeNode>,
    pub registry: Option<Registry>,
    /// The prefill nodes that the registry lists.
    pub peers: Arc<Peers>,
    /// Loads KV rows for the node.
    pub receiver: Arc<KvReceiver>,
    connector: KvConnector,
    outlet: Outlet,
    /// Dropping the sender ends the session server, once the last session has ended.
    stop: Mutex<Option<oneshot::Sender<()>>>,
    _threads: TransferThreads,
}

impl RunningRole {
    /// A unified node that other nodes cannot reach.
    pub fn alone() -> Self {
        Self::Unified(UnifiedRole::default())
    }

    /// Returns the connector, which serves the requests that proxies pair.
    pub fn connector(&self) -> Option<&KvConnector> {
        match self {
            Self::Unified(role) => role.paired.as_ref().map(|(connector, _)| connector),
            Self::Prefill(role) => Some(&role.connector),
            Self::Decode(role) => Some(&role.connector),
        }
    }

    fn outlet(&self) -> Option<&Outlet> {
        match self {
            Self::Unified(role) => role.paired.as_ref().map(|(_, outlet)| outlet),
            Self::Prefill(role) => Some(&role.outlet),
            Self::Decode(role) => Some(&role.outlet),
        }
    }

    /// Returns the source node, which lends cached blocks to other nodes.
    pub fn block_source(&self) -> Option<&SourceNode> {
        self.outlet().map(|outlet| &*outlet.blocks.source)
    }

    /// Returns the address from which other nodes load KV rows.
    pub fn kv_site(&self) -> Option<&Site> {
        self.outlet().map(|outlet| &outlet.kv.site)
    }

    pub fn role(&self) -> Role {
        match self {
            Self::Unified(_) => Role::Unified,
            Self::Prefill(_) => Role::Prefill,
            Self::Decode(_) => Role::Decode,
        }
    }

    /// Returns the generator to which the server submits. `None` means the engine.
    pub fn generator(&self) -> Option<Arc<dyn Generate>> {
        match self {
            Self::Prefill(role) => Some(role.connector.local.clone()),
            Self::Unified(_) | Self::Decode(_) => None,
        }
    }

    /// Returns why no request can be served now, or `None`. Only a prefill node may need another node.
    pub fn obstacle(&self) -> Option<&'static str> {
        match self {
            Self::Prefill(role) if !role.falls_back && !role.has_decode_node() => Some(
                "No decode node is there, and this prefill node must not decode itself (--fallback none).",
            ),
            Self::Prefill(_) | Self::Unified(_) | Self::Decode(_) => None,
        }
    }

    /// The number of sessions, plus the number of holds on pages for other nodes.
    pub fn num_obligations(&self) -> usize {
        let num_kept = |outlet: &Outlet| {
            let kept = outlet.kept.as_ref().map_or(0, |kept| kept.num_kept());
            kept + outlet.blocks.source.num_loads()
        };
        let num_kept = self.outlet().map_or(0, num_kept);
        let num_obligations = match self {
            Self::Unified(_) => 0,
            Self::Prefill(role) => role.node.num_obligations(),
            Self::Decode(role) => role.node.num_sessions(),
        };
        num_obligations + num_kept
    }

    fn registry(&self) -> Option<&Registry> {
        match self {
            Self::Unified(_) => None,
            Self::Prefill(role) => Some(&role.registry),
            Self::Decode(role) => role.registry.as_ref(),
        }
    }

    /// From now on takes no new work from other nodes, and tells them so.
    pub fn stop_taking(&self) {
        if let Self::Decode(role) = self {
            role.node.set_draining(true);
        }
        if let Some(registry) = self.registry() {
            registry.drain();
        }
    }

    /// Removes this node's record from the registry.
    pub async fn deregister(&self) {
        if let Some(registry) = self.registry()
            && registry.is_published()
            && let Err(error) = registry.deregister(DEREGISTER_TIMEOUT).await
        {
            tracing::warn!("{error}");
        }
    }

    /// Frees the port for the next role. Open connections stay.
    pub fn stop_listening(&self) {
        if let Some(outlet) = self.outlet() {
            outlet.kv.sender.stop_listening();
        }
        if let Self::Decode(role) = self {
            let stop = role.stop.lock();
            drop(stop.unwrap_or_else(PoisonError::into_inner).take());
        }
    }
}

impl PrefillRole {
    /// Whether a decode node answers and takes new requests.
    fn has_decode_node(&self) -> bool {
        let nodes = self
            .node
            .with_peers(|peers, now_us| peers.decode_nodes(now_us));
        let mut standings = nodes.iter().map(|node| node.standing);
        standings.any(|standing| standing == PeerStanding::Healthy)
    }
}

impl Node {
    pub fn start_unified(&self, listener: NodePort) -> Result<UnifiedRole, NodeError> {
        let (_, hello) = self.identity(Role::Unified, &listener);
        let paths = self.start_paths(&hello)?;
        let kv = self.start_outlet(listener, &hello, &paths)?;
        let kept = self.keep_prompts(&kv, &hello);
        let following = kept.follow();
        following.map_err(|error| NodeError::Io("starting a thread".to_owned(), error))?;
        let receiver = self.receiver(&hello, paths);
        let blocks = self.start_blocks(&hello, &kv, receiver.clone())?;
        let connector = KvConnector {
            kept: Some(kept.clone()),
            prompt_fetcher: Some(self.prompt_fetcher(&hello, receiver)),
            fetcher: blocks.fetcher.clone(),
            local: Arc::new(self.model.engine.clone()),
        };
        let kept = Some(kept);
        Ok(UnifiedRole {
            paired: Some((connector, Outlet { kv, kept, blocks })),
        })
    }

    pub fn start_prefill(&self, listener: NodePort) -> Result<PrefillRole, NodeError> {
        let config = &self.config;
        let Some(url) = &config.registry else {
            return Err(NodeError::Config(
                "a prefill node needs --registry".to_owned(),
            ));
        };
        let (_, hello) = self.identity(Role::Prefill, &listener);
        let paths = self.start_paths(&hello)?;
        let kv = self.start_outlet(listener, &hello, &paths)?;
        let kept = self.keep_prompts(&kv, &hello);
        let receiver = self.receiver(&hello, paths);
        let blocks = self.start_blocks(&hello, &kv, receiver.clone())?;
        let directory = DirectoryConfig {
            placement: PlacementConfig {
                policy: config.policy,
                disaggregate_min_tokens: config.min_tokens,
                compute_place: config.compute_place,
                ..PlacementConfig::default()
            },
            falls_back: config.falls_back,
            page_size: self.model.engine.limits().page_size,
            kv_bytes_per_token: self.model.row_bytes(),
            first_cursor: hello.incarnation.0,
            ..DirectoryConfig::default()
        };
        let prompt_fetcher = self.prompt_fetcher(&hello, receiver);
        let session = SessionConfig {
            allocate_budget_us: config.search_timeout.as_micros() as u64,
            falls_back: config.falls_back,
            resumes_locally: config.falls_back,
            ..self.model.session_config(config)
        };
        let node = PrefillNode::start(
            session,
            hello,
            self.model.engine.clone(),
            PrefillParts {
                sender: kv.sender.clone(),
                kv_address: kv.address.clone(),
                directory,
                tls: self.tls.clone(),
                kept: Some(kept.clone()),
                fetcher: blocks.fetcher.clone(),
                fetches_always: config.fetches.is_some_and(|fetches| fetches.is_forced),
                watch: None,
            },
        );
        let node = node.map_err(|error| NodeError::Config(error.to_string()))?;
        let registry_config = RegistryConfig {
            group: config.group.clone(),
            ..RegistryConfig::new(Role::Decode)
        };
        let registry = Registry::start(url, None, registry_config, Arc::new(node.clone()));
        let registry = registry.map_err(|error| NodeError::Config(error.to_string()))?;
        let connector = KvConnector {
            kept: Some(kept.clone()),
            prompt_fetcher: Some(prompt_fetcher),
            fetcher: blocks.fetcher.clone(),
            local: Arc::new(node.clone()),
        };
        let kept = Some(kept);
        Ok(PrefillRole {
            node,
            registry,
            falls_back: config.falls_back,
            connector,
            outlet: Outlet { kv, kept, blocks },
        })
    }

    pub fn start_decode(&self, listener: NodePort) -> Result<DecodeRole, NodeError> {
        let config = &self.config;
        let (reachable, hello) = self.identity(Role::Decode, &listener);
        let paths = self.start_paths(&hello)?;
        // Sessions use the listener's own port.
        let port = NodePort::beside(&listener)?;
        let kv = self.start_outlet(port, &hello, &paths)?;
        let receiver = self.receiver(&hello, paths);
        let blocks = self.start_blocks(&hello, &kv, receiver.clone())?;
        let connector = KvConnector {
            kept: None,
            prompt_fetcher: Some(self.prompt_fetcher(&hello, receiver.clone())),
            fetcher: blocks.fetcher.clone(),
            local: Arc::new(self.model.engine.clone()),
        };
        let listener = TcpListener::from_std(listener.listener)
            .map_err(|error| NodeError::Io("listening for sessions".to_owned(), error))?;
        let peers = Arc::new(Peers::new(PeerTableConfig::default()));
        let registry = self.register_decode(&hello, &reachable, &peers)?;
        let site = NodeSite {
            host: config.uses_host.then(host_name),
            kv_address: kv.address.clone(),
        };
        let parts = DecodeParts {
            receiver: receiver.clone(),
            constraints: Some(self.model.constraints.clone()),
            site,
            meter: Some(self.meter.clone()),
        };
        let session = self.model.session_config(config);
        let node = DecodeNode::start(session, hello, self.model.engine.clone(), parts);
        let node = node.map_err(|error| NodeError::Config(error.to_string()))?;
        let (stop, stopped) = oneshot::channel::<()>();
        let listener = NodeListener {
            tls: self.tls.clone(),
            max_num_connections: config.max_connections,
            max_per_address: config.max_connections_per_address,
            ..NodeListener::new(listener)
        };
        let tracer = config.tracer.clone();
        let sessions = serve_sessions(listener, node.clone(), tracer, async move {
            let _ = stopped.await;
        });
        tokio::spawn(async move {
            if let Err(error) = sessions.await {
                tracing::error!("sessions are no longer served: {error}");
            }
        });
        Ok(DecodeRole {
            node,
            registry,
            peers,
            receiver,
            connector,
            outlet: Outlet {
                kv,
                kept: None,
                blocks,
            },
            stop: Mutex::new(Some(stop)),
            _threads: self.threads.clone(),
        })
    }

    /// Registers a decode node, if there is a registry, and follows the prefill nodes listed there.
    fn register_decode(
        &self,
        hello: &Hello,
        reachable: &str,
        peers: &Arc<Peers>,
    ) -> Result<Option<Registry>, NodeError> {
        let config = &self.config;
        let Some(url) = &config.registry else {
            return Ok(None);
        };
        let mut own = NodeRecord::at(&hello.instance, reachable);
        own.incarnation = Some(hello.incarnation.0);
        own.role = Some(Role::Decode);
        own.max_prompt_tokens = config.max_prompt_tokens.unwrap_or(u32::MAX);
        own.group.clone_from(&config.group);
        let registry_config = RegistryConfig {
            group: config.group.clone(),
            ..RegistryConfig::new(Role::Prefill)
        };
        let registry = Registry::start(url, Some(own), registry_config, peers.clone());
        registry
            .map(Some)
            .map_err(|error| NodeError::Config(error.to_string()))
    }

    /// Starts the row paths that the operator has chosen, for this incarnation of the node.
    fn start_paths(&self, hello: &Hello) -> Result<Vec<Arc<dyn RowPath>>, NodeError> {
        let start = |kind: &PathKind| {
            let path = (kind.start)(hello.incarnation.0);
            path.map_err(|error| transport_error(kind.option, error))
        };
        self.config.row_paths.iter().map(start).collect()
    }

    fn receiver(&self, hello: &Hello, paths: Vec<Arc<dyn RowPath>>) -> Arc<KvReceiver> {
        let pages = self.model.engine.kv_pages().clone();
        let mut config = ReceiverConfig::new(
            hello.incarnation.0,
            hello.model_fingerprint,
            hello.arithmetic(),
        );
        config.tls.clone_from(&self.tls);
        config.paths.extend(paths);
        Arc::new(KvReceiver::new(config, pages, &self.threads))
    }

    /// Returns the configured networks and this machine.
    pub fn allowed_peers(&self) -> AllowedPeers {
        let own = Some(self.config.listen.ip()).filter(|address| !address.is_unspecified());
        let named = self.config.kv_peer_allow.iter().copied();
        AllowedPeers::new(named.chain(own.map(Network::of)))
    }

    fn prompt_fetcher(&self, hello: &Hello, receiver: Arc<KvReceiver>) -> Arc<PromptFetcher> {
        PromptFetcher::new(
            self.model.engine.clone(),
            receiver,
            self.config.uses_host.then(host_name),
            self.allowed_peers(),
            hello,
            self.model.session_config(&self.config),
        )
    }

    /// Returns the address at which others reach this node, and its greeting to them.
    fn identity(&self, role: Role, listener: &NodePort) -> (String, Hello) {
        let reachable = format!("{}:{}", self.config.host(), listener.address.port());
        let instance = self
            .config
            .node_id
            .clone()
            .unwrap_or_else(|| format!("{}-{reachable}", role.name()));
        (reachable, self.model.hello(&instance, &self.config.group))
    }
}
