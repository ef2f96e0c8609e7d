//! `/inference/v1/generate`: continues token ids with token ids, by vLLM's API. Routers call it that tokenise themselves.

use axum::response::Response;
use corella_core::TokenId;
use corella_text::Tokenizer;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::call::generation::{ChoiceDelta, Generated};
use crate::call::response_head::ResponseHead;
use crate::call::sse::{ChunkEncoder, Events};
use crate::endpoint::generating_endpoint::{Call, CallRequest, Endpoint, StreamStart};
use crate::text::prompt_tokens::{PromptTokens, check_num_tokens, check_token_ids};
use crate::text::sampling_fields::{
    EndpointFields, SamplingFields, StreamOptions, StreamUsage, check_logprobs,
};
use crate::text::scored_prompt::PromptLogprobs;
use crate::text::served_model::ServedModel;
use crate::text::token_logprob::{ChatLogprobs, TokenNames};
use crate::wire::api_error::{ApiError, required};
use crate::wire::field_check::FieldCheck;
use crate::wire::field_table;
use crate::wire::field_table::token_generate::SAMPLING_PARAMS;
use crate::wire::json_response::json_response;
use crate::wire::request_body::RequestBody;
use crate::wire::usage::Usage;

const PARAMS: &str = "sampling_params";
const KV_TRANSFER: &str = "kv_transfer_params";

/// The fields that are members of the body itself.
#[derive(Deserialize)]
#[serde(expecting = "a JSON object")]
struct TokenFields {
    token_ids: Option<Vec<TokenId>>,
    sampling_params: Option<SamplingFields>,
    model: Option<String>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    cache_salt: Option<String>,
    priority: Option<i32>,
    kv_transfer_params: Option<Map<String, Value>>,
    resume_token_ids: Option<Vec<TokenId>>,
}

/// Members of `sampling_params` that other endpoints lack, or have elsewhere.
#[derive(Default, Deserialize)]
#[serde(expecting = "a JSON object")]
struct OwnParams {
    logprobs: Option<u32>,
    extra_args: Option<Map<String, Value>>,
}

#[derive(Deserialize)]
#[serde(expecting = "a JSON object")]
struct ParamsOnly<T> {
    sampling_params: Option<T>,
}

/// The request's settings for its answer.
#[derive(Clone, Copy)]
pub struct TokenGenerate {
    /// The number of alternatives in `prompt_logprobs`.
    prompt_logprobs: Option<u32>,
}

impl Endpoint for TokenGenerate {
    type Encoder = TokenChunks;
    const ID_PREFIX: &'static str = "generate-tokens-";
    const PROMPT_FIELD: &'static str = "token_ids";

    fn prepare(request: CallRequest<'_>) -> Result<Call<Self>, ApiError> {
        let (served, body, caller) = (request.served, request.body, request.caller);
        let fields: TokenFields = body.parse()?;
        let check = served.field_check(field_table::Endpoint::TokenGenerate);
        body.check_fields(check)?;
        let own = own_params(body, check)?;
        let model = served.check_name(fields.model.as_deref())?;
        let sampling = SamplingFields {
            model: fields.model,
            stream: fields.stream,
            stream_options: fields.stream_options,
            cache_salt: fields.cache_salt,
            priority: fields.priority,
            resume_token_ids: fields.resume_token_ids,
            kv_transfer_params: transfer(fields.kv_transfer_params, own.extra_args, check)?,
            ..fields.sampling_params.unwrap_or_default()
        };
        let logprobs = own
            .logprobs
            .map(|num_logprobs| check_logprobs("logprobs", num_logprobs, &served.config))
            .transpose()
            .map_err(within_params)?;
        let own = EndpointFields {
            logprobs,
            ..EndpointFields::default()
        };
        let mut params = sampling
            .validate(served, caller, own)
            .map_err(within_params)?;
        params
            .set_text_constraint(served, caller)
            .map_err(within_params)?;
        params.returns_token_ids = true;
        params.each_token = true;
        let tokens = required("token_ids", fields.token_ids)?;
        check_num_tokens("token_ids", tokens.len(), &served.config)?;
        check_token_ids("token_ids", &tokens, served.config.vocab_size)?;
        let format = Self {
            prompt_logprobs: params.prompt_logprobs,
        };
        Ok(Call {
            prompts: vec![PromptTokens {
                tokens,
                echo: None,
                reply: None,
                retentions: Vec::new(),
            }],
            params,
            model,
            format,
        })
    }

    fn encoder(self, stream: StreamStart) -> TokenChunks {
        TokenChunks { stream }
    }

    fn response(self, served: &ServedModel, head: ResponseHead, answer: Generated) -> Response {
        let Generated { mut choices, usage } = answer;
        // All choices have the same prompt.
        let prompt = choices.first_mut().and_then(|choice| choice.prompt.take());
        let prompt_logprobs = PromptLogprobs::of(&served.tokenizer, prompt, self.prompt_logprobs);
        let choices: Vec<_> = choices
            .into_iter()
            .map(|choice| TokenChoice::new(&served.tokenizer, choice))
            .collect();
        json_response(&TokenAnswer {
            id: &head.id,
            request_id: &head.id,
            created: head.created,
            model: &head.model,
            choices: &choices,
            usage: &usage,
            prompt_logprobs,
            kv_transfer_params: head.kv_transfer_params.as_ref(),
            ec_transfer_params: None,
        })
    }
}

/// Checks the names of the members of `sampling_params`, and reads those that `SamplingFields` lacks.
fn own_params(body: &RequestBody, check: FieldCheck) -> Result<OwnParams, ApiError> {
    let members: ParamsOnly<Map<String, Value>> = body.parse()?;
    if let Some(members) = members.sampling_params {
        check.check(&SAMPLING_PARAMS, PARAMS, &members)?;
    }
    let own: ParamsOnly<OwnParams> = body.parse()?;
    Ok(own.sampling_params.unwrap_or_default())
}

/// Returns the request's `kv_transfer_params`. llm-d sends them in `sampling_params.extra_args`, because vLLM ignores
/// them in the body.
fn transfer(
    of_body: Option<Map<String, Value>>,
    extra_args: Option<Map<String, Value>>,
    check: FieldCheck,
) -> Result<Option<Map<String, Value>>, ApiError> {
    let path = |name: &str| format!("{PARAMS}.extra_args.{name}");
    let mut of_extra = None;
    for (name, value) in extra_args.unwrap_or_default() {
        match (name.as_str(), value) {
            (_, Value::Null) => {}
            (KV_TRANSFER, Value::Object(members)) if members.is_empty() => {}
            (KV_TRANSFER, Value::Object(members)) if check.takes_kv_transfer => {
                of_extra = Some(members);
            }
            (KV_TRANSFER, value) if check.takes_kv_transfer || !value.is_object() => {
                return Err(ApiError::invalid(path(&name), "must be an object"));
            }
            _ => return Err(ApiError::unsupported(path(&name), "leave it out")),
        }
    }
    match (of_body, of_extra) {
        (Some(one), Some(other)) if one != other => {
            let message = format!("differs from {KV_TRANSFER} of the body");
            Err(ApiError::invalid(path(KV_TRANSFER), message))
        }
        (one, other) => Ok(one.or(other)),
    }
}

/// Names the place of a member of `sampling_params`.
fn within_params(error: ApiError) -> ApiError {
    let param = error.param().unwrap_or_default();
    let member = param.split(['.', '[']).next().unwrap_or_default();
    if member.is_empty() || !SAMPLING_PARAMS.reads(member) {
        return error;
    }
    let (from, to) = (member.to_owned(), format!("{PARAMS}.{member}"));
    error.renamed(&from, &to)
}

#[derive(Serialize)]
struct TokenAnswer<'a> {
    id: &'a str,
    request_id: &'a str,
    created: u64,
    model: &'a str,
    choices: &'a [TokenChoice],
    usage: &'a Usage,
    prompt_logprobs: Option<PromptLogprobs<'a>>,
    kv_transfer_params: Option<&'a Value>,
    /// Always `null`: models read text only. Clients of vLLM read the member.
    ec_transfer_params: Option<()>,
}

#[derive(Serialize)]
struct TokenChoice {
    index: usize,
    /// Also has the end token.
    token_ids: Vec<TokenId>,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<&'static str>,
    /// Always `null`. Clients of vLLM read the member.
    routed_experts: Option<()>,
}

impl TokenChoice {
    fn new(tokenizer: &Tokenizer, choice: ChoiceDelta) -> Self {
        let names = TokenNames {
            tokenizer,
            as_ids: true,
        };
        let logprobs = &choice.logprobs;
        Self {
            index: choice.index,
            logprobs: (!logprobs.is_empty()).then(|| ChatLogprobs::new(names, logprobs)),
            token_ids: choice.tokens,
            finish_reason: choice.finish.map(|finish| finish.reason),
            routed_experts: None,
        }
    }
}

/// Encodes a chunk for each token.
pub struct TokenChunks {
    stream: StreamStart,
}

#[derive(Serialize)]
struct TokenChunk<'a> {
    request_id: &'a str,
    choices: &'a [TokenChoice],
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<&'a Usage>>,
}

impl ChunkEncoder for TokenChunks {
    fn encode_delta(&mut self, delta: ChoiceDelta, events: &mut Events) {
        let usage = delta.usage.clone();
        let choice = TokenChoice::new(&self.stream.served.tokenizer, delta);
        if choice.token_ids.is_empty() && choice.finish_reason.is_none() {
            return;
        }
        events.push(&TokenChunk {
            request_id: &self.stream.head.id,
            choices: &[choice],
            usage: self.stream.usage.of_choice(&usage),
        });
    }

    fn encode_end(&mut self, usage: &Usage, events: &mut Events) {
        if self.stream.usage != StreamUsage::Never {
            events.push(&TokenChunk {
                request_id: &self.stream.head.id,
                choices: &[],
                usage: Some(Some(usage)),
            });
        }
        events.push_done();
    }
}
