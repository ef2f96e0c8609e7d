//! Options of a node that serves with other nodes.

use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use corella_cluster::RegistryUrl;
use corella_cluster::kv_connector::Network;
use corella_cluster::transport::{PathKind, ROW_PATHS};
use corella_core::{ComputePlace, PeerPolicy};

#[derive(Args)]
#[command(next_help_heading = "Cluster")]
pub struct ClusterArgs {
    /// Part of a request that this node serves: everything (unified), the prompt and whatever no
    /// other node can take over (prefill, which clients talk to), or what follows the prompt
    /// (decode). With --cluster-listen, a proxy that sends kv_transfer_params may pair unified nodes
    #[arg(long, value_name = "ROLE", default_value = "unified")]
    pub role: RoleArg,
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
    #[arg(long, value_name = "POLICY", default_value = "weighted")]
    pub peer_policy: PeerPolicyArg,
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

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RoleArg {
    Unified,
    Prefill,
    Decode,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PeerPolicyArg {
    #[value(name = "round_robin")]
    RoundRobin,
    #[value(name = "weighted")]
    Weighted,
}

impl From<PeerPolicyArg> for PeerPolicy {
    fn from(policy: PeerPolicyArg) -> Self {
        match policy {
            PeerPolicyArg::RoundRobin => Self::RoundRobin,
            PeerPolicyArg::Weighted => Self::Weighted,
        }
    }
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
