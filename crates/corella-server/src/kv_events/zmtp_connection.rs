//! A connection to a ZeroMQ peer.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};

use super::zmtp::{self, Frame, FrameBuffer, ZmtpError};

/// Limits the time of a peer's handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// Limits the connections of each socket. Further peers wait in the system's queue.
const MAX_PEERS: usize = 256;
const PAUSE: Duration = Duration::from_millis(100);

/// Serves all arriving peers.
pub async fn accept<S>(listener: TcpListener, serve: impl Fn(TcpStream) -> S)
where
    S: Future<Output = io::Result<()>> + Send + 'static,
{
    let places = Arc::new(Semaphore::new(MAX_PEERS));
    loop {
        let Ok(place) = places.clone().acquire_owned().await else {
            return;
        };
        let Ok((stream, address)) = listener.accept().await else {
            // The process has no file descriptor left. One becomes free when a file is closed.
            sleep(PAUSE).await;
            continue;
        };
        let served = serve(stream);
        tokio::spawn(async move {
            let error = served.await;
            tracing::debug!(%address, ?error, "a reader of KV events has gone");
            drop(place);
        });
    }
}

pub struct ZmtpConnection {
    stream: TcpStream,
    buffer: FrameBuffer,
    /// Bytes that have not been written yet.
    out: Vec<u8>,
}

impl ZmtpConnection {
    /// Greets a peer, whose socket must have one of the types in `theirs`.
    pub async fn greet(stream: TcpStream, own: &str, theirs: &[&str]) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        let mut peer = Self {
            stream,
            buffer: FrameBuffer::default(),
            out: zmtp::greeting().to_vec(),
        };
        zmtp::put_ready(&mut peer.out, own);
        match timeout(HANDSHAKE_TIMEOUT, peer.shake_hands(theirs)).await {
            Ok(greeted) => greeted.map(|()| peer),
            Err(_) => Err(io::ErrorKind::TimedOut.into()),
        }
    }

    async fn shake_hands(&mut self, theirs: &[&str]) -> io::Result<()> {
        self.flush().await?;
        let greeting = loop {
            match self.buffer.take_greeting() {
                Some(greeting) => break greeting,
                None => self.fill().await?,
            }
        };
        zmtp::check_greeting(&greeting).map_err(refused)?;
        let ready = self.next().await?;
        if !ready.is_command {
            return Err(refused(ZmtpError::Command));
        }
        let socket_type = zmtp::socket_type(&ready.body).map_err(refused)?;
        let is_known = theirs.iter().any(|known| known.as_bytes() == socket_type);
        is_known
            .then_some(())
            .ok_or_else(|| refused(ZmtpError::SocketType))
    }

    /// Returns the next frame, and answers pings in between. Cancelling the call loses no bytes.
    pub async fn next(&mut self) -> io::Result<Frame> {
        loop {
            match self.buffer.pop().map_err(refused)? {
                None => {
                    self.flush().await?;
                    self.fill().await?;
                }
                Some(frame) => match ping(&frame) {
                    Some(context) => zmtp::put_pong(&mut self.out, context),
                    None => return Ok(frame),
                },
            }
        }
    }

    /// Writes a message of these frames.
    pub async fn send(&mut self, frames: &[&[u8]]) -> io::Result<()> {
        for (at, frame) in frames.iter().enumerate() {
            zmtp::put_frame(&mut self.out, frame, at + 1 < frames.len());
        }
        self.flush().await
    }

    /// Writes `out`. Written bytes are removed at once, so that a cancelled call leaves the rest.
    async fn flush(&mut self) -> io::Result<()> {
        while !self.out.is_empty() {
            let num_written = self.stream.write(&self.out).await?;
            self.out.drain(..num_written);
        }
        Ok(())
    }

    async fn fill(&mut self) -> io::Result<()> {
        let mut bytes = [0; 1024];
        match self.stream.read(&mut bytes).await? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            len => {
                self.buffer.push(&bytes[..len]);
                Ok(())
            }
        }
    }
}

/// Returns the context of a ping, which follows the two bytes of its time to live.
fn ping(frame: &Frame) -> Option<&[u8]> {
    let (name, data) = zmtp::command(&frame.body).ok()?;
    let is_ping = frame.is_command && name == b"PING";
    is_ping.then(|| data.get(2..).unwrap_or_default())
}

pub fn refused(error: ZmtpError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error.to_string())
}
