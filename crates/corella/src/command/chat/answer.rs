//! One streamed answer.

use std::time::{Duration, Instant};

use serde_json::Value;
use tokio::signal::unix::Signal;

use super::server::Server;

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
    /// `None` if the server has not sent the counts, as for a stopped answer.
    pub tokens: Option<TokenCounts>,
    pub to_first_token: Duration,
    pub total: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenCounts {
    pub num_prompt_tokens: u64,
    /// Number of prompt tokens found in the prefix cache.
    pub num_cached_tokens: u64,
    pub num_output_tokens: u64,
}

/// New text of an answer.
#[derive(Debug, PartialEq)]
pub enum Piece {
    /// The model's thoughts before its answer.
    Reasoning(String),
    Text(String),
}

/// Sends a request, and passes on text as it arrives. A signal stops the answer.
///
/// `Err` is the server's message.
pub async fn ask(
    server: &Server,
    body: Value,
    interrupt: Option<&mut Signal>,
    mut show: impl FnMut(Piece),
) -> Result<Answer, String> {
    let start = Instant::now();
    let before = server.counts();
    let mut first = None;
    let mut text = String::new();
    let mut finish = None;
    let mut told = None;
    let streaming = async {
        let mut events = server.chat(body).await?;
        while let Some(event) = events.next().await? {
            let event: Value = serde_json::from_slice(&event)
                .map_err(|error| format!("the server's answer is not JSON: {error}"))?;
            if let Some(message) = error_of(&event) {
                return Err(message.to_owned());
            }
            told = TokenCounts::told(&event["usage"]).or(told);
            let choice = &event["choices"][0];
            for piece in pieces(&choice["delta"]) {
                first.get_or_insert_with(Instant::now);
                if let Piece::Text(part) = &piece {
                    text.push_str(part);
                }
                show(piece);
            }
            if let Some(reason) = choice["finish_reason"].as_str() {
                finish = Some(match reason {
                    "length" => AnswerEnd::Length,
                    _ => AnswerEnd::Whole,
                });
            }
        }
        match finish {
            Some(_) => Ok(()),
            None => Err("the server ended the answer before it was whole".to_owned()),
        }
    };
    match interrupt {
        None => streaming.await?,
        Some(interrupt) => tokio::select! {
            done = streaming => done?,
            _ = interrupt.recv() => {}
        },
    }
    let end = Instant::now();
    let counted = server.counts().zip(before);
    Ok(Answer {
        text,
        // If no event has ended the answer, the stream was dropped.
        end: finish.unwrap_or(AnswerEnd::Interrupted),
        stats: AnswerStats {
            // Without the server's counts, the growth of the engine's totals counts. It may include the last tokens of
            // an earlier answer that was stopped just before.
            tokens: told.or_else(|| counted.map(|(after, before)| after.since(before))),
            to_first_token: first.unwrap_or(end) - start,
            total: end - start,
        },
    })
}

/// Returns the new text of an event. Servers use two names for reasoning.
fn pieces(delta: &Value) -> impl Iterator<Item = Piece> {
    let part = |field: &str| {
        let part = delta[field].as_str().filter(|part| !part.is_empty());
        part.map(str::to_owned)
    };
    let reasoning = part("reasoning_content").or_else(|| part("reasoning"));
    let reasoning = reasoning.map(Piece::Reasoning);
    reasoning
        .into_iter()
        .chain(part("content").map(Piece::Text))
}

/// Returns the message of an error in a stream, which some servers write without an object.
fn error_of(event: &Value) -> Option<&str> {
    let error = &event["error"];
    error["message"].as_str().or_else(|| error.as_str())
}

impl TokenCounts {
    /// Returns the counts of a `usage`, if the event has one.
    fn told(usage: &Value) -> Option<Self> {
        let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64();
        Some(Self {
            num_prompt_tokens: usage["prompt_tokens"].as_u64()?,
            num_cached_tokens: cached.unwrap_or(0),
            num_output_tokens: usage["completion_tokens"].as_u64()?,
        })
    }

    fn since(self, before: Self) -> Self {
        Self {
            num_prompt_tokens: self.num_prompt_tokens - before.num_prompt_tokens,
            num_cached_tokens: self.num_cached_tokens - before.num_cached_tokens,
            num_output_tokens: self.num_output_tokens - before.num_output_tokens,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn events_of_several_servers_are_read() {
        let text = |text: &str| Piece::Text(text.to_owned());
        let thought = |text: &str| Piece::Reasoning(text.to_owned());
        for (delta, expected) in [
            (json!({"role": "assistant", "content": ""}), vec![]),
            (json!({"content": "a"}), vec![text("a")]),
            (
                json!({"content": null, "reasoning_content": "b"}),
                vec![thought("b")],
            ),
            (
                json!({"reasoning": "c", "content": "d"}),
                vec![thought("c"), text("d")],
            ),
            (Value::Null, vec![]),
        ] {
            assert_eq!(pieces(&delta).collect::<Vec<_>>(), expected, "{delta}");
        }
        let usage =
            json!({"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": null});
        let counts = TokenCounts {
            num_prompt_tokens: 5,
            num_cached_tokens: 0,
            num_output_tokens: 2,
        };
        assert_eq!(TokenCounts::told(&usage), Some(counts));
        assert_eq!(TokenCounts::told(&Value::Null), None);
        for event in [json!({"error": {"message": "m"}}), json!({"error": "m"})] {
            assert_eq!(error_of(&event), Some("m"));
        }
        assert_eq!(error_of(&json!({"choices": []})), None);
    }
}
