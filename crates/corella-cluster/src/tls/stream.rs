//! A secured connection in the form that gRPC uses.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::TlsStream;
use tonic::transport::server::Connected;

use super::ClusterTls;

pub struct SecureStream {
    stream: TlsStream<TcpStream>,
    tls: ClusterTls,
    /// The name of the node at the other end, for the operator.
    peer: String,
}

impl SecureStream {
    pub fn new(stream: TlsStream<TcpStream>, tls: ClusterTls, peer: String) -> Self {
        Self { stream, tls, peer }
    }
}

impl Connected for SecureStream {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl AsyncRead for SecureStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        // A refusal of this node's certificate arrives only after the handshake.
        if let Poll::Ready(Err(error)) = &read {
            self.tls.note_refusal(&self.peer, error);
        }
        read
    }
}

impl AsyncWrite for SecureStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
