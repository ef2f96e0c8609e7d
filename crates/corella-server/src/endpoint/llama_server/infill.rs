//! `/infill`: writes the text between two others, for editors.

use axum::response::Response;
use corella_text::FillInMiddle;
use serde::Deserialize;

use super::answer::{AnswerEvents, AnswerFormat};
use super::draw_fields::DrawFields;
use crate::call::generation::Generated;
use crate::call::response_head::ResponseHead;
use crate::endpoint::generating_endpoint::{Call, CallRequest, Endpoint, StreamStart};
use crate::endpoint::ollama::end_with_context;
use crate::text::prompt::Prompt;
use crate::text::prompt_tokens::tokenize_prompt;
use crate::text::served_model::ServedModel;
use crate::wire::api_error::ApiError;
use crate::wire::field_table;

#[derive(Deserialize)]
#[serde(expecting = "a JSON object")]
struct MiddleFields {
    input_prefix: Option<String>,
    input_suffix: Option<String>,
    input_extra: Option<Vec<OtherFile>>,
    /// Appended to `input_prefix`.
    prompt: Option<String>,
}

/// A part of another file, which the model sees before the file with the gap.
#[derive(Deserialize)]
#[serde(expecting = "an object with text and filename", deny_unknown_fields)]
struct OtherFile {
    text: String,
    #[serde(default)]
    filename: Option<String>,
    /// When the editor read the file.
    #[serde(default, rename = "time")]
    _time: Option<serde_json::Value>,
}

pub struct Infill(AnswerFormat);

impl Endpoint for Infill {
    type Encoder = AnswerEvents;
    const ID_PREFIX: &'static str = "infill-";
    const PROMPT_FIELD: &'static str = "input_prefix";

    fn prepare(request: CallRequest<'_>) -> Result<Call<Self>, ApiError> {
        let (served, body, caller) = (request.served, request.body, request.caller);
        let check = served.field_check(field_table::Endpoint::Infill);
        let fields = DrawFields::parse(body, check)?;
        let middle: MiddleFields = body.parse()?;
        let model = fields.model(served)?;
        let tokenizer = &served.tokenizer;
        let Some(tokens) = FillInMiddle::of(tokenizer) else {
            return Err(ApiError::invalid(
                "input_prefix",
                "this model cannot fill in the middle: its vocabulary has no tokens for it",
            ));
        };
        let mut ends = tokens.end_token_ids(tokenizer);
        ends.retain(|&id| (id as usize) < served.config.vocab_size);
        let (mut params, mut format) = fields.params(served, caller, ends)?;
        params.set_text_constraint(served, caller)?;
        let mut prefix = middle.input_prefix.unwrap_or_default();
        prefix.push_str(middle.prompt.as_deref().unwrap_or_default());
        let suffix = middle.input_suffix.unwrap_or_default();
        let others: Vec<_> = middle
            .input_extra
            .iter()
            .flatten()
            .map(|file| (file.filename.as_deref().unwrap_or("tmp"), &*file.text))
            .collect();
        let mut prompt = tokens.other_files(tokenizer, &others);
        prompt.push_str(&tokens.prompt(&prefix, &suffix));
        format.prompts.push(prompt.clone());
        let prompt = tokenize_prompt(served, Prompt::Text(prompt), false, true, caller);
        let prompt = prompt.map_err(|error| error.renamed("prompt", Self::PROMPT_FIELD))?;
        end_with_context(&mut params, served, &prompt);
        Ok(Call {
            prompts: vec![prompt],
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
