//! A connection that is closed when its client takes no bytes for a while.
//!
//! Only the request's own limits, such as `max_tokens`, bound the unread part of an answer. A client that reads
//! nothing, or a byte per second, would keep that part in memory for hours, and many such clients would exhaust the
//! memory.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

pub struct WriteDeadline<S> {
    stream: S,
    timeout: Duration,
    /// Present while a write waits for the client.
    deadline: Option<Pin<Box<Sleep>>>,
}

impl<S> WriteDeadline<S> {
    pub fn new(stream: S, timeout: Duration) -> Self {
        Self {
            stream,
            timeout,
            deadline: None,
        }
    }

    /// Passes on the result of a write, or an error when the write has waited too long.
    fn watch<T>(
        &mut self,
        written: Poll<io::Result<T>>,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.deadline = None;
            return written;
        }
        let timeout = self.timeout;
        let deadline = self
            .deadline
            .get_or_insert_with(|| Box::pin(sleep(timeout)));
        match deadline.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for WriteDeadline<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for WriteDeadline<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.watch(written, context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.watch(written, context)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(context);
        self.watch(flushed, context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};

    use super::*;

    #[tokio::test]
    async fn a_client_that_takes_nothing_is_given_up() {
        let (ours, _theirs) = duplex(64);
        let mut stream = WriteDeadline::new(ours, Duration::from_millis(1));
        let error = stream.write_all(&[0; 65]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    /// Writes as much as the stream accepts at once.
    async fn write(stream: &mut WriteDeadline<DuplexStream>) -> Poll<io::Result<usize>> {
        poll_fn(|context| Poll::Ready(Pin::new(&mut *stream).poll_write(context, &[0; 64]))).await
    }

    #[tokio::test]
    async fn the_time_begins_again_with_each_byte_that_is_taken() {
        let (ours, mut theirs) = duplex(64);
        let mut stream = WriteDeadline::new(ours, Duration::from_secs(3600));
        assert!(write(&mut stream).await.is_ready());
        assert!(stream.deadline.is_none(), "nothing waits");
        for _ in 0..3 {
            assert!(write(&mut stream).await.is_pending());
            assert!(stream.deadline.is_some(), "64 bytes wait");
            theirs.read_exact(&mut [0; 1]).await.expect("it is open");
            assert!(write(&mut stream).await.is_ready());
            assert!(stream.deadline.is_none());
        }
    }
}
