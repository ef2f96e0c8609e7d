//! Placement of requests: cases computed by hand, and invariants of any fleet.

use corella_core::{
    DecodeCandidate, Fleet, LoadReport, NodeId, PeerPolicy, PeerStanding, Placement,
    PlacementConfig, PlacementRequest,
};
use proptest::prelude::*;

fn node(id: u32, num_free_pages: u32) -> DecodeCandidate {
    DecodeCandidate {
        peer_id: NodeId(id),
        standing: PeerStanding::Healthy,
        page_size: 16,
        max_prompt_tokens: u32::MAX,
        report: Some(LoadReport {
            num_free_pages,
            ..LoadReport::default()
        }),
        report_age_us: 0,
        num_unreported_pages: 0,
        bandwidth: None,
        num_cached_rows: 0,
    }
}

fn silent(id: u32) -> DecodeCandidate {
    DecodeCandidate {
        report: None,
        ..node(id, 0)
    }
}

fn waiting(mut node: DecodeCandidate, num_waiting: u32) -> DecodeCandidate {
    node.report.as_mut().unwrap().num_waiting = num_waiting;
    node
}

fn fleet(nodes: &[DecodeCandidate]) -> Fleet<'_> {
    Fleet {
        nodes,
        falls_back: true,
        kv_bytes_per_token: 1000,
        prefill_us: 0,
    }
}

/// 100 prompt tokens and 28 of output: 8 pages of 16.
const REQUEST: PlacementRequest = PlacementRequest {
    num_prompt_tokens: 100,
    num_expected_output_tokens: 28,
    max_tpot_us: None,
};

fn config() -> PlacementConfig {
    PlacementConfig::default()
}

fn remote(id: u32) -> Placement {
    Placement::Remote(NodeId(id))
}

fn place(fleet: &Fleet, cursor: u64) -> Placement {
    fleet.place(&config(), &REQUEST, cursor, &[])
}

/// Each node's share of `num_requests` requests, in an unchanged fleet.
fn shares(config: &PlacementConfig, fleet: &Fleet, num_requests: u64) -> Vec<u64> {
    let mut counts = vec![0; fleet.nodes.len()];
    for cursor in 0..num_requests {
        match fleet.place(config, &REQUEST, cursor, &[]) {
            Placement::Remote(peer_id) => counts[peer_id.0 as usize] += 1,
            other => panic!("{other:?}"),
        }
    }
    counts
}

#[test]
fn short_prompts_stay() {
    let nodes = [node(0, 100)];
    let mut config = config();
    config.disaggregate_min_tokens = 101;
    let mut fleet = fleet(&nodes);
    assert_eq!(fleet.place(&config, &REQUEST, 0, &[]), Placement::Local);
    config.disaggregate_min_tokens = 100;
    assert_eq!(fleet.place(&config, &REQUEST, 0, &[]), remote(0));
    // Without room on this node, a short prompt leaves it as well.
    config.disaggregate_min_tokens = 101;
    fleet.falls_back = false;
    assert_eq!(fleet.place(&config, &REQUEST, 0, &[]), remote(0));
}

#[test]
fn a_request_needs_room_for_prompt_and_output() {
    assert_eq!(place(&fleet(&[node(0, 8)]), 0), remote(0));
    assert_eq!(place(&fleet(&[node(0, 7)]), 0), Placement::Local);
    let reserved = DecodeCandidate {
        num_unreported_pages: 3,
        ..node(0, 10)
    };
    assert_eq!(place(&fleet(&[reserved]), 0), Placement::Local);
    let bigger_pages = DecodeCandidate {
        page_size: 32,
        ..node(0, 4)
    };
    assert_eq!(place(&fleet(&[bigger_pages]), 0), remote(0));
}

#[test]
fn all_full_is_full() {
    let nodes = [node(0, 7), node(1, 0)];
    let mut fleet = fleet(&nodes);
    assert_eq!(place(&fleet, 0), Placement::Local);
    fleet.falls_back = false;
    assert_eq!(place(&fleet, 0), Placement::Full);
    fleet.nodes = &[];
    assert_eq!(place(&fleet, 0), Placement::Full);
}

#[test]
fn only_healthy_nodes_are_chosen() {
    for standing in [
        PeerStanding::Suspect,
        PeerStanding::Incompatible,
        PeerStanding::Draining,
    ] {
        let other = DecodeCandidate {
            standing,
            ..node(0, 1000)
        };
        assert_eq!(place(&fleet(&[other]), 0), Placement::Local);
        assert_eq!(place(&fleet(&[other, node(1, 8)]), 0), remote(1));
    }
}

/// A prompt has 100 rows of 1,000 bytes. This node takes 50 ms to compute them (512 ms for 1,024 tokens). A link of
/// 1 MB/s takes 100 ms to send them, which is just tolerated: sending may take 50 ms longer than computing.
#[test]
fn what_is_quicker_to_compute_than_to_send_stays() {
    let at = |bandwidth, falls_back| {
        let nodes = [DecodeCandidate {
            bandwidth: Some(bandwidth),
            ..node(0, 100)
        }];
        let fleet = Fleet {
            prefill_us: 512_000,
            falls_back,
            ..fleet(&nodes)
        };
        place(&fleet, 0)
    };
    assert_eq!(at(1_000_000, true), remote(0));
    assert_eq!(at(999_000, true), Placement::Local);
    assert_eq!(at(999_000, false), remote(0));

    // The node with the fast link takes the request, even if it has little room.
    let far = DecodeCandidate {
        bandwidth: Some(100_000),
        ..node(0, 1000)
    };
    let near = DecodeCandidate {
        bandwidth: Some(2_000_000),
        ..node(1, 8)
    };
    let nodes = [far, near];
    let fleet = Fleet {
        prefill_us: 512_000,
        ..fleet(&nodes)
    };
    assert!((0..50).all(|cursor| place(&fleet, cursor) == remote(1)));
}

/// The fractions of 0, 1, 2, … times the golden ratio are 0, .618, .236, .854, .472, .090, .708 and .326. Among four
/// equal parts, these fractions lie in the parts 0, 2, 0, 3, 1, 0, 2 and 1. Node 1 has the last part.
#[test]
fn draws_follow_the_weights() {
    let nodes = [node(0, 30), node(1, 10)];
    let drawn: Vec<_> = (0..8).map(|cursor| place(&fleet(&nodes), cursor)).collect();
    let expected = [0, 0, 0, 1, 0, 0, 0, 0].map(remote);
    assert_eq!(drawn, expected);
}

#[test]
fn a_slow_link_makes_a_weight_fall() {
    let mut nodes = [node(0, 100), node(1, 100)];
    assert_eq!(shares(&config(), &fleet(&nodes), 1000), [500, 500]);
    // 100 rows of 1,000 bytes take 50 ms and 350 ms. Another 50 ms are added to each time, so the second node gets a
    // quarter of the first node's requests.
    nodes[0].bandwidth = Some(2_000_000);
    nodes[1].bandwidth = Some(285_714);
    let counts = shares(&config(), &fleet(&nodes), 1000);
    assert!(counts[1].abs_diff(200) <= 3, "{counts:?}");
    // A small transfer measures round trips and waits for a core.
    nodes[0].bandwidth = Some(1_000_000_000);
    nodes[1].bandwidth = Some(100_000_000);
    let counts = shares(&config(), &fleet(&nodes), 1000);
    assert!(counts[1].abs_diff(500) <= 10, "{counts:?}");
    // A link without a measurement counts as the fastest.
    nodes[0].bandwidth = None;
    assert_eq!(shares(&config(), &fleet(&nodes), 1000), [500, 500]);
}

#[test]
fn round_robin_takes_turns_among_those_with_room() {
    let config = PlacementConfig {
        policy: PeerPolicy::RoundRobin,
        ..config()
    };
    let nodes = [node(0, 1000), node(1, 8), node(2, 7), node(3, 8)];
    assert_eq!(shares(&config, &fleet(&nodes), 9), [3, 3, 0, 3]);
}

#[test]
fn too_few_reports_mean_turns() {
    // Three of five nodes report: all five take turns, regardless of the reports.
    let mut nodes = [
        node(0, 1000),
        node(1, 10),
        node(2, 10),
        silent(3),
        silent(4),
    ];
    assert_eq!(shares(&config(), &fleet(&nodes), 10), [2; 5]);
    // Four of five nodes report, and these four are weighted.
    nodes[3] = node(3, 980);
    let counts = shares(&config(), &fleet(&nodes), 2000);
    assert!(
        counts[0].abs_diff(1000) <= 3 && counts[4] == 0,
        "{counts:?}"
    );
    // An old report does not count.
    nodes[3].report_age_us = config().max_report_age_us + 1;
    assert_eq!(shares(&config(), &fleet(&nodes), 10), [2; 5]);
    // Excluded nodes need not report.
    nodes[3].report_age_us = 0;
    nodes[2] = DecodeCandidate {
        standing: PeerStanding::Suspect,
        ..silent(2)
    };
    nodes[4].standing = PeerStanding::Suspect;
    let counts = shares(&config(), &fleet(&nodes), 1990);
    assert!(counts[0].abs_diff(1000) <= 3, "{counts:?}");
}

#[test]
fn prompts_go_to_the_group_for_their_length() {
    let limited = |id, num_free_pages| DecodeCandidate {
        max_prompt_tokens: 100,
        ..node(id, num_free_pages)
    };
    let nodes = [limited(0, 20), limited(1, 20), node(2, 1000)];
    assert_eq!(shares(&config(), &fleet(&nodes), 20), [10, 10, 0]);
    let longer = PlacementRequest {
        num_prompt_tokens: 101,
        ..REQUEST
    };
    let placement = fleet(&nodes).place(&config(), &longer, 0, &[]);
    assert_eq!(placement, remote(2));

    // Node 2, which also takes long prompts, takes the request if the nodes with a limit are full or would make it
    // wait.
    let full = [limited(0, 7), limited(1, 7), node(2, 1000)];
    assert_eq!(place(&fleet(&full), 0), remote(2));
    let busy = [
        waiting(limited(0, 20), 1),
        waiting(limited(1, 20), 3),
        node(2, 1000),
    ];
    assert_eq!(shares(&config(), &fleet(&busy), 20), [0, 0, 20]);
    // If the request has to wait anywhere, the nodes with a limit are chosen again.
    let all_busy = [busy[0], busy[1], waiting(node(2, 1000), 1)];
    assert_eq!(shares(&config(), &fleet(&all_busy), 20), [10, 10, 0]);
}

/// Sixteen requests arrive without a new report: this node's reservations spread them evenly,
/// although each node's report shows the same free pages.
#[test]
fn reservations_spread_what_reports_do_not_know() {
    let mut nodes = [0, 1, 2, 3].map(|id| node(id, 40));
    let mut counts = [0; 4];
    for cursor in 0..16 {
        let Placement::Remote(peer_id) = place(&fleet(&nodes), cursor) else {
            panic!("{cursor} {nodes:?}");
        };
        nodes[peer_id.0 as usize].num_unreported_pages += 8;
        counts[peer_id.0 as usize] += 1;
    }
    assert!(
        counts.iter().all(|count| (2..=5).contains(count)),
        "{counts:?}"
    );
    // Twenty requests fill all nodes.
    for cursor in 16..20 {
        let Placement::Remote(peer_id) = place(&fleet(&nodes), cursor) else {
            panic!("{cursor} {nodes:?}");
        };
        nodes[peer_id.0 as usize].num_unreported_pages += 8;
    }
    assert_eq!(place(&fleet(&nodes), 20), Placement::Local);
}

/// Ten prefill nodes with the same reports place four requests each at the same time, without
/// knowing of one another. If each took the best, the freest of five nodes would get all of them.
#[test]
fn prefill_nodes_do_not_herd() {
    let nodes = [
        node(0, 120),
        node(1, 100),
        node(2, 100),
        node(3, 100),
        node(4, 100),
    ];
    let mut totals = [0; 5];
    for prefill_node in 0..10u64 {
        let mut own = nodes;
        for request in 0..4 {
            let cursor = prefill_node * 0x1234_5678_9abc + request;
            let Placement::Remote(peer_id) = place(&fleet(&own), cursor) else {
                panic!("{own:?}");
            };
            own[peer_id.0 as usize].num_unreported_pages += 8;
            totals[peer_id.0 as usize] += 1;
        }
    }
    assert!(totals.iter().all(|&total| total <= 14), "{totals:?}");
}

#[test]
fn who_has_refused_is_not_chosen_again() {
    let nodes = [0, 1, 2, 3, 4].map(|id| node(id, 100));
    let mut asked = Vec::new();
    for _ in 0..nodes.len() {
        let placement = fleet(&nodes).place(&config(), &REQUEST, 7, &asked);
        let Placement::Remote(peer_id) = placement else {
            panic!("{placement:?} after {asked:?}");
        };
        assert!(!asked.contains(&peer_id), "{peer_id} again");
        asked.push(peer_id);
    }
    let here = fleet(&nodes);
    let placement = here.place(&config(), &REQUEST, 7, &asked);
    assert_eq!(placement, Placement::Local);
    let nowhere = Fleet {
        falls_back: false,
        ..here
    };
    let placement = nowhere.place(&config(), &REQUEST, 7, &asked);
    assert_eq!(placement, Placement::Full);
}

fn any_node() -> impl Strategy<Value = DecodeCandidate> {
    let standing = prop_oneof![
        4 => Just(PeerStanding::Healthy),
        1 => Just(PeerStanding::Suspect),
        1 => Just(PeerStanding::Incompatible),
        1 => Just(PeerStanding::Draining),
    ];
    let report = prop::option::weighted(0.8, (0..60u32, 0..3u32));
    let limit = prop_oneof![Just(u32::MAX), Just(100), Just(200)];
    let bandwidth = prop::option::of(prop_oneof![0..3u64, 1..u64::MAX, 1_000_000..50_000_000u64]);
    let counts = (0..40u32, 0..6_000_000u64, 0..300u32, 0..64u32);
    (standing, report, limit, bandwidth, counts).prop_map(
        |(standing, report, max_prompt_tokens, bandwidth, counts)| DecodeCandidate {
            peer_id: NodeId(0),
            standing,
            page_size: counts.3,
            max_prompt_tokens,
            report: report.map(|(num_free_pages, num_waiting)| LoadReport {
                num_free_pages,
                num_waiting,
                ..LoadReport::default()
            }),
            report_age_us: counts.1,
            num_unreported_pages: counts.0,
            bandwidth,
            num_cached_rows: counts.2,
        },
    )
}

/// Follows the text of the rule, not the order of the code.
fn may_take(node: &DecodeCandidate, request: &PlacementRequest, config: &PlacementConfig) -> bool {
    let num_tokens = request.num_prompt_tokens + request.num_expected_output_tokens;
    let has_room = match node.report {
        Some(report) if node.report_age_us <= config.max_report_age_us => {
            let num_free = report.num_free_pages as i64 - i64::from(node.num_unreported_pages);
            num_free.max(0) * i64::from(node.page_size.max(1)) >= i64::from(num_tokens)
        }
        _ => true,
    };
    node.standing == PeerStanding::Healthy
        && node.max_prompt_tokens >= request.num_prompt_tokens
        && has_room
}

proptest! {
    #[test]
    fn a_placement_is_one_that_can_be(
        mut nodes in prop::collection::vec(any_node(), 0..8),
        num_prompt_tokens in 0..300u32,
        num_expected_output_tokens in 0..300u32,
        cursor: u64,
        falls_back: bool,
        is_weighted: bool,
        disaggregate_min_tokens in 0..200u32,
        prefill_us in prop_oneof![Just(0), 1..1_000_000u64],
        num_refused in 0..4u32,
    ) {
        for (id, node) in nodes.iter_mut().enumerate() {
            node.peer_id = NodeId(id as u32);
        }
        let config = PlacementConfig {
            policy: if is_weighted { PeerPolicy::Weighted } else { PeerPolicy::RoundRobin },
            disaggregate_min_tokens,
            ..config()
        };
        let fleet = Fleet { nodes: &nodes, falls_back, kv_bytes_per_token: 1000, prefill_us };
        let request = PlacementRequest { num_prompt_tokens, num_expected_output_tokens, max_tpot_us: None };
        let refused: Vec<_> = (0..num_refused).map(NodeId).collect();
        let is_candidate = |node: &DecodeCandidate| {
            may_take(node, &request, &config) && !refused.contains(&node.peer_id)
        };
        let placement = fleet.place(&config, &request, cursor, &refused);
        match placement {
            Placement::Remote(peer_id) => {
                prop_assert!(is_candidate(&nodes[peer_id.0 as usize]));
                let is_short = num_prompt_tokens < disaggregate_min_tokens;
                prop_assert!(!is_short || !falls_back);
            }
            Placement::Local => prop_assert!(falls_back),
            Placement::Full => prop_assert!(!falls_back && !nodes.iter().any(is_candidate)),
        }
        prop_assert_eq!(placement, fleet.place(&config, &request, cursor, &refused));
    }

    /// With any weights, no run of requests gives a node much more than its share.
    #[test]
    fn shares_are_in_proportion_soon(
        pages in prop::collection::vec(8..2000u32, 1..6),
        first in 0..u64::MAX / 2,
    ) {
        let nodes: Vec<_> = pages.iter().enumerate()
            .map(|(id, &pages)| node(id as u32, pages))
            .collect();
        let total: f64 = pages.iter().map(|&pages| f64::from(pages)).sum();
        let mut counts = vec![0.0; nodes.len()];
        for number in 1..=200u32 {
            if let Placement::Remote(peer_id) = place(&fleet(&nodes), first + u64::from(number)) {
                counts[peer_id.0 as usize] += 1.0;
            }
            for (&count, &pages) in counts.iter().zip(&pages) {
                let share = f64::from(pages) / total * f64::from(number);
                prop_assert!((count - share).abs() <= 4.0, "{count} for {share}");
            }
        }
    }

    /// While reservations are counted, no node gets requests for more pages than it has reported.
    #[test]
    fn no_node_is_overbooked(
        pages in prop::collection::vec(0..100u32, 1..6),
        lengths in prop::collection::vec(1..400u32, 1..60),
        cursor in 0..u64::MAX / 2,
    ) {
        let mut nodes: Vec<_> = pages.iter().enumerate()
            .map(|(id, &pages)| node(id as u32, pages))
            .collect();
        for (number, &num_prompt_tokens) in lengths.iter().enumerate() {
            let request = PlacementRequest { num_prompt_tokens, num_expected_output_tokens: 16, max_tpot_us: None };
            let placement = fleet(&nodes).place(&config(), &request, cursor + number as u64, &[]);
            if let Placement::Remote(peer_id) = placement {
                let node = &mut nodes[peer_id.0 as usize];
                node.num_unreported_pages += (num_prompt_tokens + 16).div_ceil(16);
                prop_assert!(node.num_unreported_pages <= pages[peer_id.0 as usize]);
            }
        }
    }
}
