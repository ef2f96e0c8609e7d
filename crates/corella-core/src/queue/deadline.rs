//! The times at which to check the latency objectives of waiting requests.

use alloc::collections::BTreeSet;

use crate::LatencyObjectives;
use crate::pace::Pace;
use crate::request_state::{RequestIndex, RequestState};

/// Requests that wait for their first admission, sorted by the time to check their objectives. Before that time, a
/// request costs no work. Empty without `enable_slo_admission`.
#[derive(Debug, Default)]
pub(crate) struct Deadlines {
    is_enabled: bool,
    /// Sorted by the latest known time at which admission would still be in time.
    by_ttft: BTreeSet<(u64, RequestIndex)>,
    by_tpot: BTreeSet<(u64, RequestIndex)>,
}

impl Deadlines {
    pub fn new(is_enabled: bool) -> Self {
        Self {
            is_enabled,
            ..Self::default()
        }
    }

    /// A request that may have become too late.
    pub fn first_late(&self, now_us: u64, expected_tpot_us: u64) -> Option<RequestIndex> {
        let is_late = |&&(late_us, _): &&(u64, RequestIndex)| late_us < now_us;
        let by_ttft = self.by_ttft.first().filter(is_late);
        let is_too_slow = |&&(tpot_us, _): &&(u64, RequestIndex)| tpot_us < expected_tpot_us;
        let late = by_ttft.or_else(|| self.by_tpot.first().filter(is_too_slow));
        late.map(|&(_, index)| index)
    }

    /// Watches a request that begins to wait for its first admission.
    pub fn watch(&mut self, index: RequestIndex, state: &mut RequestState, pace: &Pace) {
        if self.is_enabled {
            let late_us = late_us(state, 0, pace);
            self.set(index, state, Some(late_us));
        }
    }

    /// Keeps watching a request that would not be late now. `num_cached` tokens of its prompt are cached.
    pub fn watch_on(
        &mut self,
        index: RequestIndex,
        state: &mut RequestState,
        num_cached: u64,
        pace: &Pace,
    ) {
        let late_us = late_us(state, num_cached, pace).max(pace.now_us());
        self.set(index, state, Some(late_us));
    }

    pub fn forget(&mut self, index: RequestIndex, state: &mut RequestState) {
        if self.is_enabled {
            self.set(index, state, None);
        }
    }

    fn set(&mut self, index: RequestIndex, state: &mut RequestState, late_us: Option<u64>) {
        let LatencyObjectives { ttft_us, tpot_us } = state.request().objectives;
        if let Some(tpot_us) = tpot_us {
            match late_us {
                Some(_) => self.by_tpot.insert((tpot_us, index)),
                None => self.by_tpot.remove(&(tpot_us, index)),
            };
        }
        if ttft_us.is_none() {
            return;
        }
        if let Some(before) = state.late_us() {
            self.by_ttft.remove(&(before, index));
        }
        state.set_late_us(late_us);
        if let Some(late_us) = late_us {
            self.by_ttft.insert((late_us, index));
        }
    }
}

/// The latest time at which a waiting request can be admitted and still meet its TTFT objective, at the present speed
/// of prompts.
fn late_us(state: &RequestState, num_cached: u64, pace: &Pace) -> u64 {
    let ttft_us = state.request().objectives.ttft_us.unwrap_or(u64::MAX);
    let due_us = state.request().arrival_us.saturating_add(ttft_us);
    let num_tokens = u64::from(state.num_prompt_tokens()) - num_cached;
    due_us.saturating_sub(pace.prefill_us(num_tokens))
}
