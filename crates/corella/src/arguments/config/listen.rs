//! The address of a server.

use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;

use crate::Error;

/// The address at which clients reach a server.
pub enum ListenAddress {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

/// Resolves a host. Prefers an IPv4 address of several: clients that connect to `localhost` try
/// IPv4 too, and clients that connect to 127.0.0.1 try nothing else.
pub fn listen_address(host: &str, port: u16) -> Result<SocketAddr, Error> {
    // An IPv6 address may be written in brackets, as in a URL.
    let name = host
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'));
    let found = (name.unwrap_or(host), port).to_socket_addrs();
    let addresses: Vec<SocketAddr> = found.map_or_else(|_| Vec::new(), Iterator::collect);
    let ipv4 = addresses.iter().find(|address| address.is_ipv4());
    ipv4.or(addresses.first()).copied().ok_or_else(|| {
        let bare = host.trim_start_matches("http://");
        let with_port = bare
            .split_once(':')
            .filter(|(_, port)| port.parse::<u16>().is_ok());
        if let Some((bare, port)) = with_port {
            return Error::Config(format!(
                "--host {host} has a port: write --host {bare} --port {port}"
            ));
        }
        Error::Config(format!(
            "--host {host} is neither an address nor a name that can be resolved; 127.0.0.1 \
             listens for this machine only, 0.0.0.0 for others as well"
        ))
    })
}
