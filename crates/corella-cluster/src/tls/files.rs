//! A node's certificate and key files.

use std::fs::File;
use std::io::{Read, Take};
use std::path::{Path, PathBuf};

use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// Files in PEM form.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// This node's certificate, followed by the intermediate certificates up to the authority's.
    pub cert: PathBuf,
    pub key: PathBuf,
    /// The certificate of the authority of all nodes. There are several while one authority replaces another.
    pub ca: PathBuf,
}

#[derive(PartialEq, Eq)]
pub struct Identity {
    /// The certificates, beginning with this node's own.
    pub chain: Vec<CertificateDer<'static>>,
    pub key: PrivateKeyDer<'static>,
    pub authorities: Vec<CertificateDer<'static>>,
}

/// Why a node cannot use its TLS files, for an operator.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct TlsError(pub(super) String);

impl TlsFiles {
    pub fn read(&self) -> Result<Identity, TlsError> {
        let key = pem_file(&self.key).and_then(PrivateKeyDer::from_pem_reader);
        let key = key.map_err(|error| {
            let what = "private key; one with a passphrase must be decrypted first";
            unreadable("--cluster-tls-key", &self.key, what, &error)
        })?;
        Ok(Identity {
            chain: certificates("--cluster-tls-cert", &self.cert)?,
            key,
            authorities: certificates("--cluster-tls-ca", &self.ca)?,
        })
    }
}

fn certificates(option: &str, path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let wrong = |error| unreadable(option, path, "certificate", &error);
    let found = CertificateDer::pem_reader_iter(pem_file(path).map_err(wrong)?);
    let found: Vec<_> = found.collect::<Result<_, _>>().map_err(wrong)?;
    match found.is_empty() {
        true => Err(wrong(pem::Error::NoItemsFound)),
        false => Ok(found),
    }
}

/// Opens a file and limits its readers to 64 MiB: a device such as /dev/zero never ends.
fn pem_file(path: &Path) -> Result<Take<File>, pem::Error> {
    let file = File::open(path).map_err(pem::Error::Io)?;
    Ok(file.take(64 << 20))
}

fn unreadable(option: &str, path: &Path, what: &str, error: &pem::Error) -> TlsError {
    let path = path.display();
    TlsError(match error {
        pem::Error::Io(error) => format!("cannot read {option} {path}: {error}"),
        pem::Error::NoItemsFound => format!("{option} {path} contains no PEM {what}"),
        error => format!("{option} {path} is not valid PEM: {error:?}"),
    })
}
