//! `/api/generate`: answers one prompt, or continues it.

use axum::response::Response;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::call::generation::Generated;
use crate::call::response_head::ResponseHead;
use crate::endpoint::generating_endpoint::{Call, CallRequest, Endpoint, StreamStart};
use crate::text::chat_fields::ChatFields;
use crate::text::prompt::Prompt;
use crate::text::prompt_tokens::PromptTokens;
use crate::text::sampling_fields::EndpointFields;
use crate::text::served_model::ServedModel;
use crate::text::suffix::Suffix;
use crate::wire::api_error::ApiError;
use crate::wire::field_table;

use super::answer::{AnswerLines, Door, whole_answer};
use super::options::{CommonFields, end_with_context};

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
    fn reading(&mut self, served: &ServedModel) -> Result<Reading, ApiError> {
        let system = self.system.take().filter(|system| !system.is_empty());
        let suffix = Suffix::checked(served, self.suffix.take(), false)?;
        let is_raw = self.raw.unwrap_or(false);
        let has_template = served.chat_template.is_some();
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
                "this model has no chat template to place it in the prompt; put it in prompt",
            )),
            (None, None) if is_raw || !has_template => Ok(Reading::Text { suffix: None }),
            (None, Some(suffix)) => Ok(Reading::Text {
                suffix: Some(suffix),
            }),
            (system, None) => Ok(Reading::Message { system }),
        }
    }
}

pub struct OllamaGenerate;

impl Endpoint for OllamaGenerate {
    type Encoder = AnswerLines;
    const ID_PREFIX: &'static str = "generate-";
    const PROMPT_FIELD: &'static str = "prompt";

    fn prepare(request: CallRequest<'_>) -> Result<Call<Self>, ApiError> {
        let (served, body, caller) = (request.served, request.body, request.caller);
        let check = served.field_check(field_table::Endpoint::OllamaGenerate);
        let common = CommonFields::parse(body, check)?;
        let mut fields: PromptFields = body.parse()?;
        let model = common.model(served)?;
        let reading = fields.reading(served)?;
        let prompt = fields.prompt.unwrap_or_default();
        let mut own = EndpointFields::default();
        if let Reading::Text { suffix } = &reading {
            if common.wants_thoughts() {
                let message = "only allowed where the chat template renders the prompt";
                return Err(ApiError::invalid("think", message));
            }
            let suffix = suffix.as_ref();
            own.more_end_token_ids =
                suffix.map_or_else(Vec::new, |suffix| suffix.end_token_ids(served));
        }
        let template_kwargs = common.template_kwargs(served)?;
        let mut params = common.params(served, caller, own)?;
        let mut prompts: Vec<PromptTokens> = Vec::new();
        match reading {
            // A call without a prompt only asks to load the model, which is loaded already.
            Reading::Message { .. } | Reading::Text { suffix: None } if prompt.is_empty() => {}
            Reading::Message { system } => {
                let messages = messages(system, prompt);
                let mut chat = ChatFields::conversation(messages, false, template_kwargs);
                let prompt = chat.tokenize(served, check, caller);
                let prompt = prompt.map_err(|error| error.renamed("messages", "prompt"))?;
                params.set_reply_constraint(served, &prompt, caller)?;
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
                params.set_text_constraint(served, caller)?;
                prompts.push(PromptTokens {
                    tokens: served.encode("prompt", &prompt, true, caller)?,
                    echo: None,
                    reply: None,
                    retentions: Vec::new(),
                });
            }
        }
        if let Some(prompt) = prompts.first() {
            end_with_context(&mut params, served, prompt);
        }
        Ok(Call {
            prompts,
            params,
            model,
            format: Self,
        })
    }

    fn encoder(self, stream: StreamStart) -> AnswerLines {
        AnswerLines::new(stream.served, stream.head.model, Door::Generate)
    }

    fn response(self, served: &ServedModel, head: ResponseHead, answer: Generated) -> Response {
        whole_answer(served, &head.model, Door::Generate, answer)
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
    system
        .into_iter()
        .chain([message("user", prompt)])
        .collect()
}
