//! A connection to a peer, over TCP or inside the host.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, RawFd};
use std::str::FromStr;

use libc::{MSG_NOSIGNAL, iovec, msghdr};
use tokio::io::Interest;
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsStream;

use super::io_parts::IoParts;
use super::tls_socket::TlsSocket;
use crate::registry::host_and_port;
use crate::tls::ClusterTls;

/// The address at which a node's sender listens.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum PeerAddress {
    Tcp(SocketAddr),
    /// HOST:PORT with a host name, which is looked up for each connection.
    Name(String),
    /// The name of a socket for peers on this host. The socket is in Linux's abstract namespace: it vanishes with its
    /// process, however the process ends, and belongs to one network namespace.
    Unix(String),
}

impl From<SocketAddr> for PeerAddress {
    fn from(address: SocketAddr) -> Self {
        Self::Tcp(address)
    }
}

impl PeerAddress {
    /// The host that the certificate of a node at this address must name.
    pub(super) fn host(&self) -> String {
        match self {
            Self::Tcp(address) => address.ip().to_string(),
            Self::Name(address) => {
                host_and_port(address).map_or_else(|_| address.clone(), |(host, _)| host.to_owned())
            }
            Self::Unix(name) => name.clone(),
        }
    }
}

impl fmt::Display for PeerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "{address}"),
            Self::Name(address) => f.write_str(address),
            Self::Unix(name) => write!(f, "{UNIX}{name}"),
        }
    }
}

/// Precedes a socket's name in the text of an address.
const UNIX: &str = "unix:";

/// Parses the text that `Display` writes.
impl FromStr for PeerAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(name) = text.strip_prefix(UNIX) {
            return Ok(Self::Unix(name.to_owned()));
        }
        if let Ok(address) = text.parse() {
            return Ok(Self::Tcp(address));
        }
        host_and_port(text).map(|_| Self::Name(text.to_owned()))
    }
}

pub enum Socket {
    Tcp(TcpStream),
    Tls(Box<TlsSocket>),
    Unix(UnixStream),
}

impl Socket {
    /// Connects with TLS over the network, if TLS is configured. The certificate at the other end must then name the
    /// address's host. Inside the host, the listening process must have the user of this process, because any process
    /// may take a name.
    pub async fn connect(address: &PeerAddress, tls: Option<&ClusterTls>) -> io::Result<Self> {
        let stream = match address {
            PeerAddress::Tcp(address) => TcpStream::connect(address).await?,
            PeerAddress::Name(address) => TcpStream::connect(address).await?,
            PeerAddress::Unix(name) => {
                // A leading zero byte makes the name abstract.
                let stream = UnixStream::connect(format!("\0{name}")).await?;
                return Self::Unix(stream).of_own_user();
            }
        };
        match (Self::tcp(stream)?, tls) {
            (Self::Tcp(stream), Some(tls)) => {
                Ok(Self::tls(tls.connect(stream, &address.host()).await?))
            }
            (socket, _) => Ok(socket),
        }
    }

    /// Secures an accepted connection: by TLS or, inside the host, by the user of the other process.
    pub async fn secured(self, tls: Option<&ClusterTls>) -> io::Result<Self> {
        match (self, tls) {
            (Self::Tcp(stream), Some(tls)) => Ok(Self::tls(tls.accept(stream).await?)),
            (socket @ Self::Unix(_), _) => socket.of_own_user(),
            (socket, _) => Ok(socket),
        }
    }

    /// Refuses a connection inside the host if the process at the other end has another user. Abstract sockets have no
    /// permissions, but the kernel reports that user.
    fn of_own_user(self) -> io::Result<Self> {
        match self.has_own_user() {
            true => Ok(self),
            false => Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the process at the other end is another user's; run both as the same user, or use TCP",
            )),
        }
    }

    fn tls(stream: TlsStream<TcpStream>) -> Self {
        Self::Tls(Box::new(stream.into()))
    }

    pub fn tcp(stream: TcpStream) -> io::Result<Self> {
        // Frames are written whole, and the last frame of a burst should not wait for another one.
        stream.set_nodelay(true)?;
        Ok(Self::Tcp(stream))
    }

    pub fn is_local(&self) -> bool {
        matches!(self, Self::Unix(_))
    }

    /// The process at the other end of a connection inside the host. `None` if the process is in a PID namespace that
    /// this process cannot see.
    pub fn peer_pid(&self) -> Option<libc::pid_t> {
        match self {
            Self::Tcp(_) | Self::Tls(_) => None,
            Self::Unix(stream) => stream.peer_cred().ok()?.pid().filter(|&pid| pid > 0),
        }
    }

    /// Returns whether the process at the other end of a connection inside the host has the user of this process.
    fn has_own_user(&self) -> bool {
        match self {
            Self::Tcp(_) | Self::Tls(_) => false,
            Self::Unix(stream) => {
                // SAFETY: a call without arguments.
                let own = unsafe { libc::geteuid() };
                stream.peer_cred().is_ok_and(|peer| peer.uid() == own)
            }
        }
    }

    pub async fn readable(&self) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.readable().await,
            Self::Tls(socket) => socket.readable().await,
            Self::Unix(stream) => stream.readable().await,
        }
    }

    pub async fn writable(&self) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.writable().await,
            Self::Tls(socket) => socket.writable().await,
            Self::Unix(stream) => stream.writable().await,
        }
    }

    /// Returns the number of bytes received, or an error at the end of the stream.
    pub fn try_read(&self, out: &mut [u8]) -> io::Result<usize> {
        let num_bytes = match self {
            Self::Tcp(stream) => stream.try_read(out)?,
            Self::Tls(socket) => socket.try_read(out)?,
            Self::Unix(stream) => stream.try_read(out)?,
        };
        match num_bytes {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            num_bytes => Ok(num_bytes),
        }
    }

    /// Reads the few bytes of a frame at the beginning of a connection.
    pub async fn read_exact(&self, mut out: &mut [u8]) -> io::Result<()> {
        while !out.is_empty() {
            self.readable().await?;
            match self.try_read(out) {
                Ok(num_bytes) => out = &mut out[num_bytes..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Returns whether the other end is known to send nothing more. For callers that do not read at the same time.
    pub async fn has_ended(&self) -> bool {
        let ready = async {
            match self {
                Self::Tcp(stream) => stream.ready(Interest::READABLE).await,
                Self::Unix(stream) => stream.ready(Interest::READABLE).await,
                Self::Tls(_) => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            ready = ready => ready.is_ok_and(|ready| ready.is_read_closed()),
            () = std::future::ready(()) => false,
        }
    }

    /// Writes the few bytes of a frame at the beginning of a connection.
    pub async fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        loop {
            let sent = match (bytes.is_empty(), self) {
                (true, _) => match self.try_flush() {
                    Ok(()) => return Ok(()),
                    Err(error) => Err(error),
                },
                (false, Self::Tcp(stream)) => stream.try_write(bytes),
                (false, Self::Tls(socket)) => socket.try_write(bytes),
                (false, Self::Unix(stream)) => stream.try_write(bytes),
            };
            match sent {
                Ok(num_bytes) => bytes = &bytes[num_bytes..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.writable().await?,
                Err(error) => return Err(error),
            }
        }
    }

    /// Receives into the next pieces, and returns the number of bytes, or an error at the end of the stream.
    ///
    /// # Safety
    /// The pieces' memory has no other user during the call.
    pub unsafe fn try_receive(&self, parts: &IoParts) -> io::Result<usize> {
        let num_bytes = match self {
            // SAFETY: promised by the caller.
            Self::Tls(socket) => unsafe { socket.try_receive(parts.for_call())? },
            Self::Tcp(stream) => {
                stream.try_io(Interest::READABLE, || receive(stream.as_raw_fd(), parts))?
            }
            Self::Unix(stream) => {
                stream.try_io(Interest::READABLE, || receive(stream.as_raw_fd(), parts))?
            }
        };
        match num_bytes {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            num_bytes => Ok(num_bytes),
        }
    }

    /// Sends from the next pieces, and returns the number of accepted bytes. Some of these may not be out before
    /// [`try_flush`](Self::try_flush) succeeds.
    ///
    /// # Safety
    /// The pieces' memory is not written to during the call.
    pub unsafe fn try_send(&self, parts: &IoParts) -> io::Result<usize> {
        match self {
            // SAFETY: promised by the caller.
            Self::Tls(socket) => unsafe { socket.try_send(parts.for_call()) },
            Self::Tcp(stream) => {
                stream.try_io(Interest::WRITABLE, || send(stream.as_raw_fd(), parts))
            }
            Self::Unix(stream) => {
                stream.try_io(Interest::WRITABLE, || send(stream.as_raw_fd(), parts))
            }
        }
    }

    /// Succeeds when all accepted bytes are out. Until then fails with `WouldBlock`.
    pub fn try_flush(&self) -> io::Result<()> {
        match self {
            Self::Tls(socket) => socket.try_flush(),
            Self::Tcp(_) | Self::Unix(_) => Ok(()),
        }
    }

    /// Wakes the waiting tasks of both directions.
    pub fn shut_down(&self) {
        let fd = match self {
            Self::Tcp(stream) => stream.as_raw_fd(),
            Self::Tls(socket) => socket.fd(),
            Self::Unix(stream) => stream.as_raw_fd(),
        };
        // SAFETY: a call on an open descriptor. Failure on a lost connection is harmless.
        unsafe { libc::shutdown(fd, libc::SHUT_RDWR) };
    }
}

fn receive(fd: RawFd, parts: &IoParts) -> io::Result<usize> {
    let mut message = message_of(parts.for_call());
    // SAFETY: the message names pieces that the caller owns.
    checked(unsafe { libc::recvmsg(fd, &mut message, 0) })
}

fn send(fd: RawFd, parts: &IoParts) -> io::Result<usize> {
    let message = message_of(parts.for_call());
    // SAFETY: the message names pieces that are not written to.
    checked(unsafe { libc::sendmsg(fd, &message, MSG_NOSIGNAL) })
}

fn message_of(parts: &[iovec]) -> msghdr {
    // SAFETY: all zeroes is an empty message.
    let mut message: msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = parts.as_ptr().cast_mut();
    message.msg_iovlen = parts.len() as _;
    message
}

fn checked(num_bytes: isize) -> io::Result<usize> {
    usize::try_from(num_bytes).map_err(|_| io::Error::last_os_error())
}
