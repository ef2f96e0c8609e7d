//! Connections that other nodes open for their sessions.
//!
//! The number of connections is limited, so that the node's own API keeps descriptors. A connection that does not begin
//! with HTTP/2 is closed soon. The server's pings find silent connections.

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use corella_engine::rare_line;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{Sleep, sleep};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::Connected;

use crate::tls::{ClusterTls, SecureStream};

/// The first bytes of every HTTP/2 client: its preface and the head of a settings frame (RFC 9113, 3.4).
const OPENING_BYTES: usize = 24 + 9;
/// The limit of concurrent TLS handshakes. Further handshakes wait, and their wait counts against `opening_timeout`.
const MAX_HANDSHAKES: usize = 64;
/// The pause after a failed accept.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The port to which other nodes send sessions.
pub struct NodeListener {
    pub listener: TcpListener,
    pub tls: Option<ClusterTls>,
    /// The limit of open connections. Further ones wait in the system's queue.
    pub max_num_connections: usize,
    /// The limit of open connections for each address. Further ones are closed. Nodes behind one NAT share an address.
    pub max_per_address: usize,
    /// The limit of the wait for the TLS handshake and the first 33 bytes after it, which open HTTP/2.
    pub opening_timeout: Duration,
}

impl NodeListener {
    pub fn new(listener: TcpListener) -> Self {
        Self {
            listener,
            tls: None,
            max_num_connections: 1024,
            max_per_address: usize::MAX,
            opening_timeout: Duration::from_secs(10),
        }
    }

    /// Accepts connections until the stream is dropped. A slow handshake delays no other connection.
    pub(super) fn connections(self) -> ReceiverStream<io::Result<NodeStream>> {
        let (sender, accepted) = mpsc::channel(1);
        tokio::spawn(async move {
            tokio::select! {
                () = self.accept(&sender) => {}
                () = sender.closed() => {}
            }
        });
        ReceiverStream::new(accepted)
    }

    async fn accept(self, sender: &mpsc::Sender<io::Result<NodeStream>>) {
        let connections = Arc::new(Semaphore::new(self.max_num_connections));
        let handshakes = Arc::new(Semaphore::new(MAX_HANDSHAKES));
        let addresses = Arc::new(AddressTable::default());
        loop {
            if connections.available_permits() == 0 {
                let max = self.max_num_connections;
                rare_line!(
                    warn,
                    "{max} connections of other nodes are open, and more wait"
                );
            }
            let Ok(permit) = connections.clone().acquire_owned().await else {
                return;
            };
            let (stream, address) = match self.listener.accept().await {
                Ok((stream, peer)) => (stream, peer.ip()),
                Err(error) => {
                    // Usually no descriptor is left. Closed connections free some.
                    rare_line!(warn, "cannot accept a connection of another node: {error}");
                    sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            let Some(of_address) = addresses.take_permit(address, self.max_per_address) else {
                let max = self.max_per_address;
                rare_line!(
                    warn,
                    "closing a connection of {address}, which has {max} connections already"
                );
                continue;
            };
            let opening = Opening {
                num_missing: OPENING_BYTES,
                deadline: Box::pin(sleep(self.opening_timeout)),
            };
            let (sender, tls, handshakes) = (sender.clone(), self.tls.clone(), handshakes.clone());
            tokio::spawn(async move {
                let permits = (permit, of_address);
                let node_stream = NodeStream::open(stream, tls, opening, &handshakes, permits);
                // The refusal has been logged.
                if let Ok(stream) = node_stream.await {
                    let _ = sender.send(Ok(stream)).await;
                }
            });
        }
    }
}

/// A connection to another node.
pub struct NodeStream {
    stream: Transport,
    /// Present until the peer has opened HTTP/2.
    opening: Option<Opening>,
    _permits: Permits,
}

/// A connection's two permits: one counts against the limit of all connections, and one against the limit of its
/// address.
type Permits = (OwnedSemaphorePermit, AddressPermit);

/// Number of open connections by address.
#[derive(Default)]
struct AddressTable(Mutex<HashMap<IpAddr, usize>>);

struct AddressPermit {
    table: Arc<AddressTable>,
    address: IpAddr,
}

impl AddressTable {
    fn take_permit(self: &Arc<Self>, address: IpAddr, max: usize) -> Option<AddressPermit> {
        let mut numbers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let number = numbers.entry(address).or_default();
        (*number < max).then(|| {
            *number += 1;
            AddressPermit {
                table: self.clone(),
                address,
            }
        })
    }
}

impl Drop for AddressPermit {
    fn drop(&mut self) {
        let mut numbers = self.table.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(number) = numbers.get_mut(&self.address) {
            *number -= 1;
            if *number == 0 {
                numbers.remove(&self.address);
            }
        }
    }
}

enum Transport {
    Plain(TcpStream),
    Secure(Box<SecureStream>),
}

struct Opening {
    num_missing: usize,
    deadline: Pin<Box<Sleep>>,
}

impl NodeStream {
    async fn open(
        stream: TcpStream,
        tls: Option<ClusterTls>,
        mut opening: Opening,
        handshakes: &Semaphore,
        permits: Permits,
    ) -> io::Result<Self> {
        // Messages are small, and the peer waits for each.
        stream.set_nodelay(true)?;
        let stream = match tls {
            None => Transport::Plain(stream),
            Some(tls) => {
                let peer = stream.peer_addr()?.ip().to_string();
                let secured = async {
                    let _turn = handshakes.acquire().await;
                    tls.accept(stream).await
                };
                let stream = tokio::select! {
                    secured = secured => secured?,
                    () = &mut opening.deadline => return Err(io::ErrorKind::TimedOut.into()),
                };
                Transport::Secure(Box::new(SecureStream::new(stream, tls, peer)))
            }
        };
        Ok(Self {
            stream,
            opening: Some(opening),
            _permits: permits,
        })
    }
}

impl Connected for NodeStream {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl AsyncRead for NodeStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let num_before = buffer.filled().len();
        let read = match &mut this.stream {
            Transport::Plain(stream) => Pin::new(stream).poll_read(context, buffer),
            Transport::Secure(stream) => Pin::new(stream).poll_read(context, buffer),
        };
        let Some(opening) = &mut this.opening else {
            return read;
        };
        let num_missing = opening.num_missing;
        opening.num_missing = num_missing.saturating_sub(buffer.filled().len() - num_before);
        if opening.num_missing == 0 {
            this.opening = None;
        } else if read.is_pending() {
            ready!(opening.deadline.as_mut().poll(context));
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        read
    }
}

impl AsyncWrite for NodeStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match &mut self.stream {
            Transport::Plain(stream) => Pin::new(stream).poll_write(context, bytes),
            Transport::Secure(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.stream {
            Transport::Plain(stream) => Pin::new(stream).poll_flush(context),
            Transport::Secure(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.stream {
            Transport::Plain(stream) => Pin::new(stream).poll_shutdown(context),
            Transport::Secure(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}

#[cfg(test)]
mod tests;
