//! The numbers of tokens that an answer reports.

use std::sync::Arc;

use corella_core::{CacheUse, Retention};
use serde::Serialize;

use crate::wire::cache_explanation::{CacheExplanation, CachedTokens};

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    pub prompt_tokens: u64,
    pub completion_tokens: u64,
    pub total_tokens: u64,
    pub prompt_tokens_details: PromptTokensDetails,
    /// Present only for replies of conversations and resumed answers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completion_tokens_details: Option<CompletionTokensDetails>,
    /// The computed tokens that the cache retains. Anthropic's endpoint reports them.
    #[serde(skip)]
    pub cache_creation: CacheCreation,
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
            cache_creation: CacheCreation::default(),
            prefix_cache: None,
            completion_tokens_details: num_reasoning_tokens.map(|reasoning_tokens| {
                CompletionTokensDetails {
                    reasoning_tokens: reasoning_tokens.into(),
                    resumed_tokens: 0,
                }
            }),
        }
    }

    /// Reports tokens of the answer that another server has drawn.
    pub fn set_resumed(&mut self, num_tokens: u32) {
        if num_tokens > 0 {
            let details = self.completion_tokens_details.get_or_insert_default();
            details.resumed_tokens = num_tokens.into();
        }
    }

    pub fn reasoning_tokens(&self) -> u64 {
        let details = self.completion_tokens_details.as_ref();
        details.map_or(0, |details| details.reasoning_tokens)
    }
}

/// The computed tokens of a prompt that the cache retains, by the lifetime of their mark.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CacheCreation {
    ephemeral_5m_input_tokens: u64,
    ephemeral_1h_input_tokens: u64,
}

impl CacheCreation {
    /// The longest lifetime that counts as five minutes.
    const SHORT_US: u64 = 300_000_000;

    /// The tokens after the cached ones. `marks` are sorted by length, and longer ones have no longer lifetimes.
    pub fn new(cache_use: CacheUse, marks: &[Retention]) -> Self {
        let num_cached = cache_use.num_cached_tokens;
        let num_retained = cache_use.num_retained_tokens;
        let is_long = |mark: &&Retention| mark.ttl_us > Self::SHORT_US;
        let num_long = marks
            .iter()
            .filter(is_long)
            .map(|mark| mark.num_tokens)
            .max();
        let end_of_long = num_long.unwrap_or(0).min(num_retained).max(num_cached);
        Self {
            ephemeral_5m_input_tokens: num_retained.saturating_sub(end_of_long).into(),
            ephemeral_1h_input_tokens: (end_of_long - num_cached).into(),
        }
    }

    pub fn add(&mut self, other: Self) {
        self.ephemeral_5m_input_tokens += other.ephemeral_5m_input_tokens;
        self.ephemeral_1h_input_tokens += other.ephemeral_1h_input_tokens;
    }

    pub fn total(self) -> u64 {
        self.ephemeral_5m_input_tokens + self.ephemeral_1h_input_tokens
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
    /// The answer's tokens from another server, which `completion_tokens` does not count.
    #[serde(skip_serializing_if = "is_zero")]
    pub resumed_tokens: u64,
}

// serde passes a reference.
#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_zero(count: &u64) -> bool {
    *count == 0
}
