//! Secures both ends of a node's connections, with the contents of its files.

use std::fmt;
use std::sync::Arc;

use tokio_rustls::rustls::client::WebPkiServerVerifier;
use tokio_rustls::rustls::client::danger::ServerCertVerifier;
use tokio_rustls::rustls::crypto::{CryptoProvider, ring};
use tokio_rustls::rustls::pki_types::UnixTime;
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{ClientConfig, Error, RootCertStore, ServerConfig};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::files::Identity;
use super::{TlsError, TlsFiles, failure, server_name};

#[derive(Clone)]
pub struct Ends {
    pub connector: TlsConnector,
    pub acceptor: TlsAcceptor,
}

impl Ends {
    /// Checks this node's certificate as other nodes check it when they connect to `own_host`. Errors name the file in
    /// `files`.
    pub fn new(identity: &Identity, files: &TlsFiles, own_host: &str) -> Result<Self, TlsError> {
        let Identity {
            chain,
            key,
            authorities,
        } = identity;
        let provider = Arc::new(ring::default_provider());
        let mut roots = RootCertStore::empty();
        for authority in authorities {
            roots.add(authority.clone()).map_err(|error| {
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
        // gRPC's own clients require this protocol name. KV sockets ask for none.
        server.alpn_protocols.push(b"h2".to_vec());
        let client = client_config(provider, roots)
            .map_err(|error| unusable(&error))?
            .with_client_auth_cert(chain.clone(), key.clone_key())
            .map_err(wrong_key)?;
        Ok(Self {
            connector: TlsConnector::from(Arc::new(client)),
            acceptor: TlsAcceptor::from(Arc::new(server)),
        })
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
