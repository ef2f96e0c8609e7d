//! A cluster node in the form that the server and its options use.

mod kv_connector;
mod status;

use std::sync::Arc;
use std::time::Duration;

use corella_cluster::kv_connector::Site;
use corella_cluster::node::{
    ClusterNode, ModelFacts, NodeConfig, NodeError, NodePort, RoleConflict, ServedModel,
};
use corella_cluster::{ClusterTls, Role};
use corella_engine::OutputMeter;
use corella_server::{
    BlockSite, ClusterStatus, GrammarMaker, KvTransfer, RoleChange, RoleControl, RoleError,
    RoleStatus,
};

use status::cluster_status;

use crate::process::open_files;
use crate::{Error, Llm};

/// Starts this node's role on the caller's runtime. `port` may be `None` only for a role that needs none.
pub fn start(
    mut config: NodeConfig,
    tls: Option<ClusterTls>,
    port: Option<NodePort>,
    llm: &Llm,
    meter: Arc<dyn OutputMeter>,
    drain_timeout: Duration,
) -> Result<Cluster, Error> {
    // Connections of nodes must leave descriptors for clients of the API.
    config.max_connections = open_files::share(4).clamp(16, config.max_connections);
    let node = ClusterNode::start(config, tls, port, served_model(llm), meter, drain_timeout);
    Ok(Cluster(node?))
}

fn served_model(llm: &Llm) -> ServedModel {
    let constraints = GrammarMaker::new(llm.tokenizer.clone(), llm.config.spec.vocab_size);
    let [weight_format, kv_format, instruction_set] = llm.hardware.arithmetic_names();
    let facts = ModelFacts {
        model_fingerprint: llm.identity.model.0,
        tokenizer_digest: llm.identity.tokenizer_digest,
        kv_format: kv_format.into(),
        weight_format: weight_format.into(),
        instruction_set: instruction_set.into(),
    };
    ServedModel::new(llm.engine.clone(), Arc::new(constraints), facts)
}

/// A node in the server's form.
#[derive(Clone)]
pub struct Cluster(pub ClusterNode);

impl Cluster {
    /// Returns the reader of `kv_transfer_params`, if this node listens for others.
    pub fn kv_transfer(&self) -> Option<Arc<dyn KvTransfer>> {
        self.0.config().listens.then(|| Arc::new(self.clone()) as _)
    }

    /// Returns the text for the start-up lines; `None` for a node that serves alone.
    pub fn summary(&self) -> Option<String> {
        let config = self.0.config();
        let registry = config
            .registry
            .as_ref()
            .map_or_else(String::new, |url| format!(", registry {url}"));
        let tls = match config.tls {
            Some(_) => ", mutual TLS",
            None => "",
        };
        let via: String = config
            .row_paths
            .iter()
            .map(|kind| format!(", KV rows by {}", kind.name))
            .collect();
        match config.role {
            Role::Unified if !config.listens => None,
            Role::Unified => Some(format!("a proxy may pair this node with others{tls}{via}")),
            role => Some(format!("{} node{registry}{tls}{via}", role.name())),
        }
    }
}

impl RoleControl for Cluster {
    fn status(&self) -> RoleStatus {
        let (role, changing_to) = self.0.roles();
        RoleStatus {
            role: role.name(),
            changing_to: changing_to.map(Role::name),
            cached_blocks: self.0.running_role().kv_site().map(block_site),
        }
    }

    fn cluster(&self) -> Option<ClusterStatus> {
        cluster_status(&self.0.running_role(), self.status())
    }

    fn obstacle(&self) -> Option<&'static str> {
        self.0.running_role().obstacle()
    }

    fn change(&self, role: &str) -> RoleChange {
        let change = Role::from_name(role).map(|role| self.0.change(role));
        Box::pin(async move {
            let changed = change.ok_or(RoleError::Unknown)?.await;
            changed.map_err(|RoleConflict(why)| RoleError::Conflict(why))
        })
    }
}

fn block_site(site: &Site) -> BlockSite {
    let near = site.near.as_ref();
    BlockSite {
        host: site.host.clone(),
        port: site.port,
        socket: near.map(|near| near.socket.clone()),
        machine: near.map(|near| near.machine.clone()),
    }
}

impl From<NodeError> for Error {
    fn from(error: NodeError) -> Self {
        match error {
            NodeError::Config(reason) => Self::Config(reason),
            NodeError::Io(what, error) => Self::Io(what, error),
        }
    }
}
