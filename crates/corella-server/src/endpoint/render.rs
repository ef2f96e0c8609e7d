//! `/v1/chat/completions/render` and `/v1/completions/render`: the bodies of `/inference/v1/generate` that ask for the
//! answers to a request. Routers call them that have no tokenizer, and choose a server by the tokens.

use axum::response::Response;
use corella_core::TokenId;
use corella_text::GrammarSource;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::call::call_context::CallContext;
use crate::endpoint::chat_completions::Chat;
use crate::endpoint::completions::Completion;
use crate::endpoint::generating_endpoint::{Call, CallRequest, Endpoint};
use crate::model_set::model_use::UsedModel;
use crate::text::prompt_tokens::PromptTokens;
use crate::text::sampling_fields::GenerationParams;
use crate::text::served_model::ServedModel;
use crate::text::text_thread::Caller;
use crate::wire::api_error::ApiError;
use crate::wire::json_response::json_response;
use crate::wire::request_body::SentBody;

/// Fields that are rendered as they were sent. The endpoint has checked them.
#[derive(Deserialize)]
struct SentFields {
    stream_options: Option<Value>,
    cache_salt: Option<Value>,
    seed: Option<Value>,
    ignore_eos: Option<bool>,
    logit_bias: Option<Value>,
    allowed_token_ids: Option<Value>,
    bad_words: Option<Value>,
    echo: Option<bool>,
}

#[derive(Serialize)]
struct RenderedPrompt {
    request_id: String,
    model: String,
    token_ids: Vec<TokenId>,
    /// Always `null`: models read text only.
    features: Option<()>,
    sampling_params: Value,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    resume_token_ids: Vec<TokenId>,
    stream: bool,
    stream_options: Option<Value>,
    cache_salt: Option<Value>,
    priority: i32,
    kv_transfer_params: Option<()>,
}

pub async fn render_chat(
    UsedModel(state): UsedModel,
    context: CallContext,
    body: SentBody,
) -> Result<Response, ApiError> {
    let mut rendered = render::<Chat>(UsedModel(state), context, body).await?;
    // A conversation is one prompt.
    Ok(json_response(&rendered.remove(0)))
}

pub async fn render_completion(
    UsedModel(state): UsedModel,
    context: CallContext,
    body: SentBody,
) -> Result<Response, ApiError> {
    let rendered = render::<Completion>(UsedModel(state), context, body).await?;
    Ok(json_response(&rendered))
}

async fn render<E: Endpoint>(
    UsedModel(state): UsedModel,
    context: CallContext,
    body: SentBody,
) -> Result<Vec<RenderedPrompt>, ApiError> {
    let body = state.parts.bodies.read(body).await?;
    let num_bytes = body.num_bytes();
    if !state.config.has_head {
        return Err(ApiError::no_head(&state.config));
    }
    let (responses, config) = (state.parts.responses.clone(), state.config.clone());
    let render = move |served: &ServedModel, caller: &Caller| {
        let call = E::prepare(CallRequest {
            responses: &responses,
            served,
            context: &context,
            body: &body,
            caller,
        })?;
        context.check_model(&config, &call.model)?;
        let sent: SentFields = body.parse()?;
        let id = format!("{}{}", E::ID_PREFIX, context.name);
        rendered(served, call, &sent, &id)
    };
    state.run_blocking(num_bytes, render).await
}

fn rendered<F>(
    served: &ServedModel,
    call: Call<F>,
    sent: &SentFields,
    id: &str,
) -> Result<Vec<RenderedPrompt>, ApiError> {
    let Call {
        prompts,
        params,
        model,
        ..
    } = call;
    if params.num_choices > params.num_best {
        return Err(ApiError::invalid("best_of", "cannot be rendered"));
    }
    if sent.echo == Some(true) {
        return Err(ApiError::invalid("echo", "cannot be rendered"));
    }
    let format = structured_outputs(&prompts, &params)?;
    let has_one = prompts.len() == 1;
    let prompts = prompts.into_iter().enumerate().map(|(at, prompt)| {
        let num_left = (served.config.max_model_len as usize).saturating_sub(prompt.tokens.len());
        RenderedPrompt {
            request_id: match has_one {
                true => id.to_owned(),
                false => format!("{id}-{at}"),
            },
            model: model.clone(),
            sampling_params: sampling_params(served, &params, sent, num_left as u32, &format),
            token_ids: prompt.tokens,
            features: None,
            resume_token_ids: params.drawn.clone(),
            stream: params.stream,
            stream_options: sent.stream_options.clone(),
            cache_salt: sent.cache_salt.clone(),
            priority: params.priority,
            kv_transfer_params: None,
        }
    });
    Ok(prompts.collect())
}

/// The parameters under vLLM's names, with the model's defaults filled in. `num_left` tokens fit behind the prompt.
fn sampling_params(
    served: &ServedModel,
    params: &GenerationParams,
    sent: &SentFields,
    num_left: u32,
    format: &Value,
) -> Value {
    let (sampling, stopping) = (&params.sampling, &params.stopping);
    let is_own = |token: &&TokenId| !served.config.end_token_ids.contains(*token);
    // A text between two others has end tokens of its own.
    let own_ends = stopping.end_token_ids.iter().filter(is_own);
    let stop_token_ids: Vec<_> = stopping.stop_token_ids.iter().chain(own_ends).collect();
    json!({
        "n": params.num_choices,
        "temperature": shortest(sampling.temperature),
        "top_p": shortest(sampling.top_p),
        "top_k": sampling.top_k,
        "min_p": shortest(sampling.min_p),
        "presence_penalty": shortest(sampling.presence_penalty),
        "frequency_penalty": shortest(sampling.frequency_penalty),
        "repetition_penalty": shortest(sampling.repetition_penalty),
        "seed": sent.seed,
        "stop": params.stop,
        "stop_token_ids": stop_token_ids,
        "include_stop_str_in_output": params.include_stop,
        "ignore_eos": sent.ignore_eos.unwrap_or(false),
        "max_tokens": stopping.max_tokens.unwrap_or(num_left),
        "min_tokens": stopping.min_tokens,
        "skip_special_tokens": params.skip_special_tokens,
        "logprobs": sampling.logprobs.filter(|_| params.wants_logprobs),
        "prompt_logprobs": params.prompt_logprobs,
        "logit_bias": sent.logit_bias,
        "allowed_token_ids": sent.allowed_token_ids,
        "bad_words": sent.bad_words,
        "structured_outputs": format,
        "extra_args": null,
    })
}

/// The number with the fewest digits, which `f64` would not have.
fn shortest(number: f32) -> Value {
    let digits = number.to_string();
    digits.parse::<f64>().map_or(Value::Null, Value::from)
}

/// Returns the format of every answer's text. Refuses demands on a reply that has other parts, whose markup only a
/// conversation's endpoint knows.
fn structured_outputs(
    prompts: &[PromptTokens],
    params: &GenerationParams,
) -> Result<Value, ApiError> {
    if params.constraint.is_none() {
        return Ok(Value::Null);
    }
    let is_text_alone = |prompt: &PromptTokens| {
        let reply = prompt.reply.as_ref();
        reply.is_none_or(|reply| reply.tools.is_none() && reply.format.reasoning.is_none())
    };
    let inexpressible = |field: &str| {
        let message = "cannot be rendered for a reply that may have calls or reasoning; send the \
                       conversation to /v1/chat/completions";
        Err(ApiError::invalid(field, message))
    };
    let Some(format) = &params.output_format else {
        return inexpressible("tool_choice");
    };
    if !prompts.iter().all(is_text_alone) {
        return inexpressible(&format.field);
    }
    match &format.source {
        GrammarSource::JsonObject => Ok(json!({"json_object": true})),
        GrammarSource::JsonSchema(schema) => Ok(json!({"json": schema})),
        GrammarSource::Regex(regex) => Ok(json!({"regex": regex})),
        GrammarSource::Choice(texts) => Ok(json!({"choice": texts})),
        GrammarSource::Lark(grammar) | GrammarSource::Gbnf(grammar) => {
            Ok(json!({"grammar": grammar}))
        }
        GrammarSource::Composed(_) => inexpressible(&format.field),
    }
}
