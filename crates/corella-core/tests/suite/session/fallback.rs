//! A session whose decode node refuses, is slow or is lost: other nodes are asked, then the prefill node goes on alone.

use corella_core::session::{
    AbortReason, ExportTask, PrefillAction, PrefillEnd, Refusal, SessionFinish, ToPrefill,
};
use corella_core::{AdmissionError, FinishReason, NodeId, SessionId};

use crate::session::fixture::{
    DECODE, SECOND_US, config, hello, key, output, peer, submission, tokens,
};
use crate::session::prefill_end::{
    abort_run, actions, allocated, delete, emitted, finish, lose_the_only_node, opened, prefilling,
    runs_locally, say, transferring, tries_next,
};

const SESSION: SessionId = SessionId(1);

fn fallbacks(end: &PrefillEnd) -> Vec<(&'static str, u64)> {
    let counts = end.fallbacks().iter();
    counts.map(|(&reason, &count)| (reason, count)).collect()
}

/// Rules 38 and 58: queue limits apply only to the first run of a session.
#[test]
fn a_session_that_comes_back_was_accepted_before() {
    let is_accepted = |did: &[PrefillAction]| {
        did.iter().find_map(|action| match action {
            PrefillAction::SubmitLocally { is_accepted, .. } => Some(*is_accepted),
            _ => None,
        })
    };
    let mut end = opened();
    let did = allocated(&mut end, key(1, 0), 0);
    assert_eq!(is_accepted(&did), Some(false));
    end.handle_stream_closed(key(1, 0), 1);
    let did = actions(&mut end);
    assert_eq!(
        (is_accepted(&did), tries_next(&did)),
        (None, Some(&[DECODE][..]))
    );
    end.handle_local_output(output(0, Some(3), Some(FinishReason::Length)), 2);
    end.handle_placement(SESSION, None, 3);
    assert_eq!(is_accepted(&actions(&mut end)), Some(true));

    let mut end = transferring();
    let did = lose_the_only_node(&mut end, 1);
    assert_eq!(is_accepted(&did), Some(true));

    let mut end = opened();
    say(
        &mut end,
        key(1, 0),
        ToPrefill::Refused(Refusal::Exhausted),
        1,
    );
    end.handle_placement(SESSION, None, 2);
    assert_eq!(is_accepted(&actions(&mut end)), Some(false));
}

/// Rule 47: a hundred milliseconds for all asked nodes, then this node alone.
#[test]
fn decode_nodes_are_asked_for_no_longer_than_the_budget() {
    let mut end = opened();
    let refused = || ToPrefill::Refused(Refusal::Exhausted);
    let did = say(&mut end, key(1, 0), refused(), 40_000);
    assert_eq!(tries_next(&did), Some(&[DECODE][..]));
    end.handle_placement(SESSION, Some(peer(3, 5)), 40_000);
    actions(&mut end);
    end.handle_timeout(99_999);
    assert_eq!(actions(&mut end), []);
    assert_eq!(end.poll_timeout(), Some(100_000));
    end.handle_timeout(100_000);
    let did = actions(&mut end);
    assert!(did.contains(&PrefillAction::MarkSuspect { node: NodeId(3) }));
    assert_eq!(runs_locally(&did), Some(&[][..]));
    assert_eq!(fallbacks(&end), [("not_taken", 1)]);
}

/// Rule 47: the answer may come before the clock is looked at.
#[test]
fn a_refusal_behind_the_budget_is_the_last() {
    for (answered_us, goes_on) in [(99_999, true), (100_000, false)] {
        let mut end = opened();
        let refused = ToPrefill::Refused(Refusal::Exhausted);
        let did = say(&mut end, key(1, 0), refused, answered_us);
        assert_eq!(tries_next(&did).is_some(), goes_on, "{did:?}");
        assert_eq!(runs_locally(&did).is_some(), !goes_on, "{did:?}");
    }
}

#[test]
fn three_nodes_are_asked_at_most() {
    let mut end = opened();
    for (attempt, node) in [(0, 3), (1, 4)] {
        let refused = ToPrefill::Refused(Refusal::Exhausted);
        assert!(tries_next(&say(&mut end, key(1, attempt), refused, 1)).is_some());
        end.handle_placement(SESSION, Some(peer(node, 5)), 1);
        actions(&mut end);
    }
    let did = say(
        &mut end,
        key(1, 2),
        ToPrefill::Refused(Refusal::Draining),
        1,
    );
    assert_eq!(tries_next(&did), None);
    assert_eq!(runs_locally(&did), Some(&[][..]));
}

/// Rule 38: while the client has received no token, a request moves once to another decode node, which gets the rows
/// that are present.
#[test]
fn a_lost_decode_node_is_replaced_once_and_the_prompt_is_not_computed_again() {
    let mut end = prefilling();
    end.handle_timeout(3 * SECOND_US - 1);
    actions(&mut end);
    end.handle_timeout(3 * SECOND_US);
    let did = actions(&mut end);
    assert!(did.contains(&PrefillAction::MarkSuspect { node: DECODE }));
    assert!(did.contains(&delete(key(1, 0))));
    assert_eq!(tries_next(&did), Some(&[DECODE][..]));
    let now_us = 3 * SECOND_US;
    end.handle_placement(SESSION, Some(peer(3, 5)), now_us);
    actions(&mut end);
    let did = allocated(&mut end, key(1, 1), now_us);
    assert!(
        matches!(
            did[..],
            [PrefillAction::Export(ExportTask::Open { run: 0, .. })]
        ),
        "{did:?}"
    );
    end.handle_stream_closed(key(1, 1), now_us + 1);
    let did = actions(&mut end);
    assert_eq!(tries_next(&did), None);
    // The prompt is still being computed, now for this node itself.
    assert_eq!(runs_locally(&did), None);
    assert_eq!(fallbacks(&end), [("peer_lost", 1)]);
    end.handle_local_output(output(0, Some(3), Some(FinishReason::Length)), now_us + 2);
    let did = actions(&mut end);
    assert_eq!(emitted(&did), [3]);
    assert_eq!(runs_locally(&did), Some(&[3][..]));
    assert_eq!(fallbacks(&end), [("peer_lost", 1)]);
}

#[test]
fn behind_the_first_token_a_request_goes_on_here_without_another_node() {
    let (mut end, key) = (transferring(), key(1, 0));
    say(&mut end, key, tokens(1, &[4]), 1);
    let did = lose_the_only_node(&mut end, 2);
    assert_eq!(runs_locally(&did), Some(&[3, 4][..]));
    assert_eq!(say(&mut end, key, tokens(2, &[5]), 3), []);
    let finish_reason = Some(FinishReason::Length);
    end.handle_local_output(output(1, Some(5), finish_reason), 4);
    let did = actions(&mut end);
    assert_eq!((emitted(&did), finish(&did).is_some()), (vec![5], true));
}

#[test]
fn a_request_that_may_not_go_on_here_says_so() {
    let mut config = config();
    config.resumes_locally = false;
    let mut end = PrefillEnd::new(config, hello(5)).expect("valid times");
    end.submit(submission(1), Some(peer(2, 5)), 0).unwrap();
    allocated(&mut end, key(1, 0), 0);
    end.handle_local_output(output(0, Some(3), Some(FinishReason::Length)), 0);
    actions(&mut end);
    let did = say(
        &mut end,
        key(1, 0),
        ToPrefill::Abort(AbortReason::OutOfPages),
        1,
    );
    assert_eq!(tries_next(&did), Some(&[DECODE][..]));
    end.handle_placement(SESSION, None, 1);
    let did = actions(&mut end);
    let lost = SessionFinish::DecodeLost(AbortReason::OutOfPages);
    assert_eq!(finish(&did), Some(&lost));
    assert_eq!(fallbacks(&end), []);
}

#[test]
fn a_request_that_no_node_takes_may_be_refused_here() {
    let mut config = config();
    config.falls_back = false;
    let new = || PrefillEnd::new(config.clone(), hello(5)).expect("valid times");
    let refused = SessionFinish::Refused(AdmissionError::NoDecodeNode);

    // Placement has no node left.
    let mut end = new();
    end.submit(submission(1), Some(peer(2, 5)), 0).unwrap();
    actions(&mut end);
    let did = say(
        &mut end,
        key(1, 0),
        ToPrefill::Refused(Refusal::Exhausted),
        1,
    );
    assert!(tries_next(&did).is_some());
    end.handle_placement(SESSION, None, 1);
    assert_eq!(finish(&actions(&mut end)), Some(&refused));

    // One node cannot serve the request, so the request may stay here.
    let mut end = new();
    end.submit(submission(1), Some(peer(2, 5)), 0).unwrap();
    actions(&mut end);
    let unsuitable = ToPrefill::Refused(Refusal::Unsuitable);
    assert!(tries_next(&say(&mut end, key(1, 0), unsuitable, 1)).is_some());
    end.handle_placement(SESSION, None, 1);
    assert_eq!(runs_locally(&actions(&mut end)), Some(&[][..]));

    // The decode node is lost while the prompt is computed here, and no other exists.
    let mut end = new();
    end.submit(submission(1), Some(peer(2, 5)), 0).unwrap();
    allocated(&mut end, key(1, 0), 0);
    end.handle_stream_closed(key(1, 0), 1);
    assert!(tries_next(&actions(&mut end)).is_some());
    end.handle_placement(SESSION, None, 1);
    let did = actions(&mut end);
    assert_eq!(finish(&did), Some(&refused));
    assert!(did.contains(&abort_run(0)));
    assert_eq!(end.stats().num_sessions, 0);
    assert_eq!(fallbacks(&end), []);

    // Placement wants it to be decoded here.
    let mut end = new();
    end.submit(submission(1), None, 0).unwrap();
    assert_eq!(runs_locally(&actions(&mut end)), Some(&[][..]));
    assert_eq!(fallbacks(&end), []);
}
