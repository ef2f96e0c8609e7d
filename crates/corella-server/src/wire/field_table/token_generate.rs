//! The fields of `/inference/v1/generate`, vLLM's endpoint with tokens in and out.

use serde_json::Value;

use super::sampling::{
    CONTROL, DRAW, MODEL, PENALTIES, QUEUE, RESUME_TOKEN_IDS, STREAM, STREAM_OPTIONS_FIELD,
    STRUCTURED_OUTPUTS,
};
use super::schema::{any_object, count, num_choices, num_logprobs, object, tokens};
use super::{Field, FieldTable, no_effect, read, refuse, refused};

pub static BODY: FieldTable =
    FieldTable::body("TokenGenerateRequest").of(&[OWN, MODEL, STREAM, QUEUE, refused::GENERATING]);

/// The member `sampling_params`: vLLM's `SamplingParams`.
pub static SAMPLING_PARAMS: FieldTable =
    FieldTable::object("TokenSamplingParams").of(&[SAMPLING, DRAW, PENALTIES, CONTROL]);

static OWN: &[Field] = &[
    read("token_ids", tokens).required().about("The prompt."),
    read("sampling_params", |_| object(&SAMPLING_PARAMS)).about("How tokens are drawn."),
    STREAM_OPTIONS_FIELD,
    RESUME_TOKEN_IDS,
    refuse("features", has_no_members),
];

static SAMPLING: &[Field] = &[
    read("n", |limits| num_choices(limits).or(1)).about("The number of choices."),
    read("max_tokens", count).about("The default is the rest of the context."),
    read("logprobs", num_logprobs)
        .about("Returns the log-probability of each token, with this many alternatives."),
    read("prompt_logprobs", num_logprobs).about(
        "Returns the log-probability of each token of the prompt, with this many alternatives. \
         Not with a stream.",
    ),
    STRUCTURED_OUTPUTS,
    read("extra_args", any_object)
        .about("Its kv_transfer_params are those of the body. Others are refused."),
    no_effect("detokenize", "the answer has no text"),
    no_effect("spaces_between_special_tokens", "the answer has no text"),
    no_effect("output_kind", "stream decides"),
    no_effect("skip_clone", "a process of vLLM copies its parameters"),
    refuse("skip_reading_prefix_cache", |value| value == false),
    refuse("flat_logprobs", |value| value == false),
    refuse("truncate_prompt_tokens", refused::never),
    refuse("thinking_token_budget", refused::never),
    refuse("repetition_detection", refused::never),
    refuse("logprob_token_ids", |value| {
        *value == Value::Array(Vec::new())
    }),
];

/// Whether an object has no members but empty objects and `null`.
fn has_no_members(value: &Value) -> bool {
    let is_empty = |value: &Value| match value {
        Value::Object(members) => members.is_empty(),
        value => value.is_null(),
    };
    let members = value.as_object();
    members.is_some_and(|members| members.values().all(is_empty))
}
