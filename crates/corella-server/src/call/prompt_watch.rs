//! Watches one prompt of a call: how much of it was cached, why the rest was not, and which pages to remember.

use std::sync::Arc;

use corella_core::{CacheUse, FinishReason, RequestOutput, TokenId};
use corella_text::Tokenizer;

use crate::call::metrics::CallTimer;
use crate::call::prompt_memory::{PromptMemory, RecalledPrompt};
use crate::text::sampling_fields::GenerationParams;
use crate::wire::cache_explanation::{CacheExplanation, CachedTokens, MissCause, PromptPlace};

/// Each of an explanation's two texts has at most so many tokens and characters. They are the text before the first
/// computed token, and the text after it.
const MAX_TEXT_TOKENS: usize = 32;
const MAX_TEXT_CHARS: usize = 48;

/// The watch over a prompt and the answer of its first choice.
pub struct PromptWatch {
    memory: Arc<PromptMemory>,
    prompt: RecalledPrompt,
    takes_hits: bool,
    /// The prompt's tokens, if the caller wants an explanation.
    explained: Option<Box<[TokenId]>>,
    /// The cached tokens, and those of them that were fetched. `None` before the prompt is computed.
    cached: Option<CacheUse>,
    /// The tokens after the last whole page.
    tail: Vec<TokenId>,
}

impl PromptWatch {
    pub fn new(
        memory: &Arc<PromptMemory>,
        key: Option<&str>,
        params: &GenerationParams,
        tokens: &[TokenId],
    ) -> Self {
        let mut namespace = params.namespace.clone();
        namespace.lora = params
            .adapter
            .as_ref()
            .map(|adapter| adapter.name().clone());
        let prompt = memory.recall(key, &namespace, tokens);
        let tail = tokens.chunks_exact(memory.page_size()).remainder();
        Self {
            memory: memory.clone(),
            prompt,
            takes_hits: params.sampling.prompt_logprobs.is_none(),
            explained: params.explains_cache.then(|| tokens.into()),
            cached: None,
            tail: tail.to_vec(),
        }
    }

    /// Adds the answer's tokens that another server has drawn. Their rows are computed with the prompt's.
    pub fn resume(&mut self, drawn: &[TokenId]) {
        for &token in drawn {
            self.push(token);
        }
    }

    pub fn handle_output(&mut self, output: &RequestOutput, timer: &CallTimer) {
        let is_computed = output.sample.is_some() || output.finish == Some(FinishReason::Length);
        if self.cached.is_none() && is_computed {
            self.cached = Some(output.cache_use);
            self.memory.remember(&mut self.prompt);
            let num_cached = output.cache_use.num_cached_tokens;
            let num_computed = output.num_prompt_tokens - num_cached;
            timer.count_miss(self.cause(num_cached), num_computed);
        }
        if let Some(sample) = &output.sample {
            self.push(sample.token);
        }
    }

    /// Adds a token of the answer. The rows of all tokens before it are computed by now, so a page that these tokens
    /// fill is complete only now. The list of pages grows with the answer, whose length is unknown.
    fn push(&mut self, token: TokenId) {
        if self.tail.len() == self.memory.page_size() {
            self.prompt.add_page(&self.tail);
            self.tail.clear();
        }
        self.tail.push(token);
    }

    fn cause(&self, num_cached: u32) -> MissCause {
        self.memory.cause(&self.prompt, num_cached, self.takes_hits)
    }

    /// The explanation, if the caller wants one and the prompt is computed.
    pub fn explanation(&self, tokenizer: &Tokenizer) -> Option<CacheExplanation> {
        let tokens = self.explained.as_deref()?;
        let cache_use = self.cached?;
        let num_cached = cache_use.num_cached_tokens;
        Some(CacheExplanation {
            prompt_tokens: tokens.len() as u32,
            cached_tokens: num_cached,
            cached_tokens_by_medium: CachedTokens::new(cache_use),
            cause: self.cause(num_cached).name(),
            computed_from: place(tokenizer, tokens, num_cached),
        })
    }
}

impl Drop for PromptWatch {
    fn drop(&mut self) {
        // Without an output, nothing is known to be computed.
        if self.cached.is_some() {
            self.memory.remember(&mut self.prompt);
        }
    }
}

/// Returns the texts around `position` in a prompt.
fn place(tokenizer: &Tokenizer, tokens: &[TokenId], position: u32) -> PromptPlace {
    let (before, after) = tokens.split_at(tokens.len().min(position as usize));
    let before = &before[before.len().saturating_sub(MAX_TEXT_TOKENS)..];
    let after = &after[..after.len().min(MAX_TEXT_TOKENS)];
    // Tokens that are not in the vocabulary have no text.
    let text = |tokens| tokenizer.decode(tokens, false).unwrap_or_default();
    let before: String = text(before);
    let num_left_out = before.chars().count().saturating_sub(MAX_TEXT_CHARS);
    PromptPlace {
        position,
        before: before.chars().skip(num_left_out).collect(),
        after: text(after).chars().take(MAX_TEXT_CHARS).collect(),
    }
}
