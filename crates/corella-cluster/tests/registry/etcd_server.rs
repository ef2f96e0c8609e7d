//! An etcd of its own for each test, which can be killed and started again.

use std::fs::{self, File};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::fleet::TestFolder;

const START_TIMEOUT: Duration = Duration::from_secs(30);

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

    /// Has an address, and nobody there.
    pub fn not_started(test: &str) -> Self {
        Self {
            folder: TestFolder::new(test),
            client_port: free_port(),
            peer_port: free_port(),
            process: None,
        }
    }

    /// For `--registry`.
    pub fn url(&self) -> String {
        format!("etcd:127.0.0.1:{}/test", self.client_port)
    }

    /// Starts it with whatever data there is.
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
        let start = Instant::now();
        while TcpStream::connect(("127.0.0.1", self.client_port)).is_err() {
            let exited = self.process.as_mut().unwrap().try_wait().unwrap();
            if exited.is_some() || start.elapsed() > START_TIMEOUT {
                let log = fs::read_to_string(self.folder.0.join("etcd.log"));
                panic!(
                    "etcd does not listen ({exited:?}): {}",
                    log.unwrap_or_default()
                );
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// As by `kill -9`.
    pub fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.kill().unwrap();
            process.wait().unwrap();
        }
    }

    pub fn lose_data(&self) {
        assert!(self.process.is_none());
        fs::remove_dir_all(self.folder.0.join("data")).unwrap();
    }
}

impl Drop for EtcdServer {
    fn drop(&mut self) {
        self.kill();
    }
}

fn free_port() -> u16 {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    listener.local_addr().unwrap().port()
}
