//! Options of a node that serves with other nodes.

use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use corella_cluster::blocks::FetchConfig;
use corella_cluster::kv_connector::Network;
use corella_cluster::node::NodeConfig;
use corella_cluster::transport::{PathKind, ROW_PATHS};
use corella_cluster::{RegistryUrl, Role, TlsFiles};
use corella_core::{ComputePlace, PeerPolicy};

use crate::Error;

#[derive(Args)]
#[command(next_help_heading = "Cluster")]
pub struct ClusterArgs {
    /// Part of a request that this node serves: everything (unified), the prompt and whatever no
    /// other node can take over (prefill, which clients talk to), or what follows the prompt
    /// (decode). With --cluster-listen, a proxy that sends kv_transfer_params may pair unified nodes
    #[arg(long, value_name = "ROLE", default_value = "unified", value_parser = role())]
    pub role: Role,
    /// Where nodes find each other: static:HOST:PORT,…, file:DIR, dns:NAME:PORT,
    /// etcd:HOST:PORT,…/PREFIX or kubernetes:NAMESPACE/SERVICE
    #[arg(long, value_name = "URL", required_if_eq("role", "prefill"))]
    pub registry: Option<RegistryUrl>,
    /// Address for other nodes: a decode node takes sessions there, a prefill node and a unified node
    /// send KV rows from there; port 0 takes any free port [default: 127.0.0.1:0, and none for a
    /// unified node]
    #[arg(long, value_name = "HOST:PORT")]
    pub cluster_listen: Option<String>,
    /// Host name or address under which other nodes reach this one [default: that of
    /// --cluster-listen]
    #[arg(long, value_name = "HOST")]
    pub cluster_advertise: Option<String>,
    /// Maximum number of connections from one address to --cluster-listen; nodes behind one NAT share an
    /// address, and so do those of one host [default: no limit]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub cluster_max_connections_per_address: Option<u32>,
    /// Networks whose nodes `kv_transfer_params` may name, besides this machine, as CIDR,…; a request that
    /// names another address has its prompt computed here [default: none]
    #[arg(long, value_name = "CIDR", value_delimiter = ',')]
    pub kv_peer_allow: Vec<Network>,
    /// This node's PEM certificate for other nodes, which names the host by which they reach it. With it,
    /// sessions and KV rows are encrypted, between nodes of the same authority only
    #[arg(long, value_name = "FILE", requires_all = ["cluster_tls_key", "cluster_tls_ca"])]
    pub cluster_tls_cert: Option<PathBuf>,
    /// The private key of --cluster-tls-cert
    #[arg(long, value_name = "FILE", requires = "cluster_tls_cert")]
    pub cluster_tls_key: Option<PathBuf>,
    /// The authority that the certificates of all nodes come from
    #[arg(long, value_name = "FILE", requires = "cluster_tls_cert")]
    pub cluster_tls_ca: Option<PathBuf>,
    /// Name of this node in the registry, the same after a restart [default: role and cluster
    /// address]
    #[arg(long, value_name = "NAME")]
    pub node_id: Option<String>,
    /// Work only with nodes of the same group, whatever else the registry lists [default: a group without a name]
    #[arg(long, value_name = "NAME", value_parser = parse_group)]
    pub group: Option<String>,
    /// How a prefill node chooses among decode nodes: in turn, or by free KV pages
    #[arg(long, value_name = "POLICY", default_value = "weighted", value_parser = peer_policy())]
    pub peer_policy: PeerPolicy,
    /// Who decodes a request that no decode node takes, or whose decode node is lost: the prefill
    /// node (local), or no one (none), so that the request ends with an error
    #[arg(long, value_name = "NODE", default_value = "local")]
    pub fallback: FallbackArg,
    /// How many milliseconds a prefill node asks decode nodes to take a request before --fallback
    /// applies. They answer between two steps: give this more time than a step takes
    #[arg(long, value_name = "MS", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=60_000))]
    pub decode_search_timeout: u32,
    /// How many milliseconds the KV rows of a prompt may take to a decode node once they are all computed,
    /// besides the time that they need at 1 MB/s; then the prefill node goes on by itself
    #[arg(long, value_name = "MS", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=3_600_000))]
    pub kv_load_timeout: u32,
    /// Decode requests with a shorter prompt on the prefill node itself
    #[arg(long, value_name = "TOKENS", value_parser = super::token_count::parse_count, default_value_t = 0)]
    pub disaggregate_min_tokens: u32,
    /// Take no longer prompts on this decode node. Nodes without a limit are left to long prompts while others have room
    #[arg(long, value_name = "TOKENS", value_parser = super::token_count::parse_count)]
    pub max_prompt_tokens: Option<u32>,
    /// Which node computes the rest of a prompt that a decode node has most of, such as the next turn of a
    /// conversation: the one that delays requests less (auto), the prefill node, or the decode node
    #[arg(long, value_name = "NODE", default_value = "auto")]
    pub next_turn: NextTurnArg,
    /// How KV rows reach another node: over TCP, inside the host where both nodes are on the same one
    /// (shm), whichever of these two is possible (auto), or by NIXL, which must be installed, and over
    /// TCP to nodes without it
    #[arg(long, value_name = "TRANSPORT", default_value = "auto", value_parser = transport())]
    pub transport: TransportArg,
    /// Send at most this many bytes of KV rows per second [default: no limit]
    #[arg(long, value_name = "SIZE", value_parser = super::byte_size::parse_size)]
    pub transfer_max_bandwidth: Option<u64>,
    /// Keep the KV rows of a prompt for this many seconds if the other node does not fetch them, or
    /// stops fetching them
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u32).range(4..=3600))]
    pub kv_hold_lease: u32,
    /// Threads that copy KV rows from and to other nodes
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub transfer_threads: u16,
    /// When the cached blocks of a prompt are fetched from the node that has them: where that is quicker than
    /// computing them (auto), always, or never (off)
    #[arg(long, value_name = "WHEN", default_value = "auto")]
    pub block_fetch: BlockFetchArg,
}

impl ClusterArgs {
    fn listen(&self) -> Result<SocketAddr, Error> {
        let listen = self.cluster_listen.as_deref();
        let listen = listen.unwrap_or(DEFAULT_CLUSTER_LISTEN);
        let addresses = listen.to_socket_addrs();
        let Some(address) = addresses.ok().and_then(|mut addresses| addresses.next()) else {
            return Err(Error::Config(format!(
                "--cluster-listen {listen} is no HOST:PORT that this machine can resolve; for \
                 example 127.0.0.1:9000"
            )));
        };
        if address.ip().is_unspecified() && self.cluster_advertise.is_none() {
            return Err(Error::Config(format!(
                "--cluster-listen {address} listens on every address: say with --cluster-advertise HOST \
                 which of them other nodes reach"
            )));
        }
        Ok(address)
    }

    pub fn node_config(self) -> Result<NodeConfig, Error> {
        let role = self.role;
        let listen = self.listen()?;
        let files = (
            self.cluster_tls_cert,
            self.cluster_tls_key,
            self.cluster_tls_ca,
        );
        let tls = match files {
            (Some(cert), Some(key), Some(ca)) => Some(TlsFiles { cert, key, ca }),
            // The command line requires all three files or none.
            _ => None,
        };
        let row_path = self.transport.0;
        if let Some(path) = row_path.filter(|path| !path.is_private && tls.is_some()) {
            return Err(Error::Config(format!(
                "--transport {} does not encrypt: leave out --cluster-tls-cert, --cluster-tls-key and \
                 --cluster-tls-ca, or choose --transport tcp",
                path.option
            )));
        }
        if self.block_fetch == BlockFetchArg::Always && self.next_turn == NextTurnArg::Decode {
            return Err(Error::Config(
                "with --next-turn decode no blocks come back to the prefill node: leave out --block-fetch always, or \
                 choose --next-turn prefill"
                    .to_owned(),
            ));
        }
        Ok(NodeConfig {
            role,
            listens: role != Role::Unified || self.cluster_listen.is_some(),
            registry: self.registry,
            listen,
            kv_peer_allow: self.kv_peer_allow,
            max_connections: MAX_NODE_CONNECTIONS,
            max_connections_per_address: { self.cluster_max_connections_per_address }
                .map_or(usize::MAX, |number| number as usize),
            advertise: self.cluster_advertise,
            tls,
            tracer: None,
            node_id: self.node_id,
            group: self.group.unwrap_or_default(),
            policy: self.peer_policy,
            min_tokens: self.disaggregate_min_tokens,
            max_prompt_tokens: self.max_prompt_tokens,
            compute_place: self.next_turn.into(),
            falls_back: self.fallback == FallbackArg::Local,
            search_timeout: Duration::from_millis(self.decode_search_timeout.into()),
            load_time: Duration::from_millis(self.kv_load_timeout.into()),
            uses_network: row_path.is_none_or(|path| !path.is_local),
            uses_host: row_path.is_none_or(|path| path.is_local),
            row_paths: { row_path.into_iter() }
                .filter(|path| path.load.is_some())
                .collect(),
            max_bandwidth: self.transfer_max_bandwidth,
            num_threads: self.transfer_threads.into(),
            fetches: match self.block_fetch {
                BlockFetchArg::Auto => Some(FetchConfig::default()),
                BlockFetchArg::Always => Some(FetchConfig {
                    is_forced: true,
                    ..FetchConfig::default()
                }),
                BlockFetchArg::Off => None,
            },
        })
    }
}

/// Limits the connections of other nodes. A fleet needs fewer, and a low limit of open files reduces this number.
const MAX_NODE_CONNECTIONS: usize = 1024;
/// Any free port, on this machine only.
const DEFAULT_CLUSTER_LISTEN: &str = "127.0.0.1:0";

fn parse_group(name: &str) -> Result<String, String> {
    let may_stand = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    match name.len() <= 64 && name.chars().all(may_stand) {
        true => Ok(name.to_owned()),
        false => Err("a group has at most 64 letters, digits, and any of `._-`".to_owned()),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BlockFetchArg {
    Auto,
    Always,
    Off,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum NextTurnArg {
    Auto,
    Prefill,
    Decode,
}

impl From<NextTurnArg> for Option<ComputePlace> {
    fn from(node: NextTurnArg) -> Self {
        match node {
            NextTurnArg::Auto => None,
            NextTurnArg::Prefill => Some(ComputePlace::Here),
            NextTurnArg::Decode => Some(ComputePlace::There),
        }
    }
}

fn role() -> impl TypedValueParser<Value = Role> {
    let roles = [Role::Unified, Role::Prefill, Role::Decode];
    PossibleValuesParser::new(roles.map(Role::name))
        .try_map(|name| Role::from_name(&name).ok_or("is no role"))
}

fn peer_policy() -> impl TypedValueParser<Value = PeerPolicy> {
    PossibleValuesParser::new(["round_robin", "weighted"]).map(|name| match &*name {
        "round_robin" => PeerPolicy::RoundRobin,
        _ => PeerPolicy::Weighted,
    })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FallbackArg {
    Local,
    None,
}

/// The chosen row path. `None` is `auto`.
#[derive(Clone, Copy, Debug)]
pub struct TransportArg(pub Option<PathKind>);

fn transport() -> impl TypedValueParser<Value = TransportArg> {
    let names = ROW_PATHS.iter().map(|kind| kind.option);
    PossibleValuesParser::new(["auto"].into_iter().chain(names)).map(|name| {
        let kind = ROW_PATHS.into_iter().find(|kind| kind.option == name);
        TransportArg(kind)
    })
}
