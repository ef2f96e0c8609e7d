//! One session's stream, as its driver uses it.

use std::time::Duration;

use corella_engine::rare_line;
use tokio::sync::{mpsc, watch};
use tonic::Streaming;

use super::wire::{Body, Envelope, WireError};

/// The limit of messages that wait for a peer. If more messages wait, the peer counts as lost.
pub const MAX_UNSENT: usize = 1024;
/// The limit of the time in which a closed stream sends its remaining messages.
const LINGER: Duration = Duration::from_secs(3);

/// The sending half of a stream. Dropping the link closes the stream after the messages already sent.
pub struct Link<T> {
    outgoing: mpsc::Sender<T>,
    _open: watch::Sender<()>,
}

/// Ends when the link has been dropped.
#[derive(Clone)]
pub struct LinkClosed(watch::Receiver<()>);

impl<T> Link<T> {
    /// Returns the link, and the messages for its stream to send.
    pub fn new() -> (Self, mpsc::Receiver<T>, LinkClosed) {
        let (outgoing, receiver) = mpsc::channel(MAX_UNSENT);
        let (link, closed) = Self::over(outgoing);
        (link, receiver, closed)
    }

    /// A link that sends through `outgoing`.
    pub fn over(outgoing: mpsc::Sender<T>) -> (Self, LinkClosed) {
        let (open, closed) = watch::channel(());
        let link = Self {
            outgoing,
            _open: open,
        };
        (link, LinkClosed(closed))
    }

    /// Returns false when the peer has left, or has taken no message for so long that it counts as lost.
    pub fn send(&self, message: T) -> bool {
        self.outgoing.try_send(message).is_ok()
    }
}

impl LinkClosed {
    async fn wait(&mut self) {
        // `changed` returns an error once the link has been dropped.
        while self.0.changed().await.is_ok() {}
    }

    /// Returns the next message, or `None` when the stream has ended, failed, or was closed on this side. A message that
    /// `read` refuses ends the stream.
    pub async fn next<M>(
        &mut self,
        incoming: &mut Streaming<Envelope>,
        read: impl Fn(Body) -> Result<M, WireError>,
    ) -> Option<M> {
        loop {
            let envelope = tokio::select! {
                message = incoming.message() => message.ok().flatten(),
                () = self.wait() => None,
            };
            let Some(body) = envelope?.body else {
                // This kind of message comes from a later version of the protocol.
                continue;
            };
            let message = read(body);
            if let Err(error) = &message {
                rare_line!(warn, %error, "another node breaks the protocol");
            }
            return message.ok();
        }
    }
}

/// Reads a stream to its end after this side has closed it. Dropping the stream would reset it, and discard messages
/// that are not sent yet.
pub async fn linger(mut incoming: Streaming<Envelope>) {
    let rest = async { while let Ok(Some(_)) = incoming.message().await {} };
    let _ = tokio::time::timeout(LINGER, rest).await;
}
