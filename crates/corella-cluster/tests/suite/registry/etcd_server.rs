//! An etcd of its own for each test, which can be killed and started again.

use std::fs::{self, File};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use corella_test::{HeldProcess, wait_until};

use crate::registry::fleet::TestFolder;

pub struct EtcdServer {
    folder: TestFolder,
    client_port: u16,
    peer_port: u16,
    process: Option<Child>,
}

impl EtcdServer {
    pub fn start(test: &str) -> Self {
        let mut server = Self::not_started(test);
        server.restart();
        server
    }

    /// Reserves an address without starting a server.
    pub fn not_started(test: &str) -> Self {
        Self {
            folder: TestFolder::new(test),
            client_port: free_port(),
            peer_port: free_port(),
            process: None,
        }
    }

    pub fn address(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.client_port).into()
    }

    /// Returns the value for `--registry`.
    pub fn url(&self) -> String {
        url_at(self.address())
    }

    /// Starts the server with its existing data.
    pub fn restart(&mut self) {
        let clients = format!("http://127.0.0.1:{}", self.client_port);
        let peers = format!("http://127.0.0.1:{}", self.peer_port);
        let log = File::create(self.folder.0.join("etcd.log")).unwrap();
        let process = Command::new("etcd")
            .args(["--name", "test", "--data-dir"])
            .arg(self.folder.0.join("data"))
            .args(["--listen-client-urls", &clients])
            .args(["--advertise-client-urls", &clients])
            .args(["--listen-peer-urls", &peers])
            .args(["--initial-advertise-peer-urls", &peers])
            .args(["--initial-cluster", &format!("test={peers}")])
            .stdout(Stdio::null())
            .stderr(log)
            .spawn();
        self.process = Some(process.unwrap_or_else(|error| {
            panic!("etcd does not start ({error}); on Debian: `apt-get install etcd-server`")
        }));
        wait_until("etcd listens", || {
            let exited = self.process.as_mut().unwrap().try_wait().unwrap();
            if exited.is_some() {
                let log = fs::read_to_string(self.folder.0.join("etcd.log"));
                panic!("etcd has ended ({exited:?}): {}", log.unwrap_or_default());
            }
            TcpStream::connect(self.address()).is_ok()
        });
    }

    /// Kills the server as `kill -9` does.
    pub fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.kill().unwrap();
            process.wait().unwrap();
        }
    }

    /// Stops the server's process until the returned value is dropped.
    pub fn hold(&self) -> HeldProcess {
        HeldProcess::new(self.process.as_ref().unwrap().id())
    }

    pub fn lose_data(&self) {
        assert!(self.process.is_none());
        fs::remove_dir_all(self.folder.0.join("data")).unwrap();
    }
}

pub fn url_at(address: SocketAddr) -> String {
    format!("etcd:{address}/test")
}

impl Drop for EtcdServer {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Returns a port below the range that the system gives to connections, so that a killed server
/// finds its port still free.
fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let first = std::process::id() * 64;
    loop {
        let number = first + NEXT.fetch_add(1, Ordering::Relaxed);
        let port = 20_000 + (number % 10_000) as u16;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}
