//! Two processes on one host: rows are copied from memory to memory.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::process::{Command, Stdio};
use std::thread;

use corella_cluster::transport::{
    FRAME_BYTES, Frame, Hello, LoadFailure, LoadHandle, LoadStatus, PageRun, PathFrame, PathName,
    PeerAddress, SendStatus, Trailer,
};
use corella_core::PageId;
use corella_test::wait_until;
use xxhash_rust::xxh3::xxh3_64;

use crate::transport::fixture::{
    ARITHMETIC, DECODE, FAILED_CONNECT_TIME, MODEL, PREFILL, READ_TIMEOUT, ReceivingNode,
    SendingNode, content, geometry, key, page_ids, wait, wait_for_status,
};
use crate::transport::raw_peer::run;

const NUM_PAGES: u32 = 64;
const NUM_ROWS: u32 = NUM_PAGES * 16 - 5;

fn address_of(name: &str) -> PeerAddress {
    PeerAddress::Unix(format!("corella-kv-{}-{name}", std::process::id()))
}

/// Converts an address to the system's form.
fn system_address(address: &PeerAddress) -> SocketAddr {
    let PeerAddress::Unix(name) = address else {
        panic!("{address}");
    };
    SocketAddr::from_abstract_name(name).unwrap()
}

fn sending_node(address: &PeerAddress) -> SendingNode {
    let node = SendingNode::new(geometry(3, 16, 2 * NUM_PAGES));
    assert_eq!(node.sender.listen(address.clone()).unwrap(), *address);
    node
}

/// Not a test: the process whose memory the next test reads.
#[test]
#[ignore = "run by the next test"]
fn process_that_stores() {
    let name = std::env::var("CORELLA_TEST_SOCKET").expect("a socket's name");
    let node = sending_node(&PeerAddress::Unix(name));
    for uuid in [1, 2] {
        let first = uuid as u32 * 7;
        node.export_whole(&key(uuid), &page_ids(first..first + NUM_PAGES), NUM_ROWS);
    }
    println!("\nready");
    std::io::stdin().read_exact(&mut [0]).ok();
}

#[test]
fn rows_come_from_the_memory_of_another_process() {
    let name = format!("corella-kv-{}-process", std::process::id());
    let address = PeerAddress::Unix(name.clone());
    let mut process = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "transport::host::process_that_stores",
            "--ignored",
            "--nocapture",
        ])
        .env("CORELLA_TEST_SOCKET", &name)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap() == "ready"));
    let other = ReceivingNode::configured(geometry(3, 16, 2 * NUM_PAGES), |config| {
        // The process cannot be reached once it has been killed.
        config.connect_timeout = FAILED_CONNECT_TIME;
    });
    let everywhere = page_ids(0..2 * NUM_PAGES);
    other.fill(&everywhere, 0xcc);
    let to = page_ids((0..NUM_PAGES).map(|page| 2 * page));
    // Session 2 was stored last, so pages that both sessions share have its content.
    let load = other.load(&key(2), address.clone(), 32, NUM_ROWS, &to);
    assert_eq!(wait(&load), LoadStatus::Done { num_rows: NUM_ROWS });
    other.assert_holds(&key(2), &to, 2);
    let others: Vec<_> = everywhere
        .into_iter()
        .filter(|page| !to[2..].contains(page))
        .collect();
    other.assert_filled(&others, 0xcc);
    assert_eq!(load.account().num_pages, 3 * u64::from(NUM_PAGES - 2));

    let waiting = other.load(&key(3), address.clone(), 0, NUM_ROWS, &to);
    process.kill().unwrap();
    process.wait().unwrap();
    let status = wait(&waiting);
    assert!(
        matches!(status, LoadStatus::Failed(LoadFailure::Unreachable(_))),
        "{status:?}"
    );
    // A killed process leaves nothing behind: its socket's name is free.
    sending_node(&address);
}

#[test]
fn a_socket_lives_as_long_as_its_sender() {
    let address = address_of("socket");
    let node = sending_node(&address);
    let table = page_ids(0..NUM_PAGES);
    let status = node.export_whole(&key(1), &table, NUM_ROWS);
    let other = ReceivingNode::new(geometry(3, 16, 2 * NUM_PAGES));
    let load = other.load(&key(1), address.clone(), 0, NUM_ROWS, &table);
    assert_eq!(wait(&load), LoadStatus::Done { num_rows: NUM_ROWS });
    other.assert_holds(&key(1), &table, 0);
    wait_for_status(&status, SendStatus::Received);
    // A name in use cannot be taken again.
    let second = SendingNode::new(geometry(3, 16, 2 * NUM_PAGES));
    assert!(second.sender.listen(address.clone()).is_err());
    drop(node);
    wait_until("the name is free", || {
        second.sender.listen(address.clone()).is_ok()
    });
}

/// Runs `act` as another user, in a thread of its own.
fn as_another_user<T: Send>(act: impl FnOnce() -> T + Send) -> T {
    const NOBODY: libc::c_long = 65_534;
    thread::scope(|scope| {
        let thread = scope.spawn(|| {
            // SAFETY: calls with numbers. The system call itself, unlike the function of the C library,
            // changes the user of one thread only.
            unsafe {
                let changed = libc::syscall(libc::SYS_setresuid, NOBODY, NOBODY, NOBODY);
                assert_eq!(changed, 0, "only root can become another user");
                // A process that changes its user becomes unreadable, and other tests read its memory.
                libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0);
            }
            act()
        });
        thread.join().unwrap()
    })
}

fn is_root() -> bool {
    // SAFETY: a call without arguments.
    unsafe { libc::geteuid() == 0 }
}

/// Any process may listen where a node is expected. Its bytes are not even read.
#[test]
fn rows_are_not_loaded_from_another_users_process() {
    if !is_root() {
        eprintln!("not tested: only root can become another user");
        return;
    }
    let address = address_of("foreign-sender");
    let listener = as_another_user(|| UnixListener::bind_addr(&system_address(&address)).unwrap());
    let scene = Scene::listening(address, listener);
    let load = scene.load(&page_ids(0..2), 32);
    let status = wait(&load);
    let LoadStatus::Failed(LoadFailure::Unreachable(reason)) = status else {
        panic!("{status:?}");
    };
    assert!(reason.contains("another user's"), "{reason}");
}

/// Any process may connect to a node. It gets no answer.
#[test]
fn rows_are_not_sent_to_another_users_process() {
    if !is_root() {
        eprintln!("not tested: only root can become another user");
        return;
    }
    let address = address_of("foreign-receiver");
    let node = sending_node(&address);
    let connect = || UnixStream::connect_addr(&system_address(&address)).unwrap();
    let hello = Hello::new(DECODE, MODEL, ARITHMETIC, &geometry(3, 16, 2 * NUM_PAGES));
    let ask = |mut stream: UnixStream| {
        stream.set_read_timeout(Some(READ_TIMEOUT)).unwrap();
        // The other end may have closed the connection already.
        stream.write_all(&Frame::Hello(hello.clone()).encode()).ok();
        let mut bytes = [0; FRAME_BYTES];
        stream.read_exact(&mut bytes).is_ok()
    };
    assert!(ask(connect()), "this user is answered");
    assert!(!ask(as_another_user(connect)), "another user is not");
    wait_until("it is counted", || {
        node.sender.stats().num_refused_connections == 1
    });
}

/// A sender on this host that sends regions chosen by the test.
struct Scene {
    other: ReceivingNode,
    address: PeerAddress,
    listener: UnixListener,
}

impl Scene {
    fn new(name: &str) -> Self {
        let address = address_of(name);
        let listener = UnixListener::bind_addr(&system_address(&address)).unwrap();
        Self::listening(address, listener)
    }

    fn listening(address: PeerAddress, listener: UnixListener) -> Self {
        let other = ReceivingNode::configured(geometry(1, 16, 8), |config| {
            config.connections_per_peer = 1;
            config.num_connect_attempts = 1;
            config.connect_timeout = FAILED_CONNECT_TIME;
        });
        other.fill(&page_ids(0..8), 0xaa);
        Self {
            other,
            address,
            listener,
        }
    }

    fn load(&self, table: &[PageId], num_rows: u32) -> LoadHandle {
        let address = self.address.clone();
        self.other.load(&key(1), address, 0, num_rows, table)
    }

    /// Greets with the canary at an address of this process's memory.
    fn greet(&self, address: u64, content: u64) -> UnixStream {
        let (mut stream, _) = self.listener.accept().unwrap();
        stream.set_read_timeout(Some(READ_TIMEOUT)).unwrap();
        assert!(matches!(receive(&mut stream), Frame::Hello(_)));
        let hello = Hello::new(PREFILL, MODEL, ARITHMETIC, &geometry(1, 16, 8));
        stream.write_all(&Frame::Hello(hello).encode()).unwrap();
        let mut data = [0; 32];
        data[..8].copy_from_slice(&address.to_le_bytes());
        data[8..16].copy_from_slice(&content.to_le_bytes());
        let memory = PathFrame {
            data,
            ..PathFrame::named(PathName::new("shm"))
        };
        stream.write_all(&Frame::Path(memory).encode()).unwrap();
        stream
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
    let canary = 0x1122_3344_u64;
    let address = std::ptr::from_ref(&canary).addr() as u64;
    for (address, content) in [(0, 0), (address, canary + 1)] {
        let load = scene.load(&page_ids(0..2), 32);
        let _stream = scene.greet(address, content);
        let status = wait(&load);
        let LoadStatus::Failed(LoadFailure::Unreachable(reason)) = status else {
            panic!("{status:?}");
        };
        assert!(reason.contains("the same user"), "{reason}");
    }
}

/// The first load's regions hold other bytes by the time they are read, or cannot be read: only this load fails.
/// Regions that do not fit the pages end the connection.
#[test]
fn wrong_places_fail_their_load() {
    let scene = Scene::new("regions");
    let canary = 0x1122_3344_u64;
    let address = std::ptr::from_ref(&canary).addr() as u64;
    let page: Vec<u8> = (0..8192).map(content(&key(1), 0, 0)).collect();
    let checksum = xxh3_64(&page);
    let at_page = page.as_ptr().addr() as u64;
    let load = |page: u32| scene.load(&page_ids([page]), 16);
    let mut loads = vec![load(0)];
    let mut stream = scene.greet(address, canary);
    loads.extend((1..4).map(load));
    let mut ids = Vec::new();
    while ids.len() < 4 {
        if let Frame::Load(frame) = receive(&mut stream) {
            ids.push(frame.load_id);
        }
    }
    ids.sort_unstable();
    let mut send = |load_id, regions: &[(u64, u64)], checksum| {
        let frame = Frame::Data(PageRun {
            num_regions: regions.len() as u32,
            ..run(load_id, 0, 0, 16)
        });
        let mut bytes = frame.encode().to_vec();
        for (address, num_bytes) in regions {
            bytes.extend(address.to_le_bytes());
            bytes.extend(num_bytes.to_le_bytes());
        }
        bytes.extend(Trailer::Whole { checksum }.encode());
        stream.write_all(&bytes).unwrap();
    };
    send(ids[0], &[(at_page, 8192)], checksum ^ 1);
    send(ids[1], &[(16, 8192)], checksum);
    // The rows come from two regions, as a page may have two.
    send(ids[2], &[(at_page, 1000), (at_page + 1000, 7192)], checksum);
    let num_rows = 16;
    let frame = Frame::Complete {
        load_id: ids[2],
        num_rows,
    };
    let corrupt = LoadStatus::Failed(LoadFailure::Corrupt);
    assert_eq!(wait(&loads[0]), corrupt);
    assert_eq!(wait(&loads[1]), corrupt);
    send_frame(&mut stream, &frame);
    assert_eq!(wait(&loads[2]), LoadStatus::Done { num_rows });
    scene.other.assert_holds(&key(1), &page_ids([2]), 0);

    let bytes = [
        Frame::Data(PageRun {
            num_regions: 1,
            ..run(ids[3], 0, 0, 16)
        })
        .encode()
        .to_vec(),
        [at_page.to_le_bytes(), 9000u64.to_le_bytes()].concat(),
        Trailer::Whole { checksum }.encode().to_vec(),
    ];
    stream.write_all(&bytes.concat()).unwrap();
    let failure = LoadFailure::Violation("regions of another size than the pages");
    assert_eq!(wait(&loads[3]), LoadStatus::Failed(failure));
    scene.other.assert_filled(&page_ids([3, 4, 5, 6, 7]), 0xaa);
}

fn send_frame(stream: &mut UnixStream, frame: &Frame) {
    stream.write_all(&frame.encode()).unwrap();
}
