//! The answers of `/completion` and `/infill`: one object, an array of them for several prompts or choices, or a stream
//! of events.

use std::sync::Arc;
use std::time::Duration;

use axum::response::Response;
use corella_core::TokenId;
use serde_json::{Map, Value, json};

use super::indentation::cut_at_indent;
use crate::call::generation::{ChoiceDelta, Finish, StopReason};
use crate::call::metrics::ChoiceTimes;
use crate::call::sse::{ChunkEncoder, Events};
use crate::text::served_model::ServedModel;
use crate::text::token_logprob::{ChatLogprobs, TokenNames};
use crate::wire::json_response::json_response;
use crate::wire::usage::Usage;

/// The answer's `id_slot`. Clients cannot choose a slot here.
const NO_SLOT: i32 = -1;

/// The request's settings for its answer.
#[derive(Clone)]
pub struct AnswerFormat {
    /// The text of each prompt.
    pub prompts: Vec<String>,
    pub num_choices: usize,
    pub settings: Value,
    pub has_probs: bool,
    pub returns_tokens: bool,
    /// The paths of the members that the answer keeps; empty for all.
    pub response_fields: Vec<String>,
    pub min_indent: usize,
}

impl AnswerFormat {
    /// Returns the events of a stream with this format.
    pub fn into_events(self, served: Arc<ServedModel>, model: String) -> AnswerEvents {
        AnswerEvents {
            served,
            model,
            format: self,
        }
    }

    /// Returns the object of a whole answer, or the last object of a choice's stream, whose `content` is empty.
    fn last(&self, served: &ServedModel, model: &str, choice: ChoiceDelta, content: &str) -> Value {
        let cut = cut_at_indent(content, self.min_indent);
        let (mut stop_type, stopping_word) = match choice.finish.clone() {
            None => ("none", String::new()),
            Some(Finish {
                stop_reason: Some(StopReason::Text(word)),
                ..
            }) => ("word", word),
            Some(Finish {
                reason: "length", ..
            }) => ("limit", String::new()),
            Some(_) => ("eos", String::new()),
        };
        if cut.is_some() {
            stop_type = "limit";
        }
        let content = cut.unwrap_or(content);
        let usage = &choice.usage;
        let prompt = self.prompts.get(choice.index / self.num_choices.max(1));
        let mut answer = json!({
            "index": choice.index,
            "content": content,
            "tokens": tokens(self.returns_tokens, &choice.tokens),
            "id_slot": NO_SLOT,
            "stop": true,
            "model": model,
            "tokens_predicted": usage.completion_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "tokens_cached": usage.total_tokens,
            "generation_settings": self.settings,
            "prompt": prompt,
            "has_new_line": content.contains('\n'),
            "truncated": false,
            "stop_type": stop_type,
            "stopping_word": stopping_word,
            "timings": timings(choice.times, usage),
        });
        if self.has_probs {
            answer["completion_probabilities"] = probabilities(served, &choice);
        }
        match self.response_fields.is_empty() {
            true => answer,
            false => kept(&answer, &self.response_fields),
        }
    }

    pub fn response(
        &self,
        served: &ServedModel,
        model: &str,
        choices: Vec<ChoiceDelta>,
    ) -> Response {
        let mut answers: Vec<_> = choices
            .into_iter()
            .map(|mut choice| {
                let content = std::mem::take(&mut choice.text);
                self.last(served, model, choice, &content)
            })
            .collect();
        match (answers.len(), answers.pop()) {
            (1, Some(answer)) => json_response(&answer),
            (_, last) => {
                answers.extend(last);
                json_response(&answers)
            }
        }
    }
}

fn tokens(is_asked: bool, tokens: &[TokenId]) -> &[TokenId] {
    if is_asked { tokens } else { &[] }
}

/// Each token with its log-probability and the most likely alternatives.
fn probabilities(served: &ServedModel, choice: &ChoiceDelta) -> Value {
    let names = TokenNames {
        tokenizer: &served.tokenizer,
        as_ids: false,
    };
    let mut rows = ChatLogprobs::new(names, &choice.logprobs).into_rows();
    for (row, (token, logprobs)) in rows.iter_mut().zip(&choice.logprobs) {
        row["id"] = json!(token);
        if let Some(top) = row["top_logprobs"].as_array_mut() {
            for (row, (token, _)) in top.iter_mut().zip(&logprobs.top) {
                row["id"] = json!(token);
            }
        }
    }
    Value::Array(rows)
}

/// Returns times in milliseconds, and speeds.
fn timings(times: Option<ChoiceTimes>, usage: &Usage) -> Value {
    let (prefill, decode) = times.map_or((Duration::ZERO, Duration::ZERO), |times| {
        (times.prefill, times.decode)
    });
    let num_cached = usage.prompt_tokens_details.cached_tokens;
    let num_prefilled = usage.prompt_tokens.saturating_sub(num_cached);
    let mut timings = json!({"cache_n": num_cached});
    for (name, num_tokens, time) in [
        ("prompt", num_prefilled, prefill),
        ("predicted", usage.completion_tokens, decode),
    ] {
        // Clients divide by times.
        let time_ms = (time.as_secs_f64() * 1e3).max(1e-3);
        let num = num_tokens as f64;
        timings[format!("{name}_n")] = json!(num_tokens);
        timings[format!("{name}_ms")] = json!(time_ms);
        timings[format!("{name}_per_token_ms")] = json!(time_ms / num.max(1.0));
        timings[format!("{name}_per_second")] = json!(num * 1e3 / time_ms);
    }
    timings
}

/// Returns the members of an answer at these paths, whose steps are separated by slashes.
fn kept(answer: &Value, paths: &[String]) -> Value {
    let members = paths.iter().filter_map(|path| {
        let member = answer.pointer(&format!("/{path}"))?;
        Some((path.clone(), member.clone()))
    });
    Value::Object(members.collect::<Map<_, _>>())
}

/// Encodes each piece of text as an event, and after each choice an event with `stop`.
pub struct AnswerEvents {
    served: Arc<ServedModel>,
    model: String,
    format: AnswerFormat,
}

impl ChunkEncoder for AnswerEvents {
    fn encode_delta(&mut self, mut delta: ChoiceDelta, events: &mut Events) {
        let has_text = !delta.text.is_empty() || !delta.logprobs.is_empty();
        if has_text {
            let mut event = json!({
                "index": delta.index,
                "content": delta.text,
                "tokens": delta.tokens,
                "stop": false,
                "id_slot": NO_SLOT,
                "tokens_predicted": delta.usage.completion_tokens,
                "tokens_evaluated": delta.usage.prompt_tokens,
            });
            if self.format.has_probs {
                event["completion_probabilities"] = probabilities(&self.served, &delta);
            }
            events.push(&event);
            delta.tokens.clear();
            delta.logprobs.clear();
        }
        if delta.finish.is_some() {
            events.push(&self.format.last(&self.served, &self.model, delta, ""));
        }
    }

    /// Writes nothing: the last event of each choice has every member.
    fn encode_end(&mut self, _: &Usage, _: &mut Events) {}
}
