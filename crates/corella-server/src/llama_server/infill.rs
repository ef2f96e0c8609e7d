//! `/infill`: writes the text between two others, for editors.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use corella_text::FillInMiddle;
use serde::Deserialize;

use super::answer::{AnswerEvents, AnswerFormat};
use super::draw_fields::DrawFields;
use crate::api_error::ApiError;
use crate::auth::CallContext;
use crate::call::{Call, Endpoint, ResponseHead, serve_call};
use crate::completions::tokenize_prompt;
use crate::generation::{ChoiceDelta, Usage};
use crate::ollama::end_with_context;
use crate::prompt::Prompt;
use crate::request_body::RequestBody;
use crate::sampling_fields::StreamUsage;
use crate::server_state::ServerState;
use crate::text_thread::Caller;
use crate::wire::field_table;

pub async fn infill(
    State(state): State<Arc<ServerState>>,
    context: CallContext,
    body: Body,
) -> Result<Response, ApiError> {
    serve_call::<Infill>(state, context, body).await
}

#[derive(Deserialize)]
#[serde(expecting = "a JSON object")]
struct MiddleFields {
    input_prefix: Option<String>,
    input_suffix: Option<String>,
    input_extra: Option<Vec<OtherFile>>,
    /// Continues the prefix.
    prompt: Option<String>,
}

/// A part of another file, which the model sees before the file with the hole.
#[derive(Deserialize)]
#[serde(expecting = "an object with text and filename", deny_unknown_fields)]
struct OtherFile {
    text: String,
    #[serde(default)]
    filename: Option<String>,
    /// The time at which the editor read it.
    #[serde(default, rename = "time")]
    _time: Option<serde_json::Value>,
}

struct Infill(AnswerFormat);

impl Endpoint for Infill {
    type Encoder = AnswerEvents;
    const ID_PREFIX: &'static str = "infill-";
    const PROMPT_FIELD: &'static str = "input_prefix";

    fn prepare(
        state: &ServerState,
        _: &CallContext,
        body: &RequestBody,
        caller: &Caller,
    ) -> Result<Call<Self>, ApiError> {
        let check = state.field_check(field_table::Endpoint::Infill);
        let fields = DrawFields::parse(body, check)?;
        let middle: MiddleFields = body.parse()?;
        let model = fields.model(state)?;
        let tokenizer = &state.text.tokenizer;
        let Some(tokens) = FillInMiddle::of(tokenizer) else {
            return Err(ApiError::invalid(
                "input_prefix",
                "this model cannot fill in the middle: its vocabulary has no tokens for it",
            ));
        };
        let mut ends = tokens.end_token_ids(tokenizer);
        ends.retain(|&id| (id as usize) < state.config.vocab_size);
        let (mut params, mut format) = fields.params(state, caller, ends)?;
        params.set_text_constraint(state, caller)?;
        let mut prefix = middle.input_prefix.unwrap_or_default();
        prefix.push_str(middle.prompt.as_deref().unwrap_or_default());
        let suffix = middle.input_suffix.unwrap_or_default();
        let others: Vec<_> = { middle.input_extra.iter().flatten() }
            .map(|file| (file.filename.as_deref().unwrap_or("tmp"), &*file.text))
            .collect();
        let mut prompt = tokens.other_files(tokenizer, &others);
        prompt.push_str(&tokens.prompt(&prefix, &suffix));
        format.prompts.push(prompt.clone());
        let prompt = tokenize_prompt(state, Prompt::Text(prompt), false, true, caller);
        let prompt = prompt.map_err(|error| error.renamed("prompt", Self::PROMPT_FIELD))?;
        end_with_context(&mut params, state, &prompt);
        Ok(Call {
            prompts: vec![prompt],
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
