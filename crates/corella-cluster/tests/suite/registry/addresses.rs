//! Nodes at given addresses, and behind a name.

use corella_cluster::Role;
use corella_core::PeerStanding;

use crate::registry::fleet::{Member, config, instances, node, observer, until};

#[tokio::test(flavor = "multi_thread")]
async fn fixed_addresses_are_peers_but_for_the_own_one() {
    let url = "static:10.0.0.1:9000,10.0.0.2:9000,[::1]:9000";
    let mut own = node("decode-2", Role::Prefill);
    own.session_address = "10.0.0.2:9000".into();
    let registry = Member::start(url, Some(own), config(Role::Decode)).unwrap();
    let others = ["10.0.0.1:9000", "[::1]:9000"].map(String::from);
    until(others.to_vec(), || instances(&registry)).await;
    // The nodes have not been probed yet.
    let nodes = registry
        .peers()
        .with(|peers, now_us| peers.decode_nodes(now_us));
    assert!(
        nodes
            .iter()
            .all(|node| node.standing == PeerStanding::Suspect)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_leads_to_addresses() {
    let registry = observer("dns:localhost:9000");
    until(true, || {
        let instances = instances(&registry);
        let is_loopback = |id: &String| id == "127.0.0.1:9000" || id == "[::1]:9000";
        !instances.is_empty() && instances.iter().all(is_loopback)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_impossible_record_is_refused_at_once() {
    let own = node("../escape", Role::Decode);
    let error = Member::start("static:a:1", Some(own), config(Role::Prefill))
        .err()
        .unwrap();
    assert!(error.to_string().contains("instance id"), "{error}");
}
