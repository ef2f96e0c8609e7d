//! One session on a decode node, fault by fault.

use std::collections::BTreeSet;

use corella_core::session::{
    AbortReason, Allocated, DecodeAction, DecodeEnd, Hello, Mismatch, Refusal, SessionKey,
    ToDecode, ToPrefill,
};
use corella_core::{Arithmetic, FinishReason, Incarnation, NodeId, RequestError, SessionId};

use crate::session::fixture::{
    NUM_ROWS, PREFILL, SECOND_US, allocate, config, first_token, hello, key, output, tokens,
};

fn end() -> DecodeEnd {
    DecodeEnd::new(config(), hello(5)).expect("valid times")
}

fn actions(end: &mut DecodeEnd) -> Vec<DecodeAction> {
    end.check_invariants();
    std::iter::from_fn(|| end.poll_action()).collect()
}

fn send(key: SessionKey, message: ToPrefill) -> DecodeAction {
    DecodeAction::Send { key, message }
}

fn say(end: &mut DecodeEnd, key: SessionKey, message: ToDecode, now_us: u64) -> Vec<DecodeAction> {
    end.handle_message(PREFILL, key, message, now_us);
    actions(end)
}

/// Returns a node whose session has begun its load.
fn loading(key: SessionKey, now_us: u64) -> DecodeEnd {
    let mut end = end();
    open(&mut end, key, now_us);
    end
}

fn reserved(num_cached_rows: u32) -> Allocated {
    Allocated {
        num_cached_rows,
        granted_as: Some(9),
    }
}

fn open(end: &mut DecodeEnd, key: SessionKey, now_us: u64) {
    let hello = hello(key.prefill_incarnation.0);
    say(end, key, ToDecode::Hello(Box::new(hello)), now_us);
    say(end, key, ToDecode::Allocate(Box::new(allocate())), now_us);
    end.handle_reserved(key, Ok(reserved(4)), now_us);
    let did = actions(end);
    let told = send(key, ToPrefill::Allocated(reserved(4)));
    let load = DecodeAction::Load {
        key,
        node: PREFILL,
        first_row: 4,
        num_rows: NUM_ROWS,
        deadline_us: now_us + 60 * SECOND_US,
    };
    assert_eq!(did, [told, load]);
}

/// The rows of such a node have other bits than those that are computed here.
#[test]
fn a_node_of_another_arithmetic_has_a_namespace_of_its_own() {
    let changes: [fn(&mut Hello); 4] = [
        |_| {},
        |hello| hello.weight_format = "int4".into(),
        |hello| hello.kv_format = "int8".into(),
        |hello| hello.instruction_set = "avx2".into(),
    ];
    let mut seen = BTreeSet::new();
    for change in changes {
        let key = key(1, 0);
        let mut theirs = hello(5);
        change(&mut theirs);
        let mut end = end();
        say(&mut end, key, ToDecode::Hello(Box::new(theirs)), 0);
        let mut asked = allocate();
        asked.namespace.cache_salt = Some("salt".into());
        // The greeting names the arithmetic of a node's rows, and replaces this one.
        asked.namespace.arithmetic = Some(Arithmetic(3));
        let did = say(&mut end, key, ToDecode::Allocate(Box::new(asked)), 0);
        let [DecodeAction::Reserve { allocate, .. }] = &did[..] else {
            panic!("{did:?}");
        };
        let namespace = allocate.namespace.clone();
        assert_eq!(namespace.cache_salt.as_deref(), Some("salt"));
        assert_eq!(namespace.arithmetic.is_none(), seen.is_empty());
        seen.insert(namespace);
    }
    assert_eq!(seen.len(), 4);
}

fn quarantine(key: SessionKey, told: Option<AbortReason>) -> Vec<DecodeAction> {
    let told = told.map(|reason| send(key, ToPrefill::Abort(reason)));
    let mut expected: Vec<_> = told.into_iter().collect();
    expected.push(DecodeAction::CloseStream { key });
    expected.push(DecodeAction::AbortLocal { key });
    expected.push(DecodeAction::CancelLoad { key });
    expected
}

#[test]
fn rows_and_first_token_are_both_needed_in_any_order() {
    let key = key(1, 0);
    let first = || ToDecode::FirstToken(first_token(3));
    let arrived = || DecodeAction::Arrived {
        key,
        first_token: first_token(3),
    };
    let mut end = loading(key, 0);
    assert_eq!(say(&mut end, key, first(), 1), []);
    end.handle_load_done(key, 2);
    let done = send(key, ToPrefill::LoadDone);
    assert_eq!(actions(&mut end), [done.clone(), arrived()]);

    let mut end = loading(key, 0);
    end.handle_load_done(key, 1);
    assert_eq!(actions(&mut end), [done]);
    // A repeated message has no effect.
    end.handle_load_done(key, 1);
    assert_eq!(actions(&mut end), []);
    assert_eq!(say(&mut end, key, first(), 2), [arrived()]);
    assert_eq!(say(&mut end, key, first(), 3), []);
    end.handle_load_done(key, 3);
    assert_eq!(actions(&mut end), []);

    end.handle_local_output(key, output(0, Some(4), None), 4);
    assert_eq!(actions(&mut end), [send(key, tokens(1, &[4]))]);
    end.handle_local_output(key, output(0, Some(5), Some(FinishReason::Length)), 5);
    let did = actions(&mut end);
    assert_eq!(did[0], send(key, tokens(2, &[5])));
    assert_eq!(did[2..], [DecodeAction::CloseStream { key }]);
    assert_eq!(end.stats().num_sessions, 0);
}

/// Rule 43: a stream may be cancelled before its messages are read.
#[test]
fn a_cancel_before_the_session_opens_allocates_nothing() {
    let (mut end, key) = (end(), key(1, 0));
    say(&mut end, key, ToDecode::Abort(AbortReason::Cancelled), 0);
    let did = say(&mut end, key, ToDecode::Hello(Box::new(hello(5))), 1);
    let refused = send(key, ToPrefill::Refused(Refusal::Ended));
    assert_eq!(did[1..], [refused, DecodeAction::CloseStream { key }]);
    assert_eq!(
        say(&mut end, key, ToDecode::Allocate(Box::new(allocate())), 2),
        []
    );
    assert_eq!(end.stats().num_sessions, 0);
}

#[test]
fn an_allocation_is_made_and_answered_once() {
    let (mut end, key) = (end(), key(1, 0));
    let hello = || ToDecode::Hello(Box::new(hello(5)));
    let allocate = || ToDecode::Allocate(Box::new(allocate()));
    say(&mut end, key, hello(), 0);
    assert_eq!(say(&mut end, key, hello(), 0), []);
    assert_eq!(say(&mut end, key, allocate(), 0).len(), 1);
    assert_eq!(say(&mut end, key, allocate(), 0), []);
    end.handle_reserved(key, Ok(reserved(0)), 1);
    assert_eq!(actions(&mut end).len(), 2);
    assert_eq!(say(&mut end, key, allocate(), 2), []);
    end.handle_reserved(key, Ok(reserved(0)), 2);
    assert_eq!(actions(&mut end), []);
}

/// Rule 39: the peer is given up after three seconds, and pages wait for their writer.
#[test]
fn pages_of_a_lost_peer_are_released_when_nothing_can_write_to_them() {
    let key = key(1, 0);
    let mut end = loading(key, 0);
    say(&mut end, key, ToDecode::Heartbeat, 500_000);
    let lost_us = 500_000 + 3 * SECOND_US;
    end.handle_timeout(lost_us - 1);
    let beats = actions(&mut end);
    assert!(
        beats
            .iter()
            .all(|did| *did == send(key, ToPrefill::Heartbeat)),
        "{beats:?}"
    );
    end.handle_timeout(lost_us);
    let mut expected = vec![DecodeAction::MarkSuspect { node: PREFILL }];
    expected.extend(quarantine(key, Some(AbortReason::PeerLost)));
    assert_eq!(actions(&mut end), expected);
    assert_eq!(end.stats().num_quarantined, 1);
    // An hour later no report says that writing has stopped.
    end.handle_timeout(3600 * SECOND_US);
    assert_eq!(actions(&mut end), []);
    end.handle_load_cancelled(key, 3601 * SECOND_US);
    assert_eq!(actions(&mut end), [DecodeAction::Release { key }]);
    end.handle_load_cancelled(key, 3602 * SECOND_US);
    assert_eq!(actions(&mut end), []);
    assert_eq!(end.stats().num_sessions, 0);
}

/// Rule 39: all streams from a node have closed before it has been silent for three seconds.
#[test]
fn sessions_of_a_peer_end_with_its_streams_and_others_go_on() {
    let (lost, beside) = (key(1, 0), key(2, 0));
    let mut end = loading(lost, 0);
    for message in [
        ToDecode::Hello(Box::new(hello(5))),
        ToDecode::Allocate(Box::new(allocate())),
    ] {
        end.handle_message(NodeId(8), beside, message, 0);
    }
    end.handle_reserved(beside, Ok(reserved(4)), 0);
    actions(&mut end);
    end.handle_stream_closed(lost, 10);
    let mut expected = vec![DecodeAction::MarkSuspect { node: PREFILL }];
    expected.extend(quarantine(lost, None));
    assert_eq!(actions(&mut end), expected);
    assert_eq!(end.stats().num_quarantined, 1);
    end.handle_load_done(beside, 20);
    let done = DecodeAction::Send {
        key: beside,
        message: ToPrefill::LoadDone,
    };
    assert_eq!(actions(&mut end), [done]);
}

/// Rule 49.
#[test]
fn a_node_that_drains_takes_no_session_and_finishes_what_it_has() {
    let (begun, late) = (key(1, 0), key(2, 0));
    let hello = || ToDecode::Hello(Box::new(hello(5)));
    let mut end = loading(begun, 0);
    end.set_draining(true);
    assert_eq!(actions(&mut end), []);
    let did = say(&mut end, late, hello(), 1);
    let refused = send(late, ToPrefill::Refused(Refusal::Draining));
    assert_eq!(did[1..], [refused, DecodeAction::CloseStream { key: late }]);
    end.handle_load_done(begun, 2);
    assert_eq!(actions(&mut end), [send(begun, ToPrefill::LoadDone)]);
    let first = ToDecode::FirstToken(first_token(3));
    let arrived = DecodeAction::Arrived {
        key: begun,
        first_token: first_token(3),
    };
    assert_eq!(say(&mut end, begun, first, 3), [arrived]);
    end.set_draining(false);
    open(&mut end, key(3, 0), 4);
}

#[test]
fn a_heartbeat_is_sent_when_nothing_else_was_for_a_second() {
    let key = key(1, 0);
    let mut end = loading(key, 0);
    assert_eq!(end.poll_timeout(), Some(SECOND_US));
    end.handle_timeout(SECOND_US);
    assert_eq!(actions(&mut end), [send(key, ToPrefill::Heartbeat)]);
    assert_eq!(end.poll_timeout(), Some(2 * SECOND_US));
}

/// Fault 7: the base time and the time for the bytes run from the first token on.
#[test]
fn a_load_has_the_time_that_its_bytes_need_from_the_first_token_on() {
    let key = key(1, 0);
    let mut end = loading(key, 0);
    let mut now_us = 0;
    while now_us < 20 * SECOND_US {
        now_us += SECOND_US;
        say(&mut end, key, ToDecode::Heartbeat, now_us);
        end.handle_timeout(now_us);
    }
    actions(&mut end);
    say(&mut end, key, ToDecode::FirstToken(first_token(3)), now_us);
    // Ten rows of 100 kB at 1 MB/s, and a second.
    let by_us = now_us + 2 * SECOND_US;
    end.handle_timeout(by_us - 1);
    actions(&mut end);
    end.handle_timeout(by_us);
    assert_eq!(
        actions(&mut end),
        quarantine(key, Some(AbortReason::LoadTimedOut))
    );
}

#[test]
fn a_first_token_that_does_not_come_ends_the_session_at_its_deadline() {
    let key = key(1, 0);
    let mut end = loading(key, 0);
    for second in 1..60 {
        say(&mut end, key, ToDecode::Heartbeat, second * SECOND_US);
        end.handle_timeout(second * SECOND_US);
    }
    actions(&mut end);
    end.handle_timeout(60 * SECOND_US);
    let expected = quarantine(key, Some(AbortReason::FirstTokenTimedOut));
    assert_eq!(actions(&mut end), expected);
}

#[test]
fn a_failed_load_needs_no_quarantine() {
    let key = key(1, 0);
    let mut end = loading(key, 0);
    end.handle_load_failed(key, 1);
    let told = send(key, ToPrefill::Abort(AbortReason::LoadFailed));
    let close = DecodeAction::CloseStream { key };
    assert_eq!(
        actions(&mut end),
        [told, close, DecodeAction::Release { key }]
    );
}

#[test]
fn a_reservation_that_comes_after_the_end_is_released_at_once() {
    let (mut end, key) = (end(), key(1, 0));
    say(&mut end, key, ToDecode::Hello(Box::new(hello(5))), 0);
    say(&mut end, key, ToDecode::Allocate(Box::new(allocate())), 0);
    let did = say(&mut end, key, ToDecode::Abort(AbortReason::Cancelled), 1);
    assert_eq!(did, [DecodeAction::CloseStream { key }]);
    end.handle_reserved(key, Ok(reserved(0)), 2);
    assert_eq!(actions(&mut end), [DecodeAction::Release { key }]);
    assert_eq!(end.stats().num_sessions, 0);
}

/// Fault 14: a late message of the earlier incarnation has no effect.
#[test]
fn a_restarted_peer_ends_its_earlier_sessions_at_once() {
    let (old, mut new) = (key(1, 0), key(2, 0));
    new.prefill_incarnation = Incarnation(6);
    let mut end = loading(old, 0);
    let did = say(&mut end, new, ToDecode::Hello(Box::new(hello(6))), 1);
    assert_eq!(did[1..], quarantine(old, None));
    let late = key(3, 0);
    let did = say(&mut end, late, ToDecode::Hello(Box::new(hello(5))), 2);
    let refused = send(late, ToPrefill::Refused(Refusal::StaleIncarnation));
    assert_eq!(did[1], refused);
    assert_eq!(end.stats().num_sessions, 2);
}

#[test]
fn a_peer_of_another_model_is_refused_and_of_other_weights_is_not() {
    let mut end = end();
    let mut other = hello(5);
    other.weight_format = "int4".into();
    other.kv_format = "int8".into();
    other.page_size = 32;
    assert_eq!(hello(5).check(&other), Ok(()));
    other.model_fingerprint = 99;
    let key = key(1, 0);
    let did = say(&mut end, key, ToDecode::Hello(Box::new(other)), 0);
    let refusal = Refusal::Incompatible(Mismatch::Model(11, 99));
    assert_eq!(did[1], send(key, ToPrefill::Refused(refusal)));
    assert_eq!(end.stats().num_sessions, 0);
}

/// An error that would occur on any node ends the request. Other requests continue on another node.
#[test]
fn a_request_that_the_node_cannot_serve_goes_back() {
    let ends = [
        (RequestError::PoolExhausted { num_pages: 9 }, true),
        (RequestError::StepFailed("disk".into()), true),
        (RequestError::NotDrawn("NaN".into()), false),
    ];
    for (error, goes_back) in ends {
        let key = key(1, 0);
        let mut end = loading(key, 0);
        say(&mut end, key, ToDecode::FirstToken(first_token(3)), 1);
        end.handle_load_done(key, 1);
        actions(&mut end);
        let finish = Some(FinishReason::Error(error));
        end.handle_local_output(key, output(0, None, finish), 2);
        let did = actions(&mut end);
        let DecodeAction::Send { message, .. } = &did[0] else {
            panic!("{did:?}");
        };
        assert_eq!(matches!(message, ToPrefill::Abort(_)), goes_back, "{did:?}");
        assert_eq!(did[1..], [DecodeAction::CloseStream { key }]);
    }
}

/// Makes session `session` ask for its prompt as another choice of session 1.
fn join(end: &mut DecodeEnd, session: u128, now_us: u64) -> Vec<DecodeAction> {
    let key = key(session, 0);
    say(end, key, ToDecode::Hello(Box::new(hello(5))), now_us);
    let mut allocate = allocate();
    allocate.siblings = Some(SessionId(1));
    say(end, key, ToDecode::Allocate(Box::new(allocate)), now_us)
}

fn reserves(action: &DecodeAction) -> Option<SessionKey> {
    match action {
        DecodeAction::Reserve { key, .. } => Some(*key),
        _ => None,
    }
}

/// The messages to a choice that has to wait for another one.
fn waits(session: u128) -> [DecodeAction; 1] {
    let allocated = Allocated {
        num_cached_rows: 0,
        granted_as: None,
    };
    [send(key(session, 0), ToPrefill::Allocated(allocated))]
}

#[test]
fn choices_of_one_prompt_wait_for_the_first_to_have_used_its_rows() {
    let mut end = end();
    let did = join(&mut end, 1, 0);
    assert_eq!(reserves(&did[0]), Some(key(1, 0)));
    end.handle_reserved(key(1, 0), Ok(reserved(0)), 0);
    actions(&mut end);
    assert_eq!(join(&mut end, 2, 1), waits(2));
    assert_eq!(join(&mut end, 3, 1), waits(3));
    let first = || ToDecode::FirstToken(first_token(3));
    assert_eq!(say(&mut end, key(2, 0), first(), 2), []);
    assert_eq!(say(&mut end, key(1, 0), first(), 2), []);
    end.handle_load_done(key(1, 0), 3);
    let has_used = actions(&mut end).iter().filter_map(reserves).count();
    assert_eq!(has_used, 0, "no step has put its pages into the tree");
    end.handle_local_output(key(1, 0), output(0, Some(4), None), 4);
    let did: Vec<_> = actions(&mut end).iter().filter_map(reserves).collect();
    assert_eq!(did, [key(2, 0), key(3, 0)]);
    // Whole pages are present, and one choice already has its first token.
    end.handle_reserved(key(2, 0), Ok(reserved(8)), 5);
    let did = actions(&mut end);
    assert_eq!(did[0], send(key(2, 0), ToPrefill::Allocated(reserved(8))));
    assert!(matches!(did[1], DecodeAction::Load { first_row: 8, .. }));
    end.handle_load_done(key(2, 0), 6);
    let arrived = DecodeAction::Arrived {
        key: key(2, 0),
        first_token: first_token(3),
    };
    assert_eq!(actions(&mut end)[1], arrived);
    // The third choice has no room after all, and is returned.
    end.handle_reserved(key(3, 0), Err(Refusal::Exhausted), 6);
    let told = ToPrefill::Abort(AbortReason::OutOfPages);
    assert_eq!(actions(&mut end)[0], send(key(3, 0), told));
    // The next choice finds the pages.
    let did = join(&mut end, 4, 7);
    assert_eq!(reserves(&did[0]), Some(key(4, 0)));
}

#[test]
fn another_choice_gets_the_rows_when_the_first_is_over_or_takes_too_long() {
    let mut end = end();
    join(&mut end, 1, 0);
    assert_eq!(join(&mut end, 2, 0), waits(2));
    assert_eq!(join(&mut end, 3, 0), waits(3));
    assert_eq!(join(&mut end, 4, 0), waits(4));
    // A waiting choice leaves no state behind.
    let gone = say(
        &mut end,
        key(3, 0),
        ToDecode::Abort(AbortReason::Cancelled),
        1,
    );
    assert_eq!(gone, [DecodeAction::CloseStream { key: key(3, 0) }]);
    let did = say(
        &mut end,
        key(1, 0),
        ToDecode::Abort(AbortReason::Finished),
        2,
    );
    let did: Vec<_> = did.iter().filter_map(reserves).collect();
    assert_eq!(did, [key(2, 0)]);
    // The rows of choice 2 do not arrive, and choice 4 has its first token.
    say(&mut end, key(4, 0), ToDecode::FirstToken(first_token(3)), 3);
    let late_us = 3 + config().load_timeout_us(NUM_ROWS);
    end.handle_timeout(late_us - 1);
    assert!(!actions(&mut end).iter().any(|did| reserves(did).is_some()));
    end.handle_timeout(late_us);
    let did: Vec<_> = actions(&mut end).iter().filter_map(reserves).collect();
    assert_eq!(did, [key(4, 0)]);
}
