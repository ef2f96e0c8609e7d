//! Every failure as OpenAI's error object, written for the caller who can correct it.

mod engine;

use axum::body::Body;
use axum::http::header::{CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::Serialize;

use crate::config::serve_config::ServeConfig;
use crate::wire::field_table::Endpoint;
use crate::wire::reset_time::ResetTime;
use crate::wire::short_text::{ShortText, shown};

/// An error object, `{"error": {"message", "type", "param", "code"}}`, and its HTTP status.
#[derive(Clone, Debug, PartialEq)]
pub struct ApiError {
    pub status: StatusCode,
    body: ErrorBody,
    /// Time until the caller may retry, if known.
    retry_after_us: Option<u64>,
    /// Whether the engine is gone, so that another server may succeed.
    is_lost_engine: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
struct ErrorBody {
    message: ShortText,
    #[serde(rename = "type")]
    kind: &'static str,
    param: Option<ShortText>,
    code: Option<&'static str>,
}

/// The `retry-after` of a 429. The queue has a free place whenever a request ends, so the value is a pace for retries,
/// not a prediction.
const RETRY_AFTER_S: &str = "1";

/// Limits the names of the served model in an error.
const MAX_SHOWN_NAMES: usize = 8;

/// OpenAI's clients prefer this header to `retry-after`, because `retry-after` has only whole seconds.
const RETRY_AFTER_MS: HeaderName = HeaderName::from_static("retry-after-ms");

impl ApiError {
    fn new(status: StatusCode, message: impl Into<String>) -> Self {
        let message: String = message.into();
        Self {
            status,
            body: ErrorBody {
                message: message.into(),
                kind: kind_of(status),
                param: None,
                code: None,
            },
            retry_after_us: None,
            is_lost_engine: false,
        }
    }

    /// A field whose value cannot be served.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        let param: String = param.into();
        let message = format!("{param}: {}", message.into());
        Self::new(StatusCode::BAD_REQUEST, message).with_param(param)
    }

    /// A request for text to a model that generates none.
    pub fn no_head(config: &ServeConfig) -> Self {
        let model = config.model_name();
        let message = match (config.is_encoder, &config.sentence.classes) {
            (false, _) => format!(
                "{model} is an embedding model: it has no output head (lm_head), so it generates no \
                 text; use /v1/embeddings, /score or /rerank"
            ),
            (true, None) => format!(
                "{model} is an encoder: it reads whole texts and generates none; use \
                 /v1/embeddings, /score or /rerank"
            ),
            (true, Some(_)) => format!(
                "{model} is an encoder that classifies texts and generates none; use /classify, \
                 /score or /rerank"
            ),
        };
        Self::invalid("model", message)
    }

    /// A request for vectors to a model that only gives scores.
    pub fn no_vectors(config: &ServeConfig) -> Self {
        let model = config.model_name();
        let message = match config.is_encoder {
            true => format!(
                "{model} classifies texts, or pairs of texts, and makes no embeddings; use /classify, \
                 /score or /rerank"
            ),
            false => format!(
                "{model} scores pairs of texts, and makes no embeddings; use /score or /rerank"
            ),
        };
        Self::invalid("model", message)
    }

    /// A request for scores to a decoder whose files have no template for pairs of texts.
    pub fn no_pairs(model: &str) -> Self {
        let message = format!("{model} has no chat template for pairs of a query and a document");
        Self::invalid("model", message)
    }

    /// A request for one score to a model that has several.
    pub fn many_classes(model: &str, num_classes: usize) -> Self {
        let message = format!(
            "{model} gives scores of {num_classes} classes, not one score of a pair of texts; use \
             /classify"
        );
        Self::invalid("model", message)
    }

    pub fn message(&self) -> &str {
        &self.body.message
    }

    pub fn param(&self) -> Option<&str> {
        self.body.param.as_deref()
    }

    /// The same error, attributed to a field.
    pub fn with_param(mut self, param: impl Into<String>) -> Self {
        let param: String = param.into();
        self.body.param = Some(param.into());
        self
    }

    fn with_code(mut self, code: &'static str) -> Self {
        self.body.code = Some(code);
        self
    }

    /// The same error, with the messages of `others` appended.
    pub fn with_others(mut self, others: impl Iterator<Item = Self>) -> Self {
        let message = others.fold(self.message().to_owned(), |message, other| {
            format!("{message}; {}", other.message())
        });
        self.body.message = message.into();
        self
    }

    /// The code, or the type of an error without one.
    pub fn code_or_type(&self) -> &'static str {
        self.body.code.unwrap_or(self.body.kind)
    }

    pub fn code(&self) -> Option<&'static str> {
        self.body.code
    }

    pub(crate) fn is_lost_engine(&self) -> bool {
        self.is_lost_engine
    }

    /// A change of adapters that are loaded with their model.
    pub fn fixed_adapters() -> Self {
        let message = "The adapters of this model are those of its table in the file of --models.";
        Self::new(StatusCode::CONFLICT, message)
    }

    pub fn retry_after_us(&self) -> Option<u64> {
        self.retry_after_us
    }

    /// The same error with the field's name at this endpoint, `to`. A place within the field is renamed, too.
    pub fn renamed(mut self, from: &str, to: &str) -> Self {
        let Some(rest) = self.param().and_then(|param| param.strip_prefix(from)) else {
            return self;
        };
        if rest.is_empty() || rest.starts_with(['.', '[']) {
            let param = format!("{to}{rest}");
            if let Some(message) = self.body.message.strip_prefix(&format!("{from}{rest}: ")) {
                self.body.message = format!("{param}: {message}").into();
            }
            self.body.param = Some(param.into());
        }
        self
    }

    /// The same error with a tool's member `from` renamed to `to`, its name at this endpoint.
    pub fn within_tools(self, from: &str, to: &str) -> Self {
        let param = self.param().unwrap_or_default();
        let Some((tool, _)) = param.split_once(&format!(".{from}")) else {
            return self;
        };
        match tool.starts_with("tools[") {
            true => {
                let (from, to) = (format!("{tool}.{from}"), format!("{tool}.{to}"));
                self.renamed(&from, &to)
            }
            false => self,
        }
    }

    /// The same error of a tool or of a tool choice, at an endpoint where no `function` object is around their members.
    pub fn without_function(self) -> Self {
        let param = self.param().unwrap_or_default();
        let is_of_tool = ["tools[", "tool_choice."]
            .iter()
            .any(|field| param.starts_with(field));
        match param.split_once(".function").filter(|_| is_of_tool) {
            Some((tool, _)) => {
                let tool = tool.to_owned();
                self.renamed(&format!("{tool}.function"), &tool)
            }
            None => self,
        }
    }

    /// The same error with the tool's index in the request. `places` are the kept tools' indexes in the request.
    pub fn of_kept_tools(self, places: &[usize]) -> Self {
        let param = self.param().unwrap_or_default();
        let index = param
            .strip_prefix("tools[")
            .and_then(|rest| rest.split_once(']'));
        let index = index.and_then(|(index, _)| index.parse::<usize>().ok());
        match index.and_then(|index| Some((index, places.get(index)?))) {
            Some((index, place)) => {
                self.renamed(&format!("tools[{index}]"), &format!("tools[{place}]"))
            }
            None => self,
        }
    }

    /// A field that neither Corella nor another known server has.
    pub fn unknown_field(path: &str, name: &str, closest: Option<&str>) -> Self {
        let shown = shown(name);
        let (dot, place) = match path {
            "" => ("", String::new()),
            path => (".", format!(" in {path}")),
        };
        let advice = match closest {
            Some(closest) => format!("did you mean `{closest}`?"),
            None => "leave it out".to_owned(),
        };
        let message = format!("unknown field `{shown}`{place}; {advice}");
        Self::new(StatusCode::BAD_REQUEST, message)
            .with_param(format!("{path}{dot}{shown}"))
            .with_code("unknown_parameter")
    }

    /// A field that belongs to another endpoint.
    pub fn misplaced(name: &str, endpoint: Endpoint, endpoints: &[Endpoint]) -> Self {
        let paths: Vec<_> = endpoints.iter().map(|endpoint| endpoint.path()).collect();
        let message = format!(
            "{} has no such field; it is one of {}",
            endpoint.path(),
            paths.join(" and ")
        );
        Self::invalid(name, message).with_code("unknown_parameter")
    }

    /// A field that other servers support and Corella does not.
    pub fn unsupported(param: impl Into<String>, advice: &str) -> Self {
        let message = format!("not supported; {advice}");
        Self::invalid(param, message).with_code("unsupported_parameter")
    }

    /// A prompt that is to be computed by another server.
    pub fn prompt_not_cached(num_cached: u32, num_tokens: usize) -> Self {
        let message = format!(
            "The cache has {num_cached} of the prompt's {num_tokens} tokens, and the request has the header \
             prefer: if-available."
        );
        Self::new(StatusCode::PRECONDITION_FAILED, message).with_code("prompt_not_cached")
    }

    /// A body that is not JSON, or not an object.
    pub fn malformed(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// `names` are those of the server's models that the caller may use.
    pub fn model_not_found(model: &str, names: &[String]) -> Self {
        let model = shown(model);
        let shown_names = names.iter().take(MAX_SHOWN_NAMES);
        let mut served: Vec<_> = shown_names.map(|name| format!("`{name}`")).collect();
        if names.len() > MAX_SHOWN_NAMES {
            served.push(format!("{} more", names.len() - MAX_SHOWN_NAMES));
        }
        let served = served.join(", ");
        let advice = match names.is_empty() {
            true => ", and the key permits no other.".to_owned(),
            false => format!("; this server has {served}: ask for that, or leave `model` out."),
        };
        let message = format!("The model `{model}` does not exist{advice}");
        Self::new(StatusCode::NOT_FOUND, message)
            .with_param("model")
            .with_code("model_not_found")
    }

    /// A caller asks to fetch a model from a server that fetches none.
    pub fn not_pulled(model: &str, names: &[String]) -> Self {
        let mut error = Self::model_not_found(model, names);
        let message = format!(
            "{} It fetches no other: run `corella pull {}` on its machine, and serve that.",
            error.message(),
            shown(model)
        );
        error.body.message = message.into();
        error
    }

    /// The caller names a response that does not exist. `reason` says why.
    pub fn response_not_found(id: &str, reason: &str) -> Self {
        Self::not_found("response", id, reason, "response_not_found")
    }

    /// The same error about the response that a request wants to continue, in the form of OpenAI's API: clients that
    /// see this code send the whole conversation instead.
    pub fn into_previous_response_error(mut self) -> Self {
        self.status = StatusCode::BAD_REQUEST;
        self.with_code("previous_response_not_found")
            .with_param("previous_response_id")
    }

    /// The same error about the response whose item a request names.
    pub fn into_item_error(self) -> Self {
        self.with_code("item_not_found")
    }

    pub fn item_not_found(id: &str, reason: &str) -> Self {
        Self::not_found("item", id, reason, "item_not_found")
    }

    pub fn file_not_found(id: &str, reason: &str) -> Self {
        Self::not_found("file", id, reason, "file_not_found")
    }

    pub fn batch_not_found(id: &str) -> Self {
        Self::not_found("batch", id, "does not exist", "batch_not_found")
    }

    /// The server was started without a folder for files.
    pub fn no_files() -> Self {
        Self::new(
            StatusCode::NOT_FOUND,
            "This server keeps no files and runs no batches; it has to be started with --files-dir DIR.",
        )
        .with_code("no_files")
    }

    pub fn file_too_large(limit: u64) -> Self {
        Self::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            format!("A file may have at most {limit} bytes (--max-file-bytes)."),
        )
    }

    /// The disk limit leaves no room for more files.
    pub fn insufficient_storage(message: impl Into<String>) -> Self {
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, message).with_code("storage_full")
    }

    /// An object of the caller's that does not exist.
    fn not_found(kind: &str, id: &str, reason: &str, code: &'static str) -> Self {
        Self::new(
            StatusCode::NOT_FOUND,
            format!("The {kind} `{}` {reason}.", shown(id)),
        )
        .with_code(code)
    }

    pub fn unauthorized() -> Self {
        Self::new(
            StatusCode::UNAUTHORIZED,
            "Missing or wrong API key; send `Authorization: Bearer KEY` or `x-api-key: KEY`.",
        )
        .with_code("invalid_api_key")
    }

    /// The key is valid, but does not permit the request.
    pub fn forbidden(message: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, message).with_code("insufficient_permissions")
    }

    /// A model that the caller's key may not use. The error does not reveal which models exist.
    pub fn model_not_allowed(model: &str) -> Self {
        Self::new(
            StatusCode::NOT_FOUND,
            format!(
                "The model `{}` does not exist, or your API key may not use it.",
                shown(model)
            ),
        )
        .with_param("model")
        .with_code("model_not_found")
    }

    /// The caller's key may use none of several models by the model's own name.
    pub fn no_model_allowed() -> Self {
        let message = "Your API key may use a model of this server only if the request names it: say which in `model`.";
        Self::new(StatusCode::NOT_FOUND, message)
            .with_param("model")
            .with_code("model_not_found")
    }

    /// The caller's key has used up a limit, which has room again after `wait_us`.
    pub fn rate_limited(message: impl Into<String>, wait_us: u64) -> Self {
        let mut error = Self::new(
            StatusCode::TOO_MANY_REQUESTS,
            format!(
                "{} Try again in {}.",
                message.into(),
                ResetTime { time_us: wait_us }
            ),
        )
        .with_code("rate_limit_exceeded");
        error.retry_after_us = Some(wait_us);
        error
    }

    /// A prompt with more tokens than the caller's key may use in a minute.
    pub fn beyond_rate(prompt_field: &str, num_tokens: usize, per_minute: u32) -> Self {
        let message = format!(
            "has {num_tokens} tokens, and this API key may use {per_minute} tokens per minute"
        );
        Self::invalid(prompt_field, message).with_code("rate_limit_exceeded")
    }

    /// `advice` is a sentence.
    pub fn unknown_path(path: &str, advice: &str) -> Self {
        Self::new(
            StatusCode::NOT_FOUND,
            format!("There is no {} here. {advice}", shown(path)),
        )
    }

    /// A caller asks for the health of a service that is not here.
    pub fn unknown_service(name: &str) -> Self {
        let message = format!("There is no service `{}` here.", shown(name));
        Self::new(StatusCode::NOT_FOUND, message)
    }

    pub fn not_implemented(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_IMPLEMENTED, message)
    }

    pub fn wrong_method(method: &str, path: &str, methods: &[&str]) -> Self {
        Self::new(
            StatusCode::METHOD_NOT_ALLOWED,
            format!(
                "{} does not answer {}; send {}.",
                shown(path),
                shown(method),
                methods.join(" or ")
            ),
        )
    }

    /// A browser asks whether pages of another origin may use the server.
    pub fn origin_not_allowed(origin: &str) -> Self {
        let origin = shown(origin);
        let message = format!(
            "Pages of {origin} may not use this server; --cors-allow-origin {origin} lets them."
        );
        Self::new(StatusCode::FORBIDDEN, message)
    }

    /// A request for labels to a model without labels.
    pub fn no_classes(model: &str) -> Self {
        let message = format!(
            "{model} has no classification head, so it knows no labels; use /score or /rerank, or \
             structured_outputs.choice of /v1/chat/completions"
        );
        Self::invalid("model", message)
    }

    pub fn body_too_large(limit: u64) -> Self {
        Self::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            format!("The request body is larger than {limit} bytes."),
        )
    }

    pub fn body_memory_full() -> Self {
        Self::new(
            StatusCode::TOO_MANY_REQUESTS,
            "The bodies of other requests take all of --max-body-memory; try again later.",
        )
        .with_code("body_memory_full")
    }

    pub fn body_too_slow(limit_s: u64) -> Self {
        Self::new(
            StatusCode::REQUEST_TIMEOUT,
            format!("The request body did not arrive within {limit_s} seconds."),
        )
    }

    pub fn to_json(&self) -> String {
        #[derive(Serialize)]
        struct Envelope<'a> {
            error: &'a ErrorBody,
        }
        serde_json::to_string(&Envelope { error: &self.body }).unwrap_or_default()
    }
}

/// Returns the value of a field that a request must have.
pub fn required<T>(field: &str, value: Option<T>) -> Result<T, ApiError> {
    value.ok_or_else(|| ApiError::invalid(field, "is required"))
}

/// Returns the `type` of errors with this status.
fn kind_of(status: StatusCode) -> &'static str {
    match status {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::FORBIDDEN => "permission_error",
        StatusCode::CONFLICT => "conflict_error",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        StatusCode::INTERNAL_SERVER_ERROR => "server_error",
        StatusCode::SERVICE_UNAVAILABLE => "service_unavailable_error",
        _ => "invalid_request_error",
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = Response::new(Body::from(self.to_json()));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        match self.status {
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
                match self.retry_after_us {
                    None => {
                        headers.insert(RETRY_AFTER, HeaderValue::from_static(RETRY_AFTER_S));
                    }
                    Some(time_us) => {
                        headers.insert(RETRY_AFTER, time_us.div_ceil(1_000_000).into());
                        headers.insert(RETRY_AFTER_MS, time_us.div_ceil(1000).into());
                    }
                }
            }
            StatusCode::UNAUTHORIZED => {
                headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            _ => {}
        }
        // The layer of another API reads the error here and rewrites it in that API's shape.
        response.extensions_mut().insert(self);
        response
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    /// Returns the codes in the sources of all errors.
    fn codes() -> BTreeSet<&'static str> {
        let source = include_str!("api_error.rs");
        let (source, _) = source
            .split_once("#[cfg(test)]")
            .expect("the tests are last");
        let mut codes = BTreeSet::new();
        for source in [source, include_str!("api_error/engine.rs")] {
            let set =
                (source.split(".with_code(\"").skip(1)).filter_map(|rest| rest.split('"').next());
            let given = source
                .split("Self::not_found(")
                .skip(1)
                .filter_map(|rest| rest.split(')').next()?.rsplit('"').nth(1));
            codes.extend(set.chain(given));
        }
        codes
    }

    /// A caller looks for the code of an error in the book.
    #[test]
    fn every_code_is_in_the_book() {
        let codes = codes();
        for known in ["unknown_parameter", "file_not_found", "queue_full"] {
            assert!(codes.contains(known), "{codes:?}");
        }
        let troubleshooting = include_str!("../../../../docs/src/troubleshooting.md");
        let headings: String = troubleshooting
            .lines()
            .filter(|line| line.starts_with("### "))
            .collect();
        let reference = include_str!("../../../../docs/src/reference/api.md");
        let (_, table) = reference.split_once("\n## Errors\n").expect("it is there");
        for code in codes {
            let shown = format!("`{code}`");
            assert!(
                headings.contains(&shown),
                "troubleshooting.md has no heading with {shown}"
            );
            assert!(
                table.contains(&shown),
                "api.md does not list {shown} under Errors"
            );
        }
    }
}
