//! `/classify`, in vLLM's form: the class of a text.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use serde::{Deserialize, Serialize};

use crate::api_error::ApiError;
use crate::auth::CallContext;
use crate::call::{check_model, json_response};
use crate::metrics::CallTimer;
use crate::pooled_call::{PoolingFields, PoolingUsage, TextForm, pool, pooled_prompts};
use crate::prompt::PromptField;
use crate::request_body::RequestBody;
use crate::server_state::{ServerState, unix_now_s};
use crate::text_thread::Caller;
use crate::wire::field_table::Endpoint;

#[derive(Deserialize)]
#[serde(expecting = "a JSON object")]
struct ClassifyFields {
    input: Option<PromptField>,
}

pub async fn classify(
    State(state): State<Arc<ServerState>>,
    context: CallContext,
    body: Body,
) -> Result<Response, ApiError> {
    let timer = CallTimer::new(state.metrics.clone(), &context);
    if state.is_draining() {
        return Err(ApiError::draining());
    }
    let body = RequestBody::read(body, &state).await?;
    let num_bytes = body.num_bytes();
    let prepare = move |state: &ServerState, caller: &Caller| {
        let pooling: PoolingFields = body.parse()?;
        let fields: ClassifyFields = body.parse()?;
        body.check_fields(state.field_check(Endpoint::Classify))?;
        let model = check_model(state, pooling.model.as_deref())?;
        // A decoder that reranks only takes pairs.
        let head = state.config.sentence.classes.as_ref();
        let Some(head) = head.filter(|_| state.config.is_encoder) else {
            return Err(ApiError::no_classes(state.config.model_name()));
        };
        let mut params = pooling.params(&state.config)?;
        params.pooling = head.pooling;
        let input = { fields.input }.ok_or_else(|| ApiError::invalid("input", "is required"))?;
        let form = TextForm {
            add_special_tokens: pooling.add_special_tokens,
            prefix: "",
        };
        Ok((
            pooled_prompts(state, "input", input, form, caller)?,
            params,
            model,
        ))
    };
    let (prompts, params, model) = state.run_blocking(num_bytes, prepare).await?;
    let pooled = pool(&state, &context, (prompts, "input"), &model, params, timer).await?;
    let num_bytes = pooled.states.len() * size_of::<f32>() * state.config.hidden_size;
    let id = format!("classify-{}", context.name);
    let write = move |state: &ServerState, _: &Caller| {
        let Some(head) = &state.config.sentence.classes else {
            return Err(ApiError::no_classes(state.config.model_name()));
        };
        let data = pooled.states.iter().enumerate().map(|(index, state)| {
            let probs = head.probabilities(state);
            let likeliest = probs.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
            let label = likeliest.and_then(|(class, _)| head.labels.get(class));
            Classified {
                index,
                label: label.map_or("", String::as_str),
                num_classes: probs.len(),
                probs,
            }
        });
        Ok(json_response(&Classes {
            id: &id,
            object: "list",
            created: unix_now_s(),
            model: &model,
            data: data.collect(),
            usage: pooled.usage,
        }))
    };
    state.run_blocking(num_bytes, write).await
}

#[derive(Serialize)]
struct Classes<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    data: Vec<Classified<'a>>,
    usage: PoolingUsage,
}

#[derive(Serialize)]
struct Classified<'a> {
    index: usize,
    /// The likeliest class.
    label: &'a str,
    /// One probability for each class.
    probs: Vec<f32>,
    num_classes: usize,
}
