//! How a token is drawn. Carried through the core, read by executors.

/// A draw is a pure function of (logits, these parameters, position), so that batching,
/// chunking and preemption cannot change it.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 is greedy.
    pub temperature: f32,
    /// Keep the k most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set with at least this probability; 1 keeps all.
    pub top_p: f32,
    /// Keep tokens at least this likely relative to the most likely one; 0 keeps all.
    pub min_p: f32,
    /// Subtracted once from tokens that the output already holds.
    pub presence_penalty: f32,
    /// Subtracted per occurrence in the output.
    pub frequency_penalty: f32,
    /// Divides (or multiplies, when negative) logits of tokens in prompt or output; 1 is off.
    pub repetition_penalty: f32,
    pub seed: u64,
    /// Which of the `n` choices of one API call this is; keys the generator beside the seed.
    pub choice: u32,
    /// Report log-probabilities: of the drawn token and of this many alternatives.
    pub logprobs: Option<u32>,
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
    };

    /// Whether the logits of a position depend on the tokens before it.
    pub fn has_penalties(&self) -> bool {
        self.presence_penalty != 0.0
            || self.frequency_penalty != 0.0
            || self.repetition_penalty != 1.0
    }
}
