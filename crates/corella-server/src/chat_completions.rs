//! `/v1/chat/completions`: generates the next message of a conversation.

use std::fmt;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use corella_core::{Logprobs, TokenId};
use corella_text::{ChatInput, ChatTemplate, ReplyContext, ReplyPart, TextError, WantedCalls};
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::api_error::ApiError;
use crate::auth::CallContext;
use crate::call::{Call, ConversationFields, Endpoint, ResponseHead, json_response, serve_call};
use crate::chat_call::fit_calls;
use crate::chat_message::{is_begun_answer, template_messages};
use crate::chat_reply::{ChatDelta, ChatMessage};
use crate::chat_role::fit_roles;
use crate::chat_tool::fit_tools;
use crate::chat_turn::fit_turns;
use crate::choice_metrics::ChoiceMetrics;
use crate::generation::{ChoiceDelta, PromptTokens, StopReason, Usage};
use crate::request_body::RequestBody;
use crate::sampling_fields::{EndpointFields, StreamUsage, check_logprobs};
use crate::scored_prompt::PromptLogprobs;
use crate::serve_config::ServeConfig;
use crate::server_state::ServerState;
use crate::sse::{ChunkEncoder, Events};
use crate::text_thread::Caller;
use crate::thinking_switch::effort_switch;
use crate::token_logprob::{ChatLogprobs, TokenNames};
use crate::tool_fields::{OfferedTools, ToolFields};
use crate::wire::field_check::FieldCheck;
use crate::wire::field_table;

pub async fn chat_completions(
    State(state): State<Arc<ServerState>>,
    context: CallContext,
    body: Body,
) -> Result<Response, ApiError> {
    serve_call::<Chat>(state, context, body).await
}

/// Fields that `/v1/completions` does not have. `/tokenize` also reads them in a conversation, and conversations of
/// other APIs are converted to this form.
#[derive(Default, Deserialize)]
#[serde(expecting = "a JSON object")]
pub struct ChatFields {
    messages: Option<Vec<Map<String, Value>>>,
    logprobs: Option<bool>,
    top_logprobs: Option<u32>,
    add_generation_prompt: Option<bool>,
    continue_final_message: Option<bool>,
    add_special_tokens: Option<bool>,
    chat_template_kwargs: Option<Map<String, Value>>,
    reasoning_effort: Option<String>,
    echo: Option<bool>,
    tools: Option<Vec<Map<String, Value>>>,
    tool_choice: Option<Value>,
    parallel_tool_calls: Option<bool>,
}

/// A conversation in the form that the model reads, and the form of its reply.
pub struct ChatPrompt {
    pub tokens: Vec<TokenId>,
    pub reply: ReplyContext,
    /// The tool calls that the reply must make, if any.
    pub demanded_calls: Option<WantedCalls>,
    /// The names of all tools in the request, in its order.
    pub tool_names: Vec<String>,
}

/// A conversation as its template writes it.
struct RenderedChat {
    text: String,
    /// The messages that the template accepted.
    messages: Vec<Value>,
    continue_final_message: bool,
    tools: Option<OfferedTools>,
}

impl From<ChatPrompt> for PromptTokens {
    fn from(prompt: ChatPrompt) -> Self {
        Self {
            tokens: prompt.tokens,
            echo: None,
            reply: Some(prompt.reply),
        }
    }
}

/// Counts messages without storing them, so that too many are refused before they take memory.
#[derive(Deserialize)]
#[serde(expecting = "a JSON object")]
struct MessageCount {
    messages: Option<ItemCount>,
    input: Option<ItemCount>,
}

/// The number of items of an array; 0 for any other value.
struct ItemCount(usize);

impl<'de> Deserialize<'de> for ItemCount {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ItemVisitor;

        impl<'de> Visitor<'de> for ItemVisitor {
            type Value = ItemCount;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an array")
            }

            fn visit_str<E>(self, _: &str) -> Result<ItemCount, E> {
                Ok(ItemCount(0))
            }

            /// The field's own parser reports its fault.
            fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<ItemCount, A::Error> {
                while fields.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(ItemCount(0))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<ItemCount, A::Error> {
                let mut num_items = 0;
                while items.next_element::<IgnoredAny>()?.is_some() {
                    num_items += 1;
                }
                Ok(ItemCount(num_items))
            }
        }

        deserializer.deserialize_any(ItemVisitor)
    }
}

impl ChatFields {
    pub fn parse(body: &RequestBody, state: &ServerState) -> Result<Self, ApiError> {
        Self::check_num_messages(body, state)?;
        body.parse()
    }

    /// Refuses more messages, or items of `input`, than the context can hold.
    pub fn check_num_messages(body: &RequestBody, state: &ServerState) -> Result<(), ApiError> {
        let count: MessageCount = body.count()?;
        // A chat template writes at least one token for each message.
        let max_model_len = state.config.max_model_len;
        for (field, items) in [("messages", count.messages), ("input", count.input)] {
            let num_items = items.map_or(0, |items| items.0);
            if num_items > max_model_len as usize {
                let error = ApiError::too_many_messages(num_items, max_model_len);
                return Err(error.renamed("messages", field));
            }
        }
        Ok(())
    }

    /// The conversation of another API's request, whose last message is continued if `is_begun`.
    pub fn conversation(
        messages: Vec<Map<String, Value>>,
        is_begun: bool,
        chat_template_kwargs: Option<Map<String, Value>>,
    ) -> Self {
        Self {
            messages: Some(messages),
            continue_final_message: Some(is_begun),
            chat_template_kwargs,
            ..Self::default()
        }
    }

    /// The tools that another API's request offers.
    pub fn with_tools(
        mut self,
        tools: Option<Vec<Map<String, Value>>>,
        choice: Option<Value>,
        parallel: Option<bool>,
    ) -> Self {
        self.tools = tools;
        self.tool_choice = choice;
        self.parallel_tool_calls = parallel;
        self
    }

    /// Checks a request whose field `other` has a text in place of a conversation.
    pub fn check_beside(
        mut self,
        other: &str,
        state: &ServerState,
        check: FieldCheck,
    ) -> Result<(), ApiError> {
        if self.messages.is_some() {
            let message = format!("cannot be combined with {other}");
            return Err(ApiError::invalid("messages", message));
        }
        self.check_tools(state, check)
    }

    /// Checks the tools of a request without a conversation.
    pub fn check_tools(&mut self, state: &ServerState, check: FieldCheck) -> Result<(), ApiError> {
        self.offered_tools(state, check).map(drop)
    }

    fn offered_tools(
        &mut self,
        state: &ServerState,
        check: FieldCheck,
    ) -> Result<Option<OfferedTools>, ApiError> {
        let tools = ToolFields {
            tools: self.tools.take().unwrap_or_default(),
            tool_choice: self.tool_choice.take(),
            parallel_tool_calls: self.parallel_tool_calls.unwrap_or(true),
        };
        tools.offered(state, check)
    }

    /// Returns the conversation's text for the model.
    pub fn prompt_text(
        &mut self,
        state: &ServerState,
        check: FieldCheck,
        caller: &Caller,
    ) -> Result<String, ApiError> {
        Ok(self.render(state, check, caller)?.text)
    }

    fn render(
        &mut self,
        state: &ServerState,
        check: FieldCheck,
        caller: &Caller,
    ) -> Result<RenderedChat, ApiError> {
        let Some(messages) = self.messages.take() else {
            return Err(ApiError::invalid("messages", "is required"));
        };
        let mut tools = self.offered_tools(state, check)?;
        let template = state.text.chat_template.as_ref();
        let needs_text_arguments = template.is_some_and(ChatTemplate::needs_text_arguments);
        let messages = template_messages(messages, needs_text_arguments, check)?;
        let Some(template) = template else {
            return Err(ApiError::invalid(
                "messages",
                "this model has no chat template; use /v1/completions",
            ));
        };
        let messages = fit_calls(fit_roles(messages, template)?, template);
        let messages = fit_turns(messages, template);
        if let Some(tools) = &mut tools {
            fit_tools(&mut tools.list, template);
        }
        let continue_final_message = { self.continue_final_message }
            .unwrap_or_else(|| messages.last().is_some_and(is_begun_answer));
        if let Some(effort) = self.reasoning_effort.take() {
            let (name, value) = effort_switch(state, "reasoning_effort", &effort)?;
            let kwargs = self.chat_template_kwargs.get_or_insert_default();
            kwargs.insert(name.into(), value);
        }
        let is_abandoned = || caller.has_left();
        let input = ChatInput {
            messages: &messages,
            tools: tools.as_ref().map(|tools| &tools.list),
            add_generation_prompt: self
                .add_generation_prompt
                .unwrap_or(!continue_final_message),
            continue_final_message,
            kwargs: self.chat_template_kwargs.as_ref(),
        };
        let text = template
            .render_within(input, state.render_limit(&is_abandoned))
            .map_err(|error| match error {
                TextError::PromptTooLarge { .. } => {
                    // The text was too long, so it has at least one token more than the context.
                    let max_model_len = state.config.max_model_len;
                    let at_least = max_model_len as usize + 1;
                    ApiError::prompt_too_long("messages", at_least, max_model_len)
                }
                TextError::ContinueFinalMessage(_) => {
                    ApiError::invalid("continue_final_message", error.to_string())
                }
                error => ApiError::invalid("messages", error.to_string()),
            })?;
        Ok(RenderedChat {
            text,
            messages,
            continue_final_message,
            tools,
        })
    }

    pub fn tokenize(
        &mut self,
        state: &ServerState,
        check: FieldCheck,
        caller: &Caller,
    ) -> Result<ChatPrompt, ApiError> {
        let RenderedChat {
            text: prompt,
            messages,
            continue_final_message,
            tools,
        } = self.render(state, check, caller)?;
        let add_special_tokens = self.add_special_tokens.unwrap_or(false);
        let format = state.text.reply_format;
        let within_reasoning = format.reasoning.is_some_and(|reasoning| {
            let last = messages.last().map(|message| &message["content"]);
            match last.and_then(Value::as_str) {
                Some(content) if continue_final_message => reasoning.is_open_at_end(content),
                _ => reasoning.is_opened_by(&prompt),
            }
        });
        let past_reasoning = match continue_final_message {
            true => !within_reasoning,
            false => { format.reasoning }.is_some_and(|reasoning| reasoning.is_closed_by(&prompt)),
        };
        let one_call = tools.as_ref().is_some_and(|tools| tools.one_call);
        let (tools, demanded_calls, tool_names) = match tools {
            Some(tools) => (Some(tools.set), tools.demanded_calls, tools.names),
            None => (None, None, Vec::new()),
        };
        Ok(ChatPrompt {
            tokens: state.encode("messages", &prompt, add_special_tokens, caller)?,
            reply: ReplyContext {
                format,
                tools,
                within_reasoning,
                past_reasoning,
                one_call,
            },
            demanded_calls,
            tool_names,
        })
    }

    fn logprobs(&self, config: &ServeConfig) -> Result<Option<u32>, ApiError> {
        match (self.logprobs.unwrap_or(false), self.top_logprobs) {
            (true, top) => check_logprobs("top_logprobs", top.unwrap_or(0), config).map(Some),
            (false, None | Some(0)) => Ok(None),
            (false, Some(_)) => Err(ApiError::invalid(
                "top_logprobs",
                "only allowed with logprobs = true",
            )),
        }
    }
}

/// The members of an answer besides its message.
#[derive(Clone, Copy)]
struct Chat {
    /// The number of alternatives in `prompt_logprobs`.
    prompt_logprobs: Option<u32>,
    /// Whether log-probabilities name tokens by their ids.
    tokens_as_ids: bool,
    /// Whether token ids are part of the answer.
    returns_token_ids: bool,
    /// Whether times are.
    returns_metrics: bool,
    /// Whether the request named the tool to call.
    names_tool: bool,
}

impl Chat {
    /// A reply that ends by itself after calls waits for the tools' results. If the caller has named the tool, it ends
    /// like any other, as with OpenAI and vLLM.
    fn finish_reason(self, reason: &'static str, has_calls: bool) -> &'static str {
        match reason {
            "stop" if has_calls && !self.names_tool => "tool_calls",
            reason => reason,
        }
    }

    fn token_names(self, state: &ServerState) -> TokenNames<'_> {
        TokenNames {
            tokenizer: &state.text.tokenizer,
            as_ids: self.tokens_as_ids,
        }
    }
}

impl Endpoint for Chat {
    type Encoder = ChatChunks;
    const ID_PREFIX: &'static str = "chatcmpl-";
    const PROMPT_FIELD: &'static str = "messages";

    fn prepare(
        state: &ServerState,
        _: &CallContext,
        body: &RequestBody,
        caller: &Caller,
    ) -> Result<Call<Self>, ApiError> {
        let ConversationFields::<ChatFields> {
            sampling,
            mut fields,
            check,
            model,
        } = ConversationFields::parse(state, body, field_table::Endpoint::Chat)?;
        if fields.echo == Some(true) {
            return Err(ApiError::unsupported("echo", "leave it out"));
        }
        let own = EndpointFields {
            logprobs: fields.logprobs(&state.config)?,
            ..EndpointFields::default()
        };
        let mut params = sampling.validate(state, caller, own)?;
        let prompt = fields.tokenize(state, check, caller)?;
        params.set_reply_constraint(state, &prompt, caller)?;
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

    fn encoder(
        self,
        state: &Arc<ServerState>,
        head: ResponseHead,
        num_choices: usize,
        stream_usage: StreamUsage,
    ) -> ChatChunks {
        ChatChunks {
            state: state.clone(),
            head,
            format: self,
            has_role: vec![false; num_choices],
            has_call: vec![false; num_choices],
            stream_usage,
        }
    }

    fn response(
        self,
        state: &ServerState,
        head: ResponseHead,
        mut choices: Vec<ChoiceDelta>,
        usage: Usage,
    ) -> Response {
        // All choices have the same prompt.
        let prompt = choices.first_mut().and_then(|choice| choice.prompt.take());
        let prompt_tokens = choices
            .first()
            .and_then(|choice| choice.prompt_tokens.clone());
        let prompt_logprobs = self.prompt_logprobs.zip(prompt);
        let prompt_logprobs = prompt_logprobs.map(|(num_top, prompt)| PromptLogprobs {
            tokenizer: &state.text.tokenizer,
            prompt,
            num_top: num_top as usize,
        });
        let choices: Vec<_> = choices
            .into_iter()
            .map(|choice| ChatChoice::new(self, state, choice))
            .collect();
        let mut object = head.object("chat.completion", &choices, Some(Some(&usage)));
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
    fn new(format: Chat, state: &ServerState, choice: ChoiceDelta) -> Self {
        let metrics = ChoiceMetrics::of(&choice).filter(|_| format.returns_metrics);
        let logprobs = logprobs_of(format.token_names(state), &choice.logprobs);
        let message = ChatMessage::new(choice.parts, state.text.reply_format.calls);
        let (finish_reason, stop_reason) = choice.finish.map_or((None, None), |finish| {
            let reason = format.finish_reason(finish.reason, message.has_calls());
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
struct ChatChunks {
    state: Arc<ServerState>,
    head: ResponseHead,
    format: Chat,
    /// Whether the role of each choice has been sent.
    has_role: Vec<bool>,
    /// Whether the reply of each choice has called a tool.
    has_call: Vec<bool>,
    stream_usage: StreamUsage,
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
        let usage = self.stream_usage.of_choice(usage);
        events.push(&self.head.object(CHUNK, &[choice], usage));
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
            let usage = self.stream_usage.of_choice(&delta.usage);
            let choices = [role];
            let mut chunk = self.head.object(CHUNK, &choices, usage);
            chunk.prompt_token_ids = delta.prompt_tokens.as_deref();
            events.push(&chunk);
        }
        let mut token_ids = delta.tokens;
        let calls = self.state.text.reply_format.calls;
        let mut deltas: Vec<_> = { delta.parts.iter() }
            .map(|part| ChatDelta::of_part(part, calls))
            .collect();
        if deltas.is_empty() && !delta.logprobs.is_empty() {
            deltas.push(ChatDelta::text(""));
        }
        // The log-probabilities and ids of tokens come with the first part that the tokens gave.
        let mut logprobs = logprobs_of(self.format.token_names(&self.state), &delta.logprobs);
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
        self.has_call[index] |= delta.parts.iter().any(is_call);
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
        if self.stream_usage != StreamUsage::Never {
            let no_choices: &[ChatChunkChoice] = &[];
            events.push(&self.head.object(CHUNK, no_choices, Some(Some(usage))));
        }
        events.push_done();
    }
}
