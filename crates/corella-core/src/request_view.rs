//! What people who look at the engine see of a request: counts, and no token.

use alloc::vec::Vec;

use crate::request_state::{Leaving, RequestIndex, Stage};
use crate::{RequestId, Scheduler};

/// What becomes of a request at this moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestStatus {
    /// It has not started.
    Waiting,
    /// It had started, and waits to go on.
    Preempted,
    /// Another node or host memory fills its pages, or has filled them and it waits for a slot.
    Receiving,
    /// Its prompt is being computed, or what it had when it was preempted.
    Prefill,
    Decode,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestView {
    pub id: RequestId,
    pub status: RequestStatus,
    /// On the clock of [`Scheduler::schedule`].
    pub arrival_us: u64,
    pub num_prompt_tokens: u32,
    /// Prompt tokens that were cached when it first started.
    pub num_cached_tokens: u32,
    /// Tokens whose KV is in its pages.
    pub num_computed_tokens: u32,
    pub num_output_tokens: u32,
    pub max_tokens: u32,
    pub num_pages: usize,
    pub num_preemptions: u32,
}

impl Scheduler {
    /// The first `limit` live requests: those that run, by rank, then those that receive KV, then
    /// those that wait, in the order of the queue.
    pub fn request_views(&self, limit: usize) -> Vec<RequestView> {
        let running = self.running.iter();
        let indices = running
            .chain(self.receipts.iter())
            .chain(self.waiting.iter());
        indices
            .take(limit)
            .map(|index| self.request_view(index))
            .collect()
    }

    fn request_view(&self, index: RequestIndex) -> RequestView {
        let state = &self.requests[index];
        let status = match state.stage {
            Stage::Running if state.is_prefilling() => RequestStatus::Prefill,
            Stage::Running => RequestStatus::Decode,
            Stage::Receiving | Stage::Arrived => RequestStatus::Receiving,
            Stage::Waiting if state.num_preemptions == 0 => RequestStatus::Waiting,
            Stage::Waiting | Stage::Leaving(Leaving::Preempted | Leaving::Reset) => {
                RequestStatus::Preempted
            }
            Stage::Leaving(Leaving::Finished) => RequestStatus::Decode,
        };
        RequestView {
            id: state.request.id,
            status,
            arrival_us: state.request.arrival_us,
            num_prompt_tokens: state.num_prompt_tokens,
            num_cached_tokens: state.num_cached_tokens.unwrap_or(0),
            num_computed_tokens: state.num_computed_tokens,
            num_output_tokens: state.num_output_tokens(),
            max_tokens: state.max_tokens,
            num_pages: state.tables.num_pages(),
            num_preemptions: state.num_preemptions,
        }
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;
    use crate::{Request, SchedulerConfig};

    #[test]
    fn views_tell_who_runs_who_receives_and_who_waits() {
        let mut config = SchedulerConfig::new(64, 4, 64);
        config.max_num_seqs = 1;
        let mut scheduler = Scheduler::new(config).unwrap();
        let request = |id| {
            let prompt = (0..9).map(|token| 100 * id as u32 + token).collect();
            Request::greedy(RequestId(id), prompt, 8)
        };
        scheduler.add_requests(vec![request(1)]).unwrap();
        scheduler.add_requests(vec![request(2)]).unwrap();
        scheduler.schedule(0).unwrap();
        scheduler.reserve(request(3), 1000).unwrap();
        let views = scheduler.request_views(10);
        let statuses: Vec<_> = { views.iter() }
            .map(|view| (view.id.0, view.status, view.num_pages))
            .collect();
        assert_eq!(
            statuses,
            [
                // The whole prompt is in the step in flight, so what comes next is a decode.
                (1, RequestStatus::Decode, 3),
                (3, RequestStatus::Receiving, 3),
                (2, RequestStatus::Waiting, 0),
            ]
        );
        assert_eq!(views[0].num_prompt_tokens, 9);
        assert_eq!(views[0].max_tokens, 8);
        assert_eq!(scheduler.request_views(2), views[..2]);
    }
}
