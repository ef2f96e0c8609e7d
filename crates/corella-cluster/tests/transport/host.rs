//! Two processes on one host: rows are copied from memory to memory.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use corella_cluster::transport::{
    FRAME_BYTES, Frame, Hello, LoadFailure, LoadStatus, PageRun, PeerAddress, SendStatus, Trailer,
};
use xxhash_rust::xxh3::xxh3_64;

use crate::fixture::{
    LONG, MODEL, PREFILL, ReceivingNode, SendingNode, content, geometry, key, page_ids, until,
    wait, wait_for,
};
use crate::raw_peer::run;

const NUM_PAGES: u32 = 64;
const NUM_ROWS: u32 = NUM_PAGES * 16 - 5;

fn socket_path(name: &str) -> PathBuf {
    let process = std::process::id();
    std::env::temp_dir().join(format!("corella-kv-{process}-{name}"))
}

fn sending_node(path: &Path) -> SendingNode {
    let node = SendingNode::new(geometry(3, 16, 2 * NUM_PAGES));
    let address = PeerAddress::from(path.to_path_buf());
    assert_eq!(node.sender.listen(address.clone()).unwrap(), address);
    node
}

/// Not a test: the process whose memory the next one reads.
#[test]
#[ignore = "run by the next test"]
fn process_that_stores() {
    let path = std::env::var_os("CORELLA_TEST_SOCKET").expect("a path");
    let node = sending_node(path.as_ref());
    for uuid in [1, 2] {
        let first = uuid as u32 * 7;
        node.store_whole(&key(uuid), &page_ids(first..first + NUM_PAGES), NUM_ROWS);
    }
    println!("\nready");
    std::io::stdin().read_exact(&mut [0]).ok();
}

#[test]
fn rows_come_from_the_memory_of_another_process() {
    let path = socket_path("process");
    let mut process = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "host::process_that_stores",
            "--ignored",
            "--nocapture",
        ])
        .env("CORELLA_TEST_SOCKET", &path)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap() == "ready"));
    let other = ReceivingNode::new(geometry(3, 16, 2 * NUM_PAGES));
    let everywhere = page_ids(0..2 * NUM_PAGES);
    other.fill(&everywhere, 0xcc);
    let to = page_ids((0..NUM_PAGES).map(|page| 2 * page));
    // Session 2 was stored last, and where both are is its content.
    let mut load = other.load(&key(2), path.clone(), 32, NUM_ROWS, &to);
    assert_eq!(wait(&mut load), LoadStatus::Done { num_rows: NUM_ROWS });
    other.assert_holds(&key(2), &to, 2);
    let others: Vec<_> = everywhere
        .into_iter()
        .filter(|page| !to[2..].contains(page))
        .collect();
    other.assert_filled(&others, 0xcc);
    assert_eq!(load.account().num_pages, 3 * u64::from(NUM_PAGES - 2));

    let mut waiting = other.load(&key(3), path, 0, NUM_ROWS, &to);
    process.kill().unwrap();
    process.wait().unwrap();
    let status = wait(&mut waiting);
    assert!(
        matches!(status, LoadStatus::Failed(LoadFailure::Unreachable(_))),
        "{status:?}"
    );
}

#[test]
fn a_socket_file_lives_as_long_as_its_sender() {
    let path = socket_path("file");
    // One that a killed process has left behind.
    drop(UnixListener::bind(&path).unwrap());
    let node = sending_node(&path);
    let table = page_ids(0..NUM_PAGES);
    let mut status = node.store_whole(&key(1), &table, NUM_ROWS);
    let other = ReceivingNode::new(geometry(3, 16, 2 * NUM_PAGES));
    let mut load = other.load(&key(1), path.clone(), 0, NUM_ROWS, &table);
    assert_eq!(wait(&mut load), LoadStatus::Done { num_rows: NUM_ROWS });
    other.assert_holds(&key(1), &table, 0);
    wait_for(&mut status, SendStatus::Received);
    // Where somebody listens there is no room.
    let second = SendingNode::new(geometry(3, 16, 2 * NUM_PAGES));
    assert!(second.sender.listen(path.clone()).is_err());
    drop(node);
    until("the file is gone", || !path.exists());
}

/// A sender on this host that says where pages are as the test says.
struct Scene {
    other: ReceivingNode,
    path: PathBuf,
    listener: UnixListener,
}

impl Scene {
    fn new(name: &str) -> Self {
        let path = socket_path(name);
        std::fs::remove_file(&path).ok();
        let other = ReceivingNode::configured(geometry(1, 16, 8), |config| {
            config.connections_per_peer = 1;
            config.num_connect_attempts = 1;
        });
        other.fill(&page_ids(0..8), 0xaa);
        let listener = UnixListener::bind(&path).unwrap();
        Self {
            other,
            path,
            listener,
        }
    }

    fn greet(&self, memory: &Frame) -> UnixStream {
        let (mut stream, _) = self.listener.accept().unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        assert!(matches!(receive(&mut stream), Frame::Hello(_)));
        let hello = Hello::new(PREFILL, MODEL, &geometry(1, 16, 8));
        stream.write_all(&Frame::Hello(hello).encode()).unwrap();
        stream.write_all(&memory.encode()).unwrap();
        stream
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        std::fs::remove_file(&self.path).ok();
    }
}

fn receive(stream: &mut UnixStream) -> Frame {
    let mut bytes = [0; FRAME_BYTES];
    stream.read_exact(&mut bytes).unwrap();
    Frame::decode(&bytes).unwrap()
}

#[test]
fn a_memory_that_cannot_be_read_is_said_before_any_load() {
    let scene = Scene::new("unreadable");
    let word = 0x1122_3344_u64;
    let address = std::ptr::from_ref(&word).addr() as u64;
    for (address, content) in [(0, 0), (address, word + 1)] {
        let table = page_ids(0..2);
        let mut load = scene.other.load(&key(1), scene.path.clone(), 0, 32, &table);
        let _stream = scene.greet(&Frame::Memory { address, content });
        let status = wait(&mut load);
        let LoadStatus::Failed(LoadFailure::Unreachable(reason)) = status else {
            panic!("{status:?}");
        };
        assert!(reason.contains("the same user"), "{reason}");
    }
}

/// The first load's places hold something else by the time they are read, or nothing: it fails alone.
/// Places that do not fit the pages end the connection.
#[test]
fn wrong_places_fail_their_load() {
    let scene = Scene::new("places");
    let word = 0x1122_3344_u64;
    let address = std::ptr::from_ref(&word).addr() as u64;
    let page: Vec<u8> = (0..8192).map(content(&key(1), 0, 0)).collect();
    let checksum = xxh3_64(&page);
    let at_page = page.as_ptr().addr() as u64;
    let load = |page: u32| {
        let table = page_ids([page]);
        scene.other.load(&key(1), scene.path.clone(), 0, 16, &table)
    };
    let mut loads = vec![load(0)];
    let mut stream = scene.greet(&Frame::Memory {
        address,
        content: word,
    });
    loads.extend((1..4).map(load));
    let mut ids = Vec::new();
    while ids.len() < 4 {
        if let Frame::Load(frame) = receive(&mut stream) {
            ids.push(frame.load_id);
        }
    }
    ids.sort_unstable();
    let mut send = |load_id, places: &[(u64, u64)], checksum| {
        let frame = Frame::Data(PageRun {
            num_places: places.len() as u32,
            ..run(load_id, 0, 0, 16)
        });
        let mut bytes = frame.encode().to_vec();
        for (address, num_bytes) in places {
            bytes.extend(address.to_le_bytes());
            bytes.extend(num_bytes.to_le_bytes());
        }
        bytes.extend(Trailer::Whole { checksum }.encode());
        stream.write_all(&bytes).unwrap();
    };
    send(ids[0], &[(at_page, 8192)], checksum ^ 1);
    send(ids[1], &[(16, 8192)], checksum);
    // In two parts, as a page may lie.
    send(ids[2], &[(at_page, 1000), (at_page + 1000, 7192)], checksum);
    let num_rows = 16;
    let frame = Frame::Complete {
        load_id: ids[2],
        num_rows,
    };
    let corrupt = LoadStatus::Failed(LoadFailure::Corrupt);
    assert_eq!(wait(&mut loads[0]), corrupt);
    assert_eq!(wait(&mut loads[1]), corrupt);
    send_frame(&mut stream, &frame);
    assert_eq!(wait(&mut loads[2]), LoadStatus::Done { num_rows });
    scene.other.assert_holds(&key(1), &page_ids([2]), 0);

    let bytes = [
        Frame::Data(PageRun {
            num_places: 1,
            ..run(ids[3], 0, 0, 16)
        })
        .encode()
        .to_vec(),
        [at_page.to_le_bytes(), 9000u64.to_le_bytes()].concat(),
        Trailer::Whole { checksum }.encode().to_vec(),
    ];
    stream.write_all(&bytes.concat()).unwrap();
    let failure = LoadFailure::Violation("places of another size than the pages");
    assert_eq!(wait(&mut loads[3]), LoadStatus::Failed(failure));
    scene.other.assert_filled(&page_ids([3, 4, 5, 6, 7]), 0xaa);
}

fn send_frame(stream: &mut UnixStream, frame: &Frame) {
    stream.write_all(&frame.encode()).unwrap();
}
