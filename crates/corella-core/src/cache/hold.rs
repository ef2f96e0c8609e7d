//! Pages that are kept for others after their request has let go of them.
//!
//! The KV of a request that exports it is read for another node, layer by layer, while the prompt
//! is computed and for a while after the request has ended. However the request ends, its pages go
//! into a hold as soon as it gives them up, and they leave the hold only when
//! [`Scheduler::release_hold`] reports that nothing reads them any more. In the same way, the pages
//! of a request that has stopped receiving KV are held until nothing can write to them any more.

use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;

use crate::request_state::RequestIndex;
use crate::step::step_plan::InflightSpan;
use crate::{PageId, RequestId, Scheduler, StepId};

/// News about KV, for the driver that moves it to other nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvFact {
    /// A planned step computes the last of these rows; earlier steps have computed the others, or
    /// do so while in flight. Once the step is done with a layer, the rows of that layer may be
    /// read until [`Scheduler::release_hold`]. If the step fails they mean nothing.
    Exported {
        request: RequestId,
        step: StepId,
        first_row: u32,
        end_row: u32,
        /// From the page of the first row to that of the last.
        pages: Vec<PageId>,
    },
    /// More pages would be held than `max_held_pages`. The request runs on and exports nothing.
    Declined { request: RequestId },
    /// No more rows will be exported. The first `num_rows` have been computed by steps that have
    /// returned; the pages stay as they are until [`Scheduler::release_hold`].
    ExportEnded { request: RequestId, num_rows: u32 },
    /// The hold's lease is over, or a running request needs the pages. Whoever reads them must stop
    /// and call [`Scheduler::release_hold`]; the pages stay held until then.
    LeaseEnded { request: RequestId },
}

impl KvFact {
    pub fn request(&self) -> RequestId {
        match *self {
            Self::Exported { request, .. }
            | Self::Declined { request }
            | Self::ExportEnded { request, .. }
            | Self::LeaseEnded { request } => request,
        }
    }
}

/// While so many facts are unread, no request that exports KV starts. Those that have started add at
/// most one fact for each chunk of their prompts, and two when they end.
const MAX_UNREAD_FACTS: usize = 1024;

#[derive(Debug, Default)]
pub(crate) struct Holds {
    by_request: BTreeMap<RequestId, Hold>,
    by_lease: BTreeSet<(u64, RequestId)>,
    num_pages: usize,
    /// Pages that running requests export: they will be held.
    num_exporting_pages: usize,
    facts: VecDeque<KvFact>,
}

#[derive(Debug)]
struct Hold {
    pages: Vec<PageId>,
    /// `None` when the lease is over, or when there is none.
    lease_us: Option<u64>,
}

impl Holds {
    pub fn num_pages(&self) -> usize {
        self.num_pages
    }

    pub fn is_empty(&self) -> bool {
        self.by_request.is_empty()
    }

    pub fn is_exporting(&self) -> bool {
        self.num_exporting_pages > 0
    }

    /// Whether the driver has read enough facts for another request to cause some.
    pub fn has_room_for_facts(&self) -> bool {
        self.facts.len() < MAX_UNREAD_FACTS
    }

    pub fn next_lease_us(&self) -> Option<u64> {
        self.by_lease.first().map(|&(lease_us, _)| lease_us)
    }

    pub fn pages(&self) -> impl Iterator<Item = PageId> {
        self.by_request
            .values()
            .flat_map(|hold| &hold.pages)
            .copied()
    }

    /// Keeps the pages, each with the lock that its table had, for `request`.
    pub fn insert(&mut self, request: RequestId, pages: Vec<PageId>, lease_us: Option<u64>) {
        self.num_pages += pages.len();
        self.by_lease
            .extend(lease_us.map(|lease_us| (lease_us, request)));
        let before = self.by_request.insert(request, Hold { pages, lease_us });
        assert!(before.is_none(), "request {request} holds pages twice");
    }

    fn remove(&mut self, request: RequestId) -> Option<Vec<PageId>> {
        let hold = self.by_request.remove(&request)?;
        if let Some(lease_us) = hold.lease_us {
            self.by_lease.remove(&(lease_us, request));
        }
        self.num_pages -= hold.pages.len();
        Some(hold.pages)
    }

    /// # Panics
    /// When the bookkeeping contradicts itself.
    pub fn check_invariants(&self, num_exporting_pages: usize) {
        let num_pages: usize = self.by_request.values().map(|hold| hold.pages.len()).sum();
        assert_eq!(num_pages, self.num_pages, "held pages");
        assert_eq!(
            num_exporting_pages, self.num_exporting_pages,
            "exporting pages"
        );
        let leases = self.by_request.iter();
        let leases: BTreeSet<_> = leases
            .filter_map(|(&request, hold)| Some((hold.lease_us?, request)))
            .collect();
        assert_eq!(leases, self.by_lease, "leases of held pages");
    }
}

impl Scheduler {
    /// What has become of KV that is wanted elsewhere, in order. While too many facts are unread,
    /// requests that export KV wait.
    pub fn poll_kv_fact(&mut self) -> Option<KvFact> {
        self.holds.facts.pop_front()
    }

    /// Reports that nobody reads or writes the request's held pages any more, and releases them. If
    /// the request is still exporting, it stops doing so and its pages will not be held; returns
    /// false if nothing is held or exported for it.
    pub fn release_hold(&mut self, request: RequestId) -> bool {
        let Some(pages) = self.holds.remove(request) else {
            return self.stop_exporting(request);
        };
        self.kv.unlock_all(pages);
        true
    }

    fn stop_exporting(&mut self, request: RequestId) -> bool {
        let Some(index) = self.requests.find(request) else {
            return false;
        };
        let state = &mut self.requests[index];
        let was_exporting = core::mem::take(&mut state.request.exports_kv);
        let num_pages = core::mem::take(&mut state.num_exporting_pages) as usize;
        self.holds.num_exporting_pages -= num_pages;
        was_exporting
    }

    /// Extends the lease of a hold to `lease_us`. Returns false if there is no such hold or its
    /// lease is already over.
    pub fn renew_hold(&mut self, request: RequestId, lease_us: u64) -> bool {
        let Some(hold) = self.holds.by_request.get_mut(&request) else {
            return false;
        };
        let Some(before) = hold.lease_us.replace(lease_us) else {
            hold.lease_us = None;
            return false;
        };
        self.holds.by_lease.remove(&(before, request));
        self.holds.by_lease.insert((lease_us, request));
        true
    }

    /// A request that exports its KV has taken its pages: they count as held from now on.
    pub(crate) fn begin_export(&mut self, index: RequestIndex) {
        let state = &mut self.requests[index];
        let num_pages = state.tables.num_pages();
        let holds = &mut self.holds;
        let num_held_pages = holds.num_pages + holds.num_exporting_pages + num_pages;
        if num_held_pages > self.config.max_held_pages as usize {
            state.request.exports_kv = false;
            let request = state.request.id;
            holds.facts.push_back(KvFact::Declined { request });
            return;
        }
        state.num_exporting_pages = num_pages as u32;
        holds.num_exporting_pages += num_pages;
    }

    /// Announces which of the rows to be exported a planned step computes.
    pub(crate) fn announce_exports(&mut self, step: StepId, spans: &[InflightSpan]) {
        if !self.holds.is_exporting() {
            return;
        }
        for span in spans {
            let state = &mut self.requests[span.index];
            let end_row = state.num_scheduled_tokens.min(state.prefill_end);
            let first_row = state.num_exported_rows;
            if state.num_exporting_pages == 0 || first_row >= end_row {
                continue;
            }
            state.num_exported_rows = end_row;
            let first = (first_row / self.config.page_size) as usize;
            let end = end_row.div_ceil(self.config.page_size) as usize;
            self.holds.facts.push_back(KvFact::Exported {
                request: state.request.id,
                step,
                first_row,
                end_row,
                pages: state.tables.group(0).pages[first..end].to_vec(),
            });
        }
    }

    /// Keeps the pages of a request that exports its KV, when it lets go of them.
    pub(crate) fn hold_exported(&mut self, index: RequestIndex) {
        let lease_us = self.now_us().saturating_add(self.config.hold_lease_us);
        let state = &mut self.requests[index];
        let num_pages = core::mem::take(&mut state.num_exporting_pages) as usize;
        if num_pages == 0 {
            return;
        }
        self.holds.num_exporting_pages -= num_pages;
        state.request.exports_kv = false;
        let request = state.request.id;
        let pages = state.tables.take_pages();
        self.holds.facts.push_back(KvFact::ExportEnded {
            request,
            num_rows: state.num_computed_tokens.min(state.num_exported_rows),
        });
        self.holds.insert(request, pages, Some(lease_us));
    }

    /// Tells of the leases that are over.
    pub(crate) fn end_leases(&mut self) {
        self.end_leases_up_to(self.now_us());
    }

    /// Readers give way to a request that runs and finds no page.
    pub(crate) fn end_all_leases(&mut self) {
        self.end_leases_up_to(u64::MAX);
    }

    fn end_leases_up_to(&mut self, now_us: u64) {
        let holds = &mut self.holds;
        while let Some(&(lease_us, request)) = holds.by_lease.first()
            && lease_us <= now_us
        {
            holds.by_lease.pop_first();
            if let Some(hold) = holds.by_request.get_mut(&request) {
                hold.lease_us = None;
            }
            holds.facts.push_back(KvFact::LeaseEnded { request });
        }
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;
    use crate::{BatchOutput, Request, Sample, SchedulerConfig};

    /// Plans and returns steps until there is nothing to do.
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

    /// No page may be held, so each request leaves the fact that it exports nothing.
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
