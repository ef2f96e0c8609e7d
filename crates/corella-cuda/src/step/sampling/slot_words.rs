//! The device's data about a slot's request.

use corella_core::{SamplingParams, SlotStart, TokenRules};

use crate::device::DevicePointer;
use crate::kernels::sample::SlotParams;

pub fn slot_params(start: &SlotStart, rules: DevicePointer) -> SlotParams {
    let sampling: &SamplingParams = &start.sampling;
    let token_rules = sampling.rules.as_deref();
    let mut flags = 0;
    if sampling.logprobs.is_some() {
        flags |= SlotParams::HAS_LOGPROBS;
    }
    if sampling.has_penalties() {
        flags |= SlotParams::HAS_PENALTIES;
    }
    if token_rules.is_some_and(|rules| rules.allowed().is_some()) {
        flags |= SlotParams::HAS_ALLOWED;
    }
    SlotParams {
        seed: sampling.seed,
        rules,
        choice: sampling.choice,
        temperature: sampling.temperature,
        top_k: sampling.top_k,
        top_p: sampling.top_p,
        min_p: sampling.min_p,
        presence_penalty: sampling.presence_penalty,
        frequency_penalty: sampling.frequency_penalty,
        repetition_penalty: sampling.repetition_penalty,
        num_prompt_tokens: start.num_prompt_tokens,
        min_tokens: start.min_tokens,
        flags,
        num_top: sampling.logprobs.unwrap_or(0),
        num_prompt_top: sampling.prompt_logprobs.unwrap_or(0),
        num_masked_until_min_tokens: start.masked_until_min_tokens.len() as u32,
        num_biases: token_rules.map_or(0, |rules| rules.bias().len()) as u32,
        num_banned: token_rules.map_or(0, |rules| rules.banned().len()) as u32,
    }
}

/// The part of the device's data about a slot that has no fixed size, in the order of `SlotParams::rules`.
pub fn rule_words(start: &SlotStart, vocab_size: usize) -> Vec<u32> {
    let no_rules = TokenRules::new();
    let rules = start.sampling.rules.as_deref().unwrap_or(&no_rules);
    let mut words = Vec::new();
    if let Some(allowed) = rules.allowed() {
        words.resize(vocab_size.div_ceil(32), 0);
        for &token in allowed
            .iter()
            .filter(|&&token| (token as usize) < vocab_size)
        {
            words[token as usize / 32] |= 1 << (token % 32);
        }
    }
    words.extend_from_slice(&start.masked_until_min_tokens);
    // Several biases of a token are added in their given order.
    let mut bias = rules.bias().to_vec();
    bias.sort_by_key(|&(token, _)| token);
    words.extend(bias.iter().map(|&(token, _)| token));
    words.extend(bias.iter().map(|&(_, bias)| bias.to_bits()));
    let banned = rules.banned();
    if !banned.is_empty() {
        let mut first = 0;
        for sequence in banned {
            words.push(first);
            first += sequence.len() as u32;
        }
        words.push(first);
        words.extend(banned.iter().flatten());
    }
    words
}
