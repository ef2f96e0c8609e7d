//! The engine's state at one moment, and its steps since the previous snapshot.

use std::time::Duration;

use corella_core::{PageMap, RequestView, StepId};

use crate::state::engine_stats::EngineStats;

/// The state between two steps.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineSnapshot {
    /// Time since the engine started. The other times of the snapshot count from the same start.
    pub time: Duration,
    pub stats: EngineStats,
    /// The steps that have returned since the previous snapshot, oldest first.
    pub steps: Vec<StepRecord>,
    /// The first [`MAX_REQUESTS`] live requests: running ones first, then receiving ones, then waiting ones.
    pub requests: Vec<RequestView>,
    pub page_map: PageMap,
}

/// The limit of requests that a snapshot describes.
pub const MAX_REQUESTS: usize = 128;

/// The limit of cells in a snapshot's page map.
pub const MAX_CELLS: u32 = 2048;

/// The work of a step, or of several successive steps that had to be merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepRecord {
    pub first: StepId,
    pub num_steps: u32,
    /// The time at which the last of these steps returned.
    pub ended: Duration,
    /// The total time of these steps. A step's time begins when the step before it has returned.
    pub step_time: Duration,
    pub num_prefill_tokens: u64,
    /// Tokens of requests that decode, without drafts.
    pub num_decode_tokens: u64,
    pub num_draft_tokens: u64,
    /// The largest number of requests in one of these steps.
    pub max_requests: u32,
}

/// Steps between two snapshots, in bounded memory: without room, each pair of neighbours becomes one record.
#[derive(Debug, Default)]
pub(crate) struct StepRecords(Vec<StepRecord>);

const MAX_RECORDS: usize = 128;

impl StepRecords {
    pub fn push(&mut self, record: StepRecord) {
        if self.0.len() == MAX_RECORDS {
            self.0 = self
                .0
                .chunks(2)
                .map(|pair| match *pair {
                    [earlier, later] => earlier.and(later),
                    _ => pair[0],
                })
                .collect();
        }
        self.0.push(record);
    }

    pub fn take(&mut self) -> Vec<StepRecord> {
        std::mem::take(&mut self.0)
    }
}

impl StepRecord {
    fn and(self, later: Self) -> Self {
        Self {
            first: self.first,
            num_steps: self.num_steps + later.num_steps,
            ended: later.ended,
            step_time: self.step_time + later.step_time,
            num_prefill_tokens: self.num_prefill_tokens + later.num_prefill_tokens,
            num_decode_tokens: self.num_decode_tokens + later.num_decode_tokens,
            num_draft_tokens: self.num_draft_tokens + later.num_draft_tokens,
            max_requests: self.max_requests.max(later.max_requests),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Far more steps than the records hold, step `n` with `n` tokens.
    #[test]
    fn records_are_bounded_and_lose_no_token() {
        const NUM_STEPS: u64 = 5000;
        let mut records = StepRecords::default();
        for step in 0..NUM_STEPS {
            records.push(StepRecord {
                first: StepId(step),
                num_steps: 1,
                ended: Duration::from_micros(step),
                step_time: Duration::from_micros(1),
                num_prefill_tokens: step,
                num_decode_tokens: 1,
                num_draft_tokens: 0,
                max_requests: step as u32,
            });
        }
        let records = records.take();
        assert!(records.len() <= MAX_RECORDS);
        let mut next = 0;
        for record in &records {
            assert_eq!(record.first, StepId(next));
            next += u64::from(record.num_steps);
            assert_eq!(record.ended, Duration::from_micros(next - 1));
            assert_eq!(u64::from(record.max_requests), next - 1);
            assert_eq!(record.num_decode_tokens, u64::from(record.num_steps));
        }
        assert_eq!(next, NUM_STEPS);
        let num_prefill: u64 = records.iter().map(|record| record.num_prefill_tokens).sum();
        assert_eq!(num_prefill, NUM_STEPS * (NUM_STEPS - 1) / 2);
    }
}
