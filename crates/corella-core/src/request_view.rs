//! The state of a request for people who observe the engine: counts, and no token.

use crate::RequestId;
use crate::request_state::{Leaving, Phase, RequestState};

/// The present state of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestStatus {
    /// The request has not started.
    Waiting,
    /// The request had started, was preempted, and waits to resume.
    Preempted,
    /// Another node or host memory fills the request's pages, or has filled them and the request waits for a slot.
    Receiving,
    /// The prompt or, after a preemption, all known tokens are being computed.
    Prefill,
    Decode,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestView {
    pub id: RequestId,
    pub status: RequestStatus,
    /// By the clock of [`Scheduler::schedule`](crate::Scheduler::schedule).
    pub arrival_us: u64,
    pub num_prompt_tokens: u32,
    /// Prompt tokens that were cached at the request's first start.
    pub num_cached_tokens: u32,
    /// Tokens whose KV is in the request's pages.
    pub num_computed_tokens: u32,
    pub num_output_tokens: u32,
    pub max_tokens: u32,
    pub num_pages: usize,
    pub num_preemptions: u32,
}

impl RequestView {
    pub(crate) fn new(state: &RequestState) -> Self {
        let status = match state.phase() {
            Phase::Running if state.is_prefilling() => RequestStatus::Prefill,
            Phase::Running => RequestStatus::Decode,
            Phase::Receiving | Phase::Arrived => RequestStatus::Receiving,
            Phase::Waiting if state.num_preemptions() == 0 => RequestStatus::Waiting,
            Phase::Waiting | Phase::Leaving(Leaving::Preempted | Leaving::Reset) => {
                RequestStatus::Preempted
            }
            Phase::Leaving(Leaving::Finished) => RequestStatus::Decode,
        };
        Self {
            id: state.id(),
            status,
            arrival_us: state.request().arrival_us,
            num_prompt_tokens: state.num_prompt_tokens(),
            num_cached_tokens: state.num_cached_tokens(),
            num_computed_tokens: state.num_computed_tokens(),
            num_output_tokens: state.num_output_tokens(),
            max_tokens: state.max_tokens(),
            num_pages: state.tables().num_pages(),
            num_preemptions: state.num_preemptions(),
        }
    }
}
