//! `/v1/batches`: answers the requests of a file when no client waits.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::Uri;
use axum::response::Response;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::call::call_context::CallContext;
use crate::clock::unix_now_s;
use crate::state::server_parts::ServerParts;
use crate::store::file_store::{life_s, new_id};
use crate::wire::api_error::{ApiError, required};
use crate::wire::field_table::Endpoint;
use crate::wire::field_table::batch::EXPIRY;
use crate::wire::json_response::json_response;
use crate::wire::list_page::ListQuery;

use crate::store::batch_record::{BatchCounts, BatchRecord, BatchStatus, BatchTimes};
use crate::wire::field_limit::{
    BATCH_ENDPOINTS, MAX_FILE_LIFE_S, MAX_KEY_CHARS, MAX_NUM_PAIRS, MAX_VALUE_CHARS,
};

const MAX_LIMIT: usize = 100;
const MAX_WINDOW_S: u64 = 30 * 24 * 3600;

#[derive(Deserialize)]
#[serde(expecting = "a JSON object")]
struct BatchFields {
    input_file_id: Option<String>,
    endpoint: Option<String>,
    completion_window: Option<String>,
    metadata: Option<Map<String, Value>>,
    output_expires_after: Option<Map<String, Value>>,
}

impl BatchFields {
    fn record(self, server: &ServerParts, context: &CallContext) -> Result<BatchRecord, ApiError> {
        let input_file_id = required("input_file_id", self.input_file_id)?;
        let endpoint = required("endpoint", self.endpoint)?;
        let completion_window = required("completion_window", self.completion_window)?;
        if !BATCH_ENDPOINTS.contains(&endpoint.as_str()) {
            let message = format!("must be one of {}", BATCH_ENDPOINTS.join(", "));
            return Err(ApiError::invalid("endpoint", message));
        }
        let window_s = window_s(&completion_window)?;
        if let Some(metadata) = &self.metadata {
            check_metadata(metadata)?;
        }
        let check = server.field_check(Endpoint::Batches);
        let output_life_s = match self.output_expires_after {
            None => MAX_FILE_LIFE_S,
            Some(expiry) => {
                const FIELD: &str = "output_expires_after";
                check.check(&EXPIRY, FIELD, &expiry)?;
                if expiry
                    .get("anchor")
                    .is_none_or(|anchor| anchor != "created_at")
                {
                    let message = "must be \"created_at\"";
                    return Err(ApiError::invalid(format!("{FIELD}.anchor"), message));
                }
                let seconds = expiry.get("seconds").and_then(Value::as_u64);
                life_s(&format!("{FIELD}.seconds"), seconds)?
            }
        };
        let owner = context.owner().map(|owner| owner.to_string());
        let files = &server.batches()?.files;
        let input = files.find(owner.as_deref(), &input_file_id);
        let input = input.map_err(|error| error.with_param("input_file_id"))?;
        if input.purpose != "batch" {
            let message = "must be a file that was uploaded for batches";
            return Err(ApiError::invalid("input_file_id", message));
        }
        let now_s = unix_now_s();
        Ok(BatchRecord {
            id: new_id("batch_"),
            owner,
            endpoint,
            input_file_id,
            completion_window,
            metadata: self.metadata,
            output_life_s,
            status: BatchStatus::Validating,
            outcome: None,
            errors: Vec::new(),
            output_file_id: None,
            error_file_id: None,
            times: BatchTimes {
                created_at: now_s,
                expires_at: now_s + window_s,
                ..BatchTimes::default()
            },
            counts: BatchCounts::default(),
        })
    }
}

/// Returns the seconds of a window. OpenAI's API has only `24h`.
fn window_s(window: &str) -> Result<u64, ApiError> {
    let units = [('s', 1), ('m', 60), ('h', 3600), ('d', 24 * 3600)];
    let seconds = units.iter().find_map(|(unit, seconds)| {
        let number = window.strip_suffix(*unit)?;
        let is_number = number.bytes().all(|byte| byte.is_ascii_digit());
        let number: u64 = number.parse().ok().filter(|_| is_number)?;
        number.checked_mul(*seconds)
    });
    let seconds = seconds.filter(|seconds| (1..=MAX_WINDOW_S).contains(seconds));
    seconds.ok_or_else(|| {
        let message = "must be a time such as \"24h\", \"90m\" or \"30s\", up to 30 days";
        ApiError::invalid("completion_window", message)
    })
}

fn check_metadata(metadata: &Map<String, Value>) -> Result<(), ApiError> {
    let is_usual = |(key, value): (&String, &Value)| {
        let value = value.as_str();
        key.chars().count() <= MAX_KEY_CHARS
            && value.is_some_and(|value| value.chars().count() <= MAX_VALUE_CHARS)
    };
    match metadata.len() <= MAX_NUM_PAIRS && metadata.iter().all(is_usual) {
        true => Ok(()),
        false => Err(ApiError::invalid(
            "metadata",
            format!(
                "must have at most {MAX_NUM_PAIRS} texts of up to {MAX_VALUE_CHARS} characters, with keys \
                 of up to {MAX_KEY_CHARS}"
            ),
        )),
    }
}

pub async fn create_batch(
    State(server): State<Arc<ServerParts>>,
    context: CallContext,
    body: Body,
) -> Result<Response, ApiError> {
    let batches = server.batches()?.clone();
    if server.is_draining() {
        return Err(ApiError::draining());
    }
    let body = server.bodies.read(body).await?;
    let fields: BatchFields = body.parse()?;
    body.check_fields(server.field_check(Endpoint::Batches))?;
    let record = fields.record(&server, &context)?;
    let object = record.object();
    let created = tokio::task::spawn_blocking(move || batches.create(record)).await;
    created.map_err(|error| ApiError::engine(error.to_string()))??;
    Ok(json_response(&object))
}

pub async fn list_batches(
    State(server): State<Arc<ServerParts>>,
    context: CallContext,
    uri: Uri,
) -> Result<Response, ApiError> {
    let batches = server.batches()?;
    let allow_unknown = server.config.allow_unknown_fields;
    let query = ListQuery::parse(&uri, MAX_LIMIT, &[], allow_unknown)?;
    let batches = batches.list(context.owner().as_deref());
    let objects = batches.iter().map(BatchRecord::object).collect();
    Ok(json_response(&query.page(objects)?))
}

pub async fn retrieve_batch(
    State(server): State<Arc<ServerParts>>,
    context: CallContext,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let batch = server.batches()?.find(context.owner().as_deref(), &id)?;
    Ok(json_response(&batch.object()))
}

pub async fn cancel_batch(
    State(server): State<Arc<ServerParts>>,
    context: CallContext,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let batches = server.batches()?.clone();
    let owner = context.owner();
    let cancel = move || batches.cancel(owner.as_deref(), &id);
    let cancelled = tokio::task::spawn_blocking(cancel).await;
    let batch = cancelled.map_err(|error| ApiError::engine(error.to_string()))??;
    Ok(json_response(&batch.object()))
}
