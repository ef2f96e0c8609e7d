//! Reads frames and their payloads from the other end.

use std::io;
use std::ptr::NonNull;
use std::time::Duration;

use super::block_message::{self, BlockMessage, MAX_LIST_BYTES};
use super::checksum::Checksum;
use super::frame::{BlockFrame, FRAME_BYTES, Frame, TRAILER_BYTES, Trailer};
use super::gate::Gate;
use super::io_parts::IoParts;
use super::socket::Socket;

/// The limit of the time to receive a list of blocks, which the sender has in memory.
const PAYLOAD_TIMEOUT: Duration = Duration::from_secs(10);
/// Memory for a longer list is allocated as its bytes arrive, because a peer may lie about the length.
const FIRST_LIST_BYTES: usize = 64 << 10;

pub fn violation(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// Reads payloads straight to their destination. Each connection has one.
pub struct FrameReader {
    /// A trailer and the frame after it, which one call receives together with the end of a payload.
    ahead: Box<[u8; TRAILER_BYTES + FRAME_BYTES]>,
    num_ahead: usize,
    /// A buffer for payloads that are discarded.
    rubbish: Vec<u8>,
}

impl FrameReader {
    pub fn new() -> Self {
        Self {
            ahead: Box::new([0; TRAILER_BYTES + FRAME_BYTES]),
            num_ahead: 0,
            rubbish: Vec::new(),
        }
    }

    /// Reads the next frame. The future may be dropped while it waits, and then loses nothing.
    pub async fn next(&mut self, socket: &Socket) -> io::Result<Frame> {
        while self.num_ahead < FRAME_BYTES {
            // The read ends here, because pages may follow.
            match socket.try_read(&mut self.ahead[self.num_ahead..FRAME_BYTES]) {
                Ok(num_bytes) => self.num_ahead += num_bytes,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    socket.readable().await?
                }
                Err(error) => return Err(error),
            }
        }
        let bytes = self.ahead.first_chunk().expect("a frame is there");
        let frame = Frame::decode(bytes);
        self.num_ahead = 0;
        frame.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
    }

    /// Returns the message of a received frame, with the payload after it. A peer that stops in the middle ends the
    /// connection.
    pub async fn block_message(
        &mut self,
        socket: &Socket,
        frame: &BlockFrame,
    ) -> io::Result<BlockMessage> {
        if frame.num_bytes > MAX_LIST_BYTES {
            return Err(violation("a list of blocks that is too long"));
        }
        let read =
            tokio::time::timeout(PAYLOAD_TIMEOUT, read_list(socket, frame.num_bytes as usize));
        let payload = read.await.map_err(|_| io::ErrorKind::TimedOut)??;
        block_message::decode(frame, &payload).map_err(violation)
    }

    /// Discards a payload.
    pub fn push_rubbish(&mut self, parts: &mut IoParts, mut num_bytes: usize) {
        self.rubbish.resize(64 << 10, 0);
        while num_bytes > 0 {
            let len = num_bytes.min(self.rubbish.len());
            parts.push(NonNull::from(&mut self.rubbish[..len]));
            num_bytes -= len;
        }
    }

    /// Fills the parts, reads the trailer, and hashes the payload. If the gate closes during the call, the rest of the
    /// payload is discarded.
    ///
    /// # Safety
    /// The parts' memory has no other user until this has returned, or while the gate is open.
    pub async unsafe fn read_payload(
        &mut self,
        socket: &Socket,
        parts: &mut IoParts,
        mut gate: Option<&Gate>,
        hasher: &mut Checksum,
    ) -> io::Result<Trailer> {
        let num_ahead = self.ahead.len();
        parts.push(NonNull::from(self.ahead.as_mut_slice()));
        hasher.reset();
        // `ahead` is the last of the parts, and it ends with the frame that follows the trailer.
        while parts.num_bytes() > FRAME_BYTES {
            let mut read = || {
                let num_payload = parts.num_bytes().saturating_sub(num_ahead);
                // SAFETY: own memory, or the caller's promise.
                let num_bytes = unsafe { socket.try_receive(parts)? };
                let num_payload = num_bytes.min(num_payload);
                // SAFETY: as above.
                let hash = |part: NonNull<[u8]>| hasher.update(unsafe { part.as_ref() });
                parts.advance(num_payload, hash);
                parts.advance(num_bytes - num_payload, |_| {});
                Ok(())
            };
            let result: io::Result<()> = match gate {
                None => read(),
                Some(open) => match open.enter(read) {
                    Some(result) => result,
                    None => {
                        gate = None;
                        self.discard(parts);
                        continue;
                    }
                },
            };
            match result {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    socket.readable().await?
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => result?,
            }
        }
        let num_filled = num_ahead - parts.num_bytes();
        let trailer = Trailer::decode(self.ahead.first_chunk().expect("it is filled so far"));
        self.ahead.copy_within(TRAILER_BYTES..num_filled, 0);
        self.num_ahead = num_filled - TRAILER_BYTES;
        trailer.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
    }

    /// Reads the rest of a payload without keeping it.
    fn discard(&mut self, parts: &mut IoParts) {
        let num_payload = parts.num_bytes().saturating_sub(self.ahead.len());
        if num_payload > 0 {
            parts.clear();
            self.push_rubbish(parts, num_payload);
            parts.push(NonNull::from(self.ahead.as_mut_slice()));
        }
    }
}

async fn read_list(socket: &Socket, num_bytes: usize) -> io::Result<Vec<u8>> {
    let mut payload = vec![0; num_bytes.min(FIRST_LIST_BYTES)];
    let mut num_read = 0;
    loop {
        socket.read_exact(&mut payload[num_read..]).await?;
        num_read = payload.len();
        if num_read == num_bytes {
            return Ok(payload);
        }
        payload.resize(num_bytes.min(2 * num_read), 0);
    }
}
