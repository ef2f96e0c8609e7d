//! Fields of OpenAI's and vLLM's APIs that change the answer and that this server does not do.
//!
//! Ignoring one would give a wrong answer that looks right, so each is refused by name, unless
//! its value asks for what happens anyway. Fields that cannot change the answer (`user`,
//! `metadata`, `store`, …) are accepted and not looked at.

use serde::Deserialize;
use serde_json::Value;

use crate::api_error::ApiError;
use crate::request_body::RequestBody;

type Harmless = fn(&Value) -> bool;

macro_rules! unsupported_fields {
    ($($field:ident: $harmless:expr,)*) => {
        #[derive(Deserialize)]
        #[serde(expecting = "a JSON object")]
        struct UnsupportedFields {
            $($field: Option<Value>,)*
        }

        /// The first field present with a value that matters is the error.
        pub fn refuse_unsupported_fields(body: &RequestBody) -> Result<(), ApiError> {
            let fields: UnsupportedFields = body.parse()?;
            $(if let Some(value) = &fields.$field {
                let harmless: Harmless = $harmless;
                if !harmless(value) {
                    return Err(ApiError::unsupported(stringify!($field)));
                }
            })*
            Ok(())
        }
    };
}

unsupported_fields! {
    tools: is_empty,
    tool_choice: |value| value == "none" || value == "auto",
    functions: is_empty,
    function_call: |value| value == "none" || value == "auto",
    response_format: |value| value["type"] == "text",
    logit_bias: is_empty,
    modalities: |value| value.as_array().is_some_and(|kinds| kinds.iter().all(|kind| kind == "text")),
    audio: never,
    prediction: never,
    web_search_options: never,
    suffix: |value| value == "",
    best_of: |value| *value == 1,
    prompt_embeds: never,
    prompt_logprobs: never,
    use_beam_search: is_false,
    length_penalty: |value| value.as_f64() == Some(1.0),
    bad_words: is_empty,
    allowed_token_ids: is_empty,
    logits_processors: is_empty,
    guided_json: never,
    guided_regex: never,
    guided_choice: never,
    guided_grammar: never,
    structured_outputs: never,
    truncate_prompt_tokens: never,
    return_tokens_as_token_ids: is_false,
    return_token_ids: is_false,
    kv_transfer_params: never,
    chat_template: never,
    documents: is_empty,
    mm_processor_kwargs: is_empty,
}

fn never(_: &Value) -> bool {
    false
}

fn is_false(value: &Value) -> bool {
    *value == false
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    }
}
