//! `/v1/completions`: continues a prompt.

use axum::response::Response;
use corella_core::TokenId;
use corella_text::Tokenizer;
use serde::{Deserialize, Serialize};

use crate::call::generation::{ChoiceDelta, Generated, StopReason};
use crate::call::response_head::ResponseHead;
use crate::call::sse::{ChunkEncoder, Events};
use crate::endpoint::choice_metrics::ChoiceMetrics;
use crate::endpoint::generating_endpoint::{Call, CallRequest, Endpoint, StreamStart};
use crate::text::prompt::PromptField;
use crate::text::prompt_tokens::{check_num_choices, tokenize_prompt};
use crate::text::sampling_fields::{EndpointFields, SamplingFields, StreamUsage, check_logprobs};
use crate::text::scored_prompt::PromptLogprobs;
use crate::text::served_model::ServedModel;
use crate::text::suffix::Suffix;
use crate::text::token_logprob::{CompletionLogprobs, TokenNames};
use crate::wire::api_error::{ApiError, required};
use crate::wire::field_table;
use crate::wire::json_response::json_response;
use crate::wire::usage::Usage;

/// The `object` of a response and of its chunks, which have the same form.
const OBJECT: &str = "text_completion";
/// The default of `max_tokens` with OpenAI and vLLM.
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

/// The request's settings for its answer.
#[derive(Clone, Copy)]
pub struct Completion {
    /// The number of alternatives to each token among the `logprobs` of an echoed prompt.
    echoed: Option<u32>,
    /// The number of alternatives to each token in `prompt_logprobs`.
    prompt_logprobs: Option<u32>,
    /// Whether log-probabilities name tokens by their ids.
    tokens_as_ids: bool,
    /// Whether token ids are part of the answer.
    returns_token_ids: bool,
    /// Whether times are part of the answer.
    returns_metrics: bool,
}

impl Endpoint for Completion {
    type Encoder = CompletionChunks;
    const ID_PREFIX: &'static str = "cmpl-";
    const PROMPT_FIELD: &'static str = "prompt";

    fn prepare(request: CallRequest<'_>) -> Result<Call<Self>, ApiError> {
        let (served, body, caller) = (request.served, request.body, request.caller);
        let sampling: SamplingFields = body.parse()?;
        let fields: CompletionFields = body.parse()?;
        body.check_fields(served.field_check(field_table::Endpoint::Completions))?;
        let model = served.check_name(sampling.model.as_deref())?;
        let logprobs = fields
            .logprobs
            .map(|num_logprobs| check_logprobs("logprobs", num_logprobs, &served.config))
            .transpose()?;
        let echo = fields.echo.unwrap_or(false);
        let suffix = Suffix::checked(served, fields.suffix, echo)?;
        let own = EndpointFields {
            default_max_tokens: Some(DEFAULT_MAX_TOKENS),
            logprobs,
            best_of: fields.best_of,
            echo,
            more_end_token_ids: suffix
                .as_ref()
                .map_or_else(Vec::new, |suffix| suffix.end_token_ids(served)),
        };
        let mut params = sampling.validate(served, caller, own)?;
        params.set_text_constraint(served, caller)?;
        let PromptField(prompts) = required("prompt", fields.prompt)?;
        check_num_choices(served, prompts.len(), params.num_choices)?;
        params.check_num_resumed(prompts.len())?;
        let add_special_tokens = fields.add_special_tokens.unwrap_or(true);
        let prompts = prompts
            .into_iter()
            .map(|prompt| match &suffix {
                None => Ok(prompt),
                Some(suffix) => suffix.put_behind(prompt),
            })
            .map(|prompt| tokenize_prompt(served, prompt?, echo, add_special_tokens, caller))
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

    fn encoder(self, stream: StreamStart) -> CompletionChunks {
        CompletionChunks {
            format: self,
            text_offsets: vec![0; stream.num_choices],
            stream,
        }
    }

    fn response(self, served: &ServedModel, head: ResponseHead, answer: Generated) -> Response {
        let choices: Vec<_> = answer
            .choices
            .into_iter()
            .map(|choice| CompletionChoice::new(&served.tokenizer, self, choice, &mut 0))
            .collect();
        let mut object = head.object(OBJECT, &choices, Some(Some(&answer.usage)));
        object.prefix_cache = answer.usage.prefix_cache.as_deref();
        json_response(&object)
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
        let prompt_logprobs = PromptLogprobs::of(tokenizer, delta.prompt, format.prompt_logprobs);
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

pub struct CompletionChunks {
    stream: StreamStart,
    format: Completion,
    text_offsets: Vec<usize>,
}

impl ChunkEncoder for CompletionChunks {
    fn encode_delta(&mut self, delta: ChoiceDelta, events: &mut Events) {
        let text_offset = &mut self.text_offsets[delta.index];
        let tokenizer = &self.stream.served.tokenizer;
        let usage = delta.usage.clone();
        let choice = CompletionChoice::new(tokenizer, self.format, delta, text_offset);
        let choices = [choice];
        let of_choice = self.stream.usage.of_choice(&usage);
        let mut chunk = self.stream.head.object(OBJECT, &choices, of_choice);
        chunk.prefix_cache = usage.prefix_cache.as_deref();
        events.push(&chunk);
    }

    fn encode_end(&mut self, usage: &Usage, events: &mut Events) {
        if self.stream.usage != StreamUsage::Never {
            let no_choices: &[CompletionChoice] = &[];
            let head = &self.stream.head;
            events.push(&head.object(OBJECT, no_choices, Some(Some(usage))));
        }
        events.push_done();
    }
}
