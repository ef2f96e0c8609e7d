//! The tasks for readers, and the release of pages.

use alloc::vec;
use alloc::vec::Vec;

use super::{ExportBook, ExportFault, ExportTask};
use crate::session::{KeptEnd, SessionKey};
use crate::{Incarnation, KvFact, PageId, PageTable, RequestId, SessionId, StepId};

const PAGE_SIZE: u32 = 4;
const NUM_LAYERS: u32 = 2;
const NUM_ROWS: u32 = 10;
const SESSION: SessionId = SessionId(3);
const REQUEST: RequestId = RequestId(70);

fn key(attempt: u32) -> SessionKey {
    SessionKey {
        session: SESSION,
        attempt,
        prefill_incarnation: Incarnation(5),
        decode_incarnation: Incarnation(6),
    }
}

fn tasks(book: &mut ExportBook) -> Vec<ExportTask> {
    book.check_invariants();
    core::iter::from_fn(|| book.poll_task()).collect()
}

/// The fact that a step computes these rows. Page `i` of the prompt has the number 100 + `i`.
fn exported(step: u64, first_row: u32, end_row: u32) -> KvFact {
    let pages = first_row / PAGE_SIZE..end_row.div_ceil(PAGE_SIZE);
    KvFact::Exported {
        request: REQUEST,
        step: StepId(step),
        first_row,
        end_row,
        tables: vec![PageTable {
            num_gone: pages.start as usize,
            pages: pages.map(|page| PageId(100 + page)).collect(),
        }],
    }
}

fn ended(num_rows: u32) -> KvFact {
    let request = REQUEST;
    KvFact::ExportEnded {
        request,
        num_rows,
        state: None,
    }
}

fn add_pages(attempt: u32, pages: &[u32]) -> ExportTask {
    ExportTask::AddPages {
        key: key(attempt),
        tables: vec![PageTable {
            num_gone: pages[0] as usize - 100,
            pages: pages.iter().map(|&page| PageId(page)).collect(),
        }],
    }
}

fn readable(attempt: u32, layers: core::ops::Range<u32>, num_rows: u32) -> ExportTask {
    ExportTask::RowsReadable {
        key: key(attempt),
        layers,
        num_rows,
    }
}

fn export(attempt: u32) -> ExportTask {
    ExportTask::Open {
        key: key(attempt),
        run: 0,
        first_row: 0,
        num_rows: NUM_ROWS,
    }
}

fn finish(attempt: u32) -> ExportTask {
    let key = key(attempt);
    ExportTask::Finish { key, state: None }
}

const RELEASE: ExportTask = ExportTask::ReleaseHold { request: REQUEST };

/// A prompt for a decode node, which the engine has taken.
fn prefilling() -> ExportBook {
    let mut book = ExportBook::new(PAGE_SIZE, NUM_LAYERS);
    book.begin(SESSION, 0, NUM_ROWS, true);
    assert!(book.handle_submitted(SESSION, 0, REQUEST));
    assert_eq!(tasks(&mut book), []);
    book
}

#[test]
fn a_reader_hears_of_each_page_once_and_of_each_layer_of_each_step() {
    let mut book = prefilling();
    book.add_reader(0, key(0), 0);
    assert_eq!(tasks(&mut book), [export(0)]);
    book.handle_fact(&exported(1, 0, 6));
    assert_eq!(tasks(&mut book), [add_pages(0, &[100, 101])]);
    book.handle_layer_done(StepId(1), 0);
    assert_eq!(tasks(&mut book), [readable(0, 0..1, 6)]);
    // The next step begins in a page that earlier rows use.
    book.handle_fact(&exported(2, 6, 10));
    assert_eq!(tasks(&mut book), [add_pages(0, &[102])]);
    book.handle_layer_done(StepId(1), 1);
    book.handle_layer_done(StepId(2), 0);
    book.handle_layer_done(StepId(2), 1);
    let rest = [
        readable(0, 1..2, 6),
        readable(0, 0..1, 10),
        readable(0, 1..2, 10),
    ];
    assert_eq!(tasks(&mut book), rest);
    assert_eq!(book.handle_fact(&ended(NUM_ROWS)), None);
    assert_eq!(tasks(&mut book), [finish(0)]);
}

#[test]
fn a_reader_that_comes_late_gets_what_there_is() {
    let mut book = prefilling();
    book.handle_fact(&exported(1, 0, 8));
    book.handle_fact(&exported(2, 8, 10));
    book.handle_layer_done(StepId(1), 0);
    book.handle_layer_done(StepId(1), 1);
    book.handle_layer_done(StepId(2), 0);
    assert_eq!(tasks(&mut book), []);
    book.add_reader(0, key(0), 0);
    let known = [
        export(0),
        add_pages(0, &[100, 101, 102]),
        readable(0, 0..1, 10),
        readable(0, 1..2, 8),
    ];
    assert_eq!(tasks(&mut book), known);
    book.handle_layer_done(StepId(2), 1);
    book.handle_fact(&ended(NUM_ROWS));
    assert_eq!(tasks(&mut book), [readable(0, 1..2, 10), finish(0)]);
    book.add_reader(0, key(1), 0);
    let known = [
        export(1),
        add_pages(1, &[100, 101, 102]),
        readable(1, 0..2, 10),
        finish(1),
    ];
    assert_eq!(tasks(&mut book), known);
}

/// All announced rows are computed, and the prompt has more rows.
#[test]
fn an_export_that_ends_before_the_prompt_does_has_failed() {
    let mut book = prefilling();
    book.add_reader(0, key(0), 0);
    book.handle_fact(&exported(1, 0, 8));
    book.handle_layer_done(StepId(1), 0);
    book.handle_layer_done(StepId(1), 1);
    tasks(&mut book);
    let fault = Some((SESSION, 0, ExportFault::Failed));
    assert_eq!(book.handle_fact(&ended(8)), fault);
    assert_eq!(tasks(&mut book), []);
}

#[test]
fn pages_go_when_the_session_and_both_readers_are_done() {
    let mut book = prefilling();
    book.add_reader(0, key(0), 0);
    book.add_reader(0, key(1), 0);
    book.handle_ended(SESSION, 0);
    tasks(&mut book);
    book.handle_deleted(key(0));
    book.release(SESSION, 0);
    assert_eq!((tasks(&mut book), book.num_exports()), (vec![], 1));
    // A second report, or one for an attempt without an export, changes nothing.
    book.handle_deleted(key(0));
    book.handle_deleted(key(2));
    assert_eq!(tasks(&mut book), []);
    book.handle_deleted(key(1));
    assert_eq!((tasks(&mut book), book.num_exports()), (vec![RELEASE], 0));
    assert_eq!(book.run_of(REQUEST), None);
}

#[test]
fn a_run_that_is_given_up_before_the_engine_takes_it_is_aborted_and_released_then() {
    let mut book = ExportBook::new(PAGE_SIZE, NUM_LAYERS);
    book.begin(SESSION, 0, NUM_ROWS, true);
    assert_eq!(book.abort(SESSION, 0), None);
    book.release(SESSION, 0);
    assert_eq!(tasks(&mut book), []);
    assert!(!book.handle_submitted(SESSION, 0, REQUEST));
    assert_eq!(tasks(&mut book), [RELEASE]);
    assert_eq!(book.run_of(REQUEST), None);
}

#[test]
fn what_the_engine_holds_for_no_reader_is_let_go() {
    let mut book = ExportBook::new(PAGE_SIZE, NUM_LAYERS);
    assert_eq!(book.handle_fact(&exported(1, 0, 8)), None);
    assert_eq!(tasks(&mut book), []);
    assert_eq!(book.handle_fact(&ended(8)), None);
    let request = REQUEST;
    assert_eq!(book.handle_fact(&KvFact::LeaseEnded { request }), None);
    assert_eq!(tasks(&mut book), [RELEASE, RELEASE]);
}

/// A prompt that is kept, computed whole.
fn kept() -> ExportBook {
    let mut book = ExportBook::new(PAGE_SIZE, NUM_LAYERS);
    book.keep(key(0), REQUEST, NUM_ROWS);
    book.handle_kv_fact(&exported(1, 0, 10));
    assert_eq!(tasks(&mut book), []);
    book.handle_kv_fact(&ended(NUM_ROWS));
    let expected = [
        export(0),
        add_pages(0, &[100, 101, 102]),
        readable(0, 0..2, 10),
        finish(0),
    ];
    assert_eq!(tasks(&mut book), expected);
    assert!(book.keeps(SESSION));
    book
}

#[test]
fn a_prompt_is_kept_until_it_is_fetched_or_its_lease_is_over() {
    for how in [KeptEnd::Fetched, KeptEnd::Expired] {
        let mut book = kept();
        book.renew_kept(SESSION, 99);
        let renew = ExportTask::RenewHold {
            request: REQUEST,
            until_us: 99,
        };
        assert_eq!(tasks(&mut book), [renew]);
        match how {
            KeptEnd::Expired => book.handle_kv_fact(&KvFact::LeaseEnded { request: REQUEST }),
            _ => assert!(book.end_kept(SESSION, how)),
        }
        assert!(!book.keeps(SESSION) && !book.end_kept(SESSION, KeptEnd::Dropped));
        book.renew_kept(SESSION, 100);
        assert_eq!(tasks(&mut book), [ExportTask::Delete { key: key(0) }]);
        book.handle_deleted(key(0));
        assert_eq!(tasks(&mut book), [RELEASE]);
        let ends = KeptEnd::ALL.map(|end| book.num_kept_ended(end));
        assert_eq!(ends, KeptEnd::ALL.map(|end| u64::from(end == how)));
        assert_eq!((book.num_kept(), book.num_exports()), (0, 0));
    }
}

#[test]
fn a_prompt_that_is_not_computed_whole_is_not_exported() {
    let request = REQUEST;
    for fact in [ended(8), KvFact::Declined { request }] {
        let mut book = ExportBook::new(PAGE_SIZE, NUM_LAYERS);
        book.keep(key(0), REQUEST, NUM_ROWS);
        book.handle_kv_fact(&exported(1, 0, 8));
        book.handle_kv_fact(&fact);
        let did = tasks(&mut book);
        // A node that asks early learns that nothing will come.
        assert_eq!(did[0], ExportTask::Delete { key: key(0) });
        let holds = matches!(fact, KvFact::ExportEnded { .. });
        assert_eq!(did[1..], [RELEASE][..usize::from(holds)]);
        assert_eq!(book.num_kept_ended(KeptEnd::Dropped), 1);
        assert_eq!(book.run_of(REQUEST), None);
    }
}
