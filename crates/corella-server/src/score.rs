//! `/score` and `/rerank`, in the shapes of vLLM and Jina: how alike texts are, by the cosine of the angle
//! between their hidden states.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use corella_core::HiddenState;
use serde::{Deserialize, Serialize};

use crate::api_error::ApiError;
use crate::auth::CallContext;
use crate::call::{check_model, json_response};
use crate::field_table::Endpoint;
use crate::metrics::CallTimer;
use crate::pooled_call::{
    PooledPrompt, PooledStates, PoolingFields, PoolingParams, PoolingUsage, pool, pooled_prompts,
};
use crate::prompt::{Prompt, PromptField};
use crate::request_body::RequestBody;
use crate::server_state::{ServerState, unix_now_s};
use crate::text_thread::Caller;

#[derive(Deserialize)]
#[serde(expecting = "a JSON object")]
struct ScoreFields {
    text_1: Option<PromptField>,
    text_2: Option<PromptField>,
}

#[derive(Deserialize)]
#[serde(expecting = "a JSON object")]
struct RerankFields {
    query: Option<String>,
    documents: Option<Vec<String>>,
    top_n: Option<u32>,
    /// What vllm-router calls `top_n`.
    top_k: Option<u32>,
    return_documents: Option<bool>,
}

/// A call, checked and tokenised. The prompts of the first side come first.
struct Comparison<F> {
    prompts: Vec<PooledPrompt>,
    /// The field that holds most of them, named in errors.
    field: &'static str,
    num_first: usize,
    params: PoolingParams,
    model: String,
    format: F,
}

pub async fn score(
    State(state): State<Arc<ServerState>>,
    context: CallContext,
    body: Body,
) -> Result<Response, ApiError> {
    let (model, scores, usage, ()) = compare(&state, &context, body, prepare_score).await?;
    let data = scores.into_iter().enumerate();
    let data = data.map(|(index, score)| Score {
        object: "score",
        index,
        score,
    });
    Ok(json_response(&Scores {
        id: format!("score-{}", context.name),
        object: "list",
        created: unix_now_s(),
        model,
        data: data.collect(),
        usage,
    }))
}

fn prepare_score(
    state: &ServerState,
    body: &RequestBody,
    caller: &Caller,
) -> Result<Comparison<()>, ApiError> {
    let pooling: PoolingFields = body.parse()?;
    let fields: ScoreFields = body.parse()?;
    body.check_fields(state.field_check(Endpoint::Score))?;
    let model = check_model(state, pooling.model.as_deref())?;
    let params = pooling.params()?;
    let prompts = |field, value: Option<PromptField>| {
        let value = value.ok_or_else(|| ApiError::invalid(field, "is required"))?;
        pooled_prompts(state, field, value, pooling.add_special_tokens, caller)
    };
    let mut first = prompts("text_1", fields.text_1)?;
    let second = prompts("text_2", fields.text_2)?;
    let num_first = first.len();
    if num_first != 1 && num_first != second.len() {
        return Err(ApiError::invalid(
            "text_2",
            format!(
                "has {} texts; text_1 must have as many or one, and has {num_first}",
                second.len()
            ),
        ));
    }
    first.extend(second);
    Ok(Comparison {
        prompts: first,
        field: "text_2",
        num_first,
        params,
        model,
        format: (),
    })
}

/// What an answer of `/rerank` shows.
struct Ranking {
    documents: Vec<String>,
    /// How many of the documents, the best first.
    num_shown: usize,
    shows_texts: bool,
}

/// vLLM's endpoint for labels. No model that is served has any.
pub async fn classify(State(state): State<Arc<ServerState>>) -> ApiError {
    ApiError::no_classes(state.config.model_name())
}

pub async fn rerank(
    State(state): State<Arc<ServerState>>,
    context: CallContext,
    body: Body,
) -> Result<Response, ApiError> {
    let (model, scores, usage, ranking) = compare(&state, &context, body, prepare_rerank).await?;
    let mut results: Vec<_> = { ranking.documents.into_iter().zip(scores).enumerate() }
        .map(|(index, (text, relevance_score))| Ranked {
            index,
            document: ranking.shows_texts.then_some(Document { text }),
            relevance_score,
        })
        .collect();
    // Documents that are equally relevant stay in their order.
    results.sort_by(|a, b| b.relevance_score.total_cmp(&a.relevance_score));
    results.truncate(ranking.num_shown);
    Ok(json_response(&Reranked {
        id: format!("rerank-{}", context.name),
        model,
        usage,
        results,
    }))
}

/// SGLang's gateway writes this name into a request to `/v1/rerank`, whose body names no model there. It is
/// the one that is served, where there is just one.
const UNKNOWN_MODEL: &str = "unknown";

fn prepare_rerank(
    state: &ServerState,
    body: &RequestBody,
    caller: &Caller,
) -> Result<Comparison<Ranking>, ApiError> {
    let pooling: PoolingFields = body.parse()?;
    let fields: RerankFields = body.parse()?;
    body.check_fields(state.field_check(Endpoint::Rerank))?;
    let model = { pooling.model.as_deref() }
        .filter(|model| *model != UNKNOWN_MODEL || !state.adapters.list().is_empty());
    let model = check_model(state, model)?;
    let params = pooling.params()?;
    let query = { fields.query }.ok_or_else(|| ApiError::invalid("query", "is required"))?;
    let documents = { fields.documents }.filter(|documents| !documents.is_empty());
    let documents =
        documents.ok_or_else(|| ApiError::invalid("documents", "must be at least one text"))?;
    let prompts = |field, texts: Vec<String>| {
        let texts = PromptField(texts.into_iter().map(Prompt::Text).collect());
        pooled_prompts(state, field, texts, pooling.add_special_tokens, caller)
    };
    let mut all = prompts("query", vec![query])?;
    all.extend(prompts("documents", documents.clone())?);
    Ok(Comparison {
        prompts: all,
        field: "documents",
        num_first: 1,
        params,
        model,
        format: Ranking {
            // vLLM takes 0 for all.
            num_shown: fields
                .top_n
                .or(fields.top_k)
                .filter(|&num| num > 0)
                .unwrap_or(u32::MAX) as usize,
            shows_texts: fields.return_documents.unwrap_or(true),
            documents,
        },
    })
}

/// Compares texts as a call asks for: one with each of the others, or pairs.
async fn compare<F: Send + 'static>(
    state: &Arc<ServerState>,
    context: &CallContext,
    body: Body,
    prepare: fn(&ServerState, &RequestBody, &Caller) -> Result<Comparison<F>, ApiError>,
) -> Result<(String, Vec<f32>, PoolingUsage, F), ApiError> {
    let timer = CallTimer::new(state.metrics.clone(), context);
    if state.is_draining() {
        return Err(ApiError::draining());
    }
    let body = RequestBody::read(body, state).await?;
    let num_bytes = body.num_bytes();
    let prepare = move |state: &ServerState, caller: &Caller| prepare(state, &body, caller);
    let call = state.run_blocking(num_bytes, prepare).await?;
    let prompts = (call.prompts, call.field);
    let pooled = pool(state, context, prompts, &call.model, call.params, timer).await?;
    let PooledStates { states, usage } = pooled;
    let (first, second) = states.split_at(call.num_first);
    let scores = first.iter().cycle().zip(second);
    let scores = scores.map(|(first, second)| cosine(first, second));
    Ok((call.model, scores.collect(), usage, call.format))
}

/// The cosine of the angle between two vectors, and 0 if one of them is zero.
fn cosine(a: &HiddenState, b: &HiddenState) -> f32 {
    let dot = |a: &HiddenState, b: &HiddenState| -> f64 {
        let products = a
            .iter()
            .zip(&b[..])
            .map(|(&a, &b)| f64::from(a) * f64::from(b));
        products.sum()
    };
    let lengths = (dot(a, a) * dot(b, b)).sqrt();
    match lengths > 0.0 {
        true => (dot(a, b) / lengths) as f32,
        false => 0.0,
    }
}

#[derive(Serialize)]
struct Scores {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
    data: Vec<Score>,
    usage: PoolingUsage,
}

#[derive(Serialize)]
struct Score {
    object: &'static str,
    index: usize,
    score: f32,
}

#[derive(Serialize)]
struct Reranked {
    id: String,
    model: String,
    usage: PoolingUsage,
    results: Vec<Ranked>,
}

#[derive(Serialize)]
struct Ranked {
    /// The place of the document in the request.
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    document: Option<Document>,
    relevance_score: f32,
}

#[derive(Serialize)]
struct Document {
    text: String,
}
