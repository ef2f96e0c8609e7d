//! `/completion`: continues a prompt.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use serde::Deserialize;

use super::answer::{AnswerEvents, AnswerFormat};
use super::draw_fields::DrawFields;
use crate::api_error::ApiError;
use crate::auth::CallContext;
use crate::call::{Call, Endpoint, ResponseHead, serve_call};
use crate::completions::tokenize_prompt;
use crate::generation::{ChoiceDelta, Usage};
use crate::ollama::end_with_context;
use crate::prompt::{Prompt, PromptField};
use crate::request_body::RequestBody;
use crate::sampling_fields::StreamUsage;
use crate::server_state::ServerState;
use crate::text_thread::Caller;
use crate::wire::field_table;

pub async fn completion(
    State(state): State<Arc<ServerState>>,
    context: CallContext,
    body: Body,
) -> Result<Response, ApiError> {
    serve_call::<Completion>(state, context, body).await
}

#[derive(Deserialize)]
#[serde(expecting = "a JSON object")]
struct PromptFields {
    prompt: Option<PromptField>,
}

struct Completion(AnswerFormat);

impl Endpoint for Completion {
    type Encoder = AnswerEvents;
    const ID_PREFIX: &'static str = "cmpl-";
    const PROMPT_FIELD: &'static str = "prompt";

    fn prepare(
        state: &ServerState,
        _: &CallContext,
        body: &RequestBody,
        caller: &Caller,
    ) -> Result<Call<Self>, ApiError> {
        let check = state.field_check(field_table::Endpoint::LlamaCompletion);
        let fields = DrawFields::parse(body, check)?;
        let prompt: PromptFields = body.parse()?;
        let model = fields.model(state)?;
        let (mut params, mut format) = fields.params(state, caller, Vec::new())?;
        params.set_text_constraint(state, caller)?;
        let Some(PromptField(prompts)) = prompt.prompt else {
            return Err(ApiError::invalid("prompt", "is required"));
        };
        let max_num_choices = state.config.max_num_choices as usize;
        if prompts.len() * format.num_choices > max_num_choices {
            let message = format!(
                "{} prompts with {} choices each are more than {max_num_choices}, the most choices of a call",
                prompts.len(),
                format.num_choices,
            );
            return Err(ApiError::invalid("prompt", message));
        }
        let mut tokenized = Vec::with_capacity(prompts.len());
        for prompt in prompts {
            format.prompts.push(match &prompt {
                Prompt::Text(text) => text.clone(),
                Prompt::Tokens(_) => String::new(),
            });
            tokenized.push(tokenize_prompt(state, prompt, false, true, caller)?);
        }
        if let [prompt] = &tokenized[..] {
            end_with_context(&mut params, state, prompt);
        }
        Ok(Call {
            prompts: tokenized,
            params,
            model,
            format: Self(format),
        })
    }

    fn encoder(
        self,
        state: &Arc<ServerState>,
        head: ResponseHead,
        _: usize,
        _: StreamUsage,
    ) -> AnswerEvents {
        self.0.into_events(state, head.model)
    }

    fn response(
        self,
        state: &ServerState,
        head: ResponseHead,
        choices: Vec<ChoiceDelta>,
        _: Usage,
    ) -> Response {
        self.0.response(state, &head.model, choices)
    }
}
