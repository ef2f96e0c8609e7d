//! A connection to a peer, over TCP or inside the host.

use std::fmt;
use std::io;
use std::net::{AddrParseError, SocketAddr};
use std::os::fd::{AsRawFd, RawFd};
use std::path::PathBuf;
use std::str::FromStr;

use libc::{MSG_NOSIGNAL, iovec, msghdr};
use tokio::io::Interest;
use tokio::net::{TcpStream, UnixStream};

use super::io_parts::IoParts;

/// Where a node's sender listens.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum PeerAddress {
    Tcp(SocketAddr),
    /// A socket in the file system, for a peer on this host.
    Unix(PathBuf),
}

impl From<SocketAddr> for PeerAddress {
    fn from(address: SocketAddr) -> Self {
        Self::Tcp(address)
    }
}

impl From<PathBuf> for PeerAddress {
    fn from(path: PathBuf) -> Self {
        Self::Unix(path)
    }
}

impl fmt::Display for PeerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "{address}"),
            Self::Unix(path) => write!(f, "{UNIX}{}", path.display()),
        }
    }
}

/// In front of a path where an address is text.
const UNIX: &str = "unix:";

/// As `Display` writes it.
impl FromStr for PeerAddress {
    type Err = AddrParseError;

    fn from_str(text: &str) -> Result<Self, AddrParseError> {
        match text.strip_prefix(UNIX) {
            Some(path) => Ok(Self::Unix(path.into())),
            None => text.parse().map(Self::Tcp),
        }
    }
}

pub enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Socket {
    pub async fn connect(address: &PeerAddress) -> io::Result<Self> {
        match address {
            PeerAddress::Tcp(address) => Self::tcp(TcpStream::connect(address).await?),
            PeerAddress::Unix(path) => Ok(Self::Unix(UnixStream::connect(path).await?)),
        }
    }

    pub fn tcp(stream: TcpStream) -> io::Result<Self> {
        // Frames are written whole, and the last one of a burst should not wait for another.
        stream.set_nodelay(true)?;
        Ok(Self::Tcp(stream))
    }

    pub fn is_local(&self) -> bool {
        matches!(self, Self::Unix(_))
    }

    /// The process at the other end of a connection inside the host, or `None` if it is in a PID
    /// namespace that this process cannot see.
    pub fn peer_pid(&self) -> Option<libc::pid_t> {
        match self {
            Self::Tcp(_) => None,
            Self::Unix(stream) => stream.peer_cred().ok()?.pid().filter(|&pid| pid > 0),
        }
    }

    /// Whether the process at the other end of a connection inside the host has this one's user.
    pub fn has_own_user(&self) -> bool {
        match self {
            Self::Tcp(_) => false,
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
            Self::Unix(stream) => stream.readable().await,
        }
    }

    pub async fn writable(&self) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.writable().await,
            Self::Unix(stream) => stream.writable().await,
        }
    }

    /// How many bytes came. At the end of the stream an error.
    pub fn try_read(&self, out: &mut [u8]) -> io::Result<usize> {
        let num_bytes = match self {
            Self::Tcp(stream) => stream.try_read(out)?,
            Self::Unix(stream) => stream.try_read(out)?,
        };
        match num_bytes {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            num_bytes => Ok(num_bytes),
        }
    }

    /// For the few bytes of a frame at the beginning of a connection.
    pub async fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            self.writable().await?;
            let sent = match self {
                Self::Tcp(stream) => stream.try_write(bytes),
                Self::Unix(stream) => stream.try_write(bytes),
            };
            match sent {
                Ok(num_bytes) => bytes = &bytes[num_bytes..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Receives into the next pieces; how many bytes came. At the end of the stream an error.
    ///
    /// # Safety
    /// Nobody else uses the pieces' memory meanwhile.
    pub unsafe fn try_receive(&self, parts: &IoParts) -> io::Result<usize> {
        self.try_io(Interest::READABLE, |fd| {
            let mut message = message_of(parts.for_call());
            // SAFETY: the message names pieces that are the caller's.
            match checked(unsafe { libc::recvmsg(fd, &mut message, 0) })? {
                0 => Err(io::ErrorKind::UnexpectedEof.into()),
                num_bytes => Ok(num_bytes),
            }
        })
    }

    /// Sends from the next pieces; how many bytes went.
    ///
    /// # Safety
    /// Nobody writes to the pieces' memory meanwhile.
    pub unsafe fn try_send(&self, parts: &IoParts) -> io::Result<usize> {
        self.try_io(Interest::WRITABLE, |fd| {
            let message = message_of(parts.for_call());
            // SAFETY: the message names pieces that nobody writes to.
            checked(unsafe { libc::sendmsg(fd, &message, MSG_NOSIGNAL) })
        })
    }

    fn try_io<T>(
        &self,
        interest: Interest,
        call: impl FnOnce(RawFd) -> io::Result<T>,
    ) -> io::Result<T> {
        match self {
            Self::Tcp(stream) => stream.try_io(interest, || call(stream.as_raw_fd())),
            Self::Unix(stream) => stream.try_io(interest, || call(stream.as_raw_fd())),
        }
    }

    /// Ends what both sides' tasks are waiting for.
    pub fn shut_down(&self) {
        let fd = match self {
            Self::Tcp(stream) => stream.as_raw_fd(),
            Self::Unix(stream) => stream.as_raw_fd(),
        };
        // SAFETY: a call on an open descriptor. That it fails on a lost connection is no harm.
        unsafe { libc::shutdown(fd, libc::SHUT_RDWR) };
    }
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
