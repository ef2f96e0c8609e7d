//! `/completion`: continues a prompt.

use axum::response::Response;
use serde::Deserialize;

use super::answer::{AnswerEvents, AnswerFormat};
use super::draw_fields::DrawFields;
use crate::call::generation::Generated;
use crate::call::response_head::ResponseHead;
use crate::endpoint::generating_endpoint::{Call, CallRequest, Endpoint, StreamStart};
use crate::endpoint::ollama::end_with_context;
use crate::text::prompt::{Prompt, PromptField};
use crate::text::prompt_tokens::{check_num_choices, tokenize_prompt};
use crate::text::served_model::ServedModel;
use crate::wire::api_error::{ApiError, required};
use crate::wire::field_table;

#[derive(Deserialize)]
#[serde(expecting = "a JSON object")]
struct PromptFields {
    prompt: Option<PromptField>,
}

pub struct Completion(AnswerFormat);

impl Endpoint for Completion {
    type Encoder = AnswerEvents;
    const ID_PREFIX: &'static str = "cmpl-";
    const PROMPT_FIELD: &'static str = "prompt";

    fn prepare(request: CallRequest<'_>) -> Result<Call<Self>, ApiError> {
        let (served, body, caller) = (request.served, request.body, request.caller);
        let check = served.field_check(field_table::Endpoint::LlamaCompletion);
        let fields = DrawFields::parse(body, check)?;
        let prompt: PromptFields = body.parse()?;
        let model = fields.model(served)?;
        let (mut params, mut format) = fields.params(served, caller, Vec::new())?;
        params.set_text_constraint(served, caller)?;
        let PromptField(prompts) = required("prompt", prompt.prompt)?;
        check_num_choices(served, prompts.len(), params.num_choices)?;
        let mut tokenized = Vec::with_capacity(prompts.len());
        for prompt in prompts {
            format.prompts.push(match &prompt {
                Prompt::Text(text) => text.clone(),
                Prompt::Tokens(_) => String::new(),
            });
            tokenized.push(tokenize_prompt(served, prompt, false, true, caller)?);
        }
        if let [prompt] = &tokenized[..] {
            end_with_context(&mut params, served, prompt);
        }
        Ok(Call {
            prompts: tokenized,
            params,
            model,
            format: Self(format),
        })
    }

    fn encoder(self, stream: StreamStart) -> AnswerEvents {
        self.0.into_events(stream.served, stream.head.model)
    }

    fn response(self, served: &ServedModel, head: ResponseHead, answer: Generated) -> Response {
        self.0.response(served, &head.model, answer.choices)
    }
}
