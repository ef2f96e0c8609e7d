//! The masks of the requests whose answers are constrained.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use corella_core::{
    Batch, FinishReason, InputToken, Request, RequestError, RequestId, Scheduler, SlotId, TokenId,
};
use corella_model::TokenMask;

use crate::mask::mask_thread::{Answer, MadeMask, MaskThread, Next, WantedMask};
use crate::token_constraint::TokenConstraint;
use crate::wake::doorbell::Doorbell;

/// Asks for the masks of one step at a time. For a masked request, the scheduler plans no step before the newest token
/// is drawn. So the batch has all tokens that the mask depends on.
pub(crate) struct MaskTable {
    thread: MaskThread,
    requests: HashMap<RequestId, Masked>,
    /// The slots with masked requests, in the step whose masks were last asked for.
    asked: Vec<(SlotId, RequestId)>,
    is_awaiting: bool,
}

struct Masked {
    num_prompt_tokens: u32,
    /// `None` while the thread has the answer.
    answer: Option<Answer>,
    /// Tokens that another node drew, until the first mask is requested.
    drawn: Vec<TokenId>,
    /// The number of output tokens that the answer has taken.
    num_taken: u32,
    /// The mask of the next token. It is kept until that token is in the request's history, because
    /// a step's draw is dropped when the request starts over.
    mask: Option<Box<[u32]>>,
}

impl MaskTable {
    pub(crate) fn start(doorbell: Doorbell) -> io::Result<Self> {
        Ok(Self {
            thread: MaskThread::start(doorbell)?,
            requests: HashMap::new(),
            asked: Vec::new(),
            is_awaiting: false,
        })
    }

    pub(crate) fn insert(&mut self, request: &Request, constraint: &Arc<dyn TokenConstraint>) {
        let masked = Masked {
            num_prompt_tokens: request.prompt.len() as u32,
            answer: Some(Answer::new(constraint.clone(), &request.stopping)),
            drawn: request.output.clone(),
            num_taken: 0,
            mask: None,
        };
        self.requests.insert(request.id, masked);
    }

    pub(crate) fn remove(&mut self, request: RequestId) {
        self.requests.remove(&request);
    }

    /// Whether masks of a step are being made. Meanwhile no other step's masks may be asked for.
    pub(crate) fn is_awaiting(&self) -> bool {
        self.is_awaiting
    }

    /// Asks for the missing masks of a step.
    pub(crate) fn ask(&mut self, batch: &Batch, request_of: impl Fn(SlotId) -> RequestId) {
        assert!(!self.is_awaiting(), "masks of two steps are asked for");
        self.asked.clear();
        if self.requests.is_empty() {
            return;
        }
        let mut wanted = Vec::new();
        for span in batch.spans.iter().filter(|span| span.yields.draws()) {
            let request = request_of(span.slot);
            let Some(masked) = self.requests.get_mut(&request) else {
                continue;
            };
            self.asked.push((span.slot, request));
            let num_tokens = span.start + span.tokens.len() as u32;
            let num_output = num_tokens - masked.num_prompt_tokens;
            if masked.mask.is_some() && masked.num_taken == num_output {
                continue;
            }
            masked.mask = None;
            let mut tokens = std::mem::take(&mut masked.drawn);
            masked.num_taken += tokens.len() as u32;
            if masked.num_taken < num_output {
                let newest = batch.span_tokens(span).last();
                let Some(&InputToken::Known(token)) = newest else {
                    panic!("a masked request is planned behind a token that is not known");
                };
                tokens.push(token);
                masked.num_taken += 1;
            }
            assert_eq!(
                masked.num_taken, num_output,
                "a masked request has drawn tokens without masks"
            );
            let answer = masked.answer.take();
            wanted.push(WantedMask {
                request,
                answer: answer.expect("the thread keeps no answer between two steps"),
                tokens,
            });
        }
        if !wanted.is_empty() {
            self.thread.want(wanted);
            self.is_awaiting = true;
        }
    }

    /// Takes the finished masks, and ends the requests whose masks failed.
    pub(crate) fn take_made(&mut self, scheduler: &mut Scheduler) {
        let Some(made) = self.thread.take_made() else {
            return;
        };
        self.is_awaiting = false;
        for MadeMask {
            request,
            answer,
            next,
        } in made
        {
            // The request may have ended meanwhile.
            let Some(masked) = self.requests.get_mut(&request) else {
                continue;
            };
            masked.answer = Some(answer);
            match next {
                Ok(Next::Masked(mask)) => masked.mask = Some(mask),
                Ok(Next::Nothing) => {
                    scheduler.end_request(request, FinishReason::EndToken);
                }
                Err(reason) => {
                    let error = RequestError::NotMasked(reason.into());
                    scheduler.end_request(request, FinishReason::Error(error));
                }
            }
        }
    }

    /// The masks of the step for which masks were last asked. Requests that have ended have no mask, and their draws
    /// are dropped.
    pub(crate) fn masks(&self) -> Vec<TokenMask> {
        let mask = |&(slot, request): &(SlotId, RequestId)| {
            let allowed = self.requests.get(&request)?.mask.clone()?;
            Some(TokenMask { slot, allowed })
        };
        self.asked.iter().filter_map(mask).collect()
    }
}
