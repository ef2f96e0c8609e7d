//! A server as one of several nodes: which role it has, and how that changes while it serves.

mod entrance;
mod kv_outlet;
mod listener;
mod metrics;
mod role;
mod served_model;
mod status;

use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use corella_cluster::entrance::Network;
use corella_cluster::transport::{NixlLibrary, TransferThreads};
use corella_cluster::{ClusterTls, RegistryUrl, Role, TlsFiles};
use corella_core::PeerPolicy;
use corella_engine::{Generate, Submission, SubmitError, TokenStream, Tracer};
use corella_server::{
    ClusterStatus, KvTransfer, RoleChange, RoleControl, RoleError, RoleStatus, ServerState,
};
use prometheus_client::collector::Collector;
use tokio::runtime::Handle;

pub use listener::ClusterListener;

use metrics::ClusterMetrics;
use role::RunningRole;
use served_model::ServedModel;
use status::cluster_status;

use crate::{Error, Llm};

/// How often it is looked whether the last session has ended.
const DRAIN_POLL: Duration = Duration::from_millis(20);

/// How often it is looked whether an earlier role has ended what it had.
const RETIRED_POLL: Duration = Duration::from_secs(1);

/// What the options say of the other nodes.
#[derive(Clone, Debug)]
pub struct ClusterConfig {
    /// At the start.
    pub role: Role,
    /// Whether the node listens for others whatever its role is, so that proxies may pair it.
    pub listens: bool,
    pub registry: Option<RegistryUrl>,
    pub listen: SocketAddr,
    /// Networks that requests may name for their KV rows, besides this machine.
    pub kv_peer_allow: Vec<Network>,
    /// Connections that one address may have to `listen`.
    pub max_connections_per_address: usize,
    /// The host that others are told, if it is not that of `listen`.
    pub advertise: Option<String>,
    pub tls: Option<TlsFiles>,
    /// Where the spans of other nodes' requests go, if anywhere.
    pub tracer: Option<Tracer>,
    pub node_id: Option<String>,
    pub policy: PeerPolicy,
    pub min_tokens: u32,
    /// Whether a prefill node decodes what no decode node takes.
    pub falls_back: bool,
    /// How long it looks for a decode node that takes a request.
    pub search_timeout: Duration,
    /// How long the KV rows of a prompt may take once they are all computed, besides the time that their bytes need.
    pub load_time: Duration,
    pub uses_network: bool,
    pub uses_host: bool,
    pub uses_nixl: bool,
    pub max_bandwidth: Option<u64>,
    pub num_threads: usize,
}

/// What runs beside a server's engine. The server submits to it, whatever its role is by then.
#[derive(Clone)]
pub struct Cluster(Arc<Node>);

struct Node {
    config: ClusterConfig,
    model: ServedModel,
    tls: Option<ClusterTls>,
    nixl: Option<NixlLibrary>,
    threads: TransferThreads,
    runtime: Handle,
    /// How long a role may take to finish what it owes before another one begins.
    drain_timeout: Duration,
    state: Mutex<State>,
}

struct State {
    /// Bound when the first role needs it, and kept, so that the port stays the same.
    listener: Option<ClusterListener>,
    role: Arc<RunningRole>,
    changing_to: Option<Role>,
    /// Earlier roles that still see sessions to their end.
    retired: Vec<Arc<RunningRole>>,
    /// Whom new requests go to.
    generator: Arc<dyn Generate>,
    is_leaving: bool,
}

impl Cluster {
    /// Starts this node's role on the caller's runtime. `listener` is there unless the role needs none.
    pub fn start(
        config: ClusterConfig,
        tls: Option<ClusterTls>,
        nixl: Option<NixlLibrary>,
        listener: Option<ClusterListener>,
        llm: &Llm,
        drain_timeout: Duration,
    ) -> Result<Self, Error> {
        let threads = TransferThreads::start(config.num_threads)
            .map_err(|error| Error::Io("starting the transfer threads".to_owned(), error))?;
        if let Some(tls) = &tls {
            tokio::spawn(tls.clone().follow_files());
        }
        let model = ServedModel::of(llm);
        let generator = Arc::new(model.engine.clone());
        let cluster = Self(Arc::new(Node {
            model,
            tls,
            nixl,
            threads,
            runtime: Handle::current(),
            drain_timeout,
            state: Mutex::new(State {
                listener,
                role: Arc::new(RunningRole::alone()),
                changing_to: None,
                retired: Vec::new(),
                generator,
                is_leaving: false,
            }),
            config,
        }));
        let node = &cluster.0;
        let role = node.start_role(node.config.role)?;
        node.install(role);
        Ok(cluster)
    }

    /// Reads `kv_transfer_params`, if this node listens for others.
    pub fn kv_transfer(&self) -> Option<Arc<dyn KvTransfer>> {
        { self.0.config.listens }.then(|| Arc::new(self.clone()) as _)
    }

    /// What it adds to the server's metrics.
    pub fn collector(&self) -> Box<dyn Collector> {
        Box::new(ClusterMetrics(self.clone()))
    }

    /// Tells the other nodes as soon as the server drains, so that nothing new comes from them.
    pub async fn leave_when_draining(&self, state: &ServerState) {
        state.draining().await;
        let role = {
            let mut state = self.0.lock();
            state.is_leaving = true;
            state.role.clone()
        };
        role.stop_taking().await;
    }

    /// Waits until the sessions of other nodes have ended and nothing is kept for any, but no longer than
    /// the drain timeout.
    pub async fn finish(&self) {
        let num_obligations = || {
            let state = self.0.lock();
            let roles = state.retired.iter().chain([&state.role]);
            roles.map(|role| role.num_obligations()).sum()
        };
        let num_left = wait_for_none(num_obligations, self.0.drain_timeout, || false).await;
        if num_left > 0 {
            tracing::warn!(
                num_sessions = num_left,
                "cut off while running for other nodes"
            );
        }
    }

    /// For the start-up lines; a node that serves alone has none.
    pub fn summary(&self) -> Option<String> {
        let config = &self.0.config;
        let registry = { config.registry.as_ref() }
            .map_or_else(String::new, |url| format!(", registry {url}"));
        let tls = match config.tls {
            Some(_) => ", mutual TLS",
            None => "",
        };
        let nixl = match config.uses_nixl {
            true => ", KV rows by NIXL",
            false => "",
        };
        match config.role {
            Role::Unified if !config.listens => None,
            Role::Unified => Some(format!("a proxy may pair this node with others{tls}{nixl}")),
            role => Some(format!("{} node{registry}{tls}{nixl}", name_of(role))),
        }
    }

    fn running_role(&self) -> Arc<RunningRole> {
        self.0.lock().role.clone()
    }
}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Cluster")
    }
}

impl Generate for Cluster {
    fn submit(&self, submission: Submission) -> Result<Vec<TokenStream>, SubmitError> {
        let generator = self.0.lock().generator.clone();
        generator.submit(submission)
    }
}

impl RoleControl for Cluster {
    fn status(&self) -> RoleStatus {
        let state = self.0.lock();
        RoleStatus {
            role: name_of(state.role.role()),
            changing_to: state.changing_to.map(name_of),
        }
    }

    fn cluster(&self) -> Option<ClusterStatus> {
        cluster_status(&self.running_role(), self.status())
    }

    fn change(&self, role: &str) -> RoleChange {
        let node = self.0.clone();
        let begun = match role_of(role) {
            None => Err(RoleError::Unknown),
            Some(role) => node.begin_change(role).map(|is_new| (role, is_new)),
        };
        Box::pin(async move {
            let (role, is_new) = begun?;
            if !is_new {
                return Ok(());
            }
            // In a task of its own, so that it goes on when the caller leaves.
            let runtime = node.runtime.clone();
            let change = runtime.spawn(async move { node.change(role).await });
            change
                .await
                .unwrap_or_else(|error| Err(RoleError::Conflict(error.to_string())))
        })
    }
}

impl Node {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether there is anything to change. Until `change` has ended nobody else may.
    fn begin_change(&self, to: Role) -> Result<bool, RoleError> {
        let mut state = self.lock();
        if let Some(other) = state.changing_to {
            return Err(RoleError::Conflict(format!(
                "The role is being changed to {} already; ask again when GET /role says that it is \
                 done.",
                name_of(other)
            )));
        }
        if state.is_leaving {
            let message = "The server is shutting down; its role cannot be changed.";
            return Err(RoleError::Conflict(message.to_owned()));
        }
        if to == Role::Prefill && self.config.registry.is_none() {
            return Err(RoleError::Conflict(
                "A prefill node finds decode nodes in a registry, and this server was started \
                 without --registry."
                    .to_owned(),
            ));
        }
        if state.role.role() == to {
            return Ok(false);
        }
        state.changing_to = Some(to);
        Ok(true)
    }

    /// Drains the present role and begins the next one. Requests are served by the engine meanwhile.
    async fn change(self: &Arc<Self>, to: Role) -> Result<(), RoleError> {
        let _changing = Changing(self);
        let old = {
            let mut state = self.lock();
            state.generator = Arc::new(self.model.engine.clone());
            state.role.clone()
        };
        let from = old.role();
        tracing::info!(
            "changing the role from {} to {}",
            name_of(from),
            name_of(to)
        );
        old.stop_taking().await;
        let is_leaving = || self.lock().is_leaving;
        let num_left =
            wait_for_none(|| old.num_obligations(), self.drain_timeout, is_leaving).await;
        if is_leaving() {
            let message = "The server is shutting down; its role cannot be changed.";
            return Err(RoleError::Conflict(message.to_owned()));
        }
        if num_left > 0 {
            tracing::info!(
                num_sessions = num_left,
                "sessions of the previous role are finishing"
            );
        }
        old.stop_listening();
        self.retire();
        drop(old);
        let started = self.start_role(to);
        let role = started.map_err(|error| {
            tracing::warn!("the role stays unified: {error}");
            RoleError::Conflict(format!(
                "The role is unified now, because {} could not be started: {error}.",
                name_of(to)
            ))
        })?;
        self.install(role);
        tracing::info!("the role is {}", name_of(to));
        Ok(())
    }

    /// The present role becomes one that only ends what it has, and is dropped then.
    fn retire(self: &Arc<Self>) {
        let mut state = self.lock();
        let old = std::mem::replace(&mut state.role, Arc::new(RunningRole::alone()));
        if old.num_obligations() == 0 {
            return;
        }
        state.retired.push(old);
        let node = self.clone();
        self.runtime.spawn(async move {
            loop {
                tokio::time::sleep(RETIRED_POLL).await;
                let mut state = node.lock();
                state.retired.retain(|role| role.num_obligations() > 0);
                if state.retired.is_empty() {
                    return;
                }
            }
        });
    }

    fn install(&self, role: RunningRole) {
        let mut state = self.lock();
        if let Some(generator) = role.generator() {
            state.generator = generator;
        }
        state.role = Arc::new(role);
    }

    fn start_role(&self, role: Role) -> Result<RunningRole, Error> {
        if role == Role::Unified && !self.config.listens {
            return Ok(RunningRole::alone());
        }
        let listener = {
            let mut state = self.lock();
            let bound = match state.listener.take() {
                Some(bound) => bound,
                None => ClusterListener::bind(&self.config)?,
            };
            state.listener.insert(bound).try_clone()?
        };
        let _guard = self.runtime.enter();
        match role {
            Role::Prefill => self.start_prefill(listener).map(RunningRole::Prefill),
            Role::Decode => self.start_decode(listener).map(RunningRole::Decode),
            Role::Unified => self.start_unified(listener).map(RunningRole::Unified),
        }
    }
}

/// Others may change the role again when it is dropped.
struct Changing<'a>(&'a Node);

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        self.0.lock().changing_to = None;
    }
}

/// Waits until there are none, for as long as `limit` or until it is given up; how many are left.
async fn wait_for_none(
    count: impl Fn() -> usize,
    limit: Duration,
    is_given_up: impl Fn() -> bool,
) -> usize {
    let ended = async {
        while count() > 0 && !is_given_up() {
            tokio::time::sleep(DRAIN_POLL).await;
        }
    };
    let _ = tokio::time::timeout(limit, ended).await;
    count()
}

fn name_of(role: Role) -> &'static str {
    match role {
        Role::Unified => "unified",
        Role::Prefill => "prefill",
        Role::Decode => "decode",
    }
}

fn role_of(name: &str) -> Option<Role> {
    let roles = [Role::Unified, Role::Prefill, Role::Decode];
    roles.into_iter().find(|&role| name_of(role) == name)
}

/// A name that all processes share which can read each other's memory and find each other's sockets:
/// those with the same kernel, PID namespace and network namespace, and no others.
fn host_name() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let namespace = |kind| std::fs::read_link(format!("/proc/self/ns/{kind}")).unwrap_or_default();
    let (pids, network) = (namespace("pid"), namespace("net"));
    format!("{} {} {}", boot.trim(), pids.display(), network.display())
}
