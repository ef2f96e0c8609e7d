//! One session on its decode node.

use alloc::boxed::Box;

use crate::session::SessionConfig;
use crate::session::message::{AbortReason, FirstToken};
use crate::session::pulse::Pulse;
use crate::{FinishReason, NodeId, RequestError};

#[derive(Debug)]
pub(super) struct DecodeSession {
    pub node: NodeId,
    pub stage: Stage,
    pub pulse: Pulse,
    /// The request's deadline, by this node's clock.
    pub deadline_us: Option<u64>,
    pub num_rows: u32,
}

#[derive(Debug)]
pub(super) enum Stage {
    /// The other node has said who it is, and not yet what it wants.
    Greeting,
    /// The scheduler was asked for pages. A session that ends meanwhile is kept until the answer
    /// comes.
    Reserving {
        has_ended: bool,
    },
    Loading {
        /// The time by which the first token must have come or, once it is there, all rows.
        by_us: u64,
        has_rows: bool,
        first_token: Option<Box<FirstToken>>,
    },
    Decoding {
        num_output_tokens: u32,
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
            self.stage,
            Stage::Quarantined | Stage::Reserving { has_ended: true }
        )
    }

    /// The earliest of all that the session waits for.
    pub fn deadline_us(&self, config: &SessionConfig) -> Option<u64> {
        if !self.is_open() {
            return None;
        }
        let load = match self.stage {
            Stage::Loading { by_us, .. } => Some(by_us),
            _ => None,
        };
        let deadlines = [
            self.deadline_us,
            load,
            Some(self.pulse.beat_us(config)),
            Some(self.pulse.lost_us(config)),
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
        RequestError::NotDrawn(_) | RequestError::ObjectiveMissed(_) => None,
        RequestError::PoolExhausted { .. } | RequestError::PreemptedTooOften { .. } => {
            Some(AbortReason::OutOfPages)
        }
        RequestError::KvNotReceived(_) => Some(AbortReason::LoadTimedOut),
        RequestError::StepFailed(reason)
        | RequestError::Elsewhere(reason)
        | RequestError::EngineLost(reason) => Some(AbortReason::DecodeFailed(reason.clone())),
    }
}
