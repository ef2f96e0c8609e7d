//! A few nodes for a test.

use std::fmt::Debug;
use std::ops::Deref;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use corella_cluster::{NodeRecord, Peers, Registry, RegistryConfig, RegistryError, Role};
use corella_core::{
    Fleet, NodeId, PeerFacts, PeerStanding, PeerTableConfig, Placement, PlacementConfig,
    PlacementRequest,
};
use corella_test::wait_until_async;

/// Long enough for a node on a busy machine to renew its lease in time.
pub const LEASE_TTL: Duration = Duration::from_secs(3);

const HOUR_US: u64 = 3_600_000_000;

pub fn node(instance_id: &str, role: Role) -> NodeRecord {
    let mut node = NodeRecord::at(instance_id, &format!("{instance_id}:9000"));
    node.role = Some(role);
    node.incarnation = Some(1);
    node
}

pub fn config(peer_role: Role) -> RegistryConfig {
    let mut config = RegistryConfig::new(peer_role);
    config.lease_ttl = LEASE_TTL;
    config.file_interval = Duration::from_millis(100);
    // Nodes list anew only on a change.
    config.list_interval = Duration::from_secs(600);
    config.max_retry = Duration::from_millis(500);
    config
}

/// A node's part in a registry, and the peers that it knows from there.
pub struct Member {
    registry: Registry,
    peers: Arc<Peers>,
}

impl Member {
    pub fn start(
        url: &str,
        own: Option<NodeRecord>,
        config: RegistryConfig,
    ) -> Result<Self, RegistryError> {
        let table = PeerTableConfig {
            // A node on a busy machine may register again late.
            outage_grace_us: HOUR_US,
            empty_lists_us: HOUR_US,
            ..PeerTableConfig::default()
        };
        let peers = Arc::new(Peers::new(table));
        let registry = Registry::start(&url.parse().unwrap(), own, config, peers.clone())?;
        Ok(Self { registry, peers })
    }

    pub fn peers(&self) -> &Peers {
        &self.peers
    }
}

impl Deref for Member {
    type Target = Registry;

    fn deref(&self) -> &Registry {
        &self.registry
    }
}

/// Registers a prefill node that looks for decode nodes.
pub fn prefill(url: &str, instance_id: &str) -> Member {
    start(url, node(instance_id, Role::Prefill), LEASE_TTL)
}

/// Registers a decode node that looks for prefill nodes.
pub fn decode(url: &str, instance_id: &str) -> Member {
    start(url, node(instance_id, Role::Decode), LEASE_TTL)
}

pub fn start(url: &str, own: NodeRecord, lease_ttl: Duration) -> Member {
    let peer_role = match own.role {
        Some(Role::Decode) => Role::Prefill,
        _ => Role::Decode,
    };
    let mut config = config(peer_role);
    config.lease_ttl = lease_ttl;
    Member::start(url, Some(own), config).unwrap()
}

/// Follows decode nodes without registering.
pub fn observer(url: &str) -> Member {
    Member::start(url, None, config(Role::Decode)).unwrap()
}

pub fn instances(registry: &Member) -> Vec<String> {
    let mut instances: Vec<_> = registry
        .peers()
        .records()
        .into_iter()
        .map(|(_, record)| record.instance_id)
        .collect();
    instances.sort();
    instances
}

pub fn record(registry: &Member, instance_id: &str) -> Option<NodeRecord> {
    let mut records = registry.peers().records().into_iter();
    let found = records.find(|(_, record)| record.instance_id == instance_id);
    found.map(|(_, record)| record)
}

pub fn peer_id(registry: &Member, instance_id: &str) -> Option<NodeId> {
    registry.peers().with(|peers, _| peers.peer_id(instance_id))
}

/// Records a successful probe.
pub fn greet(registry: &Member, instance_id: &str) -> NodeId {
    let peer_id = peer_id(registry, instance_id).unwrap();
    let hello = PeerFacts {
        incarnation: 1,
        page_size: 16,
    };
    let alive = registry
        .peers()
        .with(|peers, now_us| peers.handle_hello(peer_id, hello, now_us));
    assert_eq!(alive, Some(peer_id));
    peer_id
}

pub fn is_healthy(registry: &Member, peer_id: NodeId) -> bool {
    let standing = registry.peers().with(|peers, _| peers.standing(peer_id));
    standing == Some(PeerStanding::Healthy)
}

/// Places a request that this node must not decode itself.
fn place(registry: &Member) -> Placement {
    let nodes = registry
        .peers()
        .with(|peers, now_us| peers.decode_nodes(now_us));
    let fleet = Fleet {
        nodes: &nodes,
        falls_back: false,
        kv_bytes_per_token: 1000,
        prefill_us: 0,
    };
    let request = PlacementRequest {
        num_prompt_tokens: 100,
        num_expected_output_tokens: 28,
        max_tpot_us: None,
    };
    fleet.place(&PlacementConfig::default(), &request, 0, &[])
}

/// The only decode node drains. No probe asks it meanwhile, and a list without any node would not be believed.
pub async fn a_draining_node_is_chosen_no_more(url: &str) {
    let (first, second) = (prefill(url, "prefill-1"), decode(url, "decode-1"));
    until(vec!["decode-1".to_owned()], || instances(&first)).await;
    let life = greet(&first, "decode-1");
    assert_eq!(place(&first), Placement::Remote(life));
    second.drain();
    until(Placement::Full, || place(&first)).await;
    // The draining node is still known, so that its sessions continue.
    assert_eq!(peer_id(&first, "decode-1"), Some(life));
}

/// Waits until `look` returns the expected value.
pub async fn until<T: PartialEq + Debug>(expected: T, mut look: impl FnMut() -> T) {
    wait_until_async(&format!("{expected:?}"), || look() == expected).await;
}

/// A folder for one test, removed when it ends.
pub struct TestFolder(pub PathBuf);

impl TestFolder {
    pub fn new(test: &str) -> Self {
        let name = format!("corella-{}-registry-{test}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }
}

impl Drop for TestFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
