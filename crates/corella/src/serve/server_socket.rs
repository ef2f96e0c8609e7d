//! The listening socket of a server, and its address for clients.

use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use corella_server::{Listener, Loading, ServerTls};
use tokio::net::{TcpListener, UnixListener, UnixStream};

use crate::Error;
use crate::arguments::config::ListenAddress;
use crate::process::inherited_socket::InheritedSocket;

pub struct ServerSocket {
    /// `None` after `take_listener`.
    listener: Option<Listener>,
    address: Address,
    /// Whether the supervisor of this process has opened the socket, and keeps it.
    is_inherited: bool,
}

enum Address {
    Tcp(SocketAddr),
    /// The socket's file is deleted at the end, unless the socket is inherited.
    Unix(PathBuf),
}

impl ServerSocket {
    pub async fn open(address: ListenAddress) -> Result<Self, Error> {
        let failed = |shown: String, advice: &'static str| {
            move |error: io::Error| {
                let is_used = error.kind() == io::ErrorKind::AddrInUse;
                let advice = if is_used { advice } else { "" };
                Error::Io(format!("cannot listen on {shown}{advice}"), error)
            }
        };
        match address {
            ListenAddress::Tcp(address) => {
                let bound = async {
                    let listener = TcpListener::bind(address).await?;
                    let address = listener.local_addr()?;
                    io::Result::Ok((listener, address))
                };
                let (listener, address) = bound.await.map_err(failed(
                    address.to_string(),
                    "; --port PORT chooses another port",
                ))?;
                Ok(Self {
                    listener: Some(Listener::Tcp(listener)),
                    address: Address::Tcp(address),
                    is_inherited: false,
                })
            }
            ListenAddress::Unix(path) => {
                let bound = async {
                    remove_abandoned(&path).await?;
                    UnixListener::bind(&path)
                };
                let listener = bound
                    .await
                    .map_err(failed(path.display().to_string(), ""))?;
                Ok(Self {
                    listener: Some(Listener::Unix(listener)),
                    address: Address::Unix(path),
                    is_inherited: false,
                })
            }
            ListenAddress::Inherited(socket) => Self::inherit(socket)
                .map_err(|error| Error::Io("using the inherited socket".to_owned(), error)),
        }
    }

    /// Must be called within a runtime.
    fn inherit(socket: InheritedSocket) -> io::Result<Self> {
        let (listener, address) = match socket {
            InheritedSocket::Tcp(listener) => {
                let address = listener.local_addr()?;
                let listener = TcpListener::from_std(listener)?;
                (Listener::Tcp(listener), Address::Tcp(address))
            }
            InheritedSocket::Unix(listener) => {
                // A socket in the abstract namespace has no path.
                let path = { listener.local_addr()? }.as_pathname().map(Path::to_owned);
                let path = path.unwrap_or_else(|| PathBuf::from("(a socket without a path)"));
                let listener = UnixListener::from_std(listener)?;
                (Listener::Unix(listener), Address::Unix(path))
            }
        };
        Ok(Self {
            listener: Some(listener),
            address,
            is_inherited: true,
        })
    }

    /// Answers requests with 503 until the returned value is ended. Returns `None` for an inherited socket: its clients
    /// wait until the model is loaded, because one of them has caused the start.
    ///
    /// # Panics
    /// If the listener was taken before.
    pub fn start_loading(&self, tls: Option<ServerTls>) -> io::Result<Option<Loading>> {
        if self.is_inherited {
            return Ok(None);
        }
        let listener = self.listener.as_ref().expect("the listener is there");
        Loading::start(listener, tls).map(Some)
    }

    /// # Panics
    /// If the listener was taken before.
    pub fn take_listener(&mut self) -> Listener {
        self.listener.take().expect("the listener is taken once")
    }

    /// Returns the address for clients: the beginning of a URL, or the path of a socket.
    pub fn address(&self, has_tls: bool) -> String {
        match (&self.address, has_tls) {
            (Address::Tcp(address), true) => format!("https://{address}"),
            (Address::Tcp(address), false) => format!("http://{address}"),
            (Address::Unix(path), _) => path.display().to_string(),
        }
    }

    /// Returns curl's arguments before a path.
    pub fn curl(&self, has_tls: bool) -> String {
        match &self.address {
            Address::Tcp(_) => self.address(has_tls),
            Address::Unix(_) => {
                format!("--unix-socket {} http://localhost", self.address(has_tls))
            }
        }
    }

    pub fn shown(&self) -> String {
        match &self.address {
            Address::Tcp(address) => address.to_string(),
            Address::Unix(path) => path.display().to_string(),
        }
    }
}

impl Drop for ServerSocket {
    fn drop(&mut self) {
        if let Address::Unix(path) = &self.address
            && !self.is_inherited
        {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Opens the gRPC port. Clients wait in its queue until the server accepts them.
pub async fn open_grpc(address: SocketAddr) -> Result<(Listener, SocketAddr), Error> {
    let bound = async {
        let listener = TcpListener::bind(address).await?;
        let address = listener.local_addr()?;
        io::Result::Ok((Listener::Tcp(listener), address))
    };
    let what = format!("cannot listen on {address}, of --grpc-port");
    bound.await.map_err(|error| Error::Io(what, error))
}

/// Deletes the socket of a killed server. A socket with a listener stays, and so does any other file.
async fn remove_abandoned(path: &Path) -> io::Result<()> {
    let is_socket = path
        .symlink_metadata()
        .is_ok_and(|found| found.file_type().is_socket());
    if !is_socket {
        return Ok(());
    }
    match UnixStream::connect(path).await {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path)
        }
        _ => Ok(()),
    }
}
