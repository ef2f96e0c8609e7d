//! Retention of the prefixes that requests have marked.

use crate::cache::kv_cache::retention::RetentionLimit;
use crate::request_state::RequestIndex;
use crate::{Scheduler, SchedulerConfig};

impl SchedulerConfig {
    /// Snapshots may be retained in the same share as pages.
    fn retention_limit(&self) -> RetentionLimit {
        let state = self.recurrent_state.as_ref();
        let num_snapshots = state.map_or(0, |state| u64::from(state.num_snapshots));
        let num_retained = num_snapshots * u64::from(self.max_retained_pages);
        RetentionLimit {
            num_pages: self.max_retained_pages as usize,
            num_snapshots: (num_retained / u64::from(self.num_pages)) as usize,
        }
    }
}

impl Scheduler {
    /// Retains the marked beginnings of a computed prompt. A prefix that is retained already gets a later end.
    pub(super) fn retain_prefixes(&mut self, index: RequestIndex) {
        let wanted = self.requests[index].take_retentions();
        if !self.config.enable_prefix_caching || self.config.max_retained_pages == 0 {
            return;
        }
        let limit = self.config.retention_limit();
        let last_returned = self.inflight.last_returned();
        for retention in wanted {
            let state = &self.requests[index];
            let num_tokens = retention.num_tokens.min(state.num_prompt_tokens());
            let tokens = &state.tokens()[..num_tokens as usize];
            let namespace = &state.request().namespace;
            let path = self.kv.settled_path(namespace, tokens, last_returned);
            let end_us = self.pace.now_us().saturating_add(retention.ttl_us);
            if self.kv.retain(&path, end_us, limit) {
                let num_tokens = path.len() as u32 * self.config.page_size;
                self.requests[index].note_retained(num_tokens);
            } else {
                self.journal.counters().num_refused_retentions += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;
    use alloc::vec::Vec;

    use super::*;
    use crate::{BatchOutput, Request, RequestId, Retention, Sample};

    fn retaining(id: u64, retention: Retention, output: Vec<u32>) -> Request {
        Request {
            output,
            retentions: vec![retention],
            ..Request::greedy(RequestId(id), vec![1, 2, 3, 4], 9)
        }
    }

    /// The second request computes only its output.
    #[test]
    fn a_prompt_that_is_cached_whole_is_retained() {
        let mut config = SchedulerConfig::new(8, 2, 64);
        config.max_retained_pages = 4;
        let mut scheduler = Scheduler::new(config).unwrap();
        let retention = Retention {
            num_tokens: 4,
            ttl_us: 500,
        };
        for (id, output, now_us) in [(0, vec![], 100), (1, vec![7], 1000)] {
            let request = retaining(id, retention, output);
            scheduler.add_requests(vec![request]).unwrap();
            let batch = scheduler.schedule(now_us).unwrap();
            assert_eq!(batch.num_tokens(), if id == 0 { 4 } else { 1 });
            assert_eq!(scheduler.stats().num_retained_pages, 0);
            let sample = Sample {
                token: 7,
                logprobs: None,
            };
            scheduler.update_from_output(&BatchOutput {
                step: batch.step,
                samples: vec![(batch.spans[0].slot, sample)],
                logprobs: Vec::new(),
                hidden_states: Vec::new(),
                undrawn: Vec::new(),
            });
            assert_eq!(scheduler.stats().num_retained_pages, 2);
            scheduler.abort_request(RequestId(id));
        }
        scheduler.check_invariants();
    }

    /// A driver that sleeps until the next deadline ends the retention in time.
    #[test]
    fn the_end_of_a_retention_is_a_deadline() {
        let mut config = SchedulerConfig::new(8, 2, 64);
        config.max_retained_pages = 4;
        let mut scheduler = Scheduler::new(config).unwrap();
        let retention = Retention {
            num_tokens: 5,
            ttl_us: 500,
        };
        let request = Request {
            retentions: vec![retention],
            ..Request::greedy(RequestId(0), vec![1, 2, 3, 4, 5], 1)
        };
        scheduler.add_requests(vec![request]).unwrap();
        let batch = scheduler.schedule(100).unwrap();
        let sample = Sample {
            token: 7,
            logprobs: None,
        };
        scheduler.update_from_output(&BatchOutput {
            step: batch.step,
            samples: vec![(batch.spans[0].slot, sample)],
            logprobs: Vec::new(),
            hidden_states: Vec::new(),
            undrawn: Vec::new(),
        });
        assert_eq!(
            scheduler
                .poll_output()
                .unwrap()
                .cache_use
                .num_retained_tokens,
            4
        );
        assert_eq!(scheduler.poll_deadline(), Some(600));
        scheduler.note_time(599);
        assert_eq!(scheduler.stats().num_retained_pages, 2);
        scheduler.note_time(600);
        assert_eq!(scheduler.stats().num_retained_pages, 0);
        assert_eq!(scheduler.poll_deadline(), None);
        scheduler.check_invariants();
    }
}
