//! The decode nodes in the registry: connections to them, and probes of their health.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use corella_core::session::{Hello, Mismatch, Peer};
use corella_core::{
    ComputeDecision, ComputeQuery, DecodeNode, Incarnation, LoadReport, NodeId, PageHash,
    PeerFacts, PeerStanding, Route, RouteQuery, SessionId,
};
use corella_engine::rare_line;
use tokio::sync::mpsc;
use tonic::transport::{Channel, Endpoint};

use super::search::DecodePeers;
use super::service::{self, KEEPALIVE_INTERVAL, KEEPALIVE_TIMEOUT};
use super::wire::{self, Body, Envelope, KvAddress};
use crate::registry::Peers;
use crate::tls::{ClusterTls, SecureConnector};

/// Limits a node's answer to a probe.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);
const CONNECT_TIMEOUT: Duration = Duration::from_millis(250);
/// The pause between two rounds of probes.
const MAX_PAUSE: Duration = Duration::from_millis(250);

pub struct RegistryPeers {
    peers: Arc<Peers>,
    hello: Hello,
    /// The address from which decode nodes load rows.
    kv_address: KvAddress,
    tls: Option<ClusterTls>,
    /// The addresses from which cached blocks are loaded, of nodes that compute the same bits as this one.
    kv_addresses: Mutex<HashMap<NodeId, KvAddress>>,
}

impl RegistryPeers {
    /// Probes the nodes from now on, on the caller's tokio runtime. `hello` is this node's greeting, and `kv_address`
    /// the source of its rows, to which the nodes connect before the first load.
    pub fn start(
        peers: Arc<Peers>,
        hello: Hello,
        kv_address: KvAddress,
        tls: Option<ClusterTls>,
    ) -> Arc<Self> {
        let this = Arc::new(Self {
            peers,
            hello,
            kv_address,
            tls,
            kv_addresses: Mutex::default(),
        });
        let weak = Arc::downgrade(&this);
        tokio::spawn(async move {
            while let Some(this) = weak.upgrade() {
                while let Some(peer) =
                    { &this.peers }.with(|directory, now_us| directory.peers.poll_probe(now_us))
                {
                    tokio::spawn(this.clone().probe(peer));
                }
                this.forget_gone();
                drop(this);
                tokio::time::sleep(MAX_PAUSE).await;
            }
        });
        this
    }

    fn kv_addresses(&self) -> MutexGuard<'_, HashMap<NodeId, KvAddress>> {
        let addresses = self.kv_addresses.lock();
        addresses.unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks a node for its name and load.
    async fn probe(self: Arc<Self>, peer: NodeId) {
        let answer = tokio::time::timeout(PROBE_TIMEOUT, self.ask(peer)).await;
        let answer = answer.unwrap_or_else(|_| Err("no answer in time".to_owned()));
        let answer = answer.and_then(|answer| {
            let (load, kv_address) = (answer.load, KvAddress::from(&answer));
            let theirs = Hello::try_from(answer).map_err(|error| error.to_string())?;
            Ok((theirs, load, kv_address))
        });
        let (theirs, load, kv_address) = match answer {
            Ok(answer) => answer,
            Err(reason) => {
                tracing::debug!(%peer, reason, "a probe has failed");
                self.peers
                    .with(|directory, now_us| directory.peers.handle_silent(peer, now_us));
                return;
            }
        };
        let report = load.map(|load| LoadReport {
            num_free_pages: load.num_free_pages,
            num_running: load.num_running,
            num_waiting: load.num_waiting,
            num_reservations: load.num_reservations,
            is_draining: load.is_draining,
            prefill_us: load.prefill_us,
            tpot_us: load.tpot_us,
            max_prompt_tokens: load.max_prompt_tokens,
        });
        if let Err(mismatch) = self.hello.check(&theirs) {
            return self.note_incompatible(peer, theirs.incarnation, &mismatch);
        }
        if self.hello.computes_like(&theirs) {
            self.kv_addresses().insert(peer, kv_address);
        }
        let hello = PeerFacts {
            incarnation: theirs.incarnation.0,
            page_size: theirs.page_size,
        };
        self.peers.with(|directory, now_us| {
            let peer = directory.peers.handle_hello(peer, hello, now_us);
            if let (Some(peer), Some(report)) = (peer, report) {
                directory.peers.handle_report(peer, report, now_us);
            }
        });
    }

    async fn ask(&self, peer: NodeId) -> Result<wire::Hello, String> {
        let channel = { self.connect(peer) }.ok_or("the registry no longer lists it")?;
        let (sender, outgoing) = mpsc::channel(1);
        let question = Envelope {
            key: None,
            body: Some(Body::Hello(wire::hello(&self.hello, &self.kv_address))),
        };
        let _ = sender.try_send(question);
        let incoming = service::open(channel, outgoing, None).await;
        let mut incoming = incoming.map_err(|status| status.to_string())?;
        let answer = incoming.message().await;
        let answer = answer.map_err(|status| status.to_string())?;
        match answer.and_then(|envelope| envelope.body) {
            Some(Body::Hello(hello)) => Ok(hello),
            _ => Err("it does not say who it is".to_owned()),
        }
    }

    fn note_incompatible(&self, peer: NodeId, incarnation: Incarnation, mismatch: &Mismatch) {
        let is_time_to_say = self.peers.with(|directory, now_us| {
            { &mut directory.peers }.handle_incompatible(peer, incarnation.0, now_us)
        });
        if is_time_to_say {
            let instance = self.peers.record(peer).map(|record| record.instance_id);
            let instance = instance.unwrap_or_default();
            tracing::warn!(instance, "{mismatch}; no requests are sent to it");
        }
    }

    /// Connects to a node before the first request, and keeps the connection.
    fn connect(&self, peer: NodeId) -> Option<Channel> {
        self.peers.channel(peer, |record| {
            let address = format!("http://{}", record.session_address);
            let endpoint = Endpoint::from_shared(address).ok()?;
            let endpoint = endpoint
                .connect_timeout(CONNECT_TIMEOUT)
                .tcp_nodelay(true)
                .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
                .keep_alive_timeout(KEEPALIVE_TIMEOUT)
                .keep_alive_while_idle(true);
            Some(match &self.tls {
                None => endpoint.connect_lazy(),
                Some(tls) => endpoint.connect_with_connector_lazy(SecureConnector(tls.clone())),
            })
        })
    }

    /// Tells the operator why a client gets 503 although this node could answer.
    fn warn_of_refusal(&self) {
        let nodes = (self.peers).with(|directory, now_us| directory.peers.decode_nodes(now_us));
        let is_healthy = |node: &&DecodeNode| node.standing == PeerStanding::Healthy;
        rare_line!(
            warn,
            num_nodes = nodes.len(),
            num_healthy = nodes.iter().filter(is_healthy).count(),
            "no decode node has room for a request, and --fallback none lets this node decode none"
        );
    }

    /// Forgets the addresses of nodes that have left.
    fn forget_gone(&self) {
        self.kv_addresses()
            .retain(|&peer, _| self.peers.record(peer).is_some());
    }
}

impl DecodePeers for RegistryPeers {
    fn route(&self, query: &RouteQuery<'_>) -> Route {
        let route = self
            .peers
            .with(|directory, now_us| directory.route(query, now_us));
        tracing::trace!(?route, "a request is placed");
        // Later, a node may have refused it as unsuitable, and it is decoded here.
        if route == Route::Refused && query.tried.is_empty() {
            self.warn_of_refusal();
        }
        route
    }

    fn decide(&self, query: &ComputeQuery) -> ComputeDecision {
        (self.peers).with(|directory, now_us| directory.decide(query, now_us))
    }

    fn channel(&self, node: NodeId) -> Option<Channel> {
        self.connect(node)
    }

    fn kv_address(&self, node: NodeId) -> Option<KvAddress> {
        self.kv_addresses().get(&node).cloned()
    }

    fn mark_suspect(&self, node: NodeId) {
        self.peers
            .with(|directory, now_us| directory.peers.handle_session_lost(node, now_us));
    }

    fn mark_incompatible(&self, node: NodeId, mismatch: &Mismatch) {
        let incarnation = (self.peers).with(|directory, _| directory.peers.incarnation(node));
        if let Some(incarnation) = incarnation {
            self.note_incompatible(node, Incarnation(incarnation), mismatch);
        }
    }

    fn handle_allocated(
        &self,
        session: SessionId,
        last: Option<PageHash>,
        peer: Peer,
        granted_as: Option<u64>,
    ) {
        self.peers
            .with(|directory, _| directory.handle_allocated(session, last, peer, granted_as));
    }

    fn handle_left(&self, session: SessionId) {
        self.peers
            .with(|directory, _| directory.handle_left(session));
    }

    fn handle_transfer(&self, node: NodeId, num_bytes: u64, elapsed: Duration) {
        let elapsed_ns = elapsed.as_nanos() as u64;
        let known = self.peers.with(|directory, now_us| {
            { &mut directory.peers }.handle_transfer(node, num_bytes, elapsed_ns, now_us)
        });
        if let Some(bytes_per_s) = known
            && let Some(record) = self.peers.record(node)
        {
            let (name, megabytes) = (record.instance_id, bytes_per_s as f64 / 1e6);
            tracing::info!("the link to {name} takes {megabytes:.1} MB/s, by its first transfer");
        }
    }
}
