//! The state of other nodes in the table, and its expiry.

use corella_core::{
    LoadReport, NodeId, PeerChange, PeerFacts, PeerRecord, PeerStanding, PeerTable, PeerTableConfig,
};
use proptest::prelude::*;

const SECOND_US: u64 = 1_000_000;

fn record(instance_id: &str, incarnation: Option<u64>) -> PeerRecord {
    PeerRecord {
        instance_id: instance_id.into(),
        incarnation,
        max_prompt_tokens: u32::MAX,
        is_draining: false,
    }
}

fn hello(incarnation: u64) -> PeerFacts {
    PeerFacts {
        incarnation,
        page_size: 16,
    }
}

fn table() -> PeerTable {
    PeerTable::new(PeerTableConfig::default())
}

/// A table with one healthy node, "a" in its incarnation 1.
fn table_with_a() -> (PeerTable, NodeId) {
    let mut table = table();
    table.handle_list(&[record("a", Some(1))], 0);
    let peer_id = table.peer_id("a").unwrap();
    table.handle_hello(peer_id, hello(1), 0);
    changes(&mut table);
    (table, peer_id)
}

fn changes(table: &mut PeerTable) -> Vec<PeerChange> {
    std::iter::from_fn(|| table.poll_change()).collect()
}

fn removed(instance_id: &str, peer_id: NodeId) -> PeerChange {
    PeerChange::Removed {
        instance_id: instance_id.into(),
        peer_id,
    }
}

fn report(num_free_pages: u32, num_reservations: u64) -> LoadReport {
    LoadReport {
        num_free_pages,
        num_reservations,
        ..LoadReport::default()
    }
}

#[test]
fn a_node_is_suspect_until_it_answers() {
    let mut table = table();
    table.handle_list(&[record("a", None)], 5);
    let peer_id = table.peer_id("a").unwrap();
    assert_eq!(table.standing(peer_id), Some(PeerStanding::Suspect));
    assert_eq!(
        table.poll_probe(5),
        Some(peer_id),
        "new ones are asked at once"
    );
    assert_eq!(table.poll_probe(5), None);
    assert_eq!(table.handle_hello(peer_id, hello(9), 6), Some(peer_id));
    assert_eq!(table.standing(peer_id), Some(PeerStanding::Healthy));
    assert_eq!(table.incarnation(peer_id), Some(9));
}

#[test]
fn silence_twice_and_a_lost_session_once_make_suspect() {
    let (mut table, a) = table_with_a();
    table.handle_silent(a, SECOND_US);
    assert_eq!(table.standing(a), Some(PeerStanding::Healthy));
    table.handle_hello(a, hello(1), SECOND_US);
    table.handle_silent(a, 2 * SECOND_US);
    assert_eq!(table.standing(a), Some(PeerStanding::Healthy));
    table.handle_silent(a, 3 * SECOND_US);
    assert_eq!(table.standing(a), Some(PeerStanding::Suspect));

    table.handle_hello(a, hello(1), 4 * SECOND_US);
    assert_eq!(table.standing(a), Some(PeerStanding::Healthy));
    table.handle_session_lost(a, 5 * SECOND_US);
    assert_eq!(table.standing(a), Some(PeerStanding::Suspect));
    // A report does not answer a probe.
    table.handle_report(a, report(5, 0), 5 * SECOND_US);
    assert_eq!(table.standing(a), Some(PeerStanding::Suspect));
}

/// The pause before a retry is a quarter of a second twice, then doubles up to five seconds.
#[test]
fn suspects_are_asked_less_and_less_often() {
    let (mut table, a) = table_with_a();
    let lost_us = 10 * SECOND_US;
    table.handle_session_lost(a, lost_us);
    let mut at_us = Vec::new();
    for _ in 0..8 {
        let due_us = table.next_probe_us().unwrap();
        assert_eq!(table.poll_probe(due_us - 1), None);
        assert_eq!(table.poll_probe(due_us), Some(a));
        table.handle_silent(a, due_us);
        at_us.push((due_us - lost_us) / 250_000);
    }
    // In quarters of a second.
    assert_eq!(at_us, [1, 2, 4, 8, 16, 32, 52, 72]);
}

#[test]
fn who_has_answered_is_not_probed_for_a_second() {
    let (mut table, a) = table_with_a();
    table.handle_hello(a, hello(1), 900_000);
    assert_eq!(table.poll_probe(1_899_999), None);
    assert_eq!(table.poll_probe(1_900_000), Some(a));
}

#[test]
fn an_outage_takes_no_node_away() {
    let (mut table, a) = table_with_a();
    table.handle_outage(SECOND_US);
    table.handle_outage(3600 * SECOND_US);
    assert_eq!(table.standing(a), Some(PeerStanding::Healthy));
    // The registry restarted empty. A node that answers is kept until it could register.
    let back_us = 3601 * SECOND_US;
    table.handle_list(&[record("b", Some(1))], back_us);
    assert_eq!(table.peer_id("a"), Some(a));
    table.handle_list(&[record("b", Some(1))], back_us + 20 * SECOND_US);
    assert_eq!(table.peer_id("a"), None);
    assert_eq!(changes(&mut table).last(), Some(&removed("a", a)));
}

#[test]
fn who_did_not_answer_anyway_is_not_kept_after_an_outage() {
    let (mut table, a) = table_with_a();
    table.handle_outage(SECOND_US);
    table.handle_session_lost(a, SECOND_US);
    table.handle_list(&[record("b", None)], 2 * SECOND_US);
    assert_eq!(table.peer_id("a"), None);
}

#[test]
fn an_empty_list_is_believed_when_it_is_confirmed() {
    let (mut table, a) = table_with_a();
    table.handle_list(&[], 10 * SECOND_US);
    assert_eq!(table.peer_id("a"), Some(a));
    // Two lists at the same moment count as one.
    table.handle_list(&[], 10 * SECOND_US + 1);
    assert_eq!(table.peer_id("a"), Some(a));
    table.handle_list(&[], 11 * SECOND_US);
    assert_eq!(table.peer_id("a"), None);
    assert_eq!(changes(&mut table), [removed("a", a)]);
}

#[test]
fn empty_lists_count_only_in_a_row() {
    let (mut table, a) = table_with_a();
    for second in 0..10 {
        table.handle_list(&[], (10 * second + 1) * SECOND_US);
        match second % 2 {
            0 => table.handle_list(&[record("a", Some(1))], (10 * second + 5) * SECOND_US),
            _ => table.handle_outage((10 * second + 5) * SECOND_US),
        }
    }
    assert_eq!(table.peer_id("a"), Some(a));
}

#[test]
fn a_new_incarnation_starts_from_nothing() {
    let (mut table, old) = table_with_a();
    table.handle_report(old, report(50, 0), 1);
    table.handle_transfer(old, 1 << 20, 1_000_000, 1);
    let reservation = table.reserve(old, 7).unwrap();
    table.handle_list(&[record("a", Some(2))], 2);
    let new = table.peer_id("a").unwrap();
    let restarted = PeerChange::Restarted {
        instance_id: "a".into(),
        old,
        new,
    };
    assert_eq!(changes(&mut table), [restarted]);
    assert_ne!(new, old);

    // Messages of the old incarnation reach no node.
    table.handle_hello(old, hello(1), 3);
    table.handle_report(old, report(50, 9), 3);
    table.handle_granted(reservation, 1);
    table.release(reservation);
    assert_eq!(table.standing(old), None);
    let nodes = table.decode_nodes(4);
    assert_eq!(nodes.len(), 1);
    assert_eq!(nodes[0].peer_id, new);
    assert_eq!(nodes[0].standing, PeerStanding::Suspect);
    assert_eq!((nodes[0].report, nodes[0].bandwidth), (None, None));
    assert_eq!(nodes[0].num_unreported_pages, 0);
}

/// The registry lists only addresses, like DNS: the node itself reports its restart. A registry
/// that still lists the old incarnation does not restore it.
#[test]
fn a_node_says_itself_that_it_was_restarted() {
    for listed in [None, Some(1)] {
        let mut table = table();
        table.handle_list(&[record("a", listed)], 0);
        let old = table.peer_id("a").unwrap();
        table.handle_hello(old, hello(1), 1);
        let new = table.handle_hello(old, hello(2), 2).unwrap();
        assert_ne!(new, old);
        assert_eq!(table.standing(new), Some(PeerStanding::Healthy));
        table.handle_list(&[record("a", listed)], 3);
        assert_eq!(table.peer_id("a"), Some(new));
        table.handle_list(&[record("a", Some(2))], 4);
        assert_eq!(table.peer_id("a"), Some(new), "the registry has caught up");
        table.handle_list(&[record("a", Some(3))], 5);
        assert_ne!(table.peer_id("a"), Some(new));
    }
}

#[test]
fn an_incompatible_node_is_logged_once_a_minute_and_is_not_unhealthy() {
    let (mut table, a) = table_with_a();
    assert!(table.handle_incompatible(a, 1, 10 * SECOND_US));
    assert_eq!(table.standing(a), Some(PeerStanding::Incompatible));
    assert!(!table.handle_incompatible(a, 1, 69 * SECOND_US));
    table.handle_silent(a, 69 * SECOND_US);
    table.handle_silent(a, 69 * SECOND_US);
    table.handle_session_lost(a, 69 * SECOND_US);
    table.handle_report(a, report(5, 0), 69 * SECOND_US);
    assert_eq!(table.standing(a), Some(PeerStanding::Incompatible));
    assert!(table.handle_incompatible(a, 1, 70 * SECOND_US));
    // A node that crashes repeatedly does not get a line for each incarnation.
    assert!(!table.handle_incompatible(a, 2, 71 * SECOND_US));
    let restarted = table.peer_id("a").unwrap();
    assert_ne!(restarted, a);
    assert_eq!(table.standing(restarted), Some(PeerStanding::Incompatible));
    // The node now runs the right version.
    let upgraded = table.handle_hello(restarted, hello(3), 72 * SECOND_US);
    assert_eq!(
        table.standing(upgraded.unwrap()),
        Some(PeerStanding::Healthy)
    );
}

#[test]
fn a_node_drains_by_its_own_word_or_the_registrys() {
    let (mut table, a) = table_with_a();
    let draining = LoadReport {
        is_draining: true,
        ..report(10, 0)
    };
    table.handle_report(a, draining, 1);
    assert_eq!(table.standing(a), Some(PeerStanding::Draining));
    table.handle_report(a, report(10, 0), 2);
    assert_eq!(table.standing(a), Some(PeerStanding::Healthy));
    let mut listed = record("a", Some(1));
    listed.is_draining = true;
    table.handle_list(&[listed], 3);
    assert_eq!(table.standing(a), Some(PeerStanding::Draining));
}

#[test]
fn reservations_count_until_a_report_does() {
    let (mut table, a) = table_with_a();
    let unreported = |table: &PeerTable| table.decode_nodes(0)[0].num_unreported_pages;
    table.handle_report(a, report(100, 4), 1);
    let first = table.reserve(a, 10).unwrap();
    let second = table.reserve(a, 20).unwrap();
    let third = table.reserve(a, 40).unwrap();
    assert_eq!(unreported(&table), 70);
    table.handle_granted(first, 5);
    table.handle_granted(second, 7);
    // The node's sixth reservation belongs to another peer, and its seventh came after this report.
    table.handle_report(a, report(80, 6), 2);
    assert_eq!(unreported(&table), 60);
    // An overtaken report changes no state.
    table.handle_report(a, report(100, 4), 3);
    assert_eq!(table.decode_nodes(0)[0].report, Some(report(80, 6)));
    table.release(third);
    assert_eq!(unreported(&table), 20);
    table.handle_report(a, report(60, 7), 4);
    assert_eq!(unreported(&table), 0);
    table.release(first);
    table.release(second);
    assert_eq!(unreported(&table), 0);
    // The report may even come before the answer.
    let fourth = table.reserve(a, 5).unwrap();
    table.handle_report(a, report(55, 8), 5);
    assert_eq!(unreported(&table), 5);
    table.handle_granted(fourth, 8);
    assert_eq!(unreported(&table), 0);
}

/// 1 MiB in 1 ms is 1,048,576,000 bytes a second; each further measurement weighs an eighth.
#[test]
fn bandwidth_is_smoothed_and_forgotten() {
    let (mut table, a) = table_with_a();
    let bandwidth = |table: &PeerTable, now_us| table.decode_nodes(now_us)[0].bandwidth;
    assert_eq!(bandwidth(&table, 0), None);
    // A short transfer counts like any other.
    let known = table.handle_transfer(a, 1 << 10, 976_562, 1);
    assert_eq!(known, Some(1_048_576), "it is the first");
    assert_eq!(bandwidth(&table, 1), Some(1_048_576));
    let (mut table, a) = table_with_a();
    let known = table.handle_transfer(a, 1 << 20, 1_000_000, 1);
    assert_eq!(known, Some(1_048_576_000));
    assert_eq!(table.handle_transfer(a, 1 << 20, 1_000_000_000, 2), None);
    assert_eq!(
        bandwidth(&table, 2),
        Some((7 * 1_048_576_000 + 1_048_576) / 8)
    );
    assert_eq!(bandwidth(&table, 2 + 60 * SECOND_US), Some(917_635_072));
    assert_eq!(bandwidth(&table, 3 + 60 * SECOND_US), None);
    // The first measurement after that counts in full.
    let known = table.handle_transfer(a, 1 << 20, 1_000_000_000, 100 * SECOND_US);
    assert_eq!(known, Some(1_048_576), "it was forgotten");
    assert_eq!(bandwidth(&table, 100 * SECOND_US), Some(1_048_576));
    table.handle_transfer(a, u64::MAX, 0, 100 * SECOND_US);
    assert!(bandwidth(&table, 100 * SECOND_US) > Some(1 << 40));
}

#[test]
fn a_list_has_a_bound_and_names_each_node_once() {
    let config = PeerTableConfig {
        max_peers: 2,
        ..PeerTableConfig::default()
    };
    let mut table = PeerTable::new(config);
    let listed = ["a", "a", "b", "c"].map(|name| record(name, None));
    table.handle_list(&listed, 0);
    let instances: Vec<_> = table
        .decode_nodes(0)
        .iter()
        .map(|node| node.peer_id)
        .collect();
    assert_eq!(instances.len(), 2);
    assert_eq!(table.peer_id("c"), None);
}

proptest! {
    /// Reports in any order, grants before or after them, ends at any time: the subtracted pages
    /// are always those of the live reservations that no report has counted.
    #[test]
    fn unreported_pages_add_up(
        operations in prop::collection::vec((0..4u8, any::<prop::sample::Index>(), 1..50u32), 0..120),
    ) {
        struct Live {
            id: corella_core::ReservationId,
            num_pages: u32,
            granted_as: Option<u64>,
        }
        let (mut table, a) = table_with_a();
        let mut live: Vec<Live> = Vec::new();
        let (mut num_granted, mut num_reported) = (0, 0);
        for (operation, index, number) in operations {
            match operation {
                0 => {
                    let id = table.reserve(a, number).unwrap();
                    live.push(Live { id, num_pages: number, granted_as: None });
                }
                1 => {
                    num_granted += 1;
                    if !live.is_empty() {
                        let chosen = index.get(&live).id;
                        let chosen = live.iter_mut().find(|live| live.id == chosen).unwrap();
                        if chosen.granted_as.is_none() {
                            chosen.granted_as = Some(num_granted);
                            table.handle_granted(chosen.id, num_granted);
                        }
                    }
                }
                2 => {
                    let said = num_granted.min(u64::from(number));
                    num_reported = num_reported.max(said);
                    table.handle_report(a, report(100, said), 1);
                }
                _ if live.is_empty() => {}
                _ => {
                    let ended = live.swap_remove(index.index(live.len()));
                    table.release(ended.id);
                }
            }
            let expected: u32 = live.iter()
                .filter(|live| live.granted_as.is_none_or(|number| number > num_reported))
                .map(|live| live.num_pages)
                .sum();
            prop_assert_eq!(table.decode_nodes(1)[0].num_unreported_pages, expected);
        }
    }
}
