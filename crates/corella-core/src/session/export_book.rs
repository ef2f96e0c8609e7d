//! The KV rows that a node's engine computes for other nodes, their readers, and the release of their pages.

mod kept_prompt;
#[cfg(test)]
mod model_test;
mod row_table;
#[cfg(test)]
mod tests;

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;
use core::mem::take;
use core::ops::Range;

use crate::session::SessionKey;
use crate::{KvFact, PageTable, RequestId, SessionId, SnapshotId, StepId};

pub use kept_prompt::KeptEnd;
use row_table::RowTable;

/// Tracks a node's exported rows.
///
/// A *run* is a request of this node's engine for a session: a prompt for a decode node, a prompt kept for a later
/// reader, or the rest of a request. Facts of the engine come in by [`handle_kv_fact`](Self::handle_kv_fact) and
/// [`handle_layer_done`](Self::handle_layer_done). After every call, the driver takes tasks from
/// [`poll_task`](Self::poll_task) until it returns `None`. Each reader of a run gets the present state of its rows, and
/// then every change. The engine releases the pages when the session has released them and the last reader has stopped.
#[derive(Clone, Debug, Default)]
pub struct ExportBook {
    page_size: u32,
    num_layers: u32,
    runs: BTreeMap<(SessionId, u32), Run>,
    /// The run of each request that the engine has accepted.
    run_of: BTreeMap<RequestId, (SessionId, u32)>,
    /// Steps that compute exported rows, with their requests and the end of each request's rows in the step. A step is
    /// removed when its last layer is done.
    steps: BTreeMap<StepId, Vec<(RequestId, u32)>>,
    num_exports: usize,
    num_kept_ended: [u64; KeptEnd::ALL.len()],
    tasks: VecDeque<ExportTask>,
}

/// A task for the driver's sender or engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExportTask {
    /// Exports the rows of a run in the [`ExportTable`](crate::session::ExportTable), from `first_row` on.
    Open {
        key: SessionKey,
        run: u32,
        first_row: u32,
        num_rows: u32,
    },
    /// The next pages of an export's rows, for each KV group.
    AddPages {
        key: SessionKey,
        tables: Vec<PageTable>,
    },
    /// The rows from 0 to `num_rows` of an export may be read in these layers.
    RowsReadable {
        key: SessionKey,
        layers: Range<u32>,
        num_rows: u32,
    },
    /// The steps that computed an export's rows have returned, so that all of them are valid. The recurrent state after
    /// them may be read from now on.
    Finish {
        key: SessionKey,
        state: Option<SnapshotId>,
    },
    /// Ends an export. The driver calls [`handle_deleted`](ExportBook::handle_deleted) when nothing reads its rows any
    /// more.
    Delete { key: SessionKey },
    /// Has the engine hold the pages of a request until this time.
    RenewHold { request: RequestId, until_us: u64 },
    /// Has the engine release the pages that it holds for a request, if any.
    ReleaseHold { request: RequestId },
}

/// The reason why a run's rows cannot be exported any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExportFault {
    /// The run had to give its pages back, or exports nothing because too many pages are held.
    Failed,
    /// The lease of the held pages has ended, or the engine needs the pages.
    LeaseEnded,
}

#[derive(Clone, Debug, Default)]
struct Run {
    /// `None` until the engine has accepted the run.
    request: Option<RequestId>,
    num_rows: u32,
    /// The engine has given the run's last output, aborts it, or has refused it.
    has_ended: bool,
    /// The engine holds the run's pages, now or after the run's end, until it is told to release them.
    is_held: bool,
    /// The session has released the pages.
    wants_release: bool,
    /// An attempt has got the rows, and the pages are not released yet.
    is_export: bool,
    rows: RowTable,
    /// Attempts that may be reading. Sessions limit their number.
    readers: Vec<SessionKey>,
    /// The key by which any node may load the rows, if the prompt is kept.
    kept_as: Option<SessionKey>,
}

impl ExportBook {
    pub fn new(page_size: u32, num_layers: u32) -> Self {
        Self {
            page_size,
            num_layers,
            ..Self::default()
        }
    }

    pub fn poll_task(&mut self) -> Option<ExportTask> {
        self.tasks.pop_front()
    }

    /// Returns the session and the number of the run that the engine knows as `request`.
    pub fn run_of(&self, request: RequestId) -> Option<(SessionId, u32)> {
        self.run_of.get(&request).copied()
    }

    /// The number of runs that were exported and still have their pages.
    pub fn num_exports(&self) -> usize {
        self.num_exports
    }

    /// Adds a run before it is submitted to the engine. If it exports rows, its pages are held for others.
    pub(super) fn begin(&mut self, session: SessionId, run: u32, num_rows: u32, exports: bool) {
        let before = self.runs.insert(
            (session, run),
            Run {
                num_rows,
                is_held: exports,
                rows: RowTable::new(self.num_layers),
                ..Run::default()
            },
        );
        debug_assert!(before.is_none(), "run {run} of session {session} twice");
    }

    /// Handles that the engine has accepted a run. Returns false if its session has given it up.
    pub(super) fn handle_submitted(
        &mut self,
        session: SessionId,
        run: u32,
        request: RequestId,
    ) -> bool {
        let Some(entry) = self.runs.get_mut(&(session, run)) else {
            return false;
        };
        entry.request = Some(request);
        let is_wanted = !entry.has_ended;
        self.run_of.insert(request, (session, run));
        self.settle((session, run));
        is_wanted
    }

    /// Handles that the engine has refused a run, and so holds nothing for it.
    pub(super) fn handle_refused(&mut self, session: SessionId, run: u32) {
        if let Some(entry) = self.runs.get_mut(&(session, run)) {
            entry.is_held = false;
            entry.has_ended = true;
            self.settle((session, run));
        }
    }

    /// Handles the last output of a run.
    pub(super) fn handle_ended(&mut self, session: SessionId, run: u32) {
        if let Some(entry) = self.runs.get_mut(&(session, run)) {
            entry.has_ended = true;
            self.settle((session, run));
        }
    }

    /// Gives up a run. Returns its request, if the engine must abort it.
    pub(super) fn abort(&mut self, session: SessionId, run: u32) -> Option<RequestId> {
        let entry = self.runs.get_mut(&(session, run))?;
        if core::mem::replace(&mut entry.has_ended, true) {
            return None;
        }
        let request = entry.request;
        self.settle((session, run));
        request
    }

    /// Exports a run's rows to an attempt, beginning with those that are computed.
    pub(super) fn add_reader(&mut self, run: u32, key: SessionKey, first_row: u32) {
        let Some(entry) = self.runs.get_mut(&(key.session, run)) else {
            return;
        };
        entry.readers.push(key);
        self.num_exports += usize::from(!core::mem::replace(&mut entry.is_export, true));
        let num_rows = entry.num_rows;
        self.tasks.push_back(ExportTask::Open {
            key,
            run,
            first_row,
            num_rows,
        });
        entry.rows.tell_all(key, &mut self.tasks);
    }

    pub(super) fn delete(&mut self, key: SessionKey) {
        self.tasks.push_back(ExportTask::Delete { key });
    }

    /// Handles that an export has ended and nothing reads its rows any more.
    pub fn handle_deleted(&mut self, key: SessionKey) {
        let mut runs = self.runs.range_mut(runs_of(key.session));
        let read = runs.find(|(_, run)| run.readers.contains(&key));
        if let Some((&at, run)) = read {
            run.readers.retain(|&reader| reader != key);
            self.settle(at);
        }
    }

    /// Holds the pages of a run until `until_us`.
    pub(super) fn renew(&mut self, session: SessionId, run: u32, until_us: u64) {
        if let Some(entry) = self.runs.get(&(session, run))
            && let Some(request) = entry.request.filter(|_| entry.is_held)
        {
            self.tasks
                .push_back(ExportTask::RenewHold { request, until_us });
        }
    }

    /// Releases the pages of a run, once its last reader has stopped.
    pub(super) fn release(&mut self, session: SessionId, run: u32) {
        if let Some(entry) = self.runs.get_mut(&(session, run)) {
            entry.wants_release = true;
            self.settle((session, run));
        }
    }

    /// Handles a fact about the rows of a request. Returns its run and the fault, if the rows cannot be exported any
    /// more.
    pub(super) fn handle_fact(&mut self, fact: &KvFact) -> Option<(SessionId, u32, ExportFault)> {
        let Some(&at) = self.run_of.get(&fact.request()) else {
            // The request's session has ended, and its pages have no reader.
            if let KvFact::ExportEnded { request, .. } | KvFact::LeaseEnded { request } = *fact {
                self.tasks.push_back(ExportTask::ReleaseHold { request });
            }
            return None;
        };
        let run = self.runs.get_mut(&at)?;
        let fault = match fact {
            KvFact::Exported {
                request,
                step,
                end_row,
                tables,
                ..
            } => {
                let new = run.rows.announce(*end_row, tables);
                tell_pages(&run.readers, &new, &mut self.tasks);
                // A kept prompt is exported as a whole.
                if run.kept_as.is_none() {
                    let step = self.steps.entry(*step).or_default();
                    step.push((*request, *end_row));
                }
                return None;
            }
            KvFact::ExportEnded {
                num_rows, state, ..
            } if *num_rows == run.num_rows => {
                let state = *state;
                run.rows.finish(state);
                let readers = run.readers.iter();
                self.tasks
                    .extend(readers.map(|&key| ExportTask::Finish { key, state }));
                self.export_kept(at);
                return None;
            }
            KvFact::ExportEnded { .. } => ExportFault::Failed,
            KvFact::Declined { .. } => {
                run.is_held = false;
                ExportFault::Failed
            }
            KvFact::LeaseEnded { .. } => ExportFault::LeaseEnded,
        };
        if run.kept_as.is_some() {
            self.end_kept(at.0, KeptEnd::by_fault(fault));
            return None;
        }
        Some((at.0, at.1, fault))
    }

    /// Handles the end of a layer in a step. The step's rows may now be read in this layer. The layers of a step end in
    /// order.
    pub fn handle_layer_done(&mut self, step: StepId, layer: u32) {
        for &(request, end_row) in self.steps.get(&step).into_iter().flatten() {
            let run = self.run_of.get(&request);
            let Some(run) = run.and_then(|at| self.runs.get_mut(at)) else {
                continue;
            };
            run.rows.handle_layer_done(layer, end_row);
            let readers = run.readers.iter();
            self.tasks
                .extend(readers.map(|&key| ExportTask::RowsReadable {
                    key,
                    layers: layer..layer + 1,
                    num_rows: end_row,
                }));
        }
        if layer + 1 == self.num_layers {
            self.steps.remove(&step);
        }
    }

    /// # Panics
    /// When the bookkeeping contradicts itself.
    pub fn check_invariants(&self) {
        let mut num_exports = 0;
        let mut num_taken = 0;
        for (&(session, number), run) in &self.runs {
            let of_session = |key: &SessionKey| key.session == session;
            assert!(
                run.readers.iter().all(of_session),
                "run {number} of session {session} is read by another session"
            );
            assert!(
                run.readers.is_empty() || run.is_held || run.has_ended || run.wants_release,
                "run {number} of session {session} is read and not held"
            );
            assert!(
                !run.is_over(),
                "run {number} of session {session} is over, but was not removed"
            );
            run.rows.check_invariants(self.page_size, run.num_rows);
            num_exports += usize::from(run.is_export);
            if let Some(request) = run.request {
                num_taken += 1;
                assert_eq!(
                    self.run_of.get(&request),
                    Some(&(session, number)),
                    "request {request} is known as another run"
                );
            }
        }
        assert_eq!(num_exports, self.num_exports, "runs that are read");
        assert_eq!(
            num_taken,
            self.run_of.len(),
            "runs that the engine has taken"
        );
        assert!(
            self.steps.values().all(|rows| !rows.is_empty()),
            "a step is listed that computes no exported rows"
        );
    }

    pub(super) fn has_run(&self, session: SessionId, run: u32) -> bool {
        self.runs.contains_key(&(session, run))
    }

    /// Releases the pages of a run, and removes it, if nothing needs them any more.
    fn settle(&mut self, at: (SessionId, u32)) {
        let Some(run) = self.runs.get_mut(&at) else {
            return;
        };
        if run.wants_release && run.readers.is_empty() {
            self.num_exports -= usize::from(take(&mut run.is_export));
            // A request that is being submitted is released when the engine has accepted it.
            if let Some(request) = run.request
                && take(&mut run.is_held)
            {
                self.tasks.push_back(ExportTask::ReleaseHold { request });
            }
        }
        if run.is_over() {
            if let Some(request) = run.request {
                self.run_of.remove(&request);
            }
            self.runs.remove(&at);
        }
    }
}

impl Run {
    fn is_over(&self) -> bool {
        self.has_ended && !self.is_held && !self.is_export && self.readers.is_empty()
    }
}

fn runs_of(session: SessionId) -> core::ops::RangeInclusive<(SessionId, u32)> {
    (session, 0)..=(session, u32::MAX)
}

fn tell_pages(readers: &[SessionKey], new: &[PageTable], tasks: &mut VecDeque<ExportTask>) {
    if new.iter().all(|table| table.pages.is_empty()) {
        return;
    }
    tasks.extend(readers.iter().map(|&key| ExportTask::AddPages {
        key,
        tables: new.to_vec(),
    }));
}
