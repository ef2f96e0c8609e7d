//! The port for other nodes.

use std::net::{SocketAddr, TcpListener};

use super::config::NodeConfig;
use super::error::NodeError;

/// The port is bound before the model is loaded, so that a port in use is noticed at once. Each role gets a copy. While
/// no role has one, connections wait.
pub struct NodePort {
    pub listener: TcpListener,
    pub address: SocketAddr,
}

impl NodePort {
    pub fn bind(config: &NodeConfig) -> Result<Self, NodeError> {
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

    /// Binds a free port of the same interface, for the KV rows of a node whose own port takes sessions.
    pub fn beside(other: &Self) -> Result<Self, NodeError> {
        let address = SocketAddr::new(other.address.ip(), 0);
        let cannot_listen = |error| {
            let what = format!("cannot listen on {} for KV rows", address.ip());
            NodeError::Io(what, error)
        };
        let listener = TcpListener::bind(address).map_err(cannot_listen)?;
        listener.set_nonblocking(true).map_err(cannot_listen)?;
        let address = listener.local_addr().map_err(cannot_listen)?;
        Ok(Self { listener, address })
    }

    pub fn try_clone(&self) -> Result<Self, NodeError> {
        let listener = self.listener.try_clone();
        Ok(Self {
            listener: listener.map_err(|error| cannot_listen(self.address, error))?,
            address: self.address,
        })
    }
}

fn cannot_listen(address: SocketAddr, error: std::io::Error) -> NodeError {
    NodeError::Io(
        format!("cannot listen on --cluster-listen {address}"),
        error,
    )
}
