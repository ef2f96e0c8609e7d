//! Counts the tokens of a model's reasoning before its answer.

/// The phase of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReplyPhase {
    /// In or before markup that reasoning may follow.
    Undecided,
    Reasoning,
    Answer,
}

/// The number of tokens so far that belong to reasoning or the markup around it.
#[derive(Debug, Default)]
pub(crate) struct ReasoningCount {
    num_tokens: u32,
    /// The number of tokens that belong to reasoning or not, depending on the next tokens.
    num_undecided: u32,
}

impl ReasoningCount {
    /// Takes a token with the phases before and after it.
    pub(crate) fn push(&mut self, before: ReplyPhase, after: ReplyPhase) {
        match (before, after) {
            (ReplyPhase::Reasoning, _) | (_, ReplyPhase::Reasoning) => {
                self.num_tokens += self.num_undecided + 1;
                self.num_undecided = 0;
            }
            (_, ReplyPhase::Undecided) => self.num_undecided += 1,
            (_, ReplyPhase::Answer) => self.num_undecided = 0,
        }
    }

    pub(crate) fn num_tokens(&self) -> u32 {
        self.num_tokens
    }
}
