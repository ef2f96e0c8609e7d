//! Secured connections for gRPC, to other nodes.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tonic::codegen::Service;
use tonic::codegen::http::Uri;

use super::ClusterTls;
use super::stream::SecureStream;

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
