//! Reads `multipart/form-data` part by part, without holding a part in memory.
//!
//! Source: RFC 7578, and RFC 2046 for the delimiters.

use std::pin::Pin;
use std::time::{Duration, Instant};

use axum::body::{Body, HttpBody};
use axum::http::HeaderMap;
use axum::http::header::CONTENT_TYPE;

use crate::wire::api_error::ApiError;

pub struct Multipart {
    body: Body,
    /// A line break, two dashes and the boundary, which together end each part.
    delimiter: Vec<u8>,
    buffer: Vec<u8>,
    /// Limits the bytes of the body.
    max_bytes: u64,
    pace: Pace,
    /// Whether the delimiter after the current part has been read.
    is_between_parts: bool,
}

/// Limits the time that a body may take: a slow client must not hold a connection forever, and a large body may take
/// longer than a small one.
struct Pace {
    started: Instant,
    patience: Duration,
    num_bytes: u64,
}

/// The slowest permitted upload.
const MIN_BYTES_PER_SECOND: u64 = 32 << 10;
const MAX_HEAD_BYTES: usize = 16 << 10;
/// The longest boundary by RFC 2046.
const MAX_BOUNDARY_BYTES: usize = 70;

/// The name of a part and its file name.
#[derive(Debug, PartialEq, Eq)]
pub struct PartHead {
    pub name: String,
    pub filename: Option<String>,
}

impl Multipart {
    pub fn new(
        headers: &HeaderMap,
        body: Body,
        patience: Duration,
        max_bytes: u64,
    ) -> Result<Self, ApiError> {
        let content_type = headers
            .get(CONTENT_TYPE)
            .and_then(|value| value.to_str().ok());
        let Some(boundary) = content_type.and_then(boundary) else {
            return Err(ApiError::malformed(
                "A file is uploaded as `multipart/form-data` with a boundary, and this request has another \
                 content type.",
            ));
        };
        Ok(Self {
            body,
            delimiter: format!("\r\n--{boundary}").into_bytes(),
            // The first delimiter may have no line break before it.
            buffer: b"\r\n".to_vec(),
            max_bytes,
            pace: Pace {
                started: Instant::now(),
                patience,
                num_bytes: 0,
            },
            is_between_parts: false,
        })
    }

    /// Skips the rest of this part, and reads the head of the next.
    pub async fn next_part(&mut self) -> Result<Option<PartHead>, ApiError> {
        while !self.is_between_parts {
            self.chunk().await?;
        }
        while self.buffer.len() < 2 {
            self.fill().await?;
        }
        if self.buffer.starts_with(b"--") {
            return Ok(None);
        }
        let end = loop {
            if let Some(end) = find(&self.buffer, b"\r\n\r\n") {
                break end;
            }
            if self.buffer.len() > MAX_HEAD_BYTES {
                return Err(malformed("the head of a part is too long"));
            }
            self.fill().await?;
        };
        let head: Vec<u8> = self.buffer.drain(..end + 4).collect();
        self.is_between_parts = false;
        let head = String::from_utf8(head).map_err(|_| malformed("a part's head is not UTF-8"))?;
        part_head(&head).map(Some)
    }

    /// Returns more of the part's content; `None` at its end.
    pub async fn chunk(&mut self) -> Result<Option<Vec<u8>>, ApiError> {
        if self.is_between_parts {
            return Ok(None);
        }
        loop {
            if let Some(at) = find(&self.buffer, &self.delimiter) {
                let content: Vec<u8> = self.buffer.drain(..at).collect();
                self.buffer.drain(..self.delimiter.len());
                self.is_between_parts = true;
                return Ok((!content.is_empty()).then_some(content));
            }
            // The end of the buffer may be the beginning of the delimiter.
            let num_certain = self.buffer.len().saturating_sub(self.delimiter.len());
            if num_certain > 0 {
                return Ok(Some(self.buffer.drain(..num_certain).collect()));
            }
            self.fill().await?;
        }
    }

    /// Reads a part that is a short text.
    pub async fn text(&mut self, name: &str, max_bytes: usize) -> Result<String, ApiError> {
        let mut bytes = Vec::new();
        while let Some(chunk) = self.chunk().await? {
            bytes.extend(chunk);
            if bytes.len() > max_bytes {
                return Err(ApiError::invalid(
                    name,
                    format!("must have at most {max_bytes} bytes"),
                ));
            }
        }
        String::from_utf8(bytes).map_err(|_| ApiError::invalid(name, "must be UTF-8"))
    }

    /// Reads and drops the rest of a refused body, for as long as `patience` lasts.
    pub async fn skip_rest(&mut self) {
        let patience = self.pace.patience;
        let body = &mut self.body;
        let rest = async {
            while let Some(Ok(_)) =
                std::future::poll_fn(|cx| Pin::new(&mut *body).poll_frame(cx)).await
            {}
        };
        // A slower client does not receive the error.
        let _ = tokio::time::timeout(patience, rest).await;
    }

    async fn fill(&mut self) -> Result<(), ApiError> {
        let body = &mut self.body;
        let frame = std::future::poll_fn(|cx| Pin::new(&mut *body).poll_frame(cx));
        match tokio::time::timeout(self.pace.left(), frame).await {
            Err(_) => Err(ApiError::body_too_slow(
                self.pace.started.elapsed().as_secs(),
            )),
            Ok(None) => Err(malformed("it ends before its last boundary")),
            Ok(Some(Err(error))) => Err(malformed(&format!("it could not be read: {error}"))),
            Ok(Some(Ok(frame))) => {
                if let Ok(data) = frame.into_data() {
                    self.pace.num_bytes += data.len() as u64;
                    if self.pace.num_bytes > self.max_bytes {
                        return Err(ApiError::body_too_large(self.max_bytes));
                    }
                    self.buffer.extend_from_slice(&data);
                }
                Ok(())
            }
        }
    }
}

impl Pace {
    fn left(&self) -> Duration {
        let allowed = Duration::from_secs(self.num_bytes / MIN_BYTES_PER_SECOND);
        (self.patience + allowed).saturating_sub(self.started.elapsed())
    }
}

fn malformed(reason: &str) -> ApiError {
    ApiError::malformed(format!("The multipart body is malformed: {reason}."))
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack
        .windows(needle.len())
        .position(|window| window == needle)
}

fn boundary(content_type: &str) -> Option<String> {
    let (kind, parameters) = content_type.split_once(';')?;
    if !kind.trim().eq_ignore_ascii_case("multipart/form-data") {
        return None;
    }
    let boundary = parameter(parameters, "boundary")?;
    let is_usual = !boundary.is_empty() && boundary.len() <= MAX_BOUNDARY_BYTES;
    is_usual.then_some(boundary)
}

fn part_head(head: &str) -> Result<PartHead, ApiError> {
    for line in head.split("\r\n") {
        let Some((name, value)) = line.split_once(':') else {
            continue;
        };
        if !name.trim().eq_ignore_ascii_case("content-disposition") {
            continue;
        }
        let Some((kind, parameters)) = value.split_once(';') else {
            continue;
        };
        if kind.trim() == "form-data"
            && let Some(name) = parameter(parameters, "name")
        {
            return Ok(PartHead {
                name,
                // Browsers and most clients escape quotes this way. Besides quotes, they escape only line breaks.
                filename: parameter(parameters, "filename").map(|name| name.replace("%22", "\"")),
            });
        }
    }
    Err(malformed(
        "a part has no `Content-Disposition: form-data` with a name",
    ))
}

/// Returns the value of a header's parameter, without quotes and escapes.
fn parameter(parameters: &str, wanted: &str) -> Option<String> {
    let mut rest = parameters;
    loop {
        let (name, value) = rest.split_once('=')?;
        let is_wanted = name
            .trim_matches([' ', '\t', ';'])
            .eq_ignore_ascii_case(wanted);
        let (value, others) = match value.strip_prefix('"') {
            Some(quoted) => unquoted(quoted)?,
            None => match value.split_once(';') {
                Some((value, others)) => (value.trim().to_owned(), others),
                None => (value.trim().to_owned(), ""),
            },
        };
        if is_wanted {
            return Some(value);
        }
        rest = others;
    }
}

/// Returns the text before the closing quote, and the rest.
fn unquoted(quoted: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut chars = quoted.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return Some((value, &quoted[at + 1..])),
            '\\' => value.push(chars.next()?.1),
            c => value.push(c),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use axum::body::Bytes;
    use axum::http::HeaderValue;
    use hyper::body::Frame;

    use super::*;

    /// A body that arrives in pieces of one size.
    struct Pieces(Vec<u8>, usize);

    impl HttpBody for Pieces {
        type Data = Bytes;
        type Error = std::convert::Infallible;

        fn poll_frame(
            self: Pin<&mut Self>,
            _: &mut std::task::Context<'_>,
        ) -> std::task::Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
            let Self(rest, size) = self.get_mut();
            let piece: Vec<u8> = rest.drain(..rest.len().min(*size)).collect();
            std::task::Poll::Ready((!piece.is_empty()).then(|| Ok(Frame::data(piece.into()))))
        }
    }

    fn read(body: &str, size: usize) -> Multipart {
        read_within(body, size, body.len())
    }

    fn read_within(body: &str, size: usize, max_bytes: usize) -> Multipart {
        let mut headers = HeaderMap::new();
        let content_type = HeaderValue::from_static("multipart/form-data; boundary=\"a b\"");
        headers.insert(CONTENT_TYPE, content_type);
        let body = Body::new(Pieces(body.into(), size));
        let patience = Duration::from_secs(9);
        Multipart::new(&headers, body, patience, max_bytes as u64).expect("it has a boundary")
    }

    const BODY: &str = "preamble\r\n--a b\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nbatch\
        \r\n--a b\r\ncontent-type: text/plain\r\nContent-Disposition: form-data; filename=\"a;\\\"b\"; \
        name=file\r\n\r\n\r\n--a\r\n--a \r\n\r\n--a b--\r\nepilogue";

    #[tokio::test]
    async fn parts_are_the_same_however_they_arrive() {
        for size in 1..BODY.len() + 1 {
            let mut parts = read(BODY, size);
            let head = parts.next_part().await.expect("it is well-formed");
            assert_eq!(head.map(|head| head.name), Some("purpose".into()), "{size}");
            assert_eq!(parts.text("purpose", 5).await, Ok("batch".into()), "{size}");
            let head = parts.next_part().await.expect("it is well-formed");
            let filename = Some("a;\"b".to_owned());
            let name = "file".to_owned();
            assert_eq!(head, Some(PartHead { name, filename }), "{size}");
            let content = parts.text("file", 100).await;
            assert_eq!(content, Ok("\r\n--a\r\n--a \r\n".into()), "{size}");
            assert_eq!(parts.next_part().await, Ok(None), "{size}");
        }
    }

    #[tokio::test]
    async fn what_is_cut_off_is_no_file() {
        for end in 0..BODY.len() - "--\r\nepilogue".len() {
            let mut parts = read(&BODY[..end], 7);
            let all = async {
                while parts.next_part().await?.is_some() {}
                Ok::<_, ApiError>(())
            };
            assert!(all.await.is_err(), "{end}");
        }
    }

    /// Skipped bytes count, too: before the first boundary, and in parts that are not read.
    #[tokio::test]
    async fn a_body_without_end_is_refused() {
        let last = "--a b--";
        let whole = format!("{}{last}", "x".repeat(3000));
        for body in [whole.as_str(), BODY] {
            let mut parts = read_within(body, 7, body.len() / 2);
            let all = async {
                while parts.next_part().await?.is_some() {}
                Ok::<_, ApiError>(())
            };
            let error = all.await.expect_err("it is too long");
            assert_eq!(error.status.as_u16(), 413);
        }
    }

    #[test]
    fn only_a_form_has_a_boundary() {
        assert_eq!(
            boundary("multipart/form-data; boundary=x").as_deref(),
            Some("x")
        );
        assert_eq!(
            boundary("Multipart/Form-Data; charset=utf-8; Boundary=\"x y\"").as_deref(),
            Some("x y")
        );
        for other in [
            "multipart/form-data",
            "application/json; boundary=x",
            "multipart/form-data; boundary=",
        ] {
            assert_eq!(boundary(other), None, "{other}");
        }
    }
}
