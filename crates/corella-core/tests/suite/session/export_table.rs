//! Exports and loads, in any order.

use corella_core::Incarnation;
use corella_core::session::{
    ExportEnd, ExportRefusal, ExportTable, ExportTableConfig, ExportTableStats, Loaded,
};

use crate::session::fixture::key;

const TOMBSTONE_US: u64 = 60_000_000;

/// Exports and loads are letters here.
fn table(max_exports: usize, max_waiting_loads: usize) -> ExportTable<char, char> {
    ExportTable::new(ExportTableConfig {
        incarnation: Incarnation(5),
        max_exports,
        max_waiting_loads,
        tombstone_us: TOMBSTONE_US,
        max_tombstones: 1000,
    })
}

const WAITS: Result<Loaded<'_, char, char>, ExportRefusal> = Ok(Loaded::Waits { replaced: None });

/// Rule 41: KV that is never computed.
#[test]
fn a_load_without_an_export_ends_at_its_deadline_and_leaves_nothing() {
    let mut table = table(10, 10);
    let key = key(1, 0);
    assert_eq!(table.load(key, 700, 100, || 'l'), WAITS);
    assert_eq!(table.poll_timeout(), Some(700));
    assert_eq!(table.poll_late_load(699), None);
    assert_eq!(table.poll_late_load(700), Some((key, 'l')));
    assert_eq!(table.poll_late_load(700), None);
    table.check_invariants();
    // The export comes too late.
    let over = ExportRefusal::Over(ExportEnd::NotExported);
    assert_eq!(table.export(key, 'o', 800), Err(over));
    assert_eq!(table.load(key, 9000, 800, || 'l'), Err(over));
    let forgotten_us = 700 + TOMBSTONE_US;
    assert_eq!(table.stats(forgotten_us - 1).num_tombstones, 1);
    assert_eq!(table.stats(forgotten_us), ExportTableStats::default());
    assert_eq!(table.poll_timeout(), None);
}

#[test]
fn a_load_finds_its_export_in_either_order() {
    let mut table = table(10, 10);
    let (early, late) = (key(1, 0), key(2, 0));
    assert_eq!(table.load(early, 900, 0, || 'l'), WAITS);
    assert_eq!(table.export(early, 'o', 1), Ok(Some('l')));
    assert_eq!(table.export(late, 'p', 2), Ok(None));
    let exported = table.load(late, 900, 3, || 'm');
    assert_eq!(exported, Ok(Loaded::Exported(&'p')));
    // The deadline belonged to the export.
    assert_eq!(table.poll_late_load(1000), None);
    let again = table.load(early, 2000, 1000, || 'n');
    assert_eq!(again, Ok(Loaded::Exported(&'o')));
    assert_eq!(
        table.export(early, 'q', 1000),
        Err(ExportRefusal::Duplicate)
    );
    assert_eq!(table.get(early), Some(&'o'));
    table.check_invariants();
}

#[test]
fn the_newest_load_of_a_session_is_the_one_that_waits() {
    let mut table = table(10, 1);
    let key = key(1, 0);
    assert_eq!(table.load(key, 500, 0, || 'a'), WAITS);
    let replaced = Some('a');
    let second = table.load(key, 900, 1, || 'b');
    assert_eq!(second, Ok(Loaded::Waits { replaced }));
    table.check_invariants();
    assert_eq!(table.poll_late_load(500), None);
    // The first load's connection is gone, which does not affect the second load.
    assert_eq!(table.cancel(key, |&load| load == 'a'), None);
    assert_eq!(table.cancel(key, |&load| load == 'b'), Some('b'));
    assert_eq!(table.stats(501), ExportTableStats::default());
    // A cancelled load may be repeated.
    assert_eq!(table.load(key, 900, 502, || 'c'), WAITS);
    assert_eq!(table.export(key, 'o', 503), Ok(Some('c')));
}

#[test]
fn what_is_over_stays_over_as_it_first_was() {
    let mut table = table(10, 10);
    let (exported, awaited, unknown) = (key(1, 0), key(2, 0), key(3, 0));
    table.export(exported, 'o', 0).unwrap();
    table.load(awaited, 900, 0, || 'l').unwrap();
    let failed = ExportEnd::Failed;
    assert_eq!(table.end(exported, failed, 5), (Some('o'), None));
    assert_eq!(table.end(awaited, failed, 5), (None, Some('l')));
    assert_eq!(table.end(unknown, failed, 5), (None, None));
    for key in [exported, awaited, unknown] {
        assert_eq!(table.end(key, ExportEnd::Deleted, 6), (None, None));
        let over = ExportRefusal::Over(failed);
        assert_eq!(table.load(key, 900, 7, || 'm'), Err(over));
        assert_eq!(table.export(key, 'p', 7), Err(over));
    }
    table.check_invariants();
    let num_tombstones = 3;
    let stats = ExportTableStats {
        num_tombstones,
        ..ExportTableStats::default()
    };
    assert_eq!(table.stats(TOMBSTONE_US + 4), stats);
    assert_eq!(table.stats(TOMBSTONE_US + 5), ExportTableStats::default());
}

#[test]
fn a_load_of_an_earlier_life_is_refused() {
    let mut table = table(10, 10);
    let mut stale = key(1, 0);
    stale.prefill_incarnation = Incarnation(4);
    let refused = table.load(stale, 900, 0, || 'l');
    assert_eq!(refused, Err(ExportRefusal::OtherIncarnation));
    assert_eq!(table.stats(0), ExportTableStats::default());
}

#[test]
fn there_are_no_more_exports_and_waiting_loads_than_there_may_be() {
    let mut table = table(2, 1);
    table.export(key(1, 0), 'o', 0).unwrap();
    table.export(key(2, 0), 'p', 0).unwrap();
    assert_eq!(table.load(key(3, 0), 900, 0, || 'l'), WAITS);
    let full = ExportRefusal::Full;
    assert_eq!(table.load(key(4, 0), 900, 0, || 'm'), Err(full));
    // The load keeps waiting: its export may come when the table has room.
    assert_eq!(table.export(key(3, 0), 'q', 0), Err(full));
    table.check_invariants();
    table.end(key(1, 0), ExportEnd::Deleted, 1);
    assert_eq!(table.export(key(3, 0), 'q', 2), Ok(Some('l')));
    assert_eq!(table.clear().collect::<Vec<_>>(), ['p', 'q']);
    assert_eq!(table.stats(2).num_exports, 0);
}

/// Fault 4: any order of exports and loads, and requests that are never mentioned again.
#[test]
fn a_million_requests_leave_tables_of_bounded_size() {
    let mut table = table(100, 100);
    let mut most = ExportTableStats::default();
    for request in 0..1_000_000_u64 {
        let now_us = request * 100;
        let key = key(request.into(), 0);
        // One third is in order, one third is never exported, one third is never loaded.
        if request % 3 != 1 {
            table.export(key, 'o', now_us).unwrap();
        }
        if request % 3 != 2 {
            table.load(key, now_us + 5_000, now_us, || 'l').unwrap();
        }
        if request % 3 != 1 {
            table.end(key, ExportEnd::Deleted, now_us + 50);
        }
        while table.poll_late_load(now_us + 99).is_some() {}
        let stats = table.stats(now_us + 99);
        most.num_exports = most.num_exports.max(stats.num_exports);
        most.num_waiting_loads = most.num_waiting_loads.max(stats.num_waiting_loads);
        most.num_tombstones = most.num_tombstones.max(stats.num_tombstones);
        if request % 50_000 == 0 {
            table.check_invariants();
        }
    }
    // 5 ms of waiting loads, one of them every 300 us.
    assert!(most.num_waiting_loads <= 17, "{most:?}");
    assert_eq!((most.num_exports, most.num_tombstones), (0, 1000));
    while table.poll_late_load(u64::MAX).is_some() {}
    assert_eq!(table.stats(u64::MAX), ExportTableStats::default());
}
