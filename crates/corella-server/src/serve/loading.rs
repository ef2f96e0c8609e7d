//! Answers requests with 503 while the model is loaded.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, HttpBody};
use axum::extract::Request;
use axum::http::header::EXPECT;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::config::tls::ServerTls;
use crate::serve::listener::Listener;
use crate::serve::{ConnectionLimits, Connections, Protocol};
use crate::state::use_count::Count;
use crate::wire::api_error::ApiError;

/// Limits the connections. This is enough, because clients are answered at once.
const MAX_CONNECTIONS: usize = 256;
/// Limits the time to read a body before its request is refused.
const MAX_READING: Duration = Duration::from_secs(5);

/// Answers every request with 503 until `end`. Each connection is closed after the answer, so that the next request
/// reaches the server.
pub struct Loading {
    ends: oneshot::Sender<()>,
    accepting: JoinHandle<()>,
}

impl Loading {
    /// Shares the queue of connections with `listener`, which must accept no connection before `end`.
    pub fn start(listener: &Listener, tls: Option<ServerTls>) -> io::Result<Self> {
        let own = listener.try_clone()?;
        let router = Router::new().fallback(refuse);
        let limits = ConnectionLimits {
            max_num_connections: MAX_CONNECTIONS,
            keep_alive: false,
            ..ConnectionLimits::default()
        };
        let connections = Connections::new(
            router,
            Protocol::http1(&limits),
            tls,
            &limits,
            Count::default(),
        );
        let (ends, ended) = oneshot::channel::<()>();
        let accepting = tokio::spawn(async move {
            tokio::select! {
                _ = connections.accept_from(&own) => {}
                _ = ended => {}
            }
            // A client that is slow to send its request must not delay the start.
            tokio::spawn(connections.close());
        });
        Ok(Self { ends, accepting })
    }

    /// Leaves later connections to the owner of the listener.
    pub async fn end(self) {
        drop(self.ends);
        let _ = self.accepting.await;
    }
}

/// Reads and discards the body. If the connection closes while a client writes, the client sees a broken connection
/// instead of the answer. A client that waits for `100 Continue` has not begun to write.
async fn refuse(request: Request) -> ApiError {
    if !request.headers().contains_key(EXPECT) {
        let _ = tokio::time::timeout(MAX_READING, read_to_end(request.into_body())).await;
    }
    ApiError::loading()
}

async fn read_to_end(mut body: Body) {
    while let Some(Ok(_)) = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await {}
}
