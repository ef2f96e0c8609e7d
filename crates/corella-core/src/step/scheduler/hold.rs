//! Exchange of KV with other nodes: exports, holds and their leases. Requests that receive KV are in `remote_kv.rs`.

use crate::request_state::RequestIndex;
use crate::step::step_plan::InflightSpan;
use crate::{RequestId, Scheduler, SnapshotId, StepId};

impl Scheduler {
    /// Reports that all reads and writes of the request's held pages have ended, and releases them. If the request is
    /// still exporting, the export stops, and the request's pages will not be held. Returns false if no page is held or
    /// exported for it.
    pub fn release_hold(&mut self, request: RequestId) -> bool {
        let Some((pages, state)) = self.holds.remove(request) else {
            return self.stop_exporting(request);
        };
        self.kv.unlock_all(pages);
        self.drop_snapshot(state);
        true
    }

    fn stop_exporting(&mut self, request: RequestId) -> bool {
        let Some(index) = self.requests.find(request) else {
            return false;
        };
        let state = &mut self.requests[index];
        self.holds.stop_export(state.export_mut());
        let was_exporting = state.stop_exporting();
        let snapshot = state.export_mut().take_state();
        self.drop_snapshot(snapshot);
        self.give_back_pages(index);
        was_exporting
    }

    /// Extends the lease of a hold to `lease_us`. Returns false for an unknown hold, or after the end of its lease.
    pub fn renew_hold(&mut self, request: RequestId, lease_us: u64) -> bool {
        self.holds.renew(request, lease_us)
    }

    /// Begins the export of a request that has taken its pages. The snapshot for the recurrent state after the exported
    /// rows is reserved now, so that it is there when the prompt is computed.
    pub(super) fn begin_export(&mut self, index: RequestIndex) {
        let state = &mut self.requests[index];
        let config = &self.config;
        let num_rows = state.prefill_end();
        let num_pages = config.num_exported_pages(num_rows);
        // The last drawn token has no row.
        let num_final_rows = (state.num_prompt_tokens() + state.max_tokens()).saturating_sub(1);
        let has_pages = config.has_room_beside_export(num_rows, num_final_rows)
            && self.holds.begin_export(
                state.export_mut(),
                (num_rows, num_pages),
                config.max_held_pages,
            );
        let last_returned = self.inflight.last_returned();
        let snapshot = match has_pages {
            true => self.kv.try_reserve_snapshot(last_returned),
            false => None,
        };
        state.export_mut().set_state(snapshot);
        if !has_pages || self.kv.is_recurrent() && snapshot.is_none() {
            self.holds.stop_export(state.export_mut());
            self.holds.decline(state.id());
            state.stop_exporting();
        }
    }

    pub(super) fn drop_snapshot(&mut self, snapshot: Option<SnapshotId>) {
        if let Some(id) = snapshot {
            self.kv.drop_snapshot(id);
        }
    }

    /// Announces the exported rows that a planned step computes.
    pub(super) fn announce_exports(&mut self, step: StepId, spans: &[InflightSpan]) {
        if !self.holds.is_exporting() {
            return;
        }
        for span in spans {
            let state = &mut self.requests[span.index];
            let end_row = state.num_scheduled_tokens().min(state.prefill_end());
            let id = state.id();
            let (export, tables) = state.export_and_tables();
            let pages = (&self.config.kv_groups[..], self.config.page_size);
            self.holds
                .announce(step, id, (export, end_row), tables, pages);
        }
    }

    /// Holds the pages of a request that exports its KV, when the request gives them up.
    pub(super) fn hold_exported(&mut self, index: RequestIndex) {
        let lease_us = self.pace.now_us().saturating_add(self.config.hold_lease_us);
        let state = &mut self.requests[index];
        if state.export().num_pages() == 0 {
            return;
        }
        state.stop_exporting();
        let end_row = state.export().end_row();
        let groups = self.config.kv_groups.iter();
        for (group, table) in groups.zip(state.tables_mut().iter_mut()) {
            let first = group.first_page_exported(end_row, self.config.page_size);
            self.kv.unlock_all(table.take_before(first as usize));
        }
        let pages = state.tables_mut().take_pages();
        let num_computed_rows = state.num_computed_tokens();
        self.holds.hold_exported(
            state.id(),
            state.export_mut(),
            num_computed_rows,
            pages,
            lease_us,
        );
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;
    use alloc::vec::Vec;

    use super::*;
    use crate::{BatchOutput, Request, Sample, SchedulerConfig};

    /// Plans and returns steps until no work is left.
    fn run(scheduler: &mut Scheduler) {
        while let Some(batch) = scheduler.schedule(0) {
            let sample = Sample {
                token: 7,
                logprobs: None,
            };
            let drawing = batch.spans.iter().filter(|span| span.yields.draws());
            scheduler.update_from_output(&BatchOutput {
                step: batch.step,
                samples: drawing.map(|span| (span.slot, sample.clone())).collect(),
                logprobs: Vec::new(),
                hidden_states: Vec::new(),
                undrawn: Vec::new(),
            });
            scheduler.check_invariants();
        }
    }

    fn num_ended(scheduler: &mut Scheduler) -> usize {
        let outputs = core::iter::from_fn(|| scheduler.poll_output());
        outputs.filter(|output| output.finish.is_some()).count()
    }

    /// No page may be held, so each request adds a fact that it exports nothing. While 1,024 facts are unread, no
    /// further request starts.
    #[test]
    fn requests_that_export_wait_for_a_driver_that_reads_nothing() {
        let mut config = SchedulerConfig::new(64, 4, 64);
        config.max_held_pages = 0;
        config.max_queued_requests = 2000;
        let mut scheduler = Scheduler::new(config).unwrap();
        for id in 0..1500 {
            let mut request = Request::greedy(RequestId(id), vec![1, 2, 3], 1);
            request.exports_kv = true;
            scheduler.add_requests(vec![request]).unwrap();
        }
        run(&mut scheduler);
        assert_eq!(num_ended(&mut scheduler), 1024);
        let facts = core::iter::from_fn(|| scheduler.poll_kv_fact());
        assert_eq!(facts.count(), 1024);
        run(&mut scheduler);
        assert_eq!(num_ended(&mut scheduler), 1500 - 1024);
        assert!(!scheduler.has_unfinished());
    }
}
