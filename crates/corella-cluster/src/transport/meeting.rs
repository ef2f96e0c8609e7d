//! The meeting in which a sender and a receiver test their row path.
//!
//! The sender makes the path's offer, and the receiver names the path by which rows come to it. If the offered path
//! fails, rows follow their frames on the socket.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::frame::{FRAME_BYTES, Frame, PathFrame};
use super::frame_reader::{FrameReader, violation};
use super::path::tcp;
use super::row_path::{Offer, PathError, RowPath, RowReader};
use super::socket::Socket;

/// The limit of an offer. Agents with many networks and pieces of memory need some kilobytes to describe themselves.
const MAX_OFFER_BYTES: u32 = 1 << 20;
/// The limit of the wait for the receiver's answer, which comes after the receiver's test.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// Plays the sender's part. Returns whether the receiver reads this node's memory.
pub async fn propose(
    socket: &Socket,
    reader: &mut FrameReader,
    path: &dyn RowPath,
    offer: &Offer,
) -> io::Result<bool> {
    if path.is_agreed_by_greeting() {
        return Ok(false);
    }
    path.meet_receiver(socket);
    let frame = Frame::Path(PathFrame {
        name: path.name(),
        data: offer.data,
        num_bytes: u32::try_from(offer.bytes.len()).unwrap_or(u32::MAX),
    });
    socket.write_all(&frame.encode()).await?;
    socket.write_all(&offer.bytes).await?;
    let answer = tokio::time::timeout(ANSWER_TIMEOUT, reader.next(socket));
    match answer.await.map_err(|_| io::ErrorKind::TimedOut)?? {
        Frame::Path(answer) if answer == PathFrame::named(path.name()) => Ok(true),
        Frame::Path(answer) if answer == PathFrame::named(tcp::NAME) => Ok(false),
        _ => Err(violation("no answer about its row path")),
    }
}

/// Plays the receiver's part. The inner error says why rows must follow their frames.
pub async fn answer(
    socket: &Socket,
    path: &Arc<dyn RowPath>,
    incarnation: u64,
    offer_timeout: Duration,
) -> io::Result<Result<Option<Box<dyn RowReader>>, PathError>> {
    if path.is_agreed_by_greeting() {
        return Ok(Ok(None));
    }
    let offer = tokio::time::timeout(offer_timeout, read_offer(socket, &**path));
    let offer = offer.await.map_err(|_| io::ErrorKind::TimedOut)??;
    let reader = path.clone().meet_sender(socket, incarnation, offer).await?;
    let name = match reader {
        Ok(_) => path.name(),
        Err(_) => tcp::NAME,
    };
    let answer = Frame::Path(PathFrame::named(name));
    socket.write_all(&answer.encode()).await?;
    Ok(reader.map(Some))
}

async fn read_offer(socket: &Socket, path: &dyn RowPath) -> io::Result<Offer> {
    let mut bytes = [0; FRAME_BYTES];
    socket.read_exact(&mut bytes).await?;
    match Frame::decode(&bytes) {
        Ok(Frame::Path(PathFrame {
            name,
            data,
            num_bytes,
        })) if name == path.name() && num_bytes <= MAX_OFFER_BYTES => {
            let mut bytes = vec![0; num_bytes as usize];
            socket.read_exact(&mut bytes).await?;
            Ok(Offer { data, bytes })
        }
        _ => Err(violation("no description of its memory")),
    }
}
