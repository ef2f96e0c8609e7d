//! Why two nodes do not trust each other, in words that tell the operator the change to make.

use std::io;

use tokio_rustls::rustls::{AlertDescription, CertificateError, Error};

use super::TlsFiles;

const OPTIONS: &str = "--cluster-tls-cert, --cluster-tls-key and --cluster-tls-ca";

/// The error that other nodes would report about this node's certificate.
pub fn of_own_certificate(files: &TlsFiles, own_host: &str, error: &Error) -> String {
    let cert = files.cert.display();
    let Error::InvalidCertificate(error) = error else {
        return format!("--cluster-tls-cert {cert} cannot be used: {error}");
    };
    match problem(error) {
        Problem::Expired => format!("--cluster-tls-cert {cert} has expired: renew it"),
        Problem::NotYet => {
            format!("--cluster-tls-cert {cert} is not valid yet: look at this machine's clock")
        }
        Problem::Issuer => format!(
            "--cluster-tls-cert {cert} does not come from --cluster-tls-ca {}: other nodes would \
             refuse it",
            files.ca.display()
        ),
        Problem::Name => format!(
            "--cluster-tls-cert {cert} does not name {own_host}, by which other nodes reach this \
             one: add it as a subjectAltName, or give --cluster-advertise the name that it has"
        ),
        Problem::Purpose => format!(
            "--cluster-tls-cert {cert} must be good for both ends of a connection: leave out \
             extendedKeyUsage, or give it both serverAuth and clientAuth"
        ),
        Problem::Other => format!("--cluster-tls-cert {cert} cannot be used: {error}"),
    }
}

/// Returns the TLS error inside a connection's error.
pub fn of_tls(error: &io::Error) -> Option<&Error> {
    error.get_ref()?.downcast_ref()
}

/// Why a connection could not be secured. `peer` is the connected host or the connecting peer.
pub fn of_handshake(peer: &str, error: &io::Error) -> String {
    match of_tls(error) {
        Some(Error::InvalidCertificate(error)) => match problem(error) {
            Problem::Expired => "its certificate has expired: renew it".to_owned(),
            Problem::NotYet => {
                "its certificate is not valid yet: compare the two clocks".to_owned()
            }
            Problem::Issuer => "its certificate does not come from this node's --cluster-tls-ca: \
                                issue the certificates of all nodes from one authority"
                .to_owned(),
            Problem::Name => format!(
                "its certificate does not name {peer}: add it as a subjectAltName, or give that \
                 node's --cluster-advertise the name that it has"
            ),
            Problem::Purpose => "its certificate is not good for both ends of a connection: leave \
                                 out extendedKeyUsage, or give it both serverAuth and clientAuth"
                .to_owned(),
            Problem::Other => format!("its certificate cannot be used: {error}"),
        },
        Some(Error::NoCertificatesPresented) => {
            format!("it presents no certificate: give it {OPTIONS}")
        }
        Some(Error::InvalidMessage(_)) => format!("it does not speak TLS: give it {OPTIONS}"),
        Some(Error::AlertReceived(AlertDescription::CertificateExpired)) => {
            "this node's certificate has expired, it says: renew --cluster-tls-cert, or compare the \
             two clocks"
                .to_owned()
        }
        Some(Error::AlertReceived(alert)) => format!(
            "it refuses this node's certificate ({alert:?}): its log says why, and \
             --cluster-tls-ca must be the same on both"
        ),
        Some(error) => error.to_string(),
        None => match error.kind() {
            io::ErrorKind::TimedOut => "it does not answer in time".to_owned(),
            io::ErrorKind::UnexpectedEof
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::BrokenPipe => {
                format!("it ends the connection at once: does it have {OPTIONS}?")
            }
            _ => error.to_string(),
        },
    }
}

enum Problem {
    Expired,
    NotYet,
    Issuer,
    Name,
    Purpose,
    Other,
}

fn problem(error: &CertificateError) -> Problem {
    match error {
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => Problem::Expired,
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            Problem::NotYet
        }
        // A certificate of an authority with the same name and another key has a bad signature.
        CertificateError::UnknownIssuer | CertificateError::BadSignature => Problem::Issuer,
        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
            Problem::Name
        }
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
            Problem::Purpose
        }
        _ => Problem::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_that_finds_a_certificate_expired_names_what_to_renew() {
        let told = |alert| of_handshake("10.0.0.1", &io::Error::other(Error::AlertReceived(alert)));
        let expired = told(AlertDescription::CertificateExpired);
        assert!(expired.contains("renew --cluster-tls-cert"), "{expired}");
        let other = told(AlertDescription::UnknownCA);
        assert!(other.contains("--cluster-tls-ca"), "{other}");
    }
}
