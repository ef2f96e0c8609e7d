//! Routes of a prefill node's requests, for given loads, links and cached rows of its decode nodes.

use std::sync::LazyLock;

use corella_core::session::{FetchPace, NodeIncarnation};
use corella_core::{
    BlockHasher, ComputePlace, ComputeQuery, ComputeSite, Directory, DirectoryConfig, Fetching,
    Holder, Incarnation, LoadReport, MissedObjective, Namespace, NodeId, ObjectiveKind, PageHash,
    PeerFacts, PeerRecord, Route, RouteQuery, SchedulerStats, SessionId, StayReason,
};

const PAGE_SIZE: u32 = 4;
/// A row has 1 kB.
const ROW_BYTES: u64 = 1000;
/// 1,024 prompt tokens take 1,024 us here.
static HERE: LazyLock<SchedulerStats> = LazyLock::new(|| SchedulerStats {
    prefill_us: 1024,
    ..SchedulerStats::default()
});

fn config() -> DirectoryConfig {
    DirectoryConfig {
        page_size: PAGE_SIZE,
        kv_bytes_per_token: ROW_BYTES,
        ..DirectoryConfig::default()
    }
}

/// Knows healthy nodes of incarnation 1 with 100 free pages each.
fn directory(config: DirectoryConfig, num_nodes: u32) -> Directory {
    let mut directory = Directory::new(config);
    let records: Vec<_> = (0..num_nodes)
        .map(|node| PeerRecord {
            instance_id: node.to_string(),
            incarnation: None,
            max_prompt_tokens: u32::MAX,
            is_draining: false,
        })
        .collect();
    directory.peers.handle_list(&records, 0);
    for node in 0..num_nodes {
        answer(&mut directory, node, 1);
    }
    directory
}

/// A node answers a probe, and reports its load.
fn answer(directory: &mut Directory, node: u32, incarnation: u64) {
    let facts = PeerFacts {
        incarnation,
        page_size: PAGE_SIZE,
    };
    let peer = directory.peers.handle_hello(NodeId(node), facts, 0);
    let report = LoadReport {
        num_free_pages: 100,
        prefill_us: 1024,
        ..LoadReport::default()
    };
    let peer = peer.expect("it is known");
    directory.peers.handle_report(peer, report, 0);
}

fn hashes(num_tokens: u32) -> Vec<PageHash> {
    let tokens: Vec<u32> = (0..num_tokens).collect();
    BlockHasher::default()
        .hashes(&Namespace::default(), &tokens, PAGE_SIZE)
        .collect()
}

fn query(session: u128, hashes: &[PageHash]) -> RouteQuery<'_> {
    RouteQuery {
        session: SessionId(session),
        num_prompt_tokens: hashes.len() as u32 * PAGE_SIZE,
        num_expected_output_tokens: 0,
        max_tpot_us: None,
        hashes,
        num_choices: 1,
        stays: None,
        tried: &[],
        sibling: None,
        seeks_holder: true,
        fetching: Fetching::Never,
        here: &HERE,
    }
}

fn peer(node: u32) -> NodeIncarnation {
    NodeIncarnation {
        node: NodeId(node),
        incarnation: Incarnation(1),
    }
}

fn session(node: u32, asks_first: bool) -> Route {
    let peer = peer(node);
    Route::Session { peer, asks_first }
}

/// Node `node` has the first `num_tokens` of each prompt of these tests.
fn note_sent(directory: &mut Directory, node: u32, num_tokens: u32) {
    let last = hashes(num_tokens).last().copied();
    directory.handle_allocated(SessionId(u128::MAX), last, peer(node), None);
}

#[test]
fn the_node_with_a_part_of_the_prompt_is_asked_first() {
    let prompt = hashes(20);
    let mut known = directory(config(), 3);
    assert!(matches!(
        known.route(&query(0, &prompt), 0),
        Route::Session {
            asks_first: false,
            ..
        }
    ));
    for node in [2, 0] {
        note_sent(&mut known, node, 12 + 4 * node);
        assert_eq!(known.route(&query(1, &prompt), 0), session(2, true));
    }
    // Choices of one request wait for the rows of the first choice, so that no choice asks a node first.
    let choices = RouteQuery {
        num_choices: 2,
        ..query(2, &prompt)
    };
    assert!(matches!(
        known.route(&choices, 0),
        Route::Session {
            asks_first: false,
            ..
        }
    ));
    let second = RouteQuery {
        sibling: Some(NodeId(1)),
        ..choices
    };
    assert_eq!(known.route(&second, 0), session(1, false));
    // Node 2 was asked already.
    let again = RouteQuery {
        tried: &[NodeId(2)],
        ..query(3, &prompt)
    };
    let route = known.route(&again, 0);
    assert!(
        route == session(0, false) || route == session(1, false),
        "{route:?}"
    );
}

#[test]
fn a_restarted_node_has_nothing_of_before() {
    let prompt = hashes(20);
    let mut known = directory(config(), 1);
    note_sent(&mut known, 0, 16);
    let always = RouteQuery {
        fetching: Fetching::Always,
        ..query(0, &prompt)
    };
    let holder = Holder {
        peer: peer(0),
        num_rows: 16,
    };
    assert_eq!(known.route(&always, 0), Route::Fetch(holder));
    answer(&mut known, 0, 2);
    let restarted = Route::Session {
        peer: NodeIncarnation {
            node: NodeId(1),
            incarnation: Incarnation(2),
        },
        asks_first: false,
    };
    assert_eq!(known.route(&always, 0), restarted);
    assert_eq!(known.route(&query(1, &prompt), 0), restarted);
    // A late answer of the earlier incarnation says nothing of the restarted node.
    note_sent(&mut known, 0, 16);
    assert_eq!(known.route(&always, 0), restarted);
}

/// 400 rows take 400 ms over a link of 1 MB/s, and 0.4 ms to compute.
#[test]
fn rows_that_a_node_has_are_not_sent_there() {
    let prompt = hashes(400);
    let mut known = directory(config(), 1);
    known
        .peers
        .handle_transfer(NodeId(0), 1_000_000, 1_000_000_000, 0);
    assert_eq!(
        known.route(&query(0, &prompt), 0),
        Route::Here(StayReason::SlowLink)
    );
    // 40 rows take 40 ms, which is tolerated.
    note_sent(&mut known, 0, 360);
    assert_eq!(known.route(&query(1, &prompt), 0), session(0, true));
    known.handle_left(SessionId(1));
    // A request after a fetch does not seek the node that has its rows, so this node counts like any other.
    let behind = RouteQuery {
        seeks_holder: false,
        ..query(2, &prompt)
    };
    assert_eq!(known.route(&behind, 0), Route::Here(StayReason::SlowLink));
}

/// A prompt of 240 tokens takes 60 of 100 pages.
#[test]
fn pages_count_as_taken_until_the_session_leaves_or_they_are_reported() {
    let prompt = hashes(240);
    let full = Route::Here(StayReason::NoRoom);
    let mut known = directory(config(), 1);
    assert_eq!(known.route(&query(0, &prompt), 0), session(0, false));
    assert_eq!(known.route(&query(1, &prompt), 0), full);
    // The session that holds the pages is routed again, and its first reservation still counts.
    assert_eq!(known.route(&query(0, &prompt), 0), full);
    assert_eq!(known.num_reservations(), 1);
    known.handle_left(SessionId(0));
    assert_eq!(known.num_reservations(), 0);
    assert_eq!(known.route(&query(1, &prompt), 0), session(0, false));
    // The node's report counts the reservation.
    known.handle_allocated(SessionId(1), None, peer(0), Some(1));
    let report = LoadReport {
        num_free_pages: 70,
        num_reservations: 1,
        ..LoadReport::default()
    };
    known.peers.handle_report(NodeId(0), report, 0);
    assert_eq!(known.route(&query(2, &prompt), 0), session(0, false));
    let refusing = DirectoryConfig {
        falls_back: false,
        ..config()
    };
    let mut known = directory(refusing, 1);
    assert_eq!(known.route(&query(0, &prompt), 0), session(0, false));
    assert_eq!(known.route(&query(1, &prompt), 0), Route::Refused);
}

#[test]
fn a_request_may_have_to_stay() {
    let prompt = hashes(20);
    let mut settings = config();
    settings.placement.disaggregate_min_tokens = 21;
    let mut known = directory(settings, 1);
    assert_eq!(
        known.route(&query(0, &prompt), 0),
        Route::Here(StayReason::Short)
    );
    let bound = RouteQuery {
        stays: Some(StayReason::Constraint),
        ..query(0, &prompt)
    };
    assert_eq!(known.route(&bound, 0), Route::Here(StayReason::Constraint));
    assert_eq!(known.num_reservations(), 0);
}

/// The decode node has 80 of 100 tokens, and would compute 20 beside ten requests: 220 us.
#[test]
fn blocks_are_fetched_where_that_is_quicker_than_leaving_the_prompt_there() {
    let prompt = hashes(100);
    let mut known = directory(config(), 1);
    note_sent(&mut known, 0, 80);
    let report = |num_running| LoadReport {
        num_free_pages: 100,
        prefill_us: 1024,
        num_running,
        ..LoadReport::default()
    };
    let mut pace = FetchPace::default();
    let by = |pace| RouteQuery {
        fetching: Fetching::IfQuicker(pace),
        ..query(0, &prompt)
    };
    // Both would compute 20 tokens, and this node would send 20 rows: 160 us.
    known.peers.handle_report(NodeId(0), report(0), 0);
    assert_eq!(known.route(&by(pace), 0), session(0, true));
    known.peers.handle_report(NodeId(0), report(10), 0);
    let holder = Holder {
        peer: peer(0),
        num_rows: 80,
    };
    assert_eq!(known.route(&by(pace), 0), Route::Fetch(holder));
    // The decode node tells that it has 80 rows, and this node has 40 of them.
    let asked = |pace, num_cached_here| ComputeQuery {
        node: NodeId(0),
        num_prompt_tokens: 100,
        num_cached_rows: 80,
        here: ComputeSite::of(&HERE, num_cached_here),
        fetching: Fetching::IfQuicker(pace),
    };
    // 20 us, 160 us for sending, and 40 us for ten blocks: 220 us.
    pace.note_load(10, 40);
    let decided = known.decide(&asked(pace, 40), 0);
    assert_eq!(
        (decided.place, decided.fetches),
        (ComputePlace::There, false)
    );
    // There is a block less to fetch.
    let decided = known.decide(&asked(pace, 44), 0);
    assert_eq!((decided.place, decided.fetches), (ComputePlace::Here, true));
    // Less than a block is not fetched.
    let decided = known.decide(&asked(pace, 77), 0);
    assert_eq!(
        (decided.place, decided.fetches),
        (ComputePlace::Here, false)
    );
}

#[test]
fn objectives_choose_the_node_and_refuse_where_none_meets_them() {
    let prompt = hashes(20);
    let paces = |known: &mut Directory, paces: [u64; 2]| {
        for (node, tpot_us) in (0..).zip(paces) {
            let report = LoadReport {
                num_free_pages: 100,
                tpot_us,
                ..LoadReport::default()
            };
            known.peers.handle_report(NodeId(node), report, 0);
        }
    };
    let within = |session, max_us| RouteQuery {
        max_tpot_us: Some(max_us),
        ..query(session, &prompt)
    };
    for falls_back in [true, false] {
        let mut known = directory(
            DirectoryConfig {
                falls_back,
                ..config()
            },
            2,
        );
        paces(&mut known, [14_000, 9_000]);
        for number in 0..4 {
            assert_eq!(known.route(&within(number, 9_000), 0), session(1, false));
            known.handle_left(SessionId(number));
        }
        let expected = match falls_back {
            true => Route::Here(StayReason::TooSlow),
            false => Route::TooSlow(MissedObjective {
                kind: ObjectiveKind::Tpot,
                expected_us: 9_000,
                objective_us: 8_999,
            }),
        };
        paces(&mut known, [9_000, 9_000]);
        assert_eq!(known.route(&within(9, 8_999), 0), expected);
        // Without room, the pace does not matter.
        let long = hashes(420);
        let route = RouteQuery {
            max_tpot_us: Some(8_999),
            ..query(9, &long)
        };
        let expected = match falls_back {
            true => Route::Here(StayReason::NoRoom),
            false => Route::Refused,
        };
        assert_eq!(known.route(&route, 0), expected);
    }
}

/// The limit of prompt tokens comes with a node's report, because a list has only addresses.
#[test]
fn prompts_go_to_the_group_that_takes_them() {
    let mut known = directory(config(), 2);
    let report = LoadReport {
        num_free_pages: 1000,
        max_prompt_tokens: Some(40),
        ..LoadReport::default()
    };
    known.peers.handle_report(NodeId(1), report, 0);
    for number in 0..4 {
        let (short, long) = (hashes(40), hashes(44));
        assert_eq!(known.route(&query(number, &short), 0), session(1, false));
        assert_eq!(known.route(&query(number, &long), 0), session(0, false));
    }
}
