//! The members that answers of several endpoints begin with.

use corella_core::TokenId;
use serde::Serialize;
use serde_json::Value;

use crate::text::scored_prompt::PromptLogprobs;
use crate::wire::cache_explanation::CacheExplanation;
use crate::wire::usage::Usage;

/// The common first fields of every response object.
#[derive(Clone, Debug)]
pub struct ResponseHead {
    pub id: String,
    pub created: u64,
    pub model: String,
    /// Present only in answers that another server continues.
    pub kv_transfer_params: Option<Value>,
}

/// A complete response, or one chunk of a stream.
#[derive(Serialize)]
pub struct ResponseObject<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: &'a [C],
    /// With `include_usage`, OpenAI sends `null` in every chunk of a stream but the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<&'a Usage>>,
    /// Present only in complete answers and in the last chunk of a choice, if the caller has asked for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefix_cache: Option<&'a CacheExplanation>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kv_transfer_params: Option<&'a Value>,
    /// Present only in answers of `/v1/chat/completions`, as in vLLM: completions have them in each
    /// choice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<PromptLogprobs<'a>>,
    /// Present only in answers of `/v1/chat/completions`, too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<&'a [TokenId]>,
}

impl ResponseHead {
    pub fn object<'a, C>(
        &'a self,
        object: &'static str,
        choices: &'a [C],
        usage: Option<Option<&'a Usage>>,
    ) -> ResponseObject<'a, C> {
        ResponseObject {
            id: &self.id,
            object,
            created: self.created,
            model: &self.model,
            choices,
            usage,
            prefix_cache: None,
            kv_transfer_params: self.kv_transfer_params.as_ref(),
            prompt_logprobs: None,
            prompt_token_ids: None,
        }
    }
}
