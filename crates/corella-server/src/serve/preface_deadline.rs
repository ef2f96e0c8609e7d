//! A connection that is closed unless its client begins with HTTP/2 soon. HTTP/2 itself notices a silent client by
//! pings, but only once the connection is set up.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

/// The length of the line with which every client of HTTP/2 begins.
const PREFACE_BYTES: usize = 24;

pub struct PrefaceDeadline<S> {
    stream: S,
    num_missing: usize,
    /// `None` after the preface.
    deadline: Option<Pin<Box<Sleep>>>,
}

impl<S> PrefaceDeadline<S> {
    pub fn new(stream: S, timeout: Duration) -> Self {
        Self {
            stream,
            num_missing: PREFACE_BYTES,
            deadline: Some(Box::pin(sleep(timeout))),
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for PrefaceDeadline<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let num_before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        let num_read = buffer.filled().len() - num_before;
        self.num_missing = self.num_missing.saturating_sub(num_read);
        if self.num_missing == 0 {
            self.deadline = None;
        }
        if read.is_pending()
            && let Some(deadline) = &mut self.deadline
            && deadline.as_mut().poll(context).is_ready()
        {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for PrefaceDeadline<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    #[tokio::test]
    async fn a_client_that_stops_within_the_preface_is_given_up() {
        let (ours, mut theirs) = duplex(64);
        theirs.write_all(&[b'P'; 23]).await.expect("room");
        let mut stream = PrefaceDeadline::new(ours, Duration::from_millis(1));
        let error = stream.read_exact(&mut [0; 24]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    #[tokio::test]
    async fn after_the_preface_a_client_may_be_silent() {
        let (ours, mut theirs) = duplex(64);
        theirs.write_all(&[b'P'; 24]).await.expect("room");
        let mut stream = PrefaceDeadline::new(ours, Duration::from_hours(1));
        stream.read_exact(&mut [0; 24]).await.expect("it is there");
        assert!(stream.deadline.is_none());
    }
}
