//! The prefill node's peers: lists of the registry, probes of their health, and connections to them.

use std::sync::Arc;
use std::time::Duration;

use corella_core::session::{Hello, Mismatch};
use corella_core::{DecodeCandidate, LoadReport, NodeId, PeerFacts, PeerStanding, PeerTable};
use corella_engine::rare_line;
use tokio::sync::mpsc;
use tonic::transport::{Channel, Endpoint};

use super::{Node, PrefillNode, State};
use crate::driver::Driver;
use crate::registry::{NodeList, NodeRecord};
use crate::session::service::{self, KEEPALIVE_INTERVAL, KEEPALIVE_TIMEOUT};
use crate::session::wire::{self, Body, Envelope, KvAddress};
use crate::tls::SecureConnector;

/// The limit of the wait for a node's answer to a probe.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);
const CONNECT_TIMEOUT: Duration = Duration::from_millis(250);
/// The pause between two rounds of probes.
const MAX_PAUSE: Duration = Duration::from_millis(250);

impl NodeList for PrefillNode {
    fn handle_list(&self, list: Vec<NodeRecord>) {
        let mut state = self.0.lock();
        let records = state.book.handle_list(list);
        self.0.change_peers(&mut state, |peers, now_us| {
            peers.handle_list(&records, now_us);
        });
    }

    fn handle_outage(&self) {
        self.with_peers(|peers, now_us| peers.handle_outage(now_us));
    }
}

impl Node {
    /// Changes the table of peers, and applies the resulting changes.
    pub(super) fn change_peers<T>(
        self: &Arc<Self>,
        state: &mut State,
        change: impl FnOnce(&mut PeerTable, u64) -> T,
    ) -> T {
        self.update(state, |state, now_us| {
            let changed = change(state.node.peers(), now_us);
            let changes = std::iter::from_fn(|| state.node.poll_change(now_us)).collect();
            for peer in state.book.follow(changes, state.node.peers()) {
                self.warn_of_loss(state, peer, now_us);
            }
            changed
        })
    }

    /// Probes the nodes from now on.
    pub(super) fn start_probes(self: &Arc<Self>) {
        let weak = Arc::downgrade(self);
        self.spawn(async move {
            while let Some(this) = weak.upgrade() {
                this.probe_all();
                drop(this);
                tokio::time::sleep(MAX_PAUSE).await;
            }
        });
    }

    /// Begins the probes that are due.
    fn probe_all(self: &Arc<Self>) {
        let mut state = self.lock();
        let mut poll = || self.change_peers(&mut state, |peers, now_us| peers.poll_probe(now_us));
        while let Some(peer) = poll() {
            self.spawn(self.clone().probe(peer));
        }
        let State {
            book, kv_addresses, ..
        } = &mut *state;
        kv_addresses.retain(|&peer, _| book.record(peer).is_some());
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
        let mut state = self.lock();
        let (theirs, load, kv_address) = match answer {
            Ok(answer) => answer,
            Err(reason) => {
                tracing::debug!(%peer, reason, "a probe has failed");
                return self.change_peers(&mut state, |peers, now_us| {
                    peers.handle_silent(peer, now_us);
                });
            }
        };
        if let Err(mismatch) = self.hello.check(&theirs) {
            let start = theirs.incarnation.0;
            let is_time_to_say = self.change_peers(&mut state, |peers, now_us| {
                peers.handle_incompatible(peer, start, now_us)
            });
            if is_time_to_say {
                warn_incompatible(&state, peer, &mismatch);
            }
            return;
        }
        // Rows of another arithmetic have other bits.
        if self.hello.computes_like(&theirs) {
            state.kv_addresses.insert(peer, kv_address);
        }
        let hello = PeerFacts {
            incarnation: theirs.incarnation.0,
            page_size: theirs.page_size,
        };
        let report = load.map(LoadReport::from);
        self.change_peers(&mut state, |peers, now_us| {
            let peer = peers.handle_hello(peer, hello, now_us);
            if let (Some(peer), Some(report)) = (peer, report) {
                peers.handle_report(peer, report, now_us);
            }
        });
    }

    async fn ask(&self, peer: NodeId) -> Result<wire::Hello, String> {
        let channel = self.connect(&mut self.lock(), peer);
        let channel = channel.ok_or("the registry no longer lists it")?;
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

    /// Connects to a node before the first request, and keeps the connection.
    pub(super) fn connect(&self, state: &mut State, peer: NodeId) -> Option<Channel> {
        state.book.channel(peer, |record| {
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

    /// Tells the operator where requests go after the loss of a decode node.
    fn warn_of_loss(&self, state: &mut State, lost: NodeId, now_us: u64) {
        let nodes = state.node.peers().decode_nodes(now_us);
        let fate = match (num_healthy(&nodes), self.falls_back) {
            (1.., _) => "requests go to the other decode nodes",
            (0, true) => "this node decodes requests itself until a decode node answers",
            (0, false) => "requests are refused until a decode node answers (--fallback none)",
        };
        if let Some(record) = state.book.record(lost) {
            let (node, address) = (&record.instance_id, &record.session_address);
            tracing::warn!("the decode node {node} at {address} does not answer: {fate}");
        }
    }

    /// Tells the operator why a client gets 503 although this node could answer.
    pub(super) fn warn_of_refusal(&self, state: &mut State) {
        let nodes = state.node.peers().decode_nodes(self.clock().now_us());
        rare_line!(
            warn,
            num_nodes = nodes.len(),
            num_healthy = num_healthy(&nodes),
            "no decode node has room for a request, and --fallback none lets this node decode none"
        );
    }
}

fn num_healthy(nodes: &[DecodeCandidate]) -> usize {
    let is_healthy = |node: &&DecodeCandidate| node.standing == PeerStanding::Healthy;
    nodes.iter().filter(is_healthy).count()
}

pub(super) fn warn_incompatible(state: &State, peer: NodeId, mismatch: &Mismatch) {
    let record = state.book.record(peer);
    let instance = record.map_or("", |record| &record.instance_id);
    tracing::warn!(instance, "{mismatch}; no requests are sent to it");
}
