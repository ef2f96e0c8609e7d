//! Rows between nodes that trust one authority, and none between other nodes.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use corella_cluster::transport::{LoadFailure, LoadStatus, SendStatus};
use corella_cluster::{ClusterTls, TlsFiles};
use corella_test::wait_until;

use crate::proxy::Proxy;
use crate::transport::fixture::{
    FAILED_CONNECT_TIME, READ_TIMEOUT, ReceivingNode, SendingNode, geometry, key, page_ids, wait,
    wait_for_status,
};

/// A folder in which openssl issues certificates.
struct Authority(PathBuf);

impl Drop for Authority {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).ok();
    }
}

const NEW_KEY: &str = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";

impl Authority {
    fn new(name: &str) -> Self {
        let folder = format!("corella-tls-{}-{name}", std::process::id());
        let folder = std::env::temp_dir().join(folder);
        fs::create_dir_all(&folder).unwrap();
        openssl(
            &folder,
            &format!("req -x509 {NEW_KEY} -days 2 -subj /CN={name} -keyout ca.key -out ca.pem"),
        );
        Self(folder)
    }

    /// Issues the files of a node whose certificate names `san` and is valid for this many days.
    fn issue(&self, node: &str, san: &str, days: i32) -> TlsFiles {
        let subject = format!("-subj /CN={node} -keyout {node}.key -out {node}.csr");
        openssl(&self.0, &format!("req -new {NEW_KEY} {subject}"));
        fs::write(self.0.join("ext"), format!("subjectAltName={san}\n")).unwrap();
        openssl(
            &self.0,
            &format!(
                "x509 -req -in {node}.csr -days {days} -extfile ext -CA ca.pem -CAkey ca.key \
                 -CAcreateserial -out {node}.pem"
            ),
        );
        TlsFiles {
            cert: self.0.join(format!("{node}.pem")),
            key: self.0.join(format!("{node}.key")),
            ca: self.0.join("ca.pem"),
        }
    }

    fn tls(&self, node: &str) -> Option<ClusterTls> {
        let files = self.issue(node, "IP:127.0.0.1,DNS:localhost", 2);
        Some(ClusterTls::load(&files, "127.0.0.1").unwrap())
    }
}

fn openssl(folder: &Path, arguments: &str) {
    let mut command = Command::new("openssl");
    command.current_dir(folder).args(arguments.split(' '));
    let output = command
        .output()
        .expect("openssl is there; cargo xtask set-up installs it");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "openssl {arguments}: {error}");
}

#[test]
fn rows_arrive_as_they_were_and_no_other_can_read_them() {
    let authority = Authority::new("round-trip");
    // Pages of 128 KB, so that a page has many records and a chunk many pages.
    let geometry = geometry(3, 256, 40);
    let node = SendingNode::configured(geometry.clone(), |config| {
        config.chunk_bytes = 1 << 20;
        config.tls = authority.tls("prefill");
    });
    let other = ReceivingNode::configured(geometry, |config| {
        config.tls = authority.tls("decode");
    });
    let proxy = Proxy::new(node.address);
    let (from, to) = (page_ids(0..20), page_ids((0..20).map(|i| 39 - i)));
    let status = node.export_whole(&key(1), &from, 5000);
    // The sender's socket fills, so that records go out in parts.
    proxy.allow(200_000);
    let load = other.load(&key(1), proxy.address, 0, 5000, &to);
    wait_until("the sender is held up", || proxy.num_forwarded() == 200_000);
    proxy.allow_all();
    assert_eq!(wait(&load), LoadStatus::Done { num_rows: 5000 });
    other.assert_holds(&key(1), &to, 0);
    wait_for_status(&status, SendStatus::Received);
    // A name is looked up, and must be in the certificate as well.
    let by_name = format!("localhost:{}", node.address.port());
    let by_name: corella_cluster::transport::PeerAddress = by_name.parse().unwrap();
    let load = other.load(&key(1), by_name, 0, 5000, &to);
    assert_eq!(wait(&load), LoadStatus::Done { num_rows: 5000 });
}

/// A peer without a certificate, or with an unsuitable one, gets no rows, and the sender continues.
#[test]
fn strangers_get_nothing() {
    let (authority, other) = (Authority::new("own"), Authority::new("foreign"));
    let geometry = geometry(2, 16, 8);
    let node = SendingNode::configured(geometry.clone(), |config| {
        config.tls = authority.tls("prefill");
    });
    node.export_whole(&key(1), &page_ids(0..2), 20);
    for tls in [None, other.tls("stranger")] {
        let receiver = ReceivingNode::configured(geometry.clone(), |config| {
            config.tls = tls;
            config.num_connect_attempts = 1;
            config.connect_timeout = FAILED_CONNECT_TIME;
        });
        let load = receiver.load(&key(1), node.address, 0, 20, &page_ids(4..6));
        let status = wait(&load);
        assert!(
            matches!(status, LoadStatus::Failed(LoadFailure::Unreachable(_))),
            "{status:?}"
        );
    }
    // A peer that knows the protocol but not TLS gets no rows either.
    let mut plain = TcpStream::connect(node.address).unwrap();
    plain.set_read_timeout(Some(READ_TIMEOUT)).unwrap();
    plain
        .write_all(b"CKVT greetings, and more than a record's head")
        .unwrap();
    let mut answer = Vec::new();
    let _ = plain.read_to_end(&mut answer);
    // At most an alert: kind, version and length of a record, then level and description.
    assert!(answer.len() <= 7, "{answer:?}");
    wait_until("no connection is left", || {
        node.sender.stats().num_connections == 0
    });
    let receiver = ReceivingNode::configured(geometry, |config| {
        config.tls = authority.tls("decode");
    });
    let load = receiver.load(&key(1), node.address, 0, 20, &page_ids(4..6));
    assert_eq!(wait(&load), LoadStatus::Done { num_rows: 20 });
}

#[test]
fn a_sender_must_have_the_name_by_which_it_is_reached() {
    let authority = Authority::new("name");
    let geometry = geometry(1, 16, 8);
    let elsewhere = authority.issue("elsewhere", "DNS:elsewhere.test", 2);
    let node = SendingNode::configured(geometry.clone(), |config| {
        config.tls = Some(ClusterTls::load(&elsewhere, "elsewhere.test").unwrap());
    });
    node.export_whole(&key(1), &page_ids(0..2), 20);
    let receiver = ReceivingNode::configured(geometry, |config| {
        config.tls = authority.tls("decode");
        config.num_connect_attempts = 1;
        config.connect_timeout = FAILED_CONNECT_TIME;
    });
    let load = receiver.load(&key(1), node.address, 0, 20, &page_ids(4..6));
    assert!(matches!(wait(&load), LoadStatus::Failed(_)));
}

#[test]
fn renewed_files_are_used_for_new_connections() {
    let (old, new) = (Authority::new("old"), Authority::new("new"));
    let geometry = geometry(1, 16, 8);
    let mut files = old.issue("node", "IP:127.0.0.1", 2);
    files.ca = old.0.join("node-ca.pem");
    fs::copy(old.0.join("ca.pem"), &files.ca).unwrap();
    let tls = ClusterTls::load(&files, "127.0.0.1").unwrap();
    let node = SendingNode::configured(geometry.clone(), |config| {
        config.tls = Some(tls.clone());
    });
    let mut uuid = 0;
    // `None` when the machine was too busy for an answer.
    let mut try_load = |authority: &Authority| {
        uuid += 1;
        node.export_whole(&key(uuid), &page_ids(0..2), 20);
        let receiver = ReceivingNode::configured(geometry.clone(), |config| {
            config.tls = authority.tls("decode");
            config.num_connect_attempts = 1;
            config.connect_timeout = FAILED_CONNECT_TIME;
        });
        let load = receiver.load(&key(uuid), node.address, 0, 20, &page_ids(4..6));
        match wait(&load) {
            LoadStatus::Done { num_rows: 20 } => Some(true),
            LoadStatus::Failed(LoadFailure::Unreachable(reason)) => {
                (!reason.contains("does not answer")).then_some(false)
            }
            status => panic!("{status:?}"),
        }
    };
    let mut is_served = |authority| corella_test::wait_for("an answer", || try_load(authority));
    assert!(is_served(&old) && !is_served(&new));
    assert!(!tls.reload().unwrap(), "nothing has changed");
    let renewed = new.issue("renewed", "IP:127.0.0.1", 2);
    fs::copy(&renewed.cert, &files.cert).unwrap();
    let error = tls.reload().unwrap_err().to_string();
    assert!(error.contains("does not come from"), "{error}");
    assert!(is_served(&old) && !is_served(&new));
    fs::copy(&renewed.key, &files.key).unwrap();
    fs::copy(&renewed.ca, &files.ca).unwrap();
    assert!(tls.reload().unwrap());
    assert!(is_served(&new) && !is_served(&old));
    assert!(!tls.reload().unwrap(), "nothing has changed since");
}

#[test]
fn files_that_other_nodes_would_refuse_are_refused_at_the_start() {
    let (authority, other) = (Authority::new("files"), Authority::new("other"));
    let good = authority.issue("good", "IP:127.0.0.1", 2);
    let load = |files: &TlsFiles| match ClusterTls::load(files, "127.0.0.1") {
        Ok(_) => String::new(),
        Err(error) => error.to_string(),
    };
    assert_eq!(load(&good), "");
    let expired = authority.issue("expired", "IP:127.0.0.1", -1);
    assert!(load(&expired).ends_with("has expired: renew it"));
    let renamed = authority.issue("renamed", "IP:10.0.0.1", 2);
    assert!(load(&renamed).contains("does not name 127.0.0.1"));
    let foreign = TlsFiles {
        ca: other.0.join("ca.pem"),
        ..good.clone()
    };
    assert!(load(&foreign).contains("does not come from --cluster-tls-ca"));
    let key_of_another = TlsFiles {
        key: expired.key,
        ..good.clone()
    };
    assert!(load(&key_of_another).contains("is not the key of --cluster-tls-cert"));
    let missing = TlsFiles {
        cert: authority.0.join("nowhere.pem"),
        ..good.clone()
    };
    assert!(load(&missing).starts_with("cannot read --cluster-tls-cert"));
    let swapped = TlsFiles {
        cert: good.key.clone(),
        ..good.clone()
    };
    assert!(load(&swapped).ends_with("contains no PEM certificate"));
    let swapped = TlsFiles {
        key: good.cert.clone(),
        ..good
    };
    assert!(load(&swapped).contains("contains no PEM private key"));
}
