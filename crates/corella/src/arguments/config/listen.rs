//! The address of a server.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::path::PathBuf;

use crate::Error;
use crate::arguments::args::ServerArgs;
use crate::process::inherited_socket::InheritedSocket;

/// The address at which clients reach a server.
pub enum ListenAddress {
    Tcp(SocketAddr),
    Unix(PathBuf),
    /// The supervisor of this process has opened the socket.
    Inherited(InheritedSocket),
}

impl ListenAddress {
    /// Returns the inherited socket if there is one, else the address of the options.
    pub fn of(server: &ServerArgs) -> Result<Self, Error> {
        let Some(socket) = InheritedSocket::take().map_err(Error::Config)? else {
            return Ok(match &server.uds {
                Some(path) => Self::Unix(path.clone()),
                None => Self::Tcp(listen_address("host", &server.host, server.port)?),
            });
        };
        match (&socket, &server.tls_cert) {
            (InheritedSocket::Unix(_), Some(_)) => Err(Error::Config(
                "--tls-cert is for TCP, and the inherited socket is a Unix domain socket: leave one of them out"
                    .to_owned(),
            )),
            _ => Ok(Self::Inherited(socket)),
        }
    }

    /// Returns `None` for a Unix domain socket.
    pub fn ip(&self) -> Option<IpAddr> {
        match self {
            Self::Tcp(address) => Some(address.ip()),
            Self::Inherited(InheritedSocket::Tcp(listener)) => {
                listener.local_addr().ok().map(|address| address.ip())
            }
            Self::Unix(_) | Self::Inherited(InheritedSocket::Unix(_)) => None,
        }
    }
}

/// Returns the address of the gRPC port, if the server has one.
pub fn grpc_address(server: &ServerArgs) -> Result<Option<SocketAddr>, Error> {
    let port = server.grpc_port;
    port.map(|port| listen_address("grpc-host", &server.grpc_host, port))
        .transpose()
}

/// Resolves the host of an option. Prefers an IPv4 address of several: clients that connect to `localhost` try
/// IPv4 too, and clients that connect to 127.0.0.1 try nothing else.
fn listen_address(option: &str, host: &str, port: u16) -> Result<SocketAddr, Error> {
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
                "--{option} {host} has a port: write --{option} {bare} --{} {port}",
                option.replace("host", "port")
            ));
        }
        Error::Config(format!(
            "--{option} {host} is neither an address nor a name that can be resolved; 127.0.0.1 \
             listens for this machine only, 0.0.0.0 for others as well"
        ))
    })
}
