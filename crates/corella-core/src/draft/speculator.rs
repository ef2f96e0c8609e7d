//! Guesses of the next tokens of one request: their source, and their number.

use alloc::vec::Vec;

use crate::draft::draft_length::DraftLength;
use crate::draft::suffix_index::SuffixIndex;
use crate::{SchedulerConfig, Speculation, TokenId};

/// The speculation of one request.
#[derive(Debug)]
pub(crate) struct Speculator {
    proposer: Proposer,
    length: DraftLength,
}

/// The source of guesses. A new source is a new variant, and only has to name tokens that may follow.
#[derive(Debug)]
enum Proposer {
    Ngram(SuffixIndex),
    /// Tokens that a draft model has drawn after the first `num_tokens` tokens. They are useless once the request has
    /// more tokens.
    Given {
        num_tokens: usize,
        drafts: Vec<TokenId>,
    },
}

impl Proposer {
    /// Appends up to `max` guesses to `drafts`. `tokens` must begin with the tokens of the last call.
    fn propose(&mut self, tokens: &[TokenId], max: usize, drafts: &mut Vec<TokenId>) {
        match self {
            Self::Given {
                num_tokens,
                drafts: given,
            } => {
                if *num_tokens == tokens.len() {
                    drafts.extend(given.iter().take(max));
                }
            }
            Self::Ngram(index) => {
                let Some(end) = index.longest_match(tokens) else {
                    return;
                };
                for at in end..end + max {
                    // A match that ends near the end of the tokens overlaps the guesses: it continues with the first
                    // guesses, so that a repeated pattern goes on.
                    let draft = match at.checked_sub(tokens.len()) {
                        None => tokens[at],
                        Some(at) => drafts[at],
                    };
                    drafts.push(draft);
                }
            }
        }
    }
}

impl Speculator {
    pub fn new(config: &SchedulerConfig) -> Option<Self> {
        let (proposer, draw_cost) = match config.speculation {
            Speculation::Off => return None,
            Speculation::Ngram => (Proposer::Ngram(SuffixIndex::default()), 0),
            Speculation::Draft { draw_cost } => {
                let (num_tokens, drafts) = (0, Vec::new());
                (Proposer::Given { num_tokens, drafts }, draw_cost)
            }
        };
        Some(Self {
            proposer,
            length: DraftLength::new(draw_cost),
        })
    }

    /// The number of guesses to ask for. For given drafts, the number was limited when they were requested.
    pub fn num_wanted(&mut self, max: u32) -> u32 {
        match &self.proposer {
            Proposer::Ngram(_) => self.length.next(max),
            Proposer::Given { drafts, .. } => max.min(drafts.len() as u32),
        }
    }

    fn has_given(&self, tokens: &[TokenId]) -> bool {
        match &self.proposer {
            Proposer::Ngram(_) => false,
            Proposer::Given { num_tokens, drafts } => {
                *num_tokens == tokens.len() && !drafts.is_empty()
            }
        }
    }

    /// Drops the given drafts after one step. `num_planned` of them were in that step.
    pub fn drop_given(&mut self, num_planned: u32) {
        if let Proposer::Given { drafts, .. } = &mut self.proposer {
            let num_given = core::mem::take(drafts).len() as u32;
            self.length.note_unused(num_given - num_planned);
        }
    }

    /// The number of guesses to ask a draft model for, at most `max`. The number is 0 if unused guesses are left.
    pub fn num_to_ask(&mut self, tokens: &[TokenId], max: u32) -> u32 {
        match max == 0 || self.has_given(tokens) {
            true => 0,
            false => self.length.next(max),
        }
    }

    /// Stores the tokens that a draft model has drawn after the first `num_tokens` tokens.
    pub fn give(&mut self, num_tokens: usize, drafts: Vec<TokenId>) {
        self.drop_given(0);
        if let Proposer::Given { .. } = self.proposer {
            self.proposer = Proposer::Given { num_tokens, drafts };
        }
    }

    /// Appends up to `max` guesses to `drafts`. `tokens` must begin with the tokens of the last call.
    pub fn propose(&mut self, tokens: &[TokenId], max: u32, drafts: &mut Vec<TokenId>) {
        self.proposer.propose(tokens, max as usize, drafts);
    }

    /// Records the number of checked drafts and of accepted ones.
    pub fn note_checked(&mut self, num_drafts: u32, num_accepted: u32) {
        self.length.note_checked(num_drafts, num_accepted);
    }
}
