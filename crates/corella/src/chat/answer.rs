//! One answer, as it is streamed.

use std::time::{Duration, Instant};

use corella_engine::Engine;
use serde_json::Value;
use tokio::signal::unix::Signal;

use crate::event_stream::EventStream;
use crate::patient_client::{PatientClient, PatientResponse};

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
    client: &PatientClient,
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
        let mut events = open(response).await?;
        while let Some(event) = events.next().await? {
            let event: Value = serde_json::from_slice(&event).map_err(|error| error.to_string())?;
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

/// Opens the stream of an answer. `Err` is the message of an answer that is none.
async fn open(response: PatientResponse) -> Result<EventStream, String> {
    let refusal = match EventStream::open(response).await? {
        Ok(events) => return Ok(events),
        Err(refusal) => refusal,
    };
    let body: Value = serde_json::from_slice(&refusal.body).unwrap_or_default();
    let error = &body["error"];
    let message = error["message"].as_str().unwrap_or("the request failed");
    Err(match error["code"].as_str() {
        Some("context_length_exceeded") => format!("{message} /clear starts a new conversation."),
        _ => message.to_owned(),
    })
}
