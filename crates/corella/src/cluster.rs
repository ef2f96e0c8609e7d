//! A server as one of several nodes: what it starts beside its engine, and how it leaves.

mod entrance;
mod metrics;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use corella::{Error, Llm};
use corella_cluster::entrance::{Entrance, KeepConfig, KeptPrompts, NearSource, Puller};
use corella_cluster::session::{DecodeNode, KvAddress, PrefillNode, RegistryPeers, serve_sessions};
use corella_cluster::transport::{
    KvReceiver, KvSender, PeerAddress, ReceiverConfig, SenderConfig, TransferThreads,
};
use corella_cluster::{
    ClusterTls, NodeRecord, Registry, RegistryConfig, RegistryUrl, Role, TlsFiles,
};
use corella_core::session::{Hello, KvShape, SessionConfig};
use corella_core::{Incarnation, PeerPolicy, PlacementConfig};
use corella_engine::Generate;
use corella_server::{KvTransfer, ServerState};
use prometheus_client::collector::Collector;
use tokio::net::TcpListener;
use tokio::sync::oneshot;

use entrance::ServerEntrance;
use metrics::{ClusterMetrics, DecodeMetrics, NodeMetrics, PrefillMetrics};

/// How long a registry has to take this node off its list when it leaves.
const DEREGISTER_TIMEOUT: Duration = Duration::from_secs(2);
/// How often to check whether the last session has ended.
const DRAIN_POLL: Duration = Duration::from_millis(20);
/// Spoken by the nodes of a cluster. Nodes of another major version do not work together.
const PROTOCOL: (u32, u32) = (1, 0);

/// What the options say of the other nodes.
#[derive(Clone, Debug)]
pub struct ClusterConfig {
    pub role: Role,
    pub registry: Option<RegistryUrl>,
    pub listen: SocketAddr,
    /// The host that others are told, if it is not that of `listen`.
    pub advertise: Option<String>,
    pub tls: Option<TlsFiles>,
    pub node_id: Option<String>,
    pub policy: PeerPolicy,
    pub min_tokens: u32,
    pub uses_network: bool,
    pub uses_host: bool,
    pub max_bandwidth: Option<u64>,
    pub num_threads: usize,
}

/// Bound before the model is loaded, so that a port in use is noticed at once.
pub struct ClusterListener {
    listener: std::net::TcpListener,
    address: SocketAddr,
    /// By which other nodes reach this one.
    host: String,
    tls: Option<ClusterTls>,
}

/// What runs beside a server's engine.
pub struct Cluster {
    node: Node,
    /// What proxies ask of this node.
    entrance: Entrance,
    _threads: TransferThreads,
}

/// This node's part in sessions with others.
enum Node {
    /// It has none: proxies pair it with others.
    Unified {
        /// Removed when the server ends.
        socket: Option<PathBuf>,
    },
    Prefill {
        node: PrefillNode,
        registry: Registry,
        /// Removed when the server ends.
        socket: Option<PathBuf>,
    },
    Decode {
        node: Arc<DecodeNode>,
        registry: Option<Registry>,
        /// Dropping it ends the server of sessions when the last of them has ended.
        _stop: oneshot::Sender<()>,
    },
}

impl ClusterListener {
    pub fn bind(config: &ClusterConfig) -> Result<Self, Error> {
        let cannot_listen = |error| {
            let what = format!("cannot listen on --cluster-listen {}", config.listen);
            Error::Io(what, error)
        };
        let listener = std::net::TcpListener::bind(config.listen).map_err(cannot_listen)?;
        listener.set_nonblocking(true).map_err(cannot_listen)?;
        let address = listener.local_addr().map_err(cannot_listen)?;
        let host = config.advertise.clone().unwrap_or_else(|| host_of(address));
        let tls = match &config.tls {
            Some(files) => {
                let tls = ClusterTls::load(files, &host);
                Some(tls.map_err(|error| Error::Config(error.to_string()))?)
            }
            None => None,
        };
        if tls.is_none() && !address.ip().is_loopback() {
            tracing::warn!(
                "other machines reach {address} without a password and without encryption: prompts, \
                 answers and KV rows travel in the clear; give all nodes --cluster-tls-cert, \
                 --cluster-tls-key and --cluster-tls-ca, or keep the port inside a network you trust"
            );
        }
        Ok(Self {
            listener,
            address,
            host,
            tls,
        })
    }
}

impl Cluster {
    /// Starts this node's part on the caller's runtime.
    pub fn start(
        config: &ClusterConfig,
        listener: ClusterListener,
        llm: &Llm,
    ) -> Result<Self, Error> {
        let address = listener.address;
        let reachable = format!("{}:{}", listener.host, address.port());
        let role = match config.role {
            Role::Prefill => "prefill",
            Role::Decode => "decode",
            Role::Unified => "node",
        };
        let instance = { config.node_id.clone() }.unwrap_or_else(|| format!("{role}-{reachable}"));
        let incarnation = Incarnation(microseconds_since_1970());
        let hello = hello(llm, &instance, incarnation);
        let threads = TransferThreads::start(config.num_threads)
            .map_err(|error| Error::Io("starting the transfer threads".to_owned(), error))?;
        let pages = llm.engine.kv_pages().clone();
        let tls = listener.tls.clone();
        let mut receiver_config = ReceiverConfig::new(hello.incarnation.0, hello.model_fingerprint);
        receiver_config.tls.clone_from(&tls);
        let receiver = Arc::new(KvReceiver::new(receiver_config, pages, &threads));
        let puller = Puller::new(
            llm.engine.clone(),
            receiver.clone(),
            config.uses_host.then(host_name),
            hello.model_fingerprint,
            session_config(llm),
        );
        let mut entrance = Entrance {
            kept: None,
            puller: Some(puller),
            local: Arc::new(llm.engine.clone()),
        };
        let node = match config.role {
            Role::Decode => Self::start_decode(config, listener, llm, hello, &reachable, receiver)?,
            Role::Prefill | Role::Unified => {
                let place = KvPlace {
                    host: listener.host.clone(),
                    port: address.port(),
                    socket: config.uses_host.then(|| socket_path(&hello)),
                };
                let sender = start_sender(config, listener, llm, &hello, &place, &threads)?;
                let kept = KeptPrompts::new(
                    llm.engine.clone(),
                    sender.clone(),
                    place.keep_config(config, llm, &hello),
                );
                entrance.kept = Some(kept.clone());
                if config.role == Role::Unified {
                    let following = kept.follow();
                    following.map_err(|error| Error::Io("starting a thread".to_owned(), error))?;
                    let socket = place.socket;
                    Node::Unified { socket }
                } else {
                    let node = Self::start_prefill(config, llm, hello, place, sender, kept, tls)?;
                    if let Node::Prefill { node, .. } = &node {
                        entrance.local = Arc::new(node.clone());
                    }
                    node
                }
            }
        };
        Ok(Self {
            node,
            entrance,
            _threads: threads,
        })
    }

    fn start_prefill(
        config: &ClusterConfig,
        llm: &Llm,
        hello: Hello,
        place: KvPlace,
        sender: Arc<KvSender>,
        kept: Arc<KeptPrompts>,
        tls: Option<ClusterTls>,
    ) -> Result<Node, Error> {
        let kv_address = KvAddress {
            address: match config.uses_network {
                true => format!("{}:{}", place.host, place.port),
                false => String::new(),
            },
            socket: place.socket_name(),
            host: host_name(),
        };
        let Some(url) = &config.registry else {
            return Err(Error::Config("a prefill node needs --registry".to_owned()));
        };
        let registry = Registry::start(url, None, RegistryConfig::new(Role::Decode));
        let registry = registry.map_err(|error| Error::Config(error.to_string()))?;
        let placement = PlacementConfig {
            policy: config.policy,
            disaggregate_min_tokens: config.min_tokens,
            ..PlacementConfig::default()
        };
        let peers = registry.peers().clone();
        let peers = RegistryPeers::start(peers, placement, hello.clone(), row_bytes(llm), tls);
        let node = PrefillNode::start(
            session_config(llm),
            hello,
            llm.engine.clone(),
            sender,
            kv_address,
            peers,
            Some(kept),
        );
        let node = node.map_err(|error| Error::Config(error.to_string()))?;
        Ok(Node::Prefill {
            node,
            registry,
            socket: place.socket,
        })
    }

    fn start_decode(
        config: &ClusterConfig,
        listener: ClusterListener,
        llm: &Llm,
        hello: Hello,
        reachable: &str,
        receiver: Arc<KvReceiver>,
    ) -> Result<Node, Error> {
        let registry = match &config.registry {
            Some(url) => {
                let mut own = NodeRecord::at(&hello.instance, reachable);
                own.incarnation = Some(hello.incarnation.0);
                own.role = Some(Role::Decode);
                let registry = Registry::start(url, Some(own), RegistryConfig::new(Role::Prefill));
                Some(registry.map_err(|error| Error::Config(error.to_string()))?)
            }
            None => None,
        };
        let host = config.uses_host.then(host_name);
        let session = session_config(llm);
        let node = DecodeNode::start(session, hello, llm.engine.clone(), receiver, host);
        let node = node.map_err(|error| Error::Config(error.to_string()))?;
        let tls = listener.tls;
        let listener = TcpListener::from_std(listener.listener)
            .map_err(|error| Error::Io("listening for sessions".to_owned(), error))?;
        let (stop, stopped) = oneshot::channel::<()>();
        let sessions = serve_sessions(listener, node.clone(), tls, async move {
            let _ = stopped.await;
        });
        tokio::spawn(async move {
            if let Err(error) = sessions.await {
                tracing::error!("sessions are no longer served: {error}");
            }
        });
        Ok(Node::Decode {
            node,
            registry,
            _stop: stop,
        })
    }

    /// What the server submits requests to, if not to its engine.
    pub fn generator(&self) -> Option<Arc<dyn Generate>> {
        match &self.node {
            Node::Prefill { node, .. } => Some(Arc::new(node.clone())),
            Node::Decode { .. } | Node::Unified { .. } => None,
        }
    }

    /// Who reads `kv_transfer_params`.
    pub fn kv_transfer(&self) -> Arc<dyn KvTransfer> {
        Arc::new(ServerEntrance(self.entrance.clone()))
    }

    /// What it adds to the server's metrics.
    pub fn collector(&self) -> Box<dyn Collector> {
        let node = match &self.node {
            Node::Unified { .. } => NodeMetrics::Unified,
            Node::Prefill { node, registry, .. } => NodeMetrics::Prefill(PrefillMetrics {
                node: node.clone(),
                peers: registry.peers().clone(),
            }),
            Node::Decode { node, .. } => NodeMetrics::Decode(DecodeMetrics(node.clone())),
        };
        let entrance = self.entrance.clone();
        Box::new(ClusterMetrics { node, entrance })
    }

    /// Tells the other nodes as soon as the server drains, so that nothing new comes from them.
    pub async fn leave_when_draining(&self, state: &ServerState) {
        state.draining().await;
        let registry = match &self.node {
            Node::Unified { .. } => None,
            Node::Prefill { registry, .. } => Some(registry),
            Node::Decode { node, registry, .. } => {
                node.set_draining(true);
                registry.as_ref()
            }
        };
        if let Some(registry) = registry
            && registry.is_published()
            && let Err(error) = registry.deregister(DEREGISTER_TIMEOUT).await
        {
            tracing::warn!("{error}");
        }
    }

    /// Waits until the sessions of other nodes have ended and nothing is kept for any, and no longer than
    /// `grace`.
    pub async fn finish(&self, grace: Duration) {
        let ended = async {
            while self.num_sessions() > 0 {
                tokio::time::sleep(DRAIN_POLL).await;
            }
        };
        if tokio::time::timeout(grace, ended).await.is_err() {
            let num_sessions = self.num_sessions();
            tracing::warn!(num_sessions, "cut off while running for other nodes");
        }
    }

    fn num_sessions(&self) -> usize {
        let num_kept = { &self.entrance.kept }
            .as_ref()
            .map_or(0, |kept| kept.num_kept());
        let num_sessions = match &self.node {
            Node::Unified { .. } => 0,
            Node::Prefill { node, .. } => node.stats().num_sessions,
            Node::Decode { node, .. } => node.num_sessions(),
        };
        num_sessions + num_kept
    }

    /// For the start-up lines.
    pub fn summary(&self, config: &ClusterConfig) -> String {
        let registry = match &config.registry {
            Some(url) => format!(", registry {url}"),
            None => String::new(),
        };
        let tls = match config.tls {
            Some(_) => ", mutual TLS",
            None => "",
        };
        match &self.node {
            Node::Unified { .. } => format!("a proxy may pair this node with others{tls}"),
            Node::Prefill { .. } => format!("prefill node{registry}{tls}"),
            Node::Decode { .. } => format!("decode node{registry}{tls}"),
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let (Node::Unified { socket } | Node::Prefill { socket, .. }) = &self.node else {
            return;
        };
        if let Some(socket) = socket {
            // Another process may have removed it.
            let _ = std::fs::remove_file(socket);
        }
    }
}

/// Where other nodes find this one's KV rows.
struct KvPlace {
    host: String,
    port: u16,
    socket: Option<PathBuf>,
}

impl KvPlace {
    /// Empty when there is none.
    fn socket_name(&self) -> String {
        let socket = self.socket.as_ref();
        socket.map_or_else(String::new, |path| path.display().to_string())
    }

    fn keep_config(&self, config: &ClusterConfig, llm: &Llm, hello: &Hello) -> KeepConfig {
        let lease_us = llm.engine.limits().hold_lease_us;
        KeepConfig {
            incarnation: hello.incarnation.0,
            model_fingerprint: hello.model_fingerprint,
            host: self.host.clone(),
            port: match config.uses_network {
                true => self.port,
                false => 0,
            },
            near: self.socket.is_some().then(|| NearSource {
                socket: self.socket_name(),
                machine: host_name(),
            }),
            lease: Duration::from_micros(lease_us),
        }
    }
}

/// Sends KV rows from where the listener was bound.
fn start_sender(
    config: &ClusterConfig,
    listener: ClusterListener,
    llm: &Llm,
    hello: &Hello,
    place: &KvPlace,
    threads: &TransferThreads,
) -> Result<Arc<KvSender>, Error> {
    let pages = llm.engine.kv_pages().clone();
    let mut sender_config = SenderConfig::new(hello.incarnation.0, hello.model_fingerprint);
    sender_config.max_bandwidth = config.max_bandwidth;
    sender_config.tls.clone_from(&listener.tls);
    let sender = KvSender::start(sender_config, pages, threads);
    let address = PeerAddress::Tcp(listener.address);
    // The sender binds the port itself.
    drop(listener);
    let cannot_listen = |error| Error::Io(format!("cannot listen on {address} for KV rows"), error);
    sender.listen(address.clone()).map_err(cannot_listen)?;
    if let Some(path) = &place.socket {
        let listening = sender.listen(PeerAddress::Unix(path.clone()));
        listening
            .map_err(|error| Error::Io(format!("cannot listen on {}", path.display()), error))?;
    }
    Ok(Arc::new(sender))
}

fn hello(llm: &Llm, instance: &str, incarnation: Incarnation) -> Hello {
    let geometry = llm.engine.kv_pages().geometry();
    Hello {
        instance: instance.into(),
        incarnation,
        protocol_major: PROTOCOL.0,
        protocol_minor: PROTOCOL.1,
        model_fingerprint: llm.identity.model.0,
        tokenizer_digest: llm.identity.tokenizer_digest,
        kv_shape: KvShape {
            num_layers: geometry.num_layers,
            num_kv_heads: geometry.num_kv_heads,
            head_dim: geometry.head_dim,
            num_ranks: 1,
        },
        kv_format: llm.hardware.kv_format_name().into(),
        page_size: geometry.page_size,
        element_order: format!("{:?}", geometry.order).to_lowercase().into(),
        weight_format: llm.hardware.weight_format_name().into(),
        instruction_set: llm.hardware.executor.isa.as_str().into(),
    }
}

fn session_config(llm: &Llm) -> SessionConfig {
    SessionConfig {
        hold_lease_us: llm.engine.limits().hold_lease_us,
        ..SessionConfig::new(row_bytes(llm))
    }
}

/// K and V of one token in all layers.
fn row_bytes(llm: &Llm) -> u64 {
    let geometry = llm.engine.kv_pages().geometry();
    (geometry.page_bytes() / geometry.page_size as usize) as u64
}

/// The host part of an address, with brackets around an IPv6 address.
fn host_of(address: SocketAddr) -> String {
    match address {
        SocketAddr::V4(address) => address.ip().to_string(),
        SocketAddr::V6(address) => format!("[{}]", address.ip()),
    }
}

fn socket_path(hello: &Hello) -> PathBuf {
    let name = format!(
        "corella-kv-{}-{:x}.sock",
        std::process::id(),
        hello.incarnation.0
    );
    std::env::temp_dir().join(name)
}

/// A name that all processes with the same kernel and PID namespace share, and no others.
fn host_name() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let namespace = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    format!("{} {}", boot.trim(), namespace.display())
}

/// A later start has a larger number, wherever the clock is not set back.
fn microseconds_since_1970() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(1, |since| since.as_micros() as u64)
}
