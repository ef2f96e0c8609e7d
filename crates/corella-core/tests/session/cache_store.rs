//! Offers and loads, in whichever order they come.

use corella_core::session::{CacheStore, CacheStoreAction, LoadRefusal, StoreDropped};
use corella_core::{Incarnation, Namespace, PageHash};

use crate::fixture::{NUM_ROWS, config, key};

fn store() -> CacheStore {
    CacheStore::new(&config(), Incarnation(5)).expect("valid times")
}

fn actions(store: &mut CacheStore) -> Vec<CacheStoreAction> {
    store.check_invariants();
    std::iter::from_fn(|| store.poll_action()).collect()
}

fn pages(num_pages: u32) -> Vec<PageHash> {
    let root = PageHash::root(0, &Namespace::default());
    let next = |hash: &mut PageHash, page: u32| {
        *hash = hash.next(0, &[page]);
        Some(*hash)
    };
    (0..num_pages).scan(root, next).collect()
}

/// Rule 41: KV that is never produced.
#[test]
fn a_load_without_an_offer_ends_at_its_deadline_and_leaves_nothing() {
    let mut store = store();
    store.load(key(1, 0), 0, 700, 100).unwrap();
    assert_eq!(store.poll_timeout(), Some(700));
    store.handle_timeout(699);
    assert_eq!(actions(&mut store), []);
    assert_eq!(store.stats().num_subscriptions, 1);
    store.handle_timeout(700);
    let key = key(1, 0);
    assert_eq!(actions(&mut store), [CacheStoreAction::TimeOutLoad { key }]);
    assert_eq!(store.stats().num_subscriptions, 0);
    // The offer comes too late, and is dropped with its pages.
    let late = store.store(key, 2, NUM_ROWS, pages(2), 800);
    assert_eq!(late, Err(StoreDropped::Ended));
    assert_eq!(store.load(key, 0, 9000, 800), Err(LoadRefusal::Ended));
    assert_eq!(store.stats().num_pages, 0);
    let forgotten_us = 700 + config().tombstone_us;
    assert_eq!(store.poll_timeout(), Some(forgotten_us));
    store.handle_timeout(forgotten_us);
    assert_eq!(store.stats(), Default::default());
    assert_eq!(store.poll_timeout(), None);
}

#[test]
fn rows_are_sent_when_they_are_filled_and_wanted_each_once() {
    let mut store = store();
    let key = key(1, 0);
    store.store(key, 2, NUM_ROWS, vec![], 0).unwrap();
    store.handle_filled(key, 0, 6);
    assert_eq!(actions(&mut store), []);
    // The decode node has the first four rows.
    store.load(key, 4, 900, 1).unwrap();
    let send = |layer, rows| CacheStoreAction::Send { key, layer, rows };
    assert_eq!(actions(&mut store), [send(0, 4..6)]);
    store.handle_filled(key, 1, 3);
    store.handle_filled(key, 0, 6);
    assert_eq!(actions(&mut store), []);
    store.handle_filled(key, 1, 10);
    store.handle_filled(key, 0, 99);
    assert_eq!(actions(&mut store), [send(1, 4..10), send(0, 6..10)]);
    assert!(store.is_complete(key));
    // The deadline was that of the offer.
    store.handle_timeout(1000);
    assert_eq!(actions(&mut store), []);
}

#[test]
fn an_offer_is_gone_when_its_reader_has_stopped() {
    let mut store = store();
    let (read, unread) = (key(1, 0), key(2, 0));
    for key in [read, unread] {
        store.store(key, 2, NUM_ROWS, pages(2), 0).unwrap();
    }
    store.load(read, 0, 900, 0).unwrap();
    store.delete(read, 5);
    store.handle_filled(read, 0, NUM_ROWS);
    let stop = CacheStoreAction::Stop { key: read };
    assert_eq!(actions(&mut store), [stop]);
    store.delete(unread, 5);
    let deleted = |key| CacheStoreAction::Deleted { key };
    assert_eq!(actions(&mut store), [deleted(unread)]);
    store.handle_stopped(read, 6);
    let released = pages(2).into_iter();
    let mut expected = vec![deleted(read)];
    expected.extend(released.map(|page| CacheStoreAction::Release { page }));
    assert_eq!(actions(&mut store), expected);
    // Nothing is said twice.
    store.delete(read, 7);
    store.handle_stopped(read, 7);
    assert_eq!(store.stats().num_entries, 0);
}

#[test]
fn a_load_of_an_earlier_life_is_refused() {
    let mut store = store();
    let mut stale = key(1, 0);
    stale.prefill_incarnation = Incarnation(4);
    let refusal = store.load(stale, 0, 900, 0);
    assert_eq!(refusal, Err(LoadRefusal::StaleIncarnation));
    assert_eq!(store.stats(), Default::default());
}

/// Rule 40: two hundred pairs of requests with the same pages, ending in any order.
#[test]
fn an_offer_never_lets_go_of_what_another_one_names() {
    let mut store = store();
    for pair in 0..200_u128 {
        for twin in 0..2 {
            let key = key(2 * pair + twin, 0);
            store.store(key, 2, NUM_ROWS, pages(3), 0).unwrap();
        }
    }
    // A permutation of all 400: 149 and 400 have no common divisor.
    let order = (0..400_u128).map(|index| index * 149 % 400);
    for (num_before, session) in (0..400).zip(order) {
        for page in pages(3) {
            assert_eq!(store.num_users(page), 400 - num_before);
        }
        store.delete(key(session, 0), 1);
        let released = actions(&mut store).into_iter();
        let released = released.filter(|it| matches!(it, CacheStoreAction::Release { .. }));
        assert_eq!(released.count(), if num_before == 399 { 3 } else { 0 });
    }
    assert_eq!(store.stats().num_pages, 0);
}

/// Fault 4: whatever comes and goes, and whatever is never heard of again.
#[test]
fn a_million_requests_leave_tables_of_bounded_size() {
    let mut store = store();
    let config = config();
    let (mut max_tombstones, mut max_entries) = (0, 0);
    for request in 0..1_000_000_u64 {
        let now_us = request * 100;
        let key = key(request.into(), 0);
        // A third is in order, a third never stored, a third never loaded.
        if request % 3 != 1 {
            let pages = vec![PageHash((request / 3).into())];
            store.store(key, 1, NUM_ROWS, pages, now_us).unwrap();
        }
        if request % 3 != 2 {
            store.load(key, 0, now_us + 5_000, now_us).unwrap();
        }
        if request % 3 != 1 {
            store.delete(key, now_us + 50);
            store.handle_load_closed(key, now_us + 60);
        }
        store.handle_timeout(now_us + 99);
        while store.poll_action().is_some() {}
        let stats = store.stats();
        max_entries = max_entries.max(stats.num_entries);
        max_tombstones = max_tombstones.max(stats.num_tombstones);
        if request % 50_000 == 0 {
            store.check_invariants();
        }
    }
    // 5 ms of subscriptions, one of them every 300 us.
    assert!(max_entries <= 18, "{max_entries} entries");
    assert_eq!(max_tombstones, config.max_tombstones as usize);
    store.handle_timeout(u64::MAX);
    while store.poll_action().is_some() {}
    store.handle_timeout(u64::MAX);
    assert_eq!(store.stats().num_entries, 0);
    assert_eq!(store.stats().num_pages, 0);
    assert_eq!(store.stats().num_timers, 0);
}
