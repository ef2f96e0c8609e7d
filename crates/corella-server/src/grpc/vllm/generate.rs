//! `vllm.Inference`: text, or tokens, whole or streamed.

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;

use super::generate_answer::{AnswerForm, AnswerStream};
use super::generate_request::{call_of, in_place};
use super::inference_message::{GenerateRequest, GenerateResponse};
use crate::call::call_context::CallContext;
use crate::call::metrics::CallTimer;
use crate::call::request_id::RequestName;
use crate::call::sse::stream_body;
use crate::endpoint::generating_endpoint::{BegunCall, CallForm, begin_call};
use crate::model_set::driver::ModelSet;
use crate::text::served_model::ServedModel;
use crate::text::text_thread::Caller;
use crate::wire::api_error::ApiError;
use crate::wire::grpc_message::{grpc_response, message_response, read_crowd};
use crate::wire::request_body::SentBody;

pub const GENERATE: &str = "/vllm.Inference/Generate";
pub const GENERATE_STREAM: &str = "/vllm.Inference/GenerateStream";

/// The numbers of the fields `text` and `token_ids`.
const PROMPT: [u64; 2] = [3, 4];
const FORM: CallForm = CallForm {
    id_prefix: "",
    prompt_field: "prompt",
    streams_transfer_params: true,
};

pub async fn generate(
    State(models): State<ModelSet>,
    context: CallContext,
    headers: HeaderMap,
    body: SentBody,
) -> Result<Response, ApiError> {
    let mut begun = begin(&models, context, &headers, body, false).await?;
    let mut answer = begun.generation.collect().await?;
    let transfer = begun.transfer.as_deref();
    let Some(mut choice) = answer.choices.pop() else {
        return Err(ApiError::engine("The answer has no choice."));
    };
    let form = begun.format;
    Ok(message_response(&GenerateResponse {
        prompt_info: Some(form.prompt_info(&mut choice)),
        outputs: Some(form.outputs(choice, transfer)),
    }))
}

pub async fn generate_stream(
    State(models): State<ModelSet>,
    context: CallContext,
    headers: HeaderMap,
    body: SentBody,
) -> Result<Response, ApiError> {
    let begun = begin(&models, context, &headers, body, true).await?;
    let encoder = AnswerStream {
        form: begun.format,
        transfer: begun.transfer,
        has_begun: false,
        failure: None,
    };
    Ok(grpc_response(stream_body(begun.generation, encoder)))
}

async fn begin(
    models: &ModelSet,
    mut context: CallContext,
    headers: &HeaderMap,
    body: SentBody,
    stream: bool,
) -> Result<BegunCall<AnswerForm>, ApiError> {
    // A server with this port has one model, which stays loaded.
    let state = models.only_model().ok_or_else(ApiError::loading)?;
    let timer = CallTimer::new(state.metrics.clone(), &context);
    if state.parts.is_draining() {
        return Err(ApiError::draining());
    }
    check_rank(headers)?;
    let body = state.parts.bodies.read(body).await?;
    if !state.config.has_head {
        return Err(ApiError::no_head(&state.config));
    }
    let num_bytes = body.num_bytes();
    let default_seed = state.calls.default_seed(context.number);
    let takes_transfer = state.kv_transfer.is_some();
    let prepare = move |served: &ServedModel, caller: &Caller| {
        let caller = caller.with_default_seed(default_seed);
        let mut request: GenerateRequest = read_crowd(body.bytes(), &PROMPT)?;
        let name = std::mem::take(&mut request.request_id);
        let call = call_of(request, stream, served, &caller).map_err(in_place)?;
        if call.params.kv_transfer_params.is_some() && !takes_transfer {
            let field = "kv.kv_transfer_params";
            let advice = "this server takes part in no transfers: start it with --cluster-listen";
            return Err(ApiError::unsupported(field, advice));
        }
        Ok((call, RequestName::given(&name)))
    };
    let (call, name) = state.run_blocking(num_bytes, prepare).await?;
    if let Some(name) = name {
        context.name = name;
    }
    let begun = begin_call(&state, &context, call, FORM, timer).await;
    begun.map_err(in_place)
}

/// A gateway may route by the rank of a data-parallel engine, and this one has a single rank.
fn check_rank(headers: &HeaderMap) -> Result<(), ApiError> {
    const RANK: &str = "x-data-parallel-rank";
    match headers.get(RANK) {
        Some(rank) if rank != "0" => Err(ApiError::invalid(RANK, "must be 0")),
        _ => Ok(()),
    }
}
