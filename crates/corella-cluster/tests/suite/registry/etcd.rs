//! Nodes in a real etcd.

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use corella_cluster::Role;
use corella_test::HeldProcess;

use crate::proxy::Proxy;
use crate::registry::etcd_lease::until_renewed;
use crate::registry::etcd_server::{EtcdServer, url_at};
use crate::registry::fleet::{
    a_draining_node_is_chosen_no_more, decode, greet, instances, is_healthy, node, observer,
    peer_id, prefill, record, start, until,
};

/// Tells `a_node_in_a_process_of_its_own` where to register.
const CHILD_REGISTRY: &str = "CORELLA_TEST_CHILD_REGISTRY";
/// Such a lease is renewed every three seconds, which leaves a node on a busy machine six seconds more for its renewal.
const KEPT_LEASE_TTL: Duration = Duration::from_secs(9);

/// A proxy between nodes and etcd that counts the tries.
fn counting_proxy(server: &EtcdServer) -> Proxy {
    let proxy = Proxy::new(server.address());
    proxy.allow_all();
    proxy
}

/// Waits until nodes have tried this often to reach a stopped etcd. A node tries again when a try has failed.
async fn until_tried(proxy: &Proxy, num_tries: u64) {
    let before = proxy.num_accepted();
    until(true, || proxy.num_accepted() >= before + num_tries).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_find_each_other() {
    let server = EtcdServer::start("find");
    // With such leases, nodes list only when etcd has reported a change.
    let lease_ttl = Duration::from_secs(600);
    let first = start(&server.url(), node("prefill-1", Role::Prefill), lease_ttl);
    let second = start(&server.url(), node("decode-1", Role::Decode), lease_ttl);
    let other_url = server.url().replace("/test", "/test-2");
    let other_fleet = start(&other_url, node("decode-2", Role::Decode), lease_ttl);
    until(true, || other_fleet.is_published()).await;
    until(vec!["decode-1".to_owned()], || instances(&first)).await;
    until(vec!["prefill-1".to_owned()], || instances(&second)).await;

    let mut own = node("decode-1", Role::Decode);
    own.max_prompt_tokens = 4096;
    own.kv_address = Some("127.0.0.1:9001".into());
    own.hello.insert("page_size".into(), "16".into());
    second.publish(own.clone()).unwrap();
    until(Some(own), || record(&first, "decode-1")).await;

    let life = peer_id(&first, "decode-1");
    let mut restarted = node("decode-1", Role::Decode);
    restarted.incarnation = Some(2);
    second.publish(restarted).unwrap();
    until(true, || peer_id(&first, "decode-1") != life).await;
    assert_eq!(instances(&first), ["decode-1"]);

    let third = start(&server.url(), node("decode-3", Role::Decode), lease_ttl);
    until(2, || instances(&first).len()).await;
    second.deregister(Duration::from_mins(5)).await.unwrap();
    until(vec!["decode-3".to_owned()], || instances(&first)).await;
    assert_eq!(
        instances(&second),
        ["prefill-1"],
        "it still knows the others"
    );
    assert!(!second.is_published() && third.is_published());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_drains_is_chosen_no_more() {
    let server = EtcdServer::start("drain");
    a_draining_node_is_chosen_no_more(&server.url()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outage_takes_no_node_away_and_all_register_again() {
    let mut server = EtcdServer::start("outage");
    let proxy = counting_proxy(&server);
    let start = |id, role| start(&url_at(proxy.address), node(id, role), KEPT_LEASE_TTL);
    let first = start("prefill-1", Role::Prefill);
    let second = start("decode-1", Role::Decode);
    until(vec!["decode-1".to_owned()], || instances(&first)).await;
    until(vec!["prefill-1".to_owned()], || instances(&second)).await;
    let life = greet(&first, "decode-1");
    greet(&second, "prefill-1");

    for loses_data in [false, true] {
        server.kill();
        until_tried(&proxy, 10).await;
        assert_eq!(peer_id(&first, "decode-1"), Some(life));
        if loses_data {
            server.lose_data();
        }
        server.restart();
        // A newcomer finds the nodes that have registered again, or whose entries have stayed.
        let newcomer = observer(&server.url());
        until(Some(Some(1)), || {
            record(&newcomer, "decode-1").map(|node| node.incarnation)
        })
        .await;
        tokio::join!(
            until_renewed(server.address(), "prefill-1"),
            until_renewed(server.address(), "decode-1")
        );
        assert_eq!(instances(&newcomer), ["decode-1"]);
        assert_eq!(
            peer_id(&first, "decode-1"),
            Some(life),
            "the same life throughout"
        );
        assert!(is_healthy(&first, life));
        assert_eq!(instances(&second), ["prefill-1"]);
    }
}

/// Most nodes have registered again with an etcd that has lost its data, and one is late.
#[tokio::test(flavor = "multi_thread")]
async fn who_registers_late_after_an_outage_is_waited_for() {
    let mut server = EtcdServer::start("late");
    let first = prefill(&server.url(), "prefill-1");
    let _second = decode(&server.url(), "decode-1");
    let child = NodeProcess::start(&server);
    until(2, || instances(&first).len()).await;
    let life = greet(&first, "decode-child");
    let held = child.hold();
    server.kill();
    server.lose_data();
    server.restart();
    let _newcomer = decode(&server.url(), "decode-3");
    until(true, || instances(&first).contains(&"decode-3".to_owned())).await;
    assert_eq!(peer_id(&first, "decode-child"), Some(life));
    drop(held);
    let other = observer(&server.url());
    until(3, || instances(&other).len()).await;
    assert_eq!(peer_id(&first, "decode-child"), Some(life));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_registry_that_hangs_takes_no_node_away() {
    let server = EtcdServer::start("hang");
    let proxy = counting_proxy(&server);
    let first = prefill(&url_at(proxy.address), "prefill-1");
    let second = decode(&url_at(proxy.address), "decode-1");
    until(vec!["decode-1".to_owned()], || instances(&first)).await;
    let life = greet(&first, "decode-1");
    let held = server.hold();
    until_tried(&proxy, 6).await;
    assert!(is_healthy(&first, life));
    let mut own = node("decode-1", Role::Decode);
    own.max_prompt_tokens = 4096;
    second.publish(own.clone()).unwrap();
    drop(held);
    until(Some(own), || record(&first, "decode-1")).await;
    assert!(is_healthy(&first, life));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_registry_may_come_later() {
    let mut server = EtcdServer::not_started("later");
    let proxy = counting_proxy(&server);
    let first = prefill(&url_at(proxy.address), "prefill-1");
    let second = decode(&url_at(proxy.address), "decode-1");
    until_tried(&proxy, 4).await;
    assert!(!first.is_published() && instances(&first).is_empty());
    server.restart();
    until(vec!["decode-1".to_owned()], || instances(&first)).await;
    until(vec!["prefill-1".to_owned()], || instances(&second)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn another_member_is_asked_when_one_is_away() {
    let server = EtcdServer::start("member");
    let nobody = EtcdServer::not_started("no-member");
    let address = |server: &EtcdServer| {
        let url = server.url();
        url["etcd:".len()..].trim_end_matches("/test").to_owned()
    };
    let url = format!("etcd:{},{}/test", address(&nobody), address(&server));
    let first = prefill(&url, "prefill-1");
    let _second = decode(&url, "decode-1");
    until(vec!["decode-1".to_owned()], || instances(&first)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_leaves_during_an_outage_is_taken_off_after_it() {
    let mut server = EtcdServer::start("leave");
    let second = decode(&server.url(), "decode-1");
    until(true, || second.is_published()).await;
    server.kill();
    let error = second
        .deregister(Duration::from_millis(300))
        .await
        .unwrap_err();
    assert!(
        error.to_string().contains("still lists this node"),
        "{error}"
    );
    server.restart();
    until(false, || second.is_published()).await;
    let newcomer = observer(&server.url());
    let third = decode(&server.url(), "decode-3");
    until(vec!["decode-3".to_owned()], || instances(&newcomer)).await;
    until(true, || third.is_published()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_node_expires_with_its_lease() {
    let server = EtcdServer::start("killed");
    let first = prefill(&server.url(), "prefill-1");
    let second = decode(&server.url(), "decode-1");
    let mut child = NodeProcess::start(&server);
    let both = ["decode-1", "decode-child"].map(String::from);
    until(both.to_vec(), || instances(&first)).await;
    child.kill();
    until(vec!["decode-1".to_owned()], || instances(&first)).await;
    until(true, || second.is_published()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_node_is_back_when_it_goes_on() {
    let server = EtcdServer::start("stopped");
    let first = prefill(&server.url(), "prefill-1");
    let _second = decode(&server.url(), "decode-1");
    let child = NodeProcess::start(&server);
    until(2, || instances(&first).len()).await;
    let held = child.hold();
    until(vec!["decode-1".to_owned()], || instances(&first)).await;
    drop(held);
    let both = ["decode-1", "decode-child"].map(String::from);
    until(both.to_vec(), || instances(&first)).await;
}

/// `a_node_in_a_process_of_its_own`, run by this same program.
struct NodeProcess(Child);

impl NodeProcess {
    fn start(server: &EtcdServer) -> Self {
        let test = "registry::etcd::a_node_in_a_process_of_its_own";
        let child = Command::new(std::env::current_exe().unwrap())
            .args([test, "--exact", "--ignored", "--nocapture"])
            .env(CHILD_REGISTRY, server.url())
            .stdin(Stdio::piped())
            .spawn();
        Self(child.unwrap())
    }

    fn hold(&self) -> HeldProcess {
        HeldProcess::new(self.0.id())
    }

    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for NodeProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "run by tests that kill it"]
async fn a_node_in_a_process_of_its_own() {
    let Ok(url) = std::env::var(CHILD_REGISTRY) else {
        return;
    };
    let _member = decode(&url, "decode-child");
    // The process ends when the parent has gone.
    let wait = || std::io::stdin().read(&mut [0]);
    let _ = tokio::task::spawn_blocking(wait).await;
}
