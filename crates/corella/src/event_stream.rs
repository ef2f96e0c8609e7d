//! The answer of the local server to a request that asked for a stream, event by event.

use crate::patient_client::PatientResponse;

/// The data of server-sent events.
pub struct EventStream {
    response: PatientResponse,
    unread: Vec<u8>,
}

/// An answer that is no stream, because the request was refused.
pub struct Refusal {
    pub status: u16,
    /// The error object, as JSON.
    pub body: Vec<u8>,
}

impl EventStream {
    /// `Err` is the reason why there is neither a stream nor a refusal.
    pub async fn open(mut response: PatientResponse) -> Result<Result<Self, Refusal>, String> {
        let status = response.status();
        if status == 200 {
            let unread = Vec::new();
            return Ok(Ok(Self { response, unread }));
        }
        let body = response.bytes().await?;
        Ok(Err(Refusal { status, body }))
    }

    /// The data of the next event, as JSON, which is an error object if the stream has failed; `None` at
    /// the end of the stream.
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
            match self.response.chunk().await? {
                Some(chunk) => self.unread.extend_from_slice(&chunk),
                None => return Ok(None),
            }
        }
    }
}

/// Takes the first whole event, without the blank line behind it.
fn take_event(unread: &mut Vec<u8>) -> Option<Vec<u8>> {
    let end = unread.windows(2).position(|pair| pair == b"\n\n")?;
    let mut event: Vec<u8> = unread.drain(..end + 2).collect();
    event.truncate(end);
    Some(event)
}

/// What stands in the event's line of data, which may be behind its name.
fn data(event: &[u8]) -> Option<&[u8]> {
    let mut lines = event.split(|&byte| byte == b'\n');
    lines.find_map(|line| line.strip_prefix(b"data: "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_whole_wherever_they_are_cut() {
        let stream = b"data: 1\n\n: ping\n\nevent: error\ndata: 2\n\ndata: [DONE]\n\n";
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
