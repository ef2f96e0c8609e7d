//! The lines of OpenAI's batch files: requests and their results.
//!
//! Source: <https://platform.openai.com/docs/api-reference/batch/request-input>.

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

/// The endpoints that a line may call: they answer a POST with one JSON object.
const ENDPOINTS: [&str; 11] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
    "/v2/rerank",
    "/score",
    "/rerank",
];

/// A line of the input.
#[derive(Debug, PartialEq, Deserialize)]
pub struct RequestLine {
    /// The output's line for this request has the same id.
    #[serde(deserialize_with = "custom_id")]
    pub custom_id: String,
    method: String,
    pub url: String,
    pub body: Map<String, Value>,
}

/// Names the field in the error, since ids are often numbers by mistake.
fn custom_id<'de, D: Deserializer<'de>>(deserializer: D) -> Result<String, D::Error> {
    let id = String::deserialize(deserializer);
    id.map_err(|error| D::Error::custom(format!("`custom_id`: {error}")))
}

/// A line of the output.
#[derive(Debug, Serialize)]
struct ResultLine<'a> {
    id: String,
    custom_id: &'a str,
    /// The server's answer or error response.
    response: Option<&'a ResultResponse>,
    /// Why the server gave no answer.
    error: Option<&'a ResultError>,
}

/// Returns the result line of a request, with its line break. `count` tells apart results without a request id.
pub fn result_line(
    custom_id: &str,
    result: &Result<ResultResponse, ResultError>,
    count: usize,
) -> String {
    let name = match result {
        Ok(response) => response.request_id.clone(),
        Err(_) => format!("{:08x}{count:08x}", std::process::id()),
    };
    let line = ResultLine {
        id: format!("batch_req_{name}"),
        custom_id,
        response: result.as_ref().ok(),
        error: result.as_ref().err(),
    };
    // Compact JSON has no line breaks.
    let mut line = serde_json::to_string(&line).unwrap_or_default();
    line.push('\n');
    line
}

#[derive(Debug, Serialize)]
pub struct ResultResponse {
    pub status_code: u16,
    pub request_id: String,
    pub body: Value,
}

#[derive(Debug, Serialize)]
pub struct ResultError {
    pub code: &'static str,
    pub message: String,
}

impl ResultError {
    /// The line's path cannot be called.
    pub fn invalid_url(message: String) -> Self {
        let code = "invalid_url";
        Self { code, message }
    }
}

impl ResultResponse {
    /// Makes the result of a call of `path` from the answer's body, or from the reason why the body was cut off.
    pub fn new(
        path: &str,
        status_code: u16,
        request_id: String,
        body: Result<impl AsRef<[u8]>, String>,
    ) -> Result<Self, ResultError> {
        let body = body.map_err(|message| ResultError {
            code: "answer_cut_off",
            message,
        })?;
        let body = serde_json::from_slice(body.as_ref()).map_err(|_| ResultError {
            code: "answer_not_json",
            message: format!("{path} does not answer with JSON"),
        })?;
        Ok(Self {
            status_code,
            request_id,
            body,
        })
    }

    /// Returns whether the queue was full.
    pub fn is_queue_full(&self) -> bool {
        self.status_code == 429 && self.code() == "queue_full"
    }

    /// Returns whether a rate limit of the caller's key is used up.
    pub fn is_rate_limited(&self) -> bool {
        self.status_code == 429 && self.code() == "rate_limit_exceeded"
    }

    /// Returns whether the model could not be loaded.
    pub fn is_model_unavailable(&self) -> bool {
        self.status_code == 503
            && ["model_unavailable", "load_timeout"]
                .iter()
                .any(|code| self.code() == code)
    }

    fn code(&self) -> &Value {
        &self.body["error"]["code"]
    }
}

/// The required members of a line in an earlier run's output.
#[derive(Deserialize)]
pub(crate) struct EarlierLine {
    pub custom_id: String,
}

impl RequestLine {
    /// The error names the line's fault.
    pub fn parse(line: &[u8]) -> Result<Self, String> {
        let line: Self = serde_json::from_slice(line).map_err(|error| match error.is_data() {
            // Each line is parsed alone, so the place would always be `line 1`.
            true => without_place(&error.to_string()).to_owned(),
            false => format!("is not JSON: {}", without_place(&error.to_string())),
        })?;
        if line.method != "POST" {
            return Err(format!("`method` must be POST, not `{}`", line.method));
        }
        let path = line.url.as_str();
        if !(path.starts_with("/v1/") || ENDPOINTS.contains(&path)) {
            return Err(format!(
                "`url` must be an endpoint such as /v1/chat/completions, not `{path}`"
            ));
        }
        Ok(line)
    }

    /// Refuses a path that does not answer a POST with one JSON object.
    pub fn check_endpoint(&self) -> Result<(), String> {
        let path = self.url.as_str();
        match ENDPOINTS.contains(&path) {
            true => Ok(()),
            false => {
                let all = ENDPOINTS.join(", ");
                Err(format!("`url` must be one of {all}, not `{path}`"))
            }
        }
    }

    /// Returns why the line's request cannot be sent.
    pub fn refusal(&self) -> Option<ResultError> {
        let streams = self
            .body
            .get("stream")
            .is_some_and(|stream| *stream == true);
        streams.then(|| ResultError {
            code: "invalid_request",
            message: "`stream` must be false: each answer of a batch is one line".to_owned(),
        })
    }
}

fn without_place(message: &str) -> &str {
    message
        .rfind(" at line ")
        .map_or(message, |at| &message[..at])
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str =
        r#"{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"prompt":"x"}}"#;

    #[test]
    fn what_is_wrong_with_a_line_is_named() {
        assert_eq!(RequestLine::parse(GOOD.as_bytes()).unwrap().custom_id, "a");
        for (from, to, reason) in [
            ("}}", "}", "is not JSON"),
            (r#""custom_id":"a","#, "", "custom_id"),
            (r#""a""#, "7", "expected a string"),
            ("POST", "GET", "`method` must be POST, not `GET`"),
            ("/v1/completions", "/reset_prefix_cache", "`url` must be"),
            (r#"{"prompt":"x"}"#, "[]", "expected a map"),
        ] {
            let line = GOOD.replace(from, to);
            let error = RequestLine::parse(line.as_bytes()).unwrap_err();
            assert!(error.contains(reason), "{line}: {error}");
            assert!(!error.contains("line 1"), "{error}");
        }
    }

    #[test]
    fn only_whole_answers_can_be_lines() {
        let with = |stream: &str| {
            let line = GOOD.replace(r#""x""#, &format!(r#""x","stream":{stream}"#));
            RequestLine::parse(line.as_bytes()).unwrap().refusal()
        };
        assert_eq!(with("true").unwrap().code, "invalid_request");
        assert!(with("false").is_none());
        assert!(with("null").is_none());
    }
}
