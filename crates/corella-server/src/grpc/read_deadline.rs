//! A call whose client leaves a message of the answer unread for too long is cut off.
//!
//! The streams of an HTTP/2 connection have flow control of their own. A client may stop reading one of them and go on
//! reading others, so that the deadline of the connection's writes never passes. The rest of that answer would stay in
//! memory, and the call would count as running.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use hyper::body::Frame;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::time::timeout;

use crate::state::server_parts::ServerParts;

/// The outermost layer. It drops the layers below with a call that it cuts off, so that they count a client that has left.
pub async fn cut_off_unread(
    State(server): State<Arc<ServerParts>>,
    request: Request,
    next: Next,
) -> Response {
    let response = next.run(request).await;
    match response.body().is_end_stream() {
        true => response,
        false => response.map(|body| read_within(server.config.write_timeout, body)),
    }
}

fn read_within(limit: Duration, body: Body) -> Body {
    let (sender, frames) = channel(1);
    tokio::spawn(async move {
        if !forward(body, &sender, limit).await {
            // The reader may be gone, or read on and meet the error.
            let _ = sender.send(Err(io::ErrorKind::TimedOut.into())).await;
        }
    });
    Body::new(ReadBody { frames })
}

type SentFrame = Result<Frame<Bytes>, io::Error>;

/// Passes on the frames of a body, each when the one before it is read, so that a slow reader gets larger ones. Returns
/// false if a frame is not read within the limit.
async fn forward(mut body: Body, sender: &Sender<SentFrame>, limit: Duration) -> bool {
    loop {
        let place = match timeout(limit, sender.reserve()).await {
            Ok(Ok(place)) => place,
            Ok(Err(_)) => return true,
            Err(_) => return false,
        };
        let frame = tokio::select! {
            frame = std::future::poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)) => frame,
            () = sender.closed() => return true,
        };
        match frame {
            None => return true,
            Some(frame) => place.send(frame.map_err(io::Error::other)),
        }
    }
}

struct ReadBody {
    frames: Receiver<SentFrame>,
}

impl HttpBody for ReadBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        Poll::Ready(ready!(self.frames.poll_recv(cx)))
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::future::poll_fn;

    use axum::http::HeaderMap;
    use tokio::sync::oneshot;

    use super::*;

    /// Never passes in a test.
    const LONG: Duration = Duration::from_secs(3600);

    /// Has `num_left` messages and then trailers. Tells when it is dropped.
    struct Messages {
        num_left: usize,
        has_ended: bool,
        _dropped: oneshot::Sender<()>,
    }

    impl HttpBody for Messages {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            let frame = match self.num_left {
                0 if self.has_ended => return Poll::Ready(None),
                0 => Frame::trailers(HeaderMap::new()),
                _ => Frame::data(Bytes::from_static(b"x")),
            };
            self.has_ended = self.num_left == 0;
            self.num_left = self.num_left.saturating_sub(1);
            Poll::Ready(Some(Ok(frame)))
        }
    }

    fn messages(num_left: usize, limit: Duration) -> (Body, oneshot::Receiver<()>) {
        let (dropped, is_dropped) = oneshot::channel();
        let body = Messages {
            num_left,
            has_ended: false,
            _dropped: dropped,
        };
        (read_within(limit, Body::new(body)), is_dropped)
    }

    async fn next(body: &mut Body) -> Option<Result<Frame<Bytes>, axum::Error>> {
        poll_fn(|cx| Pin::new(&mut *body).poll_frame(cx)).await
    }

    #[tokio::test]
    async fn a_reader_that_goes_on_gets_the_whole_answer() {
        let (mut body, is_dropped) = messages(3, LONG);
        for _ in 0..3 {
            assert!(next(&mut body).await.unwrap().unwrap().is_data());
        }
        assert!(next(&mut body).await.unwrap().unwrap().is_trailers());
        assert!(next(&mut body).await.is_none());
        assert!(is_dropped.await.is_err());
    }

    #[tokio::test]
    async fn an_answer_that_is_not_read_is_cut_off() {
        let limit = Duration::from_millis(50);
        let (mut body, is_dropped) = messages(1000, limit);
        assert!(is_dropped.await.is_err());
        // The message that was waiting, and then an error instead of an end.
        assert!(next(&mut body).await.unwrap().unwrap().is_data());
        assert!(next(&mut body).await.unwrap().is_err());
    }

    #[tokio::test]
    async fn an_answer_ends_when_its_reader_leaves() {
        let (body, is_dropped) = messages(1000, LONG);
        drop(body);
        assert!(is_dropped.await.is_err());
    }
}
