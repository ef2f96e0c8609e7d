//! A role that runs, from its start to its end.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use corella_core::PlacementConfig;
use corella_core::session::{Hello, SessionConfig};
use corella_engine::Generate;
use tokio::net::TcpListener;
use tokio::sync::oneshot;

use super::Node;
use super::error::{NodeError, nixl_error};
use super::host_name::host_name;
use super::kv_outlet::KvOutlet;
use super::listener::NodePort;
use crate::entrance::{AllowedPeers, Entrance, Network, Puller};
use crate::registry::{NodeRecord, Registry, RegistryConfig, Role};
use crate::session::{DecodeNode, NodeListener, PrefillNode, RegistryPeers, serve_sessions};
use crate::transport::{KvReceiver, NixlAgent, ReceiverConfig, TransferThreads};

/// Time for a registry to take this node off its list when it leaves.
const DEREGISTER_TIMEOUT: Duration = Duration::from_secs(2);

pub enum RunningRole {
    Unified(UnifiedRole),
    Prefill(PrefillRole),
    Decode(DecodeRole),
}

/// The engine alone, unless a proxy pairs it with other nodes.
#[derive(Default)]
pub struct UnifiedRole {
    paired: Option<(Entrance, KvOutlet)>,
}

pub struct PrefillRole {
    pub node: PrefillNode,
    pub registry: Registry,
    entrance: Entrance,
    outlet: KvOutlet,
}

pub struct DecodeRole {
    pub node: Arc<DecodeNode>,
    pub registry: Option<Registry>,
    /// Loads KV rows for the node.
    pub receiver: Arc<KvReceiver>,
    entrance: Entrance,
    /// Dropping it ends the server of sessions when the last of them has ended.
    stop: Mutex<Option<oneshot::Sender<()>>>,
    _threads: TransferThreads,
}

impl RunningRole {
    /// A unified node that no other node reaches.
    pub fn alone() -> Self {
        Self::Unified(UnifiedRole::default())
    }

    /// Serves the requests that proxies pair.
    pub fn entrance(&self) -> Option<&Entrance> {
        match self {
            Self::Unified(role) => role.paired.as_ref().map(|(entrance, _)| entrance),
            Self::Prefill(role) => Some(&role.entrance),
            Self::Decode(role) => Some(&role.entrance),
        }
    }

    fn outlet(&self) -> Option<&KvOutlet> {
        match self {
            Self::Unified(role) => role.paired.as_ref().map(|(_, outlet)| outlet),
            Self::Prefill(role) => Some(&role.outlet),
            Self::Decode(_) => None,
        }
    }

    pub fn role(&self) -> Role {
        match self {
            Self::Unified(_) => Role::Unified,
            Self::Prefill(_) => Role::Prefill,
            Self::Decode(_) => Role::Decode,
        }
    }

    /// Whom a server submits to, if not to its engine.
    pub fn generator(&self) -> Option<Arc<dyn Generate>> {
        match self {
            Self::Prefill(role) => Some(Arc::new(role.node.clone())),
            Self::Unified(_) | Self::Decode(_) => None,
        }
    }

    /// Sessions, and pages that are held for other nodes.
    pub fn num_obligations(&self) -> usize {
        let num_kept = self.outlet().map_or(0, |outlet| outlet.kept.num_kept());
        let num_obligations = match self {
            Self::Unified(_) => 0,
            Self::Prefill(role) => role.node.num_obligations(),
            Self::Decode(role) => role.node.num_sessions(),
        };
        num_obligations + num_kept
    }

    /// Nothing new comes from other nodes from now on.
    pub async fn stop_taking(&self) {
        let registry = match self {
            Self::Unified(_) => None,
            Self::Prefill(role) => Some(&role.registry),
            Self::Decode(role) => {
                role.node.set_draining(true);
                role.registry.as_ref()
            }
        };
        if let Some(registry) = registry
            && registry.is_published()
            && let Err(error) = registry.deregister(DEREGISTER_TIMEOUT).await
        {
            tracing::warn!("{error}");
        }
    }

    /// Leaves the port to another role. Open connections stay.
    pub fn stop_listening(&self) {
        if let Some(outlet) = self.outlet() {
            outlet.sender.stop_listening();
        }
        if let Self::Decode(role) = self {
            let stop = role.stop.lock();
            drop(stop.unwrap_or_else(PoisonError::into_inner).take());
        }
    }
}

impl Node {
    pub fn start_unified(&self, listener: NodePort) -> Result<UnifiedRole, NodeError> {
        let (_, hello) = self.identity(Role::Unified, &listener);
        let nixl = self.start_nixl(&hello)?;
        let outlet = self.start_outlet(listener, &hello, nixl.as_ref())?;
        let following = outlet.kept.follow();
        following.map_err(|error| NodeError::Io("starting a thread".to_owned(), error))?;
        let entrance = Entrance {
            kept: Some(outlet.kept.clone()),
            puller: Some(self.puller(&hello, self.receiver(&hello, nixl))),
            local: Arc::new(self.model.engine.clone()),
        };
        Ok(UnifiedRole {
            paired: Some((entrance, outlet)),
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
        let nixl = self.start_nixl(&hello)?;
        let outlet = self.start_outlet(listener, &hello, nixl.as_ref())?;
        let registry = Registry::start(url, None, RegistryConfig::new(Role::Decode));
        let registry = registry.map_err(|error| NodeError::Config(error.to_string()))?;
        let placement = PlacementConfig {
            policy: config.policy,
            disaggregate_min_tokens: config.min_tokens,
            ..PlacementConfig::default()
        };
        let peers = RegistryPeers::start(
            registry.peers().clone(),
            placement,
            hello.clone(),
            outlet.address.clone(),
            self.model.row_bytes(),
            self.tls.clone(),
        );
        let puller = self.puller(&hello, self.receiver(&hello, nixl));
        let session = SessionConfig {
            allocate_budget_us: config.search_timeout.as_micros() as u64,
            starts_locally: config.falls_back,
            resumes_locally: config.falls_back,
            ..self.model.session_config(config)
        };
        let node = PrefillNode::start(
            session,
            hello,
            self.model.engine.clone(),
            outlet.sender.clone(),
            outlet.address.clone(),
            peers,
            Some(outlet.kept.clone()),
        );
        let node = node.map_err(|error| NodeError::Config(error.to_string()))?;
        let entrance = Entrance {
            kept: Some(outlet.kept.clone()),
            puller: Some(puller),
            local: Arc::new(node.clone()),
        };
        Ok(PrefillRole {
            node,
            registry,
            entrance,
            outlet,
        })
    }

    pub fn start_decode(&self, listener: NodePort) -> Result<DecodeRole, NodeError> {
        let config = &self.config;
        let (reachable, hello) = self.identity(Role::Decode, &listener);
        let nixl = self.start_nixl(&hello)?;
        let receiver = self.receiver(&hello, nixl);
        let entrance = Entrance {
            kept: None,
            puller: Some(self.puller(&hello, receiver.clone())),
            local: Arc::new(self.model.engine.clone()),
        };
        let listener = TcpListener::from_std(listener.listener)
            .map_err(|error| NodeError::Io("listening for sessions".to_owned(), error))?;
        let registry = match &config.registry {
            Some(url) => {
                let mut own = NodeRecord::at(&hello.instance, &reachable);
                own.incarnation = Some(hello.incarnation.0);
                own.role = Some(Role::Decode);
                let registry = Registry::start(url, Some(own), RegistryConfig::new(Role::Prefill));
                Some(registry.map_err(|error| NodeError::Config(error.to_string()))?)
            }
            None => None,
        };
        let host = config.uses_host.then(host_name);
        let session = self.model.session_config(config);
        let engine = self.model.engine.clone();
        let constraints = Some(self.model.constraints.clone());
        let meter = Some(self.meter.clone());
        let node = DecodeNode::start(
            session,
            hello,
            engine,
            receiver.clone(),
            constraints,
            host,
            meter,
        );
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
            receiver,
            entrance,
            stop: Mutex::new(Some(stop)),
            _threads: self.threads.clone(),
        })
    }

    /// For this life of the node.
    fn start_nixl(&self, hello: &Hello) -> Result<Option<Arc<NixlAgent>>, NodeError> {
        let start = |library| NixlAgent::start(library, hello.incarnation.0);
        let agent = self.nixl.as_ref().map(start).transpose();
        agent.map_err(nixl_error)
    }

    fn receiver(&self, hello: &Hello, nixl: Option<Arc<NixlAgent>>) -> Arc<KvReceiver> {
        let pages = self.model.engine.kv_pages().clone();
        let mut config = ReceiverConfig::new(hello.incarnation.0, hello.model_fingerprint);
        config.tls.clone_from(&self.tls);
        config.paths.extend(nixl.map(|agent| agent as _));
        Arc::new(KvReceiver::new(config, pages, &self.threads))
    }

    /// Nodes of the networks that were named, and of this machine.
    fn allowed_peers(&self) -> AllowedPeers {
        let own = Some(self.config.listen.ip()).filter(|address| !address.is_unspecified());
        let named = self.config.kv_peer_allow.iter().copied();
        AllowedPeers::new(named.chain(own.map(Network::of)))
    }

    fn puller(&self, hello: &Hello, receiver: Arc<KvReceiver>) -> Arc<Puller> {
        Puller::new(
            self.model.engine.clone(),
            receiver,
            self.config.uses_host.then(host_name),
            self.allowed_peers(),
            hello.model_fingerprint,
            self.model.session_config(&self.config),
        )
    }

    /// The address at which others reach this node, and its greeting to them.
    fn identity(&self, role: Role, listener: &NodePort) -> (String, Hello) {
        let reachable = format!("{}:{}", self.config.host(), listener.address.port());
        let instance = { self.config.node_id.clone() }
            .unwrap_or_else(|| format!("{}-{reachable}", role.name()));
        (reachable, self.model.hello(&instance))
    }
}
