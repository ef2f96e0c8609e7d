//! The decode nodes in the registry: connections to them, their health, and the choice of the next one.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use corella_core::session::{Hello, Mismatch, Peer};
use corella_core::{
    ComputePlace, DecodeNode, Fleet, Incarnation, LoadReport, Namespace, NodeId, PeerFacts, PeerId,
    PeerStanding, Placement, PlacementConfig, PlacementRequest, Request, ReservationId, SessionId,
    TokenId,
};
use corella_engine::rare_line;
use tokio::sync::mpsc;
use tonic::transport::{Channel, Endpoint};

use super::search::{Choice, DecodePeers, Holder, Search};
use super::sent_blocks::SentBlocks;
use super::service::{self, KEEPALIVE_INTERVAL, KEEPALIVE_TIMEOUT};
use super::stay::StayReason;
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
    config: PlacementConfig,
    hello: Hello,
    /// The address from which decode nodes load rows.
    kv_address: KvAddress,
    tls: Option<ClusterTls>,
    kv_bytes_per_token: u64,
    cursor: AtomicU64,
    sent: SentBlocks,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    channels: HashMap<PeerId, Channel>,
    /// The addresses from which cached blocks are loaded, of nodes that compute the same bits as this one.
    kv_addresses: HashMap<PeerId, KvAddress>,
    /// The node and reservation of each session, asked for or granted.
    reservations: HashMap<SessionId, (PeerId, ReservationId)>,
}

impl RegistryPeers {
    /// Probes the nodes from now on, on the caller's tokio runtime. `hello` is this node's greeting, and `kv_address`
    /// the source of its rows, to which the nodes connect before the first load.
    pub fn start(
        peers: Arc<Peers>,
        config: PlacementConfig,
        hello: Hello,
        kv_address: KvAddress,
        kv_bytes_per_token: u64,
        tls: Option<ClusterTls>,
        sent: SentBlocks,
    ) -> Arc<Self> {
        let this = Arc::new(Self {
            peers,
            config,
            kv_bytes_per_token,
            // Prefill nodes begin at different decode nodes.
            cursor: AtomicU64::new(hello.incarnation.0),
            hello,
            kv_address,
            tls,
            sent,
            state: Mutex::default(),
        });
        let weak = Arc::downgrade(&this);
        tokio::spawn(async move {
            while let Some(this) = weak.upgrade() {
                while let Some(peer) = this
                    .peers
                    .with_table(|table, now_us| table.poll_probe(now_us))
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

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks a node for its name and load.
    async fn probe(self: Arc<Self>, peer: PeerId) {
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
                    .with_table(|table, now_us| table.handle_silent(peer, now_us));
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
        });
        if let Err(mismatch) = self.hello.check(&theirs) {
            return self.note_incompatible(peer, theirs.incarnation, &mismatch);
        }
        if self.hello.computes_like(&theirs) {
            self.lock().kv_addresses.insert(peer, kv_address);
        }
        let hello = PeerFacts {
            incarnation: theirs.incarnation.0,
            page_size: theirs.page_size,
        };
        self.peers.with_table(|table, now_us| {
            let peer = table.handle_hello(peer, hello, now_us);
            if let (Some(peer), Some(report)) = (peer, report) {
                table.handle_report(peer, report, now_us);
            }
        });
    }

    async fn ask(&self, peer: PeerId) -> Result<wire::Hello, String> {
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

    fn note_incompatible(&self, peer: PeerId, incarnation: Incarnation, mismatch: &Mismatch) {
        let is_time_to_say = self
            .peers
            .with_table(|table, now_us| table.handle_incompatible(peer, incarnation.0, now_us));
        if is_time_to_say {
            let instance = self.peers.record(peer).map(|record| record.instance_id);
            let instance = instance.unwrap_or_default();
            tracing::warn!(instance, "{mismatch}; no requests are sent to it");
        }
    }

    /// Connects to a node before the first request, and keeps the connection.
    fn connect(&self, peer: PeerId) -> Option<Channel> {
        let mut state = self.lock();
        if let Some(channel) = state.channels.get(&peer) {
            return Some(channel.clone());
        }
        let record = self.peers.record(peer)?;
        let endpoint = Endpoint::from_shared(format!("http://{}", record.session_address)).ok()?;
        let endpoint = endpoint
            .connect_timeout(CONNECT_TIMEOUT)
            .tcp_nodelay(true)
            .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
            .keep_alive_timeout(KEEPALIVE_TIMEOUT)
            .keep_alive_while_idle(true);
        let channel = match &self.tls {
            None => endpoint.connect_lazy(),
            Some(tls) => endpoint.connect_with_connector_lazy(SecureConnector(tls.clone())),
        };
        state.channels.insert(peer, channel.clone());
        Some(channel)
    }

    /// Returns why a request stays that could go elsewhere: otherwise it would go to a node behind a slow link, or find
    /// no node with room.
    fn stay_reason(
        &self,
        fleet: Fleet<'_>,
        wanted: &PlacementRequest,
        refused: &[PeerId],
    ) -> StayReason {
        let others = Fleet {
            takes_locally: false,
            ..fleet
        };
        match others.place(&self.config, wanted, 0, refused) {
            Placement::Remote(_) => StayReason::SlowLink,
            Placement::Local | Placement::Full => StayReason::NoRoom,
        }
    }

    fn release(&self, reservation: Option<(PeerId, ReservationId)>) {
        if let Some((_, reservation)) = reservation {
            self.peers.with_table(|table, _| table.release(reservation));
        }
    }

    /// Tells the operator why a client gets 503 although this node could answer.
    fn warn_of_refusal(&self) {
        let nodes = (self.peers).with_table(|table, now_us| table.decode_nodes(now_us));
        let is_healthy = |node: &&DecodeNode| node.standing == PeerStanding::Healthy;
        rare_line!(
            warn,
            num_nodes = nodes.len(),
            num_healthy = nodes.iter().filter(is_healthy).count(),
            "no decode node has room for a request, and --fallback none lets this node decode none"
        );
    }

    /// Closes connections to nodes that have left.
    fn forget_gone(&self) {
        let mut state = self.lock();
        let is_listed = |peer: &PeerId| self.peers.record(*peer).is_some();
        state.channels.retain(|peer, _| is_listed(peer));
        state.kv_addresses.retain(|peer, _| is_listed(peer));
    }
}

impl DecodePeers for RegistryPeers {
    fn choose(&self, search: &Search<'_>) -> Choice {
        let request = search.request;
        let wanted = PlacementRequest {
            num_prompt_tokens: request.prompt.len() as u32,
            num_expected_output_tokens: request.stopping.max_tokens.unwrap_or(0),
        };
        // The operator keeps such a prompt here, which precedes all other rules.
        if wanted.num_prompt_tokens < self.config.disaggregate_min_tokens {
            return Choice::Here(StayReason::Short);
        }
        let refused: Vec<PeerId> = search.tried.iter().map(|&node| peer_id(node)).collect();
        let near = search.near.map(peer_id);
        let holder = self.holder(&request.namespace, &request.prompt);
        let cursor = self.cursor.fetch_add(1, Ordering::Relaxed);
        let chosen = self.peers.with_table(|table, now_us| {
            let mut nodes = table.decode_nodes(now_us);
            if let Some(holder) = holder
                && let Some(node) =
                    { nodes.iter_mut() }.find(|it| it.peer_id == peer_id(holder.node))
            {
                node.num_cached_rows = holder.num_rows;
            }
            let fleet = Fleet {
                nodes: &nodes,
                takes_locally: search.falls_back,
                kv_bytes_per_token: self.kv_bytes_per_token,
                prefill_us: search.prefill_us,
            };
            let place = |nodes: &[DecodeNode]| {
                let fleet = Fleet { nodes, ..fleet };
                match fleet.place(&self.config, &wanted, cursor, &refused) {
                    Placement::Remote(peer) => Ok(peer),
                    Placement::Local => {
                        Err(Choice::Here(self.stay_reason(fleet, &wanted, &refused)))
                    }
                    Placement::Full => Err(Choice::Nobody),
                }
            };
            let near = { nodes.iter() }.find(|node| near == Some(node.peer_id));
            let near = near.and_then(|node| place(std::slice::from_ref(node)).ok());
            let peer = near.map_or_else(|| place(&nodes), Ok)?;
            let node = { nodes.iter() }.find(|node| node.peer_id == peer);
            let page_size = node.ok_or(Choice::Nobody)?.page_size;
            let num_pages = wanted.num_pages(page_size).try_into().unwrap_or(u32::MAX);
            let incarnation = table.incarnation(peer).ok_or(Choice::Nobody)?;
            let reservation = table.reserve(peer, num_pages);
            Ok((peer, Incarnation(incarnation), reservation))
        });
        tracing::trace!(?chosen, "placement");
        let (peer, incarnation, reservation) = match chosen {
            Ok(chosen) => chosen,
            Err(choice) => {
                // Later, a node may have refused it as unsuitable, and it is decoded here.
                if choice == Choice::Nobody && search.tried.is_empty() {
                    self.warn_of_refusal();
                }
                return choice;
            }
        };
        if let Some(reservation) = reservation {
            let mut state = self.lock();
            let earlier = state
                .reservations
                .insert(search.session, (peer, reservation));
            drop(state);
            self.release(earlier);
        }
        match u32::try_from(peer.0) {
            Ok(node) => Choice::Peer(Peer {
                node: NodeId(node),
                incarnation,
            }),
            Err(_) => Choice::Nobody,
        }
    }

    fn channel(&self, node: NodeId) -> Option<Channel> {
        self.connect(peer_id(node))
    }

    fn note_sent(&self, request: &Request, peer: Peer) {
        self.sent.note(&request.namespace, &request.prompt, peer);
    }

    fn holder(&self, namespace: &Namespace, prompt: &[TokenId]) -> Option<Holder> {
        self.sent.find(namespace, prompt)
    }

    fn kv_address(&self, node: NodeId) -> Option<KvAddress> {
        self.lock().kv_addresses.get(&peer_id(node)).cloned()
    }

    fn compute_place(&self) -> Option<ComputePlace> {
        self.config.compute_place
    }

    fn facts(&self, node: NodeId) -> Option<DecodeNode> {
        let nodes = (self.peers).with_table(|table, now_us| table.decode_nodes(now_us));
        { nodes.into_iter() }.find(|known| known.peer_id == peer_id(node))
    }

    fn mark_suspect(&self, node: NodeId) {
        let peer = peer_id(node);
        self.peers
            .with_table(|table, now_us| table.handle_session_lost(peer, now_us));
    }

    fn mark_incompatible(&self, node: NodeId, mismatch: &Mismatch) {
        let peer = peer_id(node);
        let incarnation = self.peers.with_table(|table, _| table.incarnation(peer));
        if let Some(incarnation) = incarnation {
            self.note_incompatible(peer, Incarnation(incarnation), mismatch);
        }
    }

    fn handle_granted(&self, session: SessionId, node: NodeId, granted_as: u64) {
        let reservation = self.lock().reservations.get(&session).copied();
        // The session may have moved to another node since.
        if let Some((peer, reservation)) = reservation
            && peer == peer_id(node)
        {
            self.peers
                .with_table(|table, _| table.handle_granted(reservation, granted_as));
        }
    }

    fn handle_left(&self, session: SessionId) {
        let reservation = self.lock().reservations.remove(&session);
        self.release(reservation);
    }

    fn handle_transfer(&self, node: NodeId, num_bytes: u64, elapsed: Duration) {
        let elapsed_ns = elapsed.as_nanos() as u64;
        let known = self.peers.with_table(|table, now_us| {
            table.handle_transfer(peer_id(node), num_bytes, elapsed_ns, now_us)
        });
        if let Some(bytes_per_s) = known
            && let Some(record) = self.peers.record(peer_id(node))
        {
            let (name, megabytes) = (record.instance_id, bytes_per_s as f64 / 1e6);
            tracing::info!("the link to {name} takes {megabytes:.1} MB/s, by its first transfer");
        }
    }
}

fn peer_id(node: NodeId) -> PeerId {
    PeerId(node.0.into())
}
