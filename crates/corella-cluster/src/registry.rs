//! Publishes this node in a registry, and reads the other nodes from it.
//!
//! Nodes need a registry to find each other, not to work together. While it fails, all nodes stay
//! known, and probes and sessions show their health.

mod addresses;
mod backoff;
mod etcd;
mod folder;
mod http;
mod kubernetes;
mod node_record;
mod peers;
mod source;
mod url;

use std::sync::Arc;
use std::time::{Duration, Instant};

use corella_engine::RareLine;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use addresses::{Dns, FixedAddresses};
use backoff::Backoff;
use etcd::Etcd;
use folder::{Folder, FolderTiming};
use kubernetes::Kubernetes;
use source::{Exchange, Source};

pub(crate) use http::HttpClient;
pub use node_record::{NodeRecord, Role};
pub use peers::{NodeList, PeerBook, Peers};
pub(crate) use url::host_and_port;
pub use url::{RegistryUrl, RegistryUrlError};

/// A registry that was followed for longer than this counts as working. Its next failure is a new outage, whose retries
/// begin with the shortest pause.
const STEADY: Duration = Duration::from_secs(15);

#[derive(Clone, Debug)]
pub struct RegistryConfig {
    /// The role of the peers that this node needs.
    pub peer_role: Role,
    /// The group of this node and of its peers.
    pub group: String,
    /// The time for which a node stays listed after the last renewal of its entry.
    pub lease_ttl: Duration,
    /// Time between two reads of a folder.
    pub file_interval: Duration,
    /// Time between two look-ups of a name.
    pub dns_interval: Duration,
    /// Time between two lists of a registry that also reports changes.
    pub list_interval: Duration,
    /// The shortest pause between tries while the registry fails. `max_retry` is the longest.
    pub min_retry: Duration,
    pub max_retry: Duration,
}

impl RegistryConfig {
    pub fn new(peer_role: Role) -> Self {
        Self {
            peer_role,
            group: String::new(),
            lease_ttl: Duration::from_secs(10),
            file_interval: Duration::from_millis(500),
            dns_interval: Duration::from_secs(5),
            list_interval: Duration::from_secs(10),
            min_retry: Duration::from_millis(250),
            max_retry: Duration::from_secs(5),
        }
    }
}

/// Why a registry failed, for an operator.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct RegistryError(String);

/// This node's part in a registry. If the part is dropped without [`deregister`](Self::deregister), the other nodes
/// must notice the loss themselves, as if this node had been killed.
pub struct Registry {
    url: RegistryUrl,
    own: watch::Sender<Option<NodeRecord>>,
    published: watch::Receiver<bool>,
    driver: JoinHandle<()>,
}

impl Registry {
    /// Begins to follow the registry for `nodes`, and to publish `own` if present. An unreachable
    /// registry is retried forever. Must be called within a runtime.
    pub fn start(
        url: &RegistryUrl,
        own: Option<NodeRecord>,
        config: RegistryConfig,
        nodes: Arc<dyn NodeList>,
    ) -> Result<Self, RegistryError> {
        if let Some(own) = &own {
            own.check().map_err(RegistryError)?;
        }
        let source = source_of(url, &config);
        let (own, own_receiver) = watch::channel(own);
        let (published_sender, published) = watch::channel(false);
        let role = (config.peer_role, config.group.clone());
        let exchange = Exchange::new(own_receiver, published_sender, Arc::clone(&nodes), role);
        let driver = Driver {
            url: url.clone(),
            source,
            exchange,
            nodes,
            backoff: Backoff::new(config.min_retry, config.max_retry),
        };
        Ok(Self {
            url: url.clone(),
            own,
            published,
            driver: tokio::spawn(driver.drive()),
        })
    }

    /// Returns whether the other nodes can find this node. Stays false with fixed addresses, DNS and Kubernetes, which
    /// list the node without its help.
    pub fn is_published(&self) -> bool {
        *self.published.borrow()
    }

    /// Changes this node's record in the registry.
    pub fn publish(&self, own: NodeRecord) -> Result<(), RegistryError> {
        own.check().map_err(RegistryError)?;
        self.own.send_replace(Some(own));
        Ok(())
    }

    /// Tells the other nodes that this node takes no new sessions. A registry of addresses alone cannot tell them, and
    /// Kubernetes already knows that the pod is ending.
    pub fn drain(&self) {
        let drain = |own: &mut NodeRecord| own.is_draining = true;
        self.own.send_modify(|own| own.iter_mut().for_each(drain));
    }

    /// Removes this node from the registry and waits until it is removed. The other nodes stay known.
    pub async fn deregister(&self, timeout: Duration) -> Result<(), RegistryError> {
        self.own.send_replace(None);
        let mut published = self.published.clone();
        let is_gone = published.wait_for(|is_published| !is_published);
        match tokio::time::timeout(timeout, is_gone).await {
            Ok(Ok(_)) => Ok(()),
            _ => Err(RegistryError(format!(
                "{} still lists this node after {} s; it will notice by itself when the node is \
                 gone",
                self.url,
                timeout.as_secs_f32()
            ))),
        }
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

fn source_of(url: &RegistryUrl, config: &RegistryConfig) -> Box<dyn Source> {
    match url.clone() {
        RegistryUrl::Static(addresses) => Box::new(FixedAddresses(addresses)),
        RegistryUrl::File(path) => {
            let timing = FolderTiming {
                interval: config.file_interval,
                stale: config.lease_ttl,
            };
            Box::new(Folder::new(path, timing))
        }
        RegistryUrl::Dns { name, port } => Box::new(Dns {
            name,
            port,
            interval: config.dns_interval,
        }),
        RegistryUrl::Etcd { endpoints, prefix } => {
            Box::new(Etcd::new(endpoints, &prefix, config.lease_ttl))
        }
        RegistryUrl::Kubernetes {
            namespace,
            service,
            port_name,
            api,
        } => Box::new(Kubernetes {
            namespace,
            service,
            port_name,
            api,
            interval: config.list_interval,
        }),
    }
}

struct Driver {
    url: RegistryUrl,
    source: Box<dyn Source>,
    exchange: Exchange,
    nodes: Arc<dyn NodeList>,
    backoff: Backoff,
}

impl Driver {
    async fn drive(mut self) {
        let line = RareLine::new();
        loop {
            let began_at = Instant::now();
            let error = self.source.follow(&mut self.exchange).await;
            self.nodes.handle_outage();
            // A registry that fails right after each list does not count as working.
            if began_at.elapsed() > STEADY {
                self.backoff.reset();
            }
            if let Some(num_left_out) = line.poll(Instant::now()) {
                self.exchange.is_outage_logged = true;
                let num_left_out = (num_left_out > 0).then_some(num_left_out);
                tracing::warn!(
                    num_left_out,
                    "the registry {} fails, and the nodes known so far stay in use: {error}",
                    self.url
                );
            }
            tokio::time::sleep(self.backoff.next()).await;
        }
    }
}
