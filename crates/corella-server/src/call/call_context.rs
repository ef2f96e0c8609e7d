//! The caller of a request.

use std::sync::Arc;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName};
use corella_core::LatencyObjectives;
use corella_engine::TraceScope;

use crate::call::account::Account;
use crate::call::cached_prompt::prefers_cached;
use crate::call::request_id::RequestName;
use crate::call::request_line::RequestLine;
use crate::config::serve_config::ServeConfig;
use crate::wire::api_error::ApiError;

/// Marks the requests of batches, whose clients do not wait.
#[derive(Clone, Copy)]
pub struct Background;

/// Marks requests that are checked and not computed.
#[derive(Clone, Copy)]
pub struct OnlyCheck;

/// The sender's number for a request, from 0. The request's default seed depends on this number.
#[derive(Clone, Copy)]
pub struct RequestNumber(pub u64);

/// The facts about the caller that the layers before a handler have found.
#[derive(Clone)]
pub struct CallContext {
    pub name: RequestName,
    /// `None` if the server requires no key.
    pub account: Option<Arc<Account>>,
    /// `None` if the request is not traced.
    pub trace: Option<TraceScope>,
    /// `None` if the call has no line in the log.
    pub line: Option<Arc<RequestLine>>,
    /// Whether requests of waiting clients come first.
    pub is_background: bool,
    /// Whether the caller asks to explain the prompt's hits and misses in the prefix cache.
    pub explains_cache: bool,
    /// Whether the request is checked and not computed.
    pub is_only_check: bool,
    /// The sender's number for the request. With `None`, the server numbers the call.
    pub number: Option<u64>,
    /// Whether the caller wants an answer only if the prompt is cached.
    pub prefers_cached: bool,
    /// The objectives of the headers, for a request whose body has none.
    objectives: LatencyObjectives,
}

/// The headers of llm-d's clients for the fields `ttft_slo_ms` and `tpot_slo_ms`, and the headers' old names.
const TTFT: [&str; 2] = ["x-llm-d-slo-ttft-ms", "x-slo-ttft-ms"];
const TPOT: [&str; 2] = ["x-llm-d-slo-tpot-ms", "x-slo-tpot-ms"];
/// The header that asks for an explanation. Its only value is `cache`.
const EXPLAIN: HeaderName = HeaderName::from_static("x-corella-explain");

impl CallContext {
    /// Returns the owner of objects that the call leaves on the server: the name of its API key.
    pub fn owner(&self) -> Option<Arc<str>> {
        let account = self.account.as_ref();
        account.map(|account| account.name().into())
    }

    /// Returns the priority of the call's requests, if the caller may not choose it.
    pub fn priority(&self) -> Option<i32> {
        match (self.is_background, &self.account) {
            (true, _) => Some(i32::MAX),
            (false, account) => account.as_ref().and_then(|account| account.priority()),
        }
    }

    /// Completes the objectives of a body by those of the headers.
    pub fn complete(&self, objectives: &mut LatencyObjectives) {
        objectives.ttft_us = objectives.ttft_us.or(self.objectives.ttft_us);
        objectives.tpot_us = objectives.tpot_us.or(self.objectives.tpot_us);
    }

    /// Refuses models that the key may not use, as if they did not exist.
    pub fn check_model(&self, config: &ServeConfig, model: &str) -> Result<(), ApiError> {
        self.check_names(config.names_like(model), model)
    }

    /// Refuses `model` if the key may use none of `names`, as if it did not exist.
    pub fn check_names<'a>(
        &self,
        mut names: impl Iterator<Item = &'a str>,
        model: &str,
    ) -> Result<(), ApiError> {
        let account = self.account.as_ref();
        match account.is_none_or(|account| names.any(|name| account.may_use(name))) {
            true => Ok(()),
            false => Err(ApiError::model_not_allowed(model)),
        }
    }
}

impl<S: Sync> FromRequestParts<S> for CallContext {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        let name = parts.extensions.get::<RequestName>().cloned();
        let name = name.ok_or_else(|| ApiError::engine("The request has no name."))?;
        let account = parts.extensions.get::<Arc<Account>>().cloned();
        let trace = parts.extensions.get::<TraceScope>().cloned();
        Ok(Self {
            name,
            account,
            trace,
            line: parts.extensions.get::<Arc<RequestLine>>().cloned(),
            is_background: parts.extensions.get::<Background>().is_some(),
            explains_cache: parts
                .headers
                .get(EXPLAIN)
                .is_some_and(|wanted| wanted == "cache"),
            is_only_check: parts.extensions.get::<OnlyCheck>().is_some(),
            number: parts
                .extensions
                .get::<RequestNumber>()
                .map(|number| number.0),
            prefers_cached: prefers_cached(&parts.headers),
            objectives: LatencyObjectives {
                ttft_us: objective_us(&parts.headers, TTFT),
                tpot_us: objective_us(&parts.headers, TPOT),
            },
        })
    }
}

/// Reads a number of milliseconds from the first of these headers that has one. Gateways check their headers
/// themselves, so other values have no effect.
fn objective_us(headers: &HeaderMap, names: [&str; 2]) -> Option<u64> {
    names.into_iter().find_map(|name| {
        let ms: u32 = headers.get(name)?.to_str().ok()?.trim().parse().ok()?;
        (ms > 0).then(|| u64::from(ms) * 1000)
    })
}
