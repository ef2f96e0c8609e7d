//! The PUB socket: sends batches to subscribers whose topics match.

use std::future::pending;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::sleep;

use super::hub::{Hub, Subscriber};
use super::zmtp::{self, Frame, ZmtpError};
use super::zmtp_connection::{ZmtpConnection, accept, refused};

/// Limits the subscriptions of one peer.
const MAX_PREFIXES: usize = 64;

const MIN_PAUSE: Duration = Duration::from_millis(100);
const MAX_PAUSE: Duration = Duration::from_secs(5);

/// Serves all arriving subscribers.
pub async fn listen(listener: TcpListener, hub: Arc<Hub>, topic: Arc<[u8]>) {
    let serve = |stream| {
        let (hub, topic) = (hub.clone(), topic.clone());
        async move { publish(stream, &hub, &topic).await }
    };
    accept(listener, serve).await;
}

/// Connects to a subscriber, and reconnects whenever the connection is lost.
pub async fn connect(address: String, hub: Arc<Hub>, topic: Arc<[u8]>) {
    let mut pause = MIN_PAUSE;
    loop {
        if let Ok(stream) = TcpStream::connect(&address).await {
            let error = publish(stream, &hub, &topic).await;
            tracing::debug!(address, ?error, "the subscriber to KV events has gone");
            pause = MIN_PAUSE;
        }
        sleep(pause).await;
        pause = (2 * pause).min(MAX_PAUSE);
    }
}

/// Sends batches from the subscription on, until the connection ends.
async fn publish(stream: TcpStream, hub: &Arc<Hub>, topic: &[u8]) -> io::Result<()> {
    let mut peer = ZmtpConnection::greet(stream, "PUB", &["SUB", "XSUB"]).await?;
    let mut subscriptions = Subscriptions::default();
    let mut subscriber = None;
    loop {
        tokio::select! {
            frame = peer.next() => {
                subscriptions.handle(&frame?).map_err(refused)?;
                match subscriptions.match_topic(topic) {
                    true => {
                        subscriber.get_or_insert_with(|| hub.subscribe());
                    }
                    false => subscriber = None,
                }
            }
            (number, batch) = next_of(&mut subscriber) => {
                peer.send(&[topic, &number.to_be_bytes(), &batch]).await?;
            }
        }
    }
}

async fn next_of(subscriber: &mut Option<Subscriber>) -> (u64, Bytes) {
    match subscriber {
        Some(subscriber) => subscriber.next().await,
        None => pending().await,
    }
}

/// The topic prefixes of a peer.
#[derive(Debug, Default)]
struct Subscriptions(Vec<Vec<u8>>);

impl Subscriptions {
    fn match_topic(&self, topic: &[u8]) -> bool {
        self.0.iter().any(|prefix| topic.starts_with(prefix))
    }

    /// Handles a frame that begins or cancels a subscription. Such a frame is a command or, before ZMTP 3.1, a message.
    /// A publisher ignores all other messages.
    fn handle(&mut self, frame: &Frame) -> Result<(), ZmtpError> {
        let (is_begin, prefix) = match frame.is_command {
            true => match zmtp::command(&frame.body)? {
                (b"SUBSCRIBE", prefix) => (true, prefix),
                (b"CANCEL", prefix) => (false, prefix),
                _ => return Ok(()),
            },
            false => match frame.body.split_first() {
                Some((1, prefix)) => (true, prefix),
                Some((0, prefix)) => (false, prefix),
                _ => return Ok(()),
            },
        };
        if is_begin {
            if self.0.len() >= MAX_PREFIXES {
                return Err(ZmtpError::TooLong);
            }
            self.0.push(prefix.to_vec());
        } else if let Some(at) = self.0.iter().position(|known| known == prefix) {
            // A prefix with two subscriptions stays until both are cancelled.
            self.0.swap_remove(at);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_subscription_is_a_prefix_and_counts_as_often_as_it_was_made() {
        let mut subscriptions = Subscriptions::default();
        let mut handle = |is_command, body: &[u8], topic: &[u8]| {
            let body = body.to_vec();
            let frame = Frame {
                is_command,
                has_more: false,
                body,
            };
            subscriptions.handle(&frame).expect("it can be read");
            subscriptions.match_topic(topic)
        };
        assert!(!handle(false, b"", b""));
        assert!(handle(false, b"\x01kv", b"kv@1"));
        assert!(!handle(false, b"\x01kv", b"k"));
        assert!(handle(false, b"\x00kv", b"kv"));
        assert!(!handle(false, b"\x00kv", b"kv"));
        assert!(!handle(false, b"\x00kv", b"kv"));
        assert!(handle(true, b"\x09SUBSCRIBE", b"any"));
        assert!(!handle(true, b"\x06CANCEL", b"any"));
        for _ in 0..MAX_PREFIXES {
            handle(false, b"\x01x", b"");
        }
        let body = b"\x01y".to_vec();
        let frame = Frame {
            is_command: false,
            has_more: false,
            body,
        };
        assert_eq!(subscriptions.handle(&frame), Err(ZmtpError::TooLong));
    }
}
