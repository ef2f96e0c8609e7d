//! `/score` and `/rerank`, in the forms of vLLM and Jina: rates how well texts fit. A cross-encoder reads each pair of
//! texts and scores it; with other models the score is the cosine between their vectors.

use axum::response::Response;
use corella_model::ClassHead;
use serde::Deserialize;
use serde_json::json;

use crate::call::call_context::CallContext;
use crate::call::pooled_call::{PooledStates, PooledTexts, PoolingUsage};
use crate::clock::unix_now_s;
use crate::config::serve_config::ServeConfig;
use crate::endpoint::embeddings::prompt;
use crate::endpoint::pooling_endpoint::serve_pooled;
use crate::model_set::model_use::UsedModel;
use crate::text::pooled_prompt::{
    PoolingFields, PoolingParams, TextForm, paired_prompts, pooled_prompts,
};
use crate::text::prompt::{Prompt, PromptField};
use crate::text::served_model::ServedModel;
use crate::text::text_thread::Caller;
use crate::wire::api_error::{ApiError, required};
use crate::wire::field_table::Endpoint;
use crate::wire::json_response::json_response;
use crate::wire::request_body::{RequestBody, SentBody};

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

/// How scores are computed from hidden states.
enum Scoring {
    /// By the cosine between the vectors of a first and a second text. The first `num_first` prompts are the first
    /// texts: one for each second text, or one for all second texts.
    Cosine { num_first: usize },
    /// Each prompt is a pair of texts.
    Pairs,
}

pub async fn score(
    UsedModel(state): UsedModel,
    context: CallContext,
    body: SentBody,
) -> Result<Response, ApiError> {
    let scored = serve_pooled(&state, &context, body, prepare_score, weigh).await?;
    let data = scored.scores.into_iter().enumerate();
    let data =
        data.map(|(index, score)| json!({"object": "score", "index": index, "score": score}));
    Ok(json_response(&json!({
        "id": format!("score-{}", context.name),
        "object": "list",
        "created": unix_now_s(),
        "model": scored.model,
        "data": data.collect::<Vec<_>>(),
        "usage": scored.usage,
    })))
}

fn prepare_score(
    served: &ServedModel,
    body: &RequestBody,
    caller: &Caller,
) -> Result<PooledTexts<(Scoring, ())>, ApiError> {
    let pooling: PoolingFields = body.parse()?;
    let fields: ScoreFields = body.parse()?;
    body.check_fields(served.field_check(Endpoint::Score))?;
    let model = served.check_name(pooling.model.as_deref())?;
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
    let (prompts, scoring) = match pair_head(served)? {
        Some(_) => {
            let firsts = texts("text_1", &first)?;
            let seconds = texts("text_2", &second)?;
            let pairs: Vec<_> = firsts.into_iter().cycle().zip(seconds).collect();
            let add = pooling.add_special_tokens;
            let prompts = paired_prompts(served, "text_2", &pairs, add, caller)?;
            (prompts, Scoring::Pairs)
        }
        None => {
            let form = TextForm {
                add_special_tokens: pooling.add_special_tokens,
                prefix: prompt(&served.config, None)?,
            };
            let mut prompts = pooled_prompts(served, "text_1", first, form, caller)?;
            prompts.extend(pooled_prompts(served, "text_2", second, form, caller)?);
            (prompts, Scoring::Cosine { num_first })
        }
    };
    Ok(PooledTexts {
        prompts,
        field: "text_2",
        params: params(served, &pooling)?,
        model,
        format: (scoring, ()),
    })
}

/// Returns the head that scores pairs of texts, if the model has one. A head with several scores is an error.
fn pair_head(served: &ServedModel) -> Result<Option<&ClassHead>, ApiError> {
    match &served.config.sentence.classes {
        Some(head) if head.labels.len() != 1 => {
            let name = served.config.model_name();
            Err(ApiError::many_classes(name, head.labels.len()))
        }
        head => Ok(head.as_ref()),
    }
}

/// Returns how a call's prompts are computed. A classification head determines the pooling.
fn params(served: &ServedModel, pooling: &PoolingFields) -> Result<PoolingParams, ApiError> {
    let mut params = pooling.params(&served.config)?;
    if let Some(head) = &served.config.sentence.classes {
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

/// What an answer of `/rerank` needs of its request.
struct Ranking {
    documents: Vec<String>,
    /// The limit of documents in the answer.
    num_shown: usize,
    shows_texts: bool,
}

pub async fn rerank(
    UsedModel(state): UsedModel,
    context: CallContext,
    body: SentBody,
) -> Result<Response, ApiError> {
    let scored = serve_pooled(&state, &context, body, prepare_rerank, weigh).await?;
    let ranking: Ranking = scored.format;
    let documents = ranking.documents.into_iter();
    let mut ranked: Vec<_> = documents.zip(scored.scores).enumerate().collect();
    // The sort is stable, so equally relevant documents keep their order.
    ranked.sort_by(|(_, (_, a)), (_, (_, b))| b.total_cmp(a));
    ranked.truncate(ranking.num_shown);
    let results = ranked.into_iter().map(|(index, (text, score))| {
        let mut result = json!({"index": index, "relevance_score": score});
        if ranking.shows_texts {
            result["document"] = json!({"text": text});
        }
        result
    });
    Ok(json_response(&json!({
        "id": format!("rerank-{}", context.name),
        "model": scored.model,
        "usage": scored.usage,
        "results": results.collect::<Vec<_>>(),
    })))
}

/// SGLang's gateway writes this name into a request to `/v1/rerank` whose body names no model. The name then means the
/// served model, if the server has only one.
const UNKNOWN_MODEL: &str = "unknown";

fn prepare_rerank(
    served: &ServedModel,
    body: &RequestBody,
    caller: &Caller,
) -> Result<PooledTexts<(Scoring, Ranking)>, ApiError> {
    let pooling: PoolingFields = body.parse()?;
    let fields: RerankFields = body.parse()?;
    body.check_fields(served.field_check(Endpoint::Rerank))?;
    let model = pooling
        .model
        .as_deref()
        .filter(|model| *model != UNKNOWN_MODEL || !served.adapters.list().is_empty());
    let model = served.check_name(model)?;
    let query = required("query", fields.query)?;
    let documents = fields.documents.filter(|documents| !documents.is_empty());
    let documents =
        documents.ok_or_else(|| ApiError::invalid("documents", "must be at least one text"))?;
    let add_special_tokens = pooling.add_special_tokens;
    let (prompts, scoring) = match pair_head(served)? {
        Some(_) => {
            let pairs: Vec<_> = documents.iter().map(|text| (&*query, &**text)).collect();
            let add = add_special_tokens;
            let prompts = paired_prompts(served, "documents", &pairs, add, caller)?;
            (prompts, Scoring::Pairs)
        }
        None => {
            let prompts = |field, side: &str, texts: Vec<String>| {
                let texts = PromptField(texts.into_iter().map(Prompt::Text).collect());
                let has_own = served.config.sentence.prompts.contains_key(side);
                let form = TextForm {
                    add_special_tokens,
                    prefix: prompt(&served.config, has_own.then_some(side))?,
                };
                pooled_prompts(served, field, texts, form, caller)
            };
            // sentence-transformers looks for prompts of these names.
            let mut all = prompts("query", "query", vec![query])?;
            all.extend(prompts("documents", "document", documents.clone())?);
            (all, Scoring::Cosine { num_first: 1 })
        }
    };
    // 0 means all documents, as in vLLM.
    let num_shown = fields.top_n.or(fields.top_k).filter(|&num| num > 0);
    let ranking = Ranking {
        num_shown: num_shown.unwrap_or(u32::MAX) as usize,
        shows_texts: fields.return_documents.unwrap_or(true),
        documents,
    };
    Ok(PooledTexts {
        prompts,
        field: "documents",
        params: params(served, &pooling)?,
        model,
        format: (scoring, ranking),
    })
}

/// The scores of a call's texts.
struct Scored<F> {
    scores: Vec<f32>,
    usage: PoolingUsage,
    model: String,
    format: F,
}

/// Computes the scores. This takes a while if a head reads many hidden states.
fn weigh<F>(
    pooled: PooledStates<(Scoring, F)>,
    config: &ServeConfig,
) -> Result<Scored<F>, ApiError> {
    let (sentence, states) = (&config.sentence, pooled.states.iter());
    let (scoring, format) = pooled.format;
    let scores = match (scoring, &sentence.classes) {
        (Scoring::Cosine { num_first }, _) => {
            let vectors: Vec<_> = states.map(|state| sentence.head.apply(state)).collect();
            let (first, second) = vectors.split_at(num_first);
            let pairs = first.iter().cycle().zip(second);
            pairs.map(|(first, second)| cosine(first, second)).collect()
        }
        (Scoring::Pairs, Some(head)) => states.map(|state| head.score(state)).collect(),
        (Scoring::Pairs, None) => Vec::new(),
    };
    Ok(Scored {
        scores,
        usage: pooled.usage,
        model: pooled.model,
        format,
    })
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
