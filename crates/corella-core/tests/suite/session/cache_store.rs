//! Offers and loads, in any order.

use corella_core::Incarnation;
use corella_core::session::{
    CacheStore, CacheStoreConfig, CacheStoreStats, Loaded, OfferEnd, StoreRefusal,
};

use crate::session::fixture::key;

const TOMBSTONE_US: u64 = 60_000_000;

/// Offers and loads are letters here.
fn store(max_offers: usize, max_waiting_loads: usize) -> CacheStore<char, char> {
    CacheStore::new(CacheStoreConfig {
        incarnation: Incarnation(5),
        max_offers,
        max_waiting_loads,
        tombstone_us: TOMBSTONE_US,
        max_tombstones: 1000,
    })
}

const WAITS: Result<Loaded<'_, char, char>, StoreRefusal> = Ok(Loaded::Waits { replaced: None });

/// Rule 41: KV that is never computed.
#[test]
fn a_load_without_an_offer_ends_at_its_deadline_and_leaves_nothing() {
    let mut store = store(10, 10);
    let key = key(1, 0);
    assert_eq!(store.load(key, 700, 100, || 'l'), WAITS);
    assert_eq!(store.poll_timeout(), Some(700));
    assert_eq!(store.poll_late_load(699), None);
    assert_eq!(store.poll_late_load(700), Some((key, 'l')));
    assert_eq!(store.poll_late_load(700), None);
    store.check_invariants();
    // The offer comes too late.
    let over = StoreRefusal::Over(OfferEnd::NotStored);
    assert_eq!(store.store(key, 'o', 800), Err(over));
    assert_eq!(store.load(key, 9000, 800, || 'l'), Err(over));
    let forgotten_us = 700 + TOMBSTONE_US;
    assert_eq!(store.stats(forgotten_us - 1).num_tombstones, 1);
    assert_eq!(store.stats(forgotten_us), CacheStoreStats::default());
    assert_eq!(store.poll_timeout(), None);
}

#[test]
fn a_load_finds_its_offer_in_either_order() {
    let mut store = store(10, 10);
    let (early, late) = (key(1, 0), key(2, 0));
    assert_eq!(store.load(early, 900, 0, || 'l'), WAITS);
    assert_eq!(store.store(early, 'o', 1), Ok(Some('l')));
    assert_eq!(store.store(late, 'p', 2), Ok(None));
    let offered = store.load(late, 900, 3, || 'm');
    assert_eq!(offered, Ok(Loaded::Offered(&'p')));
    // The deadline belonged to the offer.
    assert_eq!(store.poll_late_load(1000), None);
    let again = store.load(early, 2000, 1000, || 'n');
    assert_eq!(again, Ok(Loaded::Offered(&'o')));
    assert_eq!(store.store(early, 'q', 1000), Err(StoreRefusal::Duplicate));
    assert_eq!(store.get(early), Some(&'o'));
    store.check_invariants();
}

#[test]
fn the_newest_load_of_a_session_is_the_one_that_waits() {
    let mut store = store(10, 1);
    let key = key(1, 0);
    assert_eq!(store.load(key, 500, 0, || 'a'), WAITS);
    let replaced = Some('a');
    let second = store.load(key, 900, 1, || 'b');
    assert_eq!(second, Ok(Loaded::Waits { replaced }));
    store.check_invariants();
    assert_eq!(store.poll_late_load(500), None);
    // The first one's connection is gone, which does not affect the second.
    assert_eq!(store.cancel(key, |&load| load == 'a'), None);
    assert_eq!(store.cancel(key, |&load| load == 'b'), Some('b'));
    assert_eq!(store.stats(501), CacheStoreStats::default());
    // A cancelled load may be repeated.
    assert_eq!(store.load(key, 900, 502, || 'c'), WAITS);
    assert_eq!(store.store(key, 'o', 503), Ok(Some('c')));
}

#[test]
fn what_is_over_stays_over_as_it_first_was() {
    let mut store = store(10, 10);
    let (offered, awaited, unknown) = (key(1, 0), key(2, 0), key(3, 0));
    store.store(offered, 'o', 0).unwrap();
    store.load(awaited, 900, 0, || 'l').unwrap();
    let failed = OfferEnd::Failed;
    assert_eq!(store.end(offered, failed, 5), (Some('o'), None));
    assert_eq!(store.end(awaited, failed, 5), (None, Some('l')));
    assert_eq!(store.end(unknown, failed, 5), (None, None));
    for key in [offered, awaited, unknown] {
        assert_eq!(store.end(key, OfferEnd::Deleted, 6), (None, None));
        let over = StoreRefusal::Over(failed);
        assert_eq!(store.load(key, 900, 7, || 'm'), Err(over));
        assert_eq!(store.store(key, 'p', 7), Err(over));
    }
    store.check_invariants();
    let num_tombstones = 3;
    let stats = CacheStoreStats {
        num_tombstones,
        ..CacheStoreStats::default()
    };
    assert_eq!(store.stats(TOMBSTONE_US + 4), stats);
    assert_eq!(store.stats(TOMBSTONE_US + 5), CacheStoreStats::default());
}

#[test]
fn a_load_of_an_earlier_life_is_refused() {
    let mut store = store(10, 10);
    let mut stale = key(1, 0);
    stale.prefill_incarnation = Incarnation(4);
    let refused = store.load(stale, 900, 0, || 'l');
    assert_eq!(refused, Err(StoreRefusal::OtherIncarnation));
    assert_eq!(store.stats(0), CacheStoreStats::default());
}

#[test]
fn there_are_no_more_offers_and_waiting_loads_than_there_may_be() {
    let mut store = store(2, 1);
    store.store(key(1, 0), 'o', 0).unwrap();
    store.store(key(2, 0), 'p', 0).unwrap();
    assert_eq!(store.load(key(3, 0), 900, 0, || 'l'), WAITS);
    let full = StoreRefusal::Full;
    assert_eq!(store.load(key(4, 0), 900, 0, || 'm'), Err(full));
    // The load keeps waiting: its offer may come when the store has room.
    assert_eq!(store.store(key(3, 0), 'q', 0), Err(full));
    store.check_invariants();
    store.end(key(1, 0), OfferEnd::Deleted, 1);
    assert_eq!(store.store(key(3, 0), 'q', 2), Ok(Some('l')));
    assert_eq!(store.clear().collect::<Vec<_>>(), ['p', 'q']);
    assert_eq!(store.stats(2).num_offers, 0);
}

/// Fault 4: any order of offers and loads, and requests that are never mentioned again.
#[test]
fn a_million_requests_leave_tables_of_bounded_size() {
    let mut store = store(100, 100);
    let mut most = CacheStoreStats::default();
    for request in 0..1_000_000_u64 {
        let now_us = request * 100;
        let key = key(request.into(), 0);
        // One third is in order, one third is never stored, one third is never loaded.
        if request % 3 != 1 {
            store.store(key, 'o', now_us).unwrap();
        }
        if request % 3 != 2 {
            store.load(key, now_us + 5_000, now_us, || 'l').unwrap();
        }
        if request % 3 != 1 {
            store.end(key, OfferEnd::Deleted, now_us + 50);
        }
        while store.poll_late_load(now_us + 99).is_some() {}
        let stats = store.stats(now_us + 99);
        most.num_offers = most.num_offers.max(stats.num_offers);
        most.num_waiting_loads = most.num_waiting_loads.max(stats.num_waiting_loads);
        most.num_tombstones = most.num_tombstones.max(stats.num_tombstones);
        if request % 50_000 == 0 {
            store.check_invariants();
        }
    }
    // 5 ms of waiting loads, one of them every 300 us.
    assert!(most.num_waiting_loads <= 17, "{most:?}");
    assert_eq!((most.num_offers, most.num_tombstones), (0, 1000));
    while store.poll_late_load(u64::MAX).is_some() {}
    assert_eq!(store.stats(u64::MAX), CacheStoreStats::default());
}
