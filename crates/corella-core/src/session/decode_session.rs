//! One session on its decode node.

use alloc::boxed::Box;

use crate::session::SessionConfig;
use crate::session::heartbeat::Heartbeat;
use crate::session::message::{AbortReason, Allocate, FirstToken};
use crate::{Arithmetic, FinishReason, NodeId, RequestError, SessionId};

#[derive(Debug)]
pub(super) struct DecodeSession {
    pub node: NodeId,
    /// The prefill node's arithmetic, if it is not this node's.
    pub arithmetic: Option<Arithmetic>,
    pub phase: DecodePhase,
    pub heartbeat: Heartbeat,
    /// The request's deadline, by this node's clock.
    pub deadline_us: Option<u64>,
    pub num_rows: u32,
    /// Output tokens that were drawn before this session.
    pub num_earlier_tokens: u32,
    /// The session of the prompt's first choice, if it has several.
    pub siblings: Option<SessionId>,
}

#[derive(Debug)]
pub(super) enum DecodePhase {
    /// The other node has said who it is, and not yet what it wants.
    Greeting,
    /// Another choice receives the rows of the prompt. When they can be found, or that takes too
    /// long, the scheduler is asked for pages.
    Waiting {
        allocate: Box<Allocate>,
        /// The time by which the first token must have come or, once it is there, the other choice.
        by_us: u64,
        first_token: Option<Box<FirstToken>>,
    },
    /// The scheduler was asked for pages. A session that ends meanwhile is kept until the answer
    /// comes.
    Reserving {
        has_ended: bool,
        /// The prefill node was told to go ahead when the session began to wait for another choice.
        has_waited: bool,
        first_token: Option<Box<FirstToken>>,
    },
    Loading {
        /// The time by which the first token must have come or, once it is there, all rows.
        by_us: u64,
        has_rows: bool,
        first_token: Option<Box<FirstToken>>,
    },
    /// This node computes the prompt, once its load writes no more.
    StoppingLoad,
    Decoding {
        num_output_tokens: u32,
        /// The prefill node has left the prompt and the first token to this one.
        draws_first: bool,
    },
    /// The scheduler has ended the request, or has not taken it.
    Finished,
    /// The session is over, and its load may still write.
    Quarantined,
}

impl DecodeSession {
    /// Whether the session still has its stream.
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

    /// The earliest of all that the session waits for.
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

/// Why a request that ended like this should continue on the prefill node; `None` if it would end
/// in the same way there, so that this is its end.
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
