//! The trait of all generating endpoints, and the path of a call, which is the same for all of them.

use std::sync::Arc;

use axum::response::Response;
use corella_engine::{Generate, Submission, SubmitError, TokenStream};
use serde_json::{Map, Value};

use crate::call::cached_prompt::check_cached;
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

/// What distinguishes an endpoint's calls when they begin.
#[derive(Clone, Copy)]
pub struct CallForm {
    /// Prefix of the ids of answers.
    pub id_prefix: &'static str,
    /// The field that holds the prompt, named in errors.
    pub prompt_field: &'static str,
    /// Whether a stream can end with `kv_transfer_params`.
    pub streams_transfer_params: bool,
}

/// A call whose choices the engine has accepted.
pub struct BegunCall<F> {
    pub generation: Generation,
    pub format: F,
    pub head: ResponseHead,
    /// The number of choices of all prompts.
    pub num_choices: usize,
    pub stream: bool,
    pub stream_usage: StreamUsage,
    /// Present if the call's `kv_transfer_params` ask for something.
    pub transfer: Option<Box<dyn KvTransferCall>>,
}

/// The handler of an endpoint.
pub async fn serve_call<E: Endpoint>(
    UsedModel(state): UsedModel,
    context: CallContext,
    body: SentBody,
) -> Result<Response, ApiError> {
    let timer = CallTimer::new(state.metrics.clone(), &context);
    if state.parts.is_draining() {
        return Err(ApiError::draining());
    }
    let call = prepare::<E>(&state, &context, body).await?;
    let form = CallForm {
        id_prefix: E::ID_PREFIX,
        prompt_field: E::PROMPT_FIELD,
        streams_transfer_params: false,
    };
    let mut begun = begin_call(&state, &context, call, form, timer).await?;
    if begun.stream {
        let stream = StreamStart {
            served: state.served.clone(),
            head: begun.head,
            num_choices: begun.num_choices,
            usage: begun.stream_usage,
        };
        return Ok(sse_response(begun.generation, begun.format.encoder(stream)));
    }
    let answer = begun.generation.collect().await?;
    if let Some(params) = answered_params(begun.transfer.as_deref()) {
        begun.head.kv_transfer_params = Some(params);
    }
    Ok(begun.format.response(&state.served, begun.head, answer))
}

/// Checks whether the caller may make a prepared call, and submits its prompts. Returns when the engine has accepted
/// every choice.
// Long: the checks have one order. The key's limit comes after the others, so that it counts no refused call.
pub async fn begin_call<F>(
    state: &ServerState,
    context: &CallContext,
    mut call: Call<F>,
    form: CallForm,
    mut timer: CallTimer,
) -> Result<BegunCall<F>, ApiError> {
    let CallContext { name, account, .. } = context;
    context.check_model(&state.config, &call.model)?;
    timer.handle_model(&call.model);
    if let Some(priority) = context.priority() {
        call.params.priority = priority;
    }
    context.complete(&mut call.params.objectives);
    let adapter = state.served.adapters.get(&call.model);
    if adapter.is_some() {
        timer.count_adapter(state.served.adapters.uses().begin(&call.model));
    }
    call.params.explains_cache = context.explains_cache || state.parts.config.explains_cache;
    call.params.adapter = adapter.map(|adapter| adapter.loaded);
    if context.prefers_cached {
        for prompt in &call.prompts {
            check_cached(&state.engine, &prompt.tokens, &call.params).await?;
        }
    }
    let refuses_params = call.params.stream && !form.streams_transfer_params;
    let transfer = match &call.params.kv_transfer_params {
        Some(params) => begin_transfer(state, params, name, refuses_params)?,
        None => None,
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
    let field = form.prompt_field;
    let num_prompt_tokens: usize = prompts.iter().map(|prompt| prompt.tokens.len()).sum();
    // The tokens of an answer that has begun are computed like a prompt.
    let num_prompt_tokens = num_prompt_tokens + params.drawn.len();
    if let Some(account) = account {
        account.take_prompt(num_prompt_tokens, field)?;
    }
    let started =
        Generation::start(&state.calls, generator, prompts, params, field, name, timer).await;
    if let (Err(_), Some(account)) = (&started, account) {
        account.give_back_prompt(num_prompt_tokens);
    }
    let generation = started?;
    if context.is_only_check {
        return Err(ApiError::only_checked());
    }
    Ok(BegunCall {
        generation,
        format: call.format,
        head: ResponseHead {
            id: format!("{}{name}", form.id_prefix),
            created: unix_now_s(),
            model: call.model,
            kv_transfer_params: None,
        },
        num_choices: num_prompts * params.num_choices as usize,
        stream: params.stream,
        stream_usage: params.stream_usage,
        transfer,
    })
}

/// Returns the `kv_transfer_params` of an answer whose tokens are all there.
pub fn answered_params(transfer: Option<&dyn KvTransferCall>) -> Option<Value> {
    let transfer = transfer.filter(|transfer| transfer.answers_with_params())?;
    Some(transfer.params().unwrap_or(Value::Null))
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
    refuses_params: bool,
) -> Result<Option<Box<dyn KvTransferCall>>, ApiError> {
    let Some(kv_transfer) = &state.kv_transfer else {
        return Ok(None);
    };
    let transfer = kv_transfer.begin(params, name.as_str());
    let transfer = transfer.map_err(|error| {
        ApiError::invalid(format!("kv_transfer_params.{}", error.field), error.message)
    })?;
    if refuses_params
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
