//! The outlet from which other nodes load this one's KV rows.

use std::sync::Arc;
use std::time::Duration;

use corella_core::session::Hello;

use super::Node;
use super::error::{NodeError, nixl_error};
use super::host_name::host_name;
use super::listener::NodePort;
use crate::entrance::{KeepConfig, KeptPrompts, NearSource, SOCKET_PREFIX};
use crate::session::KvAddress;
use crate::transport::{KvSender, NixlAgent, PeerAddress, SenderConfig};

pub struct KvOutlet {
    pub sender: Arc<KvSender>,
    /// Prompts that are kept for nodes that a proxy chooses.
    pub kept: Arc<KeptPrompts>,
    pub address: KvAddress,
}

impl Node {
    /// Sends KV rows to those who connect to the listener or, on this host, to a socket with a name.
    pub fn start_outlet(
        &self,
        listener: NodePort,
        hello: &Hello,
        nixl: Option<&Arc<NixlAgent>>,
    ) -> Result<KvOutlet, NodeError> {
        let config = &self.config;
        let pages = self.model.engine.kv_pages().clone();
        let mut sender_config = SenderConfig::new(hello.incarnation.0, hello.model_fingerprint);
        sender_config.max_bandwidth = config.max_bandwidth;
        sender_config.tls.clone_from(&self.tls);
        sender_config
            .paths
            .extend(nixl.cloned().map(|agent| agent as _));
        let sender = KvSender::start(sender_config, pages, &self.threads).map_err(nixl_error)?;
        let sender = Arc::new(sender);
        let (host, port) = (config.host(), listener.address.port());
        let address = listener.address;
        sender.listen_on(listener.listener).map_err(|error| {
            NodeError::Io(format!("cannot listen on {address} for KV rows"), error)
        })?;
        let socket = config.uses_host.then(|| socket_name(hello));
        if let Some(name) = &socket {
            let listening = sender.listen(PeerAddress::Unix(name.clone()));
            listening.map_err(|error| {
                let what = "cannot listen for nodes on this host (--transport tcp does without)";
                NodeError::Io(what.to_owned(), error)
            })?;
        }
        let near = { socket.clone() }.map(|socket| NearSource {
            socket,
            machine: host_name(),
        });
        let keep = KeepConfig {
            incarnation: hello.incarnation.0,
            model_fingerprint: hello.model_fingerprint,
            host: host.clone(),
            port: if config.uses_network { port } else { 0 },
            near,
            lease: Duration::from_micros(self.model.engine.limits().hold_lease_us),
        };
        let kept = KeptPrompts::new(self.model.engine.clone(), sender.clone(), keep);
        let address = KvAddress {
            address: match config.uses_network {
                true => format!("{host}:{port}"),
                false => String::new(),
            },
            socket: socket.unwrap_or_default(),
            host: host_name(),
        };
        Ok(KvOutlet {
            sender,
            kept,
            address,
        })
    }
}

/// Each life of a node has a name of its own.
fn socket_name(hello: &Hello) -> String {
    let (process, incarnation) = (std::process::id(), hello.incarnation.0);
    format!("{SOCKET_PREFIX}{process}-{incarnation:x}")
}
