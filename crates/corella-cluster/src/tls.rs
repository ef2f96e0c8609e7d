//! Mutual TLS between the nodes of a cluster: one configuration for sessions and for KV rows.
//!
//! Each node presents one certificate at both ends of a connection, and accepts only certificates of the cluster's own
//! certificate authority. The connecting node checks the host that it connects to against the names in the other node's
//! certificate. Sockets inside a host need no TLS: the kernel identifies the process at the other end.

mod ends;
mod failure;
mod files;
mod grpc;
mod stream;

use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};
use std::time::{Duration, Instant};
use std::{fmt, io};

use tokio::net::TcpStream;
use tokio_rustls::TlsStream;
use tokio_rustls::rustls::pki_types::{InvalidDnsNameError, ServerName};

use crate::peer_log::PeerLog;
use ends::Ends;
use files::Identity;

pub use files::{TlsError, TlsFiles};
pub(crate) use grpc::SecureConnector;
pub(crate) use stream::SecureStream;

/// The limit of a handshake's duration.
pub(crate) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(1);
/// Time between two checks for renewed files.
const RELOAD_INTERVAL: Duration = Duration::from_secs(10);

/// The TLS configuration of both ends of a node's connections, from files that may be renewed.
#[derive(Clone)]
pub struct ClusterTls(Arc<Inner>);

struct Inner {
    files: TlsFiles,
    own_host: String,
    /// The last usable contents of the files, which every connection reads once.
    current: RwLock<(Identity, Ends)>,
    complaints: PeerLog,
}

impl Inner {
    fn current(&self) -> RwLockReadGuard<'_, (Identity, Ends)> {
        self.current.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn ends(&self) -> Ends {
        self.current().1.clone()
    }
}

impl fmt::Debug for ClusterTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClusterTls")
    }
}

impl ClusterTls {
    /// Reads the files. Checks this node's certificate as other nodes check it when they connect to `own_host`.
    pub fn load(files: &TlsFiles, own_host: &str) -> Result<Self, TlsError> {
        let identity = files.read()?;
        let ends = Ends::new(&identity, files, own_host)?;
        Ok(Self(Arc::new(Inner {
            files: files.clone(),
            own_host: own_host.to_owned(),
            current: RwLock::new((identity, ends)),
            complaints: PeerLog::default(),
        })))
    }

    /// Reads the files again, for connections made from now on. Returns whether they have changed.
    /// If they cannot be used, the earlier contents stay in use.
    pub fn reload(&self) -> Result<bool, TlsError> {
        let Inner {
            files, own_host, ..
        } = &*self.0;
        let identity = files.read()?;
        if self.0.current().0 == identity {
            return Ok(false);
        }
        let ends = Ends::new(&identity, files, own_host)?;
        let mut current = self
            .0
            .current
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        *current = (identity, ends);
        Ok(true)
    }

    /// Checks for renewed files at intervals, as long as the future is polled.
    pub async fn follow_files(self) {
        let mut said = None;
        loop {
            tokio::time::sleep(RELOAD_INTERVAL).await;
            let tls = self.clone();
            let Ok(reloaded) = tokio::task::spawn_blocking(move || tls.reload()).await else {
                continue;
            };
            match reloaded {
                Ok(false) => said = None,
                Ok(true) => {
                    said = None;
                    tracing::info!("new connections use the renewed --cluster-tls files");
                }
                // One file may be renewed slightly before the others.
                Err(error) => {
                    let reason = Some(error.to_string());
                    if said != reason {
                        tracing::warn!("renewed files are not used: {error}");
                    }
                    said = reason;
                }
            }
        }
    }

    /// Secures a connection that this node has made to a node at `host`.
    pub(crate) async fn connect(
        &self,
        stream: TcpStream,
        host: &str,
    ) -> io::Result<TlsStream<TcpStream>> {
        let name = server_name(host)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
        let handshake = self.0.ends().connector.connect(name, stream);
        let secured = in_time(handshake).await.map(TlsStream::Client);
        secured.inspect_err(|error| self.complain(host, error))
    }

    /// Secures a connection that another node has made.
    pub(crate) async fn accept(&self, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        let peer = stream.peer_addr()?.ip().to_string();
        let secured = in_time(self.0.ends().acceptor.accept(stream)).await;
        secured.map(TlsStream::Server).inspect_err(|error| {
            // A peer that sends nothing at all only wants to know whether the port is open.
            if error.kind() != io::ErrorKind::UnexpectedEof {
                self.complain(&peer, error);
            }
        })
    }

    /// Logs a refusal of this node's certificate, which a peer reports only after the handshake.
    pub(crate) fn note_refusal(&self, peer: &str, error: &io::Error) {
        if failure::of_tls(error).is_some() {
            self.complain(peer, error);
        }
    }

    /// Logs why this node refuses a peer, or is refused by it, once a minute for each peer.
    fn complain(&self, peer: &str, error: &io::Error) {
        if !self.0.complaints.is_due(peer, Instant::now()) {
            return;
        }
        let reason = failure::of_handshake(peer, error);
        tracing::warn!("no TLS with the node at {peer}: {reason}");
    }
}

/// A certificate names an IPv6 address without the brackets that precede a port.
fn server_name(host: &str) -> Result<ServerName<'static>, InvalidDnsNameError> {
    let address = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'));
    ServerName::try_from(address.unwrap_or(host).to_owned())
}

async fn in_time<T>(handshake: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    let result = tokio::time::timeout(HANDSHAKE_TIMEOUT, handshake).await;
    result.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_named_as_certificates_name_it() {
        for (host, name) in [
            ("127.0.0.1", "127.0.0.1"),
            ("[::1]", "::1"),
            ("::1", "::1"),
            ("decode-1.internal", "decode-1.internal"),
        ] {
            assert_eq!(server_name(host).unwrap().to_str(), name);
        }
        assert!(server_name("a b").is_err());
    }
}
