//! The listener on which a sender accepts receivers.

use std::io;
use std::net::{TcpListener as StdTcpListener, TcpStream as StdTcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{
    SocketAddr, UnixListener as StdUnixListener, UnixStream as StdUnixStream,
};

use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};

use super::PeerAddress;
use super::socket::Socket;

pub enum Listener {
    Tcp(TcpListener),
    /// The listener, and the name of its socket.
    Unix(UnixListener, String),
}

impl Listener {
    /// Must be called within a runtime.
    pub fn bind(address: &PeerAddress) -> io::Result<Self> {
        match address {
            PeerAddress::Tcp(address) => Self::of(StdTcpListener::bind(address)?),
            PeerAddress::Name(name) => Self::of(StdTcpListener::bind(name)?),
            PeerAddress::Unix(name) => {
                let listener = StdUnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?)?;
                listener.set_nonblocking(true)?;
                Ok(Self::Unix(UnixListener::from_std(listener)?, name.clone()))
            }
        }
    }

    /// Must be called within a runtime.
    pub fn of(listener: StdTcpListener) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        Ok(Self::Tcp(TcpListener::from_std(listener)?))
    }

    /// Returns the address. With port 0, it has the actual port.
    pub fn address(&self) -> io::Result<PeerAddress> {
        Ok(match self {
            Self::Tcp(listener) => PeerAddress::Tcp(listener.local_addr()?),
            Self::Unix(_, name) => PeerAddress::Unix(name.clone()),
        })
    }

    /// Accepts a connection, which may then be attached to any thread.
    pub async fn accept(&self) -> io::Result<Accepted> {
        Ok(match self {
            Self::Tcp(listener) => Accepted::Tcp(listener.accept().await?.0.into_std()?),
            Self::Unix(listener, _) => Accepted::Unix(listener.accept().await?.0.into_std()?),
        })
    }
}

/// A connection that belongs to no thread yet.
pub enum Accepted {
    Tcp(StdTcpStream),
    Unix(StdUnixStream),
}

impl Accepted {
    /// Moves the connection to the current thread, inside a runtime. Returns the socket, and a name of the other end.
    pub fn attach(self) -> io::Result<(Socket, String)> {
        match self {
            Self::Tcp(stream) => {
                let peer = stream.peer_addr()?.to_string();
                Ok((Socket::tcp(TcpStream::from_std(stream)?)?, peer))
            }
            Self::Unix(stream) => {
                let socket = Socket::Unix(UnixStream::from_std(stream)?);
                let peer = match socket.peer_pid() {
                    Some(pid) => format!("process {pid}"),
                    None => "a process elsewhere".to_owned(),
                };
                Ok((socket, peer))
            }
        }
    }
}
