//! A request's changes of logits before a draw: masks, token rules, penalties.

use corella_core::{TokenId, TokenRules};

use super::SampleRequest;

/// Changes the logits in the order of vLLM: bans, biases, penalties.
pub fn adjust(logits: &mut [f32], request: &SampleRequest<'_>, counts: &mut TokenCounts) {
    let params = request.params;
    mask(logits, request);
    if let Some(rules) = &params.rules {
        apply_rules(logits, rules, request.output());
    }
    if params.has_penalties() {
        counts.penalise(logits, request);
    }
}

fn mask(logits: &mut [f32], request: &SampleRequest<'_>) {
    if request.output().len() < request.min_tokens as usize {
        for &token in request.masked_until_min_tokens {
            forbid(logits, token);
        }
    }
    if let Some(allowed) = request.allowed {
        for (word, logits) in logits.chunks_mut(32).enumerate() {
            let allowed = allowed.get(word).copied().unwrap_or(0);
            for (bit, logit) in logits.iter_mut().enumerate() {
                if allowed >> bit & 1 == 0 {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
    }
}

fn apply_rules(logits: &mut [f32], rules: &TokenRules, output: &[TokenId]) {
    if let Some(allowed) = rules.allowed() {
        let mut from = 0;
        for &token in allowed {
            let token = (token as usize).min(logits.len());
            logits[from..token].fill(f32::NEG_INFINITY);
            from = (token + 1).min(logits.len());
        }
        logits[from..].fill(f32::NEG_INFINITY);
    }
    for token in rules.banned_after(output) {
        forbid(logits, token);
    }
    for &(token, bias) in rules.bias() {
        if let Some(logit) = logits.get_mut(token as usize) {
            *logit += bias;
        }
    }
}

fn forbid(logits: &mut [f32], token: TokenId) {
    if let Some(logit) = logits.get_mut(token as usize) {
        *logit = f32::NEG_INFINITY;
    }
}

/// The number of occurrences of each token in a history. The counters of the whole vocabulary are kept from draw to
/// draw. Between draws all counters are zero: a draw changes few counters, and clears only these.
#[derive(Debug, Default)]
pub struct TokenCounts(Vec<u32>);

impl TokenCounts {
    fn penalise(&mut self, logits: &mut [f32], request: &SampleRequest<'_>) {
        const OCCURS: u32 = 1 << 31;
        let params = request.params;
        if self.0.len() < logits.len() {
            self.0.resize(logits.len(), 0);
        }
        let counts = &mut self.0[..logits.len()];
        for (position, &token) in request.history.iter().enumerate() {
            if let Some(count) = counts.get_mut(token as usize) {
                let is_output = position >= request.num_prompt_tokens as usize;
                *count = (*count | OCCURS) + u32::from(is_output);
            }
        }
        for &token in request.history {
            let count = counts.get_mut(token as usize).map_or(0, std::mem::take);
            // A token's first occurrence has cleared its count.
            if count == 0 {
                continue;
            }
            let num_in_output = count & !OCCURS;
            let logit = &mut logits[token as usize];
            if *logit > 0.0 {
                *logit /= params.repetition_penalty;
            } else {
                *logit *= params.repetition_penalty;
            }
            if num_in_output > 0 {
                *logit -= params.frequency_penalty * num_in_output as f32;
                *logit -= params.presence_penalty;
            }
        }
    }
}
