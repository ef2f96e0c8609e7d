//! Nodes behind a Kubernetes service, against the part of the API that lists them.

use serde_json::{Value, json};

use crate::registry::fleet::{greet, instances, is_healthy, observer, peer_id, record, until};
use crate::registry::kubernetes_api::KubernetesApi;

fn slice(name: &str, endpoints: Vec<Value>) -> Value {
    json!({
        "metadata": { "name": name },
        "addressType": "IPv4",
        "endpoints": endpoints,
        "ports": [
            { "name": "http", "port": 8000 },
            { "name": "session", "port": 9000, "protocol": "TCP" },
        ],
    })
}

fn endpoint(pod: &str, address: &str, conditions: Value) -> Value {
    json!({
        "addresses": [address],
        "conditions": conditions,
        "targetRef": { "kind": "Pod", "name": pod },
    })
}

fn ready(pod: &str, address: &str) -> Value {
    endpoint(
        pod,
        address,
        json!({ "ready": true, "serving": true, "terminating": false }),
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_come_and_go() {
    let api = KubernetesApi::start().await;
    let starting = json!({ "ready": false, "serving": false, "terminating": false });
    let unknown = json!({});
    let first = vec![
        ready("pod-1", "10.0.0.1"),
        endpoint("pod-2", "10.0.0.2", starting),
        endpoint("pod-3", "fd00::3", unknown),
    ];
    api.set_slices(vec![slice("a", first), slice("b", vec![])]);
    let registry = observer(&api.url());
    until(vec!["pod-1".to_owned(), "pod-3".to_owned()], || {
        instances(&registry)
    })
    .await;
    let address = |pod: &str| record(&registry, pod).unwrap().session_address;
    assert_eq!(address("pod-1"), "10.0.0.1:9000");
    assert_eq!(address("pod-3"), "[fd00::3]:9000");
    let life = greet(&registry, "pod-1");

    until(1, || api.num_watchers()).await;
    api.tell("ADDED", slice("b", vec![ready("pod-4", "10.0.0.4")]));
    until(3, || instances(&registry).len()).await;
    let leaving = json!({ "ready": false, "serving": true, "terminating": true });
    let changed = vec![
        ready("pod-1", "10.0.0.1"),
        endpoint("pod-3", "fd00::3", leaving),
    ];
    api.tell("MODIFIED", slice("a", changed));
    until(true, || record(&registry, "pod-3").unwrap().is_draining).await;
    api.tell(
        "BOOKMARK",
        json!({ "metadata": { "resourceVersion": "7" } }),
    );
    api.tell("DELETED", slice("b", vec![]));
    until(vec!["pod-1".to_owned(), "pod-3".to_owned()], || {
        instances(&registry)
    })
    .await;
    assert_eq!(peer_id(&registry, "pod-1"), Some(life));

    let list = "/apis/discovery.k8s.io/v1/namespaces/serving/endpointslices\
                ?labelSelector=kubernetes.io%2Fservice-name%3Ddecode";
    let watch = format!("{list}&watch=1&timeoutSeconds=600&resourceVersion=1");
    assert_eq!(api.paths(), [list, &watch]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watch_that_is_too_old_begins_anew() {
    let api = KubernetesApi::start().await;
    api.set_slices(vec![slice("a", vec![ready("pod-1", "10.0.0.1")])]);
    let registry = observer(&api.url());
    until(vec!["pod-1".to_owned()], || instances(&registry)).await;
    until(1, || api.num_watchers()).await;
    // Only the next list shows changes from the meantime.
    api.set_slices(vec![slice("a", vec![ready("pod-2", "10.0.0.2")])]);
    api.tell("ERROR", json!({ "kind": "Status", "code": 410 }));
    until(vec!["pod-2".to_owned()], || instances(&registry)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_api_that_refuses_takes_no_node_away() {
    let api = KubernetesApi::start().await;
    api.set_slices(vec![slice("a", vec![ready("pod-1", "10.0.0.1")])]);
    let registry = observer(&api.url());
    until(vec!["pod-1".to_owned()], || instances(&registry)).await;
    let life = greet(&registry, "pod-1");
    until(1, || api.num_watchers()).await;
    api.refuse(true);
    let num_paths = api.paths().len();
    until(true, || api.paths().len() >= num_paths + 3).await;
    assert!(is_healthy(&registry, life));
    api.set_slices(vec![slice(
        "a",
        vec![ready("pod-1", "10.0.0.1"), ready("pod-2", "10.0.0.2")],
    )]);
    api.refuse(false);
    until(2, || instances(&registry).len()).await;
    assert_eq!(peer_id(&registry, "pod-1"), Some(life));
}
