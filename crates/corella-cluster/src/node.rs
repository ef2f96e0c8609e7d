//! A node of a cluster: its role, and how the role changes while the node serves.
//!
//! The server submits to a [`ClusterNode`]. When the role changes, the old role takes no new work, finishes its
//! obligations and leaves the port to the next role. The engine serves throughout. Each start of a role is a new
//! incarnation to other nodes.

mod config;
mod error;
mod host_name;
mod kv_outlet;
mod listener;
mod metrics;
mod role;
mod served_model;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use corella_engine::{Generate, OutputMeter, Submission, SubmitError, TokenStream};
use prometheus_client::collector::Collector;
use tokio::runtime::Handle;

pub use config::NodeConfig;
pub use error::NodeError;
pub use listener::NodePort;
pub use metrics::standing_name;
pub use role::{DecodeRole, PrefillRole, RunningRole};
pub use served_model::{ModelFacts, ServedModel};

use metrics::NodeMetrics;

use crate::registry::Role;
use crate::tls::ClusterTls;
use crate::transport::TransferThreads;

/// Time between two checks whether a drain has sessions left.
const DRAIN_POLL: Duration = Duration::from_millis(20);

/// Time between two checks whether an earlier role has obligations left.
const RETIRED_POLL: Duration = Duration::from_secs(1);

/// A role beside a server's engine. The server submits requests to this node in every role.
#[derive(Clone)]
pub struct ClusterNode(Arc<Node>);

struct Node {
    config: NodeConfig,
    model: ServedModel,
    tls: Option<ClusterTls>,
    /// Counts the outputs of other nodes' requests on a decode node.
    meter: Arc<dyn OutputMeter>,
    threads: TransferThreads,
    runtime: Handle,
    /// The limit of the time in which a role finishes its obligations before the next role begins.
    drain_timeout: Duration,
    state: Mutex<State>,
}

struct State {
    /// Bound when the first role needs it. Later roles keep it, so that the port number stays the same.
    listener: Option<NodePort>,
    role: Arc<RunningRole>,
    changing_to: Option<Role>,
    /// Earlier roles that still finish sessions.
    retired: Vec<Arc<RunningRole>>,
    /// Takes new requests.
    generator: Arc<dyn Generate>,
    is_leaving: bool,
}

/// Why a node cannot take on a role now, in a sentence.
#[derive(Debug)]
pub struct RoleConflict(pub String);

impl ClusterNode {
    /// Starts this node's role on the caller's runtime. `listener` may be absent only for a role that needs none.
    pub fn start(
        config: NodeConfig,
        tls: Option<ClusterTls>,
        listener: Option<NodePort>,
        model: ServedModel,
        meter: Arc<dyn OutputMeter>,
        drain_timeout: Duration,
    ) -> Result<Self, NodeError> {
        let threads = TransferThreads::start(config.num_threads)
            .map_err(|error| NodeError::Io("starting the transfer threads".to_owned(), error))?;
        if let Some(tls) = &tls {
            tokio::spawn(tls.clone().follow_files());
        }
        let generator = Arc::new(model.engine.clone());
        let cluster = Self(Arc::new(Node {
            model,
            tls,
            meter,
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

    /// Returns the collector of this node's part of the server's metrics.
    pub fn collector(&self) -> Box<dyn Collector> {
        Box::new(NodeMetrics(self.clone()))
    }

    pub fn config(&self) -> &NodeConfig {
        &self.0.config
    }

    pub fn running_role(&self) -> Arc<RunningRole> {
        self.0.lock().role.clone()
    }

    /// Returns the present role, and the next role during a change.
    pub fn roles(&self) -> (Role, Option<Role>) {
        let state = self.0.lock();
        (state.role.role(), state.changing_to)
    }

    /// Tells the other nodes that the server drains, so that they send no new requests.
    pub fn leave(&self) {
        let mut state = self.0.lock();
        state.is_leaving = true;
        state.role.stop_taking();
    }

    /// Waits until the sessions of other nodes have ended and no prompt is kept for them, but no longer than the drain
    /// timeout. After that, no registry lists this node.
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
        self.running_role().deregister().await;
    }

    /// Begins the change at once. The future ends when the role has changed. Dropping the future does not stop the
    /// change.
    pub fn change(
        &self,
        to: Role,
    ) -> impl Future<Output = Result<(), RoleConflict>> + Send + use<> {
        let node = self.0.clone();
        let begun = node.begin_change(to);
        async move {
            if !begun? {
                return Ok(());
            }
            // A separate task continues the change when the caller leaves.
            let runtime = node.runtime.clone();
            let change = runtime.spawn(async move { node.change(to).await });
            change
                .await
                .unwrap_or_else(|error| Err(RoleConflict(error.to_string())))
        }
    }
}

impl fmt::Debug for ClusterNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClusterNode")
    }
}

impl Generate for ClusterNode {
    fn submit(&self, submission: Submission) -> Result<Vec<TokenStream>, SubmitError> {
        let generator = self.0.lock().generator.clone();
        generator.submit(submission)
    }
}

impl Node {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether `to` differs from the role. If so, refuses other changes until this one has ended.
    fn begin_change(&self, to: Role) -> Result<bool, RoleConflict> {
        let mut state = self.lock();
        if let Some(other) = state.changing_to {
            return Err(RoleConflict(format!(
                "The role is being changed to {} already; ask again when GET /role says that it is \
                 done.",
                other.name()
            )));
        }
        if state.is_leaving {
            let message = "The server is shutting down; its role cannot be changed.";
            return Err(RoleConflict(message.to_owned()));
        }
        if to == Role::Prefill && self.config.registry.is_none() {
            return Err(RoleConflict(
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

    /// Drains the present role and begins the next one. The engine serves requests throughout.
    async fn change(self: &Arc<Self>, to: Role) -> Result<(), RoleConflict> {
        let _changing = Changing(self);
        let old = {
            let mut state = self.lock();
            state.generator = Arc::new(self.model.engine.clone());
            state.role.clone()
        };
        let from = old.role();
        tracing::info!("changing the role from {} to {}", from.name(), to.name());
        old.stop_taking();
        let is_leaving = || self.lock().is_leaving;
        let num_left =
            wait_for_none(|| old.num_obligations(), self.drain_timeout, is_leaving).await;
        if is_leaving() {
            let message = "The server is shutting down; its role cannot be changed.";
            return Err(RoleConflict(message.to_owned()));
        }
        if num_left > 0 {
            tracing::info!(
                num_sessions = num_left,
                "sessions of the previous role are finishing"
            );
        }
        old.deregister().await;
        old.stop_listening();
        self.retire();
        drop(old);
        let started = self.start_role(to);
        let role = started.map_err(|error| {
            tracing::warn!("the role stays unified: {error}");
            RoleConflict(format!(
                "The role is unified now, because {} could not be started: {error}.",
                to.name()
            ))
        })?;
        self.install(role);
        tracing::info!("the role is {}", to.name());
        Ok(())
    }

    /// Retires the present role: it finishes its obligations and is dropped.
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

    fn start_role(&self, role: Role) -> Result<RunningRole, NodeError> {
        if role == Role::Unified && !self.config.listens {
            return Ok(RunningRole::alone());
        }
        let listener = {
            let mut state = self.lock();
            let bound = match state.listener.take() {
                Some(bound) => bound,
                None => NodePort::bind(&self.config)?,
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

/// Allows another change of role when dropped.
struct Changing<'a>(&'a Node);

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        self.0.lock().changing_to = None;
    }
}

/// Waits until the count is zero, for up to `limit` or until the wait is given up. Returns the remaining count.
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
