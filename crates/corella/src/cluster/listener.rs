//! The port for other nodes.

use std::net::{SocketAddr, TcpListener};

use corella_cluster::ClusterTls;
use corella_cluster::transport::NixlLibrary;

use super::ClusterConfig;
use super::role::nixl_error;
use crate::Error;

/// Bound before the model is loaded, so that a port in use is noticed at once. A role gets a copy, and
/// while none has one, connections wait.
pub struct ClusterListener {
    pub listener: TcpListener,
    pub address: SocketAddr,
}

impl ClusterListener {
    pub fn bind(config: &ClusterConfig) -> Result<Self, Error> {
        let cannot_listen = |error| cannot_listen(config.listen, error);
        let listener = TcpListener::bind(config.listen).map_err(cannot_listen)?;
        listener.set_nonblocking(true).map_err(cannot_listen)?;
        let address = listener.local_addr().map_err(cannot_listen)?;
        if config.tls.is_none() && !address.ip().is_loopback() {
            tracing::warn!(
                "other machines reach {address} without a password and without encryption: prompts, \
                 answers and KV rows travel in the clear; give all nodes --cluster-tls-cert, \
                 --cluster-tls-key and --cluster-tls-ca, or keep the port inside a network you trust"
            );
        }
        Ok(Self { listener, address })
    }

    pub fn try_clone(&self) -> Result<Self, Error> {
        let listener = self.listener.try_clone();
        Ok(Self {
            listener: listener.map_err(|error| cannot_listen(self.address, error))?,
            address: self.address,
        })
    }
}

fn cannot_listen(address: SocketAddr, error: std::io::Error) -> Error {
    Error::Io(
        format!("cannot listen on --cluster-listen {address}"),
        error,
    )
}

impl ClusterConfig {
    /// Reads what other nodes know this one by, if they are to know it.
    pub fn load_tls(&self) -> Result<Option<ClusterTls>, Error> {
        let Some(files) = &self.tls else {
            return Ok(None);
        };
        let tls = ClusterTls::load(files, &self.host());
        tls.map(Some)
            .map_err(|error| Error::Config(error.to_string()))
    }

    /// Loads NIXL, if KV rows are to go by it.
    pub fn load_nixl(&self) -> Result<Option<NixlLibrary>, Error> {
        let library = self.uses_nixl.then(NixlLibrary::find);
        let library = library.transpose();
        library.map_err(nixl_error)
    }

    /// By which other nodes reach this one.
    pub fn host(&self) -> String {
        { self.advertise.clone() }.unwrap_or_else(|| match self.listen {
            SocketAddr::V4(address) => address.ip().to_string(),
            SocketAddr::V6(address) => format!("[{}]", address.ip()),
        })
    }
}
