//! Sampling parameters. The core passes them to executors, and reads only whether they ask for log-probabilities of the
//! prompt, or its hidden state.

use alloc::sync::Arc;

use crate::TokenRules;

/// The parameters of a draw. A draw is a pure function of the logits, these parameters and the position, so that
/// batching, chunking and preemption cannot change it.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Divides the logits; 0 takes the most likely token (greedy).
    pub temperature: f32,
    /// Only the k most likely tokens are drawn; 0 keeps all.
    pub top_k: u32,
    /// Only tokens of the smallest set with at least this total probability are drawn; 1 keeps all.
    pub top_p: f32,
    /// Only tokens at least this likely, relative to the most likely one, are drawn; 0 keeps all.
    pub min_p: f32,
    /// Subtracted from the logits of tokens that occur in the output.
    pub presence_penalty: f32,
    /// Subtracted from the logit of a token once for each occurrence in the output.
    pub frequency_penalty: f32,
    /// Divides the positive logits of tokens that occur in the prompt or the output, and multiplies
    /// the negative ones; 1 is off.
    pub repetition_penalty: f32,
    pub seed: u64,
    /// The index of the choice among the `n` choices of an API call. Seed and index together key the random generator.
    pub choice: u32,
    /// Report the log-probability of the drawn token and of this many alternatives.
    pub logprobs: Option<u32>,
    /// The rules about single tokens, shared by all choices of an API call.
    pub rules: Option<Arc<TokenRules>>,
    /// Report the log-probability of every prompt token except the first, and of this many alternatives to each.
    pub prompt_logprobs: Option<u32>,
    /// Report only a hidden state of the prompt: no token is drawn, even with a `max_tokens` above 0, and no
    /// log-probability is reported.
    pub pooling: Option<Pooling>,
    /// The position at which the second text of a prompt begins, for encoders that distinguish two texts.
    pub second_text: Option<u32>,
}

impl SamplingParams {
    pub const GREEDY: Self = Self {
        temperature: 0.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        repetition_penalty: 1.0,
        seed: 0,
        choice: 0,
        logprobs: None,
        rules: None,
        prompt_logprobs: None,
        pooling: None,
        second_text: None,
    };

    /// Whether the caller asks for a result that only the computation of the prompt gives: its log-probabilities, or a
    /// hidden state.
    pub fn wants_prompt_outputs(&self) -> bool {
        self.prompt_logprobs.is_some() || self.pooling.is_some()
    }

    /// Whether the logits of a position depend on the tokens before it.
    pub fn has_penalties(&self) -> bool {
        self.presence_penalty != 0.0
            || self.frequency_penalty != 0.0
            || self.repetition_penalty != 1.0
    }
}

/// The rule that makes one hidden state from the states of a sequence after the model's final norm (`last_hidden_state`
/// in Transformers).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// The hidden state of the last token, which attends to all tokens.
    LastToken,
    /// The mean over all tokens. The states are added one by one in order, so that the bits do not depend on how the
    /// sequence is cut into spans.
    Mean,
    /// The hidden state of the first token (CLS), which attends to other tokens only in an encoder. One span computes
    /// the sequence.
    FirstToken,
    /// The largest value of each element over all tokens. One span computes the sequence.
    Max,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_penalty_alone_makes_logits_depend_on_tokens_before() {
        assert!(!SamplingParams::GREEDY.has_penalties());
        for (presence_penalty, frequency_penalty, repetition_penalty) in
            [(0.5, 0.0, 1.0), (0.0, -0.5, 1.0), (0.0, 0.0, 1.1)]
        {
            let params = SamplingParams {
                presence_penalty,
                frequency_penalty,
                repetition_penalty,
                ..SamplingParams::GREEDY
            };
            assert!(params.has_penalties(), "{params:?}");
        }
    }
}
