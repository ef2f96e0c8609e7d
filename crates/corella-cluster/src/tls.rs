//! Mutual TLS between the nodes of a cluster: one configuration for sessions and for KV rows.
//!
//! Each node presents one certificate, whichever end of a connection it is, and takes only
//! certificates of the cluster's own certificate authority. Who connects checks the host by which it
//! reaches the other node against the names in that node's certificate. Sockets inside a host need
//! none of this: the kernel says whose process is at the other end.

mod failure;
mod files;
mod grpc;
mod stream;

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::net::TcpStream;
use tokio_rustls::rustls::client::WebPkiServerVerifier;
use tokio_rustls::rustls::client::danger::ServerCertVerifier;
use tokio_rustls::rustls::crypto::{CryptoProvider, ring};
use tokio_rustls::rustls::pki_types::{InvalidDnsNameError, ServerName, UnixTime};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{ClientConfig, Error, RootCertStore, ServerConfig};
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};

use files::Identity;

pub use files::TlsFiles;
pub(crate) use grpc::{SecureConnector, secure_incoming};

/// How long a peer may take for a handshake.
pub(crate) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(1);
/// How often it is said again why a peer is refused.
const LOG_INTERVAL: Duration = Duration::from_secs(60);
/// Peers that are remembered for it.
const MAX_COMPLAINTS: usize = 1024;

/// Why a node cannot use the files that it was given, for an operator to read.
#[derive(Debug)]
pub struct TlsError(String);

impl fmt::Display for TlsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for TlsError {}

/// Both ends' configuration, read once when the node starts.
#[derive(Clone)]
pub struct ClusterTls(Arc<Inner>);

struct Inner {
    connector: TlsConnector,
    acceptor: TlsAcceptor,
    /// When it was last said of a peer why it is refused.
    complaints: Mutex<HashMap<String, Instant>>,
}

impl fmt::Debug for ClusterTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClusterTls")
    }
}

impl ClusterTls {
    /// Reads the files, and checks this node's certificate as other nodes will, which reach it by
    /// `own_host`.
    pub fn load(files: &TlsFiles, own_host: &str) -> Result<Self, TlsError> {
        let Identity {
            chain,
            key,
            authorities,
        } = files.read()?;
        let provider = Arc::new(ring::default_provider());
        let mut roots = RootCertStore::empty();
        for authority in authorities {
            roots.add(authority).map_err(|error| {
                let path = files.ca.display();
                TlsError(format!(
                    "--cluster-tls-ca {path} has a certificate that cannot be used: {error}"
                ))
            })?;
        }
        let roots = Arc::new(roots);
        let unusable = |error: &dyn fmt::Display| TlsError(format!("TLS cannot be used: {error}"));
        let clients =
            WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone()).build();
        let clients = clients.map_err(|error| unusable(&error))?;
        let servers =
            WebPkiServerVerifier::builder_with_provider(roots.clone(), provider.clone()).build();
        let servers = servers.map_err(|error| unusable(&error))?;

        let own_name = server_name(own_host)
            .map_err(|_| TlsError(format!("no certificate can name {own_host:?}")))?;
        let (own, others) = chain.split_first().expect("a chain that was read has one");
        let now = UnixTime::now();
        let as_server = servers.verify_server_cert(own, others, &own_name, &[], now);
        let as_client = clients.verify_client_cert(own, others, now);
        as_server
            .map(drop)
            .and(as_client.map(drop))
            .map_err(|error| TlsError(failure::of_own_certificate(files, own_host, &error)))?;

        let wrong_key = |error: Error| match error {
            Error::InconsistentKeys(_) => TlsError(format!(
                "--cluster-tls-key {} is not the key of --cluster-tls-cert {}",
                files.key.display(),
                files.cert.display()
            )),
            error => TlsError(format!(
                "--cluster-tls-key {} cannot be used: {error}",
                files.key.display()
            )),
        };
        let mut server = ServerConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(|error| unusable(&error))?
            .with_client_cert_verifier(clients)
            .with_single_cert(chain.clone(), key.clone_key())
            .map_err(wrong_key)?;
        // gRPC's own clients insist on it; KV sockets ask for nothing.
        server.alpn_protocols.push(b"h2".to_vec());
        let client = client_config(provider, roots)
            .map_err(|error| unusable(&error))?
            .with_client_auth_cert(chain, key)
            .map_err(wrong_key)?;
        Ok(Self(Arc::new(Inner {
            connector: TlsConnector::from(Arc::new(client)),
            acceptor: TlsAcceptor::from(Arc::new(server)),
            complaints: Mutex::default(),
        })))
    }

    /// Secures a connection that this node has made to a node at `host`.
    pub(crate) async fn connect(
        &self,
        stream: TcpStream,
        host: &str,
    ) -> io::Result<TlsStream<TcpStream>> {
        let name = server_name(host)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
        let handshake = self.0.connector.connect(name, stream);
        let secured = in_time(handshake).await.map(TlsStream::Client);
        secured.inspect_err(|error| self.complain(host, error))
    }

    /// Secures a connection that another node has made.
    pub(crate) async fn accept(&self, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        let peer = stream.peer_addr()?.ip().to_string();
        let secured = in_time(self.0.acceptor.accept(stream)).await;
        secured.map(TlsStream::Server).inspect_err(|error| {
            // Who says nothing at all only looks whether somebody listens.
            if error.kind() != io::ErrorKind::UnexpectedEof {
                self.complain(&peer, error);
            }
        })
    }

    /// A peer that refuses this node's certificate says so only behind the handshake.
    pub(crate) fn note_refusal(&self, peer: &str, error: &io::Error) {
        if failure::of_tls(error).is_some() {
            self.complain(peer, error);
        }
    }

    /// Says why a peer is refused, or refuses this node, once a minute for each.
    fn complain(&self, peer: &str, error: &io::Error) {
        let now = Instant::now();
        let is_recent = |at: &Instant| now.duration_since(*at) < LOG_INTERVAL;
        {
            let complaints = self.0.complaints.lock();
            let mut complaints = complaints.unwrap_or_else(PoisonError::into_inner);
            if complaints.get(peer).is_some_and(is_recent) {
                return;
            }
            if complaints.len() >= MAX_COMPLAINTS {
                complaints.retain(|_, at| is_recent(at));
                if complaints.len() >= MAX_COMPLAINTS {
                    return;
                }
            }
            complaints.insert(peer.to_owned(), now);
        }
        let reason = failure::of_handshake(peer, error);
        tracing::warn!("no TLS with the node at {peer}: {reason}");
    }
}

fn client_config(
    provider: Arc<CryptoProvider>,
    roots: Arc<RootCertStore>,
) -> Result<
    tokio_rustls::rustls::ConfigBuilder<
        ClientConfig,
        tokio_rustls::rustls::client::WantsClientCert,
    >,
    Error,
> {
    let builder = ClientConfig::builder_with_provider(provider);
    let builder = builder.with_safe_default_protocol_versions()?;
    Ok(builder.with_root_certificates(roots))
}

/// A certificate names an IPv6 address without the brackets that stand in front of a port.
fn server_name(host: &str) -> Result<ServerName<'static>, InvalidDnsNameError> {
    let address = { host.strip_prefix('[') }.and_then(|host| host.strip_suffix(']'));
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
