//! `/v1/completions`: continues a prompt.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use corella_core::TokenId;
use corella_text::Tokenizer;
use serde::{Deserialize, Serialize};

use crate::api_error::ApiError;
use crate::auth::CallContext;
use crate::call::{Call, Endpoint, ResponseHead, check_model, json_response, serve_call};
use crate::choice_metrics::ChoiceMetrics;
use crate::generation::{ChoiceDelta, PromptTokens, StopReason, Usage};
use crate::prompt::{Prompt, PromptField};
use crate::request_body::RequestBody;
use crate::sampling_fields::{
    EndpointFields, SamplingFields, StreamUsage, check_logprobs, check_num_tokens, check_token_ids,
};
use crate::scored_prompt::PromptLogprobs;
use crate::server_state::ServerState;
use crate::sse::{ChunkEncoder, Events};
use crate::suffix::Suffix;
use crate::text_thread::Caller;
use crate::token_logprob::{CompletionLogprobs, TokenNames};
use crate::wire::field_table;

pub async fn completions(
    State(state): State<Arc<ServerState>>,
    context: CallContext,
    body: Body,
) -> Result<Response, ApiError> {
    serve_call::<Completion>(state, context, body).await
}

/// The `object` of a response and of its chunks, which have the same form.
const OBJECT: &str = "text_completion";
/// The default of OpenAI and vLLM.
const DEFAULT_MAX_TOKENS: u32 = 16;

/// Fields that `/v1/chat/completions` lacks, or has with another type.
#[derive(Deserialize)]
#[serde(expecting = "a JSON object")]
struct CompletionFields {
    prompt: Option<PromptField>,
    suffix: Option<String>,
    echo: Option<bool>,
    logprobs: Option<u32>,
    best_of: Option<u32>,
    add_special_tokens: Option<bool>,
}

/// The members of an answer besides its text.
#[derive(Clone, Copy)]
struct Completion {
    /// The number of alternatives to each token among the `logprobs` of an echoed prompt.
    echoed: Option<u32>,
    /// The number of alternatives to each token in `prompt_logprobs`.
    prompt_logprobs: Option<u32>,
    /// Whether log-probabilities name tokens by their ids.
    tokens_as_ids: bool,
    /// Whether token ids are part of the answer.
    returns_token_ids: bool,
    /// Whether times are.
    returns_metrics: bool,
}

impl Endpoint for Completion {
    type Encoder = CompletionChunks;
    const ID_PREFIX: &'static str = "cmpl-";
    const PROMPT_FIELD: &'static str = "prompt";

    fn prepare(
        state: &ServerState,
        _: &CallContext,
        body: &RequestBody,
        caller: &Caller,
    ) -> Result<Call<Self>, ApiError> {
        let sampling: SamplingFields = body.parse()?;
        let fields: CompletionFields = body.parse()?;
        body.check_fields(state.field_check(field_table::Endpoint::Completions))?;
        let model = check_model(state, sampling.model.as_deref())?;
        let logprobs = fields
            .logprobs
            .map(|num_logprobs| check_logprobs("logprobs", num_logprobs, &state.config))
            .transpose()?;
        let echo = fields.echo.unwrap_or(false);
        let suffix = Suffix::checked(state, fields.suffix, echo)?;
        let own = EndpointFields {
            default_max_tokens: Some(DEFAULT_MAX_TOKENS),
            logprobs,
            best_of: fields.best_of,
            echo,
            more_end_token_ids: suffix
                .as_ref()
                .map_or_else(Vec::new, |suffix| suffix.end_token_ids(state)),
        };
        let mut params = sampling.validate(state, caller, own)?;
        params.set_text_constraint(state, caller)?;
        let Some(PromptField(prompts)) = fields.prompt else {
            return Err(ApiError::invalid("prompt", "is required"));
        };
        let max_num_prompts = (state.config.max_num_choices / params.num_choices) as usize;
        if prompts.len() > max_num_prompts {
            return Err(ApiError::invalid(
                "prompt",
                format!(
                    "{} prompts with {} choices each are more than {}, the most choices of a call",
                    prompts.len(),
                    params.num_choices,
                    state.config.max_num_choices,
                ),
            ));
        }
        let add_special_tokens = fields.add_special_tokens.unwrap_or(true);
        let prompts = prompts
            .into_iter()
            .map(|prompt| match &suffix {
                None => Ok(prompt),
                Some(suffix) => suffix.put_behind(prompt),
            })
            .map(|prompt| tokenize_prompt(state, prompt?, echo, add_special_tokens, caller))
            .collect::<Result<_, _>>()?;
        let format = Self {
            echoed: logprobs.filter(|_| echo),
            prompt_logprobs: params.prompt_logprobs,
            tokens_as_ids: params.tokens_as_ids,
            returns_token_ids: params.returns_token_ids,
            returns_metrics: params.returns_metrics,
        };
        Ok(Call {
            prompts,
            params,
            model,
            format,
        })
    }

    fn encoder(
        self,
        state: &Arc<ServerState>,
        head: ResponseHead,
        num_choices: usize,
        stream_usage: StreamUsage,
    ) -> CompletionChunks {
        CompletionChunks {
            state: state.clone(),
            head,
            format: self,
            text_offsets: vec![0; num_choices],
            stream_usage,
        }
    }

    fn response(
        self,
        state: &ServerState,
        head: ResponseHead,
        choices: Vec<ChoiceDelta>,
        usage: Usage,
    ) -> Response {
        let choices: Vec<_> = choices
            .into_iter()
            .map(|choice| CompletionChoice::new(&state.text.tokenizer, self, choice, &mut 0))
            .collect();
        json_response(&head.object(OBJECT, &choices, Some(Some(&usage))))
    }
}

/// Checks and tokenises a prompt of the field `prompt`.
pub fn tokenize_prompt(
    state: &ServerState,
    prompt: Prompt,
    echo: bool,
    add_special_tokens: bool,
    caller: &Caller,
) -> Result<PromptTokens, ApiError> {
    match prompt {
        Prompt::Text(text) => {
            let tokens = state.encode("prompt", &text, add_special_tokens, caller)?;
            let echo = echo.then_some(text);
            Ok(PromptTokens {
                tokens,
                echo,
                reply: None,
            })
        }
        Prompt::Tokens(tokens) => {
            check_num_tokens("prompt", tokens.len(), &state.config)?;
            check_token_ids("prompt", &tokens, state.config.vocab_size)?;
            let echo = echo
                .then(|| state.text.tokenizer.decode(&tokens, true))
                .transpose()
                .map_err(|error| ApiError::invalid("prompt", error.to_string()))?;
            Ok(PromptTokens {
                tokens,
                echo,
                reply: None,
            })
        }
    }
}

#[derive(Serialize)]
struct CompletionChoice<'a> {
    index: usize,
    text: String,
    logprobs: Option<CompletionLogprobs>,
    finish_reason: Option<&'static str>,
    stop_reason: Option<StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<PromptLogprobs<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<Vec<TokenId>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<TokenId>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    metrics: Option<ChoiceMetrics>,
}

impl<'a> CompletionChoice<'a> {
    /// `text_offset` counts the characters of the choice up to this delta.
    fn new(
        tokenizer: &'a Tokenizer,
        format: Completion,
        delta: ChoiceDelta,
        text_offset: &mut usize,
    ) -> Self {
        let names = TokenNames {
            tokenizer,
            as_ids: format.tokens_as_ids,
        };
        let metrics = ChoiceMetrics::of(&delta).filter(|_| format.returns_metrics);
        let echoed = format.echoed.zip(delta.prompt.as_ref());
        let logprobs = (echoed.is_some() || !delta.logprobs.is_empty()).then(|| {
            let mut logprobs = CompletionLogprobs::default();
            if let Some((num_top, prompt)) = echoed {
                let num_top = num_top as usize;
                logprobs.push_prompt(names, prompt, num_top, &delta.text, text_offset);
            }
            logprobs.push_output(names, &delta.logprobs, text_offset);
            logprobs
        });
        let prompt_logprobs = format.prompt_logprobs.zip(delta.prompt);
        let prompt_logprobs = prompt_logprobs.map(|(num_top, prompt)| PromptLogprobs {
            tokenizer,
            prompt,
            num_top: num_top as usize,
        });
        let (finish_reason, stop_reason) = delta.finish.map_or((None, None), |finish| {
            (Some(finish.reason), finish.stop_reason)
        });
        Self {
            index: delta.index,
            text: delta.text,
            logprobs,
            finish_reason,
            stop_reason,
            prompt_logprobs,
            prompt_token_ids: delta.prompt_tokens.map(|tokens| tokens.to_vec()),
            token_ids: format.returns_token_ids.then_some(delta.tokens),
            metrics,
        }
    }
}

struct CompletionChunks {
    state: Arc<ServerState>,
    head: ResponseHead,
    format: Completion,
    text_offsets: Vec<usize>,
    stream_usage: StreamUsage,
}

impl ChunkEncoder for CompletionChunks {
    fn encode_delta(&mut self, delta: ChoiceDelta, events: &mut Events) {
        let text_offset = &mut self.text_offsets[delta.index];
        let tokenizer = &self.state.text.tokenizer;
        let usage = delta.usage.clone();
        let choice = CompletionChoice::new(tokenizer, self.format, delta, text_offset);
        let usage = self.stream_usage.of_choice(&usage);
        events.push(&self.head.object(OBJECT, &[choice], usage));
    }

    fn encode_end(&mut self, usage: &Usage, events: &mut Events) {
        if self.stream_usage != StreamUsage::Never {
            let no_choices: &[CompletionChoice] = &[];
            events.push(&self.head.object(OBJECT, no_choices, Some(Some(usage))));
        }
        events.push_done();
    }
}
