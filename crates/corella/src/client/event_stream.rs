//! The streamed answer of a server, event by event.

use std::future::Future;

use crate::client::patient_client::PatientResponse;

/// The data of server-sent events.
pub struct EventStream<B = PatientResponse> {
    body: B,
    unread: Vec<u8>,
}

/// A body that arrives in parts.
pub trait ChunkedBody {
    /// Returns the next part; `None` at the end. The error says why the rest is missing.
    fn chunk(&mut self) -> impl Future<Output = Result<Option<Vec<u8>>, String>> + Send;
}

/// The answer to a refused request.
pub struct Refusal {
    pub status: u16,
    /// The error object, as JSON.
    pub body: Vec<u8>,
}

impl EventStream {
    /// The error says why there is neither a stream nor a refusal.
    pub async fn open(mut response: PatientResponse) -> Result<Result<Self, Refusal>, String> {
        let status = response.status();
        if status == 200 {
            return Ok(Ok(Self::of(response)));
        }
        let body = response.bytes().await?;
        Ok(Err(Refusal { status, body }))
    }
}

/// Limits an event: a remote server may never end one.
const MAX_EVENT_BYTES: usize = 64 << 20;

impl<B: ChunkedBody> EventStream<B> {
    /// The events of a body.
    pub fn of(body: B) -> Self {
        let unread = Vec::new();
        Self { body, unread }
    }

    /// Returns the data of the next event as JSON, which is an error object if the stream has failed; `None` at the end
    /// of the stream.
    pub async fn next(&mut self) -> Result<Option<Vec<u8>>, String> {
        loop {
            while let Some(event) = take_event(&mut self.unread) {
                match data(&event) {
                    Some(b"[DONE]") => return Ok(None),
                    // Comments keep a connection alive.
                    None => {}
                    Some(data) => return Ok(Some(data.to_vec())),
                }
            }
            if self.unread.len() > MAX_EVENT_BYTES {
                return Err("an event of the stream does not end".to_owned());
            }
            match self.body.chunk().await? {
                Some(chunk) => self.unread.extend_from_slice(&chunk),
                None => return Ok(None),
            }
        }
    }
}

impl ChunkedBody for PatientResponse {
    async fn chunk(&mut self) -> Result<Option<Vec<u8>>, String> {
        Self::chunk(self).await
    }
}

/// Takes the first whole event, without the blank line after it. Some servers end lines with `\r\n`.
fn take_event(unread: &mut Vec<u8>) -> Option<Vec<u8>> {
    let ends = [&b"\n\n"[..], b"\r\n\r\n"];
    let ends = ends.map(|end| {
        let at = unread.windows(end.len()).position(|bytes| bytes == end)?;
        Some((at, end.len()))
    });
    let (at, num_bytes) = ends.into_iter().flatten().min()?;
    let mut event: Vec<u8> = unread.drain(..at + num_bytes).collect();
    event.truncate(at);
    Some(event)
}

/// Returns the content of the event's data line, which may follow a line with the event's name.
fn data(event: &[u8]) -> Option<&[u8]> {
    let mut lines = event.split(|&byte| byte == b'\n');
    let data = lines.find_map(|line| line.strip_prefix(b"data:"))?;
    let data = data.strip_suffix(b"\r").unwrap_or(data);
    Some(data.strip_prefix(b" ").unwrap_or(data))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_whole_wherever_they_are_cut() {
        for stream in [
            "data: 1\n\n: ping\n\nevent: error\ndata: 2\n\ndata: [DONE]\n\n",
            "data:1\r\n\r\n: ping\r\n\r\nevent: error\r\ndata: 2\r\n\r\ndata: [DONE]\r\n\r\n",
        ] {
            check_cuts(stream.as_bytes());
        }
    }

    fn check_cuts(stream: &[u8]) {
        for num_bytes in 0..stream.len() {
            let mut unread = Vec::new();
            let mut events = Vec::new();
            for part in [&stream[..num_bytes], &stream[num_bytes..]] {
                unread.extend_from_slice(part);
                events.extend(std::iter::from_fn(|| take_event(&mut unread)));
            }
            let data: Vec<_> = events.iter().map(|event| data(event)).collect();
            let expected: [Option<&[u8]>; 4] = [Some(b"1"), None, Some(b"2"), Some(b"[DONE]")];
            assert_eq!(data, expected, "{num_bytes}");
            assert!(unread.is_empty());
        }
    }
}
