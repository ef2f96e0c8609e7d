//! `/classify`, in vLLM's form: the class of a text.

use axum::response::Response;
use serde::Deserialize;
use serde_json::json;

use crate::call::call_context::CallContext;
use crate::call::pooled_call::{PooledStates, PooledTexts};
use crate::clock::unix_now_s;
use crate::config::serve_config::ServeConfig;
use crate::endpoint::pooling_endpoint::serve_pooled;
use crate::model_set::model_use::UsedModel;
use crate::text::pooled_prompt::{PoolingFields, TextForm, pooled_prompts};
use crate::text::prompt::PromptField;
use crate::text::served_model::ServedModel;
use crate::text::text_thread::Caller;
use crate::wire::api_error::{ApiError, required};
use crate::wire::field_table::Endpoint;
use crate::wire::json_response::json_response;
use crate::wire::request_body::{RequestBody, SentBody};

#[derive(Deserialize)]
#[serde(expecting = "a JSON object")]
struct ClassifyFields {
    input: Option<PromptField>,
}

pub async fn classify(
    UsedModel(state): UsedModel,
    context: CallContext,
    body: SentBody,
) -> Result<Response, ApiError> {
    let prepare = |served: &ServedModel, body: &RequestBody, caller: &Caller| {
        let pooling: PoolingFields = body.parse()?;
        let fields: ClassifyFields = body.parse()?;
        body.check_fields(served.field_check(Endpoint::Classify))?;
        let model = served.check_name(pooling.model.as_deref())?;
        // A decoder with a classification head is a reranker, which takes only pairs of texts.
        let head = served.config.sentence.classes.as_ref();
        let Some(head) = head.filter(|_| served.config.is_encoder) else {
            return Err(ApiError::no_classes(served.config.model_name()));
        };
        let mut params = pooling.params(&served.config)?;
        params.pooling = head.pooling;
        let input = required("input", fields.input)?;
        let form = TextForm {
            add_special_tokens: pooling.add_special_tokens,
            prefix: "",
        };
        Ok(PooledTexts {
            prompts: pooled_prompts(served, "input", input, form, caller)?,
            field: "input",
            params,
            model,
            format: (),
        })
    };
    let id = format!("classify-{}", context.name);
    let write = move |pooled: PooledStates<()>, config: &ServeConfig| {
        let Some(head) = &config.sentence.classes else {
            return Err(ApiError::no_classes(config.model_name()));
        };
        let data = pooled.states.iter().enumerate().map(|(index, state)| {
            let probs = head.probabilities(state);
            let likeliest = probs.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
            let label = likeliest.and_then(|(class, _)| head.labels.get(class));
            json!({
                "index": index,
                "label": label.map_or("", String::as_str),
                "num_classes": probs.len(),
                // One probability for each class.
                "probs": probs,
            })
        });
        Ok(json_response(&json!({
            "id": id,
            "object": "list",
            "created": unix_now_s(),
            "model": pooled.model,
            "data": data.collect::<Vec<_>>(),
            "usage": pooled.usage,
        })))
    };
    serve_pooled(&state, &context, body, prepare, write).await
}
