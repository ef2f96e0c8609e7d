//! Plays sessions in random order, against a model that knows each reader's expected tasks.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;

use super::{ExportBook, ExportTask};
use crate::session::{KeptEnd, SessionKey};
use crate::{Incarnation, KvFact, PageId, PageTable, RequestId, SessionId, SnapshotId, StepId};

const PAGE_SIZE: u32 = 4;
const NUM_LAYERS: u32 = 3;
/// The second group has a window, which covers only the last two pages of a prompt.
const NUM_GROUPS: usize = 2;

/// Xorshift64*: the same order for the same seed.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % bound
    }
}

#[derive(Default)]
struct Reader {
    tables: [PageTable; NUM_GROUPS],
    num_readable: [u32; NUM_LAYERS as usize],
    is_finished: bool,
    state: Option<SnapshotId>,
    is_deleted: bool,
}

/// A run as the engine and the session see it.
struct Run {
    session: SessionId,
    num_rows: u32,
    num_announced: u32,
    num_readable: [u32; NUM_LAYERS as usize],
    /// A step that computes rows, and the number of its layers that are done.
    step: Option<(StepId, u32)>,
    is_kept: bool,
    is_finished: bool,
    has_ended: bool,
    is_released: bool,
    num_attempts: u32,
}

struct Model {
    book: ExportBook,
    random: Random,
    num_steps: u64,
    num_requests: u64,
    runs: BTreeMap<RequestId, Run>,
    readers: BTreeMap<SessionKey, Reader>,
    released: BTreeSet<RequestId>,
}

/// The part of a group's table that holds `rows`, for a prompt of `num_rows` rows.
fn part(request: RequestId, group: usize, rows: Range<u32>, num_rows: u32) -> PageTable {
    let first_read = match group {
        0 => 0,
        _ => num_rows.div_ceil(PAGE_SIZE).saturating_sub(2),
    };
    let pages = (rows.start / PAGE_SIZE).max(first_read)..rows.end.div_ceil(PAGE_SIZE);
    let page = |index| PageId(request.0 as u32 * 100 + 50 * group as u32 + index);
    PageTable {
        num_gone: pages.start as usize,
        pages: pages.map(page).collect(),
    }
}

/// The snapshot that has the state after a run's rows.
fn state_of(request: RequestId) -> SnapshotId {
    SnapshotId(request.0 as u32 * 100 + 99)
}

impl Model {
    fn new(seed: u64) -> Self {
        Self {
            book: ExportBook::new(PAGE_SIZE, NUM_LAYERS),
            random: Random(seed),
            num_steps: 0,
            num_requests: 0,
            runs: BTreeMap::new(),
            readers: BTreeMap::new(),
            released: BTreeSet::new(),
        }
    }

    fn key(session: SessionId, attempt: u32) -> SessionKey {
        SessionKey {
            session,
            attempt,
            prefill_incarnation: Incarnation(1),
            decode_incarnation: Incarnation(2),
        }
    }

    fn begin(&mut self) {
        self.num_requests += 1;
        let request = RequestId(self.num_requests);
        let session = SessionId(self.num_requests.into());
        let num_rows = 1 + self.random.below(20) as u32;
        let is_kept = self.random.below(3) == 0;
        if is_kept {
            self.book.keep(Self::key(session, 0), request, num_rows);
        } else {
            self.book.begin(session, 0, num_rows, true);
            assert!(self.book.handle_submitted(session, 0, request));
        }
        self.runs.insert(
            request,
            Run {
                session,
                num_rows,
                num_announced: 0,
                num_readable: [0; NUM_LAYERS as usize],
                step: None,
                is_kept,
                is_finished: false,
                has_ended: false,
                is_released: false,
                num_attempts: 0,
            },
        );
    }

    /// Plays the next event of a run.
    fn play(&mut self, request: RequestId) {
        let choice = self.random.below(12);
        let more = 1 + self.random.below(7) as u32;
        let Some(run) = self.runs.get_mut(&request) else {
            return;
        };
        let session = run.session;
        match (choice, run.step) {
            (0..4, None) if run.num_announced < run.num_rows && !run.has_ended => {
                self.num_steps += 1;
                let first_row = run.num_announced;
                let end_row = run.num_rows.min(first_row + more);
                run.num_announced = end_row;
                run.step = Some((StepId(self.num_steps), 0));
                let part = |group| part(request, group, first_row..end_row, run.num_rows);
                self.book.handle_fact(&KvFact::Exported {
                    request,
                    step: StepId(self.num_steps),
                    first_row,
                    end_row,
                    tables: (0..NUM_GROUPS).map(part).collect(),
                });
            }
            (0..6, Some((step, layer))) => {
                self.book.handle_layer_done(step, layer);
                // For a kept prompt, the book does not track layers.
                if !run.is_kept {
                    run.num_readable[layer as usize] = run.num_announced;
                }
                run.step = (layer + 1 < NUM_LAYERS).then_some((step, layer + 1));
            }
            (4..7, None) if !run.has_ended => {
                let is_whole = run.num_announced == run.num_rows;
                run.has_ended = true;
                run.is_finished = is_whole;
                let num_rows = run.num_announced;
                if run.is_kept && is_whole {
                    run.num_readable = [num_rows; NUM_LAYERS as usize];
                }
                self.book.handle_ended(session, 0);
                let state = is_whole.then_some(state_of(request));
                let fact = KvFact::ExportEnded {
                    request,
                    num_rows,
                    state,
                };
                let fault = self.book.handle_fact(&fact);
                assert_eq!(fault.is_some(), !is_whole && !run.is_kept);
                if fault.is_some() {
                    run.is_released = true;
                    self.book.release(session, 0);
                }
            }
            (7, _) if !run.is_kept && run.num_attempts < 2 && !run.is_released => {
                let key = Self::key(session, run.num_attempts);
                run.num_attempts += 1;
                self.book.add_reader(0, key, 0);
            }
            (8, _) if !run.is_kept && run.num_attempts > 0 => {
                let key = Self::key(session, run.num_attempts - 1);
                if let Some(reader) = self.readers.get_mut(&key)
                    && !core::mem::replace(&mut reader.is_deleted, true)
                {
                    self.book.delete(key);
                }
            }
            (9, _) if !run.is_kept && run.has_ended => {
                run.is_released = true;
                self.book.release(session, 0);
            }
            (10, _) if run.is_kept => {
                let how = KeptEnd::ALL[(more % 3) as usize];
                self.book.end_kept(session, how);
            }
            (11, _) if run.has_ended && run.is_kept => {
                self.book.handle_fact(&KvFact::LeaseEnded { request });
            }
            _ => {}
        }
    }

    /// Carries out the book's tasks. Some deletions take longer than others.
    fn settle(&mut self, deleting: &mut Vec<SessionKey>) {
        while let Some(task) = self.book.poll_task() {
            match task {
                ExportTask::Open { key, .. } => {
                    let before = self.readers.insert(key, Reader::default());
                    assert!(before.is_none(), "{key} is exported twice");
                }
                ExportTask::AddPages { key, tables } => {
                    let reader = self.readers.get_mut(&key).expect("stored");
                    for (table, part) in reader.tables.iter_mut().zip(&tables) {
                        assert_eq!(table.append(part), *part, "pages are told twice");
                    }
                }
                ExportTask::RowsReadable {
                    key,
                    layers,
                    num_rows,
                } => {
                    let reader = self.readers.get_mut(&key).expect("stored");
                    for layer in layers {
                        let num_readable = &mut reader.num_readable[layer as usize];
                        assert!(num_rows >= *num_readable, "rows are taken back");
                        *num_readable = num_rows;
                    }
                }
                ExportTask::Finish { key, state } => {
                    let reader = self.readers.get_mut(&key).expect("stored");
                    (reader.is_finished, reader.state) = (true, state);
                }
                ExportTask::Delete { key } => {
                    if let Some(reader) = self.readers.get_mut(&key) {
                        reader.is_deleted = true;
                    }
                    deleting.push(key);
                }
                ExportTask::RenewHold { .. } => {}
                ExportTask::ReleaseHold { request } => {
                    let session = self.runs[&request].session;
                    let mut readers = self.readers.keys();
                    assert!(
                        !readers.any(|key| key.session == session),
                        "{session} is read, and its pages go"
                    );
                    self.released.insert(request);
                }
            }
        }
        self.book.check_invariants();
    }

    fn check_readers(&self) {
        for (&request, run) in &self.runs {
            let readers = self.readers.iter();
            for (key, reader) in readers.filter(|(key, _)| key.session == run.session) {
                for (group, table) in reader.tables.iter().enumerate() {
                    let part = part(request, group, 0..run.num_announced, run.num_rows);
                    assert_eq!(table.pages, part.pages, "pages of {key}");
                    assert!(table.pages.is_empty() || *table == part, "pages of {key}");
                }
                assert_eq!(reader.num_readable, run.num_readable, "rows of {key}");
                assert_eq!(reader.is_finished, run.is_finished, "the end of {key}");
                let state = run.is_finished.then_some(state_of(request));
                assert_eq!(reader.state, state, "the state of {key}");
            }
        }
    }
}

#[test]
fn readers_know_what_there_is_and_pages_stay_while_they_are_read() {
    for seed in 1..200 {
        let mut model = Model::new(seed);
        let mut deleting = vec![];
        for _ in 0..400 {
            match model.random.below(10) {
                0 if model.num_requests < 30 => model.begin(),
                1 if !deleting.is_empty() => {
                    let at = model.random.below(deleting.len() as u64) as usize;
                    let key = deleting.swap_remove(at);
                    model.readers.remove(&key);
                    model.book.handle_deleted(key);
                }
                _ => {
                    let request = RequestId(1 + model.random.below(30));
                    model.play(request);
                }
            }
            model.settle(&mut deleting);
            model.check_readers();
        }
        // All runs and readers end.
        for (_, run) in core::mem::take(&mut model.runs) {
            model.book.handle_ended(run.session, 0);
            model.book.end_kept(run.session, KeptEnd::Dropped);
            model.book.release(run.session, 0);
        }
        for key in core::mem::take(&mut model.readers).into_keys() {
            model.book.handle_deleted(key);
        }
        while model.book.poll_task().is_some() {}
        model.book.check_invariants();
        assert!(model.book.runs.is_empty(), "seed {seed} leaves runs");
        assert_eq!((model.book.num_exports(), model.book.num_kept()), (0, 0));
    }
}
