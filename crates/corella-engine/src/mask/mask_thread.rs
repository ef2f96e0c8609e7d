//! The thread that makes masks while the executor computes the step that needs them.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::thread;

use corella_core::{NOTHING_ALLOWED, RequestId, StoppingCriteria, TokenId};
use crossbeam_channel::Sender;

use crate::log::panic_message::panic_message;
use crate::token_constraint::{Allowed, ConstrainedAnswer, TokenConstraint};
use crate::wake::doorbell::{Doorbell, loop_channel};

/// The loop's end of the thread. When it is dropped, the thread finishes its requests and ends. The masks of a step are
/// requested and returned together, so that each side is woken once.
pub(crate) struct MaskThread {
    wanted: Sender<Vec<WantedMask>>,
    made: Receiver<Vec<MadeMask>>,
}

/// A request for the mask of one request's next token.
pub(crate) struct WantedMask {
    pub(crate) request: RequestId,
    pub(crate) answer: Answer,
    /// The tokens that have been drawn since the last mask.
    pub(crate) tokens: Vec<TokenId>,
}

pub(crate) struct MadeMask {
    pub(crate) request: RequestId,
    pub(crate) answer: Answer,
    pub(crate) next: Result<Next, String>,
}

/// The continuation of an answer.
pub(crate) enum Next {
    /// Only the tokens of this mask may follow.
    Masked(Box<[u32]>),
    /// No token may follow: the answer is complete.
    Nothing,
}

/// The constrained answer of one request. The thread owns the answer while it makes the answer's mask. Otherwise the
/// loop owns it.
pub(crate) struct Answer {
    state: AnswerState,
    /// The tokens that may end the request.
    end_tokens: Vec<TokenId>,
}

enum AnswerState {
    New(Arc<dyn TokenConstraint>),
    Begun(Box<dyn ConstrainedAnswer>),
}

impl MaskThread {
    pub(crate) fn start(doorbell: Doorbell) -> io::Result<Self> {
        let (wanted, jobs) = crossbeam_channel::bounded::<Vec<WantedMask>>(1);
        let (report, made) = loop_channel(1, doorbell);
        thread::Builder::new()
            .name("corella-masks".to_owned())
            .spawn(move || {
                while let Ok(wanted) = jobs.recv() {
                    if !report.send(wanted.into_iter().map(make).collect()) {
                        return;
                    }
                }
            })?;
        Ok(Self { wanted, made })
    }

    /// Asks for the masks of a step. The masks of the previous step must have been taken.
    pub(crate) fn want(&self, masks: Vec<WantedMask>) {
        let is_sent = self.wanted.send(masks).is_ok();
        assert!(is_sent, "the thread that makes masks has ended");
    }

    /// Returns the masks of the step when all have been made, in the order in which they were requested.
    pub(crate) fn take_made(&self) -> Option<Vec<MadeMask>> {
        self.made.try_recv().ok()
    }
}

/// Makes one mask. An error or a panic in a constraint is reported to its request alone.
fn make(wanted: WantedMask) -> MadeMask {
    let WantedMask {
        request,
        mut answer,
        tokens,
    } = wanted;
    let next = catch_unwind(AssertUnwindSafe(|| answer.next(&tokens)));
    MadeMask {
        request,
        answer,
        next: next.unwrap_or_else(|panic| Err(panic_message(&*panic))),
    }
}

impl Answer {
    pub(crate) fn new(constraint: Arc<dyn TokenConstraint>, stopping: &StoppingCriteria) -> Self {
        let ends = stopping.end_token_ids.iter();
        Self {
            state: AnswerState::New(constraint),
            end_tokens: ends.chain(&stopping.stop_token_ids).copied().collect(),
        }
    }

    fn next(&mut self, tokens: &[TokenId]) -> Result<Next, String> {
        if let AnswerState::New(constraint) = &self.state {
            self.state = AnswerState::Begun(constraint.start()?);
        }
        let AnswerState::Begun(answer) = &mut self.state else {
            unreachable!("an answer has just begun");
        };
        for &token in tokens {
            answer.push(token)?;
        }
        let Allowed { tokens, may_end } = answer.allowed()?;
        let has_tokens = tokens.iter().any(|&word| word != 0);
        match (has_tokens, may_end) {
            (true, false) => Ok(Next::Masked(tokens)),
            (true, true) => Ok(Next::Masked(with_bits(tokens, &self.end_tokens))),
            (false, true) => Ok(Next::Nothing),
            (false, false) => Err(NOTHING_ALLOWED.to_owned()),
        }
    }
}

fn with_bits(words: Box<[u32]>, tokens: &[TokenId]) -> Box<[u32]> {
    let mut words = words.into_vec();
    for &token in tokens {
        let word = token as usize / 32;
        if word >= words.len() {
            words.resize(word + 1, 0);
        }
        words[word] |= 1 << (token % 32);
    }
    words.into()
}
