//! `/api/chat`: generates the next message of a conversation.

use axum::response::Response;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::call::generation::Generated;
use crate::call::response_head::ResponseHead;
use crate::endpoint::generating_endpoint::{Call, CallRequest, Endpoint, StreamStart};
use crate::text::chat_fields::ChatFields;
use crate::text::sampling_fields::EndpointFields;
use crate::text::served_model::ServedModel;
use crate::wire::api_error::ApiError;
use crate::wire::field_table;

use super::answer::{AnswerLines, Door, whole_answer};
use super::conversation::conversation;
use super::options::{CommonFields, end_with_context};

/// Fields that `/api/generate` does not have.
#[derive(Deserialize)]
#[serde(expecting = "a JSON object")]
struct ConversationFields {
    messages: Option<Vec<Map<String, Value>>>,
    tools: Option<Vec<Map<String, Value>>>,
}

pub struct OllamaChat;

impl Endpoint for OllamaChat {
    type Encoder = AnswerLines;
    const ID_PREFIX: &'static str = "chat-";
    const PROMPT_FIELD: &'static str = "messages";

    fn prepare(request: CallRequest<'_>) -> Result<Call<Self>, ApiError> {
        let (served, body, caller) = (request.served, request.body, request.caller);
        ChatFields::check_num_messages(body, served)?;
        let check = served.field_check(field_table::Endpoint::OllamaChat);
        let common = CommonFields::parse(body, check)?;
        let fields: ConversationFields = body.parse()?;
        let model = common.model(served)?;
        let template_kwargs = common.template_kwargs(served)?;
        let mut params = common.params(served, caller, EndpointFields::default())?;
        let messages = conversation(fields.messages.unwrap_or_default(), check)?;
        let mut prompts = Vec::new();
        // As in Ollama's templates, a begun answer is continued.
        let is_begun = messages
            .last()
            .is_some_and(|last| last["role"] == "assistant" && !last.contains_key("tool_calls"));
        let is_empty = messages.is_empty();
        let chat = ChatFields::conversation(messages, is_begun, template_kwargs);
        let mut chat = chat.with_tools(fields.tools, None, None);
        if is_empty {
            // A call without messages only asks to load the model, which is loaded already.
            chat.check_tools(served, check)?;
        } else if served.chat_template.is_none() {
            let message = "this model has no chat template; use /api/generate";
            return Err(ApiError::invalid("messages", message));
        } else {
            let prompt = chat.tokenize(served, check, caller);
            let prompt =
                prompt.map_err(|error| error.renamed("continue_final_message", "messages"))?;
            params.set_reply_constraint(served, &prompt, caller)?;
            let prompt = prompt.into();
            end_with_context(&mut params, served, &prompt);
            prompts.push(prompt);
        }
        Ok(Call {
            prompts,
            params,
            model,
            format: Self,
        })
    }

    fn encoder(self, stream: StreamStart) -> AnswerLines {
        AnswerLines::new(stream.served, stream.head.model, Door::Chat)
    }

    fn response(self, served: &ServedModel, head: ResponseHead, answer: Generated) -> Response {
        whole_answer(served, &head.model, Door::Chat, answer)
    }
}
