//! Answers requests 503 while the model is loaded.

use std::io;

use axum::Router;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::api_error::ApiError;
use crate::listener::Listener;
use crate::serve::{ConnectionLimits, Connections};
use crate::tls::ServerTls;

/// Enough for clients that are answered at once.
const MAX_CONNECTIONS: usize = 256;

/// Answers every request 503 until it ends. Each connection is closed behind the answer, so that the next request
/// reaches the server.
pub struct Loading {
    ends: oneshot::Sender<()>,
    accepting: JoinHandle<()>,
}

impl Loading {
    /// Shares the queue of connections with `listener`, which must accept none before the end.
    pub fn start(listener: &Listener, tls: Option<ServerTls>) -> io::Result<Self> {
        let own = listener.try_clone()?;
        let router = Router::new().fallback(|| async { ApiError::loading() });
        let limits = ConnectionLimits {
            max_num_connections: MAX_CONNECTIONS,
            keep_alive: false,
            ..ConnectionLimits::default()
        };
        let connections = Connections::new(router, tls, &limits);
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
