//! This node's status and its peers', for watchers of the engine.

use corella_cluster::NodeRecord;
use corella_cluster::node::{DecodeRole, PrefillRole, RunningRole, standing_name};
use corella_cluster::session::PrefillNode;
use corella_core::DecodeCandidate;
use corella_server::{ClusterStatus, MAX_NODES, NodeStatus, RoleStatus};

/// `None` for a node that other nodes cannot reach.
pub fn cluster_status(running: &RunningRole, role: RoleStatus) -> Option<ClusterStatus> {
    let status = ClusterStatus {
        role: role.role,
        changing_to: role.changing_to,
        sessions: running.num_obligations(),
        ..ClusterStatus::default()
    };
    match running {
        RunningRole::Unified(_) => running.connector().map(|_| status),
        RunningRole::Prefill(PrefillRole { node, .. }) => {
            let stats = node.stats();
            let (num_nodes, nodes) = nodes_of(node);
            Some(ClusterStatus {
                sessions: stats.num_sessions,
                loads: stats.num_waiting_loads,
                sent_bytes: Some(stats.num_bytes_sent),
                remote_tokens: Some(stats.num_remote_tokens),
                num_nodes,
                nodes,
                ..status
            })
        }
        RunningRole::Decode(DecodeRole {
            node,
            peers,
            receiver,
            ..
        }) => {
            let known = peers.records();
            Some(ClusterStatus {
                sessions: node.num_sessions(),
                loads: receiver.stats().num_loads,
                num_nodes: known.len(),
                nodes: { known.iter() }
                    .take(MAX_NODES)
                    .map(|(_, record)| node_status(record, None))
                    .collect(),
                ..status
            })
        }
    }
}

/// Returns the number of decode nodes that a prefill node knows, and the first of them.
fn nodes_of(node: &PrefillNode) -> (usize, Vec<NodeStatus>) {
    let records = node.records();
    let known = node.with_peers(|peers, now_us| peers.decode_nodes(now_us));
    let nodes = known
        .iter()
        .filter_map(|node| Some(node_status(records.get(&node.peer_id)?, Some(node))))
        .take(MAX_NODES);
    (known.len(), nodes.collect())
}

fn node_status(record: &NodeRecord, known: Option<&DecodeCandidate>) -> NodeStatus {
    let report = known.and_then(|node| node.report);
    NodeStatus {
        id: record.instance_id.clone(),
        address: record.session_address.clone(),
        standing: known.map(|node| standing_name(node.standing)),
        running: report.map(|report| report.num_running),
        waiting: report.map(|report| report.num_waiting),
        free_pages: report.map(|report| report.num_free_pages),
        bandwidth: known.and_then(|node| node.bandwidth),
    }
}
