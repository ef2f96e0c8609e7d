//! Lost connections and processes.

use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use corella_cluster::transport::{FRAME_BYTES, LoadFailure, LoadStatus, SendStatus};
use corella_test::wait_until;

use crate::proxy::Proxy;
use crate::transport::fixture::{
    FAILED_CONNECT_TIME, ReceivingNode, SendingNode, assert_not_before, geometry, key, loopback,
    page_ids, wait, wait_for_bytes, wait_for_status, whole,
};

const NUM_PAGES: u32 = 64;
const NUM_ROWS: u32 = NUM_PAGES * 16;

#[test]
fn a_connection_cut_in_a_frame_fails_its_loads_and_the_next_one_works() {
    let geometry = geometry(4, 16, 2 * NUM_PAGES);
    let node = SendingNode::new(geometry.clone());
    let other = ReceivingNode::new(geometry);
    let proxy = Proxy::new(node.address);
    let table = page_ids(0..NUM_PAGES);
    let status = node.export_whole(&key(1), &table, NUM_ROWS);
    // Two greetings, a whole frame and a part of the next one.
    proxy.allow(64 + 64 + (64 << 10) + 16 + 3000);
    let load = other.load(&key(1), proxy.address, 0, NUM_ROWS, &table);
    wait_for_bytes(&load);
    proxy.cut();
    assert_eq!(wait(&load), LoadStatus::Failed(LoadFailure::ConnectionLost));
    other.fill(&table, 0x11);
    wait_for_status(&status, SendStatus::Stopped);
    wait_until("both ends are closed", || {
        node.sender.stats().num_connections == 0
    });
    other.assert_filled(&table, 0x11);

    proxy.allow_all();
    let again = other.load(&key(1), proxy.address, 0, NUM_ROWS, &table);
    assert_eq!(wait(&again), LoadStatus::Done { num_rows: NUM_ROWS });
    other.assert_holds(&key(1), &table, 0);
}

#[test]
fn connections_are_there_before_loads_and_come_back() {
    let geometry = geometry(1, 16, 8);
    let node = SendingNode::new(geometry.clone());
    let other = ReceivingNode::new(geometry);
    let proxy = Proxy::new(node.address);
    proxy.allow_all();
    let num_connections = || node.sender.stats().num_connections;
    let table = page_ids(0..2);
    for uuid in 0..3 {
        let num_delivered = proxy.num_delivered();
        // Repeated calls change nothing: there are two connections.
        for _ in 0..10 {
            other.receiver.expect_loads(&proxy.address.into());
        }
        wait_until("they are made", || num_connections() == 2);
        // A receiver without a greeting would connect again by itself.
        let num_greetings = 2 * FRAME_BYTES as u64;
        wait_until("they have greetings", || {
            proxy.num_delivered() >= num_delivered + num_greetings
        });
        node.export_whole(&key(uuid), &table, 32);
        let load = other.load(&key(uuid), proxy.address, 0, 32, &table);
        assert_eq!(wait(&load), LoadStatus::Done { num_rows: 32 });
        assert_eq!(num_connections(), 2);
        proxy.cut();
        wait_until("they are lost", || num_connections() == 0);
    }
}

/// An idle connection may have died unnoticed. A load that has received no rows gets another connection.
#[test]
fn a_load_that_meets_a_dead_connection_has_another() {
    let geometry = geometry(1, 16, 8);
    let node = SendingNode::new(geometry.clone());
    let other = ReceivingNode::configured(geometry, |config| config.connections_per_peer = 1);
    let proxy = Proxy::new(node.address);
    let table = page_ids(0..2);
    let status = node.export_whole(&key(1), &table, 32);
    // The greeting comes, and no row.
    proxy.allow(FRAME_BYTES as u64);
    let load = other.load(&key(1), proxy.address, 0, 32, &table);
    wait_for_status(&status, SendStatus::Sent);
    proxy.cut();
    proxy.allow_all();
    assert_eq!(wait(&load), LoadStatus::Done { num_rows: 32 });
    other.assert_holds(&key(1), &table, 0);
    wait_for_status(&status, SendStatus::Received);
}

#[test]
fn where_no_node_listens_a_load_fails_after_few_attempts() {
    let connect_timeout = Duration::from_millis(100);
    let other = ReceivingNode::configured(geometry(1, 16, 8), |config| {
        config.connect_timeout = connect_timeout;
    });
    let nobody = {
        let listener = TcpListener::bind(loopback(0)).unwrap();
        listener.local_addr().unwrap()
    };
    let began_at = Instant::now();
    let load = other.load(&key(1), nobody, 0, 32, &page_ids(0..2));
    let status = wait(&load);
    let LoadStatus::Failed(LoadFailure::Unreachable(reason)) = status else {
        panic!("{status:?}");
    };
    assert!(
        reason.contains(&nobody.to_string()) && reason.contains("refused"),
        "{reason}"
    );
    // The peer may be about to listen, so each of three attempts is followed by a pause.
    assert_not_before(began_at + 3 * connect_timeout, "the load failed");
}

/// The peer accepts, like a stopped process, and stays silent.
#[test]
fn whoever_does_not_greet_is_given_up() {
    let other = ReceivingNode::configured(geometry(1, 16, 8), |config| {
        config.connect_timeout = Duration::from_millis(100);
    });
    let silent = TcpListener::bind(loopback(0)).unwrap();
    let address = silent.local_addr().unwrap();
    let load = other.load(&key(1), address, 0, 32, &page_ids(0..2));
    let status = wait(&load);
    assert!(
        matches!(status, LoadStatus::Failed(LoadFailure::Unreachable(_))),
        "{status:?}"
    );
    // Counts the attempts.
    silent.set_nonblocking(true).unwrap();
    assert_eq!(silent.incoming().map_while(Result::ok).count(), 3);
}

/// Not a test: the process that the next test kills. It prints its port and sends only the first
/// rows.
#[test]
#[ignore = "run by the next test"]
fn process_that_sends() {
    let node = SendingNode::new(geometry(4, 16, 2 * NUM_PAGES));
    let table = page_ids(0..NUM_PAGES);
    node.fill(&key(1), &table);
    node.export(&key(1), NUM_ROWS);
    node.sender.add_pages(&key(1), &whole(&table));
    node.sender.handle_rows_readable(&key(1), 0..2, NUM_ROWS);
    println!("\nport {}", node.address.port());
    std::io::stdin().read_exact(&mut [0]).ok();
}

#[test]
fn a_sender_that_is_killed_fails_its_loads_before_their_deadline() {
    let mut process = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "transport::loss::process_that_sends",
            "--ignored",
            "--nocapture",
        ])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(process.stdout.take().unwrap()).lines();
    let port = lines
        .map(Result::unwrap)
        .find_map(|line| line.strip_prefix("port ")?.parse().ok())
        .expect("it says its port");
    let other = ReceivingNode::configured(geometry(4, 16, 2 * NUM_PAGES), |config| {
        config.connect_timeout = FAILED_CONNECT_TIME;
    });
    let tables = [page_ids(0..NUM_PAGES), page_ids(NUM_PAGES..2 * NUM_PAGES)];
    let load = other.load(&key(1), loopback(port), 0, NUM_ROWS, &tables[0]);
    // This session is never stored.
    let waiting = other.load(&key(2), loopback(port), 0, NUM_ROWS, &tables[1]);
    wait_until("two layers", || {
        load.account().num_pages == 2 * u64::from(NUM_PAGES)
    });
    process.kill().unwrap();
    process.wait().unwrap();
    assert_eq!(wait(&load), LoadStatus::Failed(LoadFailure::ConnectionLost));
    // The load tries to connect again, in vain.
    let status = wait(&waiting);
    assert!(
        matches!(status, LoadStatus::Failed(LoadFailure::Unreachable(_))),
        "{status:?}"
    );
    assert_eq!(other.receiver.stats().num_loads, 0);
}
