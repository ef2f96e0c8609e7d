//! HTTPS: the server's certificate, which may be renewed while the server runs.

use std::fmt;
use std::fs::File;
use std::io::{self, Read, Take};
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::client::verify_server_cert_signed_by_trust_anchor;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use tokio_rustls::rustls::server::ParsedCertificate;
use tokio_rustls::rustls::{CertificateError, Error, RootCertStore, ServerConfig};
use tokio_rustls::server::TlsStream;

/// Limits the time of a client's handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Time between two checks for renewed files.
const RELOAD_INTERVAL: Duration = Duration::from_secs(10);

/// Why the files cannot be used, as an operator reads it.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct TlsError(String);

/// Secures the connections of clients by a certificate and a key in files.
#[derive(Clone)]
pub struct ServerTls(Arc<Inner>);

struct Inner {
    cert: PathBuf,
    key: PathBuf,
    /// The last usable contents of the files. Each connection reads them once.
    current: RwLock<Current>,
}

struct Current {
    identity: Identity,
    acceptors: Acceptors,
}

/// An acceptor for each version of HTTP. Clients of HTTP/2 demand that the handshake names it.
struct Acceptors {
    http1: TlsAcceptor,
    http2: TlsAcceptor,
}

#[derive(PartialEq, Eq)]
struct Identity {
    /// The server's own certificate comes first.
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
}

impl fmt::Debug for ServerTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ServerTls")
    }
}

impl ServerTls {
    /// Reads the files, in PEM form, and refuses a certificate that no client would accept because
    /// of its dates.
    pub fn load(cert: &Path, key: &Path) -> Result<Self, TlsError> {
        let identity = Identity::read(cert, key)?;
        let acceptors = identity.acceptors(cert, key)?;
        Ok(Self(Arc::new(Inner {
            cert: cert.to_owned(),
            key: key.to_owned(),
            current: RwLock::new(Current {
                identity,
                acceptors,
            }),
        })))
    }

    /// Reads the files again, for connections from now on. Returns whether they have changed. If they cannot be used,
    /// the earlier contents stay in use.
    pub fn reload(&self) -> Result<bool, TlsError> {
        let Inner { cert, key, current } = &*self.0;
        let identity = Identity::read(cert, key)?;
        let is_same = |current: &Current| current.identity == identity;
        if is_same(&current.read().unwrap_or_else(PoisonError::into_inner)) {
            return Ok(false);
        }
        let acceptors = identity.acceptors(cert, key)?;
        let new = Current {
            identity,
            acceptors,
        };
        *current.write().unwrap_or_else(PoisonError::into_inner) = new;
        Ok(true)
    }

    /// Looks for renewed files at intervals, for as long as it is polled.
    pub async fn follow_files(self) {
        let mut said = None;
        loop {
            tokio::time::sleep(RELOAD_INTERVAL).await;
            let tls = self.clone();
            let Ok(reloaded) = tokio::task::spawn_blocking(move || tls.reload()).await else {
                continue;
            };
            let reason = match reloaded {
                Ok(false) => None,
                Ok(true) => {
                    tracing::info!("new connections use the renewed --tls-cert");
                    None
                }
                // One file may be renewed a little before the other.
                Err(error) => Some(error.to_string()),
            };
            if let Some(reason) = &reason
                && said.as_ref() != Some(reason)
            {
                tracing::warn!("the renewed files are not used: {reason}");
            }
            said = reason;
        }
    }

    /// Secures a connection that a client has made.
    pub(crate) async fn accept(
        &self,
        mut stream: TcpStream,
        is_http2: bool,
    ) -> io::Result<TlsStream<TcpStream>> {
        let acceptor = {
            let current = self.0.current.read();
            let current = current.unwrap_or_else(PoisonError::into_inner);
            match is_http2 {
                false => current.acceptors.http1.clone(),
                true => current.acceptors.http2.clone(),
            }
        };
        let handshake = async {
            let mut first = [0];
            if stream.peek(&mut first).await? == 1 && first[0].is_ascii_uppercase() {
                // The first bytes are an HTTP method. A handshake begins with a byte below the letters.
                stream.write_all(PLAIN_HTTP_ANSWER).await?;
                stream.shutdown().await?;
                let error = "the client speaks HTTP without TLS";
                return Err(io::Error::new(io::ErrorKind::InvalidData, error));
            }
            acceptor.accept(stream).await
        };
        let secured = tokio::time::timeout(HANDSHAKE_TIMEOUT, handshake).await;
        secured.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
    }
}

/// The answer to a client that has forgotten the `s` of `https`.
const PLAIN_HTTP_ANSWER: &[u8] = b"HTTP/1.1 400 Bad Request\r\n\
    content-type: application/json\r\ncontent-length: 117\r\nconnection: close\r\n\r\n\
    {\"error\":{\"message\":\"This port speaks HTTPS: use https://.\",\
    \"type\":\"invalid_request_error\",\"param\":null,\"code\":null}}";

impl Identity {
    fn read(cert: &Path, key: &Path) -> Result<Self, TlsError> {
        let found = pem_file(cert)
            .and_then(|file| CertificateDer::pem_reader_iter(file).collect::<Result<Vec<_>, _>>())
            .map_err(|error| unreadable("--tls-cert", cert, "certificate", &error))?;
        if found.is_empty() {
            let error = pem::Error::NoItemsFound;
            return Err(unreadable("--tls-cert", cert, "certificate", &error));
        }
        let read = pem_file(key).and_then(PrivateKeyDer::from_pem_reader);
        let read = read.map_err(|error| {
            let what = "private key; one with a passphrase must be decrypted first";
            unreadable("--tls-key", key, what, &error)
        })?;
        Ok(Self {
            chain: found,
            key: read,
        })
    }

    fn acceptors(&self, cert: &Path, key: &Path) -> Result<Acceptors, TlsError> {
        self.check_dates(cert)?;
        let provider = Arc::new(ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| TlsError(format!("TLS cannot be used: {error}")))?
            .with_no_client_auth()
            .with_single_cert(self.chain.clone(), self.key.clone_key());
        let config = config.map_err(|error| match error {
            Error::InconsistentKeys(_) => TlsError(format!(
                "--tls-key {} is not the key of --tls-cert {}",
                key.display(),
                cert.display()
            )),
            error => TlsError(format!(
                "--tls-key {} cannot be used: {error}",
                key.display()
            )),
        })?;
        let acceptor = |protocol: &[u8]| {
            let mut config = config.clone();
            config.alpn_protocols.push(protocol.to_vec());
            TlsAcceptor::from(Arc::new(config))
        };
        Ok(Acceptors {
            http1: acceptor(b"http/1.1"),
            http2: acceptor(b"h2"),
        })
    }

    /// The verifier checks a certificate's own properties before its issuer. It trusts no issuer here, so the error of
    /// an unknown issuer means that the properties are valid.
    fn check_dates(&self, cert: &Path) -> Result<(), TlsError> {
        let shown = cert.display();
        let (own, others) = self
            .chain
            .split_first()
            .expect("a chain that was read has one");
        let checked = ParsedCertificate::try_from(own).and_then(|own| {
            verify_server_cert_signed_by_trust_anchor(
                &own,
                &RootCertStore::empty(),
                others,
                UnixTime::now(),
                ring::default_provider()
                    .signature_verification_algorithms
                    .all,
            )
        });
        match checked {
            Err(Error::InvalidCertificate(
                CertificateError::Expired | CertificateError::ExpiredContext { .. },
            )) => Err(TlsError(format!(
                "--tls-cert {shown} has expired: renew it"
            ))),
            Err(Error::InvalidCertificate(
                CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. },
            )) => Err(TlsError(format!(
                "--tls-cert {shown} is not valid yet: look at this machine's clock"
            ))),
            Err(Error::InvalidCertificate(CertificateError::BadEncoding)) => Err(TlsError(
                format!("--tls-cert {shown} has a certificate that cannot be read"),
            )),
            _ => Ok(()),
        }
    }
}

/// Opens a file. Only its first 64 MiB are read, because a device such as /dev/zero never ends.
fn pem_file(path: &Path) -> Result<Take<File>, pem::Error> {
    let file = File::open(path).map_err(pem::Error::Io)?;
    Ok(file.take(64 << 20))
}

fn unreadable(option: &str, path: &Path, what: &str, error: &pem::Error) -> TlsError {
    let path = path.display();
    TlsError(match error {
        pem::Error::Io(error) => format!("cannot read {option} {path}: {error}"),
        pem::Error::NoItemsFound => format!("{option} {path} contains no PEM {what}"),
        _ => format!("{option} {path} is not valid PEM"),
    })
}
