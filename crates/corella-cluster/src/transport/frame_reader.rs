//! Frames without pages, as they come in from the other end.

use std::io;

use super::frame::{FRAME_BYTES, Frame};
use super::socket::Socket;

pub fn violation(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// Frames without pages, as receivers send them.
#[derive(Default)]
pub struct FrameReader {
    bytes: Vec<u8>,
}

impl FrameReader {
    /// May be dropped while it waits, and loses nothing.
    pub async fn next(&mut self, socket: &Socket) -> io::Result<Frame> {
        loop {
            if let Some(bytes) = self.bytes.first_chunk::<FRAME_BYTES>() {
                let frame = Frame::decode(bytes);
                self.bytes.drain(..FRAME_BYTES);
                return frame.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error));
            }
            socket.readable().await?;
            let mut buffer = [0; 16 * FRAME_BYTES];
            match socket.try_read(&mut buffer) {
                Ok(num_bytes) => self.bytes.extend_from_slice(&buffer[..num_bytes]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
    }
}
