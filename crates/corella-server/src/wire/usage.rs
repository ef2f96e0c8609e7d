//! The numbers of tokens that an answer reports.

use std::sync::Arc;

use serde::Serialize;

use crate::wire::cache_explanation::{CacheExplanation, CachedTokens};

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    pub prompt_tokens: u64,
    pub completion_tokens: u64,
    pub total_tokens: u64,
    pub prompt_tokens_details: PromptTokensDetails,
    /// Present only for replies of conversations.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completion_tokens_details: Option<CompletionTokensDetails>,
    /// Present only at the end of an answer whose caller has asked for it. Endpoints put it beside the usage.
    #[serde(skip)]
    pub prefix_cache: Option<Arc<CacheExplanation>>,
}

impl Usage {
    pub fn new(
        num_prompt_tokens: u32,
        num_cached_tokens: u32,
        num_output_tokens: u32,
        num_reasoning_tokens: Option<u32>,
    ) -> Self {
        let (prompt_tokens, completion_tokens) =
            (num_prompt_tokens.into(), num_output_tokens.into());
        Self {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
            prompt_tokens_details: PromptTokensDetails {
                cached_tokens: num_cached_tokens.into(),
                cached_tokens_by_medium: CachedTokens::default(),
            },
            prefix_cache: None,
            completion_tokens_details: num_reasoning_tokens.map(|reasoning_tokens| {
                CompletionTokensDetails {
                    reasoning_tokens: reasoning_tokens.into(),
                }
            }),
        }
    }

    pub fn reasoning_tokens(&self) -> u64 {
        let details = self.completion_tokens_details.as_ref();
        details.map_or(0, |details| details.reasoning_tokens)
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PromptTokensDetails {
    pub cached_tokens: u64,
    /// Known at the end of an answer, and left out if all cached tokens were in memory.
    #[serde(skip_serializing_if = "CachedTokens::are_in_memory")]
    pub cached_tokens_by_medium: CachedTokens,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CompletionTokensDetails {
    pub reasoning_tokens: u64,
}
