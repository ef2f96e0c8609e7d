//! Nodes in a folder.

use std::fs;
use std::time::Duration;

use corella_cluster::Role;

use crate::registry::fleet::{
    TestFolder, a_draining_node_is_chosen_no_more, decode, greet, instances, is_healthy, node,
    peer_id, prefill, record, until,
};

fn url(folder: &TestFolder) -> String {
    format!("file:{}", folder.0.join("nodes").display())
}

/// Waits until a node has read its folder anew: a node touches its own file before each read.
async fn until_read(folder: &TestFolder, instance_id: &str) {
    let file = folder.0.join(format!("nodes/{instance_id}.json"));
    let touched_at = || fs::metadata(&file).and_then(|it| it.modified()).ok();
    // The second touch shows that the read after the first one has been processed.
    for _ in 0..2 {
        let before = touched_at();
        until(true, || touched_at().is_some() && touched_at() != before).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_find_each_other() {
    let folder = TestFolder::new("folder-find");
    let first = prefill(&url(&folder), "prefill-1");
    let second = decode(&url(&folder), "decode-1");
    until(vec!["decode-1".to_owned()], || instances(&first)).await;
    until(vec!["prefill-1".to_owned()], || instances(&second)).await;

    let mut own = node("decode-1", Role::Decode);
    own.is_draining = true;
    second.publish(own.clone()).unwrap();
    until(Some(own), || record(&first, "decode-1")).await;

    let _third = decode(&url(&folder), "decode-3");
    until(2, || instances(&first).len()).await;
    second.deregister(Duration::from_mins(5)).await.unwrap();
    assert!(!folder.0.join("nodes/decode-1.json").exists());
    until(vec!["decode-3".to_owned()], || instances(&first)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_drains_is_chosen_no_more() {
    let folder = TestFolder::new("folder-drain");
    a_draining_node_is_chosen_no_more(&url(&folder)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_without_heartbeat_is_gone() {
    let folder = TestFolder::new("folder-stale");
    let first = prefill(&url(&folder), "prefill-1");
    let second = decode(&url(&folder), "decode-1");
    let _third = decode(&url(&folder), "decode-3");
    until(2, || instances(&first).len()).await;
    drop(second);
    until(vec!["decode-3".to_owned()], || instances(&first)).await;
    // The lost node's file stays, and newcomers ignore it.
    assert!(folder.0.join("nodes/decode-1.json").exists());
    let later = prefill(&url(&folder), "prefill-2");
    until(true, || !instances(&later).is_empty()).await;
    assert_eq!(instances(&later), ["decode-3"]);
    // The same node, restarted.
    let _second = decode(&url(&folder), "decode-1");
    until(2, || instances(&first).len()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_folder_that_was_cleaned_fills_again() {
    let folder = TestFolder::new("folder-cleaned");
    let first = prefill(&url(&folder), "prefill-1");
    let second = decode(&url(&folder), "decode-1");
    until(vec!["decode-1".to_owned()], || instances(&first)).await;
    let life = greet(&first, "decode-1");
    fs::remove_dir_all(folder.0.join("nodes")).unwrap();
    until(true, || folder.0.join("nodes/decode-1.json").exists()).await;
    until_read(&folder, "prefill-1").await;
    assert_eq!(peer_id(&first, "decode-1"), Some(life));
    assert!(second.is_published());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_folder_that_cannot_be_read_takes_no_node_away() {
    let folder = TestFolder::new("folder-outage");
    let nodes = folder.0.join("nodes");
    let first = prefill(&url(&folder), "prefill-1");
    let _second = decode(&url(&folder), "decode-1");
    until(vec!["decode-1".to_owned()], || instances(&first)).await;
    let life = greet(&first, "decode-1");
    let elsewhere = TestFolder::new("folder-no-outage");
    let reader = prefill(&url(&elsewhere), "prefill-9");
    let _stays = decode(&url(&elsewhere), "decode-8");
    let lost = decode(&url(&elsewhere), "decode-9");
    until(2, || instances(&reader).len()).await;

    fs::rename(&nodes, folder.0.join("away")).unwrap();
    fs::write(&nodes, "a file where the folder was").unwrap();
    // If the folder can be read, a node that is lost now disappears after a while.
    drop(lost);
    until(vec!["decode-8".to_owned()], || instances(&reader)).await;
    assert!(is_healthy(&first, life));

    fs::remove_file(&nodes).unwrap();
    until(true, || nodes.join("decode-1.json").exists()).await;
    until_read(&folder, "prefill-1").await;
    assert!(is_healthy(&first, life));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_record_hides_no_node() {
    let folder = TestFolder::new("folder-junk");
    let nodes = folder.0.join("nodes");
    fs::create_dir_all(nodes.join("folder.json")).unwrap();
    let record = |id: &str| format!(r#"{{"instance_id": "{id}", "session_address": "h:1"}}"#);
    fs::write(
        nodes.join("half.json"),
        "{\"instance_id\": \"half\", \"sess",
    )
    .unwrap();
    fs::write(nodes.join("empty.json"), "").unwrap();
    fs::write(nodes.join("other.json"), record("another")).unwrap();
    fs::write(nodes.join("long.json"), "x".repeat(1 << 20)).unwrap();
    fs::write(nodes.join("notes.txt"), record("notes")).unwrap();
    fs::write(nodes.join(".draft.json"), record(".draft")).unwrap();
    fs::write(nodes.join("good.json"), record("good")).unwrap();
    let first = prefill(&url(&folder), "prefill-1");
    let _second = decode(&url(&folder), "decode-1");
    let both = ["decode-1", "good"].map(String::from);
    until(both.to_vec(), || instances(&first)).await;
}
