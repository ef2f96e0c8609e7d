//! Errors of the engine and of a server that cannot serve now: the request itself may be right.

use std::fmt;

use axum::http::StatusCode;
use corella_core::{
    AdmissionError, MissedObjective, NOT_MASKED, NOTHING_ALLOWED, ObjectiveKind, RequestError,
};

use super::ApiError;

impl ApiError {
    /// A caller asks for a free slot, and none is free.
    pub fn no_slot(num_slots: usize) -> Self {
        Self::new(
            StatusCode::SERVICE_UNAVAILABLE,
            format!("All {num_slots} slots (--max-num-seqs) are in use; a request would wait."),
        )
        .with_code("no_slot")
    }

    /// The answer to a request that is only checked, if it has no fault.
    pub fn only_checked() -> Self {
        Self::new(StatusCode::NO_CONTENT, "The request can be answered.")
    }

    pub fn draining() -> Self {
        Self::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "The server is shutting down and takes no new requests.",
        )
        .with_code("draining")
    }

    pub fn loading() -> Self {
        Self::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "The server is still loading the model.",
        )
        .with_code("loading")
    }

    /// The model could not be loaded, or its engine has stopped. A later request loads it again.
    pub fn model_unavailable(model: &str, reason: &str) -> Self {
        Self::new(
            StatusCode::SERVICE_UNAVAILABLE,
            format!("The model `{model}` cannot be used: {reason}."),
        )
        .with_param("model")
        .with_code("model_unavailable")
    }

    /// A request has waited for its model in vain.
    pub fn load_timeout(model: &str, limit_s: u64) -> Self {
        Self::new(
            StatusCode::SERVICE_UNAVAILABLE,
            format!(
                "The model `{model}` was not loaded within {limit_s} seconds (--model-load-timeout)."
            ),
        )
        .with_param("model")
        .with_code("load_timeout")
    }

    /// The question needs a loaded model, and this one is not loaded. The question itself does not load it.
    pub fn model_asleep(model: &str) -> Self {
        Self::new(
            StatusCode::SERVICE_UNAVAILABLE,
            format!(
                "The model `{model}` is not loaded now; the next request for an answer loads it."
            ),
        )
        .with_code("model_asleep")
    }

    /// The operator asks to unload a model that is never unloaded.
    pub fn model_stays() -> Self {
        Self::conflict(
            "The model of this server stays loaded: --keep-alive lets it be unloaded, without options that need it, \
             such as --role or --enable-lora.",
        )
    }

    /// The drain timeout ended before the request was complete.
    pub fn cut_off() -> Self {
        Self::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "The server is shutting down and has ended this request before it was complete.",
        )
        .with_code("cut_off")
    }

    pub fn not_ready(reason: &str) -> Self {
        Self::no_service(&format!("The engine is not serving: {reason}."))
    }

    /// `reason` is a sentence.
    pub fn no_service(reason: &str) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, reason).with_code("not_ready")
    }

    pub fn conflict(message: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, message)
    }

    /// The engine gave up on a request that it had accepted.
    pub fn engine(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message.into()).with_code("engine_error")
    }

    /// `prompt_field` is the field that holds the prompt at this endpoint.
    pub fn admission(error: &AdmissionError, prompt_field: &str) -> Self {
        match error {
            AdmissionError::QueueFull { .. }
            | AdmissionError::QueuedTokensFull { .. }
            | AdmissionError::NoRoom { .. } => Self::new(
                StatusCode::TOO_MANY_REQUESTS,
                format!("The server is busy: {error}. Try again shortly."),
            )
            .with_code("queue_full"),
            AdmissionError::ObjectiveMissed(missed) => Self::too_late(missed),
            AdmissionError::NoDecodeNode => Self::new(
                StatusCode::SERVICE_UNAVAILABLE,
                format!("The server cannot serve this now: {error}. Try again shortly."),
            )
            .with_code("no_decode_node"),
            AdmissionError::ContextExceeded {
                num_prompt_tokens,
                max_tokens,
                max_model_len,
            } => {
                let message = format!(
                    "This model's maximum context length is {max_model_len} tokens. However, you \
                     requested {} tokens ({num_prompt_tokens} in {prompt_field}, {max_tokens} to \
                     generate). Reduce {prompt_field} or max_tokens.",
                    u64::from(*num_prompt_tokens) + u64::from(*max_tokens),
                );
                Self::too_long(message, prompt_field)
            }
            AdmissionError::PoolExceeded { .. } | AdmissionError::StepExceeded { .. } => {
                Self::too_long(format!("This can never run here: {error}."), prompt_field)
            }
            AdmissionError::EmptyPrompt => Self::invalid(prompt_field, error.to_string()),
            AdmissionError::ZeroMaxTokens => Self::invalid("max_tokens", "must be at least 1"),
            AdmissionError::OutputComplete { .. } => {
                Self::invalid("resume_token_ids", error.to_string())
            }
            AdmissionError::DuplicateId(_) => Self::engine(error.to_string()),
        }
    }

    /// Tokenising the prompt stopped after `at_least` tokens.
    pub fn prompt_too_long(prompt_field: &str, at_least: usize, max_model_len: u32) -> Self {
        let message = format!(
            "This model's maximum context length is {max_model_len} tokens. However, you requested \
             at least {at_least} tokens in {prompt_field}. Reduce {prompt_field}.",
        );
        Self::too_long(message, prompt_field)
    }

    /// Each message has at least one token, so messages are counted before they are rendered.
    pub fn too_many_messages(num_messages: usize, max_model_len: u32) -> Self {
        let message = format!(
            "This model's maximum context length is {max_model_len} tokens, and {num_messages} \
             messages have more. Reduce messages.",
        );
        Self::too_long(message, "messages")
    }

    fn too_long(message: String, prompt_field: &str) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
            .with_param(prompt_field)
            .with_code("context_length_exceeded")
    }

    pub fn request(error: &RequestError) -> Self {
        match error {
            RequestError::ObjectiveMissed(missed) => Self::too_late(missed),
            RequestError::DecodeLost(_) => Self::new(
                StatusCode::SERVICE_UNAVAILABLE,
                format!("The request could not be finished: {error}."),
            )
            .with_code("decode_lost"),
            // Other nodes report errors as text, so the error is recognised by its ending.
            error if error.to_string().ends_with(NOTHING_ALLOWED) => Self::new(
                StatusCode::BAD_REQUEST,
                "The request leaves no token that may come next in its answer: check the answer's format, \
                     allowed_token_ids, bad_words, stop_token_ids and min_tokens.",
            )
            .with_code("nothing_to_draw"),
            error if error.to_string().contains(NOT_MASKED) => Self::grammar_failed(error),
            error => Self {
                is_lost_engine: matches!(error, RequestError::EngineLost(_)),
                ..Self::engine(format!("The request could not be finished: {error}."))
            },
        }
    }

    /// A grammar compiles, but matching it takes too many steps or too much memory.
    pub fn grammar_failed(error: impl fmt::Display) -> Self {
        Self::new(
            StatusCode::BAD_REQUEST,
            format!(
                "The answer cannot be held to its format: {error}. A simpler schema or grammar may work."
            ),
        )
        .with_code("grammar_failed")
    }

    fn too_late(missed: &MissedObjective) -> Self {
        let param = match missed.kind {
            ObjectiveKind::Ttft => "ttft_slo_ms",
            ObjectiveKind::Tpot => "tpot_slo_ms",
        };
        Self::new(
            StatusCode::TOO_MANY_REQUESTS,
            format!("The server is busy: {missed}. Try again shortly."),
        )
        .with_param(param)
        .with_code("slo_unreachable")
    }
}
