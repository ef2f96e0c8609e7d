//! The trait of all generating endpoints, and the path of a call, which is the same for all of them.

use std::sync::Arc;

use axum::response::Response;
use corella_engine::{Generate, Submission, SubmitError, TokenStream};
use serde_json::{Map, Value};

use crate::call::call_context::CallContext;
use crate::call::generation::{Generated, Generation};
use crate::call::kv_transfer::KvTransferCall;
use crate::call::metrics::CallTimer;
use crate::call::request_id::RequestName;
use crate::call::response_head::ResponseHead;
use crate::call::sse::{ChunkEncoder, sse_response};
use crate::clock::unix_now_s;
use crate::model_set::model_use::UsedModel;
use crate::state::server_state::ServerState;
use crate::store::response_store::ResponseStore;
use crate::text::prompt_tokens::PromptTokens;
use crate::text::sampling_fields::{GenerationParams, StreamUsage};
use crate::text::served_model::ServedModel;
use crate::text::text_thread::Caller;
use crate::wire::api_error::ApiError;
use crate::wire::request_body::{RequestBody, SentBody};

/// One API call, validated and tokenised.
pub struct Call<F> {
    pub prompts: Vec<PromptTokens>,
    pub params: GenerationParams,
    /// The caller's name of the model.
    pub model: String,
    /// The endpoint's data for formatting its answer.
    pub format: F,
}

/// A request as a text thread prepares it.
pub struct CallRequest<'a> {
    pub responses: &'a Arc<ResponseStore>,
    pub served: &'a ServedModel,
    pub context: &'a CallContext,
    pub body: &'a RequestBody,
    pub caller: &'a Caller,
}

/// What an encoder gets at the beginning of a stream.
pub struct StreamStart {
    pub served: Arc<ServedModel>,
    pub head: ResponseHead,
    pub num_choices: usize,
    pub usage: StreamUsage,
}

/// An endpoint that generates text.
pub trait Endpoint: Sized + Send + 'static {
    type Encoder: ChunkEncoder;
    /// Prefix of the ids of answers.
    const ID_PREFIX: &'static str;
    /// The field that holds the prompt, named in errors.
    const PROMPT_FIELD: &'static str;

    /// Parses, checks and tokenises a request.
    fn prepare(request: CallRequest<'_>) -> Result<Call<Self>, ApiError>;

    fn encoder(self, stream: StreamStart) -> Self::Encoder;

    fn response(self, served: &ServedModel, head: ResponseHead, answer: Generated) -> Response;
}

/// The handler of an endpoint.
pub async fn serve_call<E: Endpoint>(
    UsedModel(state): UsedModel,
    context: CallContext,
    body: SentBody,
) -> Result<Response, ApiError> {
    let CallContext { name, account, .. } = &context;
    let mut timer = CallTimer::new(state.metrics.clone(), &context);
    if state.parts.is_draining() {
        return Err(ApiError::draining());
    }
    let mut call = prepare::<E>(&state, &context, body).await?;
    context.check_model(&state.config, &call.model)?;
    timer.handle_model(&call.model);
    if let Some(priority) = context.priority() {
        call.params.priority = priority;
    }
    let adapter = state.served.adapters.get(&call.model);
    if adapter.is_some() {
        timer.count_adapter(state.served.adapters.uses().begin(&call.model));
    }
    call.params.explains_cache = context.explains_cache || state.parts.config.explains_cache;
    call.params.adapter = adapter.map(|adapter| adapter.loaded);
    let transfer = match &call.params.kv_transfer_params {
        Some(params) => begin_transfer(&state, params, name, call.params.stream)?,
        None => None,
    };
    let mut head = ResponseHead {
        id: format!("{}{name}", E::ID_PREFIX),
        created: unix_now_s(),
        model: call.model,
        kv_transfer_params: None,
    };
    let num_prompts = call.prompts.len();
    let checker = Checker(&*state.calls.generator);
    let generator: &dyn Generate = match &transfer {
        // `kv_transfer_params` describe a single prompt.
        Some(transfer) if num_prompts == 1 => &**transfer,
        _ if context.is_only_check => &checker,
        _ => &*state.calls.generator,
    };
    let (prompts, params) = (call.prompts, &call.params);
    let field = E::PROMPT_FIELD;
    let num_prompt_tokens = prompts.iter().map(|prompt| prompt.tokens.len()).sum();
    if let Some(account) = account {
        account.take_prompt(num_prompt_tokens, field)?;
    }
    let started =
        Generation::start(&state.calls, generator, prompts, params, field, name, timer).await;
    if let (Err(_), Some(account)) = (&started, account) {
        account.give_back_prompt(num_prompt_tokens);
    }
    let mut generation = started?;
    if context.is_only_check {
        return Err(ApiError::only_checked());
    }
    if call.params.stream {
        let stream = StreamStart {
            served: state.served.clone(),
            head,
            num_choices: num_prompts * params.num_choices as usize,
            usage: params.stream_usage,
        };
        return Ok(sse_response(generation, call.format.encoder(stream)));
    }
    let answer = generation.collect().await?;
    if let Some(transfer) = transfer.filter(|transfer| transfer.answers_with_params()) {
        head.kv_transfer_params = Some(transfer.params().unwrap_or(Value::Null));
    }
    Ok(call.format.response(&state.served, head, answer))
}

/// Reads a body, and has a text thread prepare its call.
async fn prepare<E: Endpoint>(
    state: &ServerState,
    context: &CallContext,
    body: SentBody,
) -> Result<Call<E>, ApiError> {
    let body = state.parts.bodies.read(body).await?;
    let num_bytes = body.num_bytes();
    if !state.config.has_head {
        return Err(ApiError::no_head(&state.config));
    }
    let (responses, for_text_thread) = (state.parts.responses.clone(), context.clone());
    let default_seed = state.calls.default_seed(context.number);
    let prepare = move |served: &ServedModel, caller: &Caller| {
        E::prepare(CallRequest {
            responses: &responses,
            served,
            context: &for_text_thread,
            body: &body,
            caller: &caller.with_default_seed(default_seed),
        })
    };
    state.run_blocking(num_bytes, prepare).await
}

/// Checks submissions, and generates nothing.
struct Checker<'a>(&'a dyn Generate);

impl Generate for Checker<'_> {
    fn submit(&self, submission: Submission) -> Result<Vec<TokenStream>, SubmitError> {
        self.0.check(submission).map(|()| Vec::new())
    }
}

fn begin_transfer(
    state: &ServerState,
    params: &Map<String, Value>,
    name: &RequestName,
    stream: bool,
) -> Result<Option<Box<dyn KvTransferCall>>, ApiError> {
    let Some(kv_transfer) = &state.kv_transfer else {
        return Ok(None);
    };
    let transfer = kv_transfer.begin(params, name.as_str());
    let transfer = transfer.map_err(|error| {
        ApiError::invalid(format!("kv_transfer_params.{}", error.field), error.message)
    })?;
    if stream
        && transfer
            .as_ref()
            .is_some_and(|transfer| transfer.answers_with_params())
    {
        return Err(ApiError::invalid(
            "stream",
            "must be false with kv_transfer_params.do_remote_decode",
        ));
    }
    Ok(transfer)
}
