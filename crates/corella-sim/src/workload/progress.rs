//! The progress of a request, seen from outside the scheduler.

use crate::workload::{Answer, Station};

#[derive(Default)]
pub(crate) struct Progress {
    pub abort: Option<Station>,
    pub num_prompt_tokens: u32,
    pub num_output_tokens: u32,
    /// The number of the request's planned rows, up to the last step that contains it.
    pub num_rows: u32,
    pub num_seen: u32,
    /// Whether the last step that contains the request has drafts for it.
    pub has_drafts: bool,
    pub has_slot: bool,
    pub was_started: bool,
    pub has_ended: bool,
}

impl Progress {
    pub fn new(answer: &Answer) -> Self {
        Self {
            abort: answer.abort,
            num_prompt_tokens: answer.request.prompt.len() as u32,
            num_output_tokens: answer.output.len() as u32,
            ..Self::default()
        }
    }

    /// Returns whether the request is at `station`. `in_flight`: a step in flight names the request.
    pub fn is_at(&self, station: Station, in_flight: bool) -> bool {
        if self.has_ended {
            return station == Station::Ended;
        }
        let has_prompt = self.num_rows >= self.num_prompt_tokens;
        match station {
            Station::Ended => false,
            Station::Queued => !self.was_started,
            Station::Preempted => self.was_started && !self.has_slot,
            _ if !self.has_slot => false,
            Station::ChunkInFlight => in_flight && !has_prompt,
            Station::BetweenChunks => !in_flight && !has_prompt,
            Station::PromptInFlight => in_flight && has_prompt && self.num_seen == 0,
            Station::Decoding => in_flight && self.num_seen > 0,
            Station::BetweenTokens => !in_flight && self.num_seen > 0,
            Station::DraftsInFlight => in_flight && self.has_drafts,
            Station::LastTokenInFlight => in_flight && self.num_seen + 1 == self.num_output_tokens,
        }
    }
}
