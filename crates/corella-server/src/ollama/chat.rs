//! `/api/chat`: generates the next message of a conversation.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::api_error::ApiError;
use crate::auth::CallContext;
use crate::call::{Call, Endpoint, ResponseHead, serve_call};
use crate::chat_completions::ChatFields;
use crate::generation::{ChoiceDelta, Usage};
use crate::request_body::RequestBody;
use crate::sampling_fields::{EndpointFields, StreamUsage};
use crate::server_state::ServerState;
use crate::text_thread::Caller;
use crate::wire::field_table;

use super::answer::{AnswerLines, Door, whole_answer};
use super::conversation::conversation;
use super::options::{CommonFields, end_with_context};

pub async fn chat(
    State(state): State<Arc<ServerState>>,
    context: CallContext,
    body: Body,
) -> Result<Response, ApiError> {
    serve_call::<OllamaChat>(state, context, body).await
}

/// Fields that `/api/generate` does not have.
#[derive(Deserialize)]
#[serde(expecting = "a JSON object")]
struct ConversationFields {
    messages: Option<Vec<Map<String, Value>>>,
    tools: Option<Vec<Map<String, Value>>>,
}

struct OllamaChat;

impl Endpoint for OllamaChat {
    type Encoder = AnswerLines;
    const ID_PREFIX: &'static str = "chat-";
    const PROMPT_FIELD: &'static str = "messages";

    fn prepare(
        state: &ServerState,
        _: &CallContext,
        body: &RequestBody,
        caller: &Caller,
    ) -> Result<Call<Self>, ApiError> {
        ChatFields::check_num_messages(body, state)?;
        let check = state.field_check(field_table::Endpoint::OllamaChat);
        let common = CommonFields::parse(body, check)?;
        let fields: ConversationFields = body.parse()?;
        let model = common.model(state)?;
        let template_kwargs = common.template_kwargs(state)?;
        let mut params = common.params(state, caller, EndpointFields::default())?;
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
            // Such a call only asks to load the model, which is loaded already.
            chat.check_tools(state, check)?;
        } else {
            let prompt = chat.tokenize(state, check, caller);
            let prompt =
                prompt.map_err(|error| error.renamed("continue_final_message", "messages"))?;
            params.set_reply_constraint(state, &prompt, caller)?;
            let prompt = prompt.into();
            end_with_context(&mut params, state, &prompt);
            prompts.push(prompt);
        }
        Ok(Call {
            prompts,
            params,
            model,
            format: Self,
        })
    }

    fn encoder(
        self,
        state: &Arc<ServerState>,
        head: ResponseHead,
        _: usize,
        _: StreamUsage,
    ) -> AnswerLines {
        AnswerLines::new(state.clone(), head.model, Door::Chat)
    }

    fn response(
        self,
        state: &ServerState,
        head: ResponseHead,
        choices: Vec<ChoiceDelta>,
        usage: Usage,
    ) -> Response {
        whole_answer(state, &head.model, Door::Chat, choices, &usage)
    }
}
