//! How sender and receiver find out whether rows go by NIXL.
//!
//! The sender describes its agent, and the receiver says whether it could read a word by it. If it could
//! not, pages go over the socket, as if there were no NIXL.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::agent::{NixlAgent, NixlOffer};
use super::library::NixlError;
use super::reader::NixlReader;
use crate::transport::frame::{FRAME_BYTES, Frame};
use crate::transport::frame_reader::{FrameReader, violation};
use crate::transport::host_memory::Place;
use crate::transport::socket::Socket;

/// Agents with many networks and pieces of memory describe themselves in some kilobytes.
const MAX_METADATA_BYTES: u32 = 1 << 20;
/// For the sender's description.
const PROPOSAL_TIMEOUT: Duration = Duration::from_secs(1);
/// For the first read, before which networks connect.
const TEST_TIMEOUT: Duration = Duration::from_secs(2);
/// For the receiver's answer, which has to wait for its test.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// The sender's part. Returns whether the receiver reads by NIXL.
pub async fn propose(
    socket: &Socket,
    reader: &mut FrameReader,
    offer: &NixlOffer,
) -> io::Result<bool> {
    let frame = Frame::Agent {
        address: offer.word_address,
        content: offer.word,
        num_bytes: u32::try_from(offer.metadata.len()).unwrap_or(u32::MAX),
    };
    socket.write_all(&frame.encode()).await?;
    socket.write_all(&offer.metadata).await?;
    let answer = tokio::time::timeout(ANSWER_TIMEOUT, reader.next(socket));
    match answer.await.map_err(|_| io::ErrorKind::TimedOut)?? {
        Frame::ReadsByNixl(reads) => Ok(reads),
        _ => Err(violation("no answer about NIXL")),
    }
}

/// The receiver's part. The inner error is why pages have to come over the socket.
pub async fn answer(
    socket: &Socket,
    agent: &Arc<NixlAgent>,
    incarnation: u64,
) -> io::Result<Result<NixlReader, NixlError>> {
    let proposal = tokio::time::timeout(PROPOSAL_TIMEOUT, read_proposal(socket));
    let (word, content, metadata) = proposal.await.map_err(|_| io::ErrorKind::TimedOut)??;
    let reader = match agent.meet(incarnation, &metadata) {
        Ok(peer) => test(NixlReader::new(peer), socket, word, content).await,
        Err(error) => Err(error),
    };
    let answer = Frame::ReadsByNixl(reader.is_ok());
    socket.write_all(&answer.encode()).await?;
    Ok(reader)
}

async fn read_proposal(socket: &Socket) -> io::Result<(Place, u64, Vec<u8>)> {
    let mut bytes = [0; FRAME_BYTES];
    socket.read_exact(&mut bytes).await?;
    match Frame::decode(&bytes) {
        Ok(Frame::Agent {
            address,
            content,
            num_bytes,
        }) if (1..=MAX_METADATA_BYTES).contains(&num_bytes) => {
            let mut metadata = vec![0; num_bytes as usize];
            socket.read_exact(&mut metadata).await?;
            let num_bytes = size_of::<u64>() as u64;
            Ok((Place { address, num_bytes }, content, metadata))
        }
        _ => Err(violation("no description of its NIXL agent")),
    }
}

/// Reads the word that the sender says is there.
async fn test(
    mut reader: NixlReader,
    socket: &Socket,
    word: Place,
    content: u64,
) -> Result<NixlReader, NixlError> {
    reader.set_places([word].into_iter(), size_of::<u64>());
    let bytes = reader.read(socket, TEST_TIMEOUT).await?;
    match *bytes == content.to_ne_bytes() {
        true => Ok(reader),
        false => Err(NixlError::Peer(
            "what NIXL reads is not the word that it said",
        )),
    }
}
