//! `/v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages API.

mod cache_control;
mod conversation;
mod error;
mod event;
mod tool;

use axum::response::Response;
use corella_text::CallFormat;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::call::generation::{Finish, Generated, StopReason};
use crate::call::response_head::ResponseHead;
use crate::endpoint::chat_reply::call_id;
use crate::endpoint::generating_endpoint::{Call, CallRequest, Endpoint, StreamStart};
use crate::endpoint::reply_block::ReplyBlock;
use crate::model_set::model_use::UsedModel;
use crate::text::chat_fields::ChatFields;
use crate::text::conversation_fields::ConversationFields;
use crate::text::output_format::{OutputFormat, message_format};
use crate::text::sampling_fields::EndpointFields;
use crate::text::served_model::ServedModel;
use crate::text::text_thread::Caller;
use crate::text::thinking_switch::thinking_switch;
use crate::wire::api_error::{ApiError, required};
use crate::wire::cache_explanation::{CacheExplanation, CachedTokens};
use crate::wire::cut_json::object_of;
use crate::wire::field_check::FieldCheck;
use crate::wire::field_table;
use crate::wire::field_table::messages::{OUTPUT_CONFIG, THINKING};
use crate::wire::json_response::json_response;
use crate::wire::request_body::SentBody;
use crate::wire::usage::{CacheCreation, Usage};

use cache_control::cache_marks;
use conversation::conversation;
use event::MessageEvents;
use tool::{chat_tool_choice, chat_tools};

pub use error::{error_event, in_anthropic_shape};

pub async fn count_tokens(
    UsedModel(state): UsedModel,
    body: SentBody,
) -> Result<Response, ApiError> {
    #[derive(Serialize)]
    struct TokenCount {
        input_tokens: usize,
    }
    let body = state.parts.bodies.read(body).await?;
    let num_bytes = body.num_bytes();
    let count = move |served: &ServedModel, caller: &Caller| {
        ChatFields::check_num_messages(&body, served)?;
        let mut fields: MessageFields = body.parse()?;
        let check = served.field_check(field_table::Endpoint::CountTokens);
        body.check_fields(check)?;
        fields.take_format()?;
        served.check_name(fields.model.as_deref())?;
        // The marks are checked, and nothing is retained.
        let mut chat = fields.chat(served, check)?.with_marks(None);
        let prompt = chat.tokenize(served, check, caller).map_err(in_own_names)?;
        Ok(json_response(&TokenCount {
            input_tokens: prompt.tokens.len(),
        }))
    };
    state.run_blocking(num_bytes, count).await
}

/// Fields that no other endpoint has, or that mean something else at others.
#[derive(Deserialize)]
#[serde(expecting = "a JSON object")]
struct MessageFields {
    model: Option<String>,
    max_tokens: Option<u32>,
    messages: Option<Vec<Map<String, Value>>>,
    system: Option<Value>,
    stop_sequences: Option<Vec<String>>,
    thinking: Option<Map<String, Value>>,
    tools: Option<Vec<Map<String, Value>>>,
    tool_choice: Option<Map<String, Value>>,
    output_config: Option<Map<String, Value>>,
    cache_control: Option<Value>,
}

impl MessageFields {
    fn take_format(&mut self) -> Result<Option<OutputFormat>, ApiError> {
        let config = self.output_config.as_mut();
        message_format(config.and_then(|config| config.remove("format")))
    }

    /// Returns the conversation in the chat template's form.
    fn chat(self, served: &ServedModel, check: FieldCheck) -> Result<ChatFields, ApiError> {
        // An error of the marks is returned after all other errors.
        let marks = cache_marks(&self, check);
        let messages = required("messages", self.messages)?;
        let messages = conversation(messages, self.system, check)?;
        // If the last message is the assistant's, the answer continues it.
        let is_begun = messages
            .last()
            .is_some_and(|message| message["role"] == "assistant");
        let mut template_kwargs = match self.thinking {
            None => None,
            Some(thinking) => {
                check.check(&THINKING, "thinking", &thinking)?;
                template_kwargs(served, &thinking)?
            }
        };
        if let Some(config) = &self.output_config {
            check.check(&OUTPUT_CONFIG, "output_config", config)?;
            if let Some(effort) = effort(served, config.get("effort"))? {
                let kwargs = template_kwargs.get_or_insert_default();
                kwargs.insert(EFFORT.to_owned(), effort.into());
            }
        }
        let tools = self
            .tools
            .map(|tools| chat_tools(tools, check))
            .transpose()?;
        let choice = self
            .tool_choice
            .as_ref()
            .map(|choice| chat_tool_choice(choice, check));
        let (choice, parallel) = choice.transpose()?.unzip();
        let chat = ChatFields::conversation(messages, is_begun, template_kwargs);
        Ok(chat.with_tools(tools, choice, parallel).with_marks(marks?))
    }
}

/// Returns the template's variables that switch thinking on or off.
fn template_kwargs(
    served: &ServedModel,
    thinking: &Map<String, Value>,
) -> Result<Option<Map<String, Value>>, ApiError> {
    let thinks = served.reply_format.reasoning.is_some();
    let is_on = match thinking.get("type").and_then(Value::as_str) {
        Some("disabled") => false,
        Some("enabled") => true,
        // The model decides. A model without reasoning never thinks.
        Some("adaptive") => thinks,
        _ => {
            let message = "must be \"enabled\", \"adaptive\" or \"disabled\"";
            return Err(ApiError::invalid("thinking.type", message));
        }
    };
    thinking_switch(served, "thinking.type", is_on)
}

/// Renames the fields in a chat's error to this API's names.
fn in_own_names(error: ApiError) -> ApiError {
    error
        .without_function()
        .within_tools("parameters", "input_schema")
        .renamed("continue_final_message", "messages")
}

/// The template's variable for the effort of thinking.
const EFFORT: &str = "reasoning_effort";

/// Returns the effort for a template that reads one. Models know three grades. Anthropic's API has two more above
/// "high".
fn effort(served: &ServedModel, effort: Option<&Value>) -> Result<Option<String>, ApiError> {
    let effort = match effort {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::String(effort)) => effort,
        Some(_) => {
            return Err(ApiError::invalid(
                "output_config.effort",
                "must be a string",
            ));
        }
    };
    let template = served.chat_template.as_ref();
    if !template.is_some_and(|template| template.reads(EFFORT)) {
        return Ok(None);
    }
    let known = match effort.as_str() {
        "max" | "xhigh" => "high",
        known => known,
    };
    Ok(Some(known.to_owned()))
}

pub struct Messages;

impl Endpoint for Messages {
    type Encoder = MessageEvents;
    const ID_PREFIX: &'static str = "msg_";
    const PROMPT_FIELD: &'static str = "messages";

    fn prepare(request: CallRequest<'_>) -> Result<Call<Self>, ApiError> {
        let (served, body, caller) = (request.served, request.body, request.caller);
        let ConversationFields::<MessageFields> {
            mut sampling,
            mut fields,
            check,
            model,
        } = ConversationFields::parse(served, body, field_table::Endpoint::Messages)?;
        required("max_tokens", fields.max_tokens)?;
        sampling.set_stop(fields.stop_sequences.clone());
        let params = sampling.validate(served, caller, EndpointFields::default());
        let mut params = params.map_err(|error| error.renamed("stop", "stop_sequences"))?;
        if let Some(format) = fields.take_format()? {
            params.output_format = Some(format);
        }
        let mut chat = fields.chat(served, check)?;
        let prompt = chat.tokenize(served, check, caller).map_err(in_own_names)?;
        let held = params.set_reply_constraint(served, &prompt, caller);
        held.map_err(in_own_names)?;
        Ok(Call {
            prompts: vec![prompt.into()],
            params,
            model,
            format: Self,
        })
    }

    fn encoder(self, stream: StreamStart) -> MessageEvents {
        MessageEvents::new(stream.head, stream.served.reply_format.calls)
    }

    fn response(self, served: &ServedModel, head: ResponseHead, mut answer: Generated) -> Response {
        let choice = answer.choices.pop();
        let (parts, finish) =
            choice.map_or((Vec::new(), None), |choice| (choice.parts, choice.finish));
        let blocks = ReplyBlock::all(&parts);
        let (stop_reason, stop_sequence) = stop_of(finish, &blocks);
        let format = served.reply_format.calls;
        let content: Vec<_> = blocks
            .into_iter()
            .map(|block| ContentBlock::new(block, format))
            .collect();
        json_response(&Message {
            id: &head.id,
            kind: "message",
            role: "assistant",
            model: &head.model,
            content: &content,
            stop_reason,
            stop_sequence,
            usage: MessageUsage::new(&answer.usage),
            prefix_cache: answer.usage.prefix_cache.as_deref(),
        })
    }
}

/// The answer, or its beginning in a stream.
#[derive(Serialize)]
struct Message<'a> {
    id: &'a str,
    #[serde(rename = "type")]
    kind: &'static str,
    role: &'static str,
    model: &'a str,
    content: &'a [ContentBlock],
    stop_reason: Option<&'static str>,
    stop_sequence: Option<String>,
    usage: MessageUsage,
    #[serde(skip_serializing_if = "Option::is_none")]
    prefix_cache: Option<&'a CacheExplanation>,
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum ContentBlock {
    /// Anthropic signs its models' thoughts. Corella's signature is empty.
    Thinking {
        thinking: String,
        signature: &'static str,
    },
    Text {
        text: String,
    },
    ToolUse {
        id: String,
        name: String,
        input: Value,
    },
}

impl ContentBlock {
    fn new(block: ReplyBlock, format: Option<CallFormat>) -> Self {
        match block {
            ReplyBlock::Reasoning(thinking) => Self::Thinking {
                thinking,
                signature: "",
            },
            ReplyBlock::Text(text) => Self::Text { text },
            ReplyBlock::Call { name, arguments } => Self::ToolUse {
                id: call_id(format),
                name,
                input: Value::Object(object_of(&arguments)),
            },
        }
    }
}

/// Tokens as Anthropic counts them: `input_tokens` has neither cached tokens nor computed tokens that are retained.
#[derive(Serialize)]
struct MessageUsage {
    /// The computed tokens that are not retained.
    input_tokens: u64,
    cache_creation_input_tokens: u64,
    cache_creation: CacheCreation,
    cache_read_input_tokens: u64,
    #[serde(skip_serializing_if = "CachedTokens::are_in_memory")]
    cache_read_input_tokens_by_medium: CachedTokens,
    output_tokens: u64,
}

impl MessageUsage {
    fn new(usage: &Usage) -> Self {
        let details = &usage.prompt_tokens_details;
        let cached = details.cached_tokens;
        let creation = usage.cache_creation;
        Self {
            input_tokens: usage.prompt_tokens - cached - creation.total(),
            cache_creation_input_tokens: creation.total(),
            cache_creation: creation,
            cache_read_input_tokens: cached,
            cache_read_input_tokens_by_medium: details.cached_tokens_by_medium,
            output_tokens: usage.completion_tokens,
        }
    }
}

/// Returns `stop_reason` and `stop_sequence`. The reason for a reply with calls that ends by itself is `tool_use`.
fn stop_of(
    finish: Option<Finish>,
    blocks: &[ReplyBlock],
) -> (Option<&'static str>, Option<String>) {
    match finish {
        None => (None, None),
        Some(Finish {
            stop_reason: Some(StopReason::Text(text)),
            ..
        }) => (Some("stop_sequence"), Some(text)),
        Some(Finish { reason, .. }) => {
            let is_call = |block: &ReplyBlock| matches!(block, ReplyBlock::Call { .. });
            match reason {
                "length" => (Some("max_tokens"), None),
                _ if blocks.iter().any(is_call) => (Some("tool_use"), None),
                _ => (Some("end_turn"), None),
            }
        }
    }
}
