//! Secured connections for gRPC, made and accepted.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use corella_engine::rare_line;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, mpsc};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tonic::codegen::Service;
use tonic::codegen::http::Uri;

use super::ClusterTls;
use super::stream::SecureStream;

/// Connections whose handshake is not over. Further ones wait in the system's queue.
const MAX_HANDSHAKES: usize = 64;

/// Before it is tried again to accept one.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Connects to the host and port of a URI.
#[derive(Clone)]
pub struct SecureConnector(pub ClusterTls);

impl Service<Uri> for SecureConnector {
    type Response = TokioIo<SecureStream>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let tls = self.0.clone();
        Box::pin(async move {
            let authority = uri.authority().ok_or(io::ErrorKind::InvalidInput)?;
            let stream = TcpStream::connect(authority.as_str()).await?;
            stream.set_nodelay(true)?;
            let host = authority.host();
            let stream = tls.connect(stream, host).await?;
            Ok(TokioIo::new(SecureStream::new(
                stream,
                tls,
                host.to_owned(),
            )))
        })
    }
}

/// The connections whose other end has a certificate of this cluster. A slow handshake holds up
/// nobody else.
pub fn secure_incoming(
    mut incoming: impl tokio_stream::Stream<Item = io::Result<TcpStream>> + Send + Unpin + 'static,
    tls: ClusterTls,
) -> ReceiverStream<io::Result<SecureStream>> {
    let (sender, secured) = mpsc::channel(1);
    let handshakes = Arc::new(Semaphore::new(MAX_HANDSHAKES));
    tokio::spawn(async move {
        loop {
            let Ok(permit) = handshakes.clone().acquire_owned().await else {
                return;
            };
            let accepted = tokio::select! {
                accepted = incoming.next() => accepted,
                () = sender.closed() => return,
            };
            let stream = match accepted {
                None => return,
                Some(Ok(stream)) => stream,
                Some(Err(error)) => {
                    // Mostly no descriptor left; others may free some.
                    rare_line!(warn, "cannot accept a connection of another node: {error}");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            let (sender, tls) = (sender.clone(), tls.clone());
            tokio::spawn(async move {
                let _permit = permit;
                let secured = async {
                    let peer = stream.peer_addr()?.ip().to_string();
                    let stream = tls.accept(stream).await?;
                    io::Result::Ok(SecureStream::new(stream, tls, peer))
                };
                // The reason for a refusal has been said.
                if let Ok(stream) = secured.await {
                    let _ = sender.send(Ok(stream)).await;
                }
            });
        }
    });
    ReceiverStream::new(secured)
}
