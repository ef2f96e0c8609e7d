//! A prefill node's sessions and its directory together.

use corella_core::session::{
    Allocated, NodeIncarnation, PrefillAction, Refusal, SessionKey, SubmissionError, ToDecode,
    ToPrefill,
};
use corella_core::{
    AdmissionError, BlockHasher, CachedRows, Call, DirectoryConfig, Fetching, LoadReport,
    Namespace, NodeId, PageHash, PeerChange, PeerFacts, PeerPolicy, PeerRecord, PlacementConfig,
    PrefillNode, Route, SchedulerStats, SessionId,
};

use super::fixture::*;

const PAGE_SIZE: u32 = 4;

fn record(instance: u32, incarnation: u64) -> PeerRecord {
    PeerRecord {
        instance_id: instance.to_string(),
        incarnation: Some(incarnation),
        max_prompt_tokens: u32::MAX,
        is_draining: false,
    }
}

/// Makes a prefill node with `num_nodes` healthy decode nodes of incarnation 5. Requests go to them in turn.
fn node(num_nodes: u32, falls_back: bool) -> PrefillNode {
    let directory = DirectoryConfig {
        placement: PlacementConfig {
            policy: PeerPolicy::RoundRobin,
            ..PlacementConfig::default()
        },
        falls_back,
        page_size: PAGE_SIZE,
        ..DirectoryConfig::default()
    };
    let mut node = PrefillNode::new(config(), directory, hello(5)).unwrap();
    let records: Vec<_> = (0..num_nodes).map(|id| record(id, 5)).collect();
    node.peers().handle_list(&records, 0);
    for id in 0..num_nodes {
        greet(&mut node, id);
    }
    while node.poll_change(0).is_some() {}
    node
}

/// A node answers a probe: it has room, and computes 1,024 tokens in as many microseconds.
fn greet(node: &mut PrefillNode, id: u32) {
    let facts = PeerFacts {
        incarnation: 5,
        page_size: PAGE_SIZE,
    };
    let report = LoadReport {
        num_free_pages: 100,
        prefill_us: 1024,
        ..LoadReport::default()
    };
    let id = node.peers().handle_hello(NodeId(id), facts, 1).unwrap();
    node.peers().handle_report(id, report, 1);
}

/// This node computes at the same speed.
fn here() -> SchedulerStats {
    SchedulerStats {
        prefill_us: 1024,
        ..SchedulerStats::default()
    }
}

/// The whole blocks of the fixture's prompt.
fn hashes() -> Vec<PageHash> {
    let prompt: Vec<u32> = (0..NUM_ROWS).collect();
    BlockHasher::default()
        .hashes(&Namespace::default(), &prompt, PAGE_SIZE)
        .collect()
}

/// Routes and submits the fixture's prompt.
fn call(
    node: &mut PrefillNode,
    session: u128,
    sibling: Option<u128>,
) -> (Route, Result<(), SubmissionError>) {
    let hashes = hashes();
    let call = Call {
        session: SessionId(session),
        namespace: &Namespace::default(),
        num_prompt_tokens: NUM_ROWS,
        stopping: &submission(session).request.stopping,
        max_tpot_us: None,
        hashes: &hashes,
        num_choices: 1,
        sibling: sibling.map(SessionId),
        stays: None,
        fetching: Some(Fetching::Never),
    };
    let route = node.route(&call, &here(), 0);
    (
        route,
        node.submit(submission(session), hashes.into(), route, 0),
    )
}

fn actions(node: &mut PrefillNode) -> Vec<PrefillAction> {
    std::iter::from_fn(|| node.poll_action()).collect()
}

/// The nodes to which streams are opened.
fn opened(actions: &[PrefillAction]) -> Vec<u32> {
    let node = |action: &PrefillAction| match action {
        PrefillAction::OpenStream { node, .. } => Some(node.0),
        _ => None,
    };
    actions.iter().filter_map(node).collect()
}

fn allocated(node: &mut PrefillNode, key: SessionKey, num_cached_rows: u32) {
    let mut hello = hello(5);
    hello.protocol_minor = 3;
    node.handle_message(key, ToPrefill::Hello(Box::new(hello)), 1);
    let allocated = Allocated {
        num_cached_rows,
        granted_as: Some(1),
    };
    node.handle_message(key, ToPrefill::Allocated(allocated), 1);
}

fn decide(key: SessionKey, num_cached_rows: u32) -> PrefillAction {
    PrefillAction::Decide {
        key,
        node: NodeId(0),
        num_cached_rows,
    }
}

/// Reports the cached rows of a prompt on this node and on the decode node. Returns the node whose blocks are fetched.
fn looked_up(
    node: &mut PrefillNode,
    key: SessionKey,
    [num_here, num_there]: [u32; 2],
) -> Option<NodeIncarnation> {
    let cached = CachedRows {
        num_here,
        num_there,
    };
    node.handle_looked_up(key, cached, Fetching::Always, &here(), 2)
}

fn num_pages_taken(node: &mut PrefillNode) -> u32 {
    let nodes = node.peers().decode_nodes(1);
    nodes.iter().map(|node| node.num_unreported_pages).sum()
}

#[test]
fn a_refusal_leads_to_the_next_node_and_moves_the_reservation() {
    let mut node = node(2, true);
    assert!(call(&mut node, 1, None).1.is_ok());
    assert_eq!(opened(&actions(&mut node)), [0]);
    // 10 prompt tokens and 8 of output: five pages of 4.
    assert_eq!(num_pages_taken(&mut node), 5);
    node.handle_message(key(1, 0), ToPrefill::Refused(Refusal::Exhausted), 1);
    assert_eq!(opened(&actions(&mut node)), [1]);
    let pages = node.peers().decode_nodes(1);
    let pages = pages.iter().map(|node| node.num_unreported_pages);
    assert_eq!(pages.collect::<Vec<_>>(), [0, 5]);
    assert!(node.cancel(SessionId(1), 1));
    actions(&mut node);
    assert_eq!(num_pages_taken(&mut node), 0);
    assert_eq!(node.directory().num_reservations(), 0);
    node.check_invariants();
}

#[test]
fn choices_follow_the_first_of_them_that_has_a_node() {
    let mut node = node(3, true);
    call(&mut node, 1, None).1.unwrap();
    call(&mut node, 2, Some(1)).1.unwrap();
    assert_eq!(opened(&actions(&mut node)), [0, 0]);
    // Another request takes the next node in turn.
    call(&mut node, 3, None).1.unwrap();
    assert_ne!(opened(&actions(&mut node)), [0]);
}

#[test]
fn a_route_that_leads_nowhere_leaves_nothing() {
    let mut node = node(0, false);
    let refused = SubmissionError::Refused(AdmissionError::NoDecodeNode);
    assert_eq!(call(&mut node, 1, None), (Route::Refused, Err(refused)));
    assert_eq!(actions(&mut node), []);
    node.check_invariants();
    // The same session may come again.
    let records = [record(0, 5)];
    node.peers().handle_list(&records, 0);
    assert!(call(&mut node, 1, None).1.is_err(), "it has not answered");
}

/// The driver finds that no engine can serve the call.
#[test]
fn a_call_that_is_given_up_takes_no_pages() {
    let mut node = node(1, true);
    let stopping = submission(1).request.stopping;
    let call = Call {
        session: SessionId(1),
        namespace: &Namespace::default(),
        num_prompt_tokens: NUM_ROWS,
        stopping: &stopping,
        max_tpot_us: None,
        hashes: &[],
        num_choices: 1,
        sibling: None,
        stays: None,
        fetching: None,
    };
    node.route(&call, &here(), 0);
    assert_eq!(num_pages_taken(&mut node), 5);
    node.give_up(SessionId(1));
    assert_eq!(num_pages_taken(&mut node), 0);
}

/// A session that cannot be opened gives its pages back.
#[test]
fn a_session_that_was_cancelled_before_it_came_takes_no_pages() {
    let mut node = node(1, true);
    assert!(!node.cancel(SessionId(1), 0));
    assert_eq!(call(&mut node, 1, None).1, Err(SubmissionError::Ended));
    assert_eq!(num_pages_taken(&mut node), 0);
    assert_eq!(node.directory().num_reservations(), 0);
}

#[test]
fn the_registrys_word_of_a_restart_ends_the_sessions_there() {
    let mut node = node(2, true);
    call(&mut node, 1, None).1.unwrap();
    assert_eq!(opened(&actions(&mut node)), [0]);
    node.peers().handle_list(&[record(0, 6), record(1, 5)], 2);
    let restarted = |change: &PeerChange| matches!(change, PeerChange::Restarted { .. });
    let changes: Vec<_> = std::iter::from_fn(|| node.poll_change(2)).collect();
    assert!(changes.iter().any(restarted), "{changes:?}");
    let did = actions(&mut node);
    assert!(did.contains(&PrefillAction::CloseStream { key: key(1, 0) }));
    assert_eq!(opened(&did), [1]);
}

/// The node is probed before another request is sent to it.
#[test]
fn a_node_whose_stream_breaks_is_asked_again_only_after_a_probe() {
    let mut node = node(2, true);
    call(&mut node, 1, None).1.unwrap();
    actions(&mut node);
    node.sessions().handle_stream_closed(key(1, 0), 1);
    assert_eq!(opened(&actions(&mut node)), [1]);
    for session in 2..5 {
        call(&mut node, session, None).1.unwrap();
        assert_eq!(opened(&actions(&mut node)), [1], "{session}");
    }
    greet(&mut node, 0);
    call(&mut node, 5, None).1.unwrap();
    call(&mut node, 6, None).1.unwrap();
    let mut asked = opened(&actions(&mut node));
    asked.sort_unstable();
    assert_eq!(asked, [0, 1]);
}

/// The decode node has nine of ten rows, and this node one page of them.
#[test]
fn the_node_with_a_prompt_is_asked_first_and_left_the_rest() {
    let mut node = node(1, true);
    call(&mut node, 1, None).1.unwrap();
    actions(&mut node);
    allocated(&mut node, key(1, 0), 0);
    let did = actions(&mut node);
    assert!(!did.contains(&decide(key(1, 0), 0)), "{did:?}");
    // Since the first session, this node knows which decode node has the prompt.
    let (route, submitted) = call(&mut node, 2, None);
    assert!(
        matches!(
            route,
            Route::Session {
                asks_first: true,
                ..
            }
        ),
        "{route:?}"
    );
    submitted.unwrap();
    actions(&mut node);
    let key = key(2, 0);
    allocated(&mut node, key, 9);
    assert_eq!(actions(&mut node), [decide(key, 9)]);
    looked_up(&mut node, key, [4, 9]);
    let compute = PrefillAction::Send {
        key,
        message: ToDecode::Compute,
    };
    assert_eq!(actions(&mut node), [compute]);
    // A second answer changes nothing.
    looked_up(&mut node, key, [4, 9]);
    assert_eq!(actions(&mut node), []);
}

/// The decode node has a long queue, so that the prompt is computed here.
#[test]
fn what_a_prompt_that_stays_lacks_is_fetched_before_it_is_computed() {
    let mut node = node(1, true);
    call(&mut node, 1, None).1.unwrap();
    actions(&mut node);
    allocated(&mut node, key(1, 0), 0);
    actions(&mut node);
    call(&mut node, 2, None).1.unwrap();
    actions(&mut node);
    let key = key(2, 0);
    allocated(&mut node, key, 8);
    actions(&mut node);
    // A queue of 2,000 prompts there.
    let report = LoadReport {
        num_free_pages: 100,
        num_waiting: 2_000,
        prefill_us: 1024,
        ..LoadReport::default()
    };
    node.peers().handle_report(NodeId(0), report, 2);
    let asked = looked_up(&mut node, key, [0, 8]);
    let source = NodeIncarnation {
        node: NodeId(0),
        incarnation: key.decode_incarnation,
    };
    assert_eq!(asked, Some(source));
    assert_eq!(actions(&mut node), []);
    node.handle_fetch_begun(key, 3);
    let did = actions(&mut node);
    let runs = |action: &PrefillAction| matches!(action, PrefillAction::SubmitLocally { .. });
    assert!(did.iter().any(runs), "{did:?}");
}
