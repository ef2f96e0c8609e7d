//! `/v1/chat/completions`: generates the next message of a conversation.

use axum::response::Response;
use corella_core::{Logprobs, TokenId};
use corella_text::{ReplyPart, WantedCalls};
use serde::Serialize;

use crate::call::generation::{ChoiceDelta, Generated, StopReason};
use crate::call::response_head::ResponseHead;
use crate::call::sse::{ChunkEncoder, Events};
use crate::endpoint::chat_reply::{ChatDelta, ChatMessage};
use crate::endpoint::choice_metrics::ChoiceMetrics;
use crate::endpoint::generating_endpoint::{Call, CallRequest, Endpoint, StreamStart};
use crate::text::chat_fields::ChatFields;
use crate::text::conversation_fields::ConversationFields;
use crate::text::sampling_fields::{EndpointFields, StreamUsage};
use crate::text::scored_prompt::PromptLogprobs;
use crate::text::served_model::ServedModel;
use crate::text::token_logprob::{ChatLogprobs, TokenNames};
use crate::wire::api_error::ApiError;
use crate::wire::field_table;
use crate::wire::json_response::json_response;
use crate::wire::usage::Usage;

/// The request's settings for its answer.
#[derive(Clone, Copy)]
pub struct Chat {
    /// The number of alternatives in `prompt_logprobs`.
    prompt_logprobs: Option<u32>,
    /// Whether log-probabilities name tokens by their ids.
    tokens_as_ids: bool,
    /// Whether token ids are part of the answer.
    returns_token_ids: bool,
    /// Whether times are part of the answer.
    returns_metrics: bool,
    /// Whether the request named the tool to call.
    names_tool: bool,
}

impl Chat {
    /// The reason for a reply with calls that ends by itself is `tool_calls`. If the caller has named the tool, the
    /// reason stays `stop`, as with OpenAI and vLLM.
    fn finish_reason(self, reason: &'static str, has_calls: bool) -> &'static str {
        match reason {
            "stop" if has_calls && !self.names_tool => "tool_calls",
            reason => reason,
        }
    }

    fn token_names(self, served: &ServedModel) -> TokenNames<'_> {
        TokenNames {
            tokenizer: &served.tokenizer,
            as_ids: self.tokens_as_ids,
        }
    }
}

impl Endpoint for Chat {
    type Encoder = ChatChunks;
    const ID_PREFIX: &'static str = "chatcmpl-";
    const PROMPT_FIELD: &'static str = "messages";

    fn prepare(request: CallRequest<'_>) -> Result<Call<Self>, ApiError> {
        let (served, body, caller) = (request.served, request.body, request.caller);
        let ConversationFields::<ChatFields> {
            sampling,
            mut fields,
            check,
            model,
        } = ConversationFields::parse(served, body, field_table::Endpoint::Chat)?;
        if fields.echo == Some(true) {
            return Err(ApiError::unsupported("echo", "leave it out"));
        }
        let own = EndpointFields {
            logprobs: fields.logprobs(&served.config)?,
            ..EndpointFields::default()
        };
        let mut params = sampling.validate(served, caller, own)?;
        let prompt = fields.tokenize(served, check, caller)?;
        params.set_reply_constraint(served, &prompt, caller)?;
        let names_tool = matches!(prompt.demanded_calls, Some(WantedCalls::One(_)));
        Ok(Call {
            prompts: vec![prompt.into()],
            format: Self {
                prompt_logprobs: params.prompt_logprobs,
                tokens_as_ids: params.tokens_as_ids,
                returns_token_ids: params.returns_token_ids,
                returns_metrics: params.returns_metrics,
                names_tool,
            },
            params,
            model,
        })
    }

    fn encoder(self, stream: StreamStart) -> ChatChunks {
        ChatChunks {
            format: self,
            has_role: vec![false; stream.num_choices],
            has_call: vec![false; stream.num_choices],
            stream,
        }
    }

    fn response(self, served: &ServedModel, head: ResponseHead, answer: Generated) -> Response {
        let Generated { mut choices, usage } = answer;
        // All choices have the same prompt.
        let prompt = choices.first_mut().and_then(|choice| choice.prompt.take());
        let prompt_tokens = choices
            .first()
            .and_then(|choice| choice.prompt_tokens.clone());
        let prompt_logprobs = PromptLogprobs::of(&served.tokenizer, prompt, self.prompt_logprobs);
        let choices: Vec<_> = choices
            .into_iter()
            .map(|choice| ChatChoice::new(self, served, choice))
            .collect();
        let mut object = head.object("chat.completion", &choices, Some(Some(&usage)));
        object.prefix_cache = usage.prefix_cache.as_deref();
        object.prompt_logprobs = prompt_logprobs;
        object.prompt_token_ids = prompt_tokens.as_deref();
        json_response(&object)
    }
}

#[derive(Serialize)]
struct ChatChoice {
    index: usize,
    message: ChatMessage,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<&'static str>,
    stop_reason: Option<StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<TokenId>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    metrics: Option<ChoiceMetrics>,
}

impl ChatChoice {
    fn new(format: Chat, served: &ServedModel, choice: ChoiceDelta) -> Self {
        let metrics = ChoiceMetrics::of(&choice).filter(|_| format.returns_metrics);
        let logprobs = logprobs_of(format.token_names(served), &choice.logprobs);
        let message = ChatMessage::new(choice.parts, served.reply_format.calls);
        let (finish_reason, stop_reason) = choice.finish.map_or((None, None), |finish| {
            let has_calls = choice.has_called || message.has_calls();
            let reason = format.finish_reason(finish.reason, has_calls);
            (Some(reason), finish.stop_reason)
        });
        Self {
            index: choice.index,
            message,
            logprobs,
            finish_reason,
            stop_reason,
            token_ids: format.returns_token_ids.then_some(choice.tokens),
            metrics,
        }
    }
}

fn logprobs_of(names: TokenNames, tokens: &[(TokenId, Box<Logprobs>)]) -> Option<ChatLogprobs> {
    (!tokens.is_empty()).then(|| ChatLogprobs::new(names, tokens))
}

/// Encodes the chunks of each choice: first its role, then the parts of its reply, then its finish
/// reason.
pub struct ChatChunks {
    stream: StreamStart,
    format: Chat,
    /// Whether the role of each choice has been sent.
    has_role: Vec<bool>,
    /// Whether the reply of each choice has called a tool.
    has_call: Vec<bool>,
}

#[derive(Default, Serialize)]
struct ChatChunkChoice<'a> {
    index: usize,
    delta: ChatDelta<'a>,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_reason: Option<StopReason>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    token_ids: Vec<TokenId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    metrics: Option<ChoiceMetrics>,
}

/// The `object` of a chunk.
const CHUNK: &str = "chat.completion.chunk";

impl ChatChunks {
    fn push(&self, choice: ChatChunkChoice, usage: &Usage, events: &mut Events) {
        let explanation = usage.prefix_cache.as_deref();
        let is_last = choice.finish_reason.is_some();
        let usage = self.stream.usage.of_choice(usage);
        let choices = [choice];
        let mut chunk = self.stream.head.object(CHUNK, &choices, usage);
        chunk.prefix_cache = explanation.filter(|_| is_last);
        events.push(&chunk);
    }
}

impl ChunkEncoder for ChatChunks {
    fn encode_delta(&mut self, delta: ChoiceDelta, events: &mut Events) {
        let index = delta.index;
        let metrics = ChoiceMetrics::of(&delta).filter(|_| self.format.returns_metrics);
        if !std::mem::replace(&mut self.has_role[index], true) {
            let role = ChatChunkChoice {
                index,
                delta: ChatDelta::first(),
                ..ChatChunkChoice::default()
            };
            let usage = self.stream.usage.of_choice(&delta.usage);
            let choices = [role];
            let mut chunk = self.stream.head.object(CHUNK, &choices, usage);
            chunk.prompt_token_ids = delta.prompt_tokens.as_deref();
            events.push(&chunk);
        }
        let mut token_ids = delta.tokens;
        let served = &self.stream.served;
        let calls = served.reply_format.calls;
        let mut deltas: Vec<_> = delta
            .parts
            .iter()
            .map(|part| ChatDelta::of_part(part, calls))
            .collect();
        if deltas.is_empty() && !delta.logprobs.is_empty() {
            deltas.push(ChatDelta::text(""));
        }
        // The first part of the delta carries the log-probabilities and ids of all its tokens.
        let mut logprobs = logprobs_of(self.format.token_names(served), &delta.logprobs);
        for content in deltas {
            let content = ChatChunkChoice {
                index,
                delta: content,
                logprobs: logprobs.take(),
                token_ids: std::mem::take(&mut token_ids),
                ..ChatChunkChoice::default()
            };
            self.push(content, &delta.usage, events);
        }
        let is_call = |part: &ReplyPart| matches!(part, ReplyPart::CallStart { .. });
        self.has_call[index] |= delta.has_called || delta.parts.iter().any(is_call);
        if let Some(finish) = delta.finish {
            let end = ChatChunkChoice {
                index,
                finish_reason: Some(
                    self.format
                        .finish_reason(finish.reason, self.has_call[index]),
                ),
                stop_reason: finish.stop_reason,
                token_ids,
                metrics,
                ..ChatChunkChoice::default()
            };
            self.push(end, &delta.usage, events);
        }
    }

    fn encode_end(&mut self, usage: &Usage, events: &mut Events) {
        if self.stream.usage != StreamUsage::Never {
            let no_choices: &[ChatChunkChoice] = &[];
            let head = &self.stream.head;
            events.push(&head.object(CHUNK, no_choices, Some(Some(usage))));
        }
        events.push_done();
    }
}
