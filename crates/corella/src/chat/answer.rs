//! One answer, as it is streamed.

use std::time::{Duration, Instant};

use corella_engine::Engine;
use corella_server::{LocalClient, LocalResponse};
use serde_json::Value;
use tokio::signal::unix::Signal;

const PATH: &str = "/v1/chat/completions";

pub struct Answer {
    pub text: String,
    pub end: AnswerEnd,
    pub stats: AnswerStats,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerEnd {
    Whole,
    /// `max_tokens` or the context was reached.
    Length,
    Interrupted,
}

#[derive(Clone, Debug, PartialEq)]
pub struct AnswerStats {
    pub num_prompt_tokens: u64,
    /// Prompt tokens that were found in the prefix cache.
    pub num_cached_tokens: u64,
    pub num_output_tokens: u64,
    pub to_first_token: Duration,
    pub total: Duration,
}

/// New text of an answer.
#[derive(Debug, PartialEq)]
pub enum Piece {
    /// What the model thinks before it answers.
    Reasoning(String),
    Text(String),
}

/// Asks the server, and hands on text as it comes. A signal stops the answer.
///
/// `Err` is the server's message.
pub async fn ask(
    client: &LocalClient,
    engine: &Engine,
    body: &Value,
    interrupt: Option<&mut Signal>,
    mut show: impl FnMut(Piece),
) -> Result<Answer, String> {
    let start = Instant::now();
    let before = engine.stats().scheduler;
    let mut first = None;
    let mut text = String::new();
    let mut finish = None;
    let mut streaming = async || {
        let response = client.post(PATH, body.to_string().into_bytes()).await?;
        let mut events = Events::new(response).await?;
        while let Some(event) = events.next().await? {
            if let Some(message) = event["error"]["message"].as_str() {
                return Err(message.to_owned());
            }
            let choice = &event["choices"][0];
            let part = |field: &str| {
                choice["delta"][field]
                    .as_str()
                    .filter(|part| !part.is_empty())
            };
            if let Some(part) = part("reasoning_content") {
                first.get_or_insert_with(Instant::now);
                show(Piece::Reasoning(part.to_owned()));
            }
            if let Some(part) = part("content") {
                first.get_or_insert_with(Instant::now);
                text.push_str(part);
                show(Piece::Text(part.to_owned()));
            }
            if let Some(reason) = choice["finish_reason"].as_str() {
                finish = Some(match reason {
                    "length" => AnswerEnd::Length,
                    _ => AnswerEnd::Whole,
                });
            }
        }
        Ok(())
    };
    match interrupt {
        None => streaming().await?,
        Some(interrupt) => tokio::select! {
            done = streaming() => done?,
            _ = interrupt.recv() => {}
        },
    }
    let end = Instant::now();
    let after = engine.stats().scheduler;
    Ok(Answer {
        text,
        // The stream was dropped if nothing has ended it.
        end: finish.unwrap_or(AnswerEnd::Interrupted),
        stats: AnswerStats {
            num_prompt_tokens: after.num_prompt_tokens - before.num_prompt_tokens,
            num_cached_tokens: after.num_prefix_hit_tokens - before.num_prefix_hit_tokens,
            num_output_tokens: after.num_generated_tokens - before.num_generated_tokens,
            to_first_token: first.unwrap_or(end) - start,
            total: end - start,
        },
    })
}

/// The events of a stream, as server-sent events carry them.
struct Events {
    response: LocalResponse,
    unread: Vec<u8>,
}

impl Events {
    /// `Err` is the message of an answer that is no stream.
    async fn new(mut response: LocalResponse) -> Result<Self, String> {
        if response.status == 200 {
            let unread = Vec::new();
            return Ok(Self { response, unread });
        }
        let body = response.bytes().await?;
        let body: Value = serde_json::from_slice(&body).unwrap_or_default();
        let error = &body["error"];
        let message = error["message"].as_str().unwrap_or("the request failed");
        Err(match error["code"].as_str() {
            Some("context_length_exceeded") => format!("{message} /clear begins anew."),
            _ => message.to_owned(),
        })
    }

    /// The next event; `None` at the end of the stream.
    async fn next(&mut self) -> Result<Option<Value>, String> {
        loop {
            while let Some(event) = take_event(&mut self.unread) {
                match event.strip_prefix(b"data: ") {
                    Some(b"[DONE]") => return Ok(None),
                    // Comments keep a connection alive.
                    None => {}
                    Some(data) => {
                        let event = serde_json::from_slice(data);
                        return event.map(Some).map_err(|error| error.to_string());
                    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_whole_wherever_they_are_cut() {
        let stream = b"data: 1\n\n: ping\n\ndata: [DONE]\n\n";
        for num_bytes in 0..stream.len() {
            let mut unread = Vec::new();
            let mut events = Vec::new();
            for part in [&stream[..num_bytes], &stream[num_bytes..]] {
                unread.extend_from_slice(part);
                events.extend(std::iter::from_fn(|| take_event(&mut unread)));
            }
            let expected: [&[u8]; 3] = [b"data: 1", b": ping", b"data: [DONE]"];
            assert_eq!(events, expected, "{num_bytes}");
            assert!(unread.is_empty());
        }
    }
}
