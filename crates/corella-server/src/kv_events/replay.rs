//! The ROUTER socket for requests of missed batches.
//!
//! A request is the sequence number of the first missed batch, as 8 bytes. The answer has a message with number and
//! batch for each kept batch from there on, and at its end a message with the number −1 and no batch.

use std::io;
use std::sync::Arc;

use tokio::net::{TcpListener, TcpStream};

use super::hub::Hub;
use super::zmtp::ZmtpError;
use super::zmtp_connection::{ZmtpConnection, accept, refused};

/// Limits the frames of a request. Only the last frame has content.
const MAX_FRAMES: usize = 8;
const END: [u8; 8] = (-1_i64).to_be_bytes();

pub async fn listen(listener: TcpListener, hub: Arc<Hub>) {
    let serve = |stream| {
        let hub = hub.clone();
        async move { answer(stream, &hub).await }
    };
    accept(listener, serve).await;
}

async fn answer(stream: TcpStream, hub: &Hub) -> io::Result<()> {
    let mut peer = ZmtpConnection::greet(stream, "ROUTER", &["REQ", "DEALER", "ROUTER"]).await?;
    loop {
        // A REQ socket puts an empty frame before its request, and expects it back.
        let mut envelope = Vec::new();
        let request = loop {
            let frame = peer.next().await?;
            match (frame.is_command, frame.has_more) {
                (true, _) => {}
                (false, false) => break frame.body,
                (false, true) if envelope.len() < MAX_FRAMES => envelope.push(frame.body),
                (false, true) => return Err(refused(ZmtpError::TooLong)),
            }
        };
        let Ok(start) = <[u8; 8]>::try_from(&request[..]) else {
            tracing::debug!("a request for missed KV events is no number of 8 bytes");
            continue;
        };
        for (number, batch) in hub.replay(u64::from_be_bytes(start)) {
            send(&mut peer, &envelope, &number.to_be_bytes(), &batch).await?;
        }
        send(&mut peer, &envelope, &END, &[]).await?;
    }
}

async fn send(
    peer: &mut ZmtpConnection,
    envelope: &[Vec<u8>],
    number: &[u8; 8],
    batch: &[u8],
) -> io::Result<()> {
    let mut frames: Vec<&[u8]> = envelope.iter().map(Vec::as_slice).collect();
    frames.extend([&number[..], batch]);
    peer.send(&frames).await
}
