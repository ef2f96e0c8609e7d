//! `/api/generate`: answers one prompt, or continues it.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::api_error::ApiError;
use crate::auth::CallContext;
use crate::call::{Call, Endpoint, ResponseHead, serve_call};
use crate::chat_completions::ChatFields;
use crate::generation::{ChoiceDelta, PromptTokens, Usage};
use crate::prompt::Prompt;
use crate::request_body::RequestBody;
use crate::sampling_fields::{EndpointFields, StreamUsage};
use crate::server_state::ServerState;
use crate::suffix::Suffix;
use crate::text_thread::Caller;
use crate::wire::field_table;

use super::answer::{AnswerLines, Door, whole_answer};
use super::options::{CommonFields, end_with_context};

pub async fn generate(
    State(state): State<Arc<ServerState>>,
    context: CallContext,
    body: Body,
) -> Result<Response, ApiError> {
    serve_call::<OllamaGenerate>(state, context, body).await
}

/// Fields that `/api/chat` does not have. An empty text counts as absent.
#[derive(Deserialize)]
#[serde(expecting = "a JSON object")]
struct PromptFields {
    prompt: Option<String>,
    suffix: Option<String>,
    system: Option<String>,
    raw: Option<bool>,
}

/// The meaning of a prompt to the model.
enum Reading {
    /// A message of a conversation, rendered by the chat template.
    Message { system: Option<String> },
    /// A text to continue, up to the suffix if present.
    Text { suffix: Option<Suffix> },
}

impl PromptFields {
    fn reading(&mut self, state: &ServerState) -> Result<Reading, ApiError> {
        let system = self.system.take().filter(|system| !system.is_empty());
        let suffix = Suffix::checked(state, self.suffix.take(), false)?;
        let is_raw = self.raw.unwrap_or(false);
        let has_template = state.text.chat_template.is_some();
        match (system, suffix) {
            (Some(_), Some(_)) => Err(ApiError::invalid(
                "system",
                "cannot be combined with suffix",
            )),
            (Some(_), None) if is_raw => {
                Err(ApiError::invalid("system", "cannot be combined with raw"))
            }
            (Some(_), None) if !has_template => Err(ApiError::invalid(
                "system",
                "this model has no chat template, which would say where it belongs; put it in prompt",
            )),
            (None, None) if is_raw || !has_template => Ok(Reading::Text { suffix: None }),
            (None, Some(suffix)) => Ok(Reading::Text {
                suffix: Some(suffix),
            }),
            (system, None) => Ok(Reading::Message { system }),
        }
    }
}

struct OllamaGenerate;

impl Endpoint for OllamaGenerate {
    type Encoder = AnswerLines;
    const ID_PREFIX: &'static str = "generate-";
    const PROMPT_FIELD: &'static str = "prompt";

    fn prepare(
        state: &ServerState,
        _: &CallContext,
        body: &RequestBody,
        caller: &Caller,
    ) -> Result<Call<Self>, ApiError> {
        let check = state.field_check(field_table::Endpoint::OllamaGenerate);
        let common = CommonFields::parse(body, check)?;
        let mut fields: PromptFields = body.parse()?;
        let model = common.model(state)?;
        let reading = fields.reading(state)?;
        let prompt = fields.prompt.unwrap_or_default();
        let mut own = EndpointFields::default();
        if let Reading::Text { suffix } = &reading {
            if common.wants_thoughts() {
                let message = "only allowed where the chat template renders the prompt";
                return Err(ApiError::invalid("think", message));
            }
            let suffix = suffix.as_ref();
            own.more_end_token_ids =
                suffix.map_or_else(Vec::new, |suffix| suffix.end_token_ids(state));
        }
        let template_kwargs = common.template_kwargs(state)?;
        let mut params = common.params(state, caller, own)?;
        let mut prompts: Vec<PromptTokens> = Vec::new();
        match reading {
            // A call without a prompt only asks to load the model, which is loaded already.
            Reading::Message { .. } | Reading::Text { suffix: None } if prompt.is_empty() => {}
            Reading::Message { system } => {
                let messages = messages(system, prompt);
                let mut chat = ChatFields::conversation(messages, false, template_kwargs);
                let prompt = chat.tokenize(state, check, caller);
                let prompt = prompt.map_err(|error| error.renamed("messages", "prompt"))?;
                params.set_reply_constraint(state, &prompt, caller)?;
                prompts.push(prompt.into());
            }
            Reading::Text { suffix } => {
                let prompt = match &suffix {
                    None => prompt,
                    Some(suffix) => match suffix.put_behind(Prompt::Text(prompt))? {
                        Prompt::Text(text) => text,
                        Prompt::Tokens(_) => String::new(),
                    },
                };
                params.set_text_constraint(state, caller)?;
                prompts.push(PromptTokens {
                    tokens: state.encode("prompt", &prompt, true, caller)?,
                    echo: None,
                    reply: None,
                });
            }
        }
        if let Some(prompt) = prompts.first() {
            end_with_context(&mut params, state, prompt);
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
        AnswerLines::new(state.clone(), head.model, Door::Generate)
    }

    fn response(
        self,
        state: &ServerState,
        head: ResponseHead,
        choices: Vec<ChoiceDelta>,
        usage: Usage,
    ) -> Response {
        whole_answer(state, &head.model, Door::Generate, choices, &usage)
    }
}

fn messages(system: Option<String>, prompt: String) -> Vec<Map<String, Value>> {
    let message = |role: &str, content: String| {
        Map::from_iter([
            ("role".to_owned(), json!(role)),
            ("content".to_owned(), json!(content)),
        ])
    };
    let system = system.map(|system| message("system", system));
    { system.into_iter() }
        .chain([message("user", prompt)])
        .collect()
}
