//! The path of a call through all generating endpoints, which implement a common trait.

use std::sync::Arc;

use axum::body::Body;
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderValue, StatusCode};
use axum::response::Response;
use corella_core::TokenId;
use corella_engine::Generate;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::api_error::ApiError;
use crate::auth::CallContext;
use crate::chat_completions::ChatFields;
use crate::generation::{ChoiceDelta, Generation, PromptTokens, Usage};
use crate::kv_transfer::KvTransferCall;
use crate::metrics::CallTimer;
use crate::request_body::RequestBody;
use crate::request_id::RequestName;
use crate::sampling_fields::{GenerationParams, SamplingFields, StreamUsage};
use crate::scored_prompt::PromptLogprobs;
use crate::server_state::{ServerState, unix_now_s};
use crate::sse::{ChunkEncoder, sse_response};
use crate::text_thread::Caller;
use crate::wire::field_check::FieldCheck;
use crate::wire::field_table;

/// One API call, validated and tokenised.
pub struct Call<F> {
    pub prompts: Vec<PromptTokens>,
    pub params: GenerationParams,
    /// The caller's name of the model.
    pub model: String,
    /// The endpoint's data for formatting its answer.
    pub format: F,
}

/// The common first fields of every response object.
#[derive(Clone, Debug)]
pub struct ResponseHead {
    pub id: String,
    pub created: u64,
    pub model: String,
    /// Present only in answers that another server continues.
    pub kv_transfer_params: Option<Value>,
}

/// A complete response, or one chunk of a stream.
#[derive(Serialize)]
pub struct ResponseObject<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: &'a [C],
    /// With `include_usage`, OpenAI sends `null` in every chunk of a stream but the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<&'a Usage>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kv_transfer_params: Option<&'a Value>,
    /// Present only in answers of `/v1/chat/completions`, as in vLLM: completions have them in each
    /// choice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<PromptLogprobs<'a>>,
    /// Present only in these, too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<&'a [TokenId]>,
}

impl ResponseHead {
    pub fn object<'a, C>(
        &'a self,
        object: &'static str,
        choices: &'a [C],
        usage: Option<Option<&'a Usage>>,
    ) -> ResponseObject<'a, C> {
        ResponseObject {
            id: &self.id,
            object,
            created: self.created,
            model: &self.model,
            choices,
            usage,
            kv_transfer_params: self.kv_transfer_params.as_ref(),
            prompt_logprobs: None,
            prompt_token_ids: None,
        }
    }
}

/// A request that holds a conversation, parsed and without unknown fields.
pub struct ConversationFields<F> {
    pub sampling: SamplingFields,
    /// The endpoint's own fields.
    pub fields: F,
    pub check: FieldCheck,
    /// The caller's name of the model.
    pub model: String,
}

impl<F: DeserializeOwned> ConversationFields<F> {
    pub fn parse(
        state: &ServerState,
        body: &RequestBody,
        endpoint: field_table::Endpoint,
    ) -> Result<Self, ApiError> {
        ChatFields::check_num_messages(body, state)?;
        let sampling: SamplingFields = body.parse()?;
        let fields = body.parse()?;
        let check = state.field_check(endpoint);
        body.check_fields(check)?;
        let model = check_model(state, sampling.model.as_deref())?;
        Ok(Self {
            sampling,
            fields,
            check,
            model,
        })
    }
}

/// An endpoint that generates text.
pub trait Endpoint: Sized + Send + 'static {
    type Encoder: ChunkEncoder;
    /// Prefix of the ids of answers.
    const ID_PREFIX: &'static str;
    /// The field that holds the prompt, named in errors.
    const PROMPT_FIELD: &'static str;

    /// Parses, checks and tokenises a request. Runs on a blocking thread.
    fn prepare(
        state: &ServerState,
        context: &CallContext,
        body: &RequestBody,
        caller: &Caller,
    ) -> Result<Call<Self>, ApiError>;

    fn encoder(
        self,
        state: &Arc<ServerState>,
        head: ResponseHead,
        num_choices: usize,
        stream_usage: StreamUsage,
    ) -> Self::Encoder;

    fn response(
        self,
        state: &ServerState,
        head: ResponseHead,
        choices: Vec<ChoiceDelta>,
        usage: Usage,
    ) -> Response;
}

pub async fn serve_call<E: Endpoint>(
    state: Arc<ServerState>,
    context: CallContext,
    body: Body,
) -> Result<Response, ApiError> {
    let CallContext { name, account, .. } = &context;
    let mut timer = CallTimer::new(state.metrics.clone(), &context);
    if state.is_draining() {
        return Err(ApiError::draining());
    }
    let body = RequestBody::read(body, &state).await?;
    if !state.config.has_head {
        return Err(ApiError::no_head(&state.config));
    }
    let for_text_thread = context.clone();
    let mut call = state
        .run_blocking(body.num_bytes(), move |state, caller| {
            E::prepare(state, &for_text_thread, &body, caller)
        })
        .await?;
    context.check_model(&state, &call.model)?;
    timer.handle_model(&call.model);
    if let Some(priority) = context.priority() {
        call.params.priority = priority;
    }
    let adapter = state.adapters.get(&call.model);
    if adapter.is_some() {
        timer.count_adapter(state.adapters.uses().begin(&call.model));
    }
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
    let num_choices = call.prompts.len() * call.params.num_choices as usize;
    let generator: &dyn Generate = match &transfer {
        // The field describes a single prompt.
        Some(transfer) if call.prompts.len() == 1 => &**transfer,
        _ => &*state.generator,
    };
    let (prompts, params) = (call.prompts, &call.params);
    let field = E::PROMPT_FIELD;
    let num_prompt_tokens = prompts.iter().map(|prompt| prompt.tokens.len()).sum();
    if let Some(account) = account {
        account.take_prompt(num_prompt_tokens, field)?;
    }
    let started = Generation::start(&state, generator, prompts, params, field, name, timer).await;
    if let (Err(_), Some(account)) = (&started, account) {
        account.give_back_prompt(num_prompt_tokens);
    }
    let mut generation = started?;
    if call.params.stream {
        let stream_usage = call.params.stream_usage;
        let encoder = { call.format }.encoder(&state, head, num_choices, stream_usage);
        return Ok(sse_response(generation, encoder));
    }
    let choices = generation.collect().await?;
    let usage = generation.usage();
    if let Some(transfer) = transfer.filter(|transfer| transfer.answers_with_params()) {
        head.kv_transfer_params = Some(transfer.params().unwrap_or(Value::Null));
    }
    Ok(call.format.response(&state, head, choices, usage))
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

/// Checks `model`, which may name the model or an adapter, or be absent.
pub fn check_model(state: &ServerState, model: Option<&str>) -> Result<String, ApiError> {
    let config = &state.config;
    match model {
        None => Ok(config.model_name().to_owned()),
        Some(model)
            if { config.served_model_names.iter().chain(&config.other_names) }
                .any(|name| name == model)
                || state.adapters.get(model).is_some() =>
        {
            Ok(model.to_owned())
        }
        Some(model) => Err(ApiError::model_not_found(model, config.model_name())),
    }
}

pub fn json_response(body: &impl Serialize) -> Response {
    match serde_json::to_vec(body) {
        Ok(json) => {
            let mut response = Response::new(Body::from(json));
            response
                .headers_mut()
                .insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
            response
        }
        Err(error) => {
            tracing::error!(%error, "a response could not be written as JSON");
            let mut response = Response::new(Body::empty());
            *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
            response
        }
    }
}
