//! One session on its decode node.

use alloc::boxed::Box;

use crate::session::SessionConfig;
use crate::session::heartbeat::Heartbeat;
use crate::session::message::{AbortReason, Allocate, FirstToken};
use crate::{Arithmetic, FinishReason, NodeId, RequestError, SessionId};

#[derive(Debug)]
pub(super) struct DecodeSession {
    pub node: NodeId,
    /// The prefill node's arithmetic, if it differs from this node's.
    pub arithmetic: Option<Arithmetic>,
    pub phase: DecodePhase,
    pub heartbeat: Heartbeat,
    /// The request's deadline, by this node's clock.
    pub deadline_us: Option<u64>,
    pub num_rows: u32,
    /// Output tokens that were drawn before this session.
    pub num_earlier_tokens: u32,
    /// The session of the first choice, if the prompt has several choices.
    pub siblings: Option<SessionId>,
}

#[derive(Debug)]
pub(super) enum DecodePhase {
    /// `Hello` has come, and `Allocate` has not.
    Greeting,
    /// Another choice receives the rows of the prompt. When the rows are cached, or at a timeout, this session asks the
    /// scheduler for pages.
    Waiting {
        allocate: Box<Allocate>,
        /// The time by which the first token and, after it, the other choice's rows must have come.
        by_us: u64,
        first_token: Option<Box<FirstToken>>,
    },
    /// The scheduler reserves pages. A session that ends now is kept until the scheduler answers.
    Reserving {
        has_ended: bool,
        /// The session has waited for another choice, and the prefill node already has `Allocated` for it.
        has_waited: bool,
        first_token: Option<Box<FirstToken>>,
    },
    Loading {
        /// The time by which the first token and, after it, the rows must have come.
        by_us: u64,
        has_rows: bool,
        first_token: Option<Box<FirstToken>>,
    },
    /// The load is being cancelled. Then this node computes the prompt.
    StoppingLoad,
    Decoding {
        num_output_tokens: u32,
        /// This node computes the prompt and draws the first token, too.
        draws_first: bool,
    },
    /// The scheduler has ended or refused the request.
    Finished,
    /// The session has ended, and its load may still write.
    Quarantined,
}

impl DecodeSession {
    /// Returns whether the session's stream is open.
    pub fn is_open(&self) -> bool {
        !matches!(
            self.phase,
            DecodePhase::Quarantined
                | DecodePhase::Reserving {
                    has_ended: true,
                    ..
                }
        )
    }

    pub fn deadline_us(&self, config: &SessionConfig) -> Option<u64> {
        if !self.is_open() {
            return None;
        }
        let load = match self.phase {
            DecodePhase::Waiting { by_us, .. } | DecodePhase::Loading { by_us, .. } => Some(by_us),
            _ => None,
        };
        let deadlines = [
            self.deadline_us,
            load,
            Some(self.heartbeat.due_us(config)),
            Some(self.heartbeat.lost_us(config)),
        ];
        deadlines.into_iter().flatten().min()
    }
}

/// Returns the reason for giving an ended request back to the prefill node, which continues it. `None` if the request
/// would end in the same way there.
pub(super) fn given_back(reason: &FinishReason) -> Option<AbortReason> {
    let FinishReason::Error(error) = reason else {
        return (*reason == FinishReason::Aborted).then_some(AbortReason::Cancelled);
    };
    match error {
        RequestError::NotDrawn(_)
        | RequestError::NoHiddenState(_)
        | RequestError::NotMasked(_)
        | RequestError::ObjectiveMissed(_) => None,
        RequestError::PoolExhausted { .. }
        | RequestError::PreemptedTooOften { .. }
        | RequestError::KvNotKept(_) => Some(AbortReason::OutOfPages),
        RequestError::KvNotReceived(_) => Some(AbortReason::LoadTimedOut),
        RequestError::StepFailed(reason)
        | RequestError::Elsewhere(reason)
        | RequestError::DecodeLost(reason)
        | RequestError::EngineLost(reason) => Some(AbortReason::DecodeFailed(reason.clone())),
    }
}
