//! `/score` and `/rerank`, in the forms of vLLM and Jina: rates how well texts fit. A cross-encoder reads each pair of
//! texts and scores it; with other models the score is the cosine between their vectors.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use corella_model::ClassHead;
use serde::{Deserialize, Serialize};

use crate::api_error::ApiError;
use crate::auth::CallContext;
use crate::call::{check_model, json_response};
use crate::embeddings::prompt;
use crate::metrics::CallTimer;
use crate::pooled_call::{
    PooledPrompt, PooledStates, PoolingFields, PoolingParams, PoolingUsage, TextForm,
    paired_prompts, pool, pooled_prompts,
};
use crate::prompt::{Prompt, PromptField};
use crate::request_body::RequestBody;
use crate::server_state::{ServerState, unix_now_s};
use crate::text_thread::Caller;
use crate::wire::field_table::Endpoint;

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
    /// vllm-router's name of `top_n`.
    top_k: Option<u32>,
    return_documents: Option<bool>,
}

/// A call, checked and tokenised.
struct Comparison<F> {
    prompts: Vec<PooledPrompt>,
    /// The field with most of them, named in errors.
    field: &'static str,
    scoring: Scoring,
    params: PoolingParams,
    model: String,
    format: F,
}

/// How scores are computed from hidden states.
enum Scoring {
    /// By the cosine between texts of two sides. The first side has the first prompts, one for each of the others or
    /// one for all.
    Cosine { num_first: usize },
    /// Each prompt is a pair of texts.
    Pairs,
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
    let required = |field: &str, value: Option<PromptField>| {
        value.ok_or_else(|| ApiError::invalid(field, "is required"))
    };
    let first = required("text_1", fields.text_1)?;
    let second = required("text_2", fields.text_2)?;
    let num_first = first.0.len();
    if num_first != 1 && num_first != second.0.len() {
        return Err(ApiError::invalid(
            "text_2",
            format!(
                "has {} texts; text_1 must have as many or one, and has {num_first}",
                second.0.len()
            ),
        ));
    }
    let (prompts, scoring) = match pair_head(state)? {
        Some(_) => {
            let firsts = texts("text_1", &first)?;
            let seconds = texts("text_2", &second)?;
            let pairs: Vec<_> = firsts.into_iter().cycle().zip(seconds).collect();
            let add = pooling.add_special_tokens;
            let prompts = paired_prompts(state, "text_2", &pairs, add, caller)?;
            (prompts, Scoring::Pairs)
        }
        None => {
            let form = TextForm {
                add_special_tokens: pooling.add_special_tokens,
                prefix: prompt(&state.config, None)?,
            };
            let mut prompts = pooled_prompts(state, "text_1", first, form, caller)?;
            prompts.extend(pooled_prompts(state, "text_2", second, form, caller)?);
            (prompts, Scoring::Cosine { num_first })
        }
    };
    Ok(Comparison {
        prompts,
        field: "text_2",
        scoring,
        params: params(state, &pooling)?,
        model,
        format: (),
    })
}

/// Returns the head that scores pairs of texts, if the model has one. A head with several scores is an error.
fn pair_head(state: &ServerState) -> Result<Option<&ClassHead>, ApiError> {
    match &state.config.sentence.classes {
        Some(head) if head.labels.len() != 1 => {
            let name = state.config.model_name();
            Err(ApiError::many_classes(name, head.labels.len()))
        }
        head => Ok(head.as_ref()),
    }
}

/// Returns how a call's prompts are computed. A classifier has one way of pooling.
fn params(state: &ServerState, pooling: &PoolingFields) -> Result<PoolingParams, ApiError> {
    let mut params = pooling.params(&state.config)?;
    if let Some(head) = &state.config.sentence.classes {
        params.pooling = head.pooling;
    }
    Ok(params)
}

/// Returns the texts of a field, for a model that reads pairs of them.
fn texts<'a>(field: &str, PromptField(prompts): &'a PromptField) -> Result<Vec<&'a str>, ApiError> {
    let texts = prompts.iter().map(|prompt| match prompt {
        Prompt::Text(text) => Ok(&**text),
        Prompt::Tokens(_) => Err(ApiError::invalid(
            field,
            "must be texts: this model reads two at once, with tokens between them",
        )),
    });
    texts.collect()
}

/// The parts of an answer of `/rerank`.
struct Ranking {
    documents: Vec<String>,
    /// The number of documents, the best first.
    num_shown: usize,
    shows_texts: bool,
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
    // The sort is stable, so equally relevant documents keep their order.
    results.sort_by(|a, b| b.relevance_score.total_cmp(&a.relevance_score));
    results.truncate(ranking.num_shown);
    Ok(json_response(&Reranked {
        id: format!("rerank-{}", context.name),
        model,
        usage,
        results,
    }))
}

/// SGLang's gateway writes this name into a request to `/v1/rerank` whose body names no model. It means the served
/// model, if the server has just one.
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
    let query = { fields.query }.ok_or_else(|| ApiError::invalid("query", "is required"))?;
    let documents = { fields.documents }.filter(|documents| !documents.is_empty());
    let documents =
        documents.ok_or_else(|| ApiError::invalid("documents", "must be at least one text"))?;
    let add_special_tokens = pooling.add_special_tokens;
    let (prompts, scoring) = match pair_head(state)? {
        Some(_) => {
            let pairs: Vec<_> = documents.iter().map(|text| (&*query, &**text)).collect();
            let add = add_special_tokens;
            let prompts = paired_prompts(state, "documents", &pairs, add, caller)?;
            (prompts, Scoring::Pairs)
        }
        None => {
            let prompts = |field, side: &str, texts: Vec<String>| {
                let texts = PromptField(texts.into_iter().map(Prompt::Text).collect());
                let has_own = state.config.sentence.prompts.contains_key(side);
                let form = TextForm {
                    add_special_tokens,
                    prefix: prompt(&state.config, has_own.then_some(side))?,
                };
                pooled_prompts(state, field, texts, form, caller)
            };
            // sentence-transformers looks for these names.
            let mut all = prompts("query", "query", vec![query])?;
            all.extend(prompts("documents", "document", documents.clone())?);
            (all, Scoring::Cosine { num_first: 1 })
        }
    };
    Ok(Comparison {
        prompts,
        field: "documents",
        scoring,
        params: params(state, &pooling)?,
        model,
        format: Ranking {
            // vLLM reads 0 as all.
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

/// Compares texts: one with each of the others, or pairwise.
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
    // The head takes time for many hidden states.
    let num_bytes = states.len() * size_of::<f32>() * state.config.hidden_size;
    let weigh = move |state: &ServerState, _: &Caller| {
        let sentence = &state.config.sentence;
        Ok(match (call.scoring, &sentence.classes) {
            (Scoring::Cosine { num_first }, _) => {
                let vectors = states.iter().map(|state| sentence.head.apply(state));
                let vectors: Vec<_> = vectors.collect();
                let (first, second) = vectors.split_at(num_first);
                let pairs = first.iter().cycle().zip(second);
                pairs.map(|(first, second)| cosine(first, second)).collect()
            }
            (Scoring::Pairs, Some(head)) => states.iter().map(|state| head.score(state)).collect(),
            (Scoring::Pairs, None) => Vec::new(),
        })
    };
    let scores = state.run_blocking(num_bytes, weigh).await?;
    Ok((call.model, scores, usage, call.format))
}

/// The cosine of the angle between two vectors, or 0 if one of them is zero.
fn cosine(a: &[f32], b: &[f32]) -> f32 {
    let dot = |a: &[f32], b: &[f32]| -> f64 {
        let products = a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b));
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
