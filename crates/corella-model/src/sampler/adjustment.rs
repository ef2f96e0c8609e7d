//! What a request changes about logits before a token is drawn: masks, token rules, penalties.

use corella_core::{TokenId, TokenRules};

use super::SampleRequest;

/// Changes the logits in the order of vLLM: what must not be drawn, biases, penalties.
pub fn adjust(logits: &mut [f32], request: &SampleRequest<'_>) {
    let params = request.params;
    mask(logits, request);
    if let Some(rules) = &params.rules {
        apply_rules(logits, rules, request.output());
    }
    if params.has_penalties() {
        penalise(logits, request);
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

fn penalise(logits: &mut [f32], request: &SampleRequest<'_>) {
    const PENDING: u32 = 1 << 31;
    let params = request.params;
    let mut counts = vec![0u32; logits.len()];
    for (position, &token) in request.history.iter().enumerate() {
        if let Some(count) = counts.get_mut(token as usize) {
            let is_output = position >= request.num_prompt_tokens as usize;
            *count = (*count | PENDING) + u32::from(is_output);
        }
    }
    for &token in request.history {
        let token = token as usize;
        if counts.get(token).is_none_or(|count| count & PENDING == 0) {
            continue;
        }
        counts[token] &= !PENDING;
        let logit = &mut logits[token];
        if *logit > 0.0 {
            *logit /= params.repetition_penalty;
        } else {
            *logit *= params.repetition_penalty;
        }
        if counts[token] > 0 {
            *logit -= params.frequency_penalty * counts[token] as f32;
            *logit -= params.presence_penalty;
        }
    }
}
