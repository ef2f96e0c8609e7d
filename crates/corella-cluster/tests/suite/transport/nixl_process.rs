//! A NIXL sender in a process of its own, which tests kill and stop.

use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use corella_cluster::transport::{
    KvSender, NixlAgent, NixlLibrary, PlainPages, SenderConfig, TransferThreads,
};
use corella_core::session::SessionKey;
use corella_core::{Incarnation, PageId};
use corella_model::KvGeometry;
use corella_test::HeldProcess;

use crate::transport::fixture::{
    ARITHMETIC, HOUR, MODEL, SendingNode, geometry, key, listen, page_ids,
};

pub const NUM_PAGES: u32 = 256;
pub const NUM_ROWS: u32 = NUM_PAGES * 16 - 5;

const ROLE: &str = "transport::nixl_process::process_that_stores";
const INCARNATION: &str = "CORELLA_TEST_INCARNATION";
const LAYERS: &str = "CORELLA_TEST_LAYERS";

/// A session has 32 MB.
pub fn large_geometry() -> KvGeometry {
    KvGeometry {
        num_kv_heads: 8,
        ..geometry(4, 16, 2 * NUM_PAGES)
    }
}

/// The library installed by `cargo xtask set-up`, unless the environment names another.
fn library() -> NixlLibrary {
    let library = match std::env::var_os("CORELLA_NIXL_LIBRARY") {
        Some(path) => NixlLibrary::open(path.as_ref()),
        None => {
            let program = std::env::current_exe().unwrap();
            let target = program.ancestors().nth(3).unwrap();
            let path: PathBuf = target.join("nixl/.nixl_cu12.mesonpy.libs/libnixl_capi.so");
            NixlLibrary::open(&path)
        }
    };
    library.unwrap_or_else(|error| panic!("`cargo xtask set-up` installs NIXL: {error}"))
}

/// An agent of this process, whose threads may still close connections when the tests have ended.
pub fn agent(incarnation: u64) -> Arc<NixlAgent> {
    let agent = NixlAgent::start(&library(), incarnation).unwrap();
    #[cfg(target_env = "gnu")]
    skip_exit_handlers();
    agent
}

/// Lets the process end without the exit handlers registered up to now. The handlers of UCX free memory that its
/// threads use, and a signal may end a process whose tests have passed.
#[cfg(target_env = "gnu")]
fn skip_exit_handlers() {
    unsafe extern "C" {
        /// A function of glibc. Handlers run in the reverse order of their registration, and get the exit status.
        safe fn on_exit(
            handler: extern "C" fn(std::ffi::c_int, *mut std::ffi::c_void),
            argument: *mut std::ffi::c_void,
        ) -> std::ffi::c_int;
    }
    extern "C" fn end(status: std::ffi::c_int, _: *mut std::ffi::c_void) {
        // SAFETY: it ends the process at once.
        unsafe { libc::_exit(status) }
    }
    assert_eq!(on_exit(end, std::ptr::null_mut()), 0);
}

pub fn key_of(uuid: u128, prefill_incarnation: u64) -> SessionKey {
    SessionKey {
        prefill_incarnation: Incarnation(prefill_incarnation),
        ..key(uuid)
    }
}

pub fn table() -> Vec<PageId> {
    page_ids(0..NUM_PAGES)
}

pub fn sending_node(incarnation: u64, change: impl FnOnce(&mut SenderConfig)) -> SendingNode {
    let threads = TransferThreads::start(2).unwrap();
    let pages = Arc::new(PlainPages::new(large_geometry()));
    let agent = agent(incarnation);
    let mut config = SenderConfig::new(incarnation, MODEL, ARITHMETIC);
    config.paths.push(agent);
    config.max_wait = HOUR;
    config.stall_timeout = HOUR;
    change(&mut config);
    let sender = KvSender::start(config, pages.clone(), &threads).unwrap();
    let address = listen(&sender);
    SendingNode {
        sender,
        pages,
        address,
    }
}

/// Not a test: the process whose memory others read. It stores session 1.
#[test]
#[ignore = "run by other tests"]
fn process_that_stores() {
    let number = |name: &str| std::env::var(name).ok()?.parse().ok();
    let incarnation = number(INCARNATION).expect("a number");
    let node = sending_node(incarnation, |_| {});
    let key = key_of(1, incarnation);
    match number(LAYERS) {
        None => node.export_whole(&key, &table(), NUM_ROWS),
        Some(num_layers) => node.store_layers(&key, &table(), NUM_ROWS, num_layers as u32),
    };
    println!("\naddress {}", node.address);
    std::io::stdin().read_exact(&mut [0]).ok();
}

pub struct SendingProcess {
    process: Child,
    pub address: SocketAddr,
}

impl SendingProcess {
    pub fn start(incarnation: u64) -> Self {
        Self::start_with(incarnation, None)
    }

    /// Stores only the first layers, so that a load never ends.
    pub fn start_with_layers(incarnation: u64, num_layers: u32) -> Self {
        Self::start_with(incarnation, Some(num_layers))
    }

    fn start_with(incarnation: u64, num_layers: Option<u32>) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", ROLE, "--ignored", "--nocapture"])
            .env(INCARNATION, incarnation.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        if let Some(num_layers) = num_layers {
            command.env(LAYERS, num_layers.to_string());
        }
        let mut process = command.spawn().unwrap();
        let mut lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let address = lines.find_map(|line| {
            let line = line.unwrap();
            line.strip_prefix("address ")?.parse().ok()
        });
        Self {
            process,
            address: address.expect("it says where it listens"),
        }
    }

    pub fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// Stops the process until the returned value is dropped.
    pub fn hold(&self) -> HeldProcess {
        HeldProcess::new(self.process.id())
    }
}

impl Drop for SendingProcess {
    fn drop(&mut self) {
        self.process.kill().ok();
        self.process.wait().ok();
    }
}
